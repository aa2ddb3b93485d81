"""A worker process: ``python -m kvcore_transformers.serving.worker FD`` with one end of a channel as file descriptor FD.

It computes on one torch thread, ends when its parent does, and leaves nothing behind: all memory, sockets and
descriptors are its own.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import torch

from kvcore.config import Config
from kvcore.engine.cache import KVCache
from kvcore.errors import KVCoreError, PeerLostError, ProtocolError, RequestError, UnknownRequestError
from kvcore_transformers.models.loading import cache_for, load_model
from kvcore_transformers.serving.channel import (
    Abort,
    Channel,
    Connect,
    Connected,
    Crashed,
    Happened,
    PeerLost,
    Ping,
    Pong,
    Ready,
    Rejected,
    Report,
    Start,
    Stop,
    Submit,
    Tell,
    ToWorker,
)
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.plain import PlainEngine

_IDLE_S = 0.2  # nothing in work: only a message changes that
_PULLING_S = 0.002  # waiting for transfers
_GRACE_S = 5.0  # a worker that cannot end by itself after its parent died is ended


class Worker:
    """Serves one parent until told to stop."""

    def __init__(self, sock: socket.socket) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._channel = Channel(sock, ToWorker, self._deliver)
        self._start: Start | None = None
        self._model: Any = None
        self._cache: KVCache | None = None
        self._engine: Engine | PlainEngine | None = None

    def stop(self) -> None:
        """End at the next opportunity; safe to call from a signal handler."""
        self._stopping.set()

    def run(self) -> int:
        """Serve; return the exit status."""
        try:
            self._channel.send(Pong())
            self._loop()
        except Exception as error:  # noqa: BLE001  # whatever it is, the parent is told why
            self._tell_crash(error)
            return 1
        finally:
            if self._cache is not None:
                self._cache.close()
            self._channel.close()
        return 0

    def _loop(self) -> None:
        worked = False
        while not self._stopping.is_set():
            self._take_messages(0.0 if worked else _PULLING_S if self._engine and self._engine.busy else _IDLE_S)
            worked = self._engine is not None and self._engine.step()
            events = self._engine.events() if self._engine else []
            if events:
                self._channel.send(Happened(tuple(events)))

    def _take_messages(self, timeout_s: float) -> None:
        try:
            message = self._inbox.get(timeout=timeout_s) if timeout_s else self._inbox.get_nowait()
            while not self._stopping.is_set():
                self._handle(message)
                message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _handle(self, message: Any) -> None:
        match message:
            case Start():
                self._begin(message)
            case Connect():
                self._connect(message.address)
            case Submit():
                try:
                    self._serving().submit(message.request)
                except KVCoreError as error:
                    self._channel.send(Rejected(message.request.id, error.as_dict()))
            case Abort():
                with contextlib.suppress(UnknownRequestError):  # it ended meanwhile; the parent has been told
                    self._serving().abort(message.request, message.reason)
            case PeerLost():
                engine = self._serving()
                if isinstance(engine, Engine):
                    engine.lose_peer(message.reason)
            case Tell():
                self._channel.send(Report(self._serving().stats))
            case Stop():
                self.stop()
            case KVCoreError():
                self.stop()  # the parent is gone, or talks nonsense

    def _begin(self, start: Start) -> None:
        if self._start is not None:
            raise ProtocolError("worker was started twice")
        self._start = start
        torch.set_num_threads(start.threads)
        self._model = load_model(Path(start.model))
        if start.role == "plain":
            self._engine = PlainEngine(self._model)
            self._channel.send(Ready("", 0))
            return
        self._cache = cache_for(self._model, Config.from_json(start.config))
        address = ""
        if start.role == "prefill":
            sender = self._cache.serve()
            address = sender.address
            self._engine = Engine(self._model, self._cache, chunk=start.chunk, sender=sender)
        elif start.role == "single":
            self._engine = Engine(self._model, self._cache, chunk=start.chunk)
        self._channel.send(Ready(address, self._cache.token_capacity or 0))

    def _connect(self, address: str) -> None:
        if self._start is None or self._cache is None or self._start.role != "decode":
            raise ProtocolError("only a decode worker that has started connects")
        receiver = self._cache.connect(address)
        self._engine = Engine(self._model, self._cache, chunk=self._start.chunk, receiver=receiver)
        self._channel.send(Connected())

    def _serving(self) -> Engine | PlainEngine:
        if self._engine is None:
            raise RequestError("the worker is not ready")
        return self._engine

    def _deliver(self, message: Any) -> None:
        if isinstance(message, Ping):  # here, on the reader's thread: a forward pass may take long
            with contextlib.suppress(PeerLostError):  # the end of the stream is delivered next
                self._channel.send(Pong())
            return
        self._inbox.put(message)
        if isinstance(message, KVCoreError):
            self.stop()
            watchdog = threading.Timer(_GRACE_S, os._exit, args=(1,))
            watchdog.daemon = True
            watchdog.start()

    def _tell_crash(self, error: Exception) -> None:
        typed = error if isinstance(error, KVCoreError) else KVCoreError(f"{type(error).__name__}: {error}")
        trace = "" if isinstance(error, KVCoreError) else traceback.format_exc()
        try:
            self._channel.send(Crashed(typed.as_dict(), trace))
        except KVCoreError:
            traceback.print_exception(error)  # nobody listens any more: at least the log has it


def main() -> int:
    """Entry point of the process."""
    worker = Worker(socket.socket(fileno=int(sys.argv[1])))
    signal.signal(signal.SIGINT, lambda number, frame: worker.stop())
    signal.signal(signal.SIGTERM, lambda number, frame: worker.stop())
    return worker.run()


if __name__ == "__main__":
    sys.exit(main())
