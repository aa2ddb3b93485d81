"""Reads of programs over a wire that only copies contiguous bytes: the half of a transport that all such wires share.

A transport of flat reads makes one :class:`FlatReader` and derives its connection from :class:`FlatConnection`, which
asks the wire for nothing but ``read_flat``. Plans come from :mod:`kvcore.transfer.flat.staging`. What is staged is read in
batches of units, at most one for each slot of the staging buffer: while a batch is copied into place from one slot, the
next one is read into the other.

Nothing here has a thread: whoever polls a read, or waits for a connection to become quiet, moves all reads of the
transport along. The copies run on a :class:`~kvcore.transfer.copier.Copier`.
"""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import numpy as np

from kvcore.contract import Arena, PeerConnection, ReadHandle, ReadJob, TransportTraits
from kvcore.errors import KVCoreError, LayoutError, PeerLostError, TransferError
from kvcore.layout import Int64Array
from kvcore.layout.moves import Descriptors
from kvcore.log import get_logger
from kvcore.transfer.copier import Copier, ThreadCopier
from kvcore.transfer.flat.batches import Batch, Bytes, Landing, OnDevice, Slots
from kvcore.transfer.flat.staging import DEFAULT_BYTES_PER_US, StagingPlan, StagingPlanner

_log = get_logger("kvcore.transfer.flat")

_POLL_S = 0.0002


class FlatStats(msgspec.Struct):
    """What a reader has read so far.

    Attributes:
        descriptors: flat reads given to the wire.
        read_bytes: bytes they asked for.
        read_over_bytes: how many of those no move used.
        staged_bytes: bytes that went through the staging buffer.
        batches: times a slot of the staging buffer was filled.
    """

    descriptors: int = 0
    read_bytes: int = 0
    read_over_bytes: int = 0
    staged_bytes: int = 0
    batches: int = 0


class FlatConnection(PeerConnection):
    """A peer behind a wire of flat reads. A transport derives from it and adds ``read_flat`` and ``alive``.

    Args:
        reader: of the transport.
        source_bytes: sizes of the peer's arenas by layer group.
    """

    def __init__(self, reader: FlatReader, source_bytes: Mapping[str, int]) -> None:
        self._reader = reader
        self._source_bytes = dict(source_bytes)
        self._closed = False

    @abstractmethod
    def read_flat(self, group: str, reads: Descriptors, *, staged: bool) -> ReadHandle:
        """Start flat reads; returns at once.

        Args:
            group: whose arena at the peer ``reads.src`` are offsets of.
            reads: what to copy; at least one. ``reads.dst`` are offsets of the local arena of the same group or,
                with ``staged``, of the staging buffer.

        Returns:
            A handle whose ``poll`` is True once every byte has landed, or raises once every read is over and some
            failed: then no byte moves any more, since the memory is used for something else next.

        Raises:
            TransferError: nothing was started.
        """

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        """Start pulling. Every id, size and plan is checked before any byte moves."""
        if self._closed or not self.alive():
            raise PeerLostError("the connection is closed")
        return self._reader.start(self, jobs)

    def source_bytes(self, group: str) -> int | None:
        """Size of the peer's arena of a group; None where it has none."""
        return self._source_bytes.get(group)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def quiesce(self, timeout_s: float) -> bool:
        """Wait for the reads under way."""
        return self._reader.quiesce(self, timeout_s)

    def close(self) -> None:
        """Start nothing more; what the wire has begun goes on until it is over. Idempotent."""
        self._closed = True
        self._reader.advance()


