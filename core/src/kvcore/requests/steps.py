"""Steps under way: planned, and not yet committed or abandoned (integers only).

Until a step is over, nothing it reads for a copy or writes may be handed to anyone else, and everything it changed in
the tables can be undone. So an open step keeps the reference to each unit it copies from, and quarantines each unit
it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np

from kvcore.errors import RequestError, StaleHandleError
from kvcore.layout import Int64Array
from kvcore.requests.checkpoints import shorten
from kvcore.requests.decode import DecodeSteps, Plain
from kvcore.requests.ranges import ManagedRange, RangeSet, join
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow
from kvcore.requests.table import RangeKey, Request, RequestTable, token_count

_MANY_ROWS = 16
"""Rows from which on a decode step is planned over arrays: with fewer the arrays cost more than the rows."""


def step_rows(table: RequestTable, rows: Sequence[tuple[str, int]]) -> tuple[list[Request], list[int], bool]:
    """The requests of a step, each fit for it (RequestError), and their new tokens; and whether it is worth planning over
    arrays."""
    live, decode = table.live, len(rows) >= _MANY_ROWS
    requests: list[Request] = []
    counts: list[int] = []
    for request_id, count in rows:
        request = live.get(request_id)
        if request is None or request._open_step is not None or request._spoiled or request._external:
            request, decode = table.filled(request_id), False
        if type(count) is not int:
            count = token_count(count, request_id)
        if count != 1:
            decode = False
            if count < 1:
                raise RequestError("a row of a step has at least one new token", request=request_id, count=count)
        requests.append(request)
        counts.append(count)
    if len(set(requests)) < len(requests):
        raise RequestError("a request stands twice in one step", rows=[request.id for request in requests])
    return requests, counts, decode


@dataclass(frozen=True)
class _Copy:
    """A unit replaced in one row's table: it is shared, or a speculative step must not overwrite it."""

    key: RangeKey
    row: int
    index: int
    src: int
    dst: int


@dataclass(frozen=True, eq=False)
class _Trail:
    """Where one row's state after each new token but the last goes; after the last it is in the table's unit."""

    key: RangeKey
    row: int
    index: int
    units: Int64Array


@dataclass(frozen=True)
class OpenStep:
    """What has to be undone or settled when the step is over.

    Attributes:
        rows: as in its plan.
        copies: units that were replaced, whose reference the step still keeps.
        trails: units of a speculative step that are nobody's yet.
        held: units the step writes, quarantined, by range.
        reserved: tokens that each row's request held units for before the step.
        speculative: whether the step keeps the state after every token.
        plain: of a step whose rows have one new token each, which goes into units of their own.
    """

    rows: tuple[StepRow, ...]
    copies: tuple[_Copy, ...]
    trails: tuple[_Trail, ...]
    held: dict[RangeKey, Int64Array]
    reserved: tuple[int, ...]
    speculative: bool
    plain: Plain | None = None

    def references(self, key: RangeKey) -> Int64Array:
        """Units of one range whose reference the step keeps."""
        sources = np.array([copy.src for copy in self.copies if copy.key == key], np.int64)
        return join([sources, *(trail.units for trail in self.trails if trail.key == key)])


