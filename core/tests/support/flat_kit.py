"""A transport of flat reads inside one process, whose wire moves bytes when, and as far as, a test lets it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvcore.contract import FULL, Arena, ReadHandle, ReadJob, Support, Transport, TransportTraits
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout import Layout
from kvcore.layout.moves import Descriptors, Program
from kvcore.transfer.copier import Copier, InlineCopier
from kvcore.transfer.flat.reads import FlatConnection, FlatReader

TRAITS = TransportTraits(executes_programs=False, min_run_bytes=4096, descriptor_cost_us=1.0)
_numbers = itertools.count()
_serving: dict[bytes, FlatTransport] = {}


@dataclass
class Wire:
    """What happens to every flat read. ``steps``: polls until a read ends."""

    steps: int = 1
    fail: Callable[[int], bool] = lambda number: False
    refuse: Callable[[int], bool] = lambda number: False
    frozen: bool = False
    log: list[tuple[str, Descriptors, bool]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0


class Handle(ReadHandle):
    """Copies one part of its reads at each poll, and nothing once it has ended."""

    def __init__(self, wire: Wire, source: Any, target: Any, reads: Descriptors, number: int) -> None:
        self.wire, self.source, self.target, self.number = wire, source, target, number
        self.left = list(zip(reads.src.tolist(), reads.dst.tolist(), reads.nbytes.tolist(), strict=True))
        self.polls = 0
        self.error: TransferError | None = None
        self.over = False
        wire.in_flight += 1
        wire.most_in_flight = max(wire.most_in_flight, wire.in_flight)

    def poll(self) -> bool:
        if not self.over and not self.wire.frozen:
            self.polls += 1
            keep = len(self.left) * (self.wire.steps - self.polls) // self.wire.steps
            self.left, now = self.left[:keep], self.left[keep:]
            for src, dst, nbytes in now:
                self.target[dst : dst + nbytes] = self.source[src : src + nbytes]
            if self.polls >= self.wire.steps:
                self.over = True
                self.wire.in_flight -= 1
                if self.wire.fail(self.number):
                    self.error = TransferError("the wire failed", number=self.number)
        if self.error is not None:
            raise self.error
        return self.over


class Connection(FlatConnection):
    def __init__(self, transport: FlatTransport, peer: FlatTransport) -> None:
        super().__init__(transport.reader, {group: arena.nbytes for group, arena in peer.arenas.items()})
        self.transport, self.peer = transport, peer

    def read_flat(self, group: str, reads: Descriptors, *, staged: bool) -> ReadHandle:
        wire = self.transport.wire
        if not self.alive():
            raise PeerLostError("the peer is gone")
        if wire.refuse(len(wire.log)):
            raise TransferError("the wire refused", number=len(wire.log))
        source = self.peer.arenas[group].array()
        target = self.transport.staging if staged else self.transport.arenas[group].array()
        ends = (reads.src + reads.nbytes).max(), (reads.dst + reads.nbytes).max()
        assert ends[0] <= source.nbytes, "read past the end of the peer's arena"
        assert ends[1] <= target.nbytes, "written past the end of the destination"
        assert min(reads.src.min(), reads.dst.min()) >= 0
        wire.log.append((group, reads, staged))
        return Handle(wire, source, target, reads, len(wire.log) - 1)

    def alive(self) -> bool:
        return not self.closed and not self.peer.closed


class FlatTransport(Transport):
    name = "flat"
    traits = TRAITS

    def __init__(
        self,
        staging_bytes: int = 1 << 20,
        copier: Copier | None = None,
        wire: Wire | None = None,
        traits: TransportTraits = TRAITS,
    ) -> None:
        self.staging = np.full(staging_bytes, 0xEE, np.uint8)
        self.copier = copier or InlineCopier()
        self.wire = wire or Wire()
        self.arenas: Mapping[str, Arena] = {}
        self.closed = False
        self.endpoint = b""
        self.used = traits
        self.reader = FlatReader(traits, {}, self.staging, copier=self.copier)

    def supports(self, device: str, layout: Layout) -> Support:
        return FULL

    def register(self, arenas: Mapping[str, Arena]) -> bytes:
        self.arenas = dict(arenas)
        self.reader = FlatReader(self.used, self.arenas, self.staging, copier=self.copier)
        self.endpoint = f"flat {next(_numbers)} of this process".encode()
        _serving[self.endpoint] = self
        return self.endpoint

    def connect(self, endpoint: bytes) -> Connection:
        peer = _serving.get(endpoint)
        if peer is None:
            raise TransferError("no such endpoint", endpoint=endpoint.hex())
        return Connection(self, peer)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            _serving.pop(self.endpoint, None)
            assert self.reader.close()


class Held(Copier):
    """Copies when told to."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def submit(self, task: Any) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        self.tasks.pop(0).run()

    def close(self) -> None:
        while self.tasks:
            self.tasks.pop(0).cancel()


