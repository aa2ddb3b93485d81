"""Unit allocator, against a model of plain sets and counters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import CapacityError, ConfigError, IntegrityError
from kvcore.requests.allocator import UnitAllocator


def test_null_unit_is_never_handed_out_and_ids_start_at_first():
    pool = UnitAllocator(5, first=100)
    assert (pool.capacity, pool.free_count, pool.null_unit) == (4, 4, 100)
    assert pool.allocate(4).tolist() == [101, 102, 103, 104]
    with pytest.raises(CapacityError) as error:
        pool.allocate(1)
    assert error.value.fields["needed"] == 1
    assert error.value.fields["free"] == 0


def test_best_fit_takes_the_smallest_run_that_holds_all():
    pool = UnitAllocator(31)
    pool.allocate(30)
    for run in (range(1, 11), range(12, 16), range(20, 27)):
        pool.release(list(run))
    assert pool.allocate(5).tolist() == [20, 21, 22, 23, 24]  # of 10, 4 and 7
    assert pool.allocate(4).tolist() == [12, 13, 14, 15]


def test_largest_runs_first_when_no_run_is_long_enough():
    pool = UnitAllocator(31)
    pool.allocate(30)
    for run in (range(1, 3), range(5, 11), range(13, 18), range(20, 23)):  # 2, 6, 5, 3
        pool.release(list(run))
    # 6 of the longest, then the remaining 2 from the run that fits them exactly: two runs, not four.
    assert pool.allocate(8).tolist() == [1, 2, 5, 6, 7, 8, 9, 10]
    assert pool.free_count == 8


def test_released_neighbours_merge_into_one_run():
    pool = UnitAllocator(10)
    pool.allocate(9)
    for ids in ([3], [5], [4], [8, 1], [2]):
        pool.release(ids)
    assert pool.allocate(5).tolist() == [1, 2, 3, 4, 5]


def test_released_units_are_reported_once_their_last_reference_goes():
    pool = UnitAllocator(6)
    ids = pool.allocate(3)
    pool.retain(ids[:2])
    assert pool.release(ids).tolist() == [ids[2]]
    assert pool.refcount(int(ids[0])) == 1
    assert pool.release(ids[:2]).tolist() == ids[:2].tolist()
    assert pool.free_count == 5
    pool.check_integrity()


def test_a_unit_named_twice_counts_twice():
    pool = UnitAllocator(4)
    (unit,) = pool.allocate(1).tolist()
    pool.retain([unit, unit])
    assert pool.refcount(unit) == 3
    assert pool.release([unit, unit]).tolist() == []
    pool.quarantine([unit, unit])
    assert pool.release([unit]).tolist() == [unit]
    assert pool.settle([unit]).tolist() == []
    assert pool.settle([unit]).tolist() == [unit]
    pool.check_integrity()


def test_quarantined_unit_is_not_allocatable_until_settled_as_often():
    pool = UnitAllocator(3)
    ids = pool.allocate(2)
    pool.quarantine(ids)
    pool.quarantine(ids[:1])
    assert pool.release(ids).tolist() == ids.tolist()
    assert (pool.free_count, pool.used_count, pool.quarantined_count) == (0, 0, 2)
    assert pool.settle(ids).tolist() == [ids[1]]
    assert pool.allocate(1).tolist() == [ids[1]]
    with pytest.raises(CapacityError):
        pool.allocate(1)
    assert pool.settle(ids[:1]).tolist() == [ids[0]]
    assert pool.allocate(1).tolist() == [ids[0]]


@pytest.mark.parametrize(
    ("call", "ids"),
    [
        ("release", [3, 3]),  # one reference each
        ("release", [3, 9]),  # 9 is free
        ("release", [3, 0]),  # null unit
        ("release", [3, 20]),
        ("release", [-1]),
        ("retain", [3, 9]),
        ("quarantine", [3, 9]),
        ("settle", [3]),
        ("release", np.array([3.0])),
        ("release", np.array([[3]])),
    ],
)
def test_misuse_is_an_integrity_error_and_changes_nothing(call, ids):
    """D3: counts never go below zero."""
    pool = UnitAllocator(12, name="full/pages")
    pool.allocate(4)
    before = (pool.free_units().tolist(), pool.refcounts(range(12)).tolist(), pool.holds().tolist())
    with pytest.raises(IntegrityError) as error:
        getattr(pool, call)(ids)
    assert error.value.fields["name"] == "full/pages"
    assert before == (pool.free_units().tolist(), pool.refcounts(range(12)).tolist(), pool.holds().tolist())
    pool.check_integrity()


def test_bad_sizes():
    with pytest.raises(ConfigError):
        UnitAllocator(0)
    with pytest.raises(IntegrityError):
        UnitAllocator(4).allocate(-1)
    assert UnitAllocator(4).allocate(0).tolist() == []
    with pytest.raises(CapacityError):
        UnitAllocator(1).allocate(1)


def _break_refs(pool):
    pool._refs[2] = 0


def _break_negative(pool):
    pool._refs[2] = -1


def _break_null(pool):
    pool._refs[0] = 1


def _break_runs(pool):
    pool._free._stop_of[4] += 1


def _break_lost(pool):
    pool._free.take(1)


@pytest.mark.parametrize("harm", [_break_refs, _break_negative, _break_null, _break_runs, _break_lost])
def test_check_integrity_sees_each_kind_of_damage(harm):
    pool = UnitAllocator(8)
    pool.allocate(3)
    pool.check_integrity()
    harm(pool)
    with pytest.raises(IntegrityError):
        pool.check_integrity()


class AllocatorMachine(RuleBasedStateMachine):
    """Oracle: a counter of references, a counter of quarantines, and the set of all ids."""

    @initialize(size=st.integers(1, 24), first=st.integers(0, 50))
    def start(self, size, first):
        self.pool = UnitAllocator(size, first=first)
        self.all = set(range(first + 1, first + size))
        self.refs: Counter[int] = Counter()
        self.holds: Counter[int] = Counter()

    def free(self):
        return {unit for unit in self.all if not self.refs[unit] and not self.holds[unit]}

    def longest_run(self):
        free, best, run = self.free(), 0, 0
        for unit in sorted(self.all):
            run = run + 1 if unit in free else 0
            best = max(best, run)
        return best

    @rule(n=st.integers(0, 12))
    def allocate(self, n):
        free, longest = self.free(), self.longest_run()
        if n > len(free):
            with pytest.raises(CapacityError):
                self.pool.allocate(n)
            return
        ids = self.pool.allocate(n).tolist()
        assert len(set(ids)) == n
        assert set(ids) <= free
        assert ids == sorted(ids)
        if 0 < n <= longest:
            assert ids[-1] - ids[0] == n - 1, "one contiguous run was free"
        self.refs.update(ids)

    def _pick(self, data, counter):
        held = sorted(counter.elements())
        return data.draw(st.lists(st.sampled_from(held), max_size=6)) if held else []

    @rule(data=st.data())
    def retain(self, data):
        ids = self._pick(data, self.refs)
        self.pool.retain(ids)
        self.refs.update(ids)

    @rule(data=st.data())
    def release(self, data):
        ids = self._pick(data, self.refs)
        if any(n > self.refs[unit] for unit, n in Counter(ids).items()):
            with pytest.raises(IntegrityError):
                self.pool.release(ids)
            return
        gone = self.pool.release(ids).tolist()
        self.refs.subtract(ids)
        assert gone == sorted({unit for unit in ids if not self.refs[unit]})

    @rule(data=st.data())
    def quarantine(self, data):
        ids = self._pick(data, +(self.refs | self.holds))
        self.pool.quarantine(ids)
        self.holds.update(ids)

    @precondition(lambda self: any(self.holds.values()))
    @rule(data=st.data())
    def settle(self, data):
        before = self.free()
        ids = self._pick(data, self.holds)
        if any(n > self.holds[unit] for unit, n in Counter(ids).items()):
            with pytest.raises(IntegrityError):
                self.pool.settle(ids)
            return
        gone = self.pool.settle(ids).tolist()
        self.holds.subtract(ids)
        assert gone == sorted(self.free() - before)

    @invariant()
    def agrees(self):
        self.pool.check_integrity()
        assert self.pool.free_units().tolist() == sorted(self.free())
        assert self.pool.free_count == len(self.free())
        assert all(self.pool.refcount(unit) == self.refs[unit] for unit in self.all)
        assert self.pool.refcount(self.pool.null_unit) == 0


AllocatorMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAllocator = AllocatorMachine.TestCase
