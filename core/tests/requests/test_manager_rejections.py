"""Tokens that are rejected leave nothing behind, and a state that was kept is shared."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import UnsupportedError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import INDEX_SPACES

SPACES = {space.kind: space() for space in INDEX_SPACES}
FULL = SpaceSpec("full", "sequence", "page", 1)
STATE = SpaceSpec("state", "per_request", "state_slot", 0)


def window(size: int, page: int) -> SpaceSpec:
    return SpaceSpec("swa", "window", "page", page, (("window", size),))


def make(*specs: SpaceSpec, units: int = 64) -> Manager:
    return Manager([RangeBudget(spec.name, "units", spec, units, 0, (f"{spec.name}/x",)) for spec in specs], SPACES)


def used(m: Manager) -> dict[str, int]:
    return {part.group: part.used for part in m.stats().ranges}


def run(m: Manager, count: int, accepted: int | None = None, name: str = "a") -> None:
    m.commit(m.plan_step([(name, count)]), None if accepted is None else [accepted])


@pytest.mark.parametrize("admitted", [1, 9])
def test_units_of_rejected_tokens_come_back(admitted: int) -> None:
    """Nine drafted and one accepted, thirteen drafted and one accepted: two tokens, and no page of the other twenty."""
    m = make(FULL, window(4, 1))
    m.admit("a", admitted)
    run(m, 9, 1)
    run(m, 13, 1)
    assert m.get("a").length == 2
    assert used(m)["swa"] <= 5
    assert used(m)["full"] == max(2, admitted), "what was reserved before the steps stays"
    m.check_integrity()
    m.release("a")
    assert used(m) == {"full": 0, "swa": 0}


@settings(max_examples=80, deadline=None)
@given(
    size=st.integers(1, 9),
    page=st.integers(1, 4),
    steps=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=12),
    reserve=st.integers(0, 20),
)
def test_sizing_holds_with_rejections_in_every_step(
    size: int, page: int, steps: list[tuple[int, int]], reserve: int
) -> None:
    m = make(SpaceSpec("full", "sequence", "page", page), window(size, page), units=400)
    m.admit("a", 1)
    length = 0
    for count, accepted in steps:
        run(m, count, min(accepted, count))
        length += min(accepted, count)
        assert used(m)["full"] == -(-max(length, 1) // page)
        assert used(m)["swa"] <= -(-size // page) + 1
        m.check_integrity()
    m.reserve("a", reserve)
    before = used(m)["full"]
    run(m, 3, 0)
    assert used(m)["full"] == before, "a reservation outlives rejected tokens"


def test_a_shared_page_of_rejected_tokens_is_its_other_owners() -> None:
    m = make(SpaceSpec("full", "sequence", "page", 4))
    m.admit("a", 6)
    run(m, 6)
    m.fork("a", "b", 6)
    run(m, 9, 1, name="b")  # into a copy of the second page, and two more
    assert used(m)["full"] == 3
    assert m.units("a", "full", "units").tolist() != m.units("b", "full", "units").tolist()
    m.release("b")
    m.check_integrity()
    assert used(m)["full"] == 2


def checkpointed() -> Manager:
    m = make(SpaceSpec("full", "sequence", "page", 16), STATE)
    m.admit("a", 200)
    for stop, start in ((64, 0), (192, 64), (200, 192)):
        run(m, stop - start)
        if stop != 200:
            m.checkpoint("a")
    return m


def test_a_checkpoint_takes_part_in_the_joint_prefix() -> None:
    m = checkpointed()
    want = {63: 0, 64: 64, 96: 64, 191: 64, 192: 192, 199: 192, 200: 200, 500: 200}
    assert {at: m.joint_prefix("a", at) for at in want} == want


def test_a_fork_at_a_checkpoint_has_its_state() -> None:
    """The state kept at 64, not the one of 200; and it is the fork's own from its first step on."""
    m = checkpointed()
    (now,) = m.units("a", "state", "units").tolist()
    m.fork("a", "b", 64)
    (kept,) = m.units("b", "state", "units").tolist()
    assert kept != now
    assert m.units("b", "full", "units").tolist() == m.units("a", "full", "units").tolist()[:4]
    plan = m.plan_step([("b", 3)])
    part = plan.of("state", "units")
    assert part.copies_src.tolist() == [kept]
    m.commit(plan)
    assert m.units("b", "state", "units").tolist() != [kept]
    m.check_integrity()
    m.rollback("a", 200 - 64)  # the checkpoint is still the parent's
    assert m.units("a", "state", "units").tolist() == [kept]
    for name in "ab":
        m.release(name)
    assert used(m) == {"full": 0, "state": 0}


def test_a_truncation_still_needs_the_exact_length() -> None:
    """It would keep the table's own state, which is that of 200 tokens."""
    m = checkpointed()
    with pytest.raises(UnsupportedError):
        m.truncate("a", 64)
    for at in (63, 65, 100):
        with pytest.raises(UnsupportedError):
            m.fork("a", "b", at)
    m.drop_checkpoints("a")
    assert m.joint_prefix("a", 96) == 0
