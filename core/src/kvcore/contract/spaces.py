"""Index spaces: how tokens map to units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from kvcore.layout import SpaceSpec


class IndexSpace(ABC):
    """How tokens map to logical units ``0, 1, 2, …`` of a request (integers only; the manager maps them to unit ids).

    Attributes:
        kind: name used in :class:`kvcore.layout.SpaceSpec`.
    """

    kind: ClassVar[str]

    def check(self, spec: SpaceSpec) -> None:
        """Raise ConfigError for options the space does not accept."""

    @abstractmethod
    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """Logical units a request of ``length`` tokens has touched: the exclusive end of its logical indices."""

    @abstractmethod
    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """First logical unit that a query at position ``length`` may still read. 0 unless old units fall dead."""

    @abstractmethod
    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Logical units ``[lo, hi)`` that became final when the cache grew from ``start`` to ``stop`` tokens.

        A final unit is never written again by prefill. With ``last`` the partial unit is final too. Over the chunks
        of a prompt every unit that is live at the end is listed exactly once; what falls dead before the end may be
        left out.
        """

    def needed_units(self, spec: SpaceSpec, length: int) -> Sequence[tuple[int, int]]:
        """Logical units that a query at position ``length`` may read, as ``[lo, hi)``, ascending and apart.

        Of the final units these are sent with the last chunk, and saved by a retraction. By default all from
        :meth:`first_live` on.
        """
        return ((self.first_live(spec, length), self.num_units(spec, length)),)

    def arrived_reach(self, spec: SpaceSpec, length: int) -> int:
        """The length to ask :meth:`can_rewind` about where a transfer or restore filled the first ``length`` tokens.

        More than ``length`` where something older than :meth:`needed_units` would be needed to go back: what did not arrive
        counts as overwritten.
        """
        return length

    def evict_before(self, spec: SpaceSpec, length: int) -> int:
        """Logical units below this one are given back at ``length`` tokens; at most :meth:`first_live`, the default.

        A space may keep more than the next query reads, so that a request can be forked a little earlier.
        """
        return self.first_live(spec, length)

    def units_per_request(self, spec: SpaceSpec) -> int | None:
        """Most units a request holds between steps; None where that grows with its length.

        Units of a bounded space are reserved per request when a cache is sized, and allocated as a request reaches
        them. By default a space without tokens per unit is bounded by what the first token needs.
        """
        return None if spec.tokens_per_unit else self.num_units(spec, 1)

    def reserved_units(self, spec: SpaceSpec) -> int:
        """Units at the start of a range that are never allocated: the null unit, and what a space keeps behind it."""
        return 1

    def can_rewind(self, spec: SpaceSpec, length: int, to: int) -> bool:
        """Whether bytes written for ``length`` tokens still serve the first ``to`` of them, were ``to`` the length.

        Asked for forks, truncation and rejected tokens. By default where units stand for tokens, and for no tokens.
        """
        return to in (0, length) or spec.tokens_per_unit > 0
