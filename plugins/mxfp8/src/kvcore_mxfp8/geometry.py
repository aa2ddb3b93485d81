"""Where the bytes of a stored tensor lie, as numbers that compiled kernels work with (no torch, no Triton)."""

from __future__ import annotations

from typing import NamedTuple

from kvcore.errors import LayoutError
from kvcore.layout import Field, Layout, Placement
from kvcore_mxfp8.elements import E5M2
from kvcore_mxfp8.regions import SCALES, TENSOR_SCALE, VALUES, scale_region

Terms = tuple[tuple[int, int, int], ...]
"""Of one axis: ``(divisor, size, stride)``. Coordinate ``c`` adds ``c // divisor % size * stride`` bytes for each; size 0
stands for no remainder."""

MAX_UNIT_BYTES = 2**31 - 1
"""Offsets inside a unit are 32-bit in Triton kernels. Those of units are 64-bit."""


class Geometry(NamedTuple):
    """One stored tensor.

    Attributes:
        page_size: tokens a unit.
        heads, dim, blocks: what this rank holds of it, and blocks of a head, the shorter last one included.
        columns: blocks of a tile: the next power of two, as tiles of Triton demand.
        unit, scale_unit: bytes from unit to unit.
        head, slot, dims: bytes in a unit of the payload.
        scale_head, scale_slot, scale_block: bytes in a unit of the scales.
        e5m2: the element format; e4m3 otherwise.
        scaled: whether there is a tensor scale.
    """

    page_size: int
    heads: int
    dim: int
    blocks: int
    columns: int
    unit: int
    scale_unit: int
    head: Terms
    slot: Terms
    dims: Terms
    scale_head: Terms
    scale_slot: Terms
    scale_block: Terms
    e5m2: bool
    scaled: bool


def geometry(layout: Layout, placement: Placement, tensor: str) -> Geometry:
    """Read a tensor's geometry off its layout. Raises LayoutError where units of its layers lie unevenly."""
    values = layout.region(tensor).field(VALUES)
    scales = layout.region(scale_region(tensor)).field(SCALES)
    blocks = scales.axis("block").size
    return Geometry(
        page_size=values.axis("slot").size,
        heads=values.axis("head").size,
        dim=values.axis("dim").size,
        blocks=blocks,
        columns=power_of_two(blocks),
        unit=_unit_stride(layout, placement, tensor),
        scale_unit=_unit_stride(layout, placement, scale_region(tensor)),
        head=_terms(values, "head"),
        slot=_terms(values, "slot"),
        dims=_terms(values, "dim"),
        scale_head=_terms(scales, "head"),
        scale_slot=_terms(scales, "slot"),
        scale_block=_terms(scales, "block"),
        e5m2=values.dtype == E5M2.dtype,
        scaled=any(region.name == TENSOR_SCALE for region in layout.constant_regions),
    )


def power_of_two(value: int) -> int:
    """The next power of two, 1 at least."""
    return 1 << (max(1, value) - 1).bit_length()


def _terms(field: Field, axis: str) -> Terms:
    extent = field.axis(axis).extent
    return tuple(
        (term.divisor, term.size if term.divisor * term.size < extent else 0, stride)
        for term, stride in zip(field.terms, field.strides, strict=True)
        if term.axis == axis and term.size > 1
    )


def _unit_stride(layout: Layout, placement: Placement, region: str) -> int:
    strides = {placement.buffer(layer, region).unit_stride for layer in layout.layers}
    if len(strides) > 1:
        raise LayoutError("layers of one region have different unit strides", region=region, got=sorted(strides))
    return strides.pop()
