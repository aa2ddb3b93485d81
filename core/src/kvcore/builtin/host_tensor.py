"""``host_tensor``: retracted requests in ordinary host memory.

A fresh buffer costs a first touch of every page (several times the copy itself), so buffers of dropped requests are
kept for the next one, up to ``recycle_bytes``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.contract import FULL, Backup, Fence, Support, UnitBlock, all_fences
from kvcore.errors import BackupError
from kvcore.layout import Layout

Part = tuple[str, tuple[str, ...], int]


@dataclass(frozen=True)
class _Saved:
    buffer: npt.NDArray[np.uint8]
    parts: tuple[Part, ...]
    nbytes: int


class HostTensorBackup(Backup):
    """Keeps each retracted request in one host buffer.

    Args:
        recycle_bytes: how much memory of dropped requests is kept for reuse; 0 frees it at once.
    """

    name = "host_tensor"

    def __init__(self, *, recycle_bytes: int = 256 << 20) -> None:
        self._recycle_bytes = recycle_bytes
        self._saved: dict[str, _Saved] = {}
        self._spare: list[npt.NDArray[np.uint8]] = []

    def carries(self, layout: Layout, component: str) -> Support:
        """Any component: a backup is bytes."""
        return FULL

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Gather all blocks into one buffer. Raises BackupError for a key in use or a copy that failed."""
        if key in self._saved:
            raise BackupError("backup key is in use", key=key)
        parts = tuple(_part(block) for block in blocks)
        nbytes = sum(size for _, _, size in parts)
        buffer = self._take(nbytes)
        try:
            fences, offset = [], 0
            for block in blocks:
                fences.append(block.copy_out(buffer[offset : offset + block.nbytes]))
                offset += block.nbytes
        except Exception as error:
            self._give(buffer)
            raise BackupError("saving a request failed; nothing is kept", key=key, cause=repr(error)) from error
        self._saved[key] = _Saved(buffer, parts, nbytes)
        return all_fences(fences)

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Scatter the saved bytes into ``blocks``, which must match what was saved, in any order."""
        saved = self._get(key)
        starts, offset = {}, 0
        for part in saved.parts:
            starts[part] = offset
            offset += part[2]
        asked = [_part(block) for block in blocks]
        if sorted(asked) != sorted(saved.parts):
            raise BackupError("blocks to restore are not those saved", key=key, expected=saved.parts, got=asked)
        fences = []
        for block, part in zip(blocks, asked, strict=True):
            start = starts[part]
            fences.append(block.copy_in(saved.buffer[start : start + block.nbytes]))
        return all_fences(fences)

    def drop(self, key: str) -> None:
        """Forget ``key`` and keep its buffer for reuse."""
        saved = self._get(key)
        del self._saved[key]
        self._give(saved.buffer)

    @property
    def bytes_held(self) -> int:
        """Bytes of saved requests (spare buffers not counted)."""
        return sum(saved.nbytes for saved in self._saved.values())

    @property
    def bytes_spare(self) -> int:
        """Bytes of buffers kept for reuse."""
        return sum(buffer.nbytes for buffer in self._spare)

    def close(self) -> None:
        """Free everything."""
        self._saved.clear()
        self._spare.clear()

    def _get(self, key: str) -> _Saved:
        try:
            return self._saved[key]
        except KeyError:
            raise BackupError("no such backup", key=key, held=sorted(self._saved)) from None

    def _take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        fitting = [i for i, buffer in enumerate(self._spare) if buffer.nbytes >= nbytes]
        if fitting:
            return self._spare.pop(min(fitting, key=lambda i: self._spare[i].nbytes))
        return np.empty(nbytes, np.uint8)

    def _give(self, buffer: npt.NDArray[np.uint8]) -> None:
        self._spare.append(buffer)
        self._spare.sort(key=lambda item: item.nbytes)
        while self._spare and self.bytes_spare > self._recycle_bytes:
            self._spare.pop(0)


def _part(block: UnitBlock) -> Part:
    return (block.group, block.components, block.nbytes)
