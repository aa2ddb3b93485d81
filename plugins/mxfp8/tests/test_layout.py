"""The bytes: where scales lie, what a token costs, what is refused."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.layout import Layout
from kvcore.layout.moves import Program, run_program
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2

WIDE = LayerGroup("full", (0, 2), (TensorSpec("k", 8, 128), TensorSpec("v", 8, 128)), num_query_heads=32)
UNLIKE = LayerGroup("full", (0, 1), (TensorSpec("k", 4, 192), TensorSpec("v", 4, 128)), num_query_heads=8)
ODD = LayerGroup("full", (0,), (TensorSpec("k", 2, 80), TensorSpec("v", 2, 100)), num_query_heads=4)


def layout(group: LayerGroup = WIDE, page_size: int = 128, fmt: type[Mxfp8] = Mxfp8, **options: Any) -> Layout:
    shard, arena = options.pop("shard", Shard()), options.pop("arena", "page_major")
    return fmt(**options).layout(group, page_size=page_size, shard=shard, arena=arena)


# --- where scales lie ---

# The first 48 bytes of a head of interleaved scales, a page of 128 tokens and 4 blocks, as (token, block).
GOLDEN = """
    0.0  0.1  0.2  0.3   32.0  32.1  32.2  32.3   64.0  64.1  64.2  64.3   96.0  96.1  96.2  96.3
    1.0  1.1  1.2  1.3   33.0  33.1  33.2  33.3   65.0  65.1  65.2  65.3   97.0  97.1  97.2  97.3
    2.0  2.1  2.2  2.3   34.0  34.1  34.2  34.3   66.0  66.1  66.2  66.3   98.0  98.1  98.2  98.3
"""
# Offsets of (token, block) in a page of 256 tokens and 7 blocks: two chunks of blocks in each of two chunks of tokens.
FAR = {(0, 0): 0, (0, 4): 512, (31, 6): 512 + 31 * 16 + 2, (127, 3): 511, (128, 0): 1024, (255, 6): 1024 + 512 + 510}
# Pages that 128 does not divide: chunks of 64 and of 32 tokens.
SMALL = {
    64: {(0, 4): 256, (32, 1): 5, (1, 0): 8, (63, 3): 255},
    96: {(1, 0): 4, (0, 4): 128, (32, 0): 256, (95, 6): 766},
}


def test_interleaved_scales_lie_as_written_out() -> None:
    field = layout(scale_layout="interleaved").region("k_block_scale").field("scale")
    assert (field.dtype, field.nbytes) == ("e8m0", 8 * 512)
    for head in (0, 5):
        places = [tuple(map(int, text.split("."))) for text in GOLDEN.split()]
        got = [int(field.offsets(slot=token, head=head, block=block)) for token, block in places]
        assert got == [head * 512 + n for n in range(48)]
    # For this page and width the general order is the short one.
    token, block = np.meshgrid(np.arange(128), np.arange(4), indexing="ij")
    short = token % 32 * 16 + token // 32 * 4 + block
    np.testing.assert_array_equal(field.offsets(slot=token, head=3, block=block), 3 * 512 + short)


def test_larger_and_smaller_pages_have_chunks_that_divide_them() -> None:
    group = LayerGroup("full", (0,), (TensorSpec("k", 2, 224),), num_query_heads=2)
    for page_size, places in ((256, FAR), *SMALL.items()):
        field = layout(group, page_size, scale_layout="interleaved").region("k_block_scale").field("scale")
        assert field.axis("block").extent == 8
        for (token, block), offset in places.items():
            assert int(field.offsets(slot=token, head=0, block=block)) == offset, (page_size, token, block)
        assert int(field.offsets(slot=0, head=1, block=0)) == page_size * 8


@pytest.mark.parametrize(("order", "golden"), [("head_major", "head slot block"), ("token_major", "slot head block")])
def test_flat_scales_follow_the_payload(order: str, golden: str) -> None:
    made = layout(order=order)
    assert made.region("v_block_scale").field("scale").order == golden
    assert made.region("v").field("x").order == golden.replace("block", "dim")
    field = made.region("k_block_scale").field("scale")
    want = (6 * 128 + 33) * 4 + 2 if order == "head_major" else (33 * 8 + 6) * 4 + 2
    assert int(field.offsets(slot=33, head=6, block=2)) == want


@pytest.mark.parametrize("scales", ["flat", "interleaved"])
def test_scales_are_a_component_of_their_own(scales: str) -> None:
    """A1: the list of KV stays two a layer; a unit of scales is a page's, for either order of them."""
    group = LayerGroup("full", (0, 1), (TensorSpec("k", 2, 64), TensorSpec("v", 2, 64)), num_query_heads=2)
    made = layout(group, 32, scale_layout=scales)
    placed = made.place({"pages": 5})
    by_component: dict[str, list[Any]] = {}
    for buffer in placed.buffers:
        by_component.setdefault(buffer.component, []).append(buffer)
    assert {name: len(items) for name, items in by_component.items()} == {"full/kv": 4, "full/block_scale": 4}
    blocks = 4 if scales == "interleaved" else 2
    for name, unit_bytes in (("full/kv", 32 * 2 * 64), ("full/block_scale", 32 * 2 * blocks)):
        for buffer in by_component[name]:
            assert buffer.unit_bytes == unit_bytes
            assert buffer.num_units == 5
    assert placed.arena_bytes == 5 * 4 * 32 * 2 * (64 + blocks)


