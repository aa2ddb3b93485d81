"""Retraction through the façade: every component, into other units, over poisoned memory; failures that lose nothing."""

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvcore.backup import RetractionHandle
from kvcore.builtin.host_tensor import HostTensorBackup
from kvcore.cache import KVCache
from kvcore.config import load_config
from kvcore.contract import Backup, Fence, Support, UnitBlock, unsupported
from kvcore.errors import BackupError, CapacityError, IntegrityError, RequestError, UnsupportedError
from kvcore.layout import Layout
from kvcore.plugins import Registry, load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE = 4
MODEL = ModelSpec(
    name="two groups",
    dtype="fp32",
    groups=(
        LayerGroup("full", (0, 2), (TensorSpec("k", 2, 8), TensorSpec("v", 2, 4)), num_query_heads=4),
        LayerGroup("other", (1,), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), num_query_heads=2),
    ),
)
TENSORS = {layer: {t.name: t for t in group.tensors} for group in MODEL.groups for layer in group.layers}


def build(registry: Registry | None = None, **overrides: object) -> KVCache:
    settings = {"cache.page_size": PAGE, "cache.memory": "32KiB", **overrides}
    config = load_config(None, settings)
    return KVCache.create(MODEL, config, registry or load_plugins(config.plugins))


@pytest.fixture(params=["page_major", "layer_major"])
def cache(request: pytest.FixtureRequest) -> Iterator[KVCache]:
    with build(**{"cache.arena": request.param}) as cache:
        for pool in cache.store.pools.values():
            pool.arena.array()[:] = 0xFF
        cache.poison_freed = True
        yield cache


def write(cache: KVCache, request: str, count: int, seed: int) -> dict[tuple[int, str], torch.Tensor]:
    """Store ``count`` random tokens in every layer; returns what was stored."""
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    with cache.begin([(request, count)]) as step:
        for layer, tensors in TENSORS.items():
            rows = {
                name: torch.randn(count, t.num_heads, t.head_dim, generator=generator) for name, t in tensors.items()
            }
            step.store(layer, rows)
            stored |= {(layer, name): rows[name] for name in rows}
        step.commit()
    return stored


def read(cache: KVCache, request: str) -> dict[tuple[int, str], torch.Tensor]:
    """All tokens of a request, gathered by its unit tables."""
    found = {}
    for group in MODEL.groups:
        units = torch.from_numpy(cache.units(request, group.prefix, "pages"))
        position = torch.arange(cache.length(request))
        slots = units[position // PAGE] * PAGE + position % PAGE
        for layer in group.layers:
            out = {name: torch.full((len(slots), t.num_heads, t.head_dim), 9.0) for name, t in TENSORS[layer].items()}
            cache.store.load(layer, slots, out)
            found |= {(layer, name): out[name] for name in out}
    return found


def raw(cache: KVCache, request: str) -> dict[str, np.ndarray]:
    """Every byte of a request's units, by group, read from the arena by arithmetic of its own."""
    found = {}
    for name, pool in cache.store.pools.items():
        arena = pool.arena.array()
        rows = [
            arena[b.base + u * b.unit_stride :][: b.unit_bytes]
            for u in cache.units(request, name, "pages").tolist()
            for b in pool.placement.buffers
        ]
        found[name] = np.concatenate(rows).copy()
    return found


@pytest.mark.parametrize("length", [1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 2])
def test_every_component_comes_back_into_other_units(cache: KVCache, length: int) -> None:
    cache.admit("r", length)
    stored, before = write(cache, "r", length, 1), raw(cache, "r")
    old = {group: cache.units("r", group, "pages").tolist() for group in cache.layouts}
    handle = cache.retract("r", engine_data=b"next token")
    assert (handle.length, handle.recompute, handle.engine_data) == (length, False, b"next token")
    assert set(handle.bytes_by_component) == {"full/kv", "other/kv"}
    for group, units in old.items():  # the guarded thing happened: nothing of it is left in its old units
        assert set(units) <= set(cache.manager.free_units(group, "pages").tolist())
        view = cache.store.pools[group].units(cache.layouts[group].layers[0], "k")
        assert (view[torch.tensor(units)] == 0xFF).all()
    cache.admit("tenant", length)  # takes the freed units
    write(cache, "tenant", length, 2)
    cache.resume(handle)
    for group, units in old.items():
        assert not set(units) & set(cache.units("r", group, "pages").tolist())
    after = raw(cache, "r")
    for group in before:
        np.testing.assert_array_equal(after[group], before[group])
    for key, rows in read(cache, "r").items():
        assert torch.equal(rows, stored[key])
    more = write(cache, "r", PAGE, 3)  # it goes on
    for key, rows in read(cache, "r").items():
        assert torch.equal(rows, torch.cat([stored[key], more[key]]))
    cache.release("r")
    cache.release("tenant")
    assert_empty(cache)


def assert_empty(cache: KVCache) -> None:
    cache.check_integrity()
    stats = cache.stats()
    assert [part.free for part in stats.manager.ranges] == [part.capacity for part in stats.manager.ranges]
    assert stats.backup_bytes == 0


def test_bytes_are_accounted_and_dropped(cache: KVCache) -> None:
    cache.admit("r", 5)
    write(cache, "r", 5, 1)
    handle = cache.retract("r")
    assert handle.nbytes == 2 * PAGE * (2 * 2 * (8 + 4) + 1 * (8 + 8)) * 4  # pages · tokens · values · bytes
    assert cache.stats().backup_bytes >= handle.nbytes
    cache.drop(handle)
    assert_empty(cache)
    with pytest.raises(BackupError, match="resumed or dropped"):
        cache.resume(handle)
    with pytest.raises(BackupError, match="resumed or dropped"):
        cache.drop(handle)


def test_resume_without_room_changes_nothing(cache: KVCache) -> None:
    cache.admit("r", 5)
    stored = write(cache, "r", 5, 1)
    handle = cache.retract("r")
    limit = cache.manager.max_request_tokens
    assert limit is not None
    cache.admit("big", limit)
    with pytest.raises(CapacityError):
        cache.resume(handle)
    cache.release("big")
    cache.resume(handle)
    assert all(torch.equal(rows, stored[key]) for key, rows in read(cache, "r").items())


def test_recompute_saves_nothing() -> None:
    with build(**{"retraction.policy": "recompute"}) as cache:
        cache.admit("r", 5)
        write(cache, "r", 5, 1)
        handle = cache.retract("r", b"x")
        assert handle.recompute
        assert handle.nbytes == 0
        assert_empty(cache)
        with pytest.raises(RequestError, match="nothing was saved"):
            cache.resume(handle)
        cache.drop(handle)  # an aborted request is dropped whatever the policy was


def test_request_that_holds_nothing_yet(cache: KVCache) -> None:
    cache.admit("r", 5)
    handle = cache.retract("r")
    assert (handle.length, handle.recompute) == (0, True)
    assert_empty(cache)


def test_engine_data_is_bounded(cache: KVCache) -> None:
    cache.admit("r", 5)
    with pytest.raises(RequestError, match="too large"):
        cache.retract("r", bytes((64 << 10) + 1))
    assert cache.length("r") == 0


class Latch(Fence):
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        self.over = True


class TestBackend(HostTensorBackup):
    """host_tensor with switches."""

    __test__ = False
    name = "test"
    latch: Fence | None = None
    full = False
    fail_restore = False
    carries_all = True

    def carries(self, layout: Layout, component: str) -> Support:
        return super().carries(layout, component) if self.carries_all else unsupported("no lanes for it")

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        if self.full:
            raise CapacityError("backup is full")
        fence = super().save(key, blocks)
        return self.latch or fence

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        if self.fail_restore:
            blocks[0].copy_in(np.zeros(blocks[0].nbytes, np.uint8))
            raise RuntimeError("copy engine is gone")
        return super().restore(key, blocks)


class WithBackend:
    """The loaded registry with one backend replaced."""

    def __init__(self, backend: Backup) -> None:
        self._registry = load_plugins(())
        self._backend = backend

    def backup(self, name: str, **options: object) -> Backup:
        return self._backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._registry, name)


