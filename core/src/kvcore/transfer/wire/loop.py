"""Endpoints: a session, its ZeroMQ socket and one I/O thread, behind thread-safe calls.

An engine thread calls and takes events; the I/O thread alone touches the socket. Both hold the endpoint's lock while
they touch the session, so the order of events is the order in which things happened to the session.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self

import msgspec
import zmq

from kvcore.errors import ConfigError, ProtocolError, TransferError
from kvcore.log import get_logger, plain_trace
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import EventT, Peer, Session, TransferOptions
from kvcore.transfer.wire.awake import AwakeClock
from kvcore.transfer.wire.budget import RECEIVE_QUEUE, SEND_QUEUE, Unsent
from kvcore.transfer.wire.worker import Worker

_log = get_logger("kvcore.transfer.wire")

_LINGER_MS = 500
_RETRY_S = 0.001
_YIELD_S = 0.0002
_PATIENCE = 100
"""So often a turn waits for engine calls that wait themselves; an engine that calls without end cannot stop it."""


def _named(name: str, keys: tuple[bytes, ...]) -> list[tuple[str, bytes]]:
    return [(f"{name}[{number}]", key) for number, key in enumerate(keys)]


def awake_clock(options: TransferOptions | None) -> AwakeClock:
    """The clock of an endpoint's session: a turn that takes longer than two waits is a stall of this process."""
    return AwakeClock((options or TransferOptions()).heartbeat_s / 2)


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys (z85 text, see ``zmq.curve_keypair``): the traffic is encrypted and both ends are authenticated.

    Attributes:
        public_key, secret_key: this process's own pair.
        peers: public keys of those who may connect; of a receiver, the one key of its sender.
    """

    public_key: bytes
    secret_key: bytes
    peers: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if not self.peers:
            raise ConfigError("CURVE needs the public keys of those who may connect", key="peers")
        for name, key in (
            ("public_key", self.public_key),
            ("secret_key", self.secret_key),
            *_named("peers", self.peers),
        ):
            if len(key) != 40:
                raise ConfigError("a CURVE key is 40 characters of z85", key=name, got_length=len(key))


class EndpointStats(msgspec.Struct, frozen=True):
    """What an endpoint has moved.

    Attributes:
        bytes_read: logical bytes that landed here (receivers).
        copy_seconds: time the transport spent moving them, 0 where it cannot tell.
        reads_in_flight: reads that are not terminal.
        held_units: units offered and not released (senders).
        peers: receivers that have said hello (senders), or 1 while connected.
        peers_cut: connections that were cut because more came over them than a peer may send.
    """

    bytes_read: int = 0
    copy_seconds: float = 0.0
    reads_in_flight: int = 0
    held_units: int = 0
    peers: int = 0
    peers_cut: int = 0


class Endpoint(Generic[EventT]):
    """The I/O thread and everything it owns."""

    def __init__(self, session: Session[EventT], name: str, awake: AwakeClock) -> None:
        self._session = session
        self._name = name
        self._awake = awake
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._callers: deque[None] = deque()
        self._cuts = 0
        self._cuts_logged_at = float("-inf")
        self._queue: deque[EventT] = deque()
        self._failure: Exception | None = None
        self._stopping = False
        self._stopped = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._worker = Worker(f"{name}-work", self._wake)
        session.defer = self._worker.defer
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._unsent = Unsent(self._post)
        self._patience = _PATIENCE
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _socket(self, kind: int, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, control.MAX_MESSAGE_BYTES)
        if keys is not None:
            socket.curve_publickey = keys.public_key
            socket.curve_secretkey = keys.secret_key
        return socket

    @contextlib.contextmanager
    def _or_release(self, message: str, address: str) -> Iterator[None]:
        """Turn a failure to set the socket up into a ConfigError that leaves nothing open."""
        try:
            yield
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            os.close(self._wake_fd)
            raise ConfigError(message, address=address, cause=str(error)) from error

    # --- the engine's side ---

    @contextlib.contextmanager
    def _first(self) -> Iterator[None]:
        """The lock, for an engine's thread: the I/O thread sees that somebody waits, and lets it go first."""
        waits = False
        try:
            self._callers.append(None)
            waits = True
            with self._lock:
                self._callers.pop()
                waits = False
                yield
        finally:
            if waits:
                self._callers.pop()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        """Run a call on the session: serialised, refused after a failure or the end, followed by a wake-up."""
        with self._first():
            self._check()
            try:
                yield
            finally:
                self._take_events()
                self._wake()

    def _check(self) -> None:
        if self._failure is not None:
            raise TransferError("the endpoint's I/O thread has failed", endpoint=self._name) from self._failure
        if self._stopping:
            raise TransferError("the endpoint is closed", endpoint=self._name)

    def events(self) -> list[EventT]:
        """Take what has happened, in order, without waiting. Raises TransferError once, after the last event, if the
        I/O thread has failed."""
        with self._first():
            if not self._queue and self._failure is not None:
                self._check()
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def wait_event(self, timeout: float | None = None) -> EventT | None:
        """Take the next event, waiting up to ``timeout`` seconds (None: without end); None where none came, or where
        the endpoint was closed. Raises TransferError where the I/O thread has failed."""
        with self._first():
            self._changed.wait_for(lambda: bool(self._queue) or self._failure is not None or self._stopped, timeout)
            if self._queue:
                return self._queue.popleft()
            if self._failure is not None:
                self._check()
            return None

    def close(self) -> None:
        """Fail what is under way, say goodbye, end the thread, leave no descriptor behind. Idempotent.

        Events of requests that this ended can still be taken afterwards.
        """
        with self._lock:
            first, self._stopping = not self._stopping, True
            if first:
                self._wake()
        self._thread.join()
        with self._lock:
            if self._wake_fd >= 0:
                os.close(self._wake_fd)
                self._wake_fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _wake(self) -> None:
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)

    def _take_events(self) -> None:
        self._queue.extend(self._session.events())
        self._changed.notify_all()

    # --- the I/O thread ---

    def _run(self) -> None:
        try:
            self._start()
            while True:
                ready = dict(self._poller.poll(max(1, int(self._timeout_s() * 1000))))
                self._patience = _PATIENCE
                with self._lock:
                    if ready.pop(self._wake_fd, None):
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake_fd)
                    stalled = self._awake.turn()
                self._take_messages()
                self._let_in()
                with self._lock:
                    if stalled > self._session.options.peer_timeout_s / 2:
                        _log.warning("was away: nothing that is due counts by it", endpoint=self._name, seconds=stalled)
                    for outcome, then in self._worker.ended():
                        self._session.resume(then, outcome)
                    self._turn()
                    self._send_all()
                    self._take_events()
                    if self._stopping:
                        break
            self._finish()
        except Exception as error:  # noqa: BLE001 -- whatever it was, waiting engines must learn of it
            with self._lock:
                self._failure = error
                self._take_events()
                self._queue.extend(self._fail_all(TransferError("the I/O thread failed", cause=repr(error))))
                self._changed.notify_all()
            # Only now: whoever renders the line may take its time.
            _log.error("I/O thread failed", endpoint=self._name, trace=plain_trace(error))
        finally:
            self._worker.close()
            self._release()
            self._context.destroy(linger=_LINGER_MS)
            with self._lock:
                self._stopped = True
                self._changed.notify_all()

    def _finish(self) -> None:
        with self._lock:
            self._end_session("endpoint closed")
            self._send_all()
            self._take_events()
        deadline = time.monotonic() + _LINGER_MS / 1000
        while self._unsent and time.monotonic() < deadline:
            time.sleep(_RETRY_S)
            with self._lock:
                self._flush()

    def _let_in(self) -> None:
        """Let waiting engine calls have the lock: let go and taken again at once, it goes to nobody else."""
        while self._callers and self._patience > 0:
            time.sleep(_YIELD_S)
            self._patience -= 1

    def _send_all(self) -> None:
        self._flush()
        for peer, message in self._session.outbox():
            try:
                data = control.encode(message)
            except Exception as error:  # noqa: BLE001 -- see _mishandled
                self._mishandled(peer, message, error)
            else:
                self._send(peer, data)

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            if not self._unsent.put(peer, data):
                self._unsent.forget(peer)
                self._lost(peer, "it does not take what is sent to it")
        except zmq.ZMQError as error:
            self._unreachable(peer, error)

    def _flush(self) -> None:
        for peer in self._unsent.peers():
            try:
                self._unsent.flush(peer)
            except zmq.ZMQError as error:
                self._unreachable(peer, error)

    def _unreachable(self, peer: Peer, error: zmq.ZMQError) -> None:
        if error.errno != zmq.EHOSTUNREACH:
            raise error
        self._unsent.forget(peer)
        self._lost(peer, "its connection was closed")

    def _decode(self, data: bytes, peer: Peer) -> control.AnyMessage | None:
        """Decode a message, without the lock; None for what is none, which is handled here."""
        try:
            return control.decode(data)
        except ProtocolError as error:
            self._let_in()
            with self._lock:
                self._broken(peer, error)
            return None

    def _receive(self, peer: Peer, message: control.AnyMessage) -> None:
        self._let_in()
        with self._lock:
            try:
                self._handle(peer, message)
            except Exception as error:  # noqa: BLE001 -- see _mishandled
                self._mishandled(peer, message, error)

    def _note_cut(self, peer: Peer, error: ProtocolError) -> None:
        """Count a peer that was cut off, and say so: one line a second at most, whoever comes again and again."""
        self._cuts += 1
        now = time.monotonic()
        if now - self._cuts_logged_at >= 1:
            self._cuts_logged_at = now
            _log.warning("peer cut off", endpoint=self._name, peer=peer.hex(), why=error.message, so_far=self._cuts)

    def _mishandled(self, peer: Peer, message: control.AnyMessage, cause: Exception) -> None:
        """End what a message was about that could not be handled, answered or encoded: the request that it names, else
        the conversation with its peer. Whatever the cause, the thread goes on serving the others."""
        kind = type(message).__name__.lower()
        _log.error("message not handled", endpoint=self._name, peer=peer.hex(), type=kind, trace=plain_trace(cause))
        if isinstance(message, control.Bye):
            return  # never answered
        about = {name: getattr(message, name) for name in ("request", "attempt") if hasattr(message, name)}
        self._broken(
            peer, ProtocolError("message could not be handled", type=kind, cause=type(cause).__name__, **about)
        )

    def _timeout_s(self) -> float:
        if self._unsent:
            return _RETRY_S
        return self._session.options.heartbeat_s / 4

    @abstractmethod
    def stats(self) -> EndpointStats:
        """What has been moved, and what is held now."""

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _take_messages(self) -> None:
        """Take a bounded number of messages from each socket; the lock is not held, but for handling each of them."""

    @abstractmethod
    def _turn(self) -> None: ...

    @abstractmethod
    def _post(self, peer: Peer, data: bytes) -> None:
        """Hand a message to the peer's socket without waiting. Raises zmq.ZMQError."""

    @abstractmethod
    def _lost(self, peer: Peer, reason: str) -> None: ...

    @abstractmethod
    def _handle(self, peer: Peer, message: control.AnyMessage) -> None: ...

    @abstractmethod
    def _broken(self, peer: Peer, error: ProtocolError) -> None: ...

    @abstractmethod
    def _end_session(self, reason: str) -> None: ...

    @abstractmethod
    def _fail_all(self, error: TransferError) -> list[EventT]: ...

    @abstractmethod
    def _release(self) -> None: ...
