"""Worker processes as their parent sees them: start, talk, notice death, end (no torch)."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from kvcore.errors import KVCoreError, PeerLostError, error_from_dict
from kvcore_transformers.serving.channel import Channel, Crashed, FromWorker, Ping, Pong, Role, Stop, ToWorker

START_S = 180.0
"""How long a worker may take to start and to load its model."""

SILENCE_S = 8.0
"""Silence after which a worker that has started counts as lost; see :class:`Fleet`."""

_STOP_S = 3.0
_PING_S = 1.0


@dataclass(frozen=True)
class Message:
    """Something a worker said, or the error that ended its stream."""

    worker: Worker
    body: Any


@dataclass(frozen=True)
class Silent:
    """In place of a message: the worker has not answered for so long."""

    seconds: float


class Worker:
    """One worker process.

    Attributes:
        role: what it does.
        pid: its process id.
        ended: why it can no longer be talked to, once that is so.
    """

    def __init__(self, role: Role, inbox: queue.SimpleQueue[Message], silence_s: float = SILENCE_S) -> None:
        self.role: Role = role
        self.ended: KVCoreError | None = None
        self._inbox = inbox
        self._silence_s = silence_s
        self._heard = False
        self._pinged_at = -_PING_S
        self._waiting_since: float | None = time.monotonic()  # for the answer to a ping, or for its first sign of life
        self._silent = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvcore_transformers.serving.worker", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                process_group=0,  # Ctrl-C in a terminal reaches the parent alone, which ends its workers
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        except BaseException:
            ours.close()
            self._log.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._channel = Channel(ours, FromWorker, self._deliver, send_timeout_s=silence_s)

    def send(self, message: ToWorker) -> None:
        """Send a message; one to a worker that has ended is dropped (its end has been or will be delivered)."""
        if self.ended is None:
            with contextlib.suppress(PeerLostError):
                self._channel.send(message)

    def watch(self) -> None:
        """Ask for a sign of life from time to time; a worker that gives none for too long is reported once."""
        now = time.monotonic()
        if self.ended is not None or self._silent:
            return
        limit = self._silence_s if self._heard else START_S
        since = self._waiting_since
        if since is not None and now - since > limit:
            self._silent = True
            self.send(Stop())  # read should it ever go on: nobody listens to it any more
            self._inbox.put(Message(self, Silent(limit)))
        elif self._heard and now - self._pinged_at >= _PING_S:
            self._pinged_at = now
            if since is None:
                self._waiting_since = now
            self.send(Ping())

    def _deliver(self, body: Any) -> None:
        """On the reader's thread: whatever comes is a sign of life."""
        self._heard = True
        self._waiting_since = None
        if not isinstance(body, Pong):
            self._inbox.put(Message(self, body))

    def end_of(self, body: Any) -> KVCoreError | None:
        """The error where a message says that this worker is over, else None."""
        if isinstance(body, Crashed):
            error = error_from_dict(body.error)
            if body.trace:
                error.fields["trace"] = body.trace
        elif isinstance(body, Silent):
            error = PeerLostError(f"the {self.role} process does not answer", pid=self.pid, seconds=body.seconds)
        elif isinstance(body, KVCoreError):
            status = self._wait(_STOP_S)
            error = PeerLostError(f"the {self.role} process died", pid=self.pid, status=_status(status))
            if tail := self._tail():
                error.fields["log"] = tail
        else:
            return None
        if self.ended is None:
            self.ended = error
        return self.ended

    def stop(self, grace_s: float = _STOP_S) -> None:
        """End the process: ask, then insist. Idempotent; returns when it is gone."""
        self.send(Stop())
        self.ended = self.ended or PeerLostError(f"the {self.role} process was stopped", pid=self.pid)
        if self._wait(0.0 if self._silent else grace_s) is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._channel.close()
        self._log.close()

    def _wait(self, seconds: float) -> int | None:
        try:
            return self._process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    def _tail(self) -> str:
        if self._log.closed:
            return ""
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-2000:]


class Fleet:
    """Workers of one parent. A context manager: leaving it ends them all, whatever happened.

    Args:
        silence_s: seconds without an answer after which a worker counts as lost. Its death is noticed at once; this is
            for one that is stopped, or that hangs.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._workers: list[Worker] = []

    def start(self, role: Role) -> Worker:
        """Start a worker process."""
        worker = Worker(role, self._inbox, self._silence_s)
        self._workers.append(worker)
        return worker

    def receive(self, timeout_s: float) -> Message | None:
        """The next message of any worker, or None when there was none in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            for worker in self._workers:
                worker.watch()
            left = deadline - time.monotonic()
            try:
                return self._inbox.get(timeout=max(0.0, min(left, _PING_S)))
            except queue.Empty:
                if left <= 0:
                    return None

    def expect(self, worker: Worker, kind: type, timeout_s: float) -> Any:
        """Wait for a message of one kind from a worker; other workers' messages stay in order behind it.

        Raises what ended the worker, or PeerLostError past the deadline.
        """
        if worker.ended is not None:
            raise worker.ended
        deadline = time.monotonic() + timeout_s
        others: list[Message] = []
        try:
            while (left := deadline - time.monotonic()) > 0:
                message = self.receive(left)
                if message is None:
                    break
                if message.worker is not worker:
                    others.append(message)
                elif (error := worker.end_of(message.body)) is not None:
                    raise error
                elif isinstance(message.body, kind):
                    return message.body
                else:
                    others.append(message)
        finally:
            for message in others:
                self._inbox.put(message)
        raise PeerLostError(
            f"the {worker.role} process did not answer in time",
            pid=worker.pid,
            waited_for=kind.__name__,
            seconds=timeout_s,
        )

    def close(self) -> None:
        """End all workers. Idempotent."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.send(Stop())  # all at once; stop() then waits for one after the other
        for worker in workers:
            worker.stop()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _status(code: int | None) -> str:
    if code is None:
        return "running"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}"
