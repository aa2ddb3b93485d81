"""The formats ``mxfp8`` and ``mxfp8_e5m2``: layout, encode and decode (no torch at import)."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.errors import ConfigError, LayoutError, nearest
from kvcore.layout import ArenaOrder, Layout, SpaceSpec, UnitRange
from kvcore.spec import LayerGroup, Shard
from kvcore_mxfp8.elements import E4M3, E5M2, Element, ScaleRule
from kvcore_mxfp8.regions import (
    MODEL,
    PAGES,
    SCALES,
    TENSOR_SCALE,
    VALUES,
    AxisOrder,
    ScaleLayout,
    page_regions,
    scale_region,
    tensor_scales,
    tensors,
)

if TYPE_CHECKING:
    import torch

_SPACES = ("sequence", "window")
_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127

TensorScale = float | Literal["calibrated"] | None


class Mxfp8(Format):
    """A value is ``element × block scale``, or ``element × block scale × tensor scale``.

    Every stored tensor has two regions: ``<tensor>``, one element a byte, in component ``<group>/kv``; and
    ``<tensor>_block_scale``, one E8M0 byte for every 32 elements of a head, in component ``<group>/block_scale``.

    Args:
        order: ``head_major`` or ``token_major``, as in the plain formats.
        scale_layout: ``flat`` (in the order of the payload) or ``interleaved`` (the chunks that block-scaled matrix units
            read; pages of a multiple of 32 tokens).
        scale_rule: ``rceil`` or ``floor``, see :data:`kvcore_mxfp8.elements.ScaleRule`. What is stored means the same
            under both.
        tensor_scale: None for none. Else one fp32 number for every tensor of a layer, in component
            ``<group>/tensor_scale``, belongs to the model: a number sets all of them, and ``"calibrated"`` leaves them to
            :meth:`kvcore.engine.cache.KVCache.set_constants`, without which no request is served.
    """

    name: ClassVar[str] = "mxfp8"
    element: ClassVar[Element] = E4M3

    def __init__(
        self,
        order: AxisOrder = "head_major",
        scale_layout: ScaleLayout = "flat",
        scale_rule: ScaleRule = "rceil",
        tensor_scale: TensorScale = None,
    ) -> None:
        self.order: AxisOrder = self._one_of("order", order, AxisOrder)
        self.scale_layout: ScaleLayout = self._one_of("scale_layout", scale_layout, ScaleLayout)
        self.scale_rule: ScaleRule = self._one_of("scale_rule", scale_rule, ScaleRule)
        self.tensor_scale = self._checked(tensor_scale)
        self._scales: Mapping[str, torch.Tensor] = {}

    def _one_of(self, option: str, value: Any, words: Any) -> Any:
        known = get_args(words)
        if value not in known:
            fields = {option: value}
            raise ConfigError(
                f"unknown {option.replace('_', ' ')}", format=self.name, **fields, remedy=nearest(str(value), known)
            )
        return value

    def _checked(self, value: Any) -> TensorScale:
        if value is None or value == "calibrated":
            return value  # type: ignore[no-any-return]
        if isinstance(value, bool) or not isinstance(value, int | float) or not _SMALLEST <= value <= _LARGEST:
            raise ConfigError(
                "tensor_scale is neither a normal, positive fp32 number nor a word",
                format=self.name,
                tensor_scale=value,
                remedy='leave it out, give a number, or say "calibrated" and call KVCache.set_constants',
            )
        return float(struct.unpack("<f", struct.pack("<f", value))[0])

    def supports(self, group: LayerGroup) -> Support:
        """Attention groups with at least one stored tensor, whose units are pages. Any head_dim: the last block of a head
        may be shorter."""
        if group.kind != "attention":
            return unsupported(
                f"{self.name} stores tokens; {group.prefix!r} is a {group.kind} and needs a state component"
            )
        if group.space not in _SPACES:
            return unsupported(
                f"{self.name} stores pages of a {' or a '.join(_SPACES)}, not of a {group.space!r} space"
            )
        return FULL if group.tensors else unsupported(f"layer group {group.prefix!r} stores no tensors")

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes: units are pages of ``page_size`` tokens in range ``pages``.

        Raises UnsupportedError for state groups, ConfigError for a shard that holds none of the layers or that heads do
        not divide over, LayoutError for a page size that the scales do not fit.
        """
        self.supports(group).require("the format cannot hold the layer group", format=self.name, group=group.prefix)
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        if not layers:
            raise ConfigError(
                "no layer of the group is on this rank", group=group.prefix, layers=group.layers, shard=shard.layers
            )
        regions = [
            item
            for tensor in group.tensors
            for item in page_regions(
                group,
                tensor,
                shard,
                element=self.element,
                order=self.order,
                scales=self.scale_layout,
                page_size=page_size,
            )
        ]
        spaces = [SpaceSpec(group.name, group.space, "page", page_size, group.space_options)]
        ranges = [UnitRange(PAGES, group.name)]
        if self.tensor_scale is not None:
            regions.append(tensor_scales(group))
            spaces.append(SpaceSpec(MODEL, "constant", "row", 0))
            ranges.append(UnitRange(MODEL, MODEL))
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=layers,
            regions=tuple(regions),
            spaces=tuple(spaces),
            ranges=tuple(ranges),
            arena=arena,
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Divide by the tensor scale in fp32, then quantise: see :func:`kvcore_mxfp8.reference.quantise`."""
        import torch  # here: layouts and sizes need none

        from kvcore_mxfp8.reference import quantise

        names = tensors(layout)
        if set(rows) != set(names):
            raise LayoutError("rows do not match the layout", format=self.name, expected=names, got=sorted(rows))
        out = {}
        for name in names:
            values, scale = rows[name], self._scale_of(name)
            if scale is not None:
                values = values.to(torch.float32) / scale
            elements, scales = quantise(values, self.element, self.scale_rule)
            out[name, VALUES], out[scale_region(name), SCALES] = elements, scales.view(torch.float8_e8m0fnu)
        return out

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Multiply element, block scale and tensor scale in fp32, in this order, then convert. Zero bytes give exactly 0."""
        from kvcore_mxfp8.reference import dequantise

        out = {}
        for name in tensors(layout):
            values = dequantise(elements[name, VALUES], elements[scale_region(name), SCALES])
            scale = self._scale_of(name)
            out[name] = (values if scale is None else values * scale).to(dtype)
        return out

    def _scale_of(self, tensor: str) -> torch.Tensor | float | None:
        if self.tensor_scale is None or tensor in self._scales:
            return self._scales.get(tensor)
        if self.tensor_scale == "calibrated":
            raise ConfigError(
                "tensor scales are calibrated and were not given",
                format=self.name,
                tensor=tensor,
                remedy="use Format.with_constants",
            )
        return self.tensor_scale

    def constants(self, layout: Layout) -> Mapping[tuple[str, str], torch.Tensor]:
        """The tensor scale of the option, for every tensor of every layer; none where they are calibrated."""
        import torch

        if not isinstance(self.tensor_scale, float):
            return {}
        return {(TENSOR_SCALE, name): torch.full((len(layout.layers),), self.tensor_scale) for name in tensors(layout)}

    def check_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Tensor scales are positive, normal fp32 numbers: others lose every value, or make it NaN."""
        for (region, name), values in constants.items():
            for layer, value in zip(layout.layers, values.tolist(), strict=True):
                if region == TENSOR_SCALE and not _SMALLEST <= value <= _LARGEST:
                    raise ConfigError(
                        "a tensor scale is not a normal, positive fp32 number",
                        format=self.name,
                        group=layout.group,
                        layer=layer,
                        tensor=name,
                        got=value,
                        remedy="calibrate again: a scale is the largest magnitude over the largest that is to be stored",
                    )

    def with_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> Mxfp8:
        """The format with the tensor scales of one layer."""
        bound = type(self)(self.order, self.scale_layout, self.scale_rule, self.tensor_scale)
        bound._scales = {name: constants[TENSOR_SCALE, name] for name in tensors(layout)}
        return bound


class Mxfp8E5m2(Mxfp8):
    """The same with e5m2 elements: 2 bits of mantissa, and a range inside a block of 2**31."""

    name: ClassVar[str] = "mxfp8_e5m2"
    element: ClassVar[Element] = E5M2
