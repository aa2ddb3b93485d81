"""Units kept from being allocated while an asynchronous copy touches them (integers only)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType

from kvcore.layout import Int64Array
from kvcore.requests.ranges import ManagedRange


class Hold:
    """Keeps units from being allocated while an asynchronous copy reads or writes them, whoever owns them meanwhile."""

    def __init__(self, parts: Sequence[tuple[ManagedRange, Int64Array]], holds: set[Hold]) -> None:
        self._parts = tuple(parts)
        self._holds = holds
        holds.add(self)
        for part, ids in self._parts:
            part.allocator.quarantine(ids)

    def release(self) -> None:
        """The copy is over. Idempotent."""
        if self in self._holds:
            self._holds.remove(self)
            for part, ids in self._parts:
                part.allocator.settle(ids)

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()

    def __iter__(self) -> Iterator[tuple[ManagedRange, Int64Array]]:
        return iter(self._parts)