class StepBook:
    """Open steps by number."""

    def __init__(self, ranges: RangeSet, requests: RequestTable) -> None:
        self._ranges = ranges
        self._requests = requests
        self._decode = DecodeSteps(ranges)
        self._open: dict[int, OpenStep] = {}
        self._last = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenStep]:
        return iter(self._open.values())

    def speculative(self, plan: StepPlan) -> bool:
        """Whether this open step keeps the state after every token."""
        step = self._open.get(plan.step)
        return step is not None and step.speculative

    def open_decode(self, requests: list[Request]) -> StepPlan | None:
        """Plan a step of one new token a row, the units that it lacks included; None, with nothing changed, where it is
        not plain: see :meth:`kvcore.requests.decode.DecodeSteps.plan`."""
        reserved = tuple([request._reserved for request in requests])
        planned = self._decode.plan(requests)
        if planned is None:
            return None
        parts, held, plain = planned
        rows = tuple([StepRow(request.id, request.generation, request._length, 1) for request in requests])
        return self._opened(OpenStep(rows, (), (), held, reserved, False, plain), requests, parts)

    def _opened(self, step: OpenStep, requests: Sequence[Request], parts: Sequence[RangePlan]) -> StepPlan:
        self._last += 1
        for request in requests:
            request._open_step = self._last
        self._open[self._last] = step
        return StepPlan(step=self._last, rows=step.rows, ranges=tuple(parts))

    def open(
        self, rows: Sequence[tuple[Request, int]], reserved: Sequence[int], *, speculative: bool = False
    ) -> StepPlan:
        """Plan a step over requests that already hold every unit it needs, apart from those for copies and trails.

        ``reserved``: tokens that each request held units for before that.
        """
        step_rows = tuple(StepRow(request.id, request.generation, request.length, count) for request, count in rows)
        copies: list[_Copy] = []
        trails: list[_Trail] = []
        held: dict[RangeKey, Int64Array] = {}
        plans = []
        for key, part in self._ranges.items():
            tables = [request._tables[key] for request, _ in rows]
            mine = self._copy(part, tables, step_rows, speculative)
            spans = [part.writes(row.start, row.stop) for row in step_rows]
            needed = [table[:hi] for table, (_, hi) in zip(tables, spans, strict=True)]
            own = [table[lo:] for table, (lo, _) in zip(needed, spans, strict=True)]
            kept, trail = self._trail(part, own, step_rows, spans) if speculative and part.exact else ([], [])
            held[key] = join([*own, *(item.units for item in kept)])
            part.allocator.quarantine(held[key])
            copies += mine
            trails += kept
            plans.append(
                RangePlan(
                    group=part.budget.group,
                    range=part.budget.range,
                    indptr=np.cumsum([0, *map(len, needed)]),
                    units=join(needed),
                    fresh=part.fresh(held[key]),
                    copies_src=np.array([copy.src for copy in mine], np.int64),
                    copies_dst=np.array([copy.dst for copy in mine], np.int64),
                    trail=join(trail),
                )
            )
        step = OpenStep(step_rows, tuple(copies), tuple(trails), held, tuple(reserved), speculative)
        return self._opened(step, [request for request, _ in rows], plans)

    def _copy(
        self, part: ManagedRange, tables: Sequence[Int64Array], rows: Sequence[StepRow], speculative: bool
    ) -> list[_Copy]:
        """Replace in the tables what the step must not write in place."""
        written = [(table, row.start, row.stop) for table, row in zip(tables, rows, strict=True)]
        found = part.copied_writes(written, speculative=speculative)
        # A source keeps its reference count, so a second owner in the same step copies too: were the step
        # abandoned half-way, a unit written in place would have lost what the first owner goes back to.
        copies: list[_Copy] = []
        for number, items in groupby(found, key=itemgetter(0)):
            indices = [index for _, index in items]
            # One allocation a row, so that a ring stays in one piece.
            for index, dst in zip(indices, part.allocate(len(indices), unwritten=False).tolist(), strict=True):
                copies.append(_Copy(part.key, number, index, int(tables[number][index]), dst))
                tables[number][index] = dst
        return copies

    def _trail(
        self,
        part: ManagedRange,
        own: Sequence[Int64Array],
        rows: Sequence[StepRow],
        spans: Sequence[tuple[int, int]],
    ) -> tuple[list[_Trail], list[Int64Array]]:
        """Take a unit for the state after every new token but the last; also returns the units of all, row by row."""
        trails = []
        units = []
        for number, (row, (lo, _)) in enumerate(zip(rows, spans, strict=True)):
            trails.append(_Trail(part.key, number, lo, part.allocate(row.count - 1, unwritten=True)))
            units += [trails[-1].units, own[number]]
        return trails, units

    def commit(self, plan: StepPlan, accepted: Sequence[int]) -> tuple[StepRow, ...]:
        """Advance the rows that are still live; returns the others."""
        step = self._close(plan)
        if step.plain is not None and all(accepted) and not any(r._released for r in step.plain.requests):
            self._decode.advance(step.plain, step.held)
            self._settle(step)
            return ()
        live = [self._requests.find(row.request, row.generation) for row in step.rows]
        for copy in step.copies:
            # What a speculative step wrote of a row of which nothing is accepted is undone: its state was only copied.
            undone = step.speculative and self._ranges[copy.key].exact and not accepted[copy.row]
            self._end_copy(copy, live[copy.row] if undone else None)
        for trail in step.trails:
            self._end_trail(trail, live[trail.row], accepted[trail.row])
        for row, request, count, reserved in zip(step.rows, live, accepted, step.reserved, strict=True):
            if request is not None:
                self._advance(request, row, count, reserved)
        self._settle(step)
        return tuple(row for row, request in zip(step.rows, live, strict=True) if request is None)

    def abandon(self, plan: StepPlan, *, ran: bool) -> tuple[StepRow, ...]:
        """Undo the copies; returns the rows that are no longer live."""
        step = self._close(plan)
        live = [self._requests.find(row.request, row.generation) for row in step.rows]
        for copy in step.copies:
            self._end_copy(copy, live[copy.row])  # where that is gone, its table went with it, and with that the copy
        for trail in step.trails:
            self._end_trail(trail, None, 0)
        for number, (row, request) in enumerate(zip(step.rows, live, strict=True)):
            if request is not None:
                request._open_step = None
                if ran:
                    self._wrote(request, row, {(copy.key, copy.index) for copy in step.copies if copy.row == number})
        self._settle(step)
        return tuple(row for row, request in zip(step.rows, live, strict=True) if request is None)

    def _end_copy(self, copy: _Copy, back: Request | None) -> None:
        """Drop the unit that was copied from; or, where a request goes ``back`` to it, the copy."""
        dropped = copy.src
        if back is not None:
            back._tables[copy.key][copy.index] = copy.src
            dropped = copy.dst
        self._ranges[copy.key].allocator.release([dropped])

    def _end_trail(self, trail: _Trail, request: Request | None, accepted: int) -> None:
        """Make the unit of the last accepted token the request's, where that is not its own already; drop the others."""
        part, units = self._ranges[trail.key], trail.units
        if request is not None and 0 < accepted <= len(units):
            table = request._tables[trail.key]
            units = units.copy()
            units[accepted - 1], table[trail.index] = table[trail.index], units[accepted - 1]
        part.allocator.release(units)

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

    def _advance(self, request: Request, row: StepRow, accepted: int, reserved: int) -> None:
        length = row.start + accepted
        rejected = accepted < row.count
        if rejected:
            request._reserved = max(length, reserved)
        for key, part in self._ranges.items():
            table = request._tables[key]
            lo, hi = part.writes(row.start, row.stop)
            end = min(max(lo, part.num_units(length)), hi)
            part.mark(table[lo:end], unwritten=False)  # units of rejected tokens alone stay fresh
            if rejected:
                request.wrote(key, row.stop, length)
                table = request._tables[key] = shorten(part, table, part.held_units(length, request._reserved))
            part.evict(table, part.evict_before(length))
        request._length = length
        request._open_step = None

    def _wrote(self, request: Request, row: StepRow, copied: set[tuple[RangeKey, int]]) -> None:
        """Note what an abandoned step has written in place, and whether the tokens before it are lost by that.

        What went into copies is gone with them.
        """
        for key, part in self._ranges.items():
            lo, hi = part.writes(row.start, row.stop)
            if all((key, index) in copied for index in range(lo, hi)):
                continue
            if not part.rewinds(row.stop, row.start):
                request._spoiled = True
            request.wrote(key, row.stop, row.start)

    def _settle(self, step: OpenStep) -> None:
        for key, ids in step.held.items():
            self._ranges[key].allocator.settle(ids)
