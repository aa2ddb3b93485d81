"""Retraction: every component a request owns goes to a backup backend, and comes back into other units.

The set saved is the set of payloads the transfer would send, so a component can neither be forgotten nor copied twice,
and nothing here knows what kind of pool it is. ``docs/retraction.md`` tells the story.
"""

from __future__ import annotations

import itertools
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import msgspec

from kvcore.contract import DONE, Backup, Fence, UnitBlock
from kvcore.errors import BackupError, CapacityError, IntegrityError, KVCoreError, RequestError
from kvcore.layout import Layout
from kvcore.log import get_logger
from kvcore.requests.manager import Hold, Manager
from kvcore.requests.payload import Payload

if TYPE_CHECKING:
    from kvcore.memory.store import Store

log = get_logger("kvcore.retraction")

MAX_ENGINE_DATA = 64 << 10
"""Largest ``engine_data`` of a handle or a commit, in bytes."""

T = TypeVar("T")


class RetractionHandle(msgspec.Struct, frozen=True):
    """A retracted request.

    Attributes:
        request: its id.
        length: tokens that were in the cache (the sequence is one longer: the newest token has no KV yet).
        key: name of its bytes in the backend; empty where they were dropped.
        engine_data: what the engine wants back on resume (sampling state, generated tokens), at most 64 KiB.
        bytes_by_component: bytes saved.
    """

    request: str
    length: int
    key: str
    engine_data: bytes
    bytes_by_component: dict[str, int]

    @property
    def recompute(self) -> bool:
        """Whether the engine has to compute the tokens again: nothing was saved."""
        return not self.key

    @property
    def nbytes(self) -> int:
        """Bytes saved."""
        return sum(self.bytes_by_component.values())


class RetractionStats(msgspec.Struct, frozen=True):
    """What retraction did so far, and what it holds.

    Attributes:
        retractions: requests taken off the device.
        restored: brought back from the backend.
        recompute_fallbacks: retractions that should have been saved and were not, in all.
        fallback_causes: the same by cause: ``full``, ``save_failed``.
        failed_restores: restores that failed and changed nothing.
        copies_under_way: saves whose units are not allocatable yet.
        bytes_saved, bytes_restored: bytes of data copied, padding left out.
        bytes_held: bytes in the backend now.
    """

    retractions: int = 0
    restored: int = 0
    recompute_fallbacks: int = 0
    fallback_causes: dict[str, int] = {}
    failed_restores: int = 0
    copies_under_way: int = 0
    bytes_saved: int = 0
    bytes_restored: int = 0
    bytes_held: int = 0


@dataclass(eq=False)
class _Copy:
    """A copy out of (or, given up, into) units that are quarantined until it has ended."""

    request: str
    key: str
    nbytes: int
    fence: Fence
    hold: Hold
    wanted: bool = True
    error: BackupError | None = None


