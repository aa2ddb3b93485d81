"""Index spaces: how tokens of a request map to its logical units (integers only)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from kvcore.contract import IndexSpace
from kvcore.errors import ConfigError, RequestError
from kvcore.layout import Int64Array, SpaceSpec


class SequenceSpace(IndexSpace):
    """The whole sequence: token ``t`` lies in logical unit ``t // tokens_per_unit``, and every unit stays live."""

    kind: ClassVar[str] = "sequence"

    def check(self, spec: SpaceSpec) -> None:
        """Demand a page size and no options."""
        _demand_tokens(spec)
        _demand_options(spec)

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """``ceil(length / tokens_per_unit)``: 0 for no tokens, and no empty unit after an exact multiple."""
        return -(-_tokens(length) // spec.tokens_per_unit)

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """Always 0."""
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Whole units reached between ``start`` and ``stop``; with ``last`` also the partial one at the end.

        ``start`` may lie inside a unit (a reused prefix, or the end of the previous chunk): that unit was not final
        before and is listed as soon as it is full.
        """
        lo = _start(start, stop) // spec.tokens_per_unit
        hi = self.num_units(spec, stop) if last else stop // spec.tokens_per_unit
        return lo, hi


class WindowSpace(SequenceSpace):
    """Pages of a sliding window: units fall dead when they lie wholly behind it, and are given back.

    Option ``window``: a query at position ``p`` sees the keys in ``(p − window, p]``.
    """

    kind: ClassVar[str] = "window"

    def check(self, spec: SpaceSpec) -> None:
        """Demand a page size and a window of at least the token itself."""
        _demand_tokens(spec)
        _demand_options(spec, "window")

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """The unit of the oldest key that a query at ``length`` sees."""
        return max(0, _tokens(length) - spec.option("window", 1) + 1) // spec.tokens_per_unit

    def evict_before(self, spec: SpaceSpec, length: int) -> int:
        """The unit that starts a whole window before the last unit boundary in ``length`` tokens.

        Counted from that boundary and not from ``length``, so that the request may be forked there and find a whole
        window; it holds no more units for it at its peak.
        """
        return max(0, _tokens(length) // spec.tokens_per_unit - self._span(spec))

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """As for a sequence, without units that are dead at ``stop``."""
        lo, hi = super().final_units(spec, start, stop, last=last)
        return max(lo, min(self.first_live(spec, stop), hi)), hi

    def units_per_request(self, spec: SpaceSpec) -> int:
        """``ceil(window / tokens_per_unit) + 1``: a whole window, and the unit that is being written."""
        return self._span(spec) + 1

    def _span(self, spec: SpaceSpec) -> int:
        return -(-spec.option("window", 1) // spec.tokens_per_unit)


class CompressedSpace(IndexSpace):
    """One row for every ``tokens_per_unit`` tokens (the ratio), written when the last of them is there.

    Tokens after the last whole row are not in this space: what is pending for them is a state of the model.
    """

    kind: ClassVar[str] = "compressed"

    def check(self, spec: SpaceSpec) -> None:
        """Demand rows, a ratio and no options."""
        _demand_tokens(spec)
        _demand_options(spec)
        if spec.unit != "row":
            raise ConfigError("units of a compressed space are rows", space=spec.name, expected="row", got=spec.unit)

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """``length // ratio``."""
        return _tokens(length) // spec.tokens_per_unit

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """Always 0."""
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Rows completed between ``start`` and ``stop``; ``last`` adds none."""
        return _start(start, stop) // spec.tokens_per_unit, self.num_units(spec, stop)


class RingSpace(IndexSpace):
    """One ring of rows a request: position ``p`` lies in logical unit ``p % ring``, and overwrites what was there.

    The rows of a request lie side by side, at ``first + state_slot * ring`` in their range; state slot 0 is never
    given to a request, so that kernels may read it for rows that are padding.

    Options: ``ring``, the rows; ``window`` (``ring`` by default), the tokens that a query sees, itself included. What
    the ring has more is how many rejected tokens it survives. Elsewhere a request needs the rows of its window alone, and
    goes back no further than to where it arrived.
    """

    kind: ClassVar[str] = "ring"

    def check(self, spec: SpaceSpec) -> None:
        """Demand a ring that holds its window."""
        _demand_no_tokens(spec)
        _demand_options(spec, "ring", optional=("window",))
        if spec.option("window", 1) > spec.option("ring"):
            raise ConfigError("a ring holds its whole window", space=spec.name, options=dict(spec.options))

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """The whole ring from the first token on."""
        return spec.option("ring") if _tokens(length) else 0

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """Always 0: the ring has no dead rows."""
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """The rows that were written, with ``last`` only: until then any of them may be overwritten."""
        _start(start, stop)
        return 0, min(stop, spec.option("ring")) if last else 0

    def needed_units(self, spec: SpaceSpec, length: int) -> Sequence[tuple[int, int]]:
        """The rows of the ``window - 1`` newest tokens: in two parts where they pass the end of the ring."""
        ring = spec.option("ring")
        oldest = self._oldest(spec, _tokens(length))
        first, last = oldest % ring, length % ring
        if oldest == length:
            return ()
        return ((first, last),) if first < last else tuple(part for part in ((0, last), (first, ring)) if part[1])

    def arrived_reach(self, spec: SpaceSpec, length: int) -> int:
        """As if all older tokens than those of the window had been overwritten."""
        oldest = self._oldest(spec, _tokens(length))
        return max(length, oldest + spec.option("ring")) if oldest else length

    def reserved_units(self, spec: SpaceSpec) -> int:
        """A whole ring: state slot 0."""
        return spec.option("ring")

    def can_rewind(self, spec: SpaceSpec, length: int, to: int) -> bool:
        """Whether no token that a query at ``to`` sees has been overwritten."""
        ring = spec.option("ring")
        return self._oldest(spec, to) >= min(to, length - ring)

    def _oldest(self, spec: SpaceSpec, length: int) -> int:
        """The oldest token that a query at ``length`` sees."""
        return max(0, length - spec.option("window", spec.option("ring")) + 1)


class PerRequestSpace(IndexSpace):
    """One state slot a request, rewritten by every step: valid only at the length it was written for."""

    kind: ClassVar[str] = "per_request"

    def check(self, spec: SpaceSpec) -> None:
        """Demand no tokens per unit and no options."""
        _demand_no_tokens(spec)
        _demand_options(spec)

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """1 from the first token on."""
        return int(_tokens(length) > 0)

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """Always 0."""
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """The state slot once, with ``last``."""
        _start(start, stop)
        return 0, self.num_units(spec, stop) if last else 0


class ConstantSpace(IndexSpace):
    """One unit a layer that belongs to the model: never allocated, never moved with a request.

    It is unit ``first + 1`` of its range, behind the null unit, and is filled before the first request.
    """

    kind: ClassVar[str] = "constant"

    def check(self, spec: SpaceSpec) -> None:
        """Demand no tokens per unit and no options."""
        _demand_no_tokens(spec)
        _demand_options(spec)

    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """Always 0: requests hold none."""
        _tokens(length)
        return 0

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """Always 0."""
        return 0

    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """None."""
        _start(start, stop)
        return 0, 0

    def reserved_units(self, spec: SpaceSpec) -> int:
        """The null unit and the constant one."""
        return 2

    def can_rewind(self, spec: SpaceSpec, length: int, to: int) -> bool:
        """Always: no length has anything to do with it."""
        return True


def last_unit_tokens(page_size: int, length: int) -> int:
    """Tokens in the last unit of ``length`` tokens: ``page_size`` on exact multiples, 0 only for no tokens."""
    return (_tokens(length) - 1) % page_size + 1 if length else 0


def slots_of(units: Int64Array, page_size: int, start: int, stop: int) -> Int64Array:
    """Slots of the tokens ``[start, stop)``, ``int64 [stop - start]``.

    Args:
        units: the request's region unit ids in logical order, ``[N]``; −1 where there is none.
        page_size: tokens a unit.

    Returns:
        ``unit * page_size + offset`` per token, −1 for tokens of a unit −1. Raises RequestError past the last unit.
    """
    if not 0 <= start <= stop <= len(units) * page_size:
        raise RequestError(
            "tokens outside the units", start=start, stop=stop, num_units=len(units), page_size=page_size
        )
    positions = np.arange(start, stop, dtype=np.int64)
    owner = np.asarray(units, np.int64)[positions // page_size]
    return np.where(owner < 0, np.int64(-1), owner * page_size + positions % page_size)


def slots_held(
    units: Int64Array,
    null: int,
    spec: SpaceSpec,
    length: int,
    start: int,
    stop: int,
    overwritten: Sequence[tuple[int, int]] = (),
) -> Int64Array:
    """Slots that hold the tokens ``[start, stop)`` of a request now, ``int64 [stop - start]``, as a step's batch names them.

    Args:
        units: the request's region unit ids in logical order, ``[N]``; what is dead is ``null``.
        null: null unit of the range.
        spec: the space of the range.
        length: tokens of the request.
        overwritten: ``(kept, stop)`` where tokens up to ``stop`` were written of which the first ``kept`` remained.

    Returns:
        Per token: ``unit * tokens_per_unit + offset``; in a space without tokens per unit its unit, which is the place
        in a ring, or the state slot for the last token. −1 where nothing of the token is held: its unit is dead, its ring
        place was overwritten or never filled, or no whole row of a compressed space has it yet. RequestError outside the
        request.
    """
    if not 0 <= start <= stop <= length:
        raise RequestError("tokens outside the request", start=start, stop=stop, length=length)
    held = np.where(np.asarray(units, np.int64) == null, np.int64(-1), units)
    page = spec.tokens_per_unit
    if page:
        whole = length // page * page if spec.unit == "row" else length
        there = slots_of(held, page, min(start, whole), min(stop, whole))
        return np.concatenate((there, np.full(stop - start - len(there), -1, np.int64)))
    if not len(held):
        return np.full(stop - start, -1, np.int64)
    positions = np.arange(start, stop, dtype=np.int64)
    oldest = max([length - len(held), *(min(kept, end - len(held)) for kept, end in overwritten)])
    return np.where(positions >= oldest, held[positions % len(held)], np.int64(-1))


def _tokens(length: int) -> int:
    if length < 0:
        raise RequestError("a length is never negative", length=length)
    return length


def _start(start: int, stop: int) -> int:
    if start > stop:
        raise RequestError("a cache does not grow backwards", start=start, stop=stop)
    return _tokens(start)


def _demand_tokens(spec: SpaceSpec) -> None:
    if spec.tokens_per_unit < 1:
        raise ConfigError(
            f"units of a {spec.kind} space stand for tokens", space=spec.name, tokens_per_unit=spec.tokens_per_unit
        )


def _demand_no_tokens(spec: SpaceSpec) -> None:
    if spec.tokens_per_unit:
        raise ConfigError(
            f"units of a {spec.kind} space do not grow with length",
            space=spec.name,
            tokens_per_unit=spec.tokens_per_unit,
            remedy="set tokens_per_unit to 0",
        )


def _demand_options(spec: SpaceSpec, *names: str, optional: tuple[str, ...] = ()) -> None:
    given = dict(spec.options)
    if set(names) <= set(given) <= {*names, *optional} and all(value >= 1 for value in given.values()):
        return
    what = " and ".join(names) or "no options"
    raise ConfigError(f"a {spec.kind} space takes {what}", space=spec.name, options=given, expected=[*names, *optional])


INDEX_SPACES: tuple[type[IndexSpace], ...] = (
    SequenceSpace,
    WindowSpace,
    CompressedSpace,
    RingSpace,
    PerRequestSpace,
    ConstantSpace,
)

BUILTIN_SPACES: Mapping[str, IndexSpace] = MappingProxyType({space.kind: space() for space in INDEX_SPACES})
