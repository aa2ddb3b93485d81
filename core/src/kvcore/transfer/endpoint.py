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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Generic, Self

import msgspec
import structlog
import zmq
from zmq.utils.monitor import parse_monitor_message

from kvcore.contract import Transport
from kvcore.errors import ConfigError, HandshakeError, ProtocolError, TransferError
from kvcore.layout import Int64Array
from kvcore.transfer import control
from kvcore.transfer.manifest import Manifest
from kvcore.transfer.payload import Payload
from kvcore.transfer.receiver import SENDER, ReceiverSession, Verify
from kvcore.transfer.sender import SenderSession
from kvcore.transfer.session import (
    EventT,
    Peer,
    ReceiveEvent,
    ReceiveFailed,
    SendEvent,
    SendFailed,
    Session,
    TransferOptions,
)

_log = structlog.get_logger("kvcore.transfer.endpoint")

_LINGER_MS = 500
_WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_POLL_READS_S = 0.001


@dataclass(frozen=True)
class CurveKeys:
    """CURVE keys (z85 text, see ``zmq.curve_keypair``): the traffic is encrypted and the sender authenticated.

    Attributes:
        public_key, secret_key: this process's own pair.
        server_key: public key of the sender; only a receiver needs it.
    """

    public_key: bytes
    secret_key: bytes
    server_key: bytes = b""

    def __post_init__(self) -> None:
        for name, key in vars(self).items():
            if len(key) != 40 and (key or name != "server_key"):
                raise ConfigError("a CURVE key is 40 characters of z85", key=name, got_length=len(key))


class EndpointStats(msgspec.Struct, frozen=True):
    """What an endpoint has moved.

    Attributes:
        bytes_read: logical bytes that landed here (receivers).
        copy_seconds: time the transport spent moving them, 0 where it cannot tell.
        reads_in_flight: reads that are not terminal.
        held_units: units offered and not released (senders).
        peers: receivers that have said hello (senders), or 1 while connected.
    """

    bytes_read: int = 0
    copy_seconds: float = 0.0
    reads_in_flight: int = 0
    held_units: int = 0
    peers: int = 0


