"""Steps of one new token a row, planned and settled over arrays of rows (integers only).

Most steps of an engine are these, with hundreds of rows, and few of the rows need anything new: a unit at every page's end.
What a step writes and what falls dead by it depends on a row's length alone, so it is asked of the index space once for each
length and then looked up for all rows at once. Whatever is not plain (a shared unit, a shortage) is left to
:mod:`kvcore.requests.steps`, which plans row by row and says what is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvcore.layout import Int64Array
from kvcore.requests.ranges import ManagedRange, RangeSet, join
from kvcore.requests.stepplan import RangePlan
from kvcore.requests.table import RangeKey, Request

_BLOCK = 64
"""Lengths that are asked for at once."""

_NONE = np.empty(0, np.int64)
_ZERO = np.zeros(1, np.int64)


class Lengths:
    """What one more token does to a request of a range, by its length.

    Known for the blocks of lengths that requests had: a long one does not cost every length below its own.
    """

    def __init__(self, part: ManagedRange) -> None:
        self._part = part
        self._row = np.empty(0, np.int64)  # block → its first row in the table, -1 for one not asked for yet
        self._table = np.empty((_BLOCK, 4), np.int64)
        self._used = 0

    def at(self, lengths: Int64Array) -> tuple[Int64Array, ...]:
        """For each length: the logical units ``[lo, hi)`` that the next token writes, and where eviction ends before and
        after it."""
        blocks = lengths // _BLOCK
        end = int(blocks.max(initial=-1)) + 1
        if end > len(self._row):
            self._row = np.concatenate((self._row, np.full(end - len(self._row), -1, np.int64)))
        rows = self._row[blocks]
        if np.any(rows < 0):
            self._ask(np.unique(blocks[rows < 0]).tolist())
            rows = self._row[blocks]
        return tuple(np.ascontiguousarray(self._table[rows + lengths % _BLOCK].T))

    def _ask(self, blocks: list[int]) -> None:
        part = self._part
        more = [
            (*part.writes_of(at, at + 1), part.evict_before(at), part.evict_before(at + 1))
            for block in blocks
            for at in range(block * _BLOCK, (block + 1) * _BLOCK)
        ]
        self._row[blocks] = self._used + _BLOCK * np.arange(len(blocks))
        end = self._used + len(more)
        if end > len(self._table):
            self._table = np.concatenate((self._table, np.empty((end, 4), np.int64)))
        self._table[self._used : end] = more
        self._used = end


@dataclass(frozen=True)
class Plain:
    """What an open step of one token a row settles when all of it is accepted.

    Attributes:
        requests: its rows.
        dead: tables of which the logical units below an end fall dead by the step: range, row, end.
    """

    requests: list[Request]
    dead: list[tuple[RangeKey, int, int]]


@dataclass(frozen=True)
class _Part:
    """One range of a step under way."""

    part: ManagedRange
    tables: list[Int64Array]
    lo: Int64Array
    hi: Int64Array
    missing: Int64Array


class DecodeSteps:
    """Plans and settles steps of one token a row.

    Args:
        ranges: of the manager.
    """

    def __init__(self, ranges: RangeSet) -> None:
        self._ranges = ranges
        self._lengths = {key: Lengths(part) for key, part in ranges.items()}

    def plan(self, requests: list[Request]) -> tuple[list[RangePlan], dict[RangeKey, Int64Array], Plain] | None:
        """Take missing units and quarantine what is written: range plans, and written units by range.

        None, with nothing changed, where a written unit is shared or units are short. PromptTooLongError where an empty
        cache could not hold a row.
        """
        lengths = np.array([request._length for request in requests], np.int64)
        parts: list[_Part] = []
        dead: list[tuple[RangeKey, int, int]] = []
        for key, part in self._ranges.items():
            lo, hi, before, after = self._lengths[key].at(lengths)
            tables = [request._tables[key] for request in requests]
            missing = np.maximum(hi - np.array([len(table) for table in tables], np.int64), 0)
            if int(missing.sum()) > part.allocator.free_count:
                return None
            parts.append(_Part(part, tables, lo, hi, missing))
            dead += [(key, number, int(after[number])) for number in np.flatnonzero(after > before).tolist()]
        short = {number for item in parts for number in np.flatnonzero(item.missing).tolist()}
        for number in short:
            request = requests[number]
            self._ranges.demand_fits(request.id, request._length, request._length + 1)
        for item in parts:
            self._grow(item)
        planned = [self._planned(item) for item in parts]
        held = {item.part.key: written for item, (_, written) in zip(parts, planned, strict=True)}
        if any(self._ranges[key].allocator.shared(written) for key, written in held.items()):
            for item in parts:
                for number in np.flatnonzero(item.missing).tolist():
                    item.part.allocator.release(item.tables[number][-int(item.missing[number]) :])
            return None
        for item in parts:
            item.part.allocator.quarantine(held[item.part.key])
            for number in np.flatnonzero(item.missing).tolist():
                requests[number]._tables[item.part.key] = item.tables[number]
        for request in requests:
            if request._reserved <= request._length:
                request._reserved = request._length + 1
        return [plan for plan, _ in planned], held, Plain(requests, dead)

    def _grow(self, item: _Part) -> None:
        """Lengthen the tables of the plan; the requests still have their own."""
        single = item.part.allocate(int((item.missing == 1).sum()), unwritten=True).tolist()
        for number in np.flatnonzero(item.missing).tolist():
            count = int(item.missing[number])
            # A row that needs several gets them side by side.
            taken = [single.pop()] if count == 1 else item.part.allocate(count, unwritten=True)
            item.tables[number] = np.concatenate((item.tables[number], np.asarray(taken, np.int64)))

    def _planned(self, item: _Part) -> tuple[RangePlan, Int64Array]:
        part, ends = item.part, item.hi.tolist()
        units = join(
            [table if len(table) == end else table[:end] for table, end in zip(item.tables, ends, strict=True)]
        )
        indptr = np.concatenate((_ZERO, np.cumsum(item.hi)))
        owner, index = _ragged(item.lo, item.hi)
        written = units[indptr[owner] + index]
        plan = RangePlan(
            group=part.budget.group,
            range=part.budget.range,
            indptr=indptr,
            units=units,
            fresh=part.fresh(written),
            copies_src=_NONE,
            copies_dst=_NONE,
        )
        return plan, written

    def advance(self, plain: Plain, held: dict[RangeKey, Int64Array]) -> None:
        """Every row's token was accepted: what was written is, and what fell dead is given back."""
        for key, ids in held.items():
            self._ranges[key].mark(ids, unwritten=False)
        for key, number, end in plain.dead:
            self._ranges[key].evict(plain.requests[number]._tables[key], end)
        for request in plain.requests:
            request._length += 1
            request._open_step = None


def _ragged(lo: Int64Array, hi: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Every ``(row, index)`` with ``lo[row] <= index < hi[row]``, row by row."""
    counts = np.maximum(hi - lo, 0)
    owner = np.repeat(np.arange(len(counts)), counts)
    start = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - start[owner] + lo[owner]
