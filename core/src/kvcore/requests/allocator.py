"""Unit ids of one unit range: who holds which, and which are free (integers only).

A unit is *free* (allocatable) when nobody counts a reference to it and no copy still touches it. References are what
requests own; the quarantine counts copies that read or write a unit whatever its owners do meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvcore.errors import CapacityError, ConfigError, IntegrityError
from kvcore.layout import Int64Array

Ids = Int64Array | Sequence[int]


class UnitAllocator:
    """Hands out the ids ``first + 1 … first + num_units - 1``; ``first`` is the null unit and never leaves.

    Every call either does all it was asked or raises and changes nothing. Cost grows with the runs touched, never with
    the size of the range.

    Args:
        num_units: units of the range, the null unit included.
        first: region unit id of the null unit.
        name: for messages.
    """

    def __init__(self, num_units: int, *, first: int = 0, name: str = "") -> None:
        if num_units < 1 or first < 0:
            raise ConfigError("a unit range needs its null unit", name=name, num_units=num_units, first=first)
        self.name = name
        self._first = first
        self._num_units = num_units
        self._refs = np.zeros(num_units, np.int32)
        self._holds = np.zeros(num_units, np.int32)
        self._free = _FreeRuns()
        if num_units > 1:
            self._free.add(1, num_units)

    @property
    def capacity(self) -> int:
        """Units that can be allocated: all but the null unit."""
        return self._num_units - 1

    @property
    def free_count(self) -> int:
        """Units that can be allocated now."""
        return self._free.total

    @property
    def used_count(self) -> int:
        """Units with at least one reference."""
        return int(np.count_nonzero(self._refs))

    @property
    def quarantined_count(self) -> int:
        """Units without a reference that a copy still touches."""
        return int(np.count_nonzero((self._refs == 0) & (self._holds > 0)))

    @property
    def null_unit(self) -> int:
        """Id of the unit that unused table entries name."""
        return self._first

    def allocate(self, n: int) -> Int64Array:
        """Take ``n`` free units with one reference each; ascending ids.

        One contiguous run where there is one (the smallest that fits), else the largest runs first. Raises
        CapacityError when fewer are free.
        """
        if n < 0:
            raise IntegrityError("cannot allocate a negative number of units", name=self.name, needed=n)
        if n > self._free.total:
            raise CapacityError("not enough free units", name=self.name, needed=n, free=self._free.total)
        if n == 0:
            return np.empty(0, np.int64)
        local = _expand(sorted(self._free.take(n)))
        self._refs[local] = 1
        return self._ids(local)

    def retain(self, ids: Ids) -> None:
        """Count one more reference per entry of ``ids``. IntegrityError for units nobody holds."""
        local, counts = self._count(ids)
        self._demand(self._refs[local] > 0, local, "cannot share a unit that is not allocated")
        self._refs[local] += counts

    def release(self, ids: Ids) -> Int64Array:
        """Drop one reference per entry of ``ids``.

        Returns the ids whose last reference went: free now or, where quarantined, once settled. IntegrityError when a
        unit is released more often than it is referenced.
        """
        local, counts = self._count(ids)
        self._demand(self._refs[local] >= counts, local, "unit released more often than it is held")
        self._refs[local] -= counts
        gone = local[self._refs[local] == 0]
        self._give_back(gone[self._holds[gone] == 0])
        return self._ids(gone)

    def quarantine(self, ids: Ids) -> None:
        """Keep units from being allocated until :meth:`settle`, once per entry. IntegrityError for free units."""
        local, counts = self._count(ids)
        self._demand((self._refs[local] > 0) | (self._holds[local] > 0), local, "cannot quarantine a free unit")
        self._holds[local] += counts

    def settle(self, ids: Ids) -> Int64Array:
        """End one quarantine per entry of ``ids``; returns the ids that became free by it."""
        local, counts = self._count(ids)
        self._demand(self._holds[local] >= counts, local, "unit settled more often than it was quarantined")
        self._holds[local] -= counts
        gone = local[(self._holds[local] == 0) & (self._refs[local] == 0)]
        self._give_back(gone)
        return self._ids(gone)

    def refcount(self, unit: int) -> int:
        """References to a unit; 0 for the null unit."""
        return int(self.refcounts([unit])[0])

    def refcounts(self, ids: Ids) -> Int64Array:
        """References to each unit, ``int64 [N]``. IntegrityError for ids outside the range."""
        return self._refs[self._local(ids, null=True)].astype(np.int64)

    def shared(self, ids: Ids) -> bool:
        """Whether any of the units has more than one reference."""
        return bool((self._refs[self._local(ids, null=True)] > 1).any())

    def is_allocated(self, unit: int) -> bool:
        """Whether anyone holds a reference to the unit."""
        return self.refcount(unit) > 0

    def free_units(self) -> Int64Array:
        """Every id that can be allocated now, ascending."""
        return self._ids(_expand(sorted(self._free.runs())))

    def holds(self) -> Int64Array:
        """Quarantines per unit of the whole range, ``int64 [num_units]``, from the null unit on."""
        return self._holds.astype(np.int64)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless free + used + quarantined == capacity, unit by unit."""
        free = np.zeros(self._num_units, bool)
        for start, stop in self._free.runs():
            if start < 1 or stop > self._num_units or bool(free[start:stop].any()):
                raise IntegrityError("free runs overlap or leave the range", name=self.name, start=start, stop=stop)
            free[start:stop] = True
        expected = (self._refs == 0) & (self._holds == 0)
        expected[0] = False
        if self._refs[0] or self._holds[0]:
            raise IntegrityError("the null unit is held", name=self.name, unit=self._first)
        if int(self._refs.min()) < 0 or int(self._holds.min()) < 0:
            raise IntegrityError("a count went below zero", name=self.name)
        wrong = np.flatnonzero(free != expected)
        if len(wrong):
            raise IntegrityError("free list and counts disagree", name=self.name, units=_some(wrong + self._first))
        total = self.free_count + self.used_count + self.quarantined_count
        if total != self.capacity:
            raise IntegrityError("units are missing", name=self.name, expected=self.capacity, got=total)

    def _local(self, ids: Ids, *, null: bool = False) -> Int64Array:
        array = np.asarray(ids)
        if not array.size:
            return np.empty(0, np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise IntegrityError("unit ids are a list of integers", name=self.name, got=str(array.dtype))
        local: Int64Array = array.astype(np.int64) - self._first
        low = 0 if null else 1
        self._demand((local >= low) & (local < self._num_units), local, "not a unit of this range")
        return local

    def _ids(self, local: Int64Array) -> Int64Array:
        return np.add(local, self._first, dtype=np.int64)

    def _count(self, ids: Ids) -> tuple[Int64Array, npt.NDArray[np.int32] | int]:
        """Each unit once, ascending, and how often it stands in ``ids``."""
        local = np.sort(self._local(ids))
        if len(local) < 2 or bool((local[1:] > local[:-1]).all()):
            return local, 1
        unique, counts = np.unique(local, return_counts=True)
        return unique, counts.astype(np.int32)

    def _demand(self, ok: npt.NDArray[np.bool_], local: Int64Array, message: str) -> None:
        if not ok.all():
            raise IntegrityError(message, name=self.name, units=_some(local[~ok] + self._first))

    def _give_back(self, local: Int64Array) -> None:
        if len(local):
            cuts = np.flatnonzero(np.diff(local) != 1) + 1
            starts = local[np.concatenate(([0], cuts))]
            stops = local[np.concatenate((cuts - 1, [len(local) - 1]))] + 1
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
                self._free.add(start, stop)


class _FreeRuns:
    """Disjoint, maximal runs ``[start, stop)``, found by either end or by length."""

    def __init__(self) -> None:
        self.total = 0
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # A dict keeps insertion order, so the choice among equal runs is the same in every process. There are at most
        # sqrt(2 n) different lengths, which keeps the sorted list short however fragmented the range is.
        self._by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []

    def runs(self) -> list[tuple[int, int]]:
        return list(self._stop_of.items())

    def add(self, start: int, stop: int) -> None:
        """Add a run, merged with its neighbours."""
        self.total += stop - start
        before = self._start_of.get(start)
        if before is not None:
            self._unlink(before, start)
            start = before
        after = self._stop_of.get(stop)
        if after is not None:
            self._unlink(stop, after)
            stop = after
        self._link(start, stop)

    def take(self, n: int) -> list[tuple[int, int]]:
        """Remove ``n <= total`` units; returns the runs they form."""
        self.total -= n
        taken = []
        while n:
            fit = bisect_left(self._lengths, n)
            length = self._lengths[fit] if fit < len(self._lengths) else self._lengths[-1]
            start, _ = self._by_length[length].popitem()  # the newest: finding the oldest would skip every removed one
            self._unlink(start, start + length)
            count = min(n, length)
            if count < length:
                self._link(start + count, start + length)
            taken.append((start, start + count))
            n -= count
        return taken

    def _link(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        length = stop - start
        if length not in self._by_length:
            self._by_length[length] = {}
            insort(self._lengths, length)
        self._by_length[length][start] = None

    def _unlink(self, start: int, stop: int) -> None:
        del self._stop_of[start], self._start_of[stop]
        length = stop - start
        bucket = self._by_length[length]
        bucket.pop(start, None)
        if not bucket:
            del self._by_length[length]
            del self._lengths[bisect_left(self._lengths, length)]


def _expand(runs: Sequence[tuple[int, int]]) -> Int64Array:
    """Unit ids of runs, in order, without a loop over units."""
    if not runs:
        return np.empty(0, np.int64)
    starts, stops = np.array(runs, np.int64).T
    counts = stops - starts
    ends = np.cumsum(counts)
    shift: Int64Array = np.repeat(starts - (ends - counts), counts)
    shift += np.arange(len(shift))
    return shift


def _some(units: Int64Array) -> list[int]:
    return [int(unit) for unit in units[:8]]
