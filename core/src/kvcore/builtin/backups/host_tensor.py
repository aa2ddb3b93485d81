"""``host_tensor``: retracted requests in ordinary host memory.

A fresh buffer costs a first touch of every page (several times the copy itself), so buffers of dropped requests are
kept for the next one, up to ``recycle_bytes``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvcore.config import parse_bytes
from kvcore.contract import (
    DONE,
    FULL,
    Backup,
    CopyQueue,
    Fence,
    SavedPart,
    Support,
    UnitBlock,
    all_fences,
    copy_all,
    saved_offsets,
    saved_parts,
)
from kvcore.errors import BackupError, KVCoreError
from kvcore.layout import Layout


@dataclass
class _Saved:
    buffer: npt.NDArray[np.uint8]
    parts: tuple[SavedPart, ...]
    nbytes: int
    fence: Fence = DONE
    reads: Fence = DONE  # restores that may still read the buffer


class _SaveFence(Fence):
    """The copies of one save; a failed one takes the key back."""

    def __init__(self, backup: HostTensorBackup, key: str, saved: _Saved, copies: Fence) -> None:
        self._backup, self._key, self._saved, self._copies = backup, key, saved, copies

    def done(self) -> bool:
        return self._copies.done()

    def wait(self) -> None:
        try:
            self._copies.wait()
        except Exception as error:
            self._backup._forget(self._key, self._saved)
            raise _failed("saving a request failed; nothing is kept", self._key, error) from error


class HostTensorBackup(Backup):
    """Keeps each retracted request in one host buffer.

    Args:
        recycle_bytes: how much memory of dropped requests is kept for reuse, or a size such as ``"64MiB"``; 0 frees it
            at once.
    """

    name = "host_tensor"

    def __init__(self, *, recycle_bytes: int | str = 256 << 20) -> None:
        self._recycle_bytes = parse_bytes(recycle_bytes)
        self._saved: dict[str, _Saved] = {}
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._queue: CopyQueue | None = None
        self._pinned: dict[int, Callable[[], None]] = {}

    def prepare(self, queue: CopyQueue) -> None:
        """Pin buffers from now on."""
        self._queue = queue

    def carries(self, layout: Layout, component: str) -> Support:
        """Any component: a backup is bytes."""
        return FULL

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Gather all blocks into one buffer. Raises BackupError for a key in use or a copy that failed."""
        if key in self._saved:
            raise BackupError("backup key is in use", key=key)
        parts = saved_parts(blocks)
        nbytes = sum(block.nbytes for block in blocks)
        saved = _Saved(self._take(nbytes), parts, nbytes)
        try:
            copies = copy_all(
                partial(block.copy_out, saved.buffer[start : start + block.nbytes])
                for block, start in zip(blocks, saved_offsets(key, parts, blocks), strict=True)
            )
        except Exception as error:
            self._give(saved.buffer)
            raise _failed("saving a request failed; nothing is kept", key, error) from error
        self._saved[key] = saved
        if not copies.done():
            saved.fence = _SaveFence(self, key, saved, copies)
        return saved.fence

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Scatter the saved bytes into ``blocks``, which must match what was saved, in any order.

        Waits for a save under way. Raises BackupError; the bytes stay saved.
        """
        saved = self._get(key)
        saved.fence.wait()
        starts = saved_offsets(key, saved.parts, blocks)
        try:
            copies = copy_all(
                partial(block.copy_in, saved.buffer[start : start + block.nbytes])
                for block, start in zip(blocks, starts, strict=True)
            )
        except Exception as error:
            raise _failed("restoring a request failed; it is still saved", key, error) from error
        if not copies.done():
            saved.reads = all_fences([saved.reads, copies])
        return copies

    def drop(self, key: str) -> None:
        """Forget ``key``, once its copy has ended, and keep its buffer for reuse."""
        saved = self._get(key)
        self._quiet(saved)
        self._forget(key, saved)

    @property
    def bytes_held(self) -> int:
        """Bytes of saved requests (spare buffers not counted)."""
        return sum(saved.nbytes for saved in self._saved.values())

    @property
    def bytes_spare(self) -> int:
        """Bytes of buffers kept for reuse."""
        return sum(buffer.nbytes for buffer in self._spare)

    def close(self) -> None:
        """Wait for copies and free everything."""
        for saved in list(self._saved.values()):
            self._quiet(saved)
            self._free(saved.buffer)
        self._saved.clear()
        while self._spare:
            self._free(self._spare.pop())

    def _get(self, key: str) -> _Saved:
        try:
            return self._saved[key]
        except KeyError:
            raise BackupError("no such backup", key=key, held=sorted(self._saved)) from None

    def _quiet(self, saved: _Saved) -> None:
        for fence in (saved.fence, saved.reads):
            # Whoever holds the fence is told; here only the end of the copy matters.
            with contextlib.suppress(KVCoreError):
                fence.wait()

    def _forget(self, key: str, saved: _Saved) -> None:
        if self._saved.get(key) is saved:
            del self._saved[key]
            self._give(saved.buffer)

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        fitting = [i for i, buffer in enumerate(self._spare) if buffer.nbytes >= nbytes]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda i: self._spare[i].nbytes))
        buffer = np.empty(nbytes, np.uint8)
        if self._queue is not None and nbytes:
            self._pinned[buffer.ctypes.data] = self._queue.pin(buffer)
        return buffer

    def _free(self, buffer: npt.NDArray[np.uint8]) -> None:
        unpin = self._pinned.pop(buffer.ctypes.data, None)
        if unpin is not None:
            unpin()

    def _give(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._spare.append(buffer)
        self._spare.sort(key=lambda item: item.nbytes)
        while self._spare and self.bytes_spare > self._recycle_bytes:
            self._free(self._spare.pop(0))


def _failed(message: str, key: str, error: Exception) -> BackupError:
    return BackupError(message, key=key, cause=repr(error))