class Retractor:
    """Takes requests off the device and brings them back.

    Args:
        manager, store: of the cache.
        backup: the backend, or None where the policy is to recompute.
        layouts: by layer group, to know what must be saved.
        state_groups: groups restored before the others.
    """

    def __init__(
        self,
        manager: Manager,
        store: Store,
        backup: Backup | None,
        layouts: Mapping[str, Layout],
        state_groups: frozenset[str] = frozenset(),
    ) -> None:
        self._manager = manager
        self._store = store
        self._backup = backup
        self._layouts = layouts
        self._state_groups = state_groups
        self._keys = itertools.count(1)
        # In every key: two caches number alike, and a handle of the one must not name bytes of the other.
        self._instance = secrets.token_hex(4)
        self._kept: dict[str, _Copy] = {}
        self._pending: list[_Copy] = []  # oldest first
        queues = [pool.queue for pool in store.pools.values() if pool.queue is not None]
        if backup is not None and queues:
            backup.prepare(queues[0])  # all pools of a store are on one device
        self._counts: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()

    @property
    def bytes_held(self) -> int:
        """Bytes in the backend."""
        return self._backup.bytes_held if self._backup else 0

    @property
    def num_kept(self) -> int:
        """Requests whose bytes are saved, or being saved."""
        return len(self._kept)

    def stats(self) -> RetractionStats:
        """Counts since the cache was built."""
        return RetractionStats(
            **self._counts,
            recompute_fallbacks=self._causes.total(),
            fallback_causes=dict(self._causes),
            copies_under_way=len(self._pending),
            bytes_held=self.bytes_held,
        )

    # --- out ---

    def retract(self, request_id: str, engine_data: bytes = b"") -> RetractionHandle:
        """Save a request's components, free its units, and return its handle.

        Units stay unallocatable until the backend's copy has ended. Where the backend is full the bytes are dropped
        and the handle says so (counted and logged). Checkpoints are dropped. A copy that fails later costs the bytes only:
        :meth:`resume` then says so.

        Raises BackupError where the backend refused to begin, and RequestError where an open step is rewriting the
        request's state; the request is untouched then.
        """
        if len(engine_data) > MAX_ENGINE_DATA:
            raise RequestError(
                "engine_data is too large", request=request_id, expected=MAX_ENGINE_DATA, got=len(engine_data)
            )
        length = self._manager.get(request_id).length
        sizes = dict[str, int]()
        copy: _Copy | None = None
        if self._backup is not None and length:
            self._manager.demand_quiet(request_id)
            payloads = self._manager.payloads(request_id, 0, length, last=True)
            self._check_complete(request_id, payloads)
            sizes = _sizes(self._layouts, payloads)
            copy = self._save(self._backup, request_id, self._blocks(payloads), sum(sizes.values()))
        self._manager.release(request_id)
        self._store.invalidate(request_id)
        self._counts["retractions"] += 1
        if copy is not None:
            self._kept[copy.key] = copy
            self._pending.append(copy)
            if _owned(copy.hold):  # by a fork, which may now write into them in place: quarantine keeps nobody from it
                self._settle(copy, wait=True)
            self.poll()
            if copy.error is not None:
                del self._kept[copy.key]
                copy = None
        if copy is None:
            return RetractionHandle(request_id, length, "", engine_data, {})
        return RetractionHandle(request_id, length, copy.key, engine_data, sizes)

    def _save(self, backup: Backup, request_id: str, blocks: Sequence[UnitBlock], nbytes: int) -> _Copy | None:
        key = f"{request_id}#{self._instance}-{next(self._keys)}"
        hold = self._manager.hold(request_id)
        try:
            fence = backup.save(key, blocks)
        except CapacityError as error:
            hold.release()
            self._fall_back("full", request_id, error)
            return None
        except BaseException:
            hold.release()
            raise
        return _Copy(request_id, key, nbytes, fence, hold)

    def _fall_back(self, cause: str, request_id: str, error: KVCoreError) -> None:
        self._causes[cause] += 1
        say = log.warning if self._causes[cause] == 1 else log.debug  # a busy engine would log little else
        say("a retracted request will be recomputed", reason=cause, request=request_id, cause=str(error))

    # --- back ---

    def resume(self, handle: RetractionHandle) -> None:
        """Allocate units and restore every component, states before the others.

        Waits for the request's own save where that is still under way. Raises CapacityError where there is no room now,
        and BackupError where the bytes did not reach the backend or the restore failed; each leaves the handle valid
        and every unit in the pool. After a BackupError an engine may try again, or drop the handle and compute the
        tokens again. A handle of ``recompute`` is the engine's to admit again.
        """
        if handle.recompute:
            raise RequestError(
                "nothing was saved for this request",
                request=handle.request,
                remedy="admit it again and compute its tokens",
            )
        copy, backup = self._require(handle)
        self._settle(copy, wait=True)
        self.poll()
        if copy.error is not None:
            raise BackupError(
                "the save of this request failed",
                request=handle.request,
                key=handle.key,
                cause=str(copy.error),
                remedy="drop the handle, admit the request again and compute its tokens",
            ) from copy.error
        self.with_room(lambda: self._manager.admit(handle.request, handle.length, external=True))
        fence: Fence = DONE
        try:
            payloads = self._manager.payloads(handle.request, 0, handle.length, last=True)
            payloads = tuple(sorted(payloads, key=lambda p: p.group not in self._state_groups))
            fence = backup.restore(handle.key, self._blocks(payloads))
            fence.wait()
            self._manager.set_length(handle.request, handle.length)
        except BaseException as error:
            self._give_up(handle, fence)
            if isinstance(error, BackupError) or not isinstance(error, Exception):
                raise
            raise BackupError(
                "restoring a request failed; it is still saved",
                request=handle.request,
                key=handle.key,
                cause=repr(error),
            ) from error
        self._counts["restored"] += 1
        self._counts["bytes_restored"] += handle.nbytes
        self.drop(handle)

    def _give_up(self, handle: RetractionHandle, fence: Fence) -> None:
        """Release what a restore was filling; units a copy still writes (an interrupted wait) stay quarantined."""
        self._counts["failed_restores"] += 1
        hold = self._manager.hold(handle.request)
        self._manager.release(handle.request)
        self._pending.append(_Copy(handle.request, handle.key, 0, fence, hold, wanted=False))
        self.poll()

    def drop(self, handle: RetractionHandle) -> None:
        """Forget the bytes of a handle (the request was aborted), also while they are being copied.

        Handles without bytes are accepted.
        """
        if handle.recompute:
            return
        copy, backup = self._require(handle)
        if copy.error is None:
            try:
                backup.drop(handle.key)
            except BackupError:
                self._settle(copy, wait=True)
                if copy.error is None:  # else the save had failed, and nobody had asked yet
                    raise
        copy.wanted = False
        del self._kept[handle.key]
        self.poll()

    # --- copies under way ---

    def poll(self) -> None:
        """Make units allocatable whose copies have ended."""
        for copy in tuple(self._pending):
            self._settle(copy)

    def with_room(self, call: Callable[[], T]) -> T:
        """Return ``call()``. While it raises CapacityError, wait for a copy under way, which frees units, and repeat.

        Without this an engine would retract one request after the other while the first is still being copied.
        """
        self.poll()
        while True:
            try:
                return call()
            except CapacityError:
                if not self._pending:
                    raise
                self._settle(self._pending[0], wait=True)

    def _settle(self, copy: _Copy, *, wait: bool = False) -> None:
        """Give units back when their copy has ended, and note how it ended."""
        if copy not in self._pending or not (wait or copy.fence.done()):
            return
        try:
            copy.fence.wait()
        except Exception as cause:  # noqa: BLE001 -- recorded: whoever resumes the request is told
            error = (
                cause
                if isinstance(cause, BackupError)
                else BackupError("saving a request failed", key=copy.key, cause=repr(cause))
            )
            copy.error = error
            if copy.wanted:
                self._fall_back("save_failed", copy.request, error)
        else:
            self._counts["bytes_saved"] += copy.nbytes
        self._pending.remove(copy)
        copy.hold.release()

    def close(self) -> None:
        """End copies under way and forget all handles."""
        for copy in self._kept.values():
            copy.wanted = False
        self._kept.clear()
        try:
            if self._backup is not None:
                self._backup.close()
        finally:
            for copy in tuple(self._pending):
                self._settle(copy, wait=True)

    # --- rules that several calls share ---

    def _require(self, handle: RetractionHandle) -> tuple[_Copy, Backup]:
        if self._backup is None or handle.key not in self._kept:
            raise BackupError(
                "handle was resumed or dropped before, or is another cache's", request=handle.request, key=handle.key
            )
        return self._kept[handle.key], self._backup

    def _blocks(self, payloads: Sequence[Payload]) -> list[UnitBlock]:
        return [self._store.pools[p.group].block(p.components, p.ids) for p in payloads]

    def _check_complete(self, request_id: str, payloads: Sequence[Payload]) -> None:
        want = {(name, component) for name, layout in self._layouts.items() for component in layout.components}
        got = [(p.group, p.range, component) for p in payloads for component in p.components]
        have = {(group, component) for group, _, component in got}
        # A range may come in parts, one behind the other.
        parts = sorted((p.group, p.range, component, p.first, p.stop) for p in payloads for component in p.components)
        twice = any(a[:3] == b[:3] and b[3] < max(a[4], a[3] + 1) for a, b in itertools.pairwise(parts))
        if want != have or twice:
            raise IntegrityError(
                "payloads do not list every component once", request=request_id, expected=sorted(want), got=sorted(got)
            )


def _owned(hold: Hold) -> bool:
    """Whether a unit of a released request has another owner."""
    return any(bool((part.allocator.refcounts(ids) > 0).any()) for part, ids in hold)


def _sizes(layouts: Mapping[str, Layout], payloads: Sequence[Payload]) -> dict[str, int]:
    """Bytes of data by component, padding left out."""
    sizes: dict[str, int] = {}
    for payload in payloads:
        layout = layouts[payload.group]
        for component in payload.components:
            unit = sum(region.logical_bytes for region in layout.regions_of(component)) * len(layout.layers)
            sizes[component] = sizes.get(component, 0) + unit * len(payload.ids)
    return sizes
