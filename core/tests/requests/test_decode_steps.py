"""Decode steps planned over arrays are those planned row by row, in every kind of space."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcore.requests.steps
from kvcore.errors import CapacityError, PromptTooLongError, RequestError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import INDEX_SPACES, SequenceSpace
from kvcore.requests.stepplan import StepPlan
from kvcore.requests.steps import StepBook

SPACES = {space.kind: space() for space in INDEX_SPACES}
SPECS = (
    SpaceSpec("full", "sequence", "page", 4),
    SpaceSpec("swa", "window", "page", 2, (("window", 5),)),
    SpaceSpec("csa", "compressed", "row", 3),
    SpaceSpec("ring", "ring", "row", 0, (("ring", 5), ("window", 4))),
    SpaceSpec("state", "per_request", "state_slot", 0),
    SpaceSpec("scale", "constant", "state_slot", 0),
)


def make(units: int = 400, *specs: SpaceSpec) -> Manager:
    return Manager([RangeBudget(s.name, "u", s, units, 0, (f"{s.name}/x",)) for s in specs or SPECS], SPACES)


class Watch:
    """How steps are planned, with arrays from the first row on or never."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch, self.plain = monkeypatch, 0
        plan = StepBook.open_decode

        def watched(book: StepBook, requests: list) -> StepPlan | None:
            made = plan(book, requests)
            self.plain += made is not None
            return made

        monkeypatch.setattr(StepBook, "open_decode", watched)

    def arrays(self, on: bool) -> None:
        self.monkeypatch.setattr(kvcore.requests.steps, "_MANY_ROWS", 1 if on else 10**9)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def shape(plan: StepPlan) -> list[object]:
    """All of a plan but which of the free units were taken."""
    return [plan.rows, *((p.group, p.indptr.tolist(), len(p.fresh), len(p.copies_src)) for p in plan.ranges)]


def facts(m: Manager) -> list[object]:
    m.check_integrity()
    return [m.stats(), *((r.id, r.length, r.reserved, r.state) for r in m.requests)]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 23), min_size=1, max_size=6),
    steps=st.integers(1, 14),
    forks=st.booleans(),
    rejects=st.sets(st.integers(0, 13)),
    leaves=st.integers(0, 30),
)
def test_both_ways_agree(prompts: list[int], steps: int, forks: bool, rejects: set[int], leaves: int) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        watch = Watch(monkeypatch)
        two = {True: make(), False: make()}
        names = [f"r{n}" for n in range(len(prompts))]
        for m in two.values():
            for name, tokens in zip(names, prompts, strict=True):
                m.admit(name, tokens)
                m.commit(m.plan_step([(name, tokens)]))
            if forks:
                m.fork("r0", "fork", prompts[0])
        live = [*names, *(["fork"] if forks else [])]
        for turn in range(steps):
            shapes = []
            for arrays, m in two.items():
                watch.arrays(arrays)
                plan = m.plan_step([(name, 1) for name in live])
                shapes.append(shape(plan))
                for part in plan.ranges:
                    owner = [name for row, name in enumerate(live) for _ in range(len(part.row(row)))]
                    mine = np.concatenate(
                        [m.units(name, part.group, "u")[: len(part.row(n))] for n, name in enumerate(live)]
                    )
                    assert mine.tolist() == part.units.tolist(), owner
                if turn == leaves:
                    m.release(live[-1])
                    m.commit(plan)
                elif turn in rejects:
                    m.abandon(plan, ran=False)
                else:
                    m.commit(plan)
            assert shapes[0] == shapes[1]
            if turn == leaves:
                live.pop()
            assert facts(two[True]) == facts(two[False])
            if not live:
                break
        assert watch.plain or forks or not live
        for m in two.values():
            for name in live:
                m.release(name)
            assert all(part.used == 0 for part in m.stats().ranges)


def test_the_arrays_are_used(watch: Watch) -> None:
    watch.arrays(True)
    m = make()
    for name in "abc":
        m.admit(name, 3)
        m.commit(m.plan_step([(name, 3)]))
    assert watch.plain == 0, "prompts are not"
    for _ in range(10):
        m.commit(m.plan_step([(name, 1) for name in "abc"]))
    assert watch.plain == 10
    m.fork("a", "d", m.get("a").length)
    m.commit(m.plan_step([(name, 1) for name in "abcd"]))
    assert watch.plain == 10, "shared units are copied, row by row"
    m.commit(m.plan_step([(name, 1) for name in "abcd"]))
    assert watch.plain == 11
    m.commit(m.plan_step([("a", 1), ("b", 1)], speculative=True))
    assert watch.plain == 11


