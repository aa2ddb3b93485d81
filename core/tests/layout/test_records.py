"""Fields of records (``@N`` in an axis order): places by loops, what is refused, and a format of them through the kit."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import KVCache, ModelSpec, load_config, load_plugins
from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.layout import ArenaOrder, Axis, BlockOf, Field, Layout, Region, SpaceSpec, UnitRange, padding, region
from kvcore.layout.moves import Program, run_program
from kvcore.spec import LayerGroup, Shard
from kvcore.testing import GROUPS, FormatSuite
from kvcore.testing.harness import pull
from kvcore.testing.memory import element_offsets

ITEM = {"u8": 1, "i8": 1, "fp16": 2, "fp32": 4}


@st.composite
def records(draw: st.DrawFn, page: int, dtypes: list[str], ids: Any = (), axis: str = "lane") -> Region:
    """A region of records by slot and head in any order, maybe of records in records, maybe with something around them."""
    slot, head = Axis("slot", page), Axis("head", sum(hi - lo for lo, hi in ids) or 3, ids=ids)
    outer = draw(st.permutations(["slot", "head"]))
    nested = draw(st.booleans())  # what stands between the two: the inner records, then padding
    fields, at = [], draw(st.sampled_from([0, 8]))
    lead = [padding("lead", at, 0)] if at else []
    inside: list[tuple[str, str, int, int]] = []  # name, dtype, lanes, offset in the record
    end = 0
    for n, dtype in enumerate(dtypes):
        end += -end % ITEM[dtype]
        lanes = draw(st.integers(1, 3))
        inside.append((f"f{n}", dtype, lanes, end))
        end += ITEM[dtype] * lanes
    size = end + -end % 4
    whole = size * (page if outer[1] == "slot" else head.size) + 4 if nested else 0
    order = f"{outer[0]} @{whole} {outer[1]} @{size}" if nested else f"{outer[0]} {outer[1]} @{size}"
    filled = 0
    for name, dtype, lanes, offset in [*inside, ("", "u8", 0, size)]:
        if offset > filled:  # padding of each record
            gap = Axis("byte", offset - filled)
            fields.append(Field(f"gap{filled}", "u8", f"{order} byte", (slot, head, gap), at + filled, "padding"))
        if lanes:
            fields.append(Field(name, dtype, f"{order} {axis}", (slot, head, Axis(axis, lanes)), at + offset))
        filled = offset + ITEM[dtype] * lanes
    if nested:
        first = slot if outer[0] == "slot" else head
        tail = Field("tail", "u8", f"{outer[0]} @{whole} byte", (first, Axis("byte", 4)), at + whole - 4, "padding")
        fields.append(tail)
    return region("k", "full/kv", draw(st.permutations([*lead, *fields])), ranges=("pages",), alignment=16)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_elements_of_records_are_where_loops_say(data: st.DataObject, loop: ModuleType) -> None:
    """Every byte of the unit belongs to one field; offsets, views, runs and the kit's own addresses agree with loops."""
    item = data.draw(records(4, data.draw(st.lists(st.sampled_from(sorted(ITEM)), min_size=1, max_size=4))))
    owners = np.zeros(item.unit_bytes, int)
    arena = np.random.default_rng(0).integers(0, 256, 3 * item.unit_bytes, np.uint8)
    for field in item.fields:
        unit = arena[field.offset :]
        view = np.lib.stride_tricks.as_strided(unit, (3, *field.shape), (item.unit_bytes, *field.strides))
        places = []
        for coords in loop.coordinates(field):
            at = loop.offset(field, coords)
            places.append(at)
            owners[at : at + loop.ITEM[field.dtype]] += 1
            assert int(field.offsets(**coords)) == at
            assert view[field.index(2, **coords)] == arena[2 * item.unit_bytes + at]
        assert element_offsets(field).reshape(-1).tolist() == places
        assert field.nbytes == len(places) * field.itemsize
        assert field.span == max(places) - min(places) + field.itemsize
        for axis in field.axes:
            chosen = data.draw(st.lists(st.integers(0, axis.size - 1), max_size=3))
            starts, lengths = field.runs(axis.name, chosen)
            offsets = [loop.offset(field, c) for c in loop.coordinates(field) if c[axis.name] in chosen]
            assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == loop.runs(offsets, field.itemsize)
    assert (owners == 1).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_records_are_converted_byte_for_byte(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """To records of another order, or to arrays of their own, with other heads: each byte from where the loops say."""
    dtypes = data.draw(st.lists(st.sampled_from(["u8", "i8", "fp16"]), min_size=1, max_size=3))
    sides = []
    src_region = data.draw(records(4, dtypes, data.draw(cases.id_sets(4))))
    lanes = {f.name: f.axis("lane").size for f in src_region.data_fields}
    ids = data.draw(cases.id_sets(4))
    slot, head = Axis("slot", 4), Axis("head", sum(hi - lo for lo, hi in ids), ids=ids)
    flat, end = [], 0
    for n, dtype in enumerate(dtypes):
        rest = -end % 4
        flat += [padding(f"pad{n}", rest, end)] if rest else []
        axes = (slot, head, Axis("lane", lanes[f"f{n}"]))
        flat.append(Field(f"f{n}", dtype, data.draw(cases.orders(axes)), axes, end + rest))
        end += rest + flat[-1].nbytes
    for item in (src_region, region("k", "full/kv", flat, ranges=("pages",))):
        sides.append(
            cases.paged(4, [item], layers=(0, 1), arena=data.draw(st.sampled_from(["page_major", "layer_major"])))
        )
    units = {"pages": 4}
    for src, dst in (sides, sides[::-1]):
        placed = [side.place(units) for side in (src, dst)]
        program = Program.build(src, placed[0], dst, placed[1])
        source = np.random.default_rng(1).integers(0, 255, placed[0].arena_bytes, np.uint8)
        target = np.full(placed[1].arena_bytes, 0xFF, np.uint8)
        want = target.copy()
        for to, origin in loop.convert(src, units, dst, units, [(1, 3), (2, 1)], ("full/kv",)).items():
            want[to] = source[origin]
        run_program(program, source, target, [1, 2], [3, 1])
        np.testing.assert_array_equal(target, want)


def test_equal_records_move_whole(cases: ModuleType) -> None:
    layout = Q8().layout(GROUPS["grouped"], page_size=4, shard=Shard(), arena="page_major")
    placed = layout.place({"pages": 3})
    assert [move.run_bytes for move in Program.build(layout, placed, layout, placed).moves] == [layout.envelope_bytes]
    assert Layout.from_json(layout.to_json()) == layout


def test_records_arrive_checked() -> None:
    """Into the other arena order, with checksums over what was read: the values stored, token by token."""
    group = GROUPS["grouped"]
    config = {"cache.format": "bf16", "cache.memory": "256KiB", "cache.page_size": 4, "transfer.checksum": "crc32"}
    rows = {t.name: torch.randn(11, t.num_heads, t.head_dim) for t in group.tensors}

    def made(arena: str) -> KVCache:
        settings = load_config(None, {**config, "cache.arena": arena})
        return KVCache.create(ModelSpec("m", (group,), "fp32"), settings, load_plugins(()), formats={"full": Q8()})

    def read(cache: KVCache, layer: int) -> dict[str, torch.Tensor]:
        out = {name: torch.full_like(x, torch.nan) for name, x in rows.items()}
        cache.store.load(layer, torch.from_numpy(cache.slots("a", "full", 0, 11)), out)
        return out

    with made("page_major") as source, made("layer_major") as target:
        for cache in (source, target):
            cache.admit("other", 3 if cache is source else 9)  # so that units differ
        source.admit("a", 11)
        with source.begin([("a", 11)]) as step:
            for layer in group.layers:
                step.store(layer, rows)
            step.commit()
        sent = {layer: read(source, layer) for layer in group.layers}
        pull(source, target, "a", 11)
        for layer in group.layers:
            got = read(target, layer)
            assert all(torch.equal(got[name], sent[layer][name]) for name in rows)
            assert all(float((got[name] - x).abs().max()) < 0.03 for name, x in rows.items())


# --- what is refused -------------------------------------------------------------------------------------------------

SLOT, LANE = Axis("slot", 4), Axis("lane", 2)


def part(order: str, offset: int = 0, dtype: str = "u8", name: str = "x", lanes: int = 2, **more: Any) -> Field:
    axes = (SLOT, Axis("lane", lanes)) if "lane" in order else (SLOT,)
    return Field(name, dtype, order, axes, offset, **more)


def unit(*fields: Field, size: int = 16) -> Region:
    return Region("k", "c", fields, size, ("pages",))


BAD: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "no number": (lambda: part("slot @ lane"), "bad term", {"term": "@"}),
    "zero": (lambda: part("slot @0 lane"), "bad term", {"term": "@0"}),
    "negative": (lambda: part("slot @-4 lane"), "bad term", {"term": "@-4"}),
    "huge": (lambda: part("slot @" + "9" * 5000 + " lane"), "bad term", {"field": "x"}),
    "nothing counted": (lambda: part("@4 slot lane"), "no axis counts", {"field": "x", "term": "@4"}),
    "two in one": (lambda: part("slot @4 @2 lane"), "no axis counts", {"term": "@2"}),
    "too small": (lambda: part("slot @3 lane", dtype="fp16"), "smaller than", {"expected": 4, "got": 3}),
    "misaligned": (
        lambda: part("slot @35 lane", dtype="fp16"),
        "elements of a record are misaligned",
        {"field": "x", "term": "@35", "dtype": "fp16", "expected": "multiple of 2", "got": 35},
    ),
    "misaligned for its alignment": (lambda: part("slot @6 lane", alignment=4), "misaligned", {"got": 6}),
    "deep": (
        lambda: Field(
            "x", "u8", " ".join(f"a{n} @{99 - n}" for n in range(9)), tuple(Axis(f"a{n}", 1) for n in range(9))
        ),
        "records too deep",
        {"expected": "at most 8", "got": 9},
    ),
    "hole in a record": (
        lambda: unit(part("slot @4"), part("slot @4 lane", 2, name="y")),
        "belong to no field",
        {"region": "k", "field": "y", "expected": 1, "got": 2},
    ),
    "hole at its end": (
        lambda: unit(part("slot @4"), part("slot @4 lane", 1, name="y")),
        "do not cover their record",
        {"region": "k", "expected": 4, "got": 3},
    ),
    "overlap in a record": (
        lambda: unit(part("slot @4 lane"), part("slot @4 lane", 1, name="y", lanes=3)),
        "fields overlap",
        {"field": "y", "expected": 2, "got": 1},
    ),
    "past the end of a record": (
        lambda: unit(part("slot @4 lane"), part("slot @4 lane", 2, name="y", lanes=3)),
        "do not cover their record",
        {"expected": 4, "got": 5},
    ),
    "other records": (
        lambda: unit(part("slot @4 lane"), part("slot//2 slot%2 @6 lane", 2, name="y")),
        "not in the same records",
        {"field": "y", "expected": [4, 4], "got": [4, 6]},
    ),
    "an array between records": (
        lambda: unit(part("slot @4 lane"), part("slot", 2, name="y")),
        "not in the same records",
        {"field": "y", "expected": [4, 4], "got": None},
    ),
    "records to the unit's end": (lambda: unit(part("slot @4 lane", lanes=4), size=32), "cover the unit", {"got": 16}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records(name: str) -> None:
    build, message, facts = BAD[name]
    with pytest.raises(LayoutError) as caught:
        build()
    assert message in str(caught.value)
    assert {key: caught.value.fields.get(key) for key in facts} == facts


def test_a_misaligned_element_is_shown_the_way_out() -> None:
    with pytest.raises(LayoutError) as caught:
        BAD["misaligned"][0]()
    assert "u8" in caught.value.remedy


def test_sizes_of_a_peer_cost_nothing() -> None:
    """A unit of 2**59 bytes is checked as fast as one of 16: nothing is counted byte by byte."""
    many = Axis("slot", 2**50)
    fields = (
        Field("x", "u8", "slot @512 lane", (many, Axis("lane", 500))),
        Field("y", "fp32", "slot @512 lane", (many, Axis("lane", 3)), offset=500),
    )
    assert Region("k", "c", fields, 2**59, ("pages",)).logical_bytes == 2**59


# --- a format of records ---------------------------------------------------------------------------------------------

BLOCK = 32


class Q8(Format):
    """llama.cpp's q8_0: for every 32 values a record of an fp16 scale and 32 signed bytes, 34 bytes."""

    name = "test_q8"
    magnitudes = (1e-3, 1e3)  # below, the fp16 scale has few bits left

    def supports(self, group: LayerGroup) -> Support:
        if group.kind != "attention" or any(tensor.head_dim % BLOCK for tensor in group.tensors):
            return unsupported(f"heads of {group.prefix!r} are not blocks of {BLOCK}")
        return FULL

    def fields(self, lead: tuple[Axis, ...], block: Axis, dim: Axis) -> tuple[Field, ...]:
        scale = Field("scale", "fp16", "slot head block @34", (*lead, block))
        return scale, Field("codes", "i8", f"slot head dim//{BLOCK} @34 dim%{BLOCK}", (*lead, dim), offset=2)

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        regions = []
        for tensor in group.tensors:
            lead = (Axis("slot", page_size), Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)))
            block = Axis("block", tensor.head_dim // BLOCK, blocks=BlockOf("dim", tensor.head_dim, BLOCK))
            fields = self.fields(lead, block, Axis("dim", tensor.head_dim))
            regions.append(region(tensor.name, f"{group.prefix}/kv", fields, ranges=("pages",)))
        return Layout(
            self.name,
            1,
            group.prefix,
            tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers),
            tuple(regions),
            (SpaceSpec(group.name, group.space, "page", page_size, group.space_options),),
            (UnitRange("pages", group.name),),
            arena,
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        out = {}
        for name, values in rows.items():
            blocks = values.float().unflatten(-1, (-1, BLOCK))
            scale = (blocks.abs().amax(-1) / 127).half()
            codes = (blocks / scale.float().where(scale > 0, 1.0)[..., None]).round().clamp(-127, 127)
            out[name, "scale"], out[name, "codes"] = scale, codes.to(torch.int8).flatten(-2)
        return out

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        out = {}
        for name in dict.fromkeys(name for name, _ in elements):
            blocks = elements[name, "codes"].float().unflatten(-1, (-1, BLOCK))
            out[name] = (blocks * elements[name, "scale"].float()[..., None]).flatten(-2).to(dtype)
        return out


class OddQ8(Q8):
    """Records of 35 bytes: the scale cannot be seen as fp16 there, and is stored as two bytes; the last one is unused."""

    name = "test_odd_q8"

    def fields(self, lead: tuple[Axis, ...], block: Axis, dim: Axis) -> tuple[Field, ...]:
        order = "slot head block @35"
        return (
            Field("scale", "u8", f"{order} byte", (*lead, block, Axis("byte", 2)), offset=0),
            Field("codes", "i8", f"slot head dim//{BLOCK} @35 dim%{BLOCK}", (*lead, dim), offset=2),
            Field("unused", "u8", order, (*lead, block), offset=34, kind="padding"),
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        found = super().encode(layout, rows)
        return {
            key: x.contiguous().view(torch.uint8).unflatten(-1, (-1, 2)) if key[1] == "scale" else x
            for key, x in found.items()
        }

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        whole = {
            key: x.contiguous().view(torch.float16)[..., 0] if key[1] == "scale" else x for key, x in elements.items()
        }
        return super().decode(layout, whole, dtype)


def test_the_bytes_are_those_of_q8_0() -> None:
    """A page of three tokens: scale, 32 codes, scale, 32 codes, worked out by hand with numpy."""
    group = GROUPS["grouped"]
    layout = Q8().layout(group, page_size=4, shard=Shard(), arena="page_major")
    values = torch.randn(3, 2, 32, generator=torch.Generator().manual_seed(2))
    found = Q8().encode(layout, {"k": values})
    unit = np.zeros(layout.region("k").unit_bytes, np.uint8)
    for name in ("scale", "codes"):
        field, stored = layout.region("k").field(name), found["k", name].numpy()
        for index in np.ndindex(stored.shape):
            coords = dict(zip([axis.name for axis in field.axes], index, strict=True))
            at = int(field.offsets(**coords))
            unit[at : at + field.itemsize] = np.frombuffer(stored[index].tobytes(), np.uint8)
    want = b""
    for token in values.numpy():
        for row in token:
            scale = np.float16(np.abs(row).max() / np.float32(127))
            want += scale.tobytes() + np.round(row / np.float32(scale)).clip(-127, 127).astype(np.int8).tobytes()
    assert unit.tobytes()[: len(want)] == want
    assert not unit[len(want) :].any()


class TestRecordsThroughTheKit(FormatSuite):
    groups: ClassVar = {"indexed": GROUPS["indexed"], "latent": GROUPS["latent"]}
    page_size = 4
    max_error = 0.01

    @pytest.fixture
    def kv_format(self) -> Format:
        return Q8()


class TestOddRecordsThroughTheKit(FormatSuite):
    groups: ClassVar = {"unequal": GROUPS["unequal"]}
    page_size = 4
    max_error = 0.01

    @pytest.fixture
    def kv_format(self) -> Format:
        return OddQ8()
