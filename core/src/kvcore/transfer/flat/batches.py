"""A batch of flat reads, its place in the staging buffer, and its copy from there."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.contract import ReadHandle
from kvcore.errors import TransferError
from kvcore.layout import Int64Array
from kvcore.layout.moves import Descriptors
from kvcore.layout.moves.applying import copy_units
from kvcore.transfer.flat.staging import StagingPlan

Bytes = npt.NDArray[np.uint8]


@dataclass(eq=False)
class Batch:
    """Flat reads that are started together: all direct ones of a job, or some units by way of one slot."""

    group: str
    plan: StagingPlan
    src_ids: Int64Array
    dst_ids: Int64Array
    local: Bytes
    staged: bool
    slots: range = range(0)
    offset: int = 0
    handle: ReadHandle | None = None
    landed: bool = False
    landing: Landing | None = None

    def reads(self) -> Descriptors:
        """What the wire has to read."""
        if not self.staged:
            return self.plan.direct_reads(self.src_ids, self.dst_ids)
        reads = self.plan.staged_reads(self.src_ids)
        return Descriptors(reads.src, reads.dst + self.offset, reads.nbytes)

    def poll(self) -> bool:
        """Whether the step under way has ended: the wire's, then the copy's. Raises what it failed with."""
        if self.landing is not None:
            return self.landing.poll()
        if not self.landed:
            assert self.handle is not None
            self.landed = self.handle.poll()
        return self.landed


class Landing:
    """Copies a batch from its slot into place; a task of the copier."""

    def __init__(self, batch: Batch, staging: Bytes) -> None:
        self._batch = batch
        self._staging = staging
        self._error: Exception | None = None
        self._done = threading.Event()

    def run(self) -> None:
        """Copy. Never raises: what goes wrong is raised by :meth:`poll`."""
        plan, ids = self._batch.plan, self._batch.src_ids
        try:
            source = self._staging[self._batch.offset :]
            units = ids.size, plan.program.dst_units
            copy_units(plan.staged, source, self._batch.local, units, np.arange(ids.size), self._batch.dst_ids)
        except Exception as error:  # noqa: BLE001 -- the copier's thread serves other reads; poll() raises this one
            self._error = error
        self._done.set()

    def cancel(self) -> None:
        """End without copying: the copier is closed."""
        self._error = TransferError("the transport was closed before the copy began")
        self._done.set()

    def poll(self) -> bool:
        """Whether the copy is over."""
        if self._done.is_set() and self._error is not None:
            raise self._error
        return self._done.is_set()


class Slots:
    """The staging buffer, cut into two slots; a batch holds one of them, or both where its unit needs it."""

    NUMBER = 2
    ALIGNMENT = 64

    def __init__(self, buffer: Bytes) -> None:
        self.buffer = buffer
        self._bytes = buffer.nbytes // self.NUMBER // self.ALIGNMENT * self.ALIGNMENT
        self._free = set(range(self.NUMBER))

    def units(self, plan: StagingPlan, group: str) -> int:
        """Units of a batch. Raises TransferError where not even one fits."""
        need = plan.staged_bytes
        if need > self.buffer.nbytes:
            raise TransferError(
                "the staging buffer cannot hold one unit",
                group=group,
                expected=need,
                staging_bytes=self.buffer.nbytes,
                remedy=f"give the transport at least {need} bytes for staging; with {2 * need} it reads ahead",
            )
        return max(1, self._bytes // max(1, need))

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