@pytest.mark.parametrize("arrays", [True, False])
def test_refusals_change_nothing(watch: Watch, arrays: bool) -> None:
    watch.arrays(arrays)
    m = make(6, SPECS[0])  # five pages of four tokens
    for name in "ab":
        m.admit(name, 8)
        m.commit(m.plan_step([(name, 8)]))
    before = facts(m)
    with pytest.raises(CapacityError) as error:
        m.plan_step([("a", 1), ("b", 1)])
    assert (error.value.fields["needed"], error.value.fields["free"]) == (2, 1)
    with pytest.raises(RequestError, match="twice"):
        m.plan_step([("a", 1), ("a", 1)])
    with pytest.raises(RequestError, match="no such request"):
        m.plan_step([("a", 1), ("c", 1)])
    assert facts(m) == before
    m.release("b")
    for _ in range(12):
        m.commit(m.plan_step([("a", 1)]))
    before = facts(m)
    with pytest.raises(PromptTooLongError):
        m.plan_step([("a", 1)])
    assert facts(m) == before


def test_a_shared_page_is_found_though_another_row_grows(watch: Watch) -> None:
    """What was taken for the one is given back before both are planned row by row."""
    watch.arrays(True)
    m = make(12, SPECS[0])
    m.admit("a", 6)
    m.commit(m.plan_step([("a", 6)]))
    m.admit("b", 8)
    m.commit(m.plan_step([("b", 8)]))
    m.fork("a", "c", 6)
    plan = m.plan_step([("b", 1), ("a", 1)])
    assert watch.plain == 0
    assert len(plan.of("full", "u").copies_src) == 1
    m.commit(plan)
    m.check_integrity()
    for name in "abc":
        m.release(name)
    assert m.stats().ranges[0].used == 0


def filled(m: Manager, name: str, tokens: int) -> None:
    m.admit(name, tokens, external=True)
    m.set_length(name, tokens)


def test_a_long_request_asks_of_its_own_lengths_only(watch: Watch) -> None:
    """Its first step would last for seconds, were every length below it asked for."""
    watch.arrays(True)
    asked = []

    class Counted(SequenceSpace):
        def num_units(self, spec: SpaceSpec, length: int) -> int:
            asked.append(length)
            return super().num_units(spec, length)

    pages = SpaceSpec("full", "sequence", "page", 1024)
    m = Manager([RangeBudget("full", "u", pages, 1100, 0, ("full/x",))], {"sequence": Counted()})
    filled(m, "a", 1 << 20)
    filled(m, "b", 100)
    m.commit(m.plan_step([("a", 1), ("b", 1)]))  # ends the filling
    asked.clear()
    for _ in range(3):
        m.commit(m.plan_step([("a", 1), ("b", 1)]))
    assert watch.plain == 3
    assert len(asked) < 1000


@pytest.mark.parametrize("arrays", [True, False])
def test_a_step_gives_back_what_was_dead_before_it(watch: Watch, arrays: bool) -> None:
    """A transfer that goes on past what was reserved first leaves units behind the window."""
    watch.arrays(arrays)
    m = make(40, SPECS[1])
    m.admit("a", 4, external=True)
    m.set_length("a", 4)
    m.reserve("a", 12)
    m.set_length("a", 16)
    m.fork("a", "b", 16)  # ends the filling
    m.release("b")
    m.commit(m.plan_step([("a", 1)]))
    live = [unit for unit in m.units("a", "swa", "u").tolist() if unit]
    assert len(live) <= 4, "ceil(5 / 2) + 1"
    m.check_integrity()


@pytest.mark.parametrize("arrays", [True, False])
def test_arrays_of_a_plan_are_its_own(watch: Watch, arrays: bool) -> None:
    watch.arrays(arrays)
    m = make(40, SPECS[0])
    m.admit("a", 6)
    m.commit(m.plan_step([("a", 6)]))
    plan = m.plan_step([("a", 1)])
    part = plan.of("full", "u")
    before = part.units.tolist()
    for array in (part.indptr, part.units, part.fresh, part.copies_src, part.copies_dst, part.trail):
        assert not array.flags.writeable
    m.commit(plan)
    m.release("a")
    assert part.units.tolist() == before
