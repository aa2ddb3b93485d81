"""Engines, sides, managers and sessions under random faults: no wrong byte, no unit lost, every request ends once.

The engines of a round (one or two prefill, one to three decode, of one or two ranks each) admit, fork, compute, offer,
ask, decode, retract and resume on their own, over a wire and a copier that obey nobody. What is checked, and how, is in
``docs/faults.md``. A round that fails is run again with ``python -m benchmarks.chaos --seed N``.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.transfer.session.sender import SenderSession


def demand_sound(report: Any) -> None:
    assert not report.violations, "\n".join(report.words)
    assert report.outcomes["received"] > report.rounds, "the test must also see transfers that work"
    assert report.outcomes["decoded"] > report.rounds
    assert report.outcomes["receive failed"] > report.rounds


def test_without_faults_prompts_arrive(chaos: SimpleNamespace) -> None:
    """Nothing is broken: only what the end of the round cuts off may fail, and what waits for room too long."""
    report = chaos.run(range(4), calm=True)
    assert not report.violations, "\n".join(report.words)
    assert report.outcomes["received"] > 4 * 5
    assert report.outcomes["receive failed"] < report.outcomes["received"] / 4


def test_random_faults(chaos: SimpleNamespace) -> None:
    demand_sound(chaos.run(range(12)))


@pytest.mark.slow  # a hundred rounds a block
@pytest.mark.parametrize("block", [0, *(pytest.param(n, marks=pytest.mark.model) for n in (1, 2, 3))])
def test_random_faults_at_length(chaos: SimpleNamespace, block: int) -> None:
    """500 rounds with the ones above; every kind of fault happens."""
    first = 12 + block * 122
    report = chaos.run(range(first, first + 122))
    demand_sound(report)
    assert not [kind for kind in chaos.FAULTS if not report.faults[kind]], "a kind of fault never happened"


def test_a_round_is_its_seed(chaos: SimpleNamespace) -> None:
    """The same seed does the same things: what fails can be looked at again."""
    first, second = chaos.run([5]), chaos.run([5])
    assert (first.faults, first.outcomes) == (second.faults, second.outcomes)


def test_an_unexpected_error_is_reported(chaos: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(SenderSession, "_pulled", fail)
    assert chaos.run([0]).violations == {"unexpected error": 1}
