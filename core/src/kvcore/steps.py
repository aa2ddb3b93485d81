"""Steps under way: planned, and not yet committed or abandoned (integers only).

Until a step is over, nothing it reads for a copy or writes may be handed to anyone else, and everything it changed in
the tables can be undone. So an open step keeps the reference to each unit it copies from, and quarantines each unit
it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from kvcore.errors import StaleHandleError
from kvcore.layout import Int64Array
from kvcore.ranges import RangeSet, join
from kvcore.requests import RangeKey, Request, RequestTable
from kvcore.stepplan import RangePlan, StepPlan, StepRow


@dataclass(frozen=True)
class _Copy:
    """A shared unit replaced in one row's table."""

    key: RangeKey
    row: int
    index: int
    src: int
    dst: int


@dataclass(frozen=True)
class OpenStep:
    """What has to be undone or settled when the step is over.

    Attributes:
        rows: as in its plan.
        copies: units that were shared, whose reference the step still keeps.
        held: units the step writes, quarantined, by range.
    """

    rows: tuple[StepRow, ...]
    copies: tuple[_Copy, ...]
    held: Mapping[RangeKey, Int64Array]

    def sources(self, key: RangeKey) -> Int64Array:
        """Units of one range whose reference the step keeps."""
        return np.array([copy.src for copy in self.copies if copy.key == key], np.int64)


class StepBook:
    """Open steps by number."""

    def __init__(self, ranges: RangeSet, requests: RequestTable) -> None:
        self._ranges = ranges
        self._requests = requests
        self._open: dict[int, OpenStep] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenStep]:
        return iter(self._open.values())

    def open(self, rows: Sequence[tuple[Request, int]]) -> StepPlan:
        """Plan a step over requests that already hold every unit it needs, apart from those for copies."""
        self._last += 1
        step_rows = tuple(StepRow(request.id, request.generation, request.length, count) for request, count in rows)
        copies: list[_Copy] = []
        held: dict[RangeKey, Int64Array] = {}
        plans = []
        for key, part in self._ranges.items():
            tables = [request._tables[key] for request, _ in rows]
            shared = part.shared_writes(
                [(table, row.start, row.stop) for table, row in zip(tables, step_rows, strict=True)]
            )
            # A source keeps its reference count, so a second owner in the same step copies too: were the step
            # abandoned half-way, a unit written in place would have lost what the first owner goes back to.
            mine: list[_Copy] = []
            for number, found in groupby(shared, key=itemgetter(0)):
                indices = [index for _, index in found]
                # One allocation a row, so that a ring stays in one piece.
                for index, dst in zip(indices, part.allocate(len(indices), unwritten=False).tolist(), strict=True):
                    mine.append(_Copy(key, number, index, int(tables[number][index]), dst))
                    tables[number][index] = dst
            spans = [part.writes(row.start, row.stop) for row in step_rows]
            needed = [table[:hi] for table, (_, hi) in zip(tables, spans, strict=True)]
            held[key] = join([table[lo:] for table, (lo, _) in zip(needed, spans, strict=True)])
            part.allocator.quarantine(held[key])
            copies += mine
            plans.append(
                RangePlan(
                    group=part.budget.group,
                    range=part.budget.range,
                    indptr=np.cumsum([0, *map(len, needed)]),
                    units=join(needed),
                    fresh=part.fresh(held[key]),
                    copies_src=np.array([copy.src for copy in mine], np.int64),
                    copies_dst=np.array([copy.dst for copy in mine], np.int64),
                )
            )
        for request, _ in rows:
            request._open_step = self._last
        self._open[self._last] = OpenStep(step_rows, tuple(copies), held)
        return StepPlan(step=self._last, rows=step_rows, ranges=tuple(plans))

    def commit(self, plan: StepPlan, accepted: Sequence[int]) -> tuple[StepRow, ...]:
        """Advance the rows that are still live; returns the others."""
        step = self._close(plan)
        stale = []
        for row, count in zip(step.rows, accepted, strict=True):
            request = self._requests.find(row.request, row.generation)
            if request is None:
                stale.append(row)
            else:
                self._advance(request, row, count)
        for copy in step.copies:
            self._ranges[copy.key].allocator.release([copy.src])
        self._settle(step)
        return tuple(stale)

    def abandon(self, plan: StepPlan, *, ran: bool) -> tuple[StepRow, ...]:
        """Undo the copies; returns the rows that are no longer live."""
        step = self._close(plan)
        live = [self._requests.find(row.request, row.generation) for row in step.rows]
        for copy in step.copies:
            request = live[copy.row]
            if request is None:  # its table went with it, and the copy with the table
                dropped = copy.src
            else:
                request._tables[copy.key][copy.index] = copy.src
                dropped = copy.dst
            self._ranges[copy.key].allocator.release([dropped])
        for row, request in zip(step.rows, live, strict=True):
            if request is not None:
                request._open_step = None
                request._spoiled = request._spoiled or (ran and not self._reversible(row))
        self._settle(step)
        return tuple(row for row, request in zip(step.rows, live, strict=True) if request is None)

    def _close(self, plan: StepPlan) -> OpenStep:
        step = self._open.get(plan.step)
        if step is None or step.rows != plan.rows:
            raise StaleHandleError(
                "the step is not open",
                step=plan.step,
                open_steps=sorted(self._open)[:8],
                remedy="commit or abandon each plan once, on the manager that made it",
            )
        return self._open.pop(plan.step)

    def _advance(self, request: Request, row: StepRow, accepted: int) -> None:
        length = row.start + accepted
        for key, part in self._ranges.items():
            table = request._tables[key]
            lo, hi = part.writes(row.start, row.stop)
            end = min(max(lo, part.num_units(length)), hi)
            part.mark(table[lo:end], unwritten=False)  # units of rejected tokens alone stay fresh
            dead = table[: part.evict_before(length)]
            if len(dead):
                part.allocator.release(part.real(dead))
                dead[:] = part.null
        request._length = length
        request._open_step = None

    def _reversible(self, row: StepRow) -> bool:
        """Whether what a row wrote in place leaves the tokens before it as they were."""
        return all(part.space.can_rewind(part.spec, row.stop, row.start) for part in self._ranges.values())

    def _settle(self, step: OpenStep) -> None:
        for key, ids in step.held.items():
            self._ranges[key].allocator.settle(ids)
