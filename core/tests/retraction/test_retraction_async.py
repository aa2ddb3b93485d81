"""Retraction whose copies end later: quarantine, late failures, aborts, and everything that may happen meanwhile."""

import threading
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.contract import Fence, UnitBlock
from kvcore.errors import BackupError, CapacityError, RequestError

PAGE = 4


class Watched(UnitBlock):
    """A block that tells before each copy; ``before`` may raise or wait."""

    def __init__(self, block: UnitBlock, before: Callable[[str], None]) -> None:
        self.group, self.components = block.group, block.components
        self.num_units, self.nbytes = block.num_units, block.nbytes
        self._block, self._before = block, before

    def copy_out(self, dst: Any) -> Fence:
        self._before("out")
        return self._block.copy_out(dst)

    def copy_in(self, src: Any) -> Fence:
        self._before("in")
        return self._block.copy_in(src)


class WatchedPool(HostPoolBackup):
    """host_pool whose copies can be made to fail or to wait."""

    fail: str = ""  # "out" or "in"
    gate: threading.Event | None = None

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"size": "1MiB", **options})
        self.copying = threading.Event()

    def _before(self, way: str) -> None:
        self.copying.set()
        if self.gate is not None:
            assert self.gate.wait(10)
        if way == self.fail:
            raise RuntimeError("copy engine is gone")

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        return super().save(key, [Watched(block, self._before) for block in blocks])

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        return super().restore(key, [Watched(block, self._before) for block in blocks])


def test_units_read_by_a_copy_are_not_allocatable(shelf: ModuleType) -> None:
    """Contract of architecture §10: a page being read by an asynchronous copy is not allocatable."""
    late = shelf.LateCopier()
    with shelf.build(HostPoolBackup(size="1MiB", copier=late)) as cache:
        free = shelf.free(cache)
        stored, handle = shelf.retract_one(cache)
        assert shelf.quarantined(cache) == [2, 2]
        assert shelf.free(cache) == [n - 2 for n in free]
        cache.admit("s", 1)
        shelf.write(cache, "s", 1, 2)  # a step polls; the copy is still under way
        assert shelf.quarantined(cache) == [2, 2]
        assert cache.stats().retraction.copies_under_way == 1
        late.run()
        assert cache.can_admit(1)
        assert shelf.quarantined(cache) == [0, 0]
        cache.release("s")
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)


def test_a_step_waits_for_a_copy_rather_than_asking_for_another_retraction(shelf: ModuleType) -> None:
    late = shelf.LateCopier()
    with shelf.build(HostPoolBackup(size="1MiB", copier=late)) as cache:
        stored, handle = shelf.retract_one(cache, 9)
        limit = cache.manager.max_request_tokens
        cache.admit("big", limit - 12)
        shelf.write(cache, "big", limit - 12, 2)
        assert min(shelf.free(cache)) == 0
        assert min(shelf.quarantined(cache)) == 3
        shelf.write(cache, "big", 12, 3)
        with pytest.raises(CapacityError):  # nothing is under way any more
            cache.resume(handle)
        cache.release("big")
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)


def test_resume_of_a_save_that_has_not_begun(shelf: ModuleType) -> None:
    with shelf.build(HostPoolBackup(size="1MiB", copier=shelf.LateCopier())) as cache:
        stored, handle = shelf.retract_one(cache)
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)
        cache.release("r")
        shelf.assert_empty(cache)


def test_resume_waits_for_a_save_under_way(shelf: ModuleType) -> None:
    backup = WatchedPool()
    backup.gate = gate = threading.Event()
    with shelf.build(backup) as cache:
        stored, handle = shelf.retract_one(cache)
        assert backup.copying.wait(10)
        opener = threading.Timer(0.1, gate.set)
        opener.start()
        cache.resume(handle)
        assert gate.is_set()  # not before the save was allowed to end
        assert shelf.same(shelf.read(cache, "r"), stored)
        opener.join()


@pytest.mark.parametrize("known", ["when the engine polls", "when it resumes", "when the resume makes it"])
def test_a_save_that_fails_later_costs_the_bytes_only(shelf: ModuleType, known: str) -> None:
    """The engine learns by BackupError from resume, and may then recompute; no unit is lost."""
    late = shelf.LateCopier()
    backup = WatchedPool(copier=late)
    with shelf.build(backup) as cache:
        _, handle = shelf.retract_one(cache)
        assert not handle.recompute  # nobody knows yet
        backup.fail = "out"
        if known != "when the resume makes it":
            late.run()
        if known == "when the engine polls":
            assert cache.can_admit(1)
            assert cache.stats().retraction.fallback_causes == {"save_failed": 1}
        for _ in range(2):  # the handle stays valid, and so does the answer
            with pytest.raises(BackupError, match="save of this request failed") as caught:
                cache.resume(handle)
            assert "copy engine is gone" in str(caught.value)
            assert "r" not in cache.manager
        done = cache.stats().retraction
        assert (done.recompute_fallbacks, done.fallback_causes) == (1, {"save_failed": 1})
        assert (done.bytes_saved, done.restored) == (0, 0)
        shelf.assert_empty(cache)
        cache.drop(handle)
        with pytest.raises(BackupError, match="resumed or dropped"):
            cache.drop(handle)
        cache.admit("r", 5)
        stored = shelf.write(cache, "r", 5, 2)
        assert shelf.same(shelf.read(cache, "r"), stored)


def test_a_failed_save_nobody_asked_about_is_dropped_like_any_other(shelf: ModuleType) -> None:
    late = shelf.LateCopier()
    backup = WatchedPool(copier=late)
    backup.fail = "out"
    with shelf.build(backup) as cache:
        _, handle = shelf.retract_one(cache)
        late.run()
        cache.drop(handle)
        shelf.assert_empty(cache)


