"""The ``kivi2`` format: its layout, encode and decode (no torch at import).

After KIVI (Liu et al., 2024, arXiv:2402.02750): keys have outliers in few channels, so their scales belong to a channel;
values have none, so theirs belong to a token. What a scale of a channel spans has to be complete before it can be
quantised, so the newest tokens stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from kvcore.contract import (
    FULL,
    ArenaOrder,
    Axis,
    BlockOf,
    Field,
    Format,
    LayerGroup,
    Layout,
    Op,
    Region,
    Shard,
    SpaceSpec,
    Support,
    TensorSpec,
    UnitRange,
    region,
    unsupported,
)
from kvcore.errors import ConfigError

if TYPE_CHECKING:
    import torch

GROUP = 32
"""Tokens of a group: what a key's scale spans, and a unit of the range ``groups``."""
BLOCK = 32
"""Channels of a value that share a scale."""
CODES_PER_BYTE = 4
NEWEST = 2 * GROUP
"""Attention reads the newest ``GROUP`` to ``2 * GROUP - 1`` tokens in fp16."""
RING = NEWEST + GROUP
"""fp16 rows of a request; what it has more than ``NEWEST`` is how many rejected tokens it survives."""

RECENT = "recent"
GROUPS = "groups"
PARTS = ("", "_scale", "_zero")
"""Regions of a tensor's groups, after its name."""


class Kivi2(Format):
    """2 bits a value, with a scale and a zero point in fp16; the newest tokens in fp16.

    Every group of 32 tokens is a unit of the range ``groups``, written when its last token is stored: for keys a scale for
    every channel over the 32 tokens, for values one for every 32 channels of a token. The newest tokens lie in a ring of
    96 rows in the range ``recent``.
    """

    name: ClassVar[str] = "kivi2"
    encodes: Literal["tokens", "units"] = "units"
    max_error = 1 / 3  # of a run whose values are as far below zero as above, half a step
    magnitudes = (1e-3, 1e3)  # below, scales have too few bits in fp16
    ops: tuple[Op, ...] = ("store", "attend_decode", "attend_prefill", "copy_units")

    def supports(self, group: LayerGroup) -> Support:
        """Full attention over ``k`` and ``v`` with equally many heads of whole blocks."""
        if group.kind != "attention" or group.space != "sequence":
            return unsupported(f"kivi2 holds full attention; {group.prefix!r} is {group.kind} over a {group.space}")
        if sorted(tensor.name for tensor in group.tensors) != ["k", "v"]:
            return unsupported(f"kivi2 holds k and v, not {', '.join(t.name for t in group.tensors) or 'nothing'}")
        if group.tensor("k").num_heads != group.tensor("v").num_heads:
            return unsupported("kivi2 needs as many heads in v as in k")
        for tensor in group.tensors:
            if tensor.head_dim % BLOCK:
                return unsupported(f"head_dim {tensor.head_dim} of {tensor.name!r} is not a multiple of {BLOCK}")
        return FULL

    def sample_groups(self) -> tuple[LayerGroup, ...]:
        """Heads that share keys, and keys and values of unequal width."""
        equal, unequal = ((TensorSpec("k", 2, wide), TensorSpec("v", 2, BLOCK)) for wide in (BLOCK, 2 * BLOCK))
        return (
            LayerGroup("full", (0, 1, 3), equal, num_query_heads=4),
            LayerGroup("full", (0,), unequal, num_query_heads=2, role="draft"),
        )

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes. A group is a unit whatever the page size."""
        self.supports(group).require("the format cannot hold the layer group", format=self.name, group=group.prefix)
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        if not layers:
            raise ConfigError("no layer of the group is on this rank", group=group.prefix, shard=shard.layers)
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=layers,
            regions=tuple(item for tensor in group.tensors for item in _regions(group, tensor, shard)),
            spaces=(
                SpaceSpec(RECENT, "ring", "row", 0, (("ring", RING), ("window", NEWEST))),
                SpaceSpec(GROUPS, "compressed", "row", GROUP),
            ),
            ranges=(UnitRange(RECENT, RECENT), UnitRange(GROUPS, GROUPS)),
            arena=arena,
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Quantise whole groups of 32 tokens."""
        from kvcore_kivi2.codes import encode_groups  # here, so that sizing works without torch

        return {
            (name + part, "x"): elements
            for name, values in rows.items()
            for part, elements in zip(PARTS, encode_groups(values, keys=name == "k"), strict=True)
        }

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Whole groups of 32 tokens."""
        from kvcore_kivi2.codes import decode_groups

        return {
            name: decode_groups(*(elements[name + part, "x"] for part in PARTS), keys=name == "k").to(dtype)
            for name in ("k", "v")
        }


def _regions(group: LayerGroup, tensor: TensorSpec, shard: Shard) -> list[Region]:
    """The newest rows, then codes, scales and zero points of the groups."""
    name, width = tensor.name, tensor.head_dim
    head, dim = Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)), Axis("dim", width)
    codes: tuple[Axis, ...]
    scales: tuple[Axis, ...]
    if name == "k":  # a byte holds four tokens of a channel
        codes = (head, dim, Axis("quad", GROUP // CODES_PER_BYTE, blocks=BlockOf("token", GROUP, CODES_PER_BYTE)))
        scales = (head, dim)
    else:  # a byte holds four channels of a token
        token = Axis("token", GROUP)
        codes = (head, token, Axis("quad", width // CODES_PER_BYTE, blocks=BlockOf("dim", width, CODES_PER_BYTE)))
        scales = (head, token, Axis("block", width // BLOCK, blocks=BlockOf("dim", width, BLOCK)))
    parts = (
        (f"{name}_recent", "recent", "fp16", (head, dim), RECENT),
        (name, "kv", "u8", codes, GROUPS),
        (f"{name}_scale", "block_scale", "fp16", scales, GROUPS),
        (f"{name}_zero", "block_scale", "fp16", scales, GROUPS),
    )
    return [
        region(item, f"{group.prefix}/{component}", (_field(dtype, axes),), ranges=(where,))
        for item, component, dtype, axes, where in parts
    ]


def _field(dtype: str, axes: tuple[Axis, ...]) -> Field:
    return Field("x", dtype, " ".join(axis.name for axis in axes), axes)
