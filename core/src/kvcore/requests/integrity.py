"""The recount of every unit: what tables, checkpoints, open steps and holds name, against the allocators (integers only)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.layout import Int64Array
from kvcore.requests.holds import Hold
from kvcore.requests.ranges import ManagedRange, RangeSet, join
from kvcore.requests.steps import StepBook
from kvcore.requests.table import Request, RequestTable


def check_units(ranges: RangeSet, requests: RequestTable, steps: StepBook, holds: Iterable[Hold]) -> None:
    """Raise IntegrityError unless every unit is free, quarantined, or referenced as often as it is named."""
    held_by_copies = tuple(holds)
    for key, part in ranges.items():
        part.allocator.check_integrity()
        owned = [_live_units(request, part) for request in requests]
        held = [ids for hold in held_by_copies for other, ids in hold if other is part]
        owned += [kept[key] for request in requests for kept in request._checkpoints.values() if key in kept]
        for step in steps:
            owned.append(step.references(key))
            held.append(step.held[key])
        first = part.allocator.null_unit
        everything = np.arange(first, first + part.allocator.capacity + 1, dtype=np.int64)
        _compare(part, "references", owned, part.allocator.refcounts(everything))
        _compare(part, "quarantines", held, part.allocator.holds())


def _live_units(request: Request, part: ManagedRange) -> Int64Array:
    table = request._tables[part.key]
    live = part.real(table)
    dead = len(table) - len(live)
    whole = part.fits_table(table, request._length, request._reserved) and request._length <= request._reserved
    if not whole or np.any(table[:dead] != part.null):
        raise IntegrityError(
            "unit table does not match the request", request=request.id, range=part.key, length=request._length
        )
    return live


def _compare(part: ManagedRange, what: str, found: Sequence[Int64Array], counted: Int64Array) -> None:
    first = part.allocator.null_unit
    expected = np.bincount(join(found) - first, minlength=part.allocator.capacity + 1)
    wrong = np.flatnonzero(expected != counted)
    if len(wrong):
        unit = int(wrong[0])
        raise IntegrityError(
            f"{what} of a unit and its count disagree",
            range=part.key,
            unit=unit + first,
            expected=int(expected[unit]),
            got=int(counted[unit]),
        )
