"""Pools whose memory the CPU cannot address and whose copies end late: blocks, retraction, transfer, whole suites."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.builtin.formats import Fp32
from kvcore.config import load_config
from kvcore.contract import Backup, Format
from kvcore.engine.cache import KVCache
from kvcore.errors import BackupError, CapacityError, IntegrityError, LayoutError
from kvcore.layout import ArenaOrder
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import ModelSpec, Shard
from kvcore.testing import BackupSuite, FormatSuite
from kvcore.testing.harness import Subject, View, open_cache, pull
from kvcore.testing.sample import GROUPS, ThreeComponents

GROUP = GROUPS["indexed"]


class TestFormats(FormatSuite):
    """Store, load, attention, transfer and retraction of a format with every byte on the device."""

    groups = {"indexed": GROUP}  # noqa: RUF012 -- as declared by the suite

    @pytest.fixture
    def kv_format(self) -> Format:
        return ThreeComponents()

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        return device.registry_of(device.FakePool())


class TestHostTensor(BackupSuite):
    """Buffers of their own."""

    @pytest.fixture
    def new_backup(self) -> Callable[[], Backup]:
        return HostTensorBackup

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        return device.registry_of(device.FakePool())


class TestHostPool(BackupSuite):
    """One arena, and a thread."""

    @pytest.fixture
    def new_backup(self) -> Callable[[], Backup]:
        return lambda: HostPoolBackup(size="4MiB")

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        return device.registry_of(device.FakePool())


# --- pools ---


def make(device: ModuleType, arena: ArenaOrder = "page_major") -> tuple[Pool, Any]:
    layout = ThreeComponents().layout(GROUP, page_size=8, shard=Shard(), arena=arena)
    builder = device.FakePool()
    pool = Pool(layout, {"pages": 12}, builder)
    return pool, builder.made[0].fake


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_blocks_end_with_their_fences_and_not_before(device: ModuleType, arena: ArenaOrder) -> None:
    pool, fake = make(device, arena)
    fake.live[:] = np.random.default_rng(0).integers(0, 200, len(fake.live), np.uint8)
    before = fake.live.copy()
    block = pool.block(pool.layout.components, [3, 4, 9])
    host = np.zeros(block.nbytes, np.uint8)
    fence = block.copy_out(host)
    assert not fence.done() or (host != device.GARBAGE).any()
    fence.wait()
    assert fence.done()
    target = pool.block(pool.layout.components, [7, 1, 2])
    target.copy_in(host).wait()
    for layer in pool.layout.layers:
        for region in pool.layout.regions:
            units = pool.units(layer, region.name)
            for src, dst in ((3, 7), (4, 1), (9, 2)):
                assert torch.equal(units[src], units[dst])
    pool.fill([7, 1, 2], 0)
    wrote = {7, 1, 2}
    for buffer in pool.placement.buffers:
        for unit in set(range(12)) - wrote:
            at = slice(
                buffer.base + unit * buffer.unit_stride, buffer.base + unit * buffer.unit_stride + buffer.unit_bytes
            )
            assert (fake.live[at] == before[at]).all(), "a unit that was not copied to has changed"
    pool.close()


def test_a_block_sees_what_was_written_before_it_was_made(device: ModuleType) -> None:
    """The engine's thread makes it, another one may copy: it is the making that is ordered after the writes."""
    pool, fake = make(device)
    pool.units(pool.layout.layers[0], pool.layout.regions[0].name)[3] = 7
    block = pool.block(pool.layout.components, [3])
    pool.units(pool.layout.layers[0], pool.layout.regions[0].name)[3] = 8
    host = np.zeros(block.nbytes, np.uint8)
    block.copy_out(host).wait()
    assert (host[: pool.layout.regions[0].unit_bytes] == 7).all()
    assert fake.marks > 0
    pool.close()


