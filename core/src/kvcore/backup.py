"""Retraction: every component a request owns goes to a backup backend, and comes back into other units.

The set saved is the set of payloads the transfer would send, so a component can neither be forgotten nor copied twice,
and nothing here knows what kind of pool it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec
import structlog

from kvcore.contract import Backup, Fence, UnitBlock
from kvcore.errors import BackupError, CapacityError, IntegrityError, RequestError
from kvcore.layout import Layout
from kvcore.manager import Hold, Manager
from kvcore.transfer.payload import Payload

if TYPE_CHECKING:
    from kvcore.store import Store

log = structlog.get_logger("kvcore.backup")

MAX_ENGINE_DATA = 64 << 10
"""Largest ``engine_data`` of a handle or a commit, in bytes."""


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
        self._pending: list[tuple[Fence, Hold]] = []
        self._live: set[str] = set()

    @property
    def bytes_held(self) -> int:
        """Bytes in the backend."""
        return self._backup.bytes_held if self._backup else 0

    def retract(self, request_id: str, engine_data: bytes = b"") -> RetractionHandle:
        """Save a request's components, free its units, and return its handle.

        Units stay unallocatable until the backend's copy has ended. Where the backend is full the bytes are dropped
        and the handle says so (logged). Raises BackupError with the request untouched where the copy failed.
        """
        if len(engine_data) > MAX_ENGINE_DATA:
            raise RequestError(
                "engine_data is too large", request=request_id, expected=MAX_ENGINE_DATA, got=len(engine_data)
            )
        length = self._manager.get(request_id).length
        key, sizes = "", dict[str, int]()
        hold, fence = None, None
        if self._backup is not None and length:
            payloads = self._manager.payloads(request_id, 0, length, last=True)
            self._check_complete(request_id, payloads)
            blocks = self._blocks(payloads)
            key = f"{request_id}#{next(self._keys)}"
            hold = self._manager.hold(request_id)
            try:
                fence = self._backup.save(key, blocks)
                sizes = _sizes(self._layouts, payloads)
            except CapacityError as error:
                log.warning("backup is full; the request will be recomputed", request=request_id, cause=str(error))
                key = ""
            except BaseException:
                hold.release()
                raise
        self._manager.release(request_id)
        self._store.invalidate(request_id)
        if hold is not None:
            if fence is None or fence.done():
                hold.release()
            else:
                self._pending.append((fence, hold))
        if key:
            self._live.add(key)
        return RetractionHandle(request_id, length, key, engine_data, sizes)

    def resume(self, handle: RetractionHandle) -> None:
        """Allocate units and restore every component, states before the others.

        Raises CapacityError where there is no room now, and BackupError where the restore failed; either leaves the
        handle valid and every unit in the pool. A handle of ``recompute`` is the engine's to admit again.
        """
        if handle.recompute:
            raise RequestError(
                "nothing was saved for this request",
                request=handle.request,
                remedy="admit it again and compute its tokens",
            )
        self.poll()
        backup = self._require(handle)
        self._manager.admit(handle.request, handle.length, external=True)
        try:
            payloads = self._manager.payloads(handle.request, 0, handle.length, last=True)
            payloads = tuple(sorted(payloads, key=lambda p: p.group not in self._state_groups))
            backup.restore(handle.key, self._blocks(payloads)).wait()
            self._manager.set_length(handle.request, handle.length)
        except Exception as error:
            self._manager.release(handle.request)
            if isinstance(error, BackupError):
                raise
            raise BackupError(
                "restoring a request failed; it is still saved",
                request=handle.request,
                key=handle.key,
                cause=repr(error),
            ) from error
        self.drop(handle)

    def drop(self, handle: RetractionHandle) -> None:
        """Forget the bytes of a handle (the request was aborted). Handles without bytes are accepted."""
        if handle.recompute:
            return
        self._require(handle).drop(handle.key)
        self._live.discard(handle.key)

    def poll(self) -> None:
        """Make units allocatable whose copies have ended."""
        pending, self._pending = self._pending, []
        for fence, hold in pending:
            if fence.done():
                hold.release()
            else:
                self._pending.append((fence, hold))

    def close(self) -> None:
        """Wait for copies under way and forget all handles."""
        for fence, hold in self._pending:
            fence.wait()
            hold.release()
        self._pending.clear()
        self._live.clear()
        if self._backup is not None:
            self._backup.close()

    def _require(self, handle: RetractionHandle) -> Backup:
        if self._backup is None or handle.key not in self._live:
            raise BackupError("handle was resumed or dropped before", request=handle.request, key=handle.key)
        return self._backup

    def _blocks(self, payloads: Sequence[Payload]) -> list[UnitBlock]:
        return [self._store.pools[p.group].block(p.components, p.ids) for p in payloads]

    def _check_complete(self, request_id: str, payloads: Sequence[Payload]) -> None:
        want = {(name, component) for name, layout in self._layouts.items() for component in layout.components}
        got = [(p.group, p.range, component) for p in payloads for component in p.components]
        have = {(group, component) for group, _, component in got}
        if want != have or len(got) != len(set(got)):
            raise IntegrityError(
                "payloads do not list every component once", request=request_id, expected=sorted(want), got=sorted(got)
            )


def _sizes(layouts: Mapping[str, Layout], payloads: Sequence[Payload]) -> dict[str, int]:
    """Bytes of data by component, padding left out."""
    sizes: dict[str, int] = {}
    for payload in payloads:
        layout = layouts[payload.group]
        for component in payload.components:
            unit = sum(region.logical_bytes for region in layout.regions_of(component)) * len(layout.layers)
            sizes[component] = sizes.get(component, 0) + unit * len(payload.ids)
    return sizes


def check_backup(backup: Backup, layouts: Mapping[str, Layout]) -> None:
    """Refuse, at configuration, a backend that cannot carry a component."""
    for layout in layouts.values():
        for component in layout.components:
            backup.carries(layout, component).require(
                "retraction backend cannot carry a component",
                backend=backup.name,
                component=component,
                format=layout.format,
                remedy='choose another retraction.backend or policy = "recompute"',
            )
