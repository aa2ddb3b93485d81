"""Pools that several Hugging Face caches use: closed by the last of them, and swept of what was dropped."""

from __future__ import annotations

import weakref
from collections import deque

from kvcore import KVCache

_ORPHANS: weakref.WeakKeyDictionary[KVCache, deque[str]] = weakref.WeakKeyDictionary()


class SharedPools:
    """A :class:`KVCache` and how many copies of a cache use it.

    Attributes:
        kvcache: where the rows are.
        orphans: rows of caches that were dropped and not closed, of everybody who uses the same ``kvcache``. A garbage
            collector runs in the middle of anything, so it only leaves their names here, for :meth:`sweep`.
    """

    def __init__(self, kvcache: KVCache, *, owned: bool) -> None:
        self.kvcache = kvcache
        self.orphans = _ORPHANS.setdefault(kvcache, deque())
        self._owned = owned
        self._users = 0

    def enter(self) -> None:
        """One more copy."""
        self._users += 1

    def leave(self) -> None:
        """One copy less; the last one closes pools that are owned."""
        self._users -= 1
        if self._owned and not self._users:
            self.kvcache.close()

    def sweep(self) -> None:
        """Release what dropped caches held."""
        while self.orphans:
            row = self.orphans.popleft()
            step = self.kvcache.open_step
            if step is not None and any(item.request == row for item in step.plan.rows):
                step.abandon()  # of a forward pass that ended midway
            if row in self.kvcache.manager:
                self.kvcache.release(row)
