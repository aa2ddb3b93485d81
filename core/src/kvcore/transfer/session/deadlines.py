"""What ends when, earliest first: looking for what is due costs nothing for what is not (pure, no clock of its own)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)


@dataclass
class _Deadline(Generic[KeyT]):
    """One key's deadline, and where the heap has it: never later than that. Without a key it was dropped."""

    key: KeyT | None
    when: float
    filed: float


class Deadlines(Generic[KeyT]):
    """A deadline by key.

    One that moves later stays where the heap has it, and is filed anew when it comes up early: a lease that is renewed a
    thousand times is filed once a lease. What was dropped or filed again is passed over when it comes up, and swept out
    once there is more of it than of deadlines.

    Attributes:
        visits: entries of the heap taken up so far.
    """

    def __init__(self) -> None:
        self._deadlines: dict[KeyT, _Deadline[KeyT]] = {}
        self._heap: list[tuple[float, int, _Deadline[KeyT]]] = []
        self._serial = 0
        self.visits = 0

    def __len__(self) -> int:
        return len(self._deadlines)

    def __contains__(self, key: object) -> bool:
        return key in self._deadlines

    def set(self, key: KeyT, when: float) -> None:
        """Let a key end at ``when``, whatever its deadline was."""
        item = self._deadlines.get(key)
        if item is None:
            item = self._deadlines[key] = _Deadline(key, when, when)
            self._file(item)
            return
        item.when = when
        if when < item.filed:
            item.filed = when
            self._file(item)

    def drop(self, key: KeyT) -> None:
        """Forget a key; nothing where it has no deadline."""
        item = self._deadlines.pop(key, None)
        if item is not None:
            item.key = None  # the heap keeps the entry for a while, and nothing of who was dropped

    def due(self, now: float) -> list[KeyT]:
        """Take every key whose deadline is ``now`` or earlier, in the order of their deadlines."""
        taken = []
        while self._heap and self._heap[0][0] <= now:
            filed, _, item = heapq.heappop(self._heap)
            self.visits += 1
            if item.key is None or item.filed != filed:
                continue
            if item.when > filed:
                item.filed = item.when
                self._file(item)
                continue
            del self._deadlines[item.key]
            taken.append(item.key)
        return taken

    def clear(self) -> None:
        """Forget every key."""
        self._deadlines.clear()
        self._heap.clear()

    def _file(self, item: _Deadline[KeyT]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (item.filed, self._serial, item))
        if len(self._heap) > 2 * len(self._deadlines) + 64:
            for live in self._deadlines.values():
                live.filed = live.when
            self._heap = [(live.when, n, live) for n, live in enumerate(self._deadlines.values())]
            heapq.heapify(self._heap)
