"""Selected conversions: a destination filled from several sources, every byte from exactly one of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.layout.moves import Program, Selection, run_program

POISON = 0xFF
UNITS = {"pages": 4}
PAIRS = [(1, 3), (3, 1)]

Key = tuple[int, str, str]
"""Layer, region, field."""


@dataclass
class Part:
    """What one source gives in some layers: ``chosen[region, field]`` is an axis and its ids, or None for all."""

    source: int
    layers: tuple[int, ...]
    chosen: dict[tuple[str, str], tuple[str, list[int]] | None] = field(default_factory=dict)

    def keep(self, layer: int, region: str, ids: dict[str, int], name: str) -> bool:
        if layer not in self.layers or (region, name) not in self.chosen:
            return False
        entry = self.chosen[region, name]
        return entry is None or ids[entry[0]] in entry[1]

    def selection(self) -> Selection:
        fields = {k: v and (v[0], np.array(v[1], np.int64)) for k, v in self.chosen.items()}
        return Selection(self.layers, fields)


def arena_of(layout: Layout, seed: int) -> Any:
    size = layout.place(UNITS).arena_bytes
    return np.random.default_rng(seed).integers(0, POISON, size, dtype=np.uint8)  # never the poison


def check_parts(loop: ModuleType, dst: Layout, sources: list[Layout], parts: list[Part]) -> list[Program]:
    """Run every part into one destination and compare with the loop, part by part and byte by byte."""
    place = dst.place(UNITS)
    got, want, writers = (np.full(place.arena_bytes, value, np.uint8) for value in (POISON, POISON, 0))
    padding = np.ones(place.arena_bytes, bool)  # raw units bring their padding along, whatever is in it
    arenas = [arena_of(layout, seed) for seed, layout in enumerate(sources)]
    programs = []
    for part in parts:
        src = sources[part.source]
        program = Program.build(src, src.place(UNITS), dst, place, only=part.selection())
        addresses = loop.convert(src, UNITS, dst, UNITS, PAIRS, dst.components, part.keep)
        to, origin = (np.fromiter(side, np.int64, len(addresses)) for side in (addresses.keys(), addresses.values()))
        want[to] = arenas[part.source][origin]
        writers[to] += 1
        padding[to] = False
        moved = run_program(program, arenas[part.source], got, *zip(*PAIRS, strict=True))
        assert moved == len(addresses) == program.bytes_per_unit * len(PAIRS)
        alone = np.full_like(got, POISON)
        run_program(program, arenas[part.source], alone, *zip(*PAIRS, strict=True))
        assert program.whole_units == bool((alone[_unit_bytes(loop, dst)] != POISON).all())
        programs.append(program)
    np.testing.assert_array_equal(got[~padding], want[~padding])
    assert writers.max(initial=0) <= 1
    spilled = np.flatnonzero((got != POISON) & padding)
    assert set(spilled.tolist()) <= set(_unit_bytes(loop, dst).tolist()) - _data_bytes(loop, dst)
    return programs


def _unit_bytes(loop: ModuleType, dst: Layout) -> Any:
    """Every byte of the destination's units."""
    at, _ = loop.unit_addresses(dst, UNITS)
    units = [d for _, d in PAIRS]
    sizes = {r.name: r.unit_bytes for r in dst.regions}
    return np.array([x + b for (_, r, u), x in at.items() if u in units for b in range(sizes[r])])


def _data_bytes(loop: ModuleType, dst: Layout) -> set[int]:
    same = [(d, d) for _, d in PAIRS]
    return set(loop.convert(dst, UNITS, dst, UNITS, same, dst.components))


def common_ids(loop: ModuleType, src: Layout, dst: Layout, region: str, name: str, axis: str) -> set[int]:
    sets = [set(loop.global_ids(side.region(region).field(name).axis(axis))) for side in (src, dst)]
    return sets[0] & sets[1]


