"""Connections to a sender that belong to no conversation: closed after a while, and the oldest where they are many."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Collection, Iterator

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvcore.transfer.session.base import Peer

MAX_STRANGERS = 128
"""Most connections of which none has said hello; the oldest is closed for one more."""


class Strangers:
    """Who is connected to a listening socket and has not been welcomed, or is no more.

    ZeroMQ cannot close one peer's connection, so the connection is shut down below it; its address is compared before,
    since a descriptor may have become another one's in between.

    Args:
        listener: the socket, before it is bound.
        timeout_s: time to say hello.

    Attributes:
        monitor: becomes readable when somebody connects or leaves.
    """

    def __init__(self, listener: zmq.Socket[bytes], timeout_s: float) -> None:
        self._listener = listener
        self._timeout_s = timeout_s
        self.monitor = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._addresses: dict[int, object] = {}
        self._since: dict[int, float] = {}  # oldest first
        self._spoke: dict[int, Peer] = {}
        self._welcome: dict[int, Peer] = {}

    def heard(self, fd: int, peer: Peer, peers: Collection[Peer]) -> None:
        """A message of ``peer`` came over a connection; ``peers`` are those in a conversation."""
        if fd not in self._addresses:
            self._watch()  # it was accepted before it could say anything
        if fd in self._since:
            self._spoke[fd] = peer
            self._let_in(peers)

    def _let_in(self, peers: Collection[Peer]) -> None:
        """Who has spoken may be welcomed later: its hello takes long to read."""
        for fd in [fd for fd, peer in self._spoke.items() if peer in peers]:
            self._welcome[fd] = self._spoke.pop(fd)
            self._since.pop(fd, None)

    def turn(self, peers: Collection[Peer]) -> None:
        """Take note of who came and went, and close who has had time enough."""
        self._watch()
        self._let_in(peers)
        now = time.monotonic()
        for fd in [fd for fd, peer in self._welcome.items() if peer not in peers]:
            del self._welcome[fd]
            self._since[fd] = now
        surplus = len(self._since) - MAX_STRANGERS
        for number, (fd, since) in enumerate(list(self._since.items())):
            if number >= surplus and now - since < self._timeout_s:
                break
            self._shut(fd)

    def _watch(self) -> None:
        now = time.monotonic()
        while self.monitor.poll(0):
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            fd = int(event["value"])
            self._forget(fd)
            if event["event"] == zmq.EVENT_ACCEPTED:
                with contextlib.suppress(OSError), _borrowed(fd) as connection:
                    self._addresses[fd] = connection.getpeername()
                    self._since[fd] = now

    def close(self) -> None:
        """Stop watching."""
        self._listener.disable_monitor()
        self.monitor.close()

    def _forget(self, fd: int) -> None:
        for known in (self._addresses, self._since, self._spoke, self._welcome):
            known.pop(fd, None)

    def _shut(self, fd: int) -> None:
        with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it has left by itself
            if connection.getpeername() == self._addresses[fd]:
                connection.shutdown(socket.SHUT_RDWR)
        self._forget(fd)


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that is ZeroMQ's and stays so; no descriptor of one's own, there may be none left."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
