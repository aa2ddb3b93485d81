"""What the transfer tests share: arenas, manifests, a wire and a memory that do what a test tells them to."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from kvcore.contract import Arena, PeerConnection, ReadHandle, ReadJob
from kvcore.errors import PeerLostError, ProtocolError, TransferError, UnsupportedError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import TransferOptions
from kvcore.transfer.session.joined import JoinedReceiver, name
from kvcore.transfer.session.sender import SenderSession

PAGE = 4
SENDER = name(0)
"""How the receivers of a :class:`Net` name its only sender."""
KEY = ("full", "pages")
COMPONENTS = ("full/kv", "full/scale")


def layout(
    order: str = "slot head dim",
    *,
    page: int = PAGE,
    heads: int = 2,
    dim: int = 8,
    layers: tuple[int, ...] = (0, 1),
    arena: Any = "page_major",
    dtype: str = "fp32",
    scales: bool = True,
    ids: Any = (),
    **options: Any,
) -> Layout:
    """K and V in fp32 and a scale of another component."""
    axes = (Axis("slot", page), Axis("head", heads, ids=ids), Axis("dim", dim))
    regions = [region(n, "full/kv", [Field("x", dtype, order, axes)], ranges=("pages",)) for n in ("k", "v")]
    if scales:
        regions.append(region("s", "full/scale", [Field("s", "u8", "slot head", axes[:2])], ranges=("pages",)))
    base: dict[str, Any] = {"format": "test", "revision": 1, "group": "full"}
    return Layout(
        layers=layers,
        regions=tuple(regions),
        spaces=(SpaceSpec("full", "sequence", "page", page),),
        ranges=(UnitRange("pages", "full"),),
        arena=arena,
        **(base | options),
    )


def manifest(role: str, instance: str, item: Layout | None = None, *, units: int = 64, **changes: Any) -> Manifest:
    """A manifest of one group, ``full``."""
    base: dict[str, Any] = {
        "instance": instance,
        "role": role,
        "model": "m" * 64,
        "layouts": {"full": item or layout()},
        "units": {"full": {"pages": units}},
        "transport": "shm",
    }
    return Manifest(**(base | changes))


def payload(ids: Sequence[int], first: int, components: Sequence[str] = COMPONENTS) -> Payload:
    return Payload.of("full", "pages", components, first, np.array(ids, np.int64))


def pages(tokens: int) -> int:
    return -(-tokens // PAGE)


class MemArena(Arena):
    """A sealed memfd."""

    def __init__(self, nbytes: int, *, sealed: bool = True) -> None:
        self.nbytes, self.device = nbytes, "cpu"
        self.fd = os.memfd_create("kvcore-test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, max(nbytes, 1))
        self._map = mmap.mmap(self.fd, max(nbytes, 1))
        if sealed:
            fcntl.fcntl(self.fd, 1033, 0x2 | 0x4 | 0x10)  # F_ADD_SEALS: SHRINK | GROW | FUTURE_WRITE
        self._array = np.frombuffer(self._map, np.uint8)[:nbytes]
        self.address = int(np.frombuffer(self._map, np.uint8).ctypes.data)

    def tensor(self) -> Any:
        raise UnsupportedError("no tensors in the transfer tests")

    def array(self) -> Any:
        return self._array

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
            del self._array
            with contextlib.suppress(BufferError):  # a view that a test still holds
                self._map.close()


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeRead(ReadHandle):
    """A read that ends when the test says so; the bytes land at that moment, as late as that is."""

    def __init__(self, jobs: Sequence[ReadJob], land: Callable[[Sequence[ReadJob]], None]) -> None:
        self.jobs, self._land = list(jobs), land
        self.seconds = 0.001
        self.state = "running"

    def finish(self) -> None:
        self._land(self.jobs)
        self.state = "done"

    def fail(self) -> None:
        self.state = "failed"

    def poll(self) -> bool:
        if self.state == "failed":
            raise TransferError("read failed in the test")
        return self.state == "done"


class FakeConnection(PeerConnection):
    """A peer's memory as ``{(component, unit): content}``."""

    def __init__(self, source: Mapping[tuple[str, int], Any], destination: dict[tuple[str, int], Any]) -> None:
        self.source, self.destination = source, destination
        self.reads: list[FakeRead] = []
        self.up = True
        self.refuse = False
        self.closed = False
        self.on_write: Callable[[int], None] = lambda unit: None

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        if self.refuse:
            raise TransferError("read refused in the test")
        if not self.up:
            raise PeerLostError("peer is gone in the test")
        self.reads.append(FakeRead(jobs, self._land))
        return self.reads[-1]

    def _land(self, jobs: Sequence[ReadJob]) -> None:
        for job in jobs:
            for component in job.program.components:
                for src, dst in zip(job.src_units.tolist(), job.dst_units.tolist(), strict=True):
                    self.on_write(dst)
                    self.destination[component, dst] = self.source.get((component, src))

    @property
    def running(self) -> list[FakeRead]:
        return [read for read in self.reads if read.state == "running"]

    def alive(self) -> bool:
        return self.up

    def quiesce(self, timeout_s: float) -> bool:
        return not self.running

    def close(self) -> None:
        self.closed = True


