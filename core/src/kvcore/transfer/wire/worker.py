"""A thread for what takes long: hellos of strangers, checksums of prompts. The thread that serves peers goes on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvcore.transfer.session.base import Then, Work, settled


class Worker:
    """Runs work in the order in which it came, one piece after the other.

    The thread starts with the first work. What follows on work is taken by :meth:`ended` and called by the owner, under
    its own lock.

    Args:
        name: of the thread.
        wake: called from the thread when something has ended.
    """

    def __init__(self, name: str, wake: Callable[[], None]) -> None:
        self._name = name
        self._wake = wake
        self._waiting: deque[tuple[Work, Then]] = deque()
        self._ended: deque[tuple[Future[Any], Then]] = deque()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def defer(self, work: Work, then: Then) -> None:
        """Run ``work`` soon; ``then`` gets what came of it. After :meth:`close` nothing is run any more."""
        with self._changed:
            if self._stopping:
                return
            self._waiting.append((work, then))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def ended(self) -> list[tuple[Future[Any], Then]]:
        """Take what has ended, with what follows on it."""
        with self._changed:
            taken = list(self._ended)
            self._ended.clear()
            return taken

    def close(self) -> None:
        """Forget what has not begun and wait for what has: no work reads memory after this. Idempotent."""
        with self._changed:
            self._stopping = True
            self._waiting.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting) or self._stopping)
                if self._stopping:
                    return
                work, then = self._waiting.popleft()
            future = settled(work)
            with self._changed:
                self._ended.append((future, then))
                if self._stopping:
                    return
            self._wake()
