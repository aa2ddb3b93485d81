"""The unit ranges under a manager: budget, index space, allocator, and which units were ever written.

Everything that depends on how tokens map to units is asked of the :class:`kvcore.contract.IndexSpace`; nothing here
or in the manager knows a kind of space by name.
"""

from __future__ import annotations

from collections.abc import ItemsView, Mapping, Sequence, ValuesView
from functools import lru_cache

import msgspec
import numpy as np

from kvcore.contract import IndexSpace
from kvcore.errors import CapacityError, ConfigError, PromptTooLongError, nearest
from kvcore.layout import Int64Array, SpaceSpec
from kvcore.requests.allocator import UnitAllocator
from kvcore.requests.table import RangeKey

_MANY_TOKENS = 1 << 48


def is_exact(space: IndexSpace, spec: SpaceSpec) -> bool:
    """Whether units serve one length only: what is written for two tokens is of no use to the first of them."""
    return not space.can_rewind(spec, 2, 1)


def moving_parts(space: IndexSpace, spec: SpaceSpec, length: int) -> list[tuple[int, int]]:
    """Logical units ``[lo, hi)``, ascending and apart, that move with a request of ``length`` tokens."""
    return clip(space.final_units(spec, 0, length, last=True), space.needed_units(spec, length))


def clip(units: tuple[int, int], parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of the logical units ``[lo, hi)`` lies in ``parts``."""
    found = [(max(units[0], lo), min(units[1], hi)) for lo, hi in parts]
    return [(lo, hi) for lo, hi in found if lo < hi]


def join(parts: Sequence[Int64Array]) -> Int64Array:
    """Concatenate id arrays; no parts give an empty one."""
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


class RangeBudget(msgspec.Struct, frozen=True):
    """The units one range may use.

    Attributes:
        group: prefix of the layer group.
        range: name of the unit range.
        space: its index space.
        num_units: units of the range, the null unit included.
        first_unit: region unit id of the null unit.
        components: components that move under this range's unit ids.
    """

    group: str
    range: str
    space: SpaceSpec
    num_units: int
    first_unit: int
    components: tuple[str, ...]


class ManagedRange:
    """The state of one range. Units are region unit ids.

    Attributes:
        exact: see :func:`is_exact`: to go back takes a checkpoint.
    """

    def __init__(self, budget: RangeBudget, spaces: Mapping[str, IndexSpace]) -> None:
        kind = budget.space.kind
        if kind not in spaces:
            raise ConfigError(
                "unknown kind of index space",
                group=budget.group,
                range=budget.range,
                kind=kind,
                remedy=nearest(kind, spaces),
            )
        self.budget = budget
        self.key: RangeKey = (budget.group, budget.range)
        self.spec = budget.space
        self.space = spaces[kind]
        self.space.check(self.spec)
        self.per_request = self.space.units_per_request(self.spec)
        self.exact = is_exact(self.space, self.spec)
        reserved = self.space.reserved_units(self.spec)
        needed = reserved + (1 if self.per_request is None else min(1, self.per_request))
        if budget.num_units < max(2, needed):
            raise ConfigError(
                "a unit range needs a null unit and at least one more",
                group=budget.group,
                range=budget.range,
                num_units=budget.num_units,
                expected=max(2, needed),
                remedy="give the cache more memory",
            )
        # The allocator starts at the last unit that is never allocated; tables name the first one.
        self.allocator = UnitAllocator(
            budget.num_units - (reserved - 1),
            first=budget.first_unit + reserved - 1,
            name=f"{budget.group}/{budget.range}",
        )
        self._unwritten = np.zeros(budget.num_units, bool)
        self.writes = lru_cache(maxsize=4096)(self.writes_of)
        """``writes(start, stop)``: logical units ``[lo, hi)`` that storing the tokens ``[start, stop)`` writes.

        Remembered, because the checks, the plan and the commit of a step ask the same of each row.
        """

    @property
    def null(self) -> int:
        """The null unit."""
        return self.budget.first_unit

    def num_units(self, length: int) -> int:
        """Exclusive end of the logical units of ``length`` tokens.

        No tokens have no state, also where a space keeps its unit from the start: it would be that of earlier ones.
        """
        return self.space.num_units(self.spec, length) if length or not self.exact else 0

    def first_live(self, length: int) -> int:
        """First logical unit that still matters at ``length`` tokens; never past the end."""
        return min(self.space.first_live(self.spec, length), self.num_units(length))

    def evict_before(self, length: int) -> int:
        """Logical units below this one are given back at ``length`` tokens."""
        return min(self.space.evict_before(self.spec, length), self.first_live(length))

    def rewinds(self, length: int, to: int) -> bool:
        """Whether what was written for ``length`` tokens serves the first ``to`` of them."""
        return self.space.can_rewind(self.spec, length, to)

    def live_units(self, start: int, stop: int) -> int:
        """Units that are held at once while the cache grows from ``start`` to ``stop`` tokens."""
        return self.num_units(stop) - self.evict_before(start)

    def admission_units(self, num_tokens: int) -> int:
        """Units a request of ``num_tokens`` holds before its first step: no more than a bounded space ever needs.

        The rest of a prompt that is longer than a window is allocated as its steps reach it.
        """
        units = self.live_units(0, num_tokens)
        return units if self.per_request is None else min(units, self.per_request)

    def growth(self, tokens: int) -> int:
        """Units that ``tokens`` more tokens of requests admitted already may need; 0 where length does not matter."""
        return self.num_units(tokens) if self.spec.tokens_per_unit else 0

    def writes_of(self, start: int, stop: int) -> tuple[int, int]:
        """:attr:`writes`, asked of the space."""
        # The partial unit at `start` is what would be final were `start` the end, so a space need not tell twice.
        partial, _ = self.space.final_units(self.spec, start, start, last=True)
        return max(partial, self.first_live(start)), self.num_units(stop)

    def allocate(self, count: int, *, unwritten: bool) -> Int64Array:
        """Take units; ``unwritten`` ones have to be zeroed before a step writes them."""
        ids = self.allocator.allocate(count)
        self.mark(ids, unwritten=unwritten)
        return ids

    def mark(self, ids: Int64Array, *, unwritten: bool) -> None:
        """Note whether units hold bytes of an earlier owner."""
        self._unwritten[ids - self.budget.first_unit] = unwritten

    def fresh(self, ids: Int64Array) -> Int64Array:
        """Those of ``ids`` that nobody wrote since they were handed out."""
        chosen: Int64Array = ids[self._unwritten[ids - self.budget.first_unit]]
        return chosen

    def copied_writes(
        self, rows: Sequence[tuple[Int64Array, int, int]], *, speculative: bool = False
    ) -> list[tuple[int, int]]:
        """Units that a step must not write in place, as ``(row, logical unit)``: those that have another owner too.

        Args:
            rows: table, start and stop of each request of the step.
            speculative: also those of exact spaces that hold a state, which rejected tokens would overwrite.
        """
        spans = [self.writes(start, stop) for _, start, stop in rows]
        parts = [table[lo:hi] for (table, _, _), (lo, hi) in zip(rows, spans, strict=True)]
        written = join(parts)
        shared = self.allocator.refcounts(written) > 1
        if speculative and self.exact:
            shared |= ~self._unwritten[written - self.budget.first_unit]
        if not shared.any():  # the usual case costs one look for the whole batch
            return []
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        index = join([np.arange(lo, lo + len(part)) for (lo, _), part in zip(spans, parts, strict=True)])
        return list(zip(owner[shared].tolist(), index[shared].tolist(), strict=True))

    def evict(self, table: Int64Array, end: int) -> None:
        """Give back the units of a table below logical unit ``end``; its entries then name the null unit."""
        dead = table[:end]
        if len(dead):
            self.allocator.release(self.real(dead))
            dead[:] = self.null

    def missing(self, table: Int64Array, length: int) -> int:
        """Units that a table lacks to hold ``length`` tokens."""
        return max(0, self.num_units(length) - len(table))

    def holds_live(self, table: Int64Array, length: int) -> bool:
        """Whether a table has every unit that matters at ``length`` tokens."""
        lo, hi = self.first_live(length), self.num_units(length)
        return hi <= len(table) and not np.any(table[lo:hi] == self.null)

    def fits_table(self, table: Int64Array, length: int, reserved: int) -> bool:
        """Whether a table has the units of a request: up to what is reserved, or in a bounded space up to its length.

        ``length`` and ``reserved`` are in tokens.
        """
        most = self.num_units(reserved)
        least = most if self.per_request is None else self.num_units(length)
        return least <= len(table) <= most and self.holds_live(table, length)

    def held_units(self, length: int, reserved: int) -> int:
        """Exclusive end of the logical units that a request of ``length`` tokens keeps for ``reserved`` ones.

        A bounded space holds no more at once than it ever needs.
        """
        end = self.num_units(reserved)
        if self.per_request is None:
            return end
        return max(self.num_units(length), min(end, self.evict_before(length) + self.per_request))

    def arriving(self, length: int) -> Int64Array:
        """Logical units that a transfer or restore of ``length`` tokens fills, ascending."""
        return join([np.arange(lo, hi) for lo, hi in moving_parts(self.space, self.spec, length)])

    def real(self, ids: Int64Array) -> Int64Array:
        """``ids`` without the null unit."""
        real: Int64Array = ids[ids != self.null]
        return real

    def max_tokens(self) -> int | None:
        """Longest request an empty range can hold, in steps as small as need be; None where length does not matter."""
        capacity = self.allocator.capacity
        if self.admission_units(_MANY_TOKENS) <= capacity:
            return None
        lo, hi = 0, _MANY_TOKENS  # lo fits, hi does not
        while hi - lo > 1:
            middle = (lo + hi) // 2
            lo, hi = (middle, hi) if self.admission_units(middle) <= capacity else (lo, middle)
        return lo


class RangeSet:
    """All unit ranges of a model. What a request needs, it needs in every one of them."""

    def __init__(self, budgets: Sequence[RangeBudget], spaces: Mapping[str, IndexSpace]) -> None:
        self._ranges: dict[RangeKey, ManagedRange] = {}
        for budget in budgets:
            part = ManagedRange(budget, spaces)
            if part.key in self._ranges:
                raise ConfigError("unit range budgeted twice", group=budget.group, range=budget.range)
            self._ranges[part.key] = part
        if not self._ranges:
            raise ConfigError("a manager needs at least one unit range")

    def __getitem__(self, key: RangeKey) -> ManagedRange:
        return self._ranges[key]

    def items(self) -> ItemsView[RangeKey, ManagedRange]:
        """Ranges by key, in the order of the budgets."""
        return self._ranges.items()

    def values(self) -> ValuesView[ManagedRange]:
        """Ranges, in the order of the budgets."""
        return self._ranges.values()

    def find(self, group: str, range: str) -> ManagedRange:
        """The range of these names; ConfigError naming the nearest where there is none."""
        part = self._ranges.get((group, range))
        if part is None:
            known = [f"{g}/{r}" for g, r in self._ranges]
            raise ConfigError("no such unit range", group=group, range=range, remedy=nearest(f"{group}/{range}", known))
        return part

    def max_tokens(self) -> int | None:
        """Longest request that all ranges can hold when empty; None where length does not matter."""
        limits = [limit for part in self.values() if (limit := part.max_tokens()) is not None]
        return min(limits, default=None)

    def demand_admissible(self, request_id: str, num_tokens: int) -> None:
        """Raise PromptTooLongError where an empty cache could not take a request of ``num_tokens`` in any steps."""
        self._demand(request_id, num_tokens, {key: part.admission_units(num_tokens) for key, part in self.items()})

    def demand_fits(self, request_id: str, start: int, stop: int) -> None:
        """Raise PromptTooLongError where an empty cache could not take a request from ``start`` to ``stop`` at once."""
        self._demand(request_id, stop, {key: part.live_units(start, stop) for key, part in self.items()})

    def _demand(self, request_id: str, num_tokens: int, needs: Mapping[RangeKey, int]) -> None:
        for key, part in self.items():
            if needs[key] > part.allocator.capacity:
                longest = self.max_tokens()
                chunks = longest is None or num_tokens <= longest
                raise PromptTooLongError(
                    "request is longer than an empty cache can hold",
                    request=request_id,
                    num_tokens=num_tokens,
                    max_tokens=longest,
                    group=part.budget.group,
                    range=part.budget.range,
                    needed=needs[key],
                    capacity=part.allocator.capacity,
                    remedy=f"{'give it fewer tokens a step' if chunks else 'shorten it'} or give the cache more memory",
                )

    def demand_free(self, needs: Mapping[RangeKey, int], **fields: str) -> None:
        """Raise CapacityError for the first range with fewer free units than needed; ``fields`` go into the error."""
        for key, part in self.items():
            free = part.allocator.free_count
            if needs[key] > free:
                raise CapacityError(
                    "not enough free units",
                    **fields,
                    group=part.budget.group,
                    range=part.budget.range,
                    needed=needs[key],
                    free=free,
                    remedy="wait for a request to end, or retract one",
                )