class Net:
    """One sender, several receivers, and queues of encoded messages between them: in order, delivered on demand."""

    def __init__(self, receivers: Sequence[str] = ("r1",), *, options: TransferOptions | None = None) -> None:
        self.clock = Clock()
        self.options = options or TransferOptions()
        self.sender_memory: dict[tuple[str, int], Any] = {}
        self.up: dict[bytes, deque[bytes]] = {}
        self.down: dict[bytes, deque[bytes]] = {}
        self.receivers: dict[bytes, JoinedReceiver] = {}
        self.connections: dict[bytes, FakeConnection] = {}
        self.memories: dict[bytes, dict[tuple[str, int], Any]] = {}
        self.log: list[str] = []
        self.start_sender("sender-1")
        for instance in receivers:
            self.start_receiver(instance.encode(), instance)

    def start_sender(self, instance: str) -> None:
        self.sender = SenderSession(manifest("sender", instance), clock=self.clock, options=self.options)

    def start_receiver(self, peer: bytes, instance: str, *, hello: bool = True, **options: Any) -> JoinedReceiver:
        memory: dict[tuple[str, int], Any] = {}
        connection = FakeConnection(self.sender_memory, memory)
        session = JoinedReceiver(
            manifest("receiver", instance), [lambda _: connection], clock=self.clock, options=self.options, **options
        )
        self.receivers[peer], self.connections[peer], self.memories[peer] = session, connection, memory
        self.up[peer], self.down[peer] = deque(), deque()
        if hello:
            session.hello()
            self.settle()
        return session

    def collect(self) -> None:
        """Put what the sessions want to send on the wire."""
        for peer, message in self.sender.outbox():
            if peer in self.down:
                self.down[peer].append(control.encode(message))
        for peer, session in self.receivers.items():
            self.up[peer].extend(control.encode(message) for _, message in session.outbox())

    def deliver_up(self, peer: bytes) -> bool:
        return self._deliver(self.up[peer], self.sender, peer)

    def deliver_down(self, peer: bytes) -> bool:
        return self._deliver(self.down[peer], self.receivers[peer], peer)

    def _deliver(self, queue: deque[bytes], session: Any, peer: bytes) -> bool:
        self.collect()
        if not queue:
            return False
        data = queue.popleft()
        address = peer if session is self.sender else SENDER
        try:
            message = control.decode(data)
        except ProtocolError as error:
            session.broken(address, error)
        else:
            self.log.append(type(message).__name__)
            session.handle(address, message)
        self.collect()
        return True

    def settle(self, *, reads: bool = True) -> None:
        """Deliver everything, and (unless told otherwise) let every read end."""
        moving = True
        while moving:
            self.collect()
            moving = False
            for peer in list(self.receivers):
                while self.deliver_up(peer) or self.deliver_down(peer):
                    moving = True
                if reads:
                    for read in self.connections[peer].running:
                        read.finish()
                        moving = True
                self.receivers[peer].tick()
                self.collect()
                moving = moving or bool(self.up[peer])

    def tick(self, seconds: float = 0.0) -> None:
        self.clock.now += seconds
        self.sender.tick()
        for session in self.receivers.values():
            session.tick()
        self.collect()

    def pass_time(self, seconds: float, *, reads: bool = True) -> None:
        """Let time pass in steps of a heartbeat, everything being delivered."""
        for _ in range(int(seconds / self.options.heartbeat_s) + 1):
            self.tick(self.options.heartbeat_s)
            self.settle(reads=reads)
