"""Which units of a request leave it, chunk by chunk, and which ones a transfer fills (integers only)."""

from __future__ import annotations

import numpy as np

from kvcore.errors import RequestError
from kvcore.layout import Int64Array
from kvcore.requests.payload import Payload
from kvcore.requests.ranges import RangeSet, clip
from kvcore.requests.table import RangeKey, Request


def final_payloads(
    ranges: RangeSet, request: Request, start: int, stop: int, *, last: bool, total: int | None
) -> tuple[Payload, ...]:
    """What :meth:`kvcore.requests.manager.Manager.payloads` returns."""
    if not 0 <= start <= stop <= request.reserved or (total is not None and total < stop):
        raise RequestError(
            "tokens the request does not hold",
            request=request.id,
            start=start,
            stop=stop,
            reserved=request.reserved,
            total=total,
        )
    found = []
    for key, part in ranges.items():
        lo, hi = part.space.final_units(part.spec, start, stop, last=last)
        if hi > len(request._tables[key]):
            raise RequestError(
                "units that no step has reached yet are not final",
                request=request.id,
                group=part.budget.group,
                range=part.budget.range,
                stop=stop,
                length=request.length,
            )
        if total is not None:
            lo = min(max(lo, part.first_live(total)), hi)
        parts = clip((lo, hi), part.space.needed_units(part.spec, stop)) if last else [(lo, hi)]
        budget = part.budget
        for begin, end in parts or [(lo, lo)]:
            ids = request._tables[key][begin:end]
            live = part.real(ids)  # dead units precede live ones
            first = begin + len(ids) - len(live)
            found.append(Payload.of(budget.group, budget.range, budget.components, first, live))
    return tuple(found)


def arriving_units(ranges: RangeSet, request: Request, length: int) -> dict[RangeKey, Int64Array]:
    """What :meth:`kvcore.requests.manager.Manager.destinations` returns."""
    tables = {}
    for key, part in ranges.items():
        units = part.arriving(length)
        tables[key] = np.full(len(request._tables[key]), -1, np.int64)
        tables[key][units] = request._tables[key][units]
    return tables