def test_a_save_that_failed_at_once_gives_a_handle_to_recompute(shelf: ModuleType) -> None:
    backup = WatchedPool(copier="inline")
    backup.fail = "out"
    with shelf.build(backup) as cache:
        _, handle = shelf.retract_one(cache)
        assert handle.recompute
        assert handle.nbytes == 0
        with pytest.raises(RequestError, match="nothing was saved"):
            cache.resume(handle)
        shelf.assert_empty(cache)


def test_full_backend_falls_back_to_recompute_counted_and_logged_once(shelf: ModuleType) -> None:
    size = 3 * shelf.PAGE_BYTES
    with shelf.build(HostPoolBackup(size=size, copier="inline")) as cache, capture_logs() as logs:
        stored, first = shelf.retract_one(cache, 5)
        for request in ("a", "b"):
            cache.admit(request, 5)
            shelf.write(cache, request, 5, 2)
            assert cache.retract(request).recompute
        done = cache.stats().retraction
        assert (done.retractions, done.recompute_fallbacks, done.fallback_causes) == (3, 2, {"full": 2})
        cache.resume(first)
        assert shelf.same(shelf.read(cache, "r"), stored)
        assert not cache.retract("r").recompute  # there is room again
    warnings = [entry for entry in logs if entry["log_level"] == "warning"]
    assert [(entry["reason"], entry["request"]) for entry in warnings] == [("full", "a")]


@pytest.mark.parametrize("begun", [False, True])
def test_drop_while_the_copy_is_under_way(shelf: ModuleType, begun: bool) -> None:
    """An abort waits for nothing; what the copy still reads stays quarantined until it ends."""
    backup = WatchedPool() if begun else WatchedPool(copier=shelf.LateCopier())
    backup.gate = gate = threading.Event() if begun else None
    with shelf.build(backup) as cache:
        _, handle = shelf.retract_one(cache)
        if begun:
            assert backup.copying.wait(10)
        cache.drop(handle)
        assert cache.stats().backup_bytes == 0
        with pytest.raises(BackupError, match="resumed or dropped"):
            cache.resume(handle)
        if gate is not None:
            assert shelf.quarantined(cache) == [2, 2]
            assert backup.bytes_free < backup.max_bytes
            gate.set()
            cache.admit("all", cache.manager.max_request_tokens - 8)
            shelf.write(cache, "all", 1, 1)
            shelf.write(cache, "all", cache.manager.max_request_tokens - 1, 2)  # waits for its units
            cache.release("all")
        shelf.assert_empty(cache)
        assert backup.bytes_free == backup.max_bytes
        assert cache.stats().retraction.recompute_fallbacks == 0


def test_failed_late_restore_rolls_back(shelf: ModuleType) -> None:
    backup = WatchedPool()
    with shelf.build(backup) as cache:
        stored, handle = shelf.retract_one(cache)
        backup.fail = "in"
        with pytest.raises(BackupError, match="restoring"):
            cache.resume(handle)
        assert "r" not in cache.manager
        assert all(part.used == part.quarantined == 0 for part in cache.stats().manager.ranges)
        backup.fail = ""
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)
        done = cache.stats().retraction
        assert (done.failed_restores, done.restored, done.recompute_fallbacks) == (1, 1, 0)


def test_an_interrupted_resume_leaves_its_units_quarantined(shelf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while a restore is copying: nobody may get units that are still being written."""
    late = shelf.LateCopier()
    backup = WatchedPool(copier=late)
    with shelf.build(backup) as cache:
        stored, handle = shelf.retract_one(cache)
        late.run()

        class Interrupted(Fence):
            def __init__(self, fence: Fence) -> None:
                self.fence, self.first = fence, True

            def done(self) -> bool:
                return self.fence.done()

            def wait(self) -> None:
                if self.first:
                    self.first = False
                    raise KeyboardInterrupt
                self.fence.wait()

        restore = backup.restore
        monkeypatch.setattr(backup, "restore", lambda *args: Interrupted(restore(*args)))
        with pytest.raises(KeyboardInterrupt):
            cache.resume(handle)
        monkeypatch.undo()
        assert "r" not in cache.manager
        assert shelf.quarantined(cache) == [2, 2]
        late.run()
        assert cache.can_admit(1)
        assert shelf.quarantined(cache) == [0, 0]
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)


def test_a_fork_does_not_write_into_units_that_are_being_saved(shelf: ModuleType) -> None:
    """Once its fellow owner is retracted a fork owns the shared page alone, and writes into it without copying it."""
    with shelf.build(HostPoolBackup(size="1MiB", copier=shelf.LateCopier())) as cache:
        cache.admit("r", 6)
        stored = shelf.write(cache, "r", 6, 1)
        cache.fork("r", "s", 5)  # shares the page of tokens 4, 5
        handle = cache.retract("r")
        shelf.write(cache, "s", 2, 2)  # token 5 of s goes where token 5 of r was
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)


@pytest.mark.parametrize("begun", [False, True])
def test_close_ends_copies_and_threads(shelf: ModuleType, begun: bool) -> None:
    backup = WatchedPool() if begun else WatchedPool(copier=shelf.LateCopier())
    backup.gate = gate = threading.Event() if begun else None
    before = set(threading.enumerate())
    cache = shelf.build(backup)
    shelf.retract_one(cache)
    if gate is not None:
        assert backup.copying.wait(10)
        assert set(threading.enumerate()) > before
        threading.Timer(0.1, gate.set).start()
    cache.close()
    cache.close()
    assert shelf.quarantined(cache) == [0, 0]
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "kvcore-copier"]
    assert backup.bytes_held == 0
