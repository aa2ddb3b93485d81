"""Fields: every derivation against a loop over indices that shares no code with the library."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.layout import Axis, Buffer, Field

slow_loops = settings(max_examples=120, deadline=None)


@slow_loops
@given(data=st.data())
def test_sizes_offsets_and_strides(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    field = data.draw(cases.fields())
    assert field.nbytes == loop.stored(field)
    assert field.logical_bytes == len(list(loop.coordinates(field))) * loop.ITEM[field.dtype]
    assert field.shape == tuple(size for _, _, size in loop.parse(field))
    seen = set()
    for coords in loop.coordinates(field):
        want = loop.offset(field, coords)
        assert int(field.offsets(**coords)) == want
        assert want - field.offset in range(field.nbytes)
        seen.add(want)
    assert len(seen) == len(list(loop.coordinates(field))), "two elements share a byte"
    sized = [(t.size, stride) for t, stride in zip(field.terms, field.strides, strict=True)]
    assert sum((size - 1) * stride for size, stride in sized) + field.itemsize == field.nbytes


@slow_loops
@given(data=st.data())
def test_offsets_of_arrays_broadcast(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    field = data.draw(cases.fields())
    grids = np.meshgrid(*(np.arange(a.size, dtype=np.int32) for a in field.axes), indexing="ij")
    got = field.offsets(**{a.name: g for a, g in zip(field.axes, grids, strict=True)})
    want = [loop.offset(field, coords) for coords in loop.coordinates(field)]
    assert got.dtype == np.int64
    assert got.reshape(-1).tolist() == want


@slow_loops
@given(data=st.data())
def test_index_reaches_the_element_in_a_strided_view(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """``index()`` into ``[unit, *shape]`` (units apart by more than their bytes) finds the byte the loop finds."""
    field = data.draw(cases.fields(dtype="u8"))
    stride = field.offset + field.nbytes + 5
    arena = np.random.default_rng(0).integers(0, 256, 3 * stride, dtype=np.uint8)
    view = np.lib.stride_tricks.as_strided(arena[field.offset :], (3, *field.shape), (stride, *field.strides))
    given_axes = data.draw(st.sets(st.sampled_from([a.name for a in field.axes])))
    for coords in loop.coordinates(field):
        assert view[field.index(2, **coords)] == arena[2 * stride + loop.offset(field, coords)]
        part = view[field.index(2, **{name: coords[name] for name in given_axes})]
        rest = [t for t in loop.parse(field) if t[0] not in given_axes]
        assert part[tuple(coords[n] // d % m for n, d, m in rest)] == arena[2 * stride + loop.offset(field, coords)]
    arrays = {a.name: np.arange(a.size) for a in field.axes[:1]}
    unit = np.zeros(field.axes[0].size, np.int64) + 1
    for c, row in enumerate(view[field.index(unit, **arrays)]):
        np.testing.assert_array_equal(row, view[field.index(1, **{field.axes[0].name: c})])


@slow_loops
@given(data=st.data())
def test_runs_are_the_bytes_of_a_slice(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    field = data.draw(cases.fields())
    axis = data.draw(st.sampled_from(field.axes))
    chosen = data.draw(st.lists(st.integers(0, axis.size - 1), max_size=axis.size))
    starts, lengths = field.runs(axis.name, np.array(chosen, np.int32))
    offsets = [loop.offset(field, c) for c in loop.coordinates(field) if c[axis.name] in chosen]
    assert list(zip(starts.tolist(), lengths.tolist(), strict=True)) == loop.runs(offsets, loop.ITEM[field.dtype])
    assert starts.dtype == lengths.dtype == np.int64


@pytest.mark.parametrize(
    ("order", "number", "size"), [("slot head dim", 4, 2 * 3 * 2), ("head slot dim", 1, 4 * 2 * 3 * 2)]
)
def test_head_slice_of_both_orders(order: str, number: int, size: int) -> None:
    """A head range is one run a token in NHD and one run altogether in HND."""
    field = Field("x", "bf16", order, (Axis("slot", 4), Axis("head", 8), Axis("dim", 3)))
    starts, lengths = field.runs("head", [2, 3])
    assert lengths.tolist() == [size] * number
    assert starts[0] == (2 * 3 * 2 if number == 4 else 2 * 4 * 3 * 2)


def test_conv_channel_groups_have_one_run_each() -> None:
    """Channels [key 0–3, key 4–7, value 8–15] on rank 1 of 2: ids in three ranges, one run each."""
    whole = Field("x", "bf16", "channel tap", (Axis("channel", 16), Axis("tap", 4)))
    rank = Axis("channel", 8, ids=((2, 4), (6, 8), (12, 16)))
    field = Field("x", "bf16", "channel tap", (rank, Axis("tap", 4)))
    assert field.global_ids("channel").tolist() == [2, 3, 6, 7, 12, 13, 14, 15]
    starts, lengths = whole.runs("channel", field.global_ids("channel"))
    assert starts.tolist() == [16, 48, 96]
    assert lengths.tolist() == [16, 16, 32]


def test_scale_orders_agree_with_the_written_out_chunk(cases: ModuleType) -> None:
    """Page 128 and 4 blocks: both spellings of the interleaved order have these bytes.

    A chunk is 32 × 4 × 4: sixteen bytes a row ``slot % 32``; in them four slots 32 apart, four blocks each.
    """
    golden = {  # (slot, block) → byte
        (0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 3,
        (32, 0): 4, (32, 3): 7, (64, 0): 8, (64, 3): 11, (96, 0): 12, (96, 3): 15,
        (1, 0): 16, (1, 3): 19, (33, 0): 20, (97, 3): 31,
        (2, 1): 33, (31, 0): 496, (63, 2): 502, (95, 1): 505, (127, 0): 508, (127, 3): 511,
    }  # fmt: skip
    axes = (Axis("slot", 128), Axis("head", 2), Axis("block", 4))
    short, general = (Field("s", "e8m0", order, axes) for order in (cases.INTERLEAVED, cases.GENERAL))
    assert short.nbytes == general.nbytes == 1024
    for (slot, block), byte in golden.items():
        for head in (0, 1):
            assert int(short.offsets(slot=slot, head=head, block=block)) == 512 * head + byte
            assert int(general.offsets(slot=slot, head=head, block=block)) == 512 * head + byte
    every = np.ix_(np.arange(128), np.arange(2), np.arange(4))
    names = ("slot", "head", "block")
    both = [f.offsets(**dict(zip(names, every, strict=True))) for f in (short, general)]
    np.testing.assert_array_equal(*both)


def test_general_scale_order_pads_blocks_to_four(cases: ModuleType, loop: ModuleType) -> None:
    """head_dim 80: three blocks in a chunk of four, the fourth is padding; a second chunk follows at slot 128."""
    axes = (Axis("slot", 256), Axis("head", 1), Axis("block", 3, padded=4))
    field = Field("s", "e8m0", cases.GENERAL, axes)
    assert (field.nbytes, field.logical_bytes) == (1024, 768)
    for slot, block, byte in ((0, 2, 2), (32, 0, 4), (128, 0, 512), (255, 2, 1022)):
        assert int(field.offsets(slot=slot, head=0, block=block)) == byte
    assert int(field.offsets(slot=255, head=0, block=3)) == 1023  # the padding can be addressed, to clear it
    data = {loop.offset(field, c) for c in loop.coordinates(field)}
    assert {b for b in range(1024) if b not in data} == set(range(3, 1024, 4))


def test_k1_offsets_are_64_bit() -> None:
    """K1: int32 slot 4,000,000 × 576 bytes is 2,304,000,000; 32 bits would give −1,990,967,296."""
    field = Field("x", "u8", "slot byte", (Axis("slot", 4_000_001), Axis("byte", 576)))
    buffer = Buffer("c", 0, "r", 0, 576, 576, 4_000_001)
    slots = np.array([3_728_270, 3_728_271, 4_000_000], np.int32)
    want = [2_147_483_520, 2_147_484_096, 2_304_000_000]
    for got in (
        field.offsets(slot=slots, byte=np.zeros(3, np.int32)),
        field.contribution("slot", slots),
        buffer.offsets(slots),
        np.array([int(field.offsets(slot=np.int32(s), byte=np.int32(0))) for s in slots]),
        np.array([int(buffer.offsets(np.int32(s))) for s in slots]),
    ):
        assert got.dtype == np.int64
        assert got.tolist() == want


def test_buffer_offsets_start_at_the_base() -> None:
    buffer = Buffer("c", 3, "r", 100, 64, 32, 5)
    assert buffer.offsets([0, 4, 1]).tolist() == [100, 356, 164]
    assert buffer.offsets([]).tolist() == []
    for unit in (-1, 5):
        with pytest.raises(LayoutError, match="outside its buffer") as caught:
            buffer.offsets([0, unit])
        assert caught.value.fields["unit"] == unit


@pytest.mark.parametrize("head", [-1, 2])
def test_coordinates_never_wrap(head: int) -> None:
    """A coordinate outside its axis is an error, not the last row."""
    field = Field("x", "u8", "slot head", (Axis("slot", 4), Axis("head", 2)))
    with pytest.raises(LayoutError, match="outside its axis") as caught:
        field.offsets(slot=0, head=[0, head])
    assert (caught.value.fields["axis"], caught.value.fields["got"]) == ("head", head)
    with pytest.raises(LayoutError, match="outside"):
        field.runs("head", [head])


@pytest.mark.parametrize("bad", [[0.0], [True], ["0"]])
def test_coordinates_are_integers(bad: object) -> None:
    field = Field("x", "u8", "slot", (Axis("slot", 4),))
    with pytest.raises(LayoutError, match="not integers"):
        field.offsets(slot=bad)


def test_unknown_or_missing_axes_are_named() -> None:
    field = Field("x", "u8", "slot head", (Axis("slot", 4), Axis("head", 2)))
    with pytest.raises(LayoutError, match="do not match"):
        field.offsets(slot=0)
    with pytest.raises(LayoutError, match="do not match"):
        field.offsets(slot=0, head=0, dim=0)
    for call in (lambda: field.index(haed=0), lambda: field.runs("haed", [0]), lambda: field.contribution("haed", 0)):
        with pytest.raises(LayoutError, match=r"no such axis.*'head'"):
            call()
