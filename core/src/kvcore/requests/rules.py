"""What a request must hold for a call to be legal: each rule raises, and changes nothing (integers only)."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.errors import CapacityError, RequestError, UnsupportedError
from kvcore.requests.ranges import ManagedRange, RangeSet
from kvcore.requests.table import Request


def demand_step_fits(ranges: RangeSet, rows: Sequence[tuple[Request, int]], *, speculative: bool = False) -> None:
    """Raise PromptTooLongError or CapacityError unless units for ``(request, new tokens)`` rows are free.

    UnsupportedError for a speculative step over a space whose steps write several units that serve one length only.
    """
    spans = [(request, request._length, request._length + count) for request, count in rows]
    for request, start, stop in spans:
        if stop > request._reserved:
            ranges.demand_fits(request.id, start, stop)
    needs = {}
    for key, part in ranges.items():
        tables = [(request._tables[key], start, stop) for request, start, stop in spans]
        needs[key] = sum(part.missing(table, stop) for table, _, stop in tables)
        needs[key] += len(part.copied_writes(tables, speculative=speculative))
        if speculative and part.exact:
            needs[key] += sum(count - 1 for _, count in rows)
            _demand_one_unit(part, spans)
    try:
        ranges.demand_free(needs)
    except CapacityError as error:
        for request, start, stop in spans:  # "never" is a better answer than "not now" where it is true
            ranges.demand_fits(request.id, start, stop)
        short = ranges[error.fields["group"], error.fields["range"]]
        if short.exact:
            error.fields["capacity"] = short.allocator.capacity
            error.remedy += "; drop checkpoints, step fewer tokens speculatively, or raise cache.checkpoints"
        raise


def _demand_one_unit(part: ManagedRange, spans: Sequence[tuple[Request, int, int]]) -> None:
    for request, start, stop in spans:
        lo, hi = part.writes(start, stop)
        if hi - lo != 1:
            raise UnsupportedError(
                "the state after each token is kept only where a state is one unit",
                request=request.id,
                group=part.budget.group,
                range=part.budget.range,
                expected=1,
                got=hi - lo,
                remedy="step without speculation",
            )


def demand_rewindable(ranges: RangeSet, request: Request, length: int, *, checkpoints: bool = False) -> None:
    """Raise unless the first ``length`` tokens of a request can be had back in every range.

    Args:
        checkpoints: the state of a checkpoint will do.
    """
    if not 0 <= length <= request._length:
        raise RequestError(
            "not a prefix of the request", request=request.id, prefix_tokens=length, length=request._length
        )
    for part in ranges.values():
        if checkpoints and _kept(part, request, length):
            continue
        if not _serves(part, request, length):
            raise _not_at(part, request.id, request._length, length)
        _demand_live(part, request, length)


def _kept(part: ManagedRange, request: Request, length: int) -> bool:
    """Whether a checkpoint has the state of this length."""
    return part.exact and length in request._checkpoints


def demand_rollback(ranges: RangeSet, request: Request, length: int) -> None:
    """Raise UnsupportedError unless every range can go back to ``length`` tokens, with the checkpoints there are."""
    for key, part in ranges.items():
        if part.exact and (length == 0 or length in request._checkpoints):
            continue
        sound = not (part.exact and request._spoiled)
        if sound and _serves(part, request, length) and part.holds_live(request._tables[key], length):
            continue
        raise UnsupportedError(
            "the request cannot go back to this length in every range",
            request=request.id,
            length=request._length,
            to=length,
            group=part.budget.group,
            range=part.budget.range,
            checkpoints=list(request.checkpoints),
            remedy="go back to a checkpoint, or take one before what may be rejected; else release it and compute again",
        )


def demand_reversible(
    ranges: RangeSet, request_id: str, request: Request | None, length: int, to: int, *, speculative: bool
) -> None:
    """Raise UnsupportedError where what a step wrote up to ``length`` does not serve the first ``to`` tokens.

    Args:
        request: None where it was released meanwhile.
        speculative: whether the step kept the state after every token.
    """
    for key, part in ranges.items():
        if part.exact and speculative:
            continue
        reach = length if part.exact or request is None else max(length, request.reach(key, to))
        if not part.rewinds(reach, to):
            raise _not_at(part, request_id, length, to)


def _serves(part: ManagedRange, request: Request, to: int) -> bool:
    return part.rewinds(request._length if part.exact else request.reach(part.key, to), to)


def _not_at(part: ManagedRange, request_id: str, length: int, to: int) -> UnsupportedError:
    message = "a state is valid only at the length it was taken" if part.exact else "tokens were overwritten"
    remedy = "take checkpoints and roll back, or step speculatively" if part.exact else ""
    return UnsupportedError(
        message,
        request=request_id,
        prefix_tokens=to,
        length=length,
        group=part.budget.group,
        range=part.budget.range,
        remedy=remedy,
    )


def demand_live(ranges: RangeSet, request: Request, length: int) -> None:
    """Raise UnsupportedError where a unit that ``length`` tokens need is gone."""
    for part in ranges.values():
        _demand_live(part, request, length)


def _demand_live(part: ManagedRange, request: Request, length: int) -> None:
    if not part.holds_live(request._tables[part.key], length):
        raise UnsupportedError(
            "units that these tokens need are dropped already",
            request=request.id,
            length=length,
            group=part.budget.group,
            range=part.budget.range,
        )


def joint_prefix(ranges: RangeSet, request: Request, at_most: int) -> int:
    """Longest prefix of up to ``at_most`` tokens that every range can serve, 0 where there is none.

    Where the model has a state that is the length itself or one of the checkpoints; else ``min(at_most, length)`` or 0.
    """
    longest = max(0, min(at_most, request._length))
    lengths = [longest, *(at for at in reversed(request.checkpoints) if at < longest)]
    return next((length for length in lengths if _shareable(ranges, request, length)), 0)


def _shareable(ranges: RangeSet, request: Request, length: int) -> bool:
    return all(
        _kept(part, request, length)
        or (_serves(part, request, length) and part.holds_live(request._tables[key], length))
        for key, part in ranges.items()
    )