@st.composite
def partitions(draw: st.DrawFn, loop: ModuleType, dst: Layout, sources: list[Layout]) -> list[Part]:
    """Give every (layer, region, field, id) that some source holds to exactly one that does."""
    layers_of: dict[tuple[int, ...], list[int]] = {}  # layers that the same sources hold, cut further at random
    for layer in dst.layers:
        holders = tuple(i for i, s in enumerate(sources) if layer in s.layers)
        layers_of.setdefault((*holders, -1 - draw(st.integers(0, 1))), []).append(layer)
    parts = []
    for (*holders, _), layers in layers_of.items():
        mine = {i: Part(i, tuple(draw(st.permutations(layers)))) for i in holders}
        for item in dst.regions:
            for f in item.data_fields:
                key, axis = (item.name, f.name), draw(st.sampled_from(["head", "slot", f.axes[-1].name]))
                held = {i: common_ids(loop, sources[i], dst, *key, axis) for i in holders}
                if (
                    axis != "head"
                    and len({frozenset(common_ids(loop, sources[i], dst, *key, "head")) for i in holders}) > 1
                ):
                    axis = "head"  # sources of unlike heads can only share heads
                    held = {i: common_ids(loop, sources[i], dst, *key, axis) for i in holders}
                given_to: dict[int, list[int]] = {i: [] for i in holders}
                for number in sorted(set().union(*held.values())):
                    given_to[draw(st.sampled_from([i for i in holders if number in held[i]]))].append(number)
                for i, ids in given_to.items():
                    if set(ids) == held[i] and draw(st.booleans()):
                        mine[i].chosen[key] = None
                    elif ids or draw(st.booleans()):
                        mine[i].chosen[key] = (axis, ids)
        parts += mine.values()
    return parts


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_partition_writes_every_byte_once(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """Replicas, shards, uneven stages, axis orders, splits, padding and arena orders, all at once."""
    dst, *sources = data.draw(cases.sides(data.draw(st.integers(2, 4))))
    parts = data.draw(partitions(loop, dst, sources))
    programs = check_parts(loop, dst, sources, parts)
    held: set[int] = set()
    for src in sources:
        held |= set(loop.convert(src, UNITS, dst, UNITS, [PAIRS[0]], dst.components))
    assert sum(p.bytes_per_unit for p in programs) == len(held), "something is moved twice, or not at all"


def kv_part(source: int, layers: Any, ids: list[int] | None) -> Part:
    entry = ids and ("head", ids)
    return Part(source, tuple(layers), {("k", "x"): entry, ("v", "x"): entry})


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_replicas_share_their_heads(loop: ModuleType, cases: ModuleType, order: str, arena: Any) -> None:
    """Eight ranks over four heads: two hold each head; one head of each pair of replicas is taken from either."""
    sources = [cases.kv(order, heads=1, ids=((rank // 2, rank // 2 + 1),), arena=arena) for rank in range(8)]
    whole = cases.kv("NHD", heads=4, ids=((0, 4),))
    chosen = [0, 3, 4, 7]
    programs = check_parts(loop, whole, sources, [kv_part(rank, range(3), [rank // 2]) for rank in chosen])
    assert sum(p.bytes_per_unit for p in programs) == whole.envelope_bytes
    halves = [cases.kv(order, heads=2, ids=((lo, lo + 2),), arena=arena) for lo in (0, 2)]
    programs = check_parts(loop, whole, halves, [kv_part(0, range(3), None), kv_part(1, range(3), [2, 3])])
    assert len({len(p.moves) for p in programs}) == 1, "all ids by name are as few moves as all ids"


def test_uneven_stages(loop: ModuleType, cases: ModuleType) -> None:
    """Stages that overlap a destination's layers in part; a layer both hold is taken from one."""
    sources = [cases.kv(layers=(0, 1, 2)), cases.kv(layers=(2, 3), arena="layer_major"), cases.kv(layers=(7,))]
    dst = cases.kv("HND", layers=(1, 2, 3))
    first, second = check_parts(loop, dst, sources, [kv_part(0, (1,), None), kv_part(1, (3, 2), None)])
    assert (first.bytes_per_unit, second.bytes_per_unit) == (dst.envelope_bytes // 3, 2 * dst.envelope_bytes // 3)
    for only in (None, Selection((), {("k", "x"): None})):
        nothing = Program.build(sources[2], sources[2].place(UNITS), dst, dst.place(UNITS), only=only)
        assert (nothing.moves, nothing.unit_bytes, nothing.whole_units) == ((), {"full/kv": 0}, False)


def test_units_travel_raw_where_a_region_is_moved_whole(cases: ModuleType) -> None:
    """Padding comes along only with all of a region, so that no source writes what another does."""
    layout = cases.mxfp8("slot head block", page=3, heads=3, ids=((0, 3),), dim=80, tail="padded", layers=(0, 1))
    place = layout.place(UNITS)
    scales = layout.region("k_scale")
    assert scales.unit_bytes > scales.logical_bytes, "the case needs padding"

    def moved(chosen: dict[tuple[str, str], Any]) -> tuple[dict[str, int], int, bool]:
        program = Program.build(layout, place, layout, place, only=Selection(layout.layers, chosen))
        return dict(program.unit_bytes), sum(m.nbytes for m in program.moves), program.whole_units

    everything = {(r.name, f.name): None for r in layout.regions for f in r.data_fields}
    kv, logical = sum(layout.region(n).logical_bytes for n in "kv") * 2, scales.logical_bytes
    assert moved(everything) == ({"full/kv": kv, "full/block_scale": logical * 4}, layout.envelope_bytes, True)
    assert moved({("k_scale", "s"): ("head", np.arange(3))}) == (
        {"full/kv": 0, "full/block_scale": logical * 2},
        scales.unit_bytes * 2,
        False,
    )
    assert moved({("k_scale", "s"): ("head", np.arange(2))}) == (
        {"full/kv": 0, "full/block_scale": logical * 2 * 2 // 3},
        logical * 2 * 2 // 3,
        False,
    )


def test_a_selection_serves_programs_of_its_components(cases: ModuleType) -> None:
    layout = cases.mxfp8("slot head block")
    place = layout.place(UNITS)
    only = Selection((1,), {("k", "x"): None, ("v_scale", "s"): None})
    program = Program.build(layout, place, layout, place, ["full/block_scale"], only)
    assert program.unit_bytes == {"full/block_scale": layout.region("v_scale").logical_bytes}
    assert {name for move in program.moves for name in move.components} == {"full/block_scale"}


@pytest.mark.parametrize(
    ("layers", "fields", "message", "names"),
    [
        ((0, 4), {("k", "x"): None}, "a layer is selected", {"layer": 4}),
        ((5,), {("k", "x"): None}, "a layer is selected", {"layer": 5}),
        ((0,), {("k", "y"): None}, "a field is selected", {"region": "k", "field": "y"}),
        ((0,), {("q", "x"): None}, "a field is selected", {"region": "q", "field": "x"}),
        ((0,), {("k", "x"): ("block", [0])}, "an axis the field lacks", {"region": "k", "field": "x", "axis": "block"}),
        ((0,), {("v", "x"): ("head", [1])}, "an id is selected", {"region": "v", "axis": "head", "got": 1}),
        ((0,), {("v", "x"): ("head", [2, 4])}, "an id is selected", {"region": "v", "expected": [2, 3], "got": 4}),
        ((0,), {("v", "x"): ("head", [3, 2])}, "not ascending", {"region": "v", "got": [3, 2]}),
        ((0,), {("v", "x"): ("head", [2, 2])}, "not ascending", {"region": "v", "got": [2, 2]}),
    ],
)
def test_what_not_both_sides_hold_is_refused(
    cases: ModuleType, layers: tuple[int, ...], fields: Any, message: str, names: dict[str, Any]
) -> None:
    src = cases.kv(heads=4, ids=((0, 4),), layers=(0, 1, 4))
    dst = cases.kv(heads=3, ids=((2, 5),), layers=(5, 0))
    chosen = {k: v and (v[0], np.array(v[1], np.int64)) for k, v in fields.items()}
    with pytest.raises(LayoutError, match=message) as caught:
        Program.build(src, src.place(UNITS), dst, dst.place(UNITS), only=Selection(layers, chosen))
    assert names.items() <= caught.value.fields.items()