# --- what it costs ---


@pytest.mark.parametrize("fmt", [Mxfp8, Mxfp8E5m2])
@pytest.mark.parametrize("scales", ["flat", "interleaved"])
@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_a_token_costs_33_64_of_bf16(fmt: type[Mxfp8], scales: str, page_size: int) -> None:
    made = layout(page_size=page_size, fmt=fmt, scale_layout=scales)
    kv = 2 * 2 * 8 * 128
    assert made.bytes_per_token() == {"full/kv": kv, "full/block_scale": kv // 32}
    assert sum(made.bytes_per_token().values()) == Fraction(33, 64) * 2 * kv
    assert not made.alignment_bytes_per_token()


def test_widths_of_keys_and_values_differ() -> None:
    made = layout(UNLIKE, 16)
    assert made.bytes_per_token() == {"full/kv": 2 * 4 * (192 + 128), "full/block_scale": 2 * 4 * (6 + 4)}


@pytest.mark.parametrize("scales", ["flat", "interleaved"])
def test_a_head_that_blocks_do_not_divide(scales: str) -> None:
    """B6: 80 elements have 3 scales, and never 2; the last block is declared to be shorter."""
    made = layout(ODD, 32, scale_layout=scales)
    for name, dim, count in (("k", 80, 3), ("v", 100, 4)):
        axis = made.region(f"{name}_block_scale").field("scale").axis("block")
        assert (axis.size, axis.extent) == (count, 4 if scales == "interleaved" else count)
        assert axis.blocks is not None
        assert (axis.blocks.extent, axis.blocks.block_size, axis.blocks.tail) == (dim, 32, "padded")
        assert made.region(name).field("x").axis("dim").extent == dim
    assert Layout.from_json(made.to_json()) == made


def test_nothing_rests_on_asserts() -> None:
    """B6 under ``python -O``: 3 scales and an 80-wide round trip, and pages that do not fit are an error."""
    program = """
import torch
from kvcore.errors import LayoutError
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.format import Mxfp8
group = LayerGroup("full", (0,), (TensorSpec("k", 1, 80),), num_query_heads=1)
fmt = Mxfp8()
made = fmt.layout(group, page_size=16, shard=Shard(), arena="page_major")
rows = {"k": torch.linspace(-3, 3, 240).reshape(3, 1, 80)}
stored = fmt.encode(made, rows)
back = fmt.decode(made, stored, torch.float32)["k"]
try:
    Mxfp8(scale_layout="interleaved").layout(group, page_size=48, shard=Shard(), arena="page_major")
except LayoutError as error:
    print(stored["k_block_scale", "scale"].shape[-1], back.shape[-1], float((back - rows["k"]).abs().max()) <= 0.125,
          error.fields["page_size"], error.fields["expected"])
"""
    run = subprocess.run([sys.executable, "-O", "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split(maxsplit=4) == ["3", "80", "True", "48", "a multiple of 32\n"]


# --- tensor scales ---


def test_tensor_scales_belong_to_the_model() -> None:
    plain, scaled = layout(), layout(tensor_scale=0.5)
    assert plain.components == ("full/kv", "full/block_scale")
    assert scaled.components == ("full/kv", "full/block_scale", "full/tensor_scale")
    assert [item.name for item in scaled.constant_regions] == ["tensor_scale"]
    assert {**plain.bytes_per_token(), "full/tensor_scale": 0} == scaled.bytes_per_token()
    assert layout(tensor_scale=0.25) == scaled == layout(tensor_scale="calibrated")
    assert {key: value.tolist() for key, value in Mxfp8(tensor_scale=0.5).constants(scaled).items()} == {
        ("tensor_scale", "k"): [0.5, 0.5], ("tensor_scale", "v"): [0.5, 0.5]
    }  # fmt: skip
    assert Mxfp8(tensor_scale="calibrated").constants(scaled) == {}
    assert Mxfp8().constants(plain) == {}


# --- conversion ---


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"scale_layout": "flat"}, {"scale_layout": "interleaved"}),
        ({"scale_layout": "interleaved"}, {"scale_layout": "flat", "order": "token_major"}),
        ({"order": "token_major"}, {"scale_layout": "interleaved", "arena": "layer_major"}),
    ],
)
@pytest.mark.parametrize("group", [UNLIKE, ODD], ids=["unlike", "odd"])
def test_peers_whose_layouts_differ_convert(source: dict[str, str], target: dict[str, str], group: LayerGroup) -> None:
    """Every element of every layer, from two tensor-parallel ranks into one, over poison."""
    units = {"pages": 4}
    whole = layout(group, 64, **target)
    placed = whole.place(units)
    got = np.full(placed.arena_bytes, 0xFF, np.uint8)
    content = {}
    for rank in (0, 1):
        part = layout(group, 64, shard=Shard(rank, 2), **source)
        at = part.place(units)
        arena = np.random.default_rng(rank).integers(0, 255, at.arena_bytes, np.uint8)
        for layer in part.layers:
            for region in part.regions:
                (field,) = region.data_fields
                for head in field.global_ids("head").tolist():
                    content[layer, region.name, head] = arena[_places(at, layer, region.name, field, 2, head)]
        program = Program.build(part, at, whole, placed)
        assert len(program.moves) <= 40
        assert run_program(program, arena, got, [2], [3]) == program.bytes_per_unit
    for (layer, name, head), want in content.items():
        where = _places(placed, layer, name, whole.region(name).data_fields[0], 3, head)
        np.testing.assert_array_equal(got[where], want, f"{name} of head {head}")


