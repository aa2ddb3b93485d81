"""The reader's side of staging: reads whose source or destination the CPU cannot address.

Each connection has a thread of its own for them: a peer that does not answer holds up its own reads alone, and those no
longer than a deadline. Bytes go through the ring of the owner where its arena is on a device, and through pinned memory
of this process where the destination is on one; programs run from there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.contract import DONE, CopyQueue, Fence, ReadHandle, ReadJob
from kvcore.errors import KVCoreError, TransferError
from kvcore.layout import Int64Array
from kvcore.layout.moves import run_program
from kvcore.transfer.shm.memfd import Bytes
from kvcore.transfer.shm.stage_channel import ReaderChannel
from kvcore.transfer.shm.windows import Windows

_LOCAL_BYTES = 8 << 20
"""Bytes that go through pinned memory at a time where the owner has no ring to say so."""


@dataclass(frozen=True)
class StagedJob:
    """One job of a read.

    Attributes:
        job: program and units.
        windows: of the program.
        source: the peer's arena where it is mapped, None where it has to be asked.
        target: the local arena, or what copies into it.
    """

    job: ReadJob
    windows: Windows
    source: Bytes | None
    target: Bytes | CopyQueue


@dataclass(frozen=True)
class _Chunk:
    item: StagedJob
    src: Int64Array
    dst: Int64Array

    @property
    def nbytes(self) -> int:
        return len(self.src) * self.item.windows.unit_bytes


class Bounce:
    """Two buffers of pinned memory on the way to a device, each used again when its copy has ended."""

    def __init__(self) -> None:
        self._buffers: list[tuple[Bytes, Callable[[], None]]] = []
        self._fences: list[Fence] = [DONE, DONE]
        self._next = 0

    def land(self, chunk: _Chunk, queue: CopyQueue, fill: Callable[[Bytes], None]) -> None:
        """Fill a buffer with a chunk's staged units and begin to copy it into the device's arena."""
        self._reserve(chunk.nbytes, queue)
        n, self._next = self._next, 1 - self._next
        self._fences[n].wait()
        buffer = self._buffers[n][0][: chunk.nbytes]
        fill(buffer)
        self._fences[n] = queue.apply(chunk.item.windows.program(len(chunk.src)), buffer, chunk.dst)

    def _reserve(self, nbytes: int, queue: CopyQueue) -> None:
        if self._buffers and len(self._buffers[0][0]) >= nbytes:
            return
        self.close()
        for _ in range(2):
            memory = np.zeros(nbytes, np.uint8)
            self._buffers.append((memory, queue.pin(memory)))

    def wait(self) -> None:
        """Wait for every copy under way; raises where one failed, once all have ended."""
        fences, self._fences = self._fences, [DONE, DONE]
        failure: Exception | None = None
        for fence in fences:
            try:
                fence.wait()
            except Exception as error:  # noqa: BLE001 -- raised below, once nothing is under way any more
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, and give the memory back."""
        try:
            self.wait()
        finally:
            for _, unpin in self._buffers:
                unpin()
            self._buffers.clear()


