"""Endpoints without threads: a session and its place on the simulated wire, with the calls an engine's side makes.

They stand where :class:`kvcore.transfer.wire.endpoint.SenderEndpoint` and ``ReceiverEndpoint`` stand, under the real
:class:`kvcore.engine.peers.SendSide` and ``ReceiveSide``: everything above and below them is what runs in production.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from chaos.wire import Connection, Link, Net

from kvcore.errors import ProtocolError
from kvcore.layout.moves import Program
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import Session, TransferOptions
from kvcore.transfer.session.joined import JoinedReceiver, name
from kvcore.transfer.session.sender import SenderSession

# Every connection plans anew; a simulation connects so often that the same few programs are built but once.
_build = Program.build
_built: dict[Any, Program] = {}


def _remembered(source: Any, there: Any, target: Any, here: Any, components: Any = None, **options: Any) -> Program:
    key = (source, repr(there.ranges), target, repr(here.ranges), components, repr(options))
    if key not in _built:
        _built[key] = _build(source, there, target, here, components, **options)
    return _built[key]


def remember_programs() -> AbstractContextManager[Any]:
    """While entered, a program that was built before is handed out again."""
    return patch.object(Program, "build", _remembered)


class _Port:
    """What both ends share: a session's calls and events, and the decoding of what arrives."""

    def __init__(self, session: Session[Any]) -> None:
        self.session: Any = session
        self.garbled = 0
        self._events: deque[Any] = deque()

    def events(self) -> list[Any]:
        """What has happened; as behind a real endpoint, it stays in order and is taken once."""
        self._events.extend(self.session.events())
        taken = list(self._events)
        self._events.clear()
        return taken

    def wait_event(self, timeout_s: float) -> Any:
        self._events.extend(self.session.events())
        return self._events.popleft() if self._events else None

    def receive(self, peer: bytes, data: bytes) -> None:
        try:
            message = control.decode(data)
        except ProtocolError as error:
            self.garbled += 1
            self.session.broken(peer, error)
        else:
            self.session.handle(peer, message)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)  # begin, offer, note_chunk_start, ask, abort, has


class SendPort(_Port):
    """A sender on the wire. A new one with the same name is the same place, restarted."""

    def __init__(self, net: Net, name: str, manifest: Manifest, options: TransferOptions) -> None:
        super().__init__(SenderSession(manifest, clock=net.clock, options=options))
        self.address = name
        self._net = net

    def turn(self) -> None:
        """Handle what has arrived, let time pass, send what there is to say."""
        for peer, data in self._net.to_sender(self.address):
            self.receive(peer, data)
        self.session.tick()
        self.flush()

    def flush(self) -> None:
        for peer, message in self.session.outbox():
            link = self._net.links.get((peer, self.address))
            if link is None or not link.open:
                self.session.lost(peer, "no connection to it")  # as a ROUTER says where it cannot deliver
            else:
                link.send(link.down, control.encode(message))

    def close(self) -> None:
        self.session.close()
        self.flush()


class ReceivePort(_Port):
    """One rank of a receiver on the wire, connected to every rank of a sender."""

    def __init__(
        self, net: Net, peer: bytes, senders: Sequence[str], manifest: Manifest, options: TransferOptions,
        connect: Callable[[bytes], Connection],
    ) -> None:  # fmt: skip
        super().__init__(JoinedReceiver(manifest, [connect] * len(senders), clock=net.clock, options=options))
        self.peer, self.senders = peer, tuple(senders)
        self._net = net
        self.links: list[Link] = [net.connect(peer, sender) for sender in senders]
        self.session.hello()
        self.flush()

    @property
    def quiet(self) -> bool:
        """Whether the port can be closed: it failed, everything ended, and no read is under way."""
        return self.session.failure is not None and not self.session.requests() and not self.session.reads_in_flight

    def turn(self) -> None:
        """Handle what has arrived, notice a cut, look at the reads, send what there is to say."""
        for number, (sender, link) in enumerate(zip(self.senders, self.links, strict=True)):
            if self._net.links.get((self.peer, sender)) is link:
                for data in self._net.to_receiver(self.peer, sender):
                    self.receive(name(number), data)
            if not link.open and not link.down and not link.told and self._net.rng.random() < 0.7:
                link.told = True
                self.session.lost(name(number), "its control connection was closed")
        self.session.tick()
        self.flush()

    def flush(self) -> None:
        for peer, message in self.session.outbox():
            link = self.links[int(peer)]
            if link.open:
                link.send(link.up, control.encode(message))

    def close(self) -> None:
        self.session.close()
        self.flush()
        for link in self.session.links:
            if link.connection is not None:
                link.connection.close()
