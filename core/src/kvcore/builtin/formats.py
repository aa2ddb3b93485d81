"""The plain formats: values stored as they are, in bf16, fp16 or fp32 (no torch at import)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.errors import ConfigError, LayoutError, nearest
from kvcore.layout import ArenaOrder, Axis, Field, Layout, Region, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, Shard, TensorSpec

if TYPE_CHECKING:
    import torch

AxisOrder = Literal["head_major", "token_major"]
_ORDERS: dict[str, str] = {"head_major": "head slot dim", "token_major": "slot head dim"}

FIELD = "x"
"""The one data field of every region of a plain format."""

RANGE = "pages"
"""The one unit range of a plain format."""

_SPACES = ("sequence", "window")


class PlainFormat(Format):
    """One region per stored tensor, named like it, with one field ``x``; all of them in component ``<prefix>/kv``.

    A value that the dtype cannot hold becomes what torch's conversion makes of it: rounding to nearest even, and
    infinity past the largest finite value (65504 in fp16).

    Args:
        order: ``head_major`` (``head slot dim``: a head range of a page is one piece) or ``token_major``
            (``slot head dim``: a token of a page is one piece).
    """

    dtype: ClassVar[str]

    def __init__(self, order: AxisOrder = "head_major") -> None:
        if order not in get_args(AxisOrder):
            raise ConfigError("unknown axis order", format=self.name, order=order, remedy=nearest(str(order), _ORDERS))
        self.order = order

    def supports(self, group: LayerGroup) -> Support:
        """Attention groups with at least one stored tensor, whose units are pages: a sequence or a window."""
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
        not divide over, LayoutError for a page size below 1.
        """
        self.supports(group).require("the format cannot hold the layer group", format=self.name, group=group.prefix)
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        if not layers:
            raise ConfigError(
                "no layer of the group is on this rank", group=group.prefix, layers=group.layers, shard=shard.layers
            )
        space = SpaceSpec(group.name, group.space, "page", page_size, group.space_options)
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=layers,
            regions=tuple(self._region(group, tensor, page_size, shard) for tensor in group.tensors),
            spaces=(space,),
            ranges=(UnitRange(RANGE, group.name),),
            arena=arena,
        )

    def _region(self, group: LayerGroup, tensor: TensorSpec, page_size: int, shard: Shard) -> Region:
        axes = (
            Axis("slot", page_size),
            Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)),
            Axis("dim", tensor.head_dim),
        )
        field = Field(FIELD, self.dtype, _ORDERS[self.order], axes)
        return region(tensor.name, f"{group.prefix}/kv", (field,), ranges=(RANGE,))

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Convert to the storage dtype."""
        # Sizing and layouts work without torch: only encoding needs it.
        from kvcore.memory.tensors import torch_dtype

        names = tuple(item.name for item in layout.regions)
        if set(rows) != set(names):
            raise LayoutError("rows do not match the layout", format=self.name, expected=names, got=sorted(rows))
        return {(name, FIELD): rows[name].to(torch_dtype(self.dtype)) for name in names}

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Convert from the storage dtype."""
        return {item.name: elements[item.name, FIELD].to(dtype) for item in layout.regions}


class Bf16(PlainFormat):
    """bfloat16."""

    name = "bf16"
    dtype = "bf16"


class Fp16(PlainFormat):
    """IEEE half precision."""

    name = "fp16"
    dtype = "fp16"


class Fp32(PlainFormat):
    """IEEE single precision."""

    name = "fp32"
    dtype = "fp32"


PLAIN_FORMATS: tuple[type[Format], ...] = (Bf16, Fp16, Fp32)
