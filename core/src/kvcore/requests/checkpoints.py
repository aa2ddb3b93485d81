"""Checkpoints: units that serve one length only, kept so that a request can go back to that length (integers only).

A checkpoint is a reference more on units the request has. No byte moves: the next step finds the units shared and
writes into copies, as it does after a fork.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.layout import Int64Array
from kvcore.requests.ranges import ManagedRange, RangeSet
from kvcore.requests.table import Request


def keep(ranges: RangeSet, request: Request) -> None:
    """Keep what a request's state is at its length. Nothing to do twice, for no tokens, and where there is no state."""
    exact = [part for part in ranges.values() if part.exact]
    if not exact or not request._length or request._length in request._checkpoints:
        return
    kept = {}
    for part in exact:
        kept[part.key] = part.real(request._tables[part.key][: part.num_units(request._length)]).copy()
        part.allocator.retain(kept[part.key])
    request._checkpoints[request._length] = kept


def drop(ranges: RangeSet, request: Request, lengths: Iterable[int]) -> None:
    """Forget the checkpoints at these lengths."""
    for length in list(lengths):
        for key, ids in request._checkpoints.pop(length).items():
            ranges[key].allocator.release(ids)


def shorten(part: ManagedRange, table: Int64Array, end: int) -> Int64Array:
    """Give back the units from logical unit ``end`` on; returns the rest of the table."""
    part.allocator.release(part.real(table[end:]))
    return table[:end].copy()


def roll_back(ranges: RangeSet, request: Request, length: int) -> None:
    """Take a request back to ``length`` tokens, which every range can serve; later checkpoints are of no use any more.

    The checkpoint stays: the units are shared with it, so the next step writes into copies again.
    """
    kept = request._checkpoints.get(length, {})
    for key, part in ranges.items():
        table = request._tables[key]
        if key in kept:
            part.allocator.retain(kept[key])
            part.allocator.release(part.real(table))
            request._tables[key] = kept[key].copy()
        else:
            request._tables[key] = shorten(part, table, part.num_units(length))
        request.wrote(key, request.reach(key, length), length)
    drop(ranges, request, [other for other in request._checkpoints if other > length])
    request._length = request._reserved = length
    request._spoiled = False