def build_with(backend: Backup) -> KVCache:
    return build(WithBackend(backend))  # type: ignore[arg-type]


def retract_one(cache: KVCache, length: int = 5) -> tuple[dict[tuple[int, str], torch.Tensor], RetractionHandle]:
    cache.admit("r", length)
    stored = write(cache, "r", length, 1)
    return stored, cache.retract("r")


def test_units_read_by_a_copy_are_not_allocatable() -> None:
    backend = TestBackend()
    backend.latch = latch = Latch()
    with build_with(backend) as cache:
        free = [part.free for part in cache.stats().manager.ranges]
        retract_one(cache)
        assert [part.quarantined for part in cache.stats().manager.ranges] == [2, 2]
        assert [part.free for part in cache.stats().manager.ranges] == [n - 2 for n in free]
        cache.admit("s", 1)
        write(cache, "s", 1, 2)  # a step polls; the copy is still under way
        assert [part.quarantined for part in cache.stats().manager.ranges] == [2, 2]
        latch.over = True
        write(cache, "s", 1, 3)
        assert [part.quarantined for part in cache.stats().manager.ranges] == [0, 0]


def test_full_backend_falls_back_to_recompute() -> None:
    backend = TestBackend()
    backend.full = True
    with build_with(backend) as cache:
        _, handle = retract_one(cache)
        assert handle.recompute
        assert_empty(cache)


def test_failed_restore_leaves_the_request_as_it_was() -> None:
    backend = TestBackend()
    with build_with(backend) as cache:
        stored, handle = retract_one(cache)
        backend.fail_restore = True
        with pytest.raises(BackupError, match="still saved") as caught:
            cache.resume(handle)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert "r" not in cache.manager
        assert all(part.used == 0 for part in cache.stats().manager.ranges)
        backend.fail_restore = False
        cache.resume(handle)
        assert all(torch.equal(rows, stored[key]) for key, rows in read(cache, "r").items())


def test_failed_save_leaves_the_request_running() -> None:
    class Broken(TestBackend):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            raise BackupError("saving failed", key=key)

    with build_with(Broken()) as cache:
        cache.admit("r", 5)
        stored = write(cache, "r", 5, 1)
        with pytest.raises(BackupError):
            cache.retract("r")
        assert all(torch.equal(rows, stored[key]) for key, rows in read(cache, "r").items())
        cache.release("r")
        assert_empty(cache)


def test_backend_that_cannot_carry_a_component_is_refused_at_configuration() -> None:
    """H6: asked before the first retraction, not by it."""
    backend = TestBackend()
    backend.carries_all = False
    with pytest.raises(UnsupportedError, match="cannot carry") as caught:
        build_with(backend)
    assert caught.value.fields["component"] == "full/kv"
    assert "recompute" in caught.value.remedy


def test_a_forgotten_component_is_an_integrity_error(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.admit("r", 5)
    write(cache, "r", 5, 1)
    whole = cache.manager.payloads
    for wrong in (lambda p: p[:1], lambda p: (*p, p[0])):  # one left out, one moved twice
        monkeypatch.setattr(cache.manager, "payloads", lambda *a, wrong=wrong, **k: wrong(whole(*a, **k)))
        with pytest.raises(IntegrityError, match="every component once"):
            cache.retract("r")
        assert cache.length("r") == 5
