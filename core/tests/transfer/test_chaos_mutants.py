"""The chaos test is worth what it notices: each mutant takes one rule out of the protocol and must turn it red."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

ROUNDS = 80
RARE = {"trusts_any_instance", "ignores_attempts"}
"""Noticed too rarely: they need a late message that fits a later request. test_chaos_races.py writes those races down."""

FIRST = {
    "commits_after_the_end": 4, "frees_while_reading": 0, "accepts_uncommitted": 0, "keeps_what_a_lost_peer_had": 1,
    "commits_rank_by_rank": 2, "forgets_what_was_not_offered": 14, "releases_by_name": 7, "holds_nothing": 50,
}  # fmt: skip
"""A seed that noticed it when this was written, tried first to save time; any of the others may do."""


def test_every_mutant_is_tested(chaos: SimpleNamespace) -> None:
    assert {mutant.__name__ for mutant in chaos.MUTANTS} == {*FIRST, *RARE}


@pytest.mark.parametrize("name", FIRST)
def test_mutant_is_noticed(chaos: SimpleNamespace, name: str) -> None:
    mutant = next(item for item in chaos.MUTANTS if item.__name__ == name)
    with mutant():
        for seed in (FIRST[name], *range(ROUNDS)):
            report = chaos.run([seed])
            if report.violations:
                break
    assert set(report.violations) <= {"wrong bytes", "lost units", "broken rule"}, report.words
    assert report.violations, f"nothing was noticed in {ROUNDS} rounds"
