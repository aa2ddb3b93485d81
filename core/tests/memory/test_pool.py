"""Pools: views, moves of whole units, and the memfd arena."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.builtin.pools import memfd as pools
from kvcore.builtin.pools.memfd import MemfdArena, MemfdPool
from kvcore.errors import CapacityError, ConfigError, IntegrityError, LayoutError, StaleHandleError, UnsupportedError
from kvcore.layout import Axis, Buffer, Field, Layout, Region, SpaceSpec, UnitRange, region
from kvcore.memory import pool as pool_module
from kvcore.memory.pool import Pool, pieces
from kvcore.memory.tensors import field_view


def two_components(arena: str, layers: tuple[int, ...] = (2, 5), units: int = 9) -> tuple[Layout, dict[str, int]]:
    """Data and scales of different widths, as two components."""
    slot = Axis("slot", 4)
    regions = (
        region("k", "full/kv", (Field("x", "fp16", "slot dim", (slot, Axis("dim", 8))),), ranges=("pages",)),
        region(
            "ks", "full/block_scale", (Field("s", "e8m0", "slot block", (slot, Axis("block", 3))),), ranges=("pages",)
        ),
        region("v", "full/kv", (Field("x", "fp32", "slot dim", (slot, Axis("dim", 6))),), ranges=("pages",)),
    )
    space = SpaceSpec("full", "sequence", "page", 4)
    layout = Layout("test", 1, "full", layers, regions, (space,), (UnitRange("pages", "full"),), arena)  # type: ignore[arg-type]
    return layout, {"pages": units}


SIZES = {"k": 64, "ks": 16, "v": 96}


def where(arena: str, layers: int, units: int, layer: int, name: str, unit: int) -> int:
    """First byte of a unit, from the sizes alone."""
    before = 0
    for other, size in SIZES.items():
        if other == name:
            break
        before += size
    if arena == "page_major":
        return unit * layers * 176 + layer * 176 + before
    return (layer * 176 + before) * units + unit * SIZES[name]


def filled(pool: Pool) -> np.ndarray:
    raw = pool.arena.array()
    raw[:] = np.random.default_rng(0).integers(0, 256, raw.size, np.uint8)
    return raw


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_views_are_where_the_layout_says(arena: str) -> None:
    layout, units = two_components(arena)
    pool = Pool(layout, units, MemfdPool())
    raw = filled(pool)
    assert raw.size == 9 * 2 * 176
    for n, layer in enumerate(layout.layers):
        for unit in range(9):
            for name, size in SIZES.items():
                start = where(arena, 2, 9, n, name, unit)
                assert pool.units(layer, name)[unit].numpy().tobytes() == raw[start : start + size].tobytes()
        k, scale = pool.field(layer, "k", "x"), pool.field(layer, "ks", "s")
        assert (k.dtype, tuple(k.shape)) == (torch.float16, (9, 4, 8))
        assert (scale.dtype, tuple(scale.shape)) == (torch.uint8, (9, 4, 3))
        start = where(arena, 2, 9, n, "ks", 7)
        assert scale[7, 3, 2].item() == raw[start + 11]
        start = where(arena, 2, 9, n, "v", 8)
        want = raw[start + (3 * 6 + 5) * 4 :][:4].tobytes()
        assert pool.field(layer, "v", "x")[8, 3, 5].numpy().tobytes() == want
    pool.close()


def test_envelopes_are_page_major_only() -> None:
    layout, units = two_components("page_major")
    pool = Pool(layout, units, MemfdPool())
    raw = filled(pool)
    assert tuple(pool.envelopes().shape) == (9, 352)
    assert pool.envelopes()[3].numpy().tobytes() == raw[3 * 352 : 4 * 352].tobytes()
    pool.close()
    row = Field("x", "fp32", "dim", (Axis("dim", 4),))
    regions = (Region("a", "g/a", (row,), 16, ("ring",)), Region("b", "g/b", (row,), 16, ("rows",)))
    spaces = (SpaceSpec("ring", "ring", "row", 0), SpaceSpec("rows", "sequence", "row", 4))
    ranges = (UnitRange("ring", "ring"), UnitRange("rows", "rows"))
    unlike = Layout("test", 1, "g", (0,), regions, spaces, ranges, "page_major")
    for layout, units in (two_components("layer_major"), (unlike, {"ring": 2, "rows": 2})):
        pool = Pool(layout, units, MemfdPool())
        with pytest.raises(UnsupportedError, match="page-major"):
            pool.envelopes()
        pool.close()


def test_unknown_names_are_named() -> None:
    layout, units = two_components("page_major")
    pool = Pool(layout, units, MemfdPool())
    with pytest.raises(LayoutError, match="no such storage layer"):
        pool.field(0, "k", "x")
    with pytest.raises(LayoutError, match="no such region"):
        pool.units(2, "q")
    with pytest.raises(LayoutError, match="no such field"):
        pool.field(2, "k", "y")
    with pytest.raises(LayoutError, match="did you mean 'full/kv'"):
        pool.block(["full/kvs"], [1])
    with pytest.raises(LayoutError, match="no unit count"):
        Pool(layout, {}, MemfdPool())
    pool.close()


def test_fewest_pieces() -> None:
    layout, units = two_components("page_major")
    placement = layout.place(units)
    (whole,) = pieces(placement, layout.components)
    assert (whole.base, whole.unit_stride, whole.nbytes, whole.num_units) == (0, 352, 352, 9)
    # k of a layer, then v of it joined with k of the next one.
    assert [(p.base, p.nbytes) for p in pieces(placement, ["full/kv"])] == [(0, 64), (80, 160), (256, 96)]
    layout, units = two_components("layer_major")
    assert len(pieces(layout.place(units), layout.components)) == 6


@given(
    arena=st.sampled_from(["page_major", "layer_major"]),
    components=st.sampled_from([None, ["full/kv"], ["full/block_scale"], ["full/block_scale", "full/kv"]]),
    units=st.lists(st.integers(1, 8), max_size=8, unique=True),
    byte=st.integers(0, 255),
)
@settings(max_examples=40, deadline=None)
def test_fill_changes_the_bytes_of_those_components_only(
    arena: str, components: list[str] | None, units: list[int], byte: int
) -> None:
    layout, counts = two_components(arena)
    pool = Pool(layout, counts, MemfdPool())
    raw = filled(pool)
    want = raw.copy()
    for layer in range(2):
        for name, size in SIZES.items():
            if components is None or layout.region(name).component in components:
                for unit in units:
                    start = where(arena, 2, 9, layer, name, unit)
                    want[start : start + size] = byte
    pool.fill(np.array(units, np.int64), byte, components)
    assert (raw == want).all()
    pool.close()


@given(
    arena=st.sampled_from(["page_major", "layer_major"]),
    components=st.sampled_from([["full/kv"], ["full/block_scale"], ["full/block_scale", "full/kv"]]),
    units=st.lists(st.integers(1, 8), max_size=8, unique=True),
    loop_bytes=st.sampled_from([0, 8192]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_blocks_go_out_and_into_other_units(
    arena: str, components: list[str], units: list[int], loop_bytes: int, data: st.DataObject
) -> None:
    """Bytes of exactly the units and components, back into other units in the same order, nothing else touched."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool_module, "_LOOP_BYTES", loop_bytes)
        move_blocks(arena, components, units, data)


