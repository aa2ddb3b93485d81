"""The ``nvfp4`` format: its layout, encode and decode (no torch at import)."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from kvcore.contract import (
    FULL,
    ArenaOrder,
    Axis,
    BlockOf,
    Field,
    Format,
    LayerGroup,
    Layout,
    Region,
    Shard,
    SpaceSpec,
    Support,
    TensorSpec,
    UnitRange,
    region,
    unsupported,
)
from kvcore.errors import ConfigError, LayoutError

if TYPE_CHECKING:
    import torch

BLOCK = 16
"""Elements of a head that share one scale."""

LARGEST = 6.0
"""Largest E2M1 value."""

LARGEST_SCALE = 448.0
"""Largest e4m3fn value."""

PAGES = "pages"
MODEL = "model"
VALUES = "x"
SCALES = "scale"
TENSOR_SCALES = "tensor_scale"


class Nvfp4(Format):
    """A value is ``e2m1 × block scale × tensor scale``.

    Every stored tensor has two regions: ``<tensor>``, two E2M1 values a byte, in component ``<group>/kv``; and
    ``<tensor>_scale``, one e4m3fn for every 16 elements of a head, in component ``<group>/block_scale``. The region
    ``tensor_scale`` holds one fp32 a stored tensor and layer, in component ``<group>/tensor_scale``: it belongs to the
    model, so peers compare it and refuse one another where it differs.

    Args:
        tensor_scale: what every tensor scale is until the engine sets others: positive and finite. Values up to
            ``tensor scale × 448 × 6`` can be represented.
    """

    name: ClassVar[str] = "nvfp4"
    revision: ClassVar[int] = 2  # 1 had the tensor scale in its options

    def __init__(self, tensor_scale: float = 1.0) -> None:
        if isinstance(tensor_scale, bool) or not isinstance(tensor_scale, int | float):
            raise ConfigError("tensor_scale is a number", format=self.name, tensor_scale=tensor_scale)
        if not _is_normal(tensor_scale):
            raise ConfigError(
                "tensor_scale must be a normal, positive fp32 number", format=self.name, tensor_scale=tensor_scale
            )
        self.tensor_scale: float = struct.unpack("<f", struct.pack("<f", tensor_scale))[0]
        # Block scales that are normal numbers of e4m3 (from 2**-6 on), times the largest E2M1 value.
        self.magnitudes = (2**-6 * 6 * self.tensor_scale, 448 * 6 * self.tensor_scale)
        self._scales: Mapping[str, torch.Tensor] = {}

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
            regions=(*regions, _tensor_scales(group)),
            spaces=(
                SpaceSpec(group.name, group.space, "page", page_size, group.space_options),
                SpaceSpec(MODEL, "constant", "row", 0),
            ),
            ranges=(UnitRange(PAGES, group.name), UnitRange(MODEL, MODEL)),
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
        if set(rows) != set(_tensors(layout)):
            raise LayoutError("rows do not match the layout", expected=_tensors(layout), got=sorted(rows))
        out = {}
        for name, values in rows.items():
            scale = self._scales.get(name, self.tensor_scale)
            out[name, VALUES], out[_scale_region(name), SCALES] = self._quantise(values, scale)
        return out

    def _quantise(self, values: torch.Tensor, tensor_scale: torch.Tensor | float) -> tuple[torch.Tensor, torch.Tensor]:
        import torch  # here: layouts and sizes need none

        from kvcore_nvfp4.e2m1 import pack, to_codes

        scaled = values.float() / tensor_scale
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
            scales = elements[_scale_region(name), SCALES].float() * self._scales.get(name, self.tensor_scale)
            blocks = values.reshape(*scales.shape, BLOCK) * scales[..., None]
            out[name] = blocks.flatten(-2).to(dtype)
        return out

    def constants(self, layout: Layout) -> Mapping[tuple[str, str], torch.Tensor]:
        """The option, for every tensor of every layer."""
        import torch

        names = _tensors(layout)
        return {(TENSOR_SCALES, name): torch.full((len(layout.layers),), self.tensor_scale) for name in names}

    def with_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> Nvfp4:
        """The format with the tensor scales of one layer."""
        bound = Nvfp4(self.tensor_scale)
        bound._scales = {name: constants[TENSOR_SCALES, name] for name in _tensors(layout)}
        return bound


def _tensor_scales(group: LayerGroup) -> Region:
    fields = [Field(tensor.name, "fp32", "", (), offset=4 * n) for n, tensor in enumerate(group.tensors)]
    return region(TENSOR_SCALES, f"{group.prefix}/{TENSOR_SCALES}", fields, ranges=(MODEL,))


def _tensors(layout: Layout) -> tuple[str, ...]:
    return tuple(item.name for item in layout.moving_regions if item.data_fields[0].name == VALUES)


def _scale_region(tensor: str) -> str:
    return f"{tensor}_scale"


def _is_normal(value: float) -> bool:
    """Whether fp32 holds a number as a positive, normal one."""
    return math.isfinite(value) and 2.0**-126 <= value <= 3.4028234e38
