"""The bytes: regions of payload, block scales and tensor scales (no torch)."""

from __future__ import annotations

import math
from typing import Literal

from kvcore.errors import LayoutError
from kvcore.layout import Axis, BlockOf, Field, Layout, Region, region
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.elements import BLOCK, Element

AxisOrder = Literal["head_major", "token_major"]
ScaleLayout = Literal["flat", "interleaved"]

PAGES = "pages"
"""Unit range of what is stored per token."""

MODEL = "model"
"""Unit range of what belongs to the model."""

VALUES = "x"
SCALES = "scale"
TENSOR_SCALE = "tensor_scale"

ORDERS: dict[str, str] = {"head_major": "head slot dim", "token_major": "slot head dim"}
_FLAT: dict[str, str] = {"head_major": "head slot block", "token_major": "slot head block"}

_ROWS = 32
"""Tokens of a page with interleaved scales are a multiple of this."""

_CHUNK_ROWS, _CHUNK_BLOCKS = 128, 4
"""A chunk of interleaved scales: 128 tokens by 4 blocks, 512 bytes."""


def scale_region(tensor: str) -> str:
    """Name of the region of a tensor's block scales."""
    return f"{tensor}_block_scale"


def tensors(layout: Layout) -> tuple[str, ...]:
    """Names of the stored tensors of a layout."""
    return tuple(item.name for item in layout.moving_regions if item.data_fields[0].name == VALUES)


def page_regions(
    group: LayerGroup,
    tensor: TensorSpec,
    shard: Shard,
    *,
    element: Element,
    order: AxisOrder,
    scales: ScaleLayout,
    page_size: int,
) -> tuple[Region, Region]:
    """Payload and block scales of one tensor. Raises LayoutError for a page that interleaved scales do not fit."""
    lead = (Axis("slot", page_size), Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)))
    values = Field(VALUES, element.dtype, ORDERS[order], (*lead, Axis("dim", tensor.head_dim)))
    count = -(-tensor.head_dim // BLOCK)
    blocks = BlockOf("dim", tensor.head_dim, BLOCK, tail="padded" if tensor.head_dim % BLOCK else "exact")
    stored = -(-count // _CHUNK_BLOCKS) * _CHUNK_BLOCKS if scales == "interleaved" else count
    block = Axis("block", count, padded=stored, blocks=blocks)
    axes = (*lead, block)
    text = _interleaved(page_size) if scales == "interleaved" else _FLAT[order]
    return (
        region(tensor.name, f"{group.prefix}/kv", (values,), ranges=(PAGES,)),
        region(
            scale_region(tensor.name),
            f"{group.prefix}/block_scale",
            (Field(SCALES, "e8m0", text, axes),),
            ranges=(PAGES,),
        ),
    )


def _interleaved(page_size: int) -> str:
    """The order of block-scaled matrix units: chunks of 128 tokens by 4 blocks, in which each row holds 4 tokens that are
    32 apart. A page that 128 does not divide has chunks of as many tokens, 32 or 64, as divide it."""
    if page_size % _ROWS:
        raise LayoutError(
            "interleaved scales need whole chunks in a page",
            page_size=page_size,
            expected=f"a multiple of {_ROWS}",
            remedy='choose another page size, or scale_layout = "flat"',
        )
    rows = math.gcd(page_size, _CHUNK_ROWS)
    inner = _CHUNK_BLOCKS
    return f"head slot//{rows} block//{inner} slot%{_ROWS} slot//{_ROWS}%{rows // _ROWS} block%{inner}"


def tensor_scales(group: LayerGroup) -> Region:
    """One fp32 number for every tensor of a layer."""
    fields = [Field(tensor.name, "fp32", "", (), offset=4 * n) for n, tensor in enumerate(group.tensors)]
    return region(TENSOR_SCALE, f"{group.prefix}/{TENSOR_SCALE}", fields, ranges=(MODEL,))
