"""What the tuned torch kernels know of plain layouts: which they accept, and their views."""

from __future__ import annotations

from kvcore.contract import FULL, PoolView, Support, unsupported
from kvcore.layout import Layout
from kvcore.spec import LayerGroup

PLAIN = ("bf16", "fp16", "fp32")
_AXES = ("slot", "head", "dim")
_ORDERS = ("head slot dim", "slot head dim")


def plain_layout(device: str, layout: Layout, group: LayerGroup) -> Support:
    if device != "cpu":
        return unsupported(f"runs on the CPU, the device is {device}")
    lost = {tensor.name for tensor in group.tensors} - {region.name for region in layout.regions}
    if lost:
        return unsupported(f"needs a region for every stored tensor, has none for {', '.join(sorted(lost))}")
    for region in layout.regions:
        for field in region.data_fields:
            if field.order not in _ORDERS or tuple(axis.name for axis in field.axes) != _AXES:
                return unsupported(f"knows the axis orders {' and '.join(map(repr, _ORDERS))}, not {field.order!r}")
    return FULL


class PlainTensor:
    """One stored tensor of every layer, as ``[unit, slot, head, dim]`` views."""

    def __init__(self, pool: PoolView, region: str) -> None:
        (field,) = pool.layout.region(region).data_fields
        self.head_major = field.order == _ORDERS[0]
        self.heads, self.dim = field.axis("head").size, field.axis("dim").size
        self.stored = {layer: pool.field(layer, region, field.name) for layer in pool.layout.layers}
        self.dtype = next(iter(self.stored.values())).dtype
        self.tokens = {n: v.permute(0, 2, 1, 3) if self.head_major else v for n, v in self.stored.items()}
