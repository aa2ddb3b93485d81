"""What a request must hold for a call to be legal: each rule raises, and changes nothing (integers only)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import CapacityError, RequestError, UnsupportedError
from kvcore.ranges import RangeSet
from kvcore.requests import Request


def demand_step_fits(ranges: RangeSet, rows: Sequence[tuple[Request, int]]) -> None:
    """Raise PromptTooLongError or CapacityError unless units for ``(request, new tokens)`` rows are free."""
    spans = [(request, request._length, request._length + count) for request, count in rows]
    for request, start, stop in spans:
        if stop > request._reserved:
            ranges.demand_fits(request.id, start, stop)
    needs = {}
    for key, part in ranges.items():
        tables = [(request._tables[key], start, stop) for request, start, stop in spans]
        missing = sum(part.missing(table, stop) for table, _, stop in tables)
        needs[key] = missing + len(part.shared_writes(tables))
    try:
        ranges.demand_free(needs)
    except CapacityError:
        for request, start, stop in spans:  # "never" is a better answer than "not now" where it is true
            ranges.demand_fits(request.id, start, stop)
        raise


def demand_rewindable(ranges: RangeSet, request: Request, length: int) -> None:
    """Raise unless the first ``length`` tokens of a request can be had back in every range."""
    if not 0 <= length <= request._length:
        raise RequestError(
            "not a prefix of the request", request=request.id, prefix_tokens=length, length=request._length
        )
    demand_reversible(ranges, request.id, request._length, length)
    demand_live(ranges, request, length)


def demand_reversible(ranges: RangeSet, request_id: str, length: int, to: int) -> None:
    """Raise UnsupportedError where what was written for ``length`` tokens does not serve the first ``to``."""
    for part in ranges.values():
        if not part.space.can_rewind(part.spec, length, to):
            raise UnsupportedError(
                "a state is valid only at the length it was taken",
                request=request_id,
                prefix_tokens=to,
                length=length,
                group=part.budget.group,
                range=part.budget.range,
            )


def demand_live(ranges: RangeSet, request: Request, length: int) -> None:
    """Raise UnsupportedError where a unit that ``length`` tokens need is gone."""
    for key, part in ranges.items():
        if not part.holds_live(request._tables[key], length):
            raise UnsupportedError(
                "units that these tokens need are dropped already",
                request=request.id,
                length=length,
                group=part.budget.group,
                range=part.budget.range,
            )


def joint_prefix(ranges: RangeSet, request: Request, at_most: int) -> int:
    """Longest prefix of up to ``at_most`` tokens that every range can serve: ``min(at_most, length)`` or 0."""
    length = max(0, min(at_most, request._length))
    usable = all(
        part.space.can_rewind(part.spec, request._length, length) and part.holds_live(request._tables[key], length)
        for key, part in ranges.items()
    )
    return length if usable else 0