def test_parts_of_a_block_are_restored_as_they_were_saved(device: ModuleType) -> None:
    pool, fake = make(device)
    fake.live[:] = np.random.default_rng(1).integers(0, 200, len(fake.live), np.uint8)
    whole = pool.block(["full/kv"], [5, 2, 8])
    first, rest = whole.cut(0, 1), whole.cut(1, 2)
    assert first is not None
    assert rest is not None
    host = np.zeros(whole.nbytes, np.uint8)
    unit = whole.nbytes // 3
    first.copy_out(host[:unit]).wait()
    rest.copy_out(host[unit:]).wait()
    together = np.zeros(whole.nbytes, np.uint8)
    whole.copy_out(together).wait()
    assert (host == together).all()
    pool.close()


def test_what_does_not_fit_is_refused_before_anything_is_issued(device: ModuleType) -> None:
    pool, fake = make(device)
    block = pool.block(["full/kv"], [3, 4])
    for bad in (np.zeros(block.nbytes - 1, np.uint8), np.zeros(2 * block.nbytes, np.uint8)[::2], np.zeros(3)):
        with pytest.raises(LayoutError, match="does not fit"):
            block.copy_out(bad)
    with pytest.raises(IntegrityError):
        pool.block(["full/kv"], [0]).copy_in(np.zeros(block.nbytes // 2, np.uint8))
    empty = pool.block(["full/kv"], [])
    empty.copy_out(np.zeros(0, np.uint8)).wait()
    empty.copy_in(np.zeros(0, np.uint8)).wait()
    assert fake.issued == []
    pool.close()


# --- caches ---


@pytest.fixture(params=["host_tensor", "host_pool"])
def view(request: pytest.FixtureRequest, device: ModuleType) -> Iterator[View]:
    kinds: dict[str, Callable[[], Backup]] = {
        "host_tensor": HostTensorBackup,
        "host_pool": lambda: HostPoolBackup(size="4MiB"),
    }
    builder = device.FakePool()
    registry = Subject(device.registry_of(builder), format=ThreeComponents(), backup=kinds[request.param])
    with open_cache(registry, GROUP, page_size=8, arena="page_major") as cache:
        made = View(cache, GROUP)
        made.fake = builder.made[0].fake  # type: ignore[attr-defined]
        yield made
    assert not builder.made[0].fake.pinned, "host memory is still pinned"


def fake_of(view: View) -> Any:
    return view.fake  # type: ignore[attr-defined]


def settle(cache: KVCache) -> None:
    """Let copies end, as an engine does that asks whether there is room."""
    deadline = time.monotonic() + 5
    while cache.stats().retraction.copies_under_way:
        assert time.monotonic() < deadline
        cache.can_admit(1)
        time.sleep(0.001)


def test_units_of_a_save_under_way_are_not_handed_out(view: View) -> None:
    """And the bytes saved are those of the moment, through pinned memory."""
    cache, fake = view.cache, fake_of(view)
    cache.admit("a", 24)
    view.write("a", 24, seed=1)
    saved = view.request_bytes("a")
    free = cache.stats().manager.ranges[0].free
    fake.stuck = True
    handle = cache.retract("a")
    assert cache.stats().manager.ranges[0].free == free
    with pytest.raises(CapacityError):
        cache.admit("b", 96)
    fake.stuck = False
    settle(cache)
    cache.admit("b", 96)
    view.write("b", 96, seed=2)
    cache.release("b")
    cache.resume(handle)
    assert (view.request_bytes("a") == saved).all()
    assert fake.slow == 0
    cache.check_integrity()


def test_a_save_that_the_device_fails_costs_the_bytes_only(view: View) -> None:
    cache, fake = view.cache, fake_of(view)
    cache.admit("a", 24)
    view.write("a", 24, seed=1)
    fake.fail = "unspecified launch failure"
    handle = cache.retract("a")
    settle(cache)
    fake.fail = ""
    if not handle.recompute:
        with pytest.raises(BackupError):
            cache.resume(handle)
        cache.drop(handle)
    cache.check_integrity()
    assert cache.stats().manager.ranges[0].free == cache.stats().manager.ranges[0].capacity
    assert cache.stats().backup_bytes == 0


def test_a_restore_that_the_device_fails_can_be_tried_again(view: View) -> None:
    cache, fake = view.cache, fake_of(view)
    cache.admit("a", 24)
    view.write("a", 24, seed=1)
    saved = view.request_bytes("a")
    handle = cache.retract("a")
    settle(cache)
    fake.fail = "unspecified launch failure"
    with pytest.raises(BackupError):
        cache.resume(handle)
    fake.fail = ""
    cache.resume(handle)
    assert (view.request_bytes("a") == saved).all()
    cache.check_integrity()


def test_dropping_a_request_while_it_is_restored_keeps_its_buffer(device: ModuleType) -> None:
    """A buffer handed to the next save under a copy in would restore another request's bytes."""
    pool, fake = make(device)
    fake.live[:] = 7
    backup = HostTensorBackup()
    backup.prepare(fake)
    backup.save("a", [pool.block(["full/kv"], [1, 2])]).wait()
    fake.stuck = True
    restored = backup.restore("a", [pool.block(["full/kv"], [5, 6])])
    dropping = threading.Thread(target=backup.drop, args=("a",))
    dropping.start()
    dropping.join(0.1)
    assert dropping.is_alive(), "the buffer was given away under a copy"
    fake.stuck = False
    dropping.join(5)
    assert restored.done()
    backup.save("b", [pool.block(["full/kv"], [3, 4])]).wait()
    backup.close()
    assert not fake.pinned
    pool.close()


def test_prefill_to_decode_between_devices(device: ModuleType) -> None:
    """The whole path: offers, staging, programs on the device, commit."""
    builder = device.FakePool()
    registry = Subject(device.registry_of(builder), format=ThreeComponents())
    with (
        open_cache(registry, GROUP, page_size=8, arena="page_major") as source,
        open_cache(registry, GROUP, page_size=8, arena="layer_major") as target,
    ):
        sent, got = View(source, GROUP), View(target, GROUP)
        source.admit("r", 40)
        sent.write("r", 40, seed=3)
        want = {layer: sent.load(layer, sent.slots("r", 0, 40)) for layer in sent.layout.layers}
        pull(source, target, "r", 40)
        for layer, rows in want.items():
            have = got.load(layer, got.slots("r", 0, 40))
            for name, values in rows.items():
                assert torch.equal(values, have[name])
    assert all(arena.fake.slow == 0 for arena in builder.made)


def test_a_store_marks_what_it_wrote(device: ModuleType) -> None:
    """Without a mark a copy could be of the bytes before: so every op, and the zeroing at the start of a step, marks."""
    builder = device.FakePool()
    registry = Subject(device.registry_of(builder), format=Fp32())
    group = GROUPS["grouped"]
    with open_cache(registry, group, page_size=8, arena="page_major") as cache:
        fake = builder.made[0].fake
        cache.admit("a", 8)
        with cache.begin([("a", 8)]) as step:
            assert (fake.settled == fake.live).all()
            rows = {t.name: torch.ones(8, t.num_heads, t.head_dim) for t in group.tensors}
            fence = step.store(cache.layouts[group.prefix].layers[0], rows)
            assert not fence.done(), "the fence is of the kernel's launch, not of its work"
            assert (fake.settled == fake.live).all()
            fence.wait()
            step.commit()
        assert cache.store.mark() is not None


def test_on_the_cpu_marks_are_free() -> None:
    config = load_config(None, {"cache.memory": "1MiB", "cache.format": "fp32"})
    group = GROUPS["grouped"]
    with KVCache.create(ModelSpec("m", (group,), "fp32"), config, load_plugins(())) as cache:
        assert cache.store.mark().done()
        assert next(iter(cache.store.pools.values())).queue is None
