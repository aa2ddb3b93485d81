"""Senders and receivers of several ranks, in one thread: real layouts, arenas and programs; wires and copies that obey.

What a byte must be is said by :class:`Cells` from its global ids alone, and read back through the layout's own address
arithmetic: nothing here knows how ranks choose their sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcore.contract import PeerConnection, ReadHandle, ReadJob
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.layout.moves import run_program
from kvcore.requests.payload import Payload
from kvcore.spec import Ranks
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import TransferOptions
from kvcore.transfer.session.joined import JoinedReceiver, name
from kvcore.transfer.session.sender import SenderSession

PAGE, DIM = 4, 8
UNITS = 24
COMPONENTS = ("full/kv", "full/scale")
HEADS = 4


def layout(
    heads: tuple[int, int], layers: Sequence[int], *, order: str = "head slot dim", arena: str = "page_major"
) -> Layout:
    """K in fp32 sharded by head with a scale a head, and an unsharded latent that every rank keeps."""
    head = Axis("head", heads[1] - heads[0], ids=(heads,))
    slot, dim = Axis("slot", PAGE), Axis("dim", DIM)
    k = region("k", "full/kv", [Field("x", "fp32", order, (slot, head, dim))], ranges=("pages",))
    latent = region("latent", "full/kv", [Field("x", "u8", "slot dim", (slot, dim))], ranges=("pages",))
    scale = region("s", "full/scale", [Field("s", "u8", "slot head", (slot, head))], ranges=("pages",))
    return Layout(
        format="test", revision=1, group="full", layers=tuple(layers), regions=(k, latent, scale),
        spaces=(SpaceSpec("full", "sequence", "page", PAGE),), ranges=(UnitRange("pages", "full"),), arena=arena,  # type: ignore[arg-type]
    )  # fmt: skip


class Cells:
    """Every element of one field of a unit: its slot, global head and dim, and its byte offset in the unit."""

    def __init__(self, region_name: str, field: Any) -> None:
        axes = {axis.name: axis for axis in field.axes}
        heads = field.global_ids("head") if "head" in axes else np.zeros(1, np.int64)
        grid = np.meshgrid(
            np.arange(PAGE), np.arange(len(heads)), np.arange(DIM if "dim" in axes else 1), indexing="ij"
        )
        slot, number, dim = (part.reshape(-1) for part in grid)
        at = {key: index for key, index in (("slot", slot), ("head", number), ("dim", dim)) if key in axes}
        self.region, self.slot, self.head, self.dim = region_name, slot, heads[number], dim
        self.dtype = np.dtype("<f4" if field.dtype == "fp32" else "u1")
        self.bytes = field.offsets(**at)[:, None] + np.arange(self.dtype.itemsize)

    def values(self, tag: int, layer: int, logical: int, tokens: int) -> Any:
        """What lies there, by global ids alone: different for every id and never 0, but 0 past the prompt's end."""
        token = logical * PAGE + self.slot
        what = len(self.region) * 7
        content = 1 + (tag * 31 + what + layer * 101 + token * 13 + self.head * 57 + self.dim * 3) % 250
        return np.where(token < tokens, content, 0).astype(self.dtype)


class Rank:
    """One process: its manifest and its arena, poisoned."""

    def __init__(self, role: str, instance: str, item: Layout, ranks: Ranks, checksum: str = "none") -> None:
        self.layout = item
        self.manifest = Manifest(
            instance=instance, role=role, model="m" * 64, layouts={"full": item}, units={"full": {"pages": UNITS}},  # type: ignore[arg-type]
            transport="shm", ranks=ranks, checksum=checksum,  # type: ignore[arg-type]
        )  # fmt: skip
        self.place = self.manifest.placement("full")
        self.arena = np.full(self.place.arena_bytes, 0xFF, np.uint8)
        self.cells = [Cells(part.name, field) for part in item.regions for field in part.data_fields]

    def places(self, units: Sequence[int]) -> Any:
        """``(logical, layer, cells, byte offsets [N, itemsize])`` of all elements of some units."""
        for logical, unit in enumerate(units):
            for layer in self.layout.layers:
                for part in self.cells:
                    buffer = self.place.buffer(layer, part.region)
                    yield logical, layer, part, buffer.base + unit * buffer.unit_stride + part.bytes

    def fill(self, units: Sequence[int], tag: int, tokens: int) -> None:
        """Write the prompt ``tag`` into units, as a prefill engine would; slots past its end are zeros."""
        for logical, layer, part, at in self.places(units):
            content = part.values(tag, layer, logical, tokens)
            self.arena[at] = content.view(np.uint8).reshape(at.shape)

    def check(self, units: Sequence[int], tag: int, tokens: int) -> None:
        """Everything of the prompt is where it belongs, byte for byte."""
        for logical, layer, part, at in self.places(units):
            got = self.arena[at].reshape(-1).view(part.dtype)
            np.testing.assert_array_equal(got, part.values(tag, layer, logical, tokens), f"{part.region} {layer}")


class LateRead(ReadHandle):
    """Programs that run when the test says so."""

    def __init__(self, jobs: Sequence[ReadJob], source: Rank, destination: Rank) -> None:
        self.jobs, self.source, self.destination = list(jobs), source, destination
        self.seconds = 0.0
        self.state = "running"

    def finish(self) -> None:
        for job in self.jobs:
            run_program(job.program, self.source.arena, self.destination.arena, job.src_units, job.dst_units)
        self.state = "done"

    def poll(self) -> bool:
        if self.state == "failed":
            raise TransferError("read failed in the test")
        return self.state == "done"


