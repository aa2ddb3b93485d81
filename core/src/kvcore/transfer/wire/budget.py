"""What a peer may send in a time, how much of it one turn takes, and what may wait to be sent to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from kvcore.errors import ProtocolError
from kvcore.transfer.session.base import Clock, Peer

MESSAGES_PER_S = 20_000
"""Most messages of one peer in a second, over a while."""

BYTES_PER_S = 64 << 20
"""Most bytes of one peer in a second, over a while."""

BURST_S = 2
"""So many seconds' worth may come at once."""

HELLO_WEIGHT = 1_000
"""A hello counts as so many messages: it costs that much more to answer, and a peer says it once."""

MAX_FIRST_MESSAGES = 8
"""Most messages over a connection before one of them is a hello that is accepted."""

MAX_UNSENT_BYTES = 64 << 20
"""Most bytes that wait for a peer that does not take them, beyond what its socket holds."""

RECEIVE_QUEUE = 16
"""Most messages of a connection that wait in its socket; more stay with who sends them. None is dropped."""

SEND_QUEUE = 1_000
"""Most messages for a peer that wait in its socket; more wait in :class:`Unsent`."""

TURN_MESSAGES = 256
"""Most messages that a turn of an I/O thread takes from a socket before it sends, lets time pass and hands events out."""

TURN_BYTES = 4 << 20
"""A turn takes no further message once it has taken so many bytes."""


class Budget:
    """A share of messages and bytes that fills up with time, to :data:`BURST_S` seconds' worth."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._filled_at = clock()
        self._messages: float = MESSAGES_PER_S * BURST_S
        self._bytes: float = BYTES_PER_S * BURST_S

    def take(self, messages: int, nbytes: int) -> ProtocolError | None:
        """Spend; the error says that there was less left."""
        now = self._clock()
        passed, self._filled_at = now - self._filled_at, now
        self._messages = min(self._messages + passed * MESSAGES_PER_S, MESSAGES_PER_S * BURST_S) - messages
        self._bytes = min(self._bytes + passed * BYTES_PER_S, BYTES_PER_S * BURST_S) - nbytes
        if self._messages >= 0 and self._bytes >= 0:
            return None
        return ProtocolError(
            "peer sends more than its share", messages_per_s=MESSAGES_PER_S, bytes_per_s=BYTES_PER_S, burst_s=BURST_S,
            remedy="connect again",
        )  # fmt: skip


@dataclass(frozen=True)
class Arrived:
    """A message that has arrived.

    Attributes:
        peer: the routing id it came with; empty on a socket without.
        connection: descriptor it came over.
        data: its only frame; empty, which is no message, where it had several.
        frames, nbytes: all of it.
    """

    peer: Peer
    connection: int
    data: bytes
    frames: int
    nbytes: int


class Inlet:
    """The messages of a socket, a bounded number at a time; those of several frames are never put together.

    Args:
        routed: whether each message begins with the routing id of its peer.

    Attributes:
        more: the last :meth:`take` ended at its bound: there may be more.
    """

    def __init__(self, socket: zmq.Socket[bytes], *, routed: bool) -> None:
        self._socket = socket
        self._routed = routed
        self._begun: Arrived | None = None  # of several frames, the rest of which are to be passed over
        self.more = False

    def take(self) -> list[Arrived]:
        """What has arrived, in order, up to :data:`TURN_MESSAGES` frames and :data:`TURN_BYTES`."""
        taken: list[Arrived] = []
        frames = nbytes = 0
        while frames < TURN_MESSAGES and nbytes < TURN_BYTES:
            try:
                item, more = self._frame()
            except zmq.Again:
                self.more = False
                return taken
            frames += 1
            nbytes += item.nbytes
            if self._begun is not None:
                begun = self._begun
                item = Arrived(begun.peer, begun.connection, b"", begun.frames + 1, begun.nbytes + item.nbytes)
            self._begun = item if more else None
            if not more:
                taken.append(item)
        self.more = True
        return taken

    def _frame(self) -> tuple[Arrived, bool]:
        peer = b""
        if self._routed and self._begun is None:
            peer = self._socket.recv(zmq.NOBLOCK)
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)  # a message arrives whole or not at all
        more = bool(frame.more)
        data = b"" if more or self._begun is not None else frame.bytes
        return Arrived(peer, _source(frame), data, 1, len(frame)), more


class Unsent:
    """What a peer's socket did not take, in order, up to :data:`MAX_UNSENT_BYTES` a peer.

    Args:
        send: hands a message to the socket without waiting; raises ``zmq.Again`` where it is full.
    """

    def __init__(self, send: Callable[[Peer, bytes], None]) -> None:
        self._send = send
        self._queues: dict[Peer, deque[bytes]] = {}
        self._bytes: dict[Peer, int] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def put(self, peer: Peer, data: bytes) -> bool:
        """Send now or later; False where too much waits. Raises what ``send`` raises, ``zmq.Again`` excepted."""
        if peer not in self._queues:
            try:
                self._send(peer, data)
            except zmq.Again:
                self._queues[peer] = deque()
                self._bytes[peer] = 0
            else:
                return True
        if self._bytes[peer] + len(data) > MAX_UNSENT_BYTES:
            return False
        self._queues[peer].append(data)
        self._bytes[peer] += len(data)
        return True

    def peers(self) -> list[Peer]:
        """For whom something waits."""
        return list(self._queues)

    def flush(self, peer: Peer) -> None:
        """Send what the socket takes. Raises as :meth:`put`."""
        queue = self._queues[peer]
        try:
            while queue:
                self._send(peer, queue[0])
                self._bytes[peer] -= len(queue.popleft())
        except zmq.Again:
            return
        self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Nothing waits for a peer any more."""
        self._queues.pop(peer, None)
        self._bytes.pop(peer, None)


def _source(frame: zmq.Frame) -> int:
    """The descriptor that a frame came over; −1 where ZeroMQ does not know."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
