"""A ring moves with the rows that its window needs, and nobody reads one that did not move: tokens by row, with poison."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.contract import IndexSpace
from kvcore.errors import CapacityError, RequestError, UnsupportedError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import INDEX_SPACES
from kvcore.retraction.fit import saved_bytes

SPACES: dict[str, IndexSpace] = {space.kind: space() for space in INDEX_SPACES}
POISON = -7


def ring(rows: int, window: int | None = None) -> SpaceSpec:
    return SpaceSpec("ring", "ring", "row", 0, (("ring", rows), *((("window", window),) if window else ())))


@dataclass
class Side:
    """A manager, and what lies in every row: the number of a token, 0 where it is zeroed, or poison."""

    rows: int
    window: int
    history: dict[str, list[int]] = field(default_factory=dict)
    tokens: int = 0

    def __post_init__(self) -> None:
        budgets = [
            RangeBudget("full", "units", SpaceSpec("full", "sequence", "page", 1), 400, 0, ("full/kv",)),
            RangeBudget("ring", "units", ring(self.rows, self.window), 9 * self.rows, 3, ("ring/kv",)),
        ]
        self.manager = Manager(budgets, SPACES)
        self.memory = np.full(9 * self.rows + 3, POISON)

    def step(self, name: str, count: int, accepted: int | None) -> None:
        """``accepted`` None: the step is abandoned after it ran."""
        manager, kept = self.manager, self.history[name]
        plan = manager.plan_step([(name, count)])
        part = plan.of("ring", "units")
        self.memory[part.copies_dst] = self.memory[part.copies_src]
        self.memory[part.fresh] = 0
        new = [self.tokens + n + 1 for n in range(count)]
        self.tokens += count
        units = manager.units(name, "ring", "units")
        for n, token in enumerate(new):
            self.memory[units[(len(kept) + n) % self.rows]] = token
        if accepted is None:
            manager.abandon(plan)
            return
        try:
            manager.commit(plan, [accepted])
        except UnsupportedError:
            manager.commit(plan)
            accepted = count
        self.history[name] = kept + new[:accepted]

    def save(self, name: str) -> list[tuple[int, int]]:
        """Logical row and what is in it, of all that moves."""
        found = []
        for payload in self.manager.payloads(name, 0, len(self.history[name]), last=True):
            if payload.group == "ring":
                found += [(payload.first + n, int(self.memory[unit])) for n, unit in enumerate(payload.ids.tolist())]
        assert len(dict(found)) == len(found)
        return found

    def load(self, name: str, saved: list[tuple[int, int]], history: list[int]) -> None:
        self.memory[self.manager.free_units("ring", "units")] = POISON
        self.manager.admit(name, len(history), external=True)
        table = self.manager.destinations(name, len(history))["ring", "units"]
        assert np.flatnonzero(table >= 0).tolist() == [row for row, _ in saved]
        for row, token in saved:
            self.memory[table[row]] = token
        self.manager.set_length(name, len(history))
        self.history[name] = list(history)

    def check(self) -> None:
        self.manager.check_integrity()
        for name, tokens in self.history.items():
            length = len(tokens)
            assert self.manager.get(name).length == length
            if self.manager.get(name).state == "spoiled":
                continue
            units = self.manager.units(name, "ring", "units")
            for at in range(max(0, length - self.window + 1), length):
                assert self.memory[units[at % self.rows]] == tokens[at], (name, at)
            held = self.manager.slots(name, "ring", "units", 0, length)
            assert (held[max(0, length - self.window + 1) :] >= 0).all()
            for at in np.flatnonzero(held >= 0).tolist():
                assert self.memory[held[at]] == tokens[at], "a slot is named that holds no such token"


OPS = ["step", "step", "step", "abandon", "fork", "truncate", "rollback", "retract", "send", "release"]
CALLS = st.lists(
    st.tuples(st.sampled_from(OPS), st.integers(0, 1), st.integers(0, 9), st.integers(1, 14), st.integers(0, 14)),
    min_size=4,
    max_size=30,
)


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 8), spare=st.integers(0, 5), calls=CALLS)
def test_every_window_holds_its_tokens(rows: int, spare: int, calls: list[tuple[str, int, int, int, int]]) -> None:
    """Steps with rejections, forks, truncations, retractions and transfers to and fro: what is not refused is right."""
    sides = [Side(rows + spare, rows), Side(rows + spare, rows)]
    names = iter(f"r{n}" for n in range(100))
    for op, which, chosen, count, amount in calls:
        side = sides[which]
        manager = side.manager
        if not side.history:
            name = next(names)
            manager.admit(name, 1)
            side.history[name] = []
        name = sorted(side.history)[chosen % len(side.history)]
        length = len(side.history[name])
        try:
            if op in ("step", "abandon"):
                side.step(name, count, min(amount, count) if op == "step" else None)
            elif op == "fork":
                new = next(names)
                manager.fork(name, new, min(amount, length))
                side.history[new] = side.history[name][:amount]
            elif op in ("truncate", "rollback"):
                to = max(0, length - amount)
                manager.truncate(name, to) if op == "truncate" else manager.rollback(name, length - to)
                side.history[name] = side.history[name][:to]
            elif op == "release":
                manager.release(name)
                del side.history[name]
            elif length:
                saved, tokens = side.save(name), side.history[name]
                assert len(saved) == min(length, rows - 1)
                if op == "retract":
                    manager.release(name)
                    del side.history[name]
                    side.load(name, saved, tokens)
                else:
                    sides[1 - which].load(next(names), saved, tokens)
        except (UnsupportedError, CapacityError, RequestError):
            pass
        for each in sides:
            each.check()
            each.memory[each.manager.free_units("ring", "units")] = POISON


@pytest.mark.parametrize(
    ("rows", "window", "length", "parts"),
    [
        (8, 6, 0, []),
        (8, 6, 3, [(0, 3)]),
        (8, 6, 8, [(3, 8)]),
        (8, 6, 7, [(2, 7)]),
        (8, 6, 20, [(0, 4), (7, 8)]),
        (8, 6, 24, [(3, 8)]),
        (8, None, 20, [(0, 4), (5, 8)]),
        (8, 1, 20, []),
        (1, None, 5, []),
    ],
)
def test_the_last_chunk_lists_what_the_window_needs(
    rows: int, window: int | None, length: int, parts: list[tuple[int, int]]
) -> None:
    """By hand: 20 tokens in 8 rows, the newest in row 3; a query at 20 that sees 6 tokens reads 15 … 19."""
    manager = Manager([RangeBudget("ring", "units", ring(rows, window), 3 * rows, 0, ("ring/kv",))], SPACES)
    manager.admit("a", max(1, length))
    if length:
        manager.commit(manager.plan_step([("a", length)]))
    assert all(not payload.num_units for payload in manager.payloads("a", 0, length, last=False))
    payloads = manager.payloads("a", 0, length, last=True)
    assert [(p.first, p.stop) for p in payloads if p.num_units] == parts
    assert payloads, "a range without units has a payload too"
    table = manager.units("a", "ring", "units").tolist()
    assert [unit for p in payloads for unit in p.ids.tolist()] == [table[n] for lo, hi in parts for n in range(lo, hi)]
    if length:
        manager.admit("b", length, external=True)
        arriving = manager.destinations("b", length)["ring", "units"]
        assert np.flatnonzero(arriving >= 0).tolist() == [n for lo, hi in parts for n in range(lo, hi)]


def test_who_arrived_goes_back_no_further_than_that() -> None:
    """12 rows, window 4: where it was computed 20 tokens may go back to 12; where it arrived, to 20, and then from there."""
    here, there = Side(12, 4), Side(12, 4)
    here.manager.admit("a", 20)
    here.history["a"] = []
    here.step("a", 20, 20)
    assert here.manager.joint_prefix("a", 12) == 12
    there.load("a", here.save("a"), here.history["a"])
    assert there.manager.slots("a", "ring", "units", 0, 20)[:17].tolist() == [-1] * 17
    assert [there.manager.joint_prefix("a", at) for at in (20, 19, 12)] == [20, 0, 0]
    for call in (lambda: there.manager.truncate("a", 19), lambda: there.manager.fork("a", "b", 12)):
        with pytest.raises(UnsupportedError, match="overwritten"):
            call()
    there.step("a", 9, 1)  # as many rejected tokens as where it was computed
    there.check()
    assert there.manager.get("a").length == 21
    there.manager.fork("a", "b", 20)
    there.manager.truncate("b", 0)
    short = Side(12, 4)
    short.load("c", [(n, n + 1) for n in range(3)], [1, 2, 3])
    assert [short.manager.joint_prefix("c", at) for at in (3, 2, 1)] == [3, 2, 1], "all of it arrived"


def test_rows_that_did_not_arrive_are_zeroed_before_the_first_step() -> None:
    side = Side(5, 3)
    side.load("a", [(n, 9) for n in (0, 4)], list(range(1, 7)))
    plan = side.manager.plan_step([("a", 1)])
    units = side.manager.units("a", "ring", "units")
    assert plan.of("ring", "units").fresh.tolist() == units[[1, 2, 3]].tolist()


def test_a_backend_is_sized_for_what_is_saved() -> None:
    rows = region("x", "ring/kv", [Field("x", "u8", "byte", (Axis("byte", 16),))], ranges=("rows",))
    spec = ring(8, 6)
    layout = Layout("f", 1, "ring", (0, 1), (rows,), (spec,), (UnitRange("rows", "ring"),))
    assert [saved_bytes({"ring": layout}, SPACES, n) for n in (1, 4, 5, 6, 100)] == [32, 128, 160, 160, 160]


def test_truncated_tokens_stay_overwritten() -> None:
    """2 rows, window 2: token 2 lies where token 0 did. Back from 3 to 2 is fine, from there to 1 is not."""
    side = Side(2, 2)
    side.manager.admit("a", 3)
    side.history["a"] = []
    side.step("a", 3, 3)
    for back in (side.manager.truncate, lambda name, to: side.manager.rollback(name, 1)):
        side.manager.fork("a", "b", 3)
        back("b", 2)
        with pytest.raises(UnsupportedError, match="overwritten"):
            side.manager.truncate("b", 1)
        assert side.manager.slots("b", "ring", "units", 0, 2)[0] == -1
        side.manager.release("b")


def test_tokens_written_after_rejected_ones_are_there() -> None:
    """What was rejected lies where older tokens did, not where newer ones do: a request can always be forked as it is."""
    side = Side(2, 2)
    side.manager.admit("a", 1)
    side.history["a"] = []
    side.step("a", 3, 0)
    side.step("a", 1, 1)
    side.check()
    assert side.manager.joint_prefix("a", 1) == 1
    side.manager.fork("a", "b", 1)
