"""Connections to a sender: closed where no conversation comes of them, and where they carry more than their share."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvcore.errors import ProtocolError
from kvcore.transfer.messages.control import MAX_MESSAGE_BYTES
from kvcore.transfer.session.base import Clock, Peer
from kvcore.transfer.wire.access import SameUser
from kvcore.transfer.wire.budget import MAX_FIRST_MESSAGES, Budget

MAX_STRANGERS = 128
"""Most connections of which none has said hello; the oldest is closed for one more."""

MAX_UNSEEN_BYTES = 3 * MAX_MESSAGE_BYTES
"""Most bytes over a connection without a whole message: the longest, and what a kernel keeps of those behind it."""

_BYTES_RECEIVED = slice(128, 136)
"""Where Linux says in its ``tcp_info`` how many bytes have come over a connection."""

_LOOK_S = 0.25
_LAST_WORDS_S = 0.1
"""A connection that is cut stays for so long, unread, that what was sent last can reach its other end."""


@dataclass
class _Share:
    """What a peer has sent over a connection."""

    peer: Peer
    budget: Budget
    first: int = 0
    messages: int = 0


class Strangers:
    """Who is connected to a listening socket and has not been welcomed, or is no more; and what everybody sends.

    ZeroMQ cannot close one peer's connection, so the connection is shut down below it; its address is compared before,
    since a descriptor may have become another one's in between.

    Args:
        listener: the socket, before it is bound.
        timeout_s: time to say hello.
        clock: time.
        same_user: is told who comes and goes, and may refuse them; None where everybody may speak.

    Attributes:
        monitor: becomes readable when somebody connects or leaves.
    """

    def __init__(
        self,
        listener: zmq.Socket[bytes],
        timeout_s: float,
        clock: Clock = time.monotonic,
        *,
        same_user: SameUser | None = None,
    ) -> None:
        self._listener = listener
        self._timeout_s = timeout_s
        self._clock = clock
        self._same_user = same_user
        self.monitor = listener.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._addresses: dict[int, object] = {}
        self._since: dict[int, float] = {}  # oldest first
        self._spoke: dict[int, Peer] = {}
        self._welcome: dict[int, Peer] = {}
        self._shares: dict[int, _Share] = {}
        self._cut: dict[int, tuple[float, Peer]] = {}
        self._seen: dict[int, tuple[int, int]] = {}  # messages, and bytes received when the last of them was noted
        self._looked_at = clock()

    def admits(self, fd: int) -> bool:
        """Whether what comes over a connection is to be listened to."""
        if self._same_user is None:
            return True
        self._watch()  # the descriptor may have become another one's
        return self._same_user.admits(fd)

    def charge(self, fd: int, peer: Peer, messages: int, nbytes: int) -> ProtocolError | None:
        """A message of ``peer`` came over a connection, before it is looked at. The error says that it is too much.

        What is still read of a connection that is gone is not counted: it is a queue's length at most.
        """
        if fd not in self._addresses:
            self._watch()  # it was accepted before it could say anything
            if fd not in self._addresses:
                return None
        share = self._shares.get(fd)
        if share is None or share.peer != peer:
            share = self._shares[fd] = _Share(peer, Budget(self._clock))
        share.messages += 1
        if fd not in self._welcome:
            share.first += messages
            if share.first > MAX_FIRST_MESSAGES:
                return ProtocolError("no hello among the first messages", limit=MAX_FIRST_MESSAGES)
        return share.budget.take(messages, nbytes)

    def is_cut(self, fd: int) -> bool:
        """Whether what comes over a connection is not looked at any more."""
        return fd in self._cut

    def cut(self, fd: int, peer: Peer) -> None:
        """Look at nothing of a connection any more, and close it once what was sent last may have arrived."""
        if fd >= 0:  # else ZeroMQ did not say which it is
            self._cut[fd] = (self._clock(), peer)

    def cut_peers(self) -> list[Peer]:
        """Who was cut off and is not closed yet."""
        return [peer for _, peer in self._cut.values()]

    def hoards(self) -> list[tuple[int, Peer]]:
        """Connections over which more than :data:`MAX_UNSEEN_BYTES` came without a whole message, and whose they are.

        ZeroMQ keeps all frames of a message until the last has come, however many. To be called when the socket has given
        what it had; looks only now and then.
        """
        now = self._clock()
        if now - self._looked_at < _LOOK_S:
            return []
        self._looked_at = now
        found = []
        for fd in [fd for fd in self._addresses if fd not in self._cut]:
            share = self._shares.get(fd)
            messages = share.messages if share is not None else 0
            before = self._seen.get(fd, (0, 0))
            received = _bytes_received(fd)
            if messages != before[0]:
                self._seen[fd] = (messages, received)
            elif received - before[1] > MAX_UNSEEN_BYTES:
                found.append((fd, share.peer if share is not None else b""))
        return found

    def is_welcome(self, fd: int) -> bool:
        """Whether a connection belongs to a conversation."""
        return fd in self._welcome

    def heard(self, fd: int, peer: Peer) -> None:
        """A message of ``peer`` over a connection was handled; it may be welcomed now, or at a later :meth:`turn`."""
        if fd in self._since:
            self._spoke[fd] = peer

    def _let_in(self, peers: Collection[Peer]) -> None:
        """Who has spoken may be welcomed later: its hello takes long to read."""
        for fd in [fd for fd, peer in self._spoke.items() if peer in peers]:
            self._welcome[fd] = self._spoke.pop(fd)
            self._since.pop(fd, None)

    def turn(self, peers: Collection[Peer]) -> None:
        """Take note of who came and went, and close who has had time enough."""
        self._watch()
        self._let_in(peers)
        now = self._clock()
        for fd in [fd for fd, (since, _) in self._cut.items() if now - since >= _LAST_WORDS_S]:
            self._shut(fd)
        for fd in [fd for fd, peer in self._welcome.items() if peer not in peers]:
            del self._welcome[fd]
            self._since[fd] = now
        surplus = len(self._since) - MAX_STRANGERS
        for number, (fd, since) in enumerate(list(self._since.items())):
            if number >= surplus and now - since < self._timeout_s:
                break
            self._shut(fd)

    def _watch(self) -> None:
        now = self._clock()
        while int(self.monitor.get(zmq.EVENTS)) & zmq.POLLIN:
            event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            fd = int(event["value"])
            self._forget(fd)
            if event["event"] == zmq.EVENT_ACCEPTED:
                if self._same_user is not None:
                    self._same_user.forget(fd)  # not where one leaves: its last messages may still be read
                with contextlib.suppress(OSError), _borrowed(fd) as connection:
                    self._addresses[fd] = connection.getpeername()
                    self._since[fd] = now
                    if self._same_user is not None:
                        self._same_user.accepted(fd, connection)

    def close(self) -> None:
        """Stop watching."""
        self._listener.disable_monitor()
        self.monitor.close()

    def _forget(self, fd: int) -> None:
        for known in (self._addresses, self._since, self._spoke, self._welcome, self._shares, self._cut, self._seen):
            known.pop(fd, None)

    def _shut(self, fd: int) -> None:
        with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it has left by itself
            if connection.getpeername() == self._addresses.get(fd):
                connection.shutdown(socket.SHUT_RDWR)
        self._forget(fd)


def _bytes_received(fd: int) -> int:
    with contextlib.suppress(OSError), _borrowed(fd) as connection:  # it has left, or is none of TCP
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.stop)
        return int.from_bytes(info[_BYTES_RECEIVED], sys.byteorder)
    return 0


@contextlib.contextmanager
def _borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor that is ZeroMQ's and stays so; no descriptor of one's own, there may be none left."""
    connection = socket.socket(fileno=fd)
    try:
        yield connection
    finally:
        connection.detach()