class Memory(Arena):
    """An arena of ordinary memory."""

    device = "cpu"
    fd = None

    def __init__(self, data: Any) -> None:
        self.data, self.nbytes, self.address = data, data.nbytes, data.ctypes.data

    def array(self) -> Any:
        return self.data

    def tensor(self) -> Any:
        raise AssertionError("nobody needs tensors here")

    def close(self) -> None:
        """Nothing to give back."""


class Peers:
    """A peer whose arena holds random bytes (never the poison), and a reader whose arena is all poison.

    ``arena`` makes the reader's; ordinary memory by default.
    """

    def __init__(
        self, src: Layout, dst: Layout, units: int = 8, arena: Callable[[int], Arena] | None = None, **options: Any
    ) -> None:
        self.src, self.dst, self.units = src, dst, {"pages": units}
        places = src.place(self.units), dst.place(self.units)
        self.program = Program.build(src, places[0], dst, places[1])
        data = np.random.default_rng(0).integers(0, 0xFF, places[0].arena_bytes, dtype=np.uint8)
        self.arena = (arena or (lambda nbytes: Memory(np.zeros(nbytes, np.uint8))))(places[1].arena_bytes)
        self.source, self.target = data, self.arena.array()
        self.target[:] = 0xFF
        self.server, self.client = FlatTransport(), FlatTransport(**options)
        self.client.register({"full": self.arena})
        self.connection = self.client.connect(self.server.register({"full": Memory(self.source)}))

    def job(self, src: list[int], dst: list[int]) -> ReadJob:
        return ReadJob("full", self.program, np.array(src, np.int64), np.array(dst, np.int64))

    def read(self, src: list[int], dst: list[int]) -> ReadHandle:
        return self.connection.read([self.job(src, dst)])

    def expected(self, loop: Any, src: list[int], dst: list[int]) -> dict[int, int]:
        """Destination address → value, by the loop oracle."""
        pairs = list(zip(src, dst, strict=True))
        found = loop.convert(self.src, self.units, self.dst, self.units, pairs, self.dst.components)
        return {to: int(self.source[origin]) for to, origin in found.items()}

    def check(self, loop: Any, src: list[int], dst: list[int]) -> None:
        """Everything asked for is in place, and no other byte with meaning was written."""
        want = self.expected(loop, src, dst)
        at = np.fromiter(want, np.int64, len(want))
        np.testing.assert_array_equal(self.target[at], np.fromiter(want.values(), np.int64, len(want)))
        rest = np.ones(self.target.size, bool)
        starts, _ = loop.unit_addresses(self.dst, self.units)
        sizes = {r.name: r.unit_bytes for r in self.dst.regions}
        for (_, name, unit), start in starts.items():
            if unit in dst:  # padding may come along with a region that is moved raw; data of others may not
                rest[start : start + sizes[name]] = False
        data = loop.convert(self.dst, self.units, self.dst, self.units, [(d, d) for d in dst], self.dst.components)
        rest[np.fromiter(data, np.int64, len(data))] = True
        rest[at] = False
        assert (self.target[rest] == 0xFF).all()

    def close(self) -> None:
        self.client.close()
        self.server.close()


def finish(handle: ReadHandle, most: int = 10_000) -> int:
    """Poll to the end; returns how often."""
    for number in range(most):
        if handle.poll():
            return number
    raise AssertionError("no end of a read")