def move_blocks(arena: str, components: list[str], units: list[int], data: st.DataObject) -> None:
    layout, counts = two_components(arena)
    pool = Pool(layout, counts, MemfdPool())
    raw = filled(pool)
    names = [name for name in SIZES if layout.region(name).component in components]
    targets = data.draw(st.permutations(range(1, 9)))[: len(units)]
    out = pool.block(components, np.array(units, np.int64))
    assert (out.group, out.num_units) == ("full", len(units))
    assert out.nbytes == len(units) * 2 * sum(SIZES[name] for name in names)
    host = np.full(out.nbytes, 0xAA, np.uint8)
    out.copy_out(host).wait()
    want = raw.copy()
    moved = []
    for layer in range(2):
        for name in names:
            for source, target in zip(units, targets, strict=True):
                a = where(arena, 2, 9, layer, name, source)
                b = where(arena, 2, 9, layer, name, target)
                want[b : b + SIZES[name]] = raw[a : a + SIZES[name]]
                moved.append(raw[a : a + SIZES[name]].copy())
    assert sorted(host.tobytes()) == sorted(b"".join(m.tobytes() for m in moved))
    pool.block(components, np.array(targets, np.int64)).copy_in(host).wait()
    assert (raw == want).all()
    pool.close()


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_null_and_foreign_units_are_refused(arena: str) -> None:
    """The null unit stays zero, and −1 never wraps to the last unit."""
    layout, counts = two_components(arena)
    pool = Pool(layout, counts, MemfdPool())
    raw = pool.arena.array()
    for bad in ([0], [1, 0], [-1], [9], [2**40]):
        with pytest.raises(IntegrityError, match="outside the pool, or a null unit"):
            pool.fill(bad, 0xFF)
    with pytest.raises(IntegrityError, match="not integers"):
        pool.fill(np.array([1.0]), 0xFF)
    for bad in ([-1], [9]):
        with pytest.raises(IntegrityError):
            pool.block(layout.components, bad)
    # A window's dead units read as zeros, and cannot be written.
    block = pool.block(layout.components, [0, 1])
    host = np.full(block.nbytes, 0xFF, np.uint8)
    block.copy_out(host)
    assert not host.any()
    with pytest.raises(IntegrityError):
        block.copy_in(np.full(block.nbytes, 0xFF, np.uint8))
    assert not raw.any()
    pool.close()


