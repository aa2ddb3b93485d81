"""``host_pool``: retracted requests in one host arena, sized and touched when it is built and never grown.

The arena is cut into equal blocks. A request takes as many as its bytes need, wherever they lie, so only a lack of bytes
refuses a save. Its bytes are one stream over its blocks: units are gathered straight into neighbouring blocks, and only
one that crosses a gap between them goes through a small buffer. Copies run on a thread of their own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from kvcore.builtin.pools.memfd import total_memory
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
    copy_all,
    saved_offsets,
    saved_parts,
)
from kvcore.errors import BackupError, CapacityError, ConfigError, nearest
from kvcore.layout import Int64Array, Layout
from kvcore.requests.allocator import UnitAllocator
from kvcore.transfer.copier import Copier, InlineCopier, ThreadCopier

Bytes = npt.NDArray[np.uint8]

_COPIERS: dict[str, Callable[[], Copier]] = {"thread": ThreadCopier, "inline": InlineCopier}
_MIN_BLOCK, _MAX_BLOCK, _BLOCKS = 4 << 10, 1 << 20, 4096


class _Copy(Fence):
    """A save or restore: a task of the copier, and the fence of its end.

    Whoever waits for a copy that has not begun does it: so a resume does not queue behind the saves of others.
    """

    def __init__(self, failure: str, key: str, work: Callable[[], None], ended: Callable[[bool], None]) -> None:
        self._failure, self._key = failure, key
        self._work: Callable[[], None] | None = work
        self._ended = ended
        self._error: BaseException | None = None
        self._claim = threading.Lock()  # taken once, by the one thread that copies or cancels
        self.over = threading.Event()

    def run(self) -> None:
        """Copy, unless another thread does; what goes wrong is raised by :meth:`wait`."""
        if not self._claim.acquire(blocking=False):
            return
        assert self._work is not None
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 -- the copier's thread serves other requests; wait() raises this one
            self._end(error)
        except BaseException as error:
            self._end(error)
            raise
        else:
            self._end(None)

    def cancel(self, reason: str = "the backup was closed before the copy began") -> None:
        """A copy that has not begun never will; one under way goes on."""
        if self._claim.acquire(blocking=False):
            self._end(BackupError(reason, key=self._key))

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._work = None  # the blocks of the request need not outlive the copy
        self._ended(error is None)
        self.over.set()

    def done(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        self.run()
        self.over.wait()
        if self._error is not None:
            raise BackupError(self._failure, key=self._key, cause=repr(self._error)) from self._error


@dataclass
class _Entry:
    """One key: its place in the arena and what is going on there."""

    parts: tuple[SavedPart, ...]
    nbytes: int
    ids: Int64Array
    spans: tuple[Bytes, ...]  # the arena from block to block, neighbours joined
    save: _Copy | None = None
    dropped: bool = False
    copies: int = 0  # not ended


class HostPoolBackup(Backup):
    """Keeps retracted requests in one arena of fixed size.

    Args:
        size: bytes of the arena, or a size such as ``"64MiB"``; required. Rounded down to whole blocks.
        block_size: bytes of a block; a request's last one is filled in part. By default a 4096th of the arena, from
            4 KiB to 1 MiB.
        copier: ``"thread"``, ``"inline"`` (copies end before ``save`` and ``restore`` return) or an object that runs
            tasks.

    Raises ConfigError for options that cannot be, CapacityError where the host has no such memory.
    """

    name = "host_pool"
    check_options: ClassVar[Mapping[str, str]] = {"size": "4MiB"}
    """What the conformance kit constructs it with."""

    def __init__(
        self,
        *,
        size: int | str | None = None,
        block_size: int | str | None = None,
        copier: str | Copier = "thread",
    ) -> None:
        if size is None:
            raise ConfigError(
                "host_pool needs a size",
                backup=self.name,
                key="retraction.options.size",
                remedy='set it to the host memory for retracted requests, such as "64MiB"',
            )
        total = _size("size", size)
        block = _block_size(total) if block_size is None else _size("block_size", block_size)
        if block > total:
            raise ConfigError("a block is larger than the pool", backup=self.name, size=total, block_size=block)
        if total > total_memory():
            raise ConfigError(
                "the machine has less memory than the pool asks for",
                backup=self.name,
                key="retraction.options.size",
                size=total,
                total_bytes=total_memory(),
            )
        self._block = block
        self._copier = _copier(copier)
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._copies: set[_Copy] = set()  # not ended
        self._blocks = UnitAllocator(total // block + 1, name=self.name)  # its first id is never handed out
        self._closed = False
        self._unpin: Callable[[], None] | None = None
        self.max_bytes = total // block * block
        try:
            self._arena: Bytes = np.empty(self.max_bytes, np.uint8)
            self._arena.fill(0)  # touched now: a retraction must not wait for the kernel to find memory
        except MemoryError as error:
            raise CapacityError("no host memory for the pool", backup=self.name, size=total) from error

    def prepare(self, queue: CopyQueue) -> None:
        """Pin the whole arena. Raises CapacityError where the system has no more memory to pin."""
        self._unpin = queue.pin(self._arena)

    def carries(self, layout: Layout, component: str) -> Support:
        """Any component: a backup is bytes."""
        return FULL

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Begin to gather all blocks into the arena.

        Raises CapacityError, at once, where fewer bytes are free than needed, and BackupError for a key in use. The
        fence raises BackupError where the copy failed: the key is unknown then, and its bytes are free.
        """
        blocks = tuple(blocks)
        parts = saved_parts(blocks)
        nbytes = sum(block.nbytes for block in blocks)
        with self._lock:
            self._demand_open(key)
            if key in self._entries:
                raise BackupError("backup key is in use", key=key)
            needed, free = -(-nbytes // self._block), self._blocks.free_count
            if needed > free:
                raise CapacityError(
                    "host pool is full",
                    key=key,
                    needed=needed * self._block,
                    free=free * self._block,
                    size=self.max_bytes,
                    remedy="give retraction.options.size more memory; until then such requests are computed again",
                )
            ids = self._blocks.allocate(needed)
            entry = _Entry(parts, nbytes, ids, tuple(self._spans(ids)))
            self._entries[key] = entry
            entry.save = copy = _Copy(
                "saving a request failed; nothing is kept",
                key,
                lambda: self._save(key, entry, blocks),
                lambda ok: self._ended(key, entry, copy, lost=not ok),
            )
            self._begun(entry, copy)
        self._copier.submit(copy)
        return copy

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Begin to scatter the saved bytes into ``blocks``, which must match what was saved, in any order.

        A save under way ends first. Raises BackupError for a key that is unknown or blocks that do not match; the fence
        raises it where the copy failed: the bytes stay saved.
        """
        blocks = tuple(blocks)
        with self._lock:
            self._demand_open(key)
            entry = self._get(key)
            starts = saved_offsets(key, entry.parts, blocks)
            copy = _Copy(
                "restoring a request failed",
                key,
                lambda: self._restore(key, entry, blocks, starts),
                lambda ok: self._ended(key, entry, copy, lost=False),
            )
            self._begun(entry, copy)
        self._copier.submit(copy)
        return copy

    def drop(self, key: str) -> None:
        """Forget ``key``. Its bytes are free at once or, while a copy is under way, when that ends.

        A save that has not begun is given up: its fence is done.
        """
        with self._lock:
            entry = self._get(key)
            del self._entries[key]
            entry.dropped = True
            self._free_if_idle(entry)
        if entry.save is not None:
            entry.save.cancel("dropped before its copy began")

    @property
    def bytes_held(self) -> int:
        """Bytes of requests saved or being saved, and not dropped."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.values())

    @property
    def bytes_free(self) -> int:
        """Bytes that a save may take now, in whole blocks."""
        with self._lock:
            return self._blocks.free_count * self._block

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free or taken once."""
        with self._lock:
            self._blocks.check_integrity()

    def close(self) -> None:
        """End the copy under way, give up the others, free the arena. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            copies = list(self._copies)
        self._copier.close()
        for copy in copies:
            copy.cancel()
        for copy in copies:  # one may run on a thread that waited for it
            copy.over.wait()
        with self._lock:
            self._entries.clear()
            if self._unpin is not None:
                self._unpin()
            self._arena = np.empty(0, np.uint8)

    # --- on the thread that copies ---

    def _save(self, key: str, entry: _Entry, blocks: Sequence[UnitBlock]) -> None:
        _copy(blocks, saved_offsets(key, entry.parts, blocks), entry.spans, _out)

    def _restore(self, key: str, entry: _Entry, blocks: Sequence[UnitBlock], starts: Sequence[int]) -> None:
        if entry.save is not None:
            entry.save.wait()
        if entry.dropped:
            raise BackupError("dropped before its copy began", key=key)
        _copy(blocks, starts, entry.spans, _in)

    def _ended(self, key: str, entry: _Entry, copy: _Copy, *, lost: bool) -> None:
        with self._lock:
            if lost and not entry.dropped:
                del self._entries[key]
                entry.dropped = True
            self._copies.remove(copy)
            entry.copies -= 1
            self._free_if_idle(entry)

    # --- under the lock ---

    def _begun(self, entry: _Entry, copy: _Copy) -> None:
        self._copies.add(copy)
        entry.copies += 1

    def _free_if_idle(self, entry: _Entry) -> None:
        if entry.dropped and not entry.copies:
            self._blocks.release(entry.ids)

    def _get(self, key: str) -> _Entry:
        try:
            return self._entries[key]
        except KeyError:
            raise BackupError("no such backup", key=key, held=sorted(self._entries)) from None

    def _demand_open(self, key: str) -> None:
        if self._closed:
            raise BackupError("the backup is closed", key=key)

    def _spans(self, ids: Int64Array) -> Iterator[Bytes]:
        for run in np.split(ids, np.flatnonzero(np.diff(ids) != 1) + 1):
            if len(run):
                start = (int(run[0]) - 1) * self._block
                yield self._arena[start : start + len(run) * self._block]


# --- one stream of bytes over several spans of the arena ---------------------------------------------------------------

Move = Callable[[UnitBlock, Sequence[Bytes]], Fence]


def _copy(blocks: Sequence[UnitBlock], starts: Sequence[int], spans: Sequence[Bytes], move: Move) -> None:
    moves = (
        partial(move, piece, views)
        for block, start in zip(blocks, starts, strict=True)
        for piece, views in _pieces(block, list(_slices(spans, start, block.nbytes)))
    )
    copy_all(moves).wait()


def _out(block: UnitBlock, views: Sequence[Bytes]) -> Fence:
    if len(views) == 1:
        return block.copy_out(views[0])
    buffer = np.empty(block.nbytes, np.uint8)
    block.copy_out(buffer).wait()
    for view, start in zip(views, _starts(views), strict=True):
        view[:] = buffer[start : start + len(view)]
    return DONE


def _in(block: UnitBlock, views: Sequence[Bytes]) -> Fence:
    if len(views) == 1:
        return block.copy_in(views[0])
    block.copy_in(np.concatenate(views) if views else np.empty(0, np.uint8)).wait()
    return DONE


def _starts(views: Sequence[Bytes]) -> list[int]:
    return [0, *np.cumsum([len(view) for view in views]).tolist()][: len(views)]


def _slices(spans: Sequence[Bytes], start: int, nbytes: int) -> Iterator[Bytes]:
    """The bytes ``[start, start + nbytes)`` of the stream, a view a span."""
    for span in spans:
        lo, hi = min(start, len(span)), min(start + nbytes, len(span))
        if lo < hi:
            yield span[lo:hi]
        start, nbytes = start - lo, nbytes - (hi - lo)


def _pieces(block: UnitBlock, views: list[Bytes]) -> Iterator[tuple[UnitBlock, list[Bytes]]]:
    """Cut a block where its bytes leave a span: whole units to one view each, a unit that crosses a gap by itself.

    Depends on sizes alone, so a restore cuts as its save did, whatever order a block's bytes are in.
    """
    if len(views) < 2 or block.num_units < 2 or block.cut(0, 1) is None:
        yield block, views
        return
    unit, first = block.nbytes // block.num_units, 0
    while first < block.num_units:
        whole = len(views[0]) // unit
        count = max(whole, 1)
        piece = block.cut(first, count)
        assert piece is not None
        took = count * unit
        yield piece, list(_slices(views, 0, took))
        views = list(_slices(views, took, sum(map(len, views)) - took))
        first += count


# --- options ---------------------------------------------------------------------------------------------------------


def _size(option: str, value: int | str) -> int:
    try:
        size = parse_bytes(value)
    except ConfigError as error:
        error.fields = {"key": f"retraction.options.{option}", **error.fields}
        raise
    if not size:
        raise ConfigError("size of nothing", key=f"retraction.options.{option}", got=value)
    return size


def _block_size(total: int) -> int:
    wanted = min(max(total // _BLOCKS, _MIN_BLOCK), _MAX_BLOCK)
    return min(wanted // _MIN_BLOCK * _MIN_BLOCK, total)


def _copier(copier: str | Copier) -> Copier:
    if isinstance(copier, Copier):
        return copier
    if copier not in _COPIERS:
        raise ConfigError(
            "unknown copier", key="retraction.options.copier", got=copier, remedy=nearest(str(copier), _COPIERS)
        )
    return _COPIERS[copier]()
