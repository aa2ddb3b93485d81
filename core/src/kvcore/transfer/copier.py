"""Where the copies of a transport run: on a thread of their own, or inline for tests."""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcore.contract import ReadHandle, ReadJob
from kvcore.errors import KVCoreError, TransferError
from kvcore.layout.moves import run_program

Bytes = npt.NDArray[np.uint8]


class Task(Protocol):
    """Something to copy. Exactly one of the two is called, once, and neither raises what a copy may raise."""

    def run(self) -> None:
        """Copy."""

    def cancel(self) -> None:
        """End without copying: the copier is closed."""


class CopyTask(ReadHandle):
    """Programs to run from mapped arenas into local ones; the handle of a read.

    Args:
        copies: ``(job, source arena, destination arena)``.
        finished: called once, when no byte will move any more, whatever the outcome.
    """

    def __init__(self, copies: Sequence[tuple[ReadJob, Bytes, Bytes]], finished: Callable[[], None]) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._copies = list(copies)
        self._finished = finished
        self._error: TransferError | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Copy. Never raises: what goes wrong is raised by :meth:`poll`."""
        started = time.perf_counter()
        try:
            for job, source, destination in self._copies:
                self.nbytes += run_program(job.program, source, destination, job.src_units, job.dst_units)
        except KVCoreError as error:
            self._error = TransferError(f"copy failed: {error.message}", **error.fields)
        except Exception as error:  # noqa: BLE001 -- the copier's thread serves other requests; poll() raises this one
            self._error = TransferError("copy failed", cause=repr(error))
        self.seconds = time.perf_counter() - started
        self._end()

    def cancel(self) -> None:
        """End without copying: the copier is closed."""
        self._error = TransferError("the transport was closed before the copy began")
        self._end()

    def _end(self) -> None:
        self._copies.clear()  # no view of the peer's memory outlives the read
        self._done.set()
        self._finished()

    def poll(self) -> bool:
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True


class Copier(ABC):
    """Runs copy tasks in the order they come."""

    @abstractmethod
    def submit(self, task: Task) -> None:
        """Run a task, now or soon."""

    @abstractmethod
    def close(self) -> None:
        """Finish the task under way, cancel the others. Idempotent."""


class InlineCopier(Copier):
    """Copies at once, in the caller's thread."""

    def submit(self, task: Task) -> None:
        task.run()

    def close(self) -> None:
        """Nothing is ever under way."""


class ThreadCopier(Copier):
    """Copies on one thread, started with the first task."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, task: Task) -> None:
        with self._lock:
            if not self._closed:
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="kvcore-copier", daemon=True)
                    self._thread.start()
                self._queue.put(task)
                return
        task.cancel()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        if thread is not None:
            self._queue.put(None)
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            if self._closed:
                task.cancel()
            else:
                task.run()
