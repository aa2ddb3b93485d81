"""What a manager holds, in numbers (integers only)."""

from __future__ import annotations

import msgspec

from kvcore.requests.ranges import RangeSet


class RangeStats(msgspec.Struct, frozen=True):
    """Units of one range: ``free + used + quarantined == capacity``."""

    group: str
    range: str
    capacity: int
    free: int
    used: int
    quarantined: int


class ManagerStats(msgspec.Struct, frozen=True):
    """What a manager holds now."""

    ranges: tuple[RangeStats, ...]
    requests: int
    open_steps: int


def count_units(ranges: RangeSet, requests: int, open_steps: int) -> ManagerStats:
    """Count the units of every range."""
    counted = tuple(
        RangeStats(
            group=part.budget.group,
            range=part.budget.range,
            capacity=part.allocator.capacity,
            free=part.allocator.free_count,
            used=part.allocator.used_count,
            quarantined=part.allocator.quarantined_count,
        )
        for part in ranges.values()
    )
    return ManagerStats(ranges=counted, requests=requests, open_steps=open_steps)