class StagedReads:
    """What the staged reads of one connection share. Used by its thread alone, but for :meth:`cancel`.

    Args:
        name, token: of the owner's staging server.
        timeout_s: how long the owner may take for one answer.
    """

    def __init__(self, name: str, token: bytes, timeout_s: float) -> None:
        self._name, self._token, self._timeout_s = name, token, timeout_s
        self._cancel = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._channel: ReaderChannel | None = None
        self._bounce = Bounce()

    def copy(self, jobs: Sequence[StagedJob]) -> int:
        """Do a read; returns bytes with meaning moved. When it returns or raises, no byte moves any more."""
        try:
            moved = self._copy(jobs)
        except BaseException:
            # Requests the owner has not answered may still be written into the ring: it is not used again.
            self._disconnect()
            with contextlib.suppress(Exception):  # the first failure is the one raised
                self._bounce.wait()
            raise
        self._bounce.wait()
        return moved

    def _copy(self, jobs: Sequence[StagedJob]) -> int:
        remote = [item.windows.unit_bytes for item in jobs if item.source is None and len(item.job.src_units)]
        size, slots = _LOCAL_BYTES, deque[int]()
        if remote:
            ring = len(self._connected().ring)
            if max(remote) > ring:
                raise TransferError(
                    "a unit is larger than the peer's staging memory",
                    expected=f"at least {max(remote)} bytes",
                    got=ring,
                    remedy="raise transfer.options.stage_bytes of the process that is read from",
                )
            # Two halves, so that the next units are copied while these are used; one whole for units that large.
            size = ring // 2 if max(remote) <= ring // 2 else ring
            slots.extend(range(0, ring - size + 1, size))
        chunks = deque(chunk for item in jobs for chunk in _chunks(item, size))
        asked: deque[tuple[_Chunk, int, int]] = deque()
        moved = 0
        while chunks or asked:
            while chunks and chunks[0].item.source is None and slots:
                chunk, at = chunks.popleft(), slots.popleft()
                channel = self._connected()
                asked.append((chunk, at, channel.ask(chunk.item.job.group, at, chunk.item.windows.pieces, chunk.src)))
            if asked:
                chunk, at, request = asked.popleft()
                self._connected().wait(request)
                self._land_staged(chunk, self._connected().ring[at : at + chunk.nbytes])
                slots.append(at)
            else:
                chunk = chunks.popleft()
                self._land_mapped(chunk)
            moved += chunk.item.job.program.bytes_per_unit * len(chunk.src)
        return moved

    def _connected(self) -> ReaderChannel:
        if self._channel is None:
            self._channel = ReaderChannel(self._name, self._token, self._cancel, self._timeout_s)
        return self._channel

    def _disconnect(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _land_staged(self, chunk: _Chunk, staged: Bytes) -> None:
        target = chunk.item.target
        if isinstance(target, CopyQueue):
            self._bounce.land(chunk, target, lambda buffer: np.copyto(buffer, staged))
            return
        count = len(chunk.src)
        run_program(chunk.item.windows.program(count), staged, target, np.arange(count), chunk.dst)

    def _land_mapped(self, chunk: _Chunk) -> None:
        source, target = chunk.item.source, chunk.item.target
        assert source is not None
        if isinstance(target, CopyQueue):
            self._bounce.land(chunk, target, lambda buffer: gather_units(source, chunk, buffer))
        else:
            run_program(chunk.item.job.program, source, target, chunk.src, chunk.dst)

    def cancel(self) -> None:
        """End the read under way, from any thread; no other will work."""
        os.eventfd_write(self._cancel, 1)

    def close(self) -> None:
        """Give everything back, once no read is under way."""
        self._disconnect()
        try:
            self._bounce.close()
        finally:
            os.close(self._cancel)


def gather_units(source: Bytes, chunk: _Chunk, buffer: Bytes) -> None:
    """Copy the windows of a chunk's units from an arena that the CPU can address."""
    rows, start = buffer.reshape(len(chunk.src), -1), 0
    for piece in chunk.item.windows.pieces:
        shape, strides = (piece.num_units, piece.nbytes), (piece.unit_stride, 1)
        view = np.lib.stride_tricks.as_strided(source[piece.base :], shape, strides, writeable=False)
        rows[:, start : start + piece.nbytes] = view[chunk.src]
        start += piece.nbytes


def _chunks(item: StagedJob, size: int) -> Iterator[_Chunk]:
    src, dst = item.job.program.pairs(item.job.src_units, item.job.dst_units)
    step = max(1, size // max(1, item.windows.unit_bytes))
    for lo in range(0, len(src), step):
        yield _Chunk(item, src[lo : lo + step], dst[lo : lo + step])


class StagedTask(ReadHandle):
    """A staged read: a task of its connection's thread, and the handle of the read."""

    def __init__(self, reads: StagedReads, jobs: Sequence[StagedJob], finished: Callable[[], None]) -> None:
        self.nbytes = 0
        self.seconds = 0.0
        self._reads = reads
        self._jobs = tuple(jobs)
        self._finished = finished
        self._error: TransferError | None = None
        self._done = False

    def run(self) -> None:
        """Copy. Never raises: what goes wrong is raised by :meth:`poll`."""
        started = time.perf_counter()
        try:
            self.nbytes = self._reads.copy(self._jobs)
        except TransferError as error:
            self._error = error
        except KVCoreError as error:
            self._error = TransferError(f"copy failed: {error.message}", **error.fields)
        except Exception as error:  # noqa: BLE001 -- the thread serves other reads; poll() raises this one
            self._error = TransferError("copy failed", cause=repr(error))
        self.seconds = time.perf_counter() - started
        self._end()

    def cancel(self) -> None:
        """End without copying: the connection is closed."""
        self._error = TransferError("the connection was closed before the copy began")
        self._end()

    def _end(self) -> None:
        self._jobs = ()  # no view of the peer's memory outlives the read
        self._done = True
        self._finished()

    def poll(self) -> bool:
        if not self._done:
            return False
        if self._error is not None:
            raise self._error
        return True
