"""Tuned torch kernels on the CPU: rows and units. Attention is in :mod:`kvcore.builtin.kernels.attention`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcore.builtin.kernels.attention import TorchDecode, TorchPrefill
from kvcore.builtin.kernels.plain import PLAIN, PlainTensor, plain_layout
from kvcore.contract import DONE, FULL, BatchPlan, Fence, Format, Kernel, PoolView, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.memory.tensors import int64_tensor, kept_rows
from kvcore.spec import LayerGroup


class TorchStore(Kernel):
    """One indexed write a tensor."""

    op = "store"
    name = "torch_store"
    formats = PLAIN
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Plain layouts on the CPU."""
        return plain_layout(device, layout, group)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        tensors = [(region.name, PlainTensor(pool, region.name)) for region in pool.layout.regions]

        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None = None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            # Nothing derived from slots outlives the call: a copy could name units that changed hands since.
            slots = plan.slots
            some = kept_rows(slots, valid)
            if some is not None:
                slots = slots[some]
            units, offsets = slots // plan.page_size, slots % plan.page_size
            for name, tensor in tensors:
                values = rows[name]
                if tuple(values.shape[1:]) != (tensor.heads, tensor.dim):
                    # Indexed writes broadcast: one head would silently be written to all.
                    expected = [tensor.heads, tensor.dim]
                    raise LayoutError("rows do not match", tensor=name, expected=expected, got=list(values.shape[1:]))
                if some is not None:
                    values = values.index_select(0, some)
                tensor.tokens[layer][units, offsets] = values.to(tensor.dtype)
            return DONE

        return store


class TorchLoad(Kernel):
    """One indexed read a tensor."""

    op = "load"
    name = "torch_load"
    formats = PLAIN
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Plain layouts on the CPU."""
        return plain_layout(device, layout, group)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        tensors = [(region.name, PlainTensor(pool, region.name)) for region in pool.layout.regions]
        page_size = pool.layout.space_of_range(pool.layout.ranges[0].name).tokens_per_unit

        def load(layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            # −1 becomes a slot of the null unit, which holds zeros.
            ids = int64_tensor(slots).clamp(min=0)
            units, offsets = ids // page_size, ids % page_size
            for name, tensor in tensors:
                out[name].copy_(tensor.tokens[layer][units, offsets])
            return DONE

        return load


class TorchCopyUnits(Kernel):
    """Contiguous copies: of whole envelopes on page-major arenas, a run at a time."""

    op = "copy_units"
    name = "torch_copy_units"
    formats = ("*",)
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Everything on the CPU."""
        return FULL if device == "cpu" else unsupported(f"runs on the CPU, the device is {device}")

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        targets = {item.name: pool.unit_views(item.name) for item in pool.layout.ranges}

        def copy_units(range_name: str, src: torch.Tensor, dst: torch.Tensor, after: Fence = DONE) -> Fence:
            after.wait()
            pool.layout.space_of_range(range_name)
            pairs = list(zip(int64_tensor(src).tolist(), int64_tensor(dst).tolist(), strict=True))
            for units in targets[range_name]:
                for source, target in pairs:
                    units[target].copy_(units[source])
            return DONE

        return copy_units


TORCH_KERNELS: tuple[type[Kernel], ...] = (TorchStore, TorchLoad, TorchDecode, TorchPrefill, TorchCopyUnits)
