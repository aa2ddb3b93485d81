"""The wire between simulated processes: ordered, slow, stalled or cut; and reads that land late, in pieces or never.

Every conversation has a connection of its own, which keeps order and loses nothing until it is cut. What a process sent
before it died still arrives; what was on its way to it may reach its successor, which has the same name on this wire
(real names are never used twice: this is harsher). Nothing moves unless a process takes its turn, so a stopped process
neither answers nor copies.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from chaos.memory import Violation

from kvcore.contract import PeerConnection, ReadHandle, ReadJob
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout.moves import run_program


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Link:
    """One connection: two ordered queues of ``(due, bytes)``."""

    def __init__(self, clock: Clock, rng: random.Random, delay: float) -> None:
        self._clock, self._rng, self._delay = clock, rng, delay
        self.up: deque[tuple[float, bytes]] = deque()
        self.down: deque[tuple[float, bytes]] = deque()
        self.stalled_until = 0.0
        self.cut_at: float | None = None
        self.told = False
        """Whether the receiver has been told of the cut."""

    @property
    def open(self) -> bool:
        return self.cut_at is None

    def send(self, queue: deque[tuple[float, bytes]], data: bytes) -> None:
        due = self._clock() + self._rng.random() * self._delay
        queue.append((max(due, queue[-1][0]) if queue else due, data))

    def arrived(self, queue: deque[tuple[float, bytes]]) -> bytes | None:
        if queue and queue[0][0] <= self._clock() and self._clock() >= self.stalled_until:
            return queue.popleft()[1]
        return None

    def cut(self) -> None:
        """The connection is gone, with everything on it."""
        self.cut_at = self._clock()
        self.up.clear()
        self.down.clear()


class Net:
    """Who is connected to whom, now and before.

    Attributes:
        links: by ``(receiver's name, sender's name)`` the newest connection.
        ghosts: older ones with messages still on their way.
    """

    def __init__(self, rng: random.Random, *, delay: float) -> None:
        self.clock = Clock()
        self.rng = rng
        self.delay = delay
        self.links: dict[tuple[bytes, str], Link] = {}
        self.ghosts: list[tuple[tuple[bytes, str], Link]] = []

    def connect(self, peer: bytes, sender: str) -> Link:
        """A new connection; an older one of that pair goes on delivering what it has."""
        old = self.links.get((peer, sender))
        if old is not None:
            self._haunt((peer, sender), old)
        link = self.links[peer, sender] = Link(self.clock, self.rng, self.delay)
        return link

    def died(self, *, peer: bytes | None = None, sender: str | None = None) -> None:
        """A process is gone. What it sent is still on its way; what was sent to it may reach its successor."""
        for key, link in list(self.links.items()):
            if peer == key[0] or sender == key[1]:
                link.cut_at = self.clock()
                self._haunt(key, link)
                if peer is not None:
                    del self.links[key]  # a living receiver keeps its link, to be told that it is cut

    def _haunt(self, key: tuple[bytes, str], link: Link) -> None:
        link.stalled_until = max(link.stalled_until, self.clock() + self.rng.choice((0.0, 0.5, 2.0)))
        self.ghosts.append((key, link))

    def to_sender(self, sender: str) -> list[tuple[bytes, bytes]]:
        """Messages that have arrived at a sender: ``(peer, bytes)``."""
        taken = []
        for (peer, name), link in self._all():
            if name == sender:
                while (data := link.arrived(link.up)) is not None:
                    taken.append((peer, data))
        return taken

    def to_receiver(self, peer: bytes, sender: str) -> list[bytes]:
        """Messages that have arrived at a receiver."""
        taken = []
        for key, link in self._all():
            if key == (peer, sender):
                while (data := link.arrived(link.down)) is not None:
                    taken.append(data)
        return taken

    def _all(self) -> list[tuple[tuple[bytes, str], Link]]:
        self.ghosts = [(key, link) for key, link in self.ghosts if link.up or link.down]
        return [*self.ghosts, *self.links.items()]


Claim = Callable[[str, Any], Any]


class Read(ReadHandle):
    """A read in pieces that land when the copier gets to them, in an order of its own, from what lies there *then*."""

    def __init__(self, pieces: list[Callable[[], None]], *, fails: bool, stuck_until: float) -> None:
        self._pieces = pieces
        self._fails = fails
        self.stuck_until = stuck_until
        self.ended = False

    def progress(self, count: int) -> None:
        for _ in range(min(count, len(self._pieces))):
            self._pieces.pop()()
        self.ended = not self._pieces

    def poll(self) -> bool:
        if self.ended and self._fails:
            raise TransferError("the read failed, as this test wanted")
        return self.ended


class Copier:
    """The reads of one process; they move only while it runs.

    Args:
        claim: says who is owed the bytes of destination units of a layer group; it raises where nobody is. Whoever
            that was when a read began must still be it when a piece of it lands.
        fault_rate: how often a read fails or is stuck.
    """

    def __init__(self, net: Net, claim: Claim, *, fault_rate: float, stuck_s: float) -> None:
        self._net, self._claim = net, claim
        self._fault_rate, self._stuck_s = fault_rate, stuck_s
        self.reads: list[Read] = []
        self.failed = self.stuck = 0

    def start(self, jobs: Sequence[ReadJob], source: dict[str, Any], destination: dict[str, Any], seen: Any) -> Read:
        rng = self._net.rng
        pieces: list[Callable[[], None]] = []
        for job in jobs:
            parts = min(len(job.src_units), rng.choice((1, 1, 2, 4)))
            for part in np.array_split(rng.sample(range(len(job.src_units)), len(job.src_units)), max(parts, 1)):
                if len(part):
                    pieces.append(self._piece(job, part, source, destination, seen))
        rng.shuffle(pieces)
        fails, stuck = rng.random() < self._fault_rate / 2, rng.random() < self._fault_rate
        self.failed += fails
        self.stuck += stuck
        until = self._net.clock() + rng.uniform(0.3, 1.0) * self._stuck_s if stuck else 0.0
        self.reads.append(Read(pieces, fails=fails, stuck_until=until))
        return self.reads[-1]

    def _piece(
        self, job: ReadJob, part: Any, source: dict[str, Any], destination: dict[str, Any], seen: Any
    ) -> Callable[[], None]:
        src, dst = job.src_units[part], job.dst_units[part]
        owed = self._claim(job.group, dst)

        def land() -> None:
            if self._claim(job.group, dst) != owed:
                raise Violation("wrong bytes", "a late read lands in another request's units", units=dst.tolist())
            seen(job.group, src)
            run_program(job.program, source[job.group], destination[job.group], src, dst)

        return land

    def turn(self, *, everything: bool = False) -> None:
        """Let the copier work a little, or finish everything there is."""
        rng = self._net.rng
        for read in rng.sample(self.reads, len(self.reads)):
            if everything:
                read.progress(1 << 30)
            elif self._net.clock() >= read.stuck_until and rng.random() < 0.6:
                read.progress(rng.choice((1, 1, 2, 8)))
        self.reads = [read for read in self.reads if not read.ended]


class Connection(PeerConnection):
    """A peer's memory, read by a copier. The memory of a process outlives it for as long as someone has it mapped."""

    def __init__(self, copier: Copier, source: Any, destination: dict[str, Any]) -> None:
        self._copier, self._destination = copier, destination
        self.source = source
        self._mine: list[Read] = []
        self.closed = False

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        if not self.alive():
            raise PeerLostError("the peer's memory is gone")
        self._mine.append(self._copier.start(jobs, self.source.arenas, self._destination, self.source.read_from))
        return self._mine[-1]

    def alive(self) -> bool:
        return not self.source.gone

    def quiesce(self, timeout_s: float) -> bool:
        return all(read.ended for read in self._mine)

    def close(self) -> None:
        self.closed = True
