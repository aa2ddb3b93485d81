"""Index spaces: how tokens of a request map to its logical units (integers only)."""

from __future__ import annotations

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
        if spec.tokens_per_unit < 1:
            raise ConfigError("a sequence needs tokens per unit", space=spec.name, tokens_per_unit=spec.tokens_per_unit)
        if spec.options:
            raise ConfigError("a sequence takes no options", space=spec.name, options=dict(spec.options))

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
        if start > stop:
            raise RequestError("a cache does not grow backwards", start=start, stop=stop)
        lo = _tokens(start) // spec.tokens_per_unit
        hi = self.num_units(spec, stop) if last else stop // spec.tokens_per_unit
        return lo, hi


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


def _tokens(length: int) -> int:
    if length < 0:
        raise RequestError("a length is never negative", length=length)
    return length


INDEX_SPACES: tuple[type[IndexSpace], ...] = (SequenceSpace,)