def _places(placed: Any, layer: int, name: str, field: Any, unit: int, head: int) -> Any:
    """Addresses ``[slot, dim or block]`` of one head."""
    buffer, last = placed.buffer(layer, name), "block" if field.has_axis("block") else "dim"
    slot, n = np.meshgrid(np.arange(64), np.arange(field.axis(last).size), indexing="ij")
    local = field.global_ids("head").tolist().index(head)
    return buffer.base + unit * buffer.unit_stride + field.offsets(slot=slot, head=local, **{last: n})


def test_elements_of_another_kind_are_another_format() -> None:
    units = {"pages": 2}
    one, other = layout(), layout(fmt=Mxfp8E5m2)
    with pytest.raises(LayoutError, match="differ in format"):
        Program.build(one, one.place(units), other, other.place(units))


# --- what is refused ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"order": "head"}, "unknown order"),
        ({"scale_layout": "interleave"}, "unknown scale layout"),
        ({"scale_rule": "ceil"}, "unknown scale rule"),
        ({"tensor_scale": 0.0}, "tensor_scale"),
        ({"tensor_scale": True}, "tensor_scale"),
        ({"tensor_scale": "1"}, "tensor_scale"),
        ({"tensor_scale": float("nan")}, "tensor_scale"),
        ({"tensor_scale": 1e-40}, "tensor_scale"),
    ],
)
def test_options_that_are_none(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Mxfp8(**options)
    assert caught.value.fields["format"] == "mxfp8"
    assert caught.value.remedy


def test_groups_that_it_cannot_hold() -> None:
    state = LayerGroup("state", (0,), (TensorSpec("k", 2, 64),), kind="state")
    ring = LayerGroup("full", (0,), (TensorSpec("k", 2, 64),), space="ring")
    empty = LayerGroup("full", (0,), ())
    for group, reason in ((state, "state component"), (ring, "'ring'"), (empty, "no tensors")):
        assert reason in Mxfp8().supports(group).reason
        with pytest.raises(UnsupportedError):
            layout(group)
    with pytest.raises(ConfigError, match="no layer"):
        layout(shard=Shard(layers=(7,)))
    with pytest.raises(LayoutError, match="whole chunks"):
        layout(page_size=16, scale_layout="interleaved")
    with pytest.raises(LayoutError, match="rows do not match"):
        Mxfp8().encode(layout(), {})