class FlatReader:
    """Carries out the reads of all connections of a transport, with one staging buffer of bounded size.

    Args:
        traits: of the transport.
        local: this process's arenas by layer group. Where the CPU cannot address one, everything is staged and lands by its
            queue, through pinned host memory as large as ``staging`` for each device.
        staging: the staging buffer, ``uint8 [bytes]``; the transport has made it known to its wire. Two batches share it
            (double buffering), or one takes all of it where half cannot hold a unit.
        copier: where copies out of the staging buffer run; a thread of its own by default.
        bytes_per_us: rate of the wire, for the cost model.
    """

    def __init__(
        self,
        traits: TransportTraits,
        local: Mapping[str, Arena],
        staging: Bytes,
        *,
        copier: Copier | None = None,
        bytes_per_us: float = DEFAULT_BYTES_PER_US,
    ) -> None:
        self.stats = FlatStats()
        self._planner = StagingPlanner(traits, bytes_per_us)
        self._unpin: list[Callable[[], None]] = []
        self._local = self._targets(local, staging.nbytes)
        self._slots = Slots(staging)
        self._copier = copier or ThreadCopier()
        self._reads: list[_Read] = []
        self._lock = threading.RLock()
        self._closed = False

    def _targets(self, arenas: Mapping[str, Arena], staging_bytes: int) -> dict[str, Bytes | OnDevice]:
        targets: dict[str, Bytes | OnDevice] = {}
        bounces: dict[str, Bytes] = {}
        try:
            for group, arena in arenas.items():
                queue = arena.queue()
                if queue is None:
                    targets[group] = arena.array()
                    continue
                if arena.device not in bounces:
                    bounces[arena.device] = np.zeros(staging_bytes, np.uint8)
                    self._unpin.append(queue.pin(bounces[arena.device]))
                targets[group] = OnDevice(queue, arena.nbytes, bounces[arena.device])
        except BaseException:
            self._give_back()
            raise
        return targets

    def _give_back(self) -> None:
        while self._unpin:
            self._unpin.pop()()

    def start(self, connection: FlatConnection, jobs: Sequence[ReadJob]) -> ReadHandle:
        """Begin a read. Raises TransferError where nothing was started."""
        batches = [batch for job in jobs for batch in self._batches(connection, job)]
        batches.sort(key=lambda batch: batch.staged)  # what needs no slot does not wait behind what does
        read = _Read(self, connection, batches)
        with self._lock:
            if self._closed:
                raise TransferError("the transport is closed")
            self._reads.append(read)
            self.advance()
            if read.over and read.error is not None and not read.started:
                raise read.error
        return read

    def _batches(self, connection: FlatConnection, job: ReadJob) -> Iterator[Batch]:
        local, there, program = self._local.get(job.group), connection.source_bytes(job.group), job.program
        if local is None or there is None:
            raise TransferError("no registered arena for the group on both sides", group=job.group)
        for side, have, need in (
            ("source", there, program.src_bytes),
            ("destination", local.nbytes, program.dst_bytes),
        ):
            if have < need:
                raise TransferError(
                    "arena is smaller than the plan", group=job.group, side=side, expected=need, got=have
                )
        try:
            src_ids, dst_ids = program.pairs(job.src_units, job.dst_units)
        except LayoutError as error:
            raise TransferError(error.message, group=job.group, **error.fields) from error
        if not src_ids.size:
            return
        plan, *others = self._planner.plans(program, straight=not isinstance(local, OnDevice))
        room = self._slots.room(plan, job.group)
        found = self._carried_out(job.group, plan, src_ids, dst_ids, local, room)
        for other in others:
            if self._slots.fits(other):
                room = self._slots.room(other, job.group)
                better = self._carried_out(job.group, other, src_ids, dst_ids, local, room)
                found = min(found, better, key=_price)
        yield from found

    @staticmethod
    def _carried_out(
        group: str, plan: StagingPlan, src_ids: Int64Array, dst_ids: Int64Array, local: Bytes | OnDevice, room: int
    ) -> list[Batch]:
        straight = Batch.straight(group, plan, src_ids, dst_ids, local)
        return straight + Batch.by_slots(group, plan, src_ids, dst_ids, local, room)

    def advance(self) -> None:
        """Move every read along as far as it goes without waiting."""
        with self._lock:
            for read in self._reads:
                self._settle(read)
            room = True
            for read in self._reads:
                # First come, first served: a large batch is not overtaken by small ones for ever.
                room = self._begin(read, room)
            for read in self._reads:
                read.finish_if_over()
            self._reads = [read for read in self._reads if not read.over]

    def _settle(self, read: _Read) -> None:
        """Take note of what has ended, and pass landed batches on to the copier."""
        if read.connection.closed or self._closed:
            read.fail(TransferError("the connection was closed during a read"))
        for batch in list(read.under_way):
            try:
                if not batch.poll():
                    continue
                if batch.staged and batch.landing is None and read.error is None:
                    batch.landing = Landing(batch, self._slots.buffer)
                    self._copier.submit(batch.landing)
                    if not batch.poll():
                        continue
            except Exception as error:  # noqa: BLE001 -- whatever a wire raises ends this read, not the caller's loop
                read.fail(error)
            read.under_way.remove(batch)
            self._slots.release(batch)

    def _begin(self, read: _Read, room: bool) -> bool:
        """Start what there is room for; returns whether there is any left: False once a batch waits for a slot."""
        while read.waiting and read.error is None:
            batch = read.waiting[0]
            if batch.staged and not (room and self._slots.acquire(batch)):
                return False
            read.waiting.popleft()
            reads = batch.wanted()
            try:
                batch.handle = read.connection.read_flat(batch.group, reads, staged=batch.staged)
            except Exception as error:  # noqa: BLE001 -- as above: nothing of this batch was started
                self._slots.release(batch)
                read.fail(error)
                break
            read.begin(batch)
            self._count(batch, reads)
        return room

    def _count(self, batch: Batch, reads: Descriptors) -> None:
        self.stats.descriptors += len(reads)
        self.stats.read_bytes += reads.total_bytes
        if batch.staged:
            self.stats.batches += 1
            self.stats.staged_bytes += reads.total_bytes
            self.stats.read_over_bytes += batch.read_over_bytes

    def quiesce(self, connection: FlatConnection, timeout_s: float) -> bool:
        """Wait until no read of a connection is left; False past the deadline."""
        return self._wait(lambda read: read.connection is connection, timeout_s)

    def _wait(self, concerns: Callable[[_Read], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self.advance()
                if not any(concerns(read) for read in self._reads):
                    return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)

    def close(self, timeout_s: float = 5.0) -> bool:
        """End every read and the copier. Idempotent.

        Returns:
            False where bytes were still moving after ``timeout_s``, by the wire or to a device: the arenas and the
            staging buffer must then be kept.
        """
        with self._lock:
            first, self._closed = not self._closed, True
        quiet = self._wait(lambda read: True, timeout_s)
        self._copier.close()
        if quiet:
            self._give_back()
        if first:
            _log.debug("flat reads are over", quiet=quiet, **msgspec.structs.asdict(self.stats))
        return quiet


def _price(batches: Sequence[Batch]) -> int:
    """What the reads of a plan cost, in bytes of the wire."""
    return sum(len(batch.reads) * batch.plan.gap + batch.reads.total_bytes for batch in batches)


class _Read(ReadHandle):
    """A read under way, or over. Guarded by the reader's lock."""

    def __init__(self, reader: FlatReader, connection: FlatConnection, batches: Sequence[Batch]) -> None:
        self.seconds = 0.0
        self.connection = connection
        self.waiting = deque(batches)
        self.under_way: list[Batch] = []
        self.error: TransferError | None = None
        self.started = False
        self.over = False
        self._reader = reader
        self._began = time.perf_counter()

    def begin(self, batch: Batch) -> None:
        """A batch was given to the wire."""
        self.started = True
        self.under_way.append(batch)

    def fail(self, error: Exception) -> None:
        """Start nothing more; the read is over when what is under way has ended. The first failure is reported."""
        self.waiting.clear()
        if self.error is None:
            if isinstance(error, TransferError):
                self.error = error
            elif isinstance(error, KVCoreError):
                self.error = TransferError(f"read failed: {error.message}", **error.fields)
            else:
                self.error = TransferError("read failed", cause=repr(error))

    def finish_if_over(self) -> None:
        """Become terminal where nothing is left to do."""
        if not self.waiting and not self.under_way and not self.over:
            self.over = True
            self.seconds = time.perf_counter() - self._began

    def poll(self) -> bool:
        if not self.over:
            self._reader.advance()
        if self.over and self.error is not None:
            raise self.error
        return self.over