def _drain(socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
    """Take every message that has arrived."""
    while True:
        try:
            yield socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class _Endpoint(Generic[EventT]):
    """The I/O thread and everything it owns."""

    def __init__(self, session: Session[EventT], name: str) -> None:
        self._session = session
        self._name = name
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[EventT] = deque()
        self._failure: Exception | None = None
        self._stopping = False
        self._stopped = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _socket(self, kind: int, keys: CurveKeys | None) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
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
    def _call(self) -> Iterator[None]:
        """Run a call on the session: serialised, refused after a failure or the end, followed by a wake-up."""
        with self._lock:
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
        with self._lock:
            if not self._queue and self._failure is not None:
                self._check()
            taken = list(self._queue)
            self._queue.clear()
            return taken

    def wait_event(self, timeout: float | None = None) -> EventT | None:
        """Take the next event, waiting up to ``timeout`` seconds (None: without end); None where none came, or where
        the endpoint was closed. Raises TransferError where the I/O thread has failed."""
        with self._lock:
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
                with self._lock:
                    if ready.pop(self._wake_fd, None):
                        with contextlib.suppress(BlockingIOError):
                            os.eventfd_read(self._wake_fd)
                    self._turn()
                    self._send_all()
                    self._take_events()
                    if self._stopping:
                        break
            self._finish()
        except Exception as error:  # noqa: BLE001 -- whatever it was, waiting engines must learn of it
            _log.exception("I/O thread failed", endpoint=self._name)
            with self._lock:
                self._failure = error
                self._queue.extend(self._session.events())
                self._queue.extend(self._fail_all(TransferError("the I/O thread failed", cause=repr(error))))
        finally:
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

    def _send_all(self) -> None:
        for peer, message in self._session.outbox():
            self._send(peer, control.encode(message))

    def _receive(self, data: bytes, peer: Peer) -> None:
        try:
            message = control.decode(data)
        except ProtocolError as error:
            self._broken(peer, error)
            return
        self._handle(peer, message)

    def _timeout_s(self) -> float:
        return self._session.options.heartbeat_s / 4

    @abstractmethod
    def _start(self) -> None: ...

    @abstractmethod
    def _turn(self) -> None: ...

    @abstractmethod
    def _send(self, peer: Peer, data: bytes) -> None: ...

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


class SenderEndpoint(_Endpoint[SendEvent]):
    """Serves the requests of one process to any number of receivers. A context manager.

    Args:
        manifest: of this process; its ``endpoint`` is what the transport returned for the served arenas.
        bind: ZeroMQ address; ``tcp://127.0.0.1:*`` takes a free port.
        options: times of the protocol.
        keys: CURVE keys, or None for a plain connection.

    Attributes:
        address: what receivers connect to.

    Raises ConfigError where the address cannot be bound.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        bind: str = "tcp://127.0.0.1:*",
        options: TransferOptions | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        self._sender = SenderSession(manifest, clock=time.monotonic, options=options)
        super().__init__(self._sender, "kvcore-sender")
        with self._or_release("cannot bind the control address", bind):
            self._router = self._socket(zmq.ROUTER, keys)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer whose connection is cut says so
            if keys is not None:
                self._router.curve_server = True
            self._router.bind(bind)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller.register(self._router, zmq.POLLIN)
        self._thread.start()

    def begin(self, request: str, num_tokens: int) -> None:
        """See :meth:`SenderSession.begin`."""
        with self._call():
            self._sender.begin(request, num_tokens)

    def offer(
        self,
        request: str,
        start: int,
        stop: int,
        payloads: Sequence[Payload],
        *,
        last: bool = False,
        engine_data: bytes = b"",
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """See :meth:`SenderSession.offer`."""
        with self._call():
            self._sender.offer(request, start, stop, payloads, last=last, engine_data=engine_data, checksums=checksums)

    def note_chunk_start(self, request: str, *, last: bool) -> None:
        """See :meth:`SenderSession.note_chunk_start`."""
        with self._call():
            self._sender.note_chunk_start(request, last=last)

    def abort(self, request: str, reason: str) -> None:
        """See :meth:`SenderSession.abort`."""
        with self._call():
            self._sender.abort(request, reason)

    def has(self, request: str) -> bool:
        """Whether a request is begun and not over."""
        with self._lock:
            return self._sender.has(request)

    def stats(self) -> EndpointStats:
        """What is held now."""
        with self._lock:
            return EndpointStats(held_units=self._sender.held_units(), peers=len(self._sender.peers()))

    def _start(self) -> None:
        return

    def _turn(self) -> None:
        for peer, *frames in _drain(self._router):
            self._receive(frames[0] if len(frames) == 1 else b"", peer)
        self._sender.tick()

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            self._router.send_multipart([peer, data], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._sender.lost(peer, "its connection was closed")

    def _handle(self, peer: Peer, message: control.AnyMessage) -> None:
        self._sender.handle(peer, message)

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        self._sender.broken(peer, error)

    def _end_session(self, reason: str) -> None:
        self._sender.close(reason)

    def _fail_all(self, error: TransferError) -> list[SendEvent]:
        return [SendFailed(request, error) for request in self._sender.requests()]

    def _release(self) -> None:
        return


class ReceiverEndpoint(_Endpoint[ReceiveEvent]):
    """Pulls requests from one sender. A context manager; construction is the handshake.

    Args:
        address: of the sender.
        manifest: of this process.
        transport: opens the connection to the sender's memory; it must have registered the local arenas. It is not
            closed here.
        options: times of the protocol.
        keys: CURVE keys with the sender's ``server_key``, or None.
        verify: see :class:`ReceiverSession`.

    Raises HandshakeError (no answer, or peers that cannot exchange data: field and both values), PeerLostError.
    """

    def __init__(
        self,
        address: str,
        manifest: Manifest,
        transport: Transport,
        *,
        options: TransferOptions | None = None,
        keys: CurveKeys | None = None,
        verify: Verify | None = None,
    ) -> None:
        if keys is not None and not keys.server_key:
            raise ConfigError("a receiver with CURVE keys needs the sender's public key", key="server_key")
        self._receiver = ReceiverSession(
            manifest, transport.connect, clock=time.monotonic, options=options, verify=verify
        )
        super().__init__(self._receiver, "kvcore-receiver")
        self.address = address
        self._conn_fd: int | None = None
        with self._or_release("cannot connect to the control address", address):
            self._dealer = self._socket(zmq.DEALER, keys)
            self._dealer.setsockopt(zmq.ROUTING_ID, manifest.instance.encode())
            if keys is not None:
                self._dealer.curve_serverkey = keys.server_key
            self._monitor = self._dealer.get_monitor_socket(_WATCHED)
            self._dealer.connect(address)
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._thread.start()
        self._shake_hands()

    def _shake_hands(self) -> None:
        with self._lock:
            self._changed.wait_for(
                lambda: self._receiver.connected or self._receiver.failure is not None or self._stopped
            )
            failure: Exception | None = self._receiver.failure or self._failure
        if failure is not None:
            self.close()
            raise failure
        if not self._receiver.connected:
            raise HandshakeError("closed before the sender answered", address=self.address)

    @property
    def connected(self) -> bool:
        """Whether requests can be asked for."""
        with self._lock:
            return self._receiver.connected and self._failure is None and not self._stopping

    def ask(self, request: str, tables: Mapping[tuple[str, str], Int64Array], start: int, stop: int) -> int:
        """See :meth:`ReceiverSession.ask`."""
        with self._call():
            return self._receiver.ask(request, tables, start, stop)

    def abort(self, request: str, reason: str) -> None:
        """See :meth:`ReceiverSession.abort`."""
        with self._call():
            self._receiver.abort(request, reason)

    def has(self, request: str) -> bool:
        """Whether a request is asked for and not over."""
        with self._lock:
            return self._receiver.has(request)

    def stats(self) -> EndpointStats:
        """What has been moved so far."""
        with self._lock:
            session = self._receiver
            return EndpointStats(
                session.bytes_read, session.copy_seconds, session.reads_in_flight, peers=int(session.connected)
            )

    def _start(self) -> None:
        with self._lock:
            self._receiver.hello()
            self._send_all()

    def _timeout_s(self) -> float:
        if self._conn_fd is None and self._receiver.reads_in_flight:
            return _POLL_READS_S
        return super()._timeout_s()

    def _turn(self) -> None:
        for frames in _drain(self._dealer):
            self._receive(frames[0] if len(frames) == 1 else b"", SENDER)
        self._watch()
        self._receiver.tick()
        self._follow_connection()

    def _watch(self) -> None:
        for frames in _drain(self._monitor):
            event = parse_monitor_message(frames)["event"]
            if event != zmq.EVENT_DISCONNECTED:
                self._receiver.refused(
                    HandshakeError("the sender refused the connection", address=self.address,
                                   remedy="check the CURVE keys of both sides")
                )  # fmt: skip
            elif self._receiver.connected:
                # Messages may have been lost with it, so it is never silently taken up again.
                self._receiver.lost("its control connection was closed")

    def _follow_connection(self) -> None:
        connection = self._receiver.connection
        if connection is not None and self._conn_fd is None:
            self._conn_fd = connection.fileno()
            if self._conn_fd is not None:
                self._poller.register(self._conn_fd, zmq.POLLIN)

    def _send(self, peer: Peer, data: bytes) -> None:
        try:
            self._dealer.send(data, zmq.NOBLOCK)
        except zmq.Again:
            self._receiver.lost("its control connection was closed")

    def _handle(self, peer: Peer, message: control.AnyMessage) -> None:
        self._receiver.handle(peer, message)

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        self._receiver.broken(peer, error)

    def _end_session(self, reason: str) -> None:
        self._receiver.close(reason)
        connection = self._receiver.connection
        if connection is not None and not connection.quiesce(self._receiver.options.quiesce_s):
            _log.error("reads do not end; their units stay reserved", endpoint=self._name)
        self._receiver.tick()
        self._receiver.give_up_reads()

    def _fail_all(self, error: TransferError) -> list[ReceiveEvent]:
        connection = self._receiver.connection
        quiet = connection is None or connection.quiesce(self._receiver.options.quiesce_s)
        return [ReceiveFailed(request, attempt, error, quiet) for request, attempt in self._receiver.requests()]

    def _release(self) -> None:
        connection = self._receiver.connection
        if self._conn_fd is not None:
            self._poller.unregister(self._conn_fd)
        if connection is not None:
            connection.close()
        self._dealer.disable_monitor()
        self._monitor.close()


__all__ = ["CurveKeys", "EndpointStats", "ReceiverEndpoint", "SenderEndpoint"]
