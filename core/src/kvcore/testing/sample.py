"""Models and a format that the suites try things with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.layout import ArenaOrder, Axis, BlockOf, Field, Layout, Region, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, Shard, StatePart, StateSpec, TensorSpec

_KV = (TensorSpec("k", 2, 32), TensorSpec("v", 2, 32))
_LATENT = (TensorSpec("latent", 1, 64, sharded=False), TensorSpec("rope", 1, 32, sharded=False))

_CONV = StateSpec("conv_k", "conv", "fp32", (("channel", 64), ("tap", 3)), "channel", (StatePart(2, 32),))
_REPLICATED = StateSpec("conv_out", "conv", "fp32", (("channel", 24), ("tap", 3)))
_GROUPED = StateSpec(
    "conv",
    "conv",
    "bf16",
    (("channel", 64), ("tap", 3)),
    "channel",
    (StatePart(2, 8), StatePart(2, 8), StatePart(4, 8)),
)
_DELTA = StateSpec("recurrent", "recurrent", "fp32", (("head", 4), ("dim", 8), ("state", 16)), "head", (StatePart(4),))

GROUPS: dict[str, LayerGroup] = {
    "grouped": LayerGroup("full", (0, 1, 3), _KV, num_query_heads=4),
    "unequal": LayerGroup("full", (0,), (TensorSpec("k", 2, 64), TensorSpec("v", 2, 32)), 2, role="draft"),
    "latent": LayerGroup("full", (2, 5), _LATENT, num_query_heads=4),
    "indexed": LayerGroup("full", (0, 1), (*_KV, TensorSpec("index_key", 1, 32, sharded=False)), num_query_heads=4),
}
"""Layer groups a format is tried with: grouped heads, K and V of unequal width, latents, and a third tensor."""

STATE_GROUPS: dict[str, LayerGroup] = {
    "conv": LayerGroup("state", (0, 1, 3), (), kind="state", space="per_request", states=(_CONV, _REPLICATED)),
    "recurrent": LayerGroup("state", (0, 2), (), kind="state", space="per_request", states=(_GROUPED, _DELTA)),
    "draft": LayerGroup("state", (1,), (), kind="state", space="per_request", states=(_DELTA,), role="draft"),
}
"""Layer groups a state component is tried with: short convolutions, one of them replicated, and recurrent states whose
convolution runs over queries, keys and values; the dtypes differ within a slot."""

_BLOCK = 16


def groups_of(kv_format: Format) -> dict[str, LayerGroup]:
    """What a format is tried with: its :meth:`~kvcore.contract.Format.sample_groups`, or :data:`GROUPS` if it has none.

    Named after their place and tensors, for the ids of checks.
    """
    offered = enumerate(kv_format.sample_groups())
    return {f"{n}_{'_'.join(t.name for t in group.tensors)}": group for n, group in offered} or GROUPS


class ThreeComponents(Format):
    """8-bit integers (component ``kv``) with an fp16 scale a block of 16 (``block_scale``), and index keys in bf16
    (``index_key``): three components that have to move together or not at all."""

    name: ClassVar[str] = "three_components"
    magnitudes = (1e-4, 1e3)  # below, the fp16 scale has no bits left

    def supports(self, group: LayerGroup) -> Support:
        """Attention groups whose heads are whole blocks."""
        if group.kind != "attention" or any(t.head_dim % _BLOCK for t in group.tensors):
            return unsupported(f"heads of {group.prefix!r} are not blocks of {_BLOCK} elements")
        return FULL

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """One region a tensor and one a scale; head-major."""
        regions = [item for tensor in group.tensors for item in self._regions(group, tensor, page_size, shard)]
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers),
            regions=tuple(regions),
            spaces=(SpaceSpec(group.name, group.space, "page", page_size, group.space_options),),
            ranges=(UnitRange("pages", group.name),),
            arena=arena,
        )

    def _regions(self, group: LayerGroup, tensor: TensorSpec, page_size: int, shard: Shard) -> list[Region]:
        lead = (Axis("slot", page_size), Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)))
        dim = Axis("dim", tensor.head_dim)
        block = Axis("block", tensor.head_dim // _BLOCK, blocks=BlockOf("dim", tensor.head_dim, _BLOCK))
        if tensor.name == "index_key":
            field = Field("x", "bf16", "head slot dim", (*lead, dim))
            return [region(tensor.name, f"{group.prefix}/index_key", (field,), ranges=("pages",))]
        values = Field("x", "u8", "head slot dim", (*lead, dim))
        scales = Field("scale", "fp16", "slot head block", (*lead, block))
        return [
            region(tensor.name, f"{group.prefix}/kv", (values,), ranges=("pages",)),
            region(f"{tensor.name}_scale", f"{group.prefix}/block_scale", (scales,), ranges=("pages",)),
        ]

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Scale every block so that its largest value becomes 127."""
        out = {}
        for name, values in rows.items():
            if name == "index_key":
                out[name, "x"] = values.to(torch.bfloat16)
                continue
            blocks = _blocks(values.float())
            scale = (blocks.abs().amax(-1) / 127).to(torch.float16)
            divisor = torch.where(scale == 0, 1, scale.float())[..., None]
            signed = (blocks / divisor).round().clamp(-127, 127).to(torch.int8)
            out[name, "x"] = signed.flatten(-2).view(torch.uint8)
            out[f"{name}_scale", "scale"] = scale
        return out

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Inverse of :meth:`encode`."""
        out = {}
        for (name, field), stored in elements.items():
            if name == "index_key":
                out[name] = stored.to(dtype)
            elif field == "x":
                blocks = _blocks(stored.contiguous().view(torch.int8).float())
                out[name] = (blocks * elements[f"{name}_scale", "scale"].float()[..., None]).flatten(-2).to(dtype)
        return out


def _blocks(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(*values.shape[:-1], values.shape[-1] // _BLOCK, _BLOCK)