class RankConnection(PeerConnection):
    def __init__(self, source: Rank, destination: Rank) -> None:
        self.source, self.destination = source, destination
        self.reads: list[LateRead] = []
        self.up = True

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        if not self.up:
            raise PeerLostError("peer is gone in the test")
        self.reads.append(LateRead(jobs, self.source, self.destination))
        return self.reads[-1]

    @property
    def running(self) -> list[LateRead]:
        return [read for read in self.reads if read.state == "running"]

    def alive(self) -> bool:
        return self.up

    def quiesce(self, timeout_s: float) -> bool:
        return not self.running

    def close(self) -> None:
        return


class RankNet:
    """Every rank of a sender and of a receiver, fully connected.

    Args:
        senders, receivers: layouts, one a rank.
    """

    def __init__(
        self, senders: Sequence[Layout], receivers: Sequence[Layout], *, options: TransferOptions | None = None,
        checksums: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.now = 1000.0
        self.options = options or TransferOptions()
        check = "crc32" if checksums is not None else "none"
        self.checksums = checksums
        self.senders = [
            Rank("sender", f"s{n}", item, Ranks("S", n, len(senders)), check) for n, item in enumerate(senders)
        ]
        self.receivers = [
            Rank("receiver", f"r{n}", item, Ranks("R", n, len(receivers)), check) for n, item in enumerate(receivers)
        ]
        self.sending = [
            SenderSession(
                rank.manifest, clock=self.clock, options=self.options, checksums=checksums and checksums("s", rank)
            )
            for rank in self.senders
        ]
        self.up: dict[tuple[int, int], deque[bytes]] = {}
        self.down: dict[tuple[int, int], deque[bytes]] = {}
        self.dead: set[int] = set()
        self.connections: dict[tuple[int, int], RankConnection] = {}
        self.receiving = [self._receiver(n) for n in range(len(receivers))]
        for session in self.receiving:
            session.hello()
        self.settle()

    def clock(self) -> float:
        return self.now

    def _receiver(self, number: int) -> JoinedReceiver:
        rank = self.receivers[number]

        def connector(sender: int) -> Callable[[bytes], PeerConnection]:
            def connect(_: bytes) -> PeerConnection:
                return self.connections.setdefault((number, sender), RankConnection(self.senders[sender], rank))

            return connect

        for sender in range(len(self.senders)):
            self.up[number, sender], self.down[number, sender] = deque(), deque()
        return JoinedReceiver(
            rank.manifest, [connector(n) for n in range(len(self.senders))], clock=self.clock, options=self.options,
            checksums=self.checksums and self.checksums("r", rank),
        )  # fmt: skip

    def kill(self, receiver: int) -> None:
        """A rank of the receiver dies: the senders' wires say so."""
        self.dead.add(receiver)
        for sender in self.sending:
            sender.lost(f"r{receiver}".encode(), "killed")

    def collect(self) -> None:
        for number, sender in enumerate(self.sending):
            for peer, message in sender.outbox():
                self.down[int(peer[1:]), number].append(control.encode(message))
        for number, receiver in enumerate(self.receiving):
            for peer, message in receiver.outbox():
                if number not in self.dead:
                    self.up[number, int(peer)].append(control.encode(message))

    def step(self) -> bool:
        """Deliver everything that is on the wires now."""
        self.collect()
        moved = False
        for (receiver, sender), queue in self.up.items():
            while queue:
                moved = True
                self.sending[sender].handle(f"r{receiver}".encode(), control.decode(queue.popleft()))
        for (receiver, sender), queue in self.down.items():
            while queue:
                moved = True
                data = queue.popleft()
                if receiver not in self.dead:
                    self.receiving[receiver].handle(name(sender), control.decode(data))
        return moved

    def finish_reads(self, receiver: int | None = None) -> bool:
        running = [r for (n, _), c in self.connections.items() if receiver in (None, n) for r in c.running]
        for read in running:
            read.finish()
        return bool(running)

    def settle(self, *, reads: bool = True) -> None:
        """Until nothing moves any more."""
        while True:
            moved = self.step()
            if reads and self.finish_reads():
                moved = True
            for number, receiver in enumerate(self.receiving):
                if number not in self.dead:
                    receiver.tick()
            if not moved and not self.step():
                return

    def pass_time(self, seconds: float) -> None:
        """Heartbeats included."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + self.options.heartbeat_s)
            for sender in self.sending:
                sender.tick()
            for number, receiver in enumerate(self.receiving):
                if number not in self.dead:
                    receiver.tick()
            while self.step():
                pass

    # --- engines ---

    def ask(self, request: str, tables: Sequence[Sequence[int]], tokens: int, *, start: int = 0) -> None:
        for session, table in zip(self.receiving, tables, strict=True):
            session.ask(request, {("full", "pages"): np.array(table, np.int64)}, start, tokens)

    def prefill(self, request: str, units: Sequence[Sequence[int]], tag: int, tokens: int, chunk: int = 5) -> None:
        """Every rank of the sender fills its units and offers them chunk by chunk."""
        for rank, session, mine in zip(self.senders, self.sending, units, strict=True):
            rank.fill(mine, tag, tokens)
            if not session.has(request):
                session.begin(request, tokens)
            for start in range(0, tokens, chunk):
                stop = min(tokens, start + chunk)
                last = stop == tokens
                lo, hi = start // PAGE, (-(-stop // PAGE) if last else stop // PAGE)
                payload = Payload.of("full", "pages", COMPONENTS, lo, np.array(mine[lo:hi], np.int64))
                session.offer(request, start, stop, [payload], last=last, engine_data=b"first" if last else b"")
