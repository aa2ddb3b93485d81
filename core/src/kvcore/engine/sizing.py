"""How much fits into a memory budget, from layouts alone (no torch). What is promised is what is allocated.

A range whose units grow with length bounds tokens. A range that holds a bounded number of units per request (a window,
a ring, a state) bounds requests: units for ``max_requests`` of them are put aside, the rest goes to what grows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import msgspec

from kvcore.contract import IndexSpace
from kvcore.errors import ConfigError, LayoutError, nearest
from kvcore.layout import Layout, Region, SpaceSpec
from kvcore.requests.ranges import is_exact
from kvcore.requests.spaces import BUILTIN_SPACES

Units = dict[str, dict[str, int]]
"""Group → unit range → units, the null unit included."""

Spaces = Mapping[str, IndexSpace]


class CapacityPlan(msgspec.Struct, frozen=True):
    """What a memory budget holds on one rank.

    Attributes:
        bytes_per_token: what one more token costs, by component and as ``total``; alignment padding is left out.
        padding: alignment padding that one more token costs.
        per_request_bytes: what is put aside for one request (windows, rings, states and their checkpoints), alignment
            padding left out.
        per_request_padding: alignment padding of these.
        token_capacity: tokens that fit, of the growing range that is full first; None where nothing grows.
        request_capacity: requests that per-request units are put aside for; None where only tokens bound them.
        allocated_bytes: bytes of all arenas: what pools allocate, null units and unused rest of a unit included.
        units: by group and range, null units included.
    """

    bytes_per_token: dict[str, int | float]
    padding: int | float
    per_request_bytes: int
    per_request_padding: int
    token_capacity: int | None
    request_capacity: int | None
    allocated_bytes: int
    units: Units


def plan_capacity(
    layouts: Mapping[str, Layout],
    memory: int,
    max_requests: int | None = None,
    *,
    spaces: Spaces = BUILTIN_SPACES,
    step_tokens: int = 0,
    step_rows: int | None = None,
    checkpoints: int = 0,
) -> CapacityPlan:
    """Solve for the most units that fit, balanced so that every growing range holds the same number of tokens.

    Args:
        layouts: by layer group, as of one rank.
        memory: bytes; the plan allocates at most this.
        max_requests: requests that per-request units are put aside for. None: as many as the tokens make up, which is
            refused for rings and states, and where nothing grows.
        spaces: index spaces by kind.
        step_tokens: most new tokens of a step. A step of a window writes before anything falls dead, so units for one
            step are put aside too.
        step_rows: most requests of a step; ``max_requests`` by default.
        checkpoints: units put aside per request, beyond the live one, in spaces whose units serve one length only.

    Raises:
        ConfigError: not even one usable unit of every range fits (the bytes needed are named), an unknown kind of
            space, or no ``max_requests`` where it is needed.
    """
    sizer = _Sizer(tuple(_ranges(layouts, spaces, checkpoints)), layouts, max_requests, step_tokens, step_rows)
    smallest = sizer.units(1)
    needed = allocated_bytes(layouts, smallest)
    if memory < needed:
        remedy = f"give the cache at least {needed} bytes, or choose a smaller page size or another format"
        if sizer.bounded:
            remedy += ", or fewer cache.max_requests"
        raise ConfigError(
            "memory holds no usable unit of every range", memory=memory, needed=needed, remedy=remedy,
            **({"max_requests": max_requests} if sizer.bounded else {}),
        )  # fmt: skip
    units = sizer.units(sizer.most_tokens(memory)) if sizer.growing else smallest
    per_token, padding = sizer.bytes_per_token()
    return CapacityPlan(
        bytes_per_token=per_token,
        padding=padding,
        per_request_bytes=sizer.per_request(lambda item: item.unit_bytes - item.alignment_bytes),
        per_request_padding=sizer.per_request(lambda item: item.alignment_bytes),
        token_capacity=token_capacity(layouts, units, spaces=spaces),
        request_capacity=max_requests if sizer.bounded else None,
        allocated_bytes=allocated_bytes(layouts, units),
        units=units,
    )


def units_for_memory(
    layouts: Mapping[str, Layout],
    memory: int,
    *,
    max_requests: int | None = None,
    spaces: Spaces = BUILTIN_SPACES,
    step_tokens: int = 0,
    step_rows: int | None = None,
    checkpoints: int = 0,
) -> Units:
    """The units of :func:`plan_capacity`."""
    return plan_capacity(
        layouts,
        memory,
        max_requests,
        spaces=spaces,
        step_tokens=step_tokens,
        step_rows=step_rows,
        checkpoints=checkpoints,
    ).units


def allocated_bytes(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int:
    """Bytes of all arenas with this many units: exactly what pools allocate."""
    return sum(layout.place(units[group]).arena_bytes for group, layout in layouts.items())


def token_capacity(
    layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]], *, spaces: Spaces = BUILTIN_SPACES
) -> int | None:
    """Tokens that fit: of the growing range that is full first, null units not counted. None if none grows."""
    return min(
        (
            (units[item.group][item.name] - item.reserved) * item.spec.tokens_per_unit
            for item in _ranges(layouts, spaces)
            if item.grows
        ),
        default=None,
    )


@dataclass(frozen=True)
class _Range:
    """One unit range, with what its space says of sizes.

    Attributes:
        per_request: units put aside for each request, those for its checkpoints included; None where the range grows.
        partial: whether a request of one token holds a unit already.
    """

    group: str
    name: str
    spec: SpaceSpec
    per_request: int | None
    reserved: int
    partial: bool

    @property
    def grows(self) -> bool:
        return self.per_request is None


def _ranges(layouts: Mapping[str, Layout], spaces: Spaces, checkpoints: int = 0) -> Iterator[_Range]:
    for group, layout in layouts.items():
        for item in layout.ranges:
            spec = layout.space(item.space)
            if spec.kind not in spaces:
                raise ConfigError(
                    "unknown kind of index space",
                    group=group,
                    range=item.name,
                    kind=spec.kind,
                    remedy=nearest(spec.kind, spaces),
                )
            space = spaces[spec.kind]
            space.check(spec)
            per_request = space.units_per_request(spec)
            if per_request is None and not spec.tokens_per_unit:
                raise ConfigError("a growing space needs tokens per unit", group=group, range=item.name, kind=spec.kind)
            if per_request is not None and is_exact(space, spec):
                per_request *= 1 + checkpoints
            partial = space.num_units(spec, 1) > 0
            yield _Range(group, item.name, spec, per_request, space.reserved_units(spec), partial)


class _Sizer:
    """Units of every range as a function of the tokens that growing ranges hold."""

    def __init__(
        self,
        ranges: tuple[_Range, ...],
        layouts: Mapping[str, Layout],
        max_requests: int | None,
        step_tokens: int,
        step_rows: int | None,
    ) -> None:
        self._layouts = layouts
        self._max_requests = max_requests
        self._step = (step_tokens, step_rows if step_rows is not None else max_requests)
        self._all = ranges
        self.growing = [item for item in self._all if item.grows]
        self.bounded = [item for item in self._all if item.per_request]

    def units(self, tokens: int) -> Units:
        out: Units = {group: {} for group in self._layouts}
        for item in self._all:
            count = _whole(tokens, item) if item.grows else self._put_aside(item, tokens)
            out[item.group][item.name] = item.reserved + count
        return out

    def most_tokens(self, memory: int) -> int:
        """Most tokens that fit; one does."""

        def fits(tokens: int) -> bool:
            try:
                return allocated_bytes(self._layouts, self.units(tokens)) <= memory
            except LayoutError:  # past what offsets can address, whatever the memory
                return False

        low, high = 1, 2  # low fits
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _put_aside(self, item: _Range, tokens: int) -> int:
        """Units for ``max_requests`` requests and one step; never more than that many tokens can ever hold.

        Where a growing range holds a unit of P tokens for the first token of a request, and P is a multiple of the
        tokens a unit of the window stands for, no set of requests that fits there needs more units here.
        """
        limits = []
        if item.per_request == 0:
            return 0
        if item.spec.tokens_per_unit:
            for other in self.growing:
                factor, rest = divmod(other.spec.tokens_per_unit, item.spec.tokens_per_unit)
                if other.partial and not rest:
                    limits.append(_whole(tokens, other) * factor)
        if self._max_requests is not None and self._max_requests >= 1:
            limits.append(self._max_requests * (item.per_request or 0) + self._step_units(item))
        if not limits:
            raise ConfigError(
                "units are put aside per request: say for how many",
                group=item.group,
                range=item.name,
                max_requests=self._max_requests,
                remedy="set cache.max_requests",
            )
        return min(limits)

    def _step_units(self, item: _Range) -> int:
        """Units that the rows of one step may need beyond what each of them has put aside.

        A row of ``c`` new tokens needs up to ``ceil((c − 1) / P)`` more, so many rows of two tokens need most.
        """
        tokens, rows = self._step
        page = item.spec.tokens_per_unit
        if not page or tokens < 2:
            return 0
        rows = max(1, min(rows or 1, self._max_requests or 1, tokens // 2))
        return max(count + (tokens - 2 * count) // page for count in (1, rows))

    def bytes_per_token(self) -> tuple[dict[str, int | float], int | float]:
        """By component and in total, and the alignment padding."""
        names = (name for layout in self._layouts.values() for name in layout.components)
        out = dict.fromkeys(names, Fraction(0))
        padding = Fraction(0)
        for item in self.growing:
            layout = self._layouts[item.group]
            for holder in _holders(layout, item.name):
                layers = Fraction(len(layout.layers), item.spec.tokens_per_unit)
                out[holder.component] += layers * (holder.unit_bytes - holder.alignment_bytes)
                padding += layers * holder.alignment_bytes
        shown = {name: _number(value) for name, value in out.items()}
        return {**shown, "total": _number(sum(out.values(), Fraction(0)))}, _number(padding)

    def per_request(self, size: Callable[[Region], int]) -> int:
        """Bytes one request has put aside, ``size`` bytes a unit of each region."""
        total = 0
        for item in self.bounded:
            layout = self._layouts[item.group]
            unit = sum(size(holder) for holder in _holders(layout, item.name)) * len(layout.layers)
            total += unit * (item.per_request or 0)
        return total


def _whole(tokens: int, item: _Range) -> int:
    return -(-tokens // item.spec.tokens_per_unit)


def _holders(layout: Layout, range_name: str) -> Iterator[Region]:
    return (item for item in layout.regions if range_name in item.ranges)


def _number(value: Fraction) -> int | float:
    return int(value) if value.denominator == 1 else float(value)
