"""A clock of the time that a thread was awake: its own stalls are nobody else's silence."""

from __future__ import annotations

import time
from collections.abc import Callable


class AwakeClock:
    """Time that passes with the turns of a loop, by at most ``most_s`` a turn.

    What keeps the loop from its turns (a stopped process, a starved machine, a long call) would else look like a peer that
    was silent, or like a lease that nobody renewed, though their messages wait to be read. Not thread-safe: calls are
    serialised by whoever owns the loop.

    Args:
        most_s: what a turn may take, in seconds, its wait included.
        clock: where the time comes from.
    """

    def __init__(self, most_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_s = most_s
        self._clock = clock
        self._mark = clock()
        self._base = self._mark

    def __call__(self) -> float:
        """Seconds."""
        return self._base + min(self._clock() - self._mark, self._most_s)

    def turn(self) -> float:
        """A turn begins. Returns how many seconds of the one before were left out."""
        now = self._clock()
        took = now - self._mark
        counted = min(took, self._most_s)
        self._base += counted
        self._mark = now
        return took - counted
