"""The ``nvfp4`` format: its layout, encode and decode (no torch at import)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.errors import ConfigError, LayoutError
from kvcore.layout import ArenaOrder, Axis, BlockOf, Field, Layout, Region, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, Shard, TensorSpec

if TYPE_CHECKING:
    import torch

BLOCK = 16
"""Elements of a head that share one scale."""

LARGEST = 6.0
"""Largest E2M1 value."""

LARGEST_SCALE = 448.0
"""Largest e4m3fn value."""

PAGES = "pages"
VALUES = "x"
SCALES = "scale"

_BYTES_MEAN = 1
"""Raised when the bytes change their meaning otherwise than by the tensor scale."""


class Nvfp4(Format):
    """A value is ``e2m1 × block scale × tensor scale``.

    Every stored tensor has two regions: ``<tensor>``, two E2M1 values a byte, in component ``<group>/kv``; and
    ``<tensor>_scale``, one e4m3fn for every 16 elements of a head, in component ``<group>/block_scale``.

    Args:
        tensor_scale: fp32 factor of all values, positive and finite. Values up to
            ``tensor_scale × 448 × 6`` can be represented. It is part of the layout's identity: ``revision`` carries its
            bits, so that peers with different tensor scales refuse one another.
    """

    name: ClassVar[str] = "nvfp4"

    def __init__(self, tensor_scale: float = 1.0) -> None:
        if isinstance(tensor_scale, bool) or not isinstance(tensor_scale, int | float):
            raise ConfigError("tensor_scale is a number", format=self.name, tensor_scale=tensor_scale)
        bits = _fp32_bits(tensor_scale)
        if bits is None:
            raise ConfigError(
                "tensor_scale must be a normal, positive fp32 number", format=self.name, tensor_scale=tensor_scale
            )
        self.tensor_scale: float = struct.unpack("<f", struct.pack("<I", bits))[0]
        self.revision = _BYTES_MEAN << 32 | bits  # type: ignore[misc]  # of this instance: what its bytes mean

    def supports(self, group: LayerGroup) -> Support:
        """Attention groups whose heads are whole blocks."""
        if group.kind != "attention":
            return unsupported(f"nvfp4 stores tokens; {group.prefix!r} is a {group.kind}")
        if not group.tensors:
            return unsupported(f"layer group {group.prefix!r} stores no tensors")
        for tensor in group.tensors:
            if tensor.head_dim % BLOCK:
                return unsupported(
                    f"head_dim {tensor.head_dim} of {tensor.name!r} is not a multiple of the {BLOCK} elements of a block"
                )
        return FULL

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes: pages, head-major, values and scales in regions of their own."""
        self.supports(group).require("the format cannot hold the layer group", format=self.name, group=group.prefix)
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        if not layers:
            raise ConfigError("no layer of the group is on this rank", group=group.prefix, shard=shard.layers)
        regions = [item for tensor in group.tensors for item in self._regions(group, tensor, page_size, shard)]
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=layers,
            regions=tuple(regions),
            spaces=(SpaceSpec(group.name, group.space, "page", page_size, group.space_options),),
            ranges=(UnitRange(PAGES, group.name),),
            arena=arena,
        )

    def _regions(self, group: LayerGroup, tensor: TensorSpec, page_size: int, shard: Shard) -> tuple[Region, Region]:
        dim = tensor.head_dim
        lead = (Axis("slot", page_size), Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)))
        pair = Axis("pair", dim // 2, blocks=BlockOf("dim", dim, 2))
        block = Axis("block", dim // BLOCK, blocks=BlockOf("dim", dim, BLOCK))
        values = Field(VALUES, "u8", "head slot pair", (*lead, pair))
        scales = Field(SCALES, "e4m3fn", "head slot block", (*lead, block))
        return (
            region(tensor.name, f"{group.prefix}/kv", (values,), ranges=(PAGES,)),
            region(_scale_region(tensor.name), f"{group.prefix}/block_scale", (scales,), ranges=(PAGES,)),
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Round to the grid of each block, to nearest even, saturating.

        A NaN makes the scale of its block NaN, so that all 16 values read as NaN. Infinity counts as the largest
        representable value; beside it, small values of its block are lost.
        """
        self._check(layout, rows)
        out = {}
        for name, values in rows.items():
            out[name, VALUES], out[_scale_region(name), SCALES] = self._quantise(values)
        return out

    def _quantise(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # here: layouts and sizes need none

        from kvcore_nvfp4.e2m1 import pack, to_codes

        scaled = values.float() / self.tensor_scale
        blocks = scaled.reshape(*scaled.shape[:-1], scaled.shape[-1] // BLOCK, BLOCK)
        # amax() of a block with a NaN is NaN, and clamp() lets it through.
        wanted = (blocks.abs().amax(-1) / LARGEST).clamp(max=LARGEST_SCALE)
        scales = wanted.to(torch.float8_e4m3fn)
        divisor = scales.float()[..., None]
        codes = to_codes(torch.where(divisor > 0, blocks / divisor, torch.zeros_like(blocks)))
        return pack(codes.flatten(-2)), scales

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Multiply value, block scale and tensor scale in fp32, then convert. Zero bytes give exactly 0."""
        from kvcore_nvfp4.e2m1 import from_codes, unpack

        out = {}
        for name in _tensors(layout):
            values = from_codes(unpack(elements[name, VALUES]))
            scales = elements[_scale_region(name), SCALES].float() * self.tensor_scale
            blocks = values.reshape(*scales.shape, BLOCK) * scales[..., None]
            out[name] = blocks.flatten(-2).to(dtype)
        return out

    def _check(self, layout: Layout, rows: Mapping[str, Any]) -> None:
        if layout.revision != self.revision:
            raise LayoutError("layout is of another tensor scale", expected=self.revision, got=layout.revision)
        if set(rows) != set(_tensors(layout)):
            raise LayoutError("rows do not match the layout", expected=_tensors(layout), got=sorted(rows))


def _tensors(layout: Layout) -> tuple[str, ...]:
    return tuple(item.name for item in layout.regions if item.data_fields[0].name == VALUES)


def _scale_region(tensor: str) -> str:
    return f"{tensor}_scale"


def _fp32_bits(value: float) -> int | None:
    """Bits of a positive, normal fp32 number; None for anything else."""
    if not (math.isfinite(value) and 2.0**-126 <= value <= 3.4028234e38):
        return None
    return int(struct.unpack("<I", struct.pack("<f", value))[0])
