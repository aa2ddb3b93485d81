"""A batch of flat reads, its place in the staging buffer, and its copy from there."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.contract import DONE, CopyQueue, Fence, ReadHandle
from kvcore.errors import TransferError
from kvcore.layout import Int64Array
from kvcore.layout.moves import Descriptors
from kvcore.layout.moves.applying import copy_units
from kvcore.transfer.flat.staging import Area, StagingPlan

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class OnDevice:
    """An arena that the CPU cannot address.

    Attributes:
        queue: what copies into it.
        nbytes: its size.
        bounce: host memory for units on their way, as large as the staging buffer; a batch has its own place there.
    """

    queue: CopyQueue
    nbytes: int
    bounce: Bytes


@dataclass(eq=False)
class Batch:
    """Flat reads that are started together: all direct ones of a job, or some units by way of one slot.

    Attributes:
        reads: what the wire has to read; ``dst`` counts from ``offset`` of the staging buffer where it is staged.
        area: how it lies there; None where it is read straight.
        places: of each of its units, in every block of the area.
    """

    group: str
    plan: StagingPlan
    src_ids: Int64Array
    dst_ids: Int64Array
    local: Bytes | OnDevice
    reads: Descriptors
    area: Area | None = None
    places: tuple[Int64Array, ...] = ()
    slots: range = range(0)
    offset: int = 0
    handle: ReadHandle | None = None
    landed: bool = False
    landing: Landing | None = None

    @classmethod
    def straight(
        cls, group: str, plan: StagingPlan, src_ids: Int64Array, dst_ids: Int64Array, local: Bytes | OnDevice
    ) -> list[Batch]:
        """What a plan reads straight: one batch, or none."""
        reads = plan.direct_reads(src_ids, dst_ids)
        return [cls(group, plan, src_ids, dst_ids, local, reads)] if len(reads) else []

    @classmethod
    def by_slots(
        cls, group: str, plan: StagingPlan, src_ids: Int64Array, dst_ids: Int64Array, local: Bytes | OnDevice, room: int
    ) -> list[Batch]:
        """What a plan stages, in batches of at most ``room`` bytes."""
        if not plan.windows:
            return []
        most = room // plan.rows.nbytes if isinstance(local, OnDevice) else src_ids.size
        area, order = plan.area(room), np.argsort(src_ids, kind="stable")
        src_ids, dst_ids = src_ids[order], dst_ids[order]
        return [
            cls(group, plan, src_ids[at], dst_ids[at], local, area.reads(src_ids[at], places), area, places)
            for at, places in area.cut(src_ids, most)
        ]

    @property
    def staged(self) -> bool:
        """Whether it goes through the staging buffer."""
        return self.area is not None

    @property
    def read_over_bytes(self) -> int:
        """Bytes read that no move uses."""
        used = self.plan.window_bytes - self.plan.read_over_bytes
        return self.reads.total_bytes - used * self.src_ids.size if self.staged else 0

    def wanted(self) -> Descriptors:
        """What the wire has to read, at the batch's place in the staging buffer."""
        return (
            Descriptors(self.reads.src, self.reads.dst + self.offset, self.reads.nbytes) if self.offset else self.reads
        )

    def poll(self) -> bool:
        """Whether the step under way has ended: the wire's, then the copy's. Raises what it failed with."""
        if self.landing is not None:
            return self.landing.poll()
        if not self.landed:
            assert self.handle is not None
            self.landed = self.handle.poll()
        return self.landed


class Landing:
    """Copies a batch from its slot into place; a task of the copier. Into a device it is begun there, and polled."""

    def __init__(self, batch: Batch, staging: Bytes) -> None:
        self._batch = batch
        self._staging = staging
        self._error: Exception | None = None
        self._fence: Fence = DONE
        self._done = threading.Event()

    def run(self) -> None:
        """Copy. Never raises: what goes wrong is raised by :meth:`poll`."""
        batch = self._batch
        assert batch.area is not None
        try:
            source = self._staging[batch.offset : batch.offset + batch.area.nbytes]
            if isinstance(batch.local, OnDevice):
                self._fence = self._begin(batch, batch.area, source, batch.local)
            else:
                units = batch.area.units, batch.plan.program.dst_units
                for block, places in zip(batch.area.blocks, batch.places, strict=True):
                    copy_units(block.moves, source, batch.local, units, places, batch.dst_ids)
        except Exception as error:  # noqa: BLE001 -- the copier's thread serves other reads; poll() raises this one
            self._error = error
        self._done.set()

    @staticmethod
    def _begin(batch: Batch, area: Area, source: Bytes, device: OnDevice) -> Fence:
        """Lay the units side by side, as a copy to a device needs them, and begin it."""
        rows, count = batch.plan.rows, batch.dst_ids.size
        staged = device.bounce[batch.offset : batch.offset + count * rows.nbytes]
        for moves, places in zip(rows.filled_from(area), batch.places, strict=True):
            copy_units(moves, source, staged, (area.units, count), places, np.arange(count))
        return device.queue.apply(rows.program(count), staged, batch.dst_ids)

    def cancel(self) -> None:
        """End without copying: the copier is closed."""
        self._error = TransferError("the transport was closed before the copy began")
        self._done.set()

    def poll(self) -> bool:
        """Whether the copy is over. Raises what it failed with, once it is."""
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        if not self._fence.done():
            return False
        self._fence.wait()  # it is over: this only raises what went wrong
        return True


class Slots:
    """The staging buffer, cut into two slots; a batch holds one of them, or both where its unit needs it."""

    NUMBER = 2
    ALIGNMENT = 64

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self._bytes = buffer.nbytes // self.NUMBER // self.ALIGNMENT * self.ALIGNMENT
        self._free = set(range(self.NUMBER))

    def fits(self, plan: StagingPlan) -> bool:
        """Whether there is room for a unit."""
        return plan.staged_bytes <= self.buffer.nbytes

    def room(self, plan: StagingPlan, group: str) -> int:
        """Bytes of a batch: a slot, or all of the buffer. Raises TransferError where not even one unit fits."""
        need = plan.staged_bytes
        if not self.fits(plan):
            raise TransferError(
                "the staging buffer cannot hold one unit",
                group=group,
                expected=need,
                staging_bytes=self.buffer.nbytes,
                remedy=f"give the transport at least {need} bytes for staging; with {2 * need} it reads ahead",
            )
        return self._bytes if need <= self._bytes else self.buffer.nbytes

    def acquire(self, batch: Batch) -> bool:
        """Give a batch room; False where it has to wait."""
        if batch.plan.staged_bytes > self._bytes:
            if len(self._free) < self.NUMBER:
                return False
            batch.slots = range(self.NUMBER)
        elif self._free:
            first = min(self._free)
            batch.slots = range(first, first + 1)
        else:
            return False
        self._free -= set(batch.slots)
        batch.offset = batch.slots[0] * self._bytes
        return True

    def release(self, batch: Batch) -> None:
        """Take it back."""
        self._free |= set(batch.slots)
        batch.slots = range(0)
