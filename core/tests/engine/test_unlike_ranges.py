"""Regions with unlike unit ranges: ids mean the same in every region, and ids that a region lacks cost it no memory."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcore.builtin.kernels.reference import ReferenceCopyUnits
from kvcore.builtin.kernels.tuned import TorchCopyUnits
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.config import load_config
from kvcore.contract import StateComponent
from kvcore.engine.cache import KVCache
from kvcore.engine.fitting import budgets
from kvcore.engine.sizing import plan_capacity
from kvcore.errors import LayoutError
from kvcore.layout import Axis, Field, Layout, Placement, Region, SpaceSpec, UnitRange
from kvcore.layout.moves import Program, run_program
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.requests.manager import Manager
from kvcore.requests.spaces import INDEX_SPACES
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore.testing.harness import Subject, pull

ARENAS = ("layer_major", "page_major")
GROUP = LayerGroup("g", (0,), (TensorSpec("k", 1, 1),))


def layout(regions: dict[str, tuple[int, tuple[str, ...]]], arena: str, layers: int = 2, **spaces: SpaceSpec) -> Layout:
    """Regions as name → (bytes of a unit, ranges), each in a component of its own."""
    made = tuple(
        Region(name, f"g/{name}", (Field("x", "u8", "b", (Axis("b", size),)),), size, ranges)
        for name, (size, ranges) in regions.items()
    )
    names = sorted({name for _, ranges in regions.values() for name in ranges})
    found = {name: spaces.get(name, SpaceSpec(name, "sequence", "row", 4)) for name in names}
    ranges = tuple(UnitRange(name, found[name].name) for name in names)
    return Layout("f", 1, "g", tuple(range(layers)), made, tuple(found.values()), ranges, arena)  # type: ignore[arg-type]


@st.composite
def placed(draw: st.DrawFn) -> tuple[Layout, dict[str, int]]:
    names = ["a", "b", "c"][: draw(st.integers(2, 3))]
    regions = {}
    for n in range(draw(st.integers(2, 4))):
        chosen = tuple(name for name in names if draw(st.booleans()))
        assume(chosen)
        regions[f"r{n}"] = (16 * draw(st.integers(1, 3)), chosen)
    made = layout(regions, draw(st.sampled_from(ARENAS)), draw(st.integers(1, 3)))
    return made, {item.name: draw(st.integers(1, 5)) for item in made.ranges}


def spans(placement: Placement, region: str) -> dict[str, range]:
    return {name: range(first, first + count) for name, first, count in placement.ranges[region]}


def addresses(made: Layout, placement: Placement, region: str, units: list[int]) -> np.ndarray[Any, Any]:
    """Every byte of some units of a region, all layers: ``[units, layers * bytes]``, by buffers alone."""
    size = made.region(region).unit_bytes
    found = []
    for unit in units:
        row = []
        for layer in made.layers:
            buffer = placement.buffer(layer, region)
            row += range(buffer.base + unit * buffer.unit_stride, buffer.base + unit * buffer.unit_stride + size)
        found.append(row)
    return np.array(found, np.int64).reshape(len(units), -1)


@given(placed())
@settings(max_examples=60, deadline=None)
def test_every_unit_has_bytes_of_its_own(case: tuple[Layout, dict[str, int]]) -> None:
    made, counts = case
    placement = made.place(counts)
    owners = np.zeros(placement.arena_bytes, np.int64)
    firsts: dict[str, set[int]] = {}
    needed = holes = 0
    for item in made.regions:
        mine = spans(placement, item.name)
        assert list(mine) == list(item.ranges)
        for name, ids in mine.items():
            assert len(ids) == counts[name]
            firsts.setdefault(name, set()).add(ids.start)
            owners[addresses(made, placement, item.name, list(ids))] += 1
            needed += len(ids) * item.unit_bytes * len(made.layers)
        for one, other in pairwise(mine.values()):
            assert one.stop <= other.start
            holes += (other.start - one.stop) * item.unit_bytes * len(made.layers)
        low, high = min(ids.start for ids in mine.values()), max(ids.stop for ids in mine.values())
        for layer in made.layers:
            buffer = placement.buffer(layer, item.name)
            assert buffer.base >= 0, "a view of the buffer would start before the arena"
            assert (buffer.first_unit, buffer.num_units) == (low, high)
            assert buffer.offsets([low, high - 1]).tolist() == [
                buffer.base + low * buffer.unit_stride, buffer.base + (high - 1) * buffer.unit_stride
            ]  # fmt: skip
            for unit in (low - 1, high, -1):
                with pytest.raises(LayoutError, match="outside its buffer"):
                    buffer.offsets([unit])
    assert owners.max() == 1
    assert all(len(found) == 1 for found in firsts.values()), "one unit id, two meanings"
    lead = max(max(b.first_unit * b.unit_stride for b in placement.buffers), 0)
    assert needed + holes <= placement.arena_bytes <= needed + holes + lead


@given(placed(), placed(), st.data())
@settings(max_examples=30, deadline=None)
def test_units_are_filled_copied_saved_and_moved(
    one: tuple[Layout, dict[str, int]], two: tuple[Layout, dict[str, int]], data: st.DataObject
) -> None:
    """Every operation changes the bytes of its units and no other one, in the poisoned pool of any such layout."""
    made, counts = one
    # The same regions in another arena, of other counts.
    other = layout({r.name: (r.unit_bytes, r.ranges) for r in made.regions}, two[0].arena, len(made.layers))
    others = {item.name: data.draw(st.integers(2, 6)) for item in other.ranges}
    pool, target = Pool(made, counts, MemfdPool()), Pool(other, others, MemfdPool())
    try:
        for item in made.ranges:
            usable = min(counts[item.name], others[item.name]) - 1
            if usable < 1:
                continue
            raw, far = pool.arena.array(), target.arena.array()
            raw[:] = np.random.default_rng(usable).integers(0, 255, raw.size, np.uint8)
            far[:] = 0xFF
            ids = [pool.first_unit(item.name) + 1 + n for n in range(usable)]
            there = [target.first_unit(item.name) + 1 + n for n in reversed(range(usable))]
            want = far.copy()
            for region in (r for r in made.regions if item.name in r.ranges):
                want[addresses(other, target.placement, region.name, there)] = raw[
                    addresses(made, pool.placement, region.name, ids)
                ]
                program = Program.build(made, pool.placement, other, target.placement, [region.component])
                run_program(program, raw, far, ids, there)
            np.testing.assert_array_equal(far, want)
            components = pool.components_of(item.name)
            block = pool.block(components, ids)
            saved = np.zeros(block.nbytes, np.uint8)
            block.copy_out(saved).wait()
            before = raw.copy()
            pool.fill(ids, 0xFF, components)
            want = before.copy()
            for region in (r for r in made.regions if item.name in r.ranges):
                want[addresses(made, pool.placement, region.name, ids)] = 0xFF
            np.testing.assert_array_equal(raw, want)
            block.copy_in(saved).wait()
            np.testing.assert_array_equal(raw, before)
            if usable < 2:
                continue
            for kernel in (ReferenceCopyUnits(), TorchCopyUnits()):
                copy = kernel.bind(pool, GROUP, None)  # type: ignore[arg-type] # copies need no format
                raw[:] = before
                copy(item.name, torch.tensor(ids[:1]), torch.tensor(ids[1:2])).wait()
                want = before.copy()
                for region in (r for r in made.regions if item.name in r.ranges):
                    want[addresses(made, pool.placement, region.name, ids[1:2])] = before[
                        addresses(made, pool.placement, region.name, ids[:1])
                    ]
                np.testing.assert_array_equal(raw, want)
    finally:
        pool.close()
        target.close()


# --- a ring and compressed rows in one region, keys of the rows alone in another ---

RING, RATIO = 6, 4
SPACES = {space.kind: space() for space in INDEX_SPACES}


def sparse(arena: str) -> Layout:
    return layout(
        {"latent": (32, ("ring", "rows")), "keys": (16, ("rows",))}, arena,
        ring=SpaceSpec("ring", "ring", "row", 0, (("ring", RING),)), rows=SpaceSpec("rows", "compressed", "row", RATIO),
    )  # fmt: skip


@pytest.mark.parametrize("arena", ARENAS)
def test_the_rows_of_a_ring_cost_no_memory_where_there_is_no_ring(arena: str) -> None:
    made = sparse(arena)
    plan = plan_capacity({"g": made}, 16384, 3)
    ring, rows = plan.units["g"]["ring"], plan.units["g"]["rows"]
    assert plan.allocated_bytes == 2 * ((ring + rows) * 32 + rows * 16) <= 16384
    assert plan.bytes_per_token == {"g/latent": 16, "g/keys": 8, "total": 24}
    more = plan_capacity({"g": made}, plan.allocated_bytes + 2 * 48, 3)
    assert more.units["g"]["rows"] == rows + 1


def test_a_request_of_both_regions_moves_and_comes_back() -> None:
    """Manager, pools, payloads, programs and blocks speak of the same units."""
    sides = []
    for arena, requests in zip(ARENAS, (3, 2), strict=True):
        made = sparse(arena)
        plan = plan_capacity({"g": made}, 8192, requests)
        manager = Manager(budgets({"g": made}, plan.units), SPACES, max_requests=requests)
        pool = Pool(made, plan.units["g"], MemfdPool())
        pool.arena.array()[:] = 0xFF
        sides.append((made, manager, pool))
    (made, send, source), (other, receive, target) = sides
    for name in ("other", "r"):
        send.admit(name, 9)
        send.commit(send.plan_step([(name, 9)]))
    receive.admit("r", 9, external=True)
    tables = receive.destinations("r", 9)
    rng = np.random.default_rng(1)
    for payload in send.payloads("r", 0, 9, last=True):
        dst = tables["g", payload.range][payload.first : payload.stop]
        assert payload.components == (("g/latent", "g/keys") if payload.range == "rows" else ("g/latent",))
        for component in payload.components:
            region = component.removeprefix("g/")
            where = addresses(made, source.placement, region, payload.ids.tolist())
            source.arena.array()[where] = rng.integers(0, 255, where.shape, np.uint8)
            program = Program.build(made, source.placement, other, target.placement, [component])
            run_program(program, source.arena.array(), target.arena.array(), payload.ids, dst)
            np.testing.assert_array_equal(
                target.arena.array()[addresses(other, target.placement, region, dst.tolist())],
                source.arena.array()[where],
            )
    receive.set_length("r", 9)
    for manager in (send, receive):
        manager.check_integrity()
    source.close()
    target.close()


# --- the same through the façade: who computes the rows writes them where a step's batches say ---


class Sparse(StateComponent):
    name = "f"

    def applies(self, group: LayerGroup) -> bool:
        return group.kind == "state"

    def layout(self, group: LayerGroup, *, shard: Shard, arena: Any) -> Layout:
        return sparse(arena)


SPARSE = ModelSpec("m", (LayerGroup("g", (0, 1), (), kind="state"),), "fp32")


def build(arena: str) -> KVCache:
    settings = {"cache.arena": arena, "cache.memory": 16384, "cache.max_requests": 3, "cache.max_tokens": 32}
    settings["transfer.checksum"] = "crc32"
    return KVCache.create(SPARSE, load_config(None, settings), Subject(load_plugins(()), state=Sparse()))


def write(cache: KVCache, rows: list[tuple[str, int]], tag: dict[str, int]) -> None:
    """A token at position p of a request writes ``tag + p`` to its ring row; a whole group n, ``tag + n`` to its rows."""
    view = cache.state("g")
    with cache.begin(rows) as step:
        ring, compressed = step.batch("g", "ring"), step.batch("g", "rows")
        owner = [name for name, count in rows for _ in range(count)]
        positions = ring.positions.tolist()
        for n, (name, position) in enumerate(zip(owner, positions, strict=True)):
            for layer in (0, 1):
                if int(ring.slots[n]) >= 0:
                    view.field(layer, "latent", "x")[int(ring.slots[n])] = (tag[name] + position) % 251
                slot = int(compressed.slots[n])
                if slot >= 0 and position % RATIO == RATIO - 1:
                    for region in ("latent", "keys"):
                        view.field(layer, region, "x")[slot // RATIO] = (tag[name] + position // RATIO) % 251
        step.commit()


def check(cache: KVCache, name: str, length: int, tag: int) -> None:
    view = cache.state("g")
    last = {p % RING: p for p in range(max(0, length - RING + 1), length)}  # what the next query sees of it
    ring = cache.units(name, "g", "ring")
    compressed = cache.units(name, "g", "rows")
    assert len(compressed) == length // RATIO
    for layer in (0, 1):
        for row, position in last.items():
            assert view.field(layer, "latent", "x")[ring[row]].unique().tolist() == [(tag + position) % 251]
        for region in ("latent", "keys"):
            for n, unit in enumerate(compressed.tolist()):
                assert view.field(layer, region, "x")[unit].unique().tolist() == [(tag + n) % 251], (region, n)


@pytest.mark.parametrize(("arena", "other"), [ARENAS, ARENAS[::-1]])
def test_steps_forks_retraction_and_transfer(arena: str, other: str) -> None:
    tag = {"a": 10, "b": 100, "fork": 10, "tenant": 200}
    with build(arena) as cache, build(other) as target:
        for one in (cache, target):
            one.poison_freed = True
            for item in ("ring", "rows"):
                pool = one.store.pools["g"]
                pool.fill(one.manager.free_units("g", item), 0xFF, pool.components_of(item))
        cache.admit("a", 9)
        cache.admit("b", 5)
        write(cache, [("b", 3), ("a", 9)], tag)
        write(cache, [("a", 2), ("b", 2)], tag)
        check(cache, "a", 11, 10)
        check(cache, "b", 5, 100)
        cache.fork("a", "fork", 11)
        write(cache, [("fork", 2)], tag)  # copies the ring
        check(cache, "fork", 13, 10)
        check(cache, "a", 11, 10)
        assert not set(cache.units("a", "g", "ring")) & set(cache.units("fork", "g", "ring"))
        cache.release("fork")
        handle = cache.retract("a")
        assert handle.bytes_by_component == {"g/latent": 2 * (RING - 1 + 2) * 32, "g/keys": 2 * 2 * 16}
        cache.admit("tenant", 7)
        write(cache, [("tenant", 7)], tag)
        cache.resume(handle)
        check(cache, "a", 11, 10)
        check(cache, "tenant", 7, 200)
        target.admit("tenant", 6)
        pull(cache, target, "a", 11)
        check(target, "a", 11, 10)
        write(target, [("a", 3)], tag)
        check(target, "a", 14, 10)
        cache.check_integrity()
        target.check_integrity()
