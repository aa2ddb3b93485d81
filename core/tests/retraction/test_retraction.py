"""Retraction through the façade: every component, into other units, over poisoned memory; failures that lose nothing."""

from collections.abc import Iterator, Sequence
from types import ModuleType

import numpy as np
import pytest
import torch

from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.contract import Support, UnitBlock, unsupported
from kvcore.engine.cache import KVCache
from kvcore.errors import BackupError, CapacityError, IntegrityError, RequestError, UnsupportedError
from kvcore.layout import Layout

PAGE = 4
BACKENDS = ["host_tensor", "host_pool inline", "host_pool tiny blocks"]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["page_major", "layer_major"])
def cache(request: pytest.FixtureRequest, shelf: ModuleType, backend: str) -> Iterator[KVCache]:
    with shelf.build(shelf.BACKENDS[backend](), **{"cache.arena": request.param}) as cache:
        yield cache


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 2])
def test_every_component_comes_back_into_other_units(cache: KVCache, shelf: ModuleType, length: int) -> None:
    cache.admit("r", length)
    stored, before = shelf.write(cache, "r", length, 1), shelf.raw(cache, "r")
    old = {group: cache.units("r", group, "pages").tolist() for group in cache.layouts}
    handle = cache.retract("r", engine_data=b"next token")
    assert (handle.length, handle.recompute, handle.engine_data) == (length, False, b"next token")
    assert set(handle.bytes_by_component) == {"full/kv", "other/kv"}
    for group, units in old.items():  # the guarded thing happened: nothing of it is left in its old units
        assert set(units) <= set(cache.manager.free_units(group, "pages").tolist())
        view = cache.store.pools[group].units(cache.layouts[group].layers[0], "k")
        assert (view[torch.tensor(units)] == 0xFF).all()
    cache.admit("tenant", length)  # takes the freed units
    shelf.write(cache, "tenant", length, 2)
    cache.resume(handle)
    for group, units in old.items():
        assert not set(units) & set(cache.units("r", group, "pages").tolist())
    after = shelf.raw(cache, "r")
    for group in before:
        np.testing.assert_array_equal(after[group], before[group])
    for key, rows in shelf.read(cache, "r").items():
        assert torch.equal(rows, stored[key])
    more = shelf.write(cache, "r", PAGE, 3)  # it goes on
    for key, rows in shelf.read(cache, "r").items():
        assert torch.equal(rows, torch.cat([stored[key], more[key]]))
    cache.release("r")
    cache.release("tenant")
    shelf.assert_empty(cache)


def test_bytes_are_accounted_and_dropped(cache: KVCache, shelf: ModuleType) -> None:
    _, handle = shelf.retract_one(cache)
    assert handle.nbytes == 2 * shelf.PAGE_BYTES
    assert cache.stats().backup_bytes >= handle.nbytes
    cache.drop(handle)
    shelf.assert_empty(cache)
    for call in (cache.resume, cache.drop):
        with pytest.raises(BackupError, match="resumed or dropped"):
            call(handle)


def test_what_was_done_is_counted(cache: KVCache, shelf: ModuleType) -> None:
    _, handle = shelf.retract_one(cache)
    cache.resume(handle)
    cache.retract("r")
    done = cache.stats().retraction
    assert (done.retractions, done.restored, done.recompute_fallbacks, done.failed_restores) == (2, 1, 0, 0)
    assert (done.bytes_saved, done.bytes_restored) == (4 * shelf.PAGE_BYTES, 2 * shelf.PAGE_BYTES)
    assert done.bytes_held == cache.stats().backup_bytes >= 2 * shelf.PAGE_BYTES


def test_resume_without_room_changes_nothing(cache: KVCache, shelf: ModuleType) -> None:
    stored, handle = shelf.retract_one(cache)
    limit = cache.manager.max_request_tokens
    assert limit is not None
    cache.admit("big", limit)
    with pytest.raises(CapacityError):
        cache.resume(handle)
    cache.release("big")
    cache.resume(handle)
    assert shelf.same(shelf.read(cache, "r"), stored)


