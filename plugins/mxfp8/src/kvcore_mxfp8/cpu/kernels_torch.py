"""Tuned torch kernels on the CPU. Units are copied by the kernel that copies those of any format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcore.contract import DONE, FULL, BatchPlan, Fence, Format, Kernel, PoolView, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.memory.paged_attention import attends_keys_and_values, decode, prefill
from kvcore.memory.tensors import int64_tensor, kept_rows
from kvcore.spec import LayerGroup
from kvcore_mxfp8.cpu.pages import Gathers, StoredTensor, TensorPages
from kvcore_mxfp8.elements import ScaleRule
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.regions import tensors

FORMATS = ("mxfp8", "mxfp8_e5m2")


def _on_cpu(device: str) -> Support:
    return FULL if device == "cpu" else unsupported(f"runs on the CPU, the device is {device}")


def scale_rule_of(format: Format) -> ScaleRule:
    """The rule of one of these formats. LayoutError for another format."""
    if not isinstance(format, Mxfp8):
        raise LayoutError("the layout is of a format that these kernels do not know", format=format.name)
    return format.scale_rule


def _stored(pool: PoolView, names: tuple[str, ...], format: Format) -> list[StoredTensor]:
    rule = scale_rule_of(format)
    return [StoredTensor(pool, name, rule) for name in names]


class Mxfp8Store(Kernel):
    """Quantise and write, a piece of tokens at a time."""

    op = "store"
    name = "mxfp8_torch_store"
    formats = FORMATS
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Every layout of the formats on the CPU."""
        return _on_cpu(device)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        stored = _stored(pool, tensors(pool.layout), format)

        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None = None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            # Nothing derived from slots outlives the call: a copy could name units that changed hands since.
            slots, some = plan.slots, kept_rows(plan.slots, valid)
            if some is not None:
                slots = slots[some]
            units, offsets = slots // plan.page_size, slots % plan.page_size
            for tensor in stored:
                values = rows[tensor.name]
                if tuple(values.shape[1:]) != (tensor.heads, tensor.dim):
                    raise LayoutError(
                        "rows do not match",
                        tensor=tensor.name,
                        expected=[tensor.heads, tensor.dim],
                        got=list(values.shape[1:]),
                    )
                for at in range(0, len(slots), tensor.rows):
                    stop = min(at + tensor.rows, len(slots))
                    part = values[at:stop] if some is None else values.index_select(0, some[at:stop])
                    tensor.put(layer, units[at:stop], offsets[at:stop], part)
            return DONE

        return store


class Mxfp8Load(Kernel):
    """Read and dequantise, a piece of tokens at a time."""

    op = "load"
    name = "mxfp8_torch_load"
    formats = FORMATS
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Every layout of the formats on the CPU."""
        return _on_cpu(device)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        stored = _stored(pool, tensors(pool.layout), format)

        def load(layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            # −1 becomes a slot of the null unit, which holds zeros.
            ids = int64_tensor(slots).clamp(min=0)
            for tensor in stored:
                units, offsets = ids // tensor.page_size, ids % tensor.page_size
                for at in range(0, len(ids), tensor.rows):
                    stop = at + tensor.rows
                    tensor.take(layer, units[at:stop], offsets[at:stop], out[tensor.name][at:stop])
            return DONE

        return load


class PagedAttend(Kernel):
    """Attention of torch over pages that are dequantised first. What reads them is of :meth:`stored`."""

    formats = FORMATS
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups on the CPU with ``k`` and ``v`` of equally many heads."""
        return attends_keys_and_values(group) and _on_cpu(device)

    def stored(self, pool: PoolView, names: tuple[str, ...], format: Format) -> Sequence[Gathers]:
        """The tensors of a pool."""
        return _stored(pool, names, format)

    def pages(self, pool: PoolView, format: Format) -> tuple[TensorPages, TensorPages, int]:
        """Keys, values and the page size."""
        keys, values = self.stored(pool, ("k", "v"), format)
        return TensorPages(keys), TensorPages(values), keys.page_size


class Mxfp8Decode(PagedAttend):
    """Dequantise the pages of rows of similar length, then attend."""

    op = "attend_decode"
    name = "mxfp8_torch_attend_decode"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return decode(*self.pages(pool, format))


class Mxfp8Prefill(PagedAttend):
    """Dequantise the pages of a row, then attend in blocks of queries."""

    op = "attend_prefill"
    name = "mxfp8_torch_attend_prefill"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return prefill(*self.pages(pool, format))


TORCH_KERNELS: tuple[type[Kernel], ...] = (Mxfp8Store, Mxfp8Load, Mxfp8Decode, Mxfp8Prefill)
