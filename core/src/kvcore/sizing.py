"""How many units fit into a memory budget, from layouts alone (no torch). What is promised is what is allocated."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.layout import Layout

Units = dict[str, dict[str, int]]
"""Group → unit range → units, the null unit included."""


def units_for_memory(layouts: Mapping[str, Layout], memory: int, *, max_requests: int | None = None) -> Units:
    """Return the most units that fit, balanced so that every growing range holds the same number of tokens.

    Ranges of one state slot a request are reserved first, for ``max_requests``. Units that are left when no range
    can take another token's worth stay unused.

    Args:
        layouts: by layer group.
        memory: bytes; :func:`allocated_bytes` of the result is at most this.
        max_requests: requests that state slots are reserved for; needed only where there are any.

    Returns:
        Units by group and range, with the null unit of each.

    Raises:
        ConfigError: not even one usable unit of every range fits; the bytes needed are named.
        UnsupportedError: a range that neither grows with tokens nor holds one unit a request.
    """
    smallest = _units_for_tokens(layouts, 1, max_requests)
    needed = allocated_bytes(layouts, smallest)
    if memory < needed:
        raise ConfigError(
            "memory holds no usable unit of every range",
            memory=memory,
            needed=needed,
            remedy=f"give the cache at least {needed} bytes, or choose a smaller page size or another format",
        )
    if not _grows(layouts):
        return smallest
    low, high = 1, 2  # tokens: low fits
    while allocated_bytes(layouts, _units_for_tokens(layouts, high, max_requests)) <= memory:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = allocated_bytes(layouts, _units_for_tokens(layouts, middle, max_requests)) <= memory
        low, high = (middle, high) if fits else (low, middle)
    return _units_for_tokens(layouts, low, max_requests)


def allocated_bytes(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes of all arenas with this many units: exactly what pools allocate."""
    return sum(layout.place(units[group]).arena_bytes for group, layout in layouts.items())


def token_capacity(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int | None:
    """Tokens that fit: of the growing range that is full first, null units not counted. None if none grows."""
    return min(
        (
            (units[group][item.name] - 1) * layout.space(item.space).tokens_per_unit
            for group, layout in layouts.items()
            for item in layout.ranges
            if layout.space(item.space).tokens_per_unit
        ),
        default=None,
    )


def _grows(layouts: Mapping[str, Layout]) -> bool:
    return any(space.tokens_per_unit for layout in layouts.values() for space in layout.spaces)


def _units_for_tokens(layouts: Mapping[str, Layout], tokens: int, max_requests: int | None) -> Units:
    out: Units = {}
    for group, layout in layouts.items():
        counts = out[group] = {}
        for item in layout.ranges:
            space = layout.space(item.space)
            if space.tokens_per_unit:
                counts[item.name] = 1 + -(-tokens // space.tokens_per_unit)
            elif space.unit == "state_slot":
                counts[item.name] = 1 + _requests(max_requests, group, item.name)
            else:
                raise UnsupportedError(
                    "range neither grows with tokens nor holds one unit a request",
                    group=group,
                    range=item.name,
                    space=space.kind,
                    unit=space.unit,
                )
    return out


def _requests(max_requests: int | None, group: str, name: str) -> int:
    if max_requests is None or max_requests < 1:
        raise ConfigError(
            "state slots are reserved per request: say for how many",
            group=group,
            range=name,
            max_requests=max_requests,
        )
    return max_requests