def test_recompute_saves_nothing(shelf: ModuleType) -> None:
    with shelf.build(**{"retraction.policy": "recompute"}) as cache:
        cache.admit("r", 5)
        shelf.write(cache, "r", 5, 1)
        handle = cache.retract("r", b"x")
        assert handle.recompute
        assert handle.nbytes == 0
        shelf.assert_empty(cache)
        with pytest.raises(RequestError, match="nothing was saved"):
            cache.resume(handle)
        cache.drop(handle)  # an aborted request is dropped whatever the policy was
        done = cache.stats().retraction
        assert (done.retractions, done.recompute_fallbacks) == (1, 0)  # nothing failed: it was asked for


def test_request_that_holds_nothing_yet(cache: KVCache, shelf: ModuleType) -> None:
    cache.admit("r", 5)
    handle = cache.retract("r")
    assert (handle.length, handle.recompute) == (0, True)
    shelf.assert_empty(cache)


def test_engine_data_is_bounded(cache: KVCache) -> None:
    cache.admit("r", 5)
    with pytest.raises(RequestError, match="too large"):
        cache.retract("r", bytes((64 << 10) + 1))
    assert cache.length("r") == 0


class TestBackend(HostTensorBackup):
    """host_tensor with switches."""

    __test__ = False
    name = "test"
    fail_restore = False
    carries_all = True

    def carries(self, layout: Layout, component: str) -> Support:
        return super().carries(layout, component) if self.carries_all else unsupported("no lanes for it")

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> object:
        if self.fail_restore:
            blocks[0].copy_in(np.zeros(blocks[0].nbytes, np.uint8))
            raise RuntimeError("copy engine is gone")
        return super().restore(key, blocks)


def test_failed_restore_leaves_the_request_as_it_was(shelf: ModuleType) -> None:
    backend = TestBackend()
    with shelf.build(backend) as cache:
        stored, handle = shelf.retract_one(cache)
        backend.fail_restore = True
        with pytest.raises(BackupError, match="still saved") as caught:
            cache.resume(handle)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "r" not in cache.manager
        assert all(part.used == part.quarantined == 0 for part in cache.stats().manager.ranges)
        backend.fail_restore = False
        cache.resume(handle)
        assert shelf.same(shelf.read(cache, "r"), stored)
        assert cache.stats().retraction.failed_restores == 1


def test_failed_save_leaves_the_request_running(shelf: ModuleType) -> None:
    class Broken(TestBackend):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> object:
            raise BackupError("saving failed", key=key)

    with shelf.build(Broken()) as cache:
        cache.admit("r", 5)
        stored = shelf.write(cache, "r", 5, 1)
        with pytest.raises(BackupError):
            cache.retract("r")
        assert shelf.same(shelf.read(cache, "r"), stored)
        assert cache.stats().retraction.retractions == 0
        cache.release("r")
        shelf.assert_empty(cache)


def test_backend_that_cannot_carry_a_component_is_refused_at_configuration(shelf: ModuleType) -> None:
    """H6: asked before the first retraction, not by it."""
    backend = TestBackend()
    backend.carries_all = False
    with pytest.raises(UnsupportedError, match="cannot carry") as caught:
        shelf.build(backend)
    assert caught.value.fields["component"] == "full/kv"
    assert "recompute" in caught.value.remedy


def test_a_forgotten_component_is_an_integrity_error(
    cache: KVCache, shelf: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.admit("r", 5)
    shelf.write(cache, "r", 5, 1)
    whole = cache.manager.payloads
    for wrong in (lambda p: p[:1], lambda p: (*p, p[0])):  # one left out, one moved twice
        monkeypatch.setattr(cache.manager, "payloads", lambda *a, wrong=wrong, **k: wrong(whole(*a, **k)))
        with pytest.raises(IntegrityError, match="every component once"):
            cache.retract("r")
        assert cache.length("r") == 5
