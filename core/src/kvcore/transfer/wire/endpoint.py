"""Endpoints: a session and its ZeroMQ socket behind thread-safe calls. See :mod:`kvcore.transfer.wire.loop`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Literal

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvcore.contract import PeerConnection, Transport
from kvcore.errors import ConfigError, HandshakeError, ProtocolError, TransferError
from kvcore.layout import Int64Array
from kvcore.log import get_logger, plain_trace
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import Peer, ReceiveEvent, ReceiveFailed, SendEvent, SendFailed, TransferOptions
from kvcore.transfer.session.checksums import Checks, SenderChecksums
from kvcore.transfer.session.incoming import transport_failed
from kvcore.transfer.session.joined import JoinedReceiver, name
from kvcore.transfer.session.sender import SenderSession
from kvcore.transfer.users import uids_of
from kvcore.transfer.wire.access import FindUsers, KeyList, SameUser, turned_away
from kvcore.transfer.wire.budget import HELLO_WEIGHT, Budget, Inlet
from kvcore.transfer.wire.loop import CurveKeys, Endpoint, EndpointStats, awake_clock
from kvcore.transfer.wire.strangers import MAX_UNSEEN_BYTES, Strangers

_log = get_logger("kvcore.transfer.wire")

_POLL_READS_S = 0.001
_WATCHED = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class SenderEndpoint(Endpoint[SendEvent]):
    """Serves the requests of one process to any number of receivers. A context manager.

    Args:
        manifest: of this process; its ``endpoint`` is what the transport returned for the served arenas.
        bind: ZeroMQ address; ``tcp://127.0.0.1:*`` takes a free port.
        options: times of the protocol.
        keys: CURVE keys, with those of all who may connect, or None for a plain connection.
        checksums: answers those who ask for checksums; needed where the manifest says so.
        allow: who may connect without keys: processes of the ``same_user`` on this host, or ``anyone``, who is told less.
        uids: finds the users of who connects; another one in tests only.

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
        checksums: SenderChecksums | None = None,
        allow: Literal["same_user", "anyone"] = "same_user",
        uids: FindUsers = uids_of,
    ) -> None:
        exposed = keys is None and allow == "anyone"
        awake = awake_clock(options)
        self._sender = SenderSession(manifest, clock=awake, options=options, checksums=checksums)
        self._sender.discreet = exposed
        super().__init__(self._sender, "kvcore-sender", awake)
        with self._or_release("cannot bind the control address", bind):
            self._router = self._socket(zmq.ROUTER, keys)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a peer whose connection is cut says so
            self._key_list = None if keys is None else KeyList(self._context, keys.peers)
            if self._key_list is not None:
                self._key_list.guard(self._router)
            same_user = SameUser(uids) if keys is None and not exposed else None
            self._strangers = Strangers(self._router, self._sender.options.hello_timeout_s, same_user=same_user)
            self._router.bind(bind)
        self._inlet = Inlet(self._router, routed=True)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        if exposed:
            _log.warning("whoever reaches this address is served: there are no keys", address=self.address)
        self._poller.register(self._router, zmq.POLLIN)
        self._poller.register(self._strangers.monitor, zmq.POLLIN)
        if self._key_list is not None:
            self._poller.register(self._key_list.socket, zmq.POLLIN)
        self._thread.start()

    def begin(self, request: str, num_tokens: int, token: bytes = b"") -> None:
        """See :meth:`SenderSession.begin`."""
        with self._call():
            self._sender.begin(request, num_tokens, token)

    def offer(
        self,
        request: str,
        start: int,
        stop: int,
        payloads: Sequence[Payload],
        *,
        last: bool = False,
        engine_data: bytes = b"",
    ) -> None:
        """See :meth:`SenderSession.offer`."""
        with self._call():
            self._sender.offer(request, start, stop, payloads, last=last, engine_data=engine_data)

    def layerwise(self, request: str) -> bool:
        """See :meth:`SenderSession.layerwise`."""
        with self._call():
            return self._sender.layerwise(request)

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
        with self._first():
            return self._sender.has(request)

    def stats(self) -> EndpointStats:
        """What is held now."""
        with self._first():
            units, peers = self._sender.held_units(), len(self._sender.peers())
            return EndpointStats(held_units=units, peers=peers, peers_cut=self._cuts)

    def _start(self) -> None:
        return

    def _take_messages(self) -> None:
        for item in self._inlet.take():
            fd, peer = item.connection, item.peer
            if self._strangers.is_cut(fd):
                continue
            if not self._strangers.admits(fd):
                self._strangers.cut(fd, peer)
                with self._lock:
                    self._note_cut(peer, ProtocolError("of another user, or nobody knows whose"))
                    self._send(peer, control.encode(turned_away(self._sender.instance, peer)))
                continue
            over = self._strangers.charge(fd, peer, item.frames, item.nbytes)
            message = self._decode(item.data, peer) if over is None else None
            if isinstance(message, control.Hello) and self._strangers.is_welcome(fd):
                over = self._strangers.charge(fd, peer, HELLO_WEIGHT, 0)
            if over is not None:
                self._cut(fd, peer, over)
                continue
            if message is not None:
                self._receive(peer, message)
            self._strangers.heard(fd, peer)
        for fd, peer in [] if self._inlet.more else self._strangers.hoards():
            self._cut(fd, peer, ProtocolError("peer sends without end", limit_bytes=MAX_UNSEEN_BYTES))

    def _cut(self, fd: int, peer: Peer, error: ProtocolError) -> None:
        """A peer is over its share: its conversation ends, it is told why, and its connection is closed."""
        self._strangers.cut(fd, peer)
        self._let_in()
        with self._lock:
            self._note_cut(peer, error)
            if peer in self._sender.peers():
                self._sender.broken(peer, error)

    def _turn(self) -> None:
        if self._key_list is not None:
            self._key_list.turn()
        for peer in self._strangers.cut_peers():
            self._sender.lost(peer, "it was cut off")  # where a hello of before was read only now
        self._sender.tick()
        self._strangers.turn(self._sender.peers())

    def _post(self, peer: Peer, data: bytes) -> None:
        self._router.send_multipart([peer, data], zmq.NOBLOCK)

    def _lost(self, peer: Peer, reason: str) -> None:
        self._sender.lost(peer, reason)

    def _handle(self, peer: Peer, message: control.AnyMessage) -> None:
        self._sender.handle(peer, message)

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        self._sender.broken(peer, error)

    def _end_session(self, reason: str) -> None:
        self._sender.close(reason)

    def _fail_all(self, error: TransferError) -> list[SendEvent]:
        return [SendFailed(request, error) for request in self._sender.requests()]

    def _release(self) -> None:
        self._strangers.close()