def test_host_memory_of_the_wrong_shape_is_refused() -> None:
    layout, counts = two_components("page_major")
    pool = Pool(layout, counts, MemfdPool())
    block = pool.block(layout.components, [1, 2])
    for host in (
        np.zeros(block.nbytes + 1, np.uint8),
        np.zeros(block.nbytes * 2, np.uint8)[::2],
        np.zeros(block.nbytes // 4, np.float32),
    ):
        with pytest.raises(LayoutError, match="host memory"):
            block.copy_out(host)
    assert pool.block(layout.components, []).copy_out(np.empty(0, np.uint8)).done()
    pool.close()


def test_several_ranges_have_a_null_unit_each() -> None:
    """A ring, then compressed rows, in one region; and each range's own components."""
    row = Field("x", "fp32", "dim", (Axis("dim", 4),))
    regions = (
        Region("state", "a/kv", (row,), 16, ("ring", "rows")),
        Region("index", "a/index", (row,), 16, ("rows",)),
    )
    spaces = (SpaceSpec("ring", "ring", "row", 0), SpaceSpec("rows", "sequence", "row", 4))
    ranges = (UnitRange("ring", "ring"), UnitRange("rows", "rows"))
    layout = Layout("test", 1, "a", (0,), regions, spaces, ranges, "layer_major")
    pool = Pool(layout, {"ring": 3, "rows": 5}, MemfdPool())
    assert pool.components_of("ring") == ("a/kv",)
    assert pool.components_of("rows") == ("a/kv", "a/index")
    assert (pool.first_unit("ring"), pool.end_unit("ring")) == (0, 3)
    pool.fill([1, 2, 4, 7], 1, ["a/kv"])
    for null in (0, 3):
        with pytest.raises(IntegrityError):
            pool.fill([null], 1, ["a/kv"])
    # The range starts at unit 3 of both regions: the ids below it are none of the second one's.
    assert (pool.first_unit("rows"), pool.end_unit("rows")) == (3, 8)
    pool.fill([5], 1, ["a/index"])
    for none in (1, 3, 8):
        with pytest.raises(IntegrityError):
            pool.fill([none], 1, ["a/index"])
    with pytest.raises(IntegrityError):
        pool.block(["a/index"], [2])
    pool.close()


def test_a_range_of_its_null_unit_alone_does_not_swallow_the_next_region() -> None:
    """Layer-major: one unit of the first region ends where the second region starts, with the same stride."""
    row = Field("x", "fp32", "dim", (Axis("dim", 4),))
    regions = (Region("a", "g/a", (row,), 16, ("ring",)), Region("b", "g/b", (row,), 16, ("rows",)))
    spaces = (SpaceSpec("ring", "ring", "row", 0), SpaceSpec("rows", "sequence", "row", 4))
    ranges = (UnitRange("ring", "ring"), UnitRange("rows", "rows"))
    layout = Layout("test", 1, "g", (0,), regions, spaces, ranges, "layer_major")
    placement = layout.place({"ring": 1, "rows": 5})
    assert [(p.base, p.nbytes, p.num_units) for p in pieces(placement, layout.components)] == [(0, 16, 1), (16, 16, 5)]


@pytest.mark.parametrize(
    ("buffer", "shift", "what"),
    [
        (Buffer("full/kv", 0, "k", 0, 16, 16, 2), 1, "address"),
        (Buffer("full/kv", 0, "k", 2, 16, 16, 2), 0, "base"),
        (Buffer("full/kv", 0, "k", 0, 18, 16, 2), 0, "unit stride"),
    ],
)
def test_fields_must_be_addressable_in_their_dtype(buffer: Buffer, shift: int, what: str) -> None:
    """A builder's arena or a layout that is aligned less than an element is refused, not read shifted."""
    field = Field("c", "fp32", "slot", (Axis("slot", 4),))
    memory = torch.zeros(64, dtype=torch.uint8)[shift:]
    with pytest.raises(LayoutError, match="cannot be viewed") as error:
        field_view(memory, buffer, field)
    assert error.value.fields["what"] == what


# --- the memfd arena ---


def open_files() -> int:
    gc.collect()  # what earlier tests have dropped goes back now, not in between
    return len(list(Path("/proc/self/fd").iterdir()))


def test_memory_is_zeroed_named_and_sealed() -> None:
    arena = MemfdArena(1 << 20)
    assert arena.fd is not None
    assert not arena.array().any()
    assert arena.address == arena.tensor().data_ptr()
    assert "memfd:kvcore-" in Path("/proc/self/maps").read_text()
    for size in (1 << 19, 1 << 21):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with mmap.mmap(arena.fd, 4096, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as peer:
        arena.array()[5] = 77
        assert peer[5] == 77
    assert not os.get_inheritable(arena.fd)
    arena.close()


def test_memory_is_populated_at_construction() -> None:
    """A first touch during a transfer would cost tenfold: every page is there before anyone writes."""
    arena = MemfdArena(8 << 20)
    assert os.fstat(arena.fd or 0).st_blocks * 512 >= 8 << 20
    table = Path("/proc/self/smaps").read_text()
    resident = re.search(rf"{arena.address:x}-.*?Rss:\s+(\d+) kB", table, re.DOTALL)
    assert resident is not None
    assert int(resident[1]) * 1024 >= 8 << 20
    arena.close()


def test_what_does_not_fit_is_refused_by_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "available_memory", lambda: 100 << 20)
    with pytest.raises(CapacityError) as error:
        MemfdPool().allocate(1 << 40, "cpu")
    assert error.value.fields == {"nbytes": 1 << 40, "available_bytes": 100 << 20}
    assert error.value.remedy
    MemfdPool().allocate(1 << 20, "cpu").close()
    with pytest.raises(CapacityError):
        MemfdPool().allocate(99 << 20, "cpu")
    with pytest.raises(ConfigError):
        MemfdPool().allocate(0, "cpu")


def test_available_memory_is_plausible() -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 1 << 20 < pools.available_memory() <= total


def test_an_allocation_the_kernel_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = open_files()
    monkeypatch.setattr(pools, "available_memory", lambda: 1 << 62)
    for size in (1 << 60, 1 << 70):
        with pytest.raises(CapacityError):
            MemfdArena(size, populate=False)
    assert open_files() == before


def test_close_is_idempotent_and_safe_while_views_live() -> None:
    before = open_files()
    arena = MemfdArena(1 << 16)
    tensor, array = arena.tensor(), arena.array()
    address = arena.address
    tensor[3] = 9
    arena.close()
    arena.close()
    assert arena.fd is None
    assert (array[3], tensor[3].item()) == (9, 9)
    for use in (arena.array, arena.tensor):
        with pytest.raises(StaleHandleError):
            use()
    del tensor, array
    gc.collect()
    assert f"{address:x}-" not in Path("/proc/self/maps").read_text()
    assert open_files() == before


def test_a_forgotten_arena_goes_back() -> None:
    before = open_files()
    layout, counts = two_components("page_major")
    Pool(layout, counts, MemfdPool())
    gc.collect()
    assert open_files() == before


def test_pools_refuse_other_devices_before_allocating() -> None:
    layout, counts = two_components("page_major")

    class Never(MemfdPool):
        def allocate(self, nbytes: int, device: str) -> Any:
            raise AssertionError("allocated")

    with pytest.raises(UnsupportedError, match="cuda:0"):
        Pool(layout, counts, Never(), "cuda:0")


def test_units_of_a_pool_are_read_by_address(rig: ModuleType) -> None:
    """Buffers are what transports address: base and stride, from the arena's address."""
    geometry = rig.Geometry()
    store = geometry.store()
    pool = store.pools["full"]
    filled(pool)
    for buffer in pool.buffer_infos():
        at = pool.arena.address + buffer.base + 5 * buffer.unit_stride
        got = ctypes.string_at(at, buffer.unit_bytes)
        assert got == pool.units(buffer.layer, buffer.region)[5].numpy().tobytes()
        assert buffer.base + 5 * buffer.unit_stride == geometry.address(buffer.layer, buffer.region, 5)
    store.close()
