"""A small typed channel between a parent and a worker process: MessagePack messages over a socket pair (no torch).

Messages are msgspec structs of the unions below, so neither side executes what the other sends. The end of the stream
is the death of the other process, which is seen at once.
"""

from __future__ import annotations

import contextlib
import math
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, Literal

import msgspec

from kvcore.errors import PeerLostError, ProtocolError
from kvcore_transformers.serving.requests import EngineStats, Event, GenerationRequest

Role = Literal["prefill", "decode", "single", "plain"]

_HEAD = struct.Struct("<I")
_MAX_FRAME = 64 << 20


class Start(msgspec.Struct, frozen=True, tag=True):
    """To a worker, first: load the model and build the cache.

    Attributes:
        role: ``prefill``, ``decode``, ``single`` (an engine on its own), ``plain`` (transformers without kvcore).
        model: directory of the model.
        config: :meth:`kvcore.config.Config.to_json`.
        chunk: prompt tokens in a forward pass.
        threads: torch threads.
    """

    role: Role
    model: str
    config: bytes
    chunk: int
    threads: int = 1


class Connect(msgspec.Struct, frozen=True, tag=True):
    """To a decode worker: pull from the prefill worker at this address."""

    address: str


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To a worker: serve a request."""

    request: GenerationRequest


class Abort(msgspec.Struct, frozen=True, tag=True):
    """To a worker: end a request."""

    request: str
    reason: str


class PeerLost(msgspec.Struct, frozen=True, tag=True):
    """To a decode worker: the prefill process is gone."""

    reason: str


class Tell(msgspec.Struct, frozen=True, tag=True):
    """To a worker: send a Report."""


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To a worker, once in a while: are you there? Answered at once, whatever is being computed."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """To a worker: give everything back and exit."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From a worker: model and cache are there. ``address``: where a prefill worker serves."""

    address: str
    token_capacity: int


class Connected(msgspec.Struct, frozen=True, tag=True):
    """From a decode worker: the hello was accepted."""


class Happened(msgspec.Struct, frozen=True, tag=True):
    """From a worker: events, in order."""

    events: tuple[Event, ...]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """From a worker: a request was refused on arrival, nothing of it was kept."""

    request: str
    error: dict[str, Any]


class Report(msgspec.Struct, frozen=True, tag=True):
    """From a worker: what it did so far."""

    stats: EngineStats


class Pong(msgspec.Struct, frozen=True, tag=True):
    """From a worker: it runs. Sent when its end of the channel opens, and in answer to each Ping."""


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """From a worker, last: it cannot go on."""

    error: dict[str, Any]
    trace: str = ""


ToWorker = Start | Connect | Submit | Abort | PeerLost | Tell | Ping | Stop
FromWorker = Ready | Connected | Happened | Rejected | Report | Pong | Crashed


class Channel:
    """One end of the socket pair.

    Args:
        sock: connected stream socket, owned from here on.
        incoming: union of the messages this end receives.
        deliver: called on the reader thread with each message, and once, last, with the error that ended the stream.
        send_timeout_s: how long a message may wait for an end that takes none; None is for ever. The reader thread of a
            process that runs always takes what comes, so only one that is stopped lets the pipe fill.
    """

    def __init__(
        self,
        sock: socket.socket,
        incoming: Any,
        deliver: Callable[[Any], None],
        send_timeout_s: float | None = None,
    ) -> None:
        self._sock = sock
        if send_timeout_s is not None:  # of sends alone: a socket's own timeout would also end the reader
            fraction, seconds = math.modf(send_timeout_s)
            timeval = struct.pack("@ll", int(seconds), int(fraction * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._broken: PeerLostError | None = None  # half a message may have gone out: nothing can follow it
        self._decoder = msgspec.msgpack.Decoder(incoming)
        self._encoder = msgspec.msgpack.Encoder()
        self._deliver = deliver
        self._closing = False
        self._sending = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="kvcore-channel", daemon=True)
        self._reader.start()

    def send(self, message: ToWorker | FromWorker) -> None:
        """Send one message. Raises PeerLostError where the other process is gone, or takes nothing for too long."""
        frame = self._encoder.encode(message)
        with self._sending:
            if self._broken is not None:
                raise PeerLostError(self._broken.message, **self._broken.fields)
            try:
                self._sock.sendall(_HEAD.pack(len(frame)) + frame)
            except BlockingIOError as error:
                self._broken = PeerLostError("the other process takes no messages")
                raise self._broken from error
            except OSError as error:
                self._broken = PeerLostError("the other process is gone", cause=str(error))
                raise self._broken from error

    def close(self) -> None:
        """Close the stream; the other end sees it. Idempotent."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._reader:
            self._reader.join()
        self._sock.close()

    def _read(self) -> None:
        try:
            while True:
                (size,) = _HEAD.unpack(self._exactly(_HEAD.size))
                if size > _MAX_FRAME:
                    raise ProtocolError("message of a process is too large", got=size, limit=_MAX_FRAME)
                self._deliver(self._decode(self._exactly(size)))
        except (PeerLostError, ProtocolError) as error:
            if not self._closing:
                self._deliver(error)

    def _decode(self, frame: bytes) -> Any:
        try:
            return self._decoder.decode(frame)
        except msgspec.MsgspecError as error:
            raise ProtocolError("message of a process cannot be decoded", cause=str(error)) from error

    def _exactly(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = self._sock.recv(size)
            except OSError as error:
                raise PeerLostError("the other process is gone", cause=str(error)) from error
            if not part:
                raise PeerLostError("the other process closed its end")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)