class _Wire:
    """The socket to one rank of a sender, its monitor, and what the transport's connection can be waited for by."""

    def __init__(self, peer: Peer, address: str, dealer: zmq.Socket[bytes]) -> None:
        self.peer = peer
        self.address = address
        self.dealer = dealer
        self.monitor = dealer.get_monitor_socket(_WATCHED)
        self.conn_fd: int | None = None
        self.inlet = Inlet(dealer, routed=False)
        self.budget = Budget(time.monotonic)
        self.cut = False
        dealer.connect(address)


class ReceiverEndpoint(Endpoint[ReceiveEvent]):
    """Pulls requests from all ranks of one sender. A context manager; construction is the handshake.

    Args:
        addresses: of the sender: one a rank, in any order.
        manifest: of this process.
        transport: opens the connections to the sender's memory; it must have registered the local arenas. It is not
            closed here.
        options: times of the protocol.
        keys: CURVE keys whose one peer is the sender, or None.
        checksums: see :class:`kvcore.transfer.session.receiver.ReceiverSession`.

    Raises HandshakeError (no answer, or peers that cannot exchange data: field and both values), PeerLostError.
    """

    def __init__(
        self,
        addresses: str | Sequence[str],
        manifest: Manifest,
        transport: Transport,
        *,
        options: TransferOptions | None = None,
        keys: CurveKeys | None = None,
        checksums: Checks | None = None,
    ) -> None:
        if keys is not None and len(keys.peers) != 1:
            raise ConfigError("a receiver needs the one CURVE key of its sender", key="peers", got=len(keys.peers))
        self.addresses = (addresses,) if isinstance(addresses, str) else tuple(addresses)
        if not self.addresses:
            raise ConfigError("a receiver needs the address of its sender")
        awake = awake_clock(options)
        self._receiver = JoinedReceiver(
            manifest,
            [transport.connect] * len(self.addresses),
            clock=awake,
            options=options,
            checksums=checksums,
            traits=transport.traits,
        )
        super().__init__(self._receiver, "kvcore-receiver", awake)
        self._wires: dict[Peer, _Wire] = {}
        for number, address in enumerate(self.addresses):
            with self._or_release("cannot connect to the control address", address):
                dealer = self._socket(zmq.DEALER, keys)
                dealer.setsockopt(zmq.ROUTING_ID, manifest.instance.encode())
                if keys is not None:
                    dealer.curve_serverkey = keys.peers[0]
                self._wires[name(number)] = _Wire(name(number), address, dealer)
        for wire in self._wires.values():
            self._poller.register(wire.dealer, zmq.POLLIN)
            self._poller.register(wire.monitor, zmq.POLLIN)
        self._thread.start()
        try:
            self._shake_hands()
        except BaseException:  # an interrupt while waiting, too, must leave no thread behind
            self.close()
            raise

    def _shake_hands(self) -> None:
        with self._lock:
            self._changed.wait_for(
                lambda: self._receiver.connected or self._receiver.failure is not None or self._stopped
            )
            failure: Exception | None = self._receiver.failure or self._failure
            if failure is None and not self._receiver.connected:
                failure = HandshakeError("closed before the sender answered", addresses=self.addresses)
        if failure is not None:
            raise failure

    @property
    def connected(self) -> bool:
        """Whether requests can be asked for."""
        with self._first():
            return self._receiver.connected and self._failure is None and not self._stopping

    def ask(
        self, request: str, tables: Mapping[tuple[str, str], Int64Array], start: int, stop: int, token: bytes = b""
    ) -> int:
        """See :meth:`ReceiverSession.ask`."""
        with self._call():
            return self._receiver.ask(request, tables, start, stop, token)

    def abort(self, request: str, reason: str) -> None:
        """See :meth:`ReceiverSession.abort`."""
        with self._call():
            self._receiver.abort(request, reason)

    def has(self, request: str) -> bool:
        """Whether a request is asked for and not over."""
        with self._first():
            return self._receiver.has(request)

    def stats(self) -> EndpointStats:
        """What has been moved so far."""
        with self._first():
            session = self._receiver
            return EndpointStats(
                session.bytes_read, session.copy_seconds, session.reads_in_flight, peers=int(session.connected),
                peers_cut=self._cuts,
            )  # fmt: skip

    def _start(self) -> None:
        with self._lock:
            self._receiver.hello()
            self._send_all()

    def _timeout_s(self) -> float:
        if self._receiver.reads_in_flight and any(wire.conn_fd is None for wire in self._wires.values()):
            return _POLL_READS_S
        return super()._timeout_s()

    def _take_messages(self) -> None:
        for wire in self._wires.values():
            for item in [] if wire.cut else wire.inlet.take():
                over = wire.budget.take(item.frames, item.nbytes)
                if over is not None:
                    self._cut(wire, over)
                    break
                message = self._decode(item.data, wire.peer)
                if message is not None:
                    self._receive(wire.peer, message)

    def _cut(self, wire: _Wire, error: ProtocolError) -> None:
        """A sender is over its share: the conversation ends, and nothing is read of its connection any more."""
        wire.cut = True
        self._poller.unregister(wire.dealer)
        self._let_in()
        with self._lock:
            self._note_cut(wire.peer, error)
            self._receiver.broken(wire.peer, error)

    def _turn(self) -> None:
        for wire in self._wires.values():
            if wire.cut or not wire.inlet.more:  # first what came over a connection, then that it is gone
                self._watch(wire)
        self._receiver.tick()
        for wire, link in zip(self._wires.values(), self._receiver.links, strict=True):
            if link.connection is not None and wire.conn_fd is None:
                self._wait_for(wire, link.connection)

    def _wait_for(self, wire: _Wire, connection: PeerConnection) -> None:
        try:
            fd = connection.fileno()
            if fd is not None:
                self._poller.register(fd, zmq.POLLIN)
        except Exception as error:  # noqa: BLE001 -- a plugin's bug costs its link, and no other
            self._receiver.lost(wire.peer, str(transport_failed("fileno", error)))
        else:
            wire.conn_fd = fd

    def _watch(self, wire: _Wire) -> None:
        while wire.monitor.poll(0):
            event = parse_monitor_message(wire.monitor.recv_multipart(zmq.NOBLOCK))["event"]
            if event != zmq.EVENT_DISCONNECTED:
                self._receiver.refused(
                    wire.peer,
                    HandshakeError("the sender refused the connection", address=wire.address,
                                   remedy="check the CURVE keys of both sides: each lists the other's")
                )  # fmt: skip
            elif self._receiver.connected:
                # Messages may have been lost with it, so it is never silently taken up again.
                self._receiver.lost(wire.peer, "its control connection was closed")

    def _post(self, peer: Peer, data: bytes) -> None:
        self._wires[peer].dealer.send(data, zmq.NOBLOCK)

    def _lost(self, peer: Peer, reason: str) -> None:
        self._receiver.lost(peer, reason)

    def _handle(self, peer: Peer, message: control.AnyMessage) -> None:
        self._receiver.handle(peer, message)

    def _broken(self, peer: Peer, error: ProtocolError) -> None:
        self._receiver.broken(peer, error)

    def _end_session(self, reason: str) -> None:
        self._receiver.close(reason)
        if not self._quiesce():
            _log.error("reads do not end; their units stay reserved", endpoint=self._name)
        self._receiver.tick()
        self._receiver.give_up_reads()

    def _fail_all(self, error: TransferError) -> list[ReceiveEvent]:
        quiet = self._quiesce()
        return [ReceiveFailed(request, attempt, error, quiet) for request, attempt in self._receiver.requests()]

    def _connections(self) -> list[PeerConnection]:
        return [link.connection for link in self._receiver.links if link.connection is not None]

    def _quiesce(self) -> bool:
        """Wait until no read touches local memory any more; all connections share one deadline."""
        deadline = time.monotonic() + self._receiver.options.quiesce_s
        quiet = [_quiet(item, max(0.0, deadline - time.monotonic())) for item in self._connections()]
        return all(quiet)

    def _release(self) -> None:
        for wire in self._wires.values():
            if wire.conn_fd is not None:
                self._poller.unregister(wire.conn_fd)
        for connection in self._connections():
            try:
                connection.close()
            except Exception as error:  # noqa: BLE001 -- the sockets are to be closed all the same
                _log.error("the transport failed", call="close", endpoint=self._name, trace=plain_trace(error))
        for wire in self._wires.values():
            wire.dealer.disable_monitor()
            wire.monitor.close()


def _quiet(connection: PeerConnection, timeout_s: float) -> bool:
    try:
        return connection.quiesce(timeout_s)
    except Exception as error:  # noqa: BLE001 -- nobody knows: as if its reads went on
        _log.error("the transport failed", call="quiesce", trace=plain_trace(error))
        return False


__all__ = ["CurveKeys", "EndpointStats", "ReceiverEndpoint", "SenderEndpoint"]
