"""Kernels compiled for the CPU by Numba, where it is installed. Attention is that of torch over pages read by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from kvcore.contract import DONE, BatchPlan, Fence, Format, Kernel, PoolView, Support
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.paged_attention import attends_keys_and_values, decode, prefill
from kvcore.spec import LayerGroup
from kvcore.tensors import int64_tensor
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.kernels_torch import FORMATS
from kvcore_mxfp8.numba_support import device_support
from kvcore_mxfp8.pages import TensorPages
from kvcore_mxfp8.regions import tensors

if TYPE_CHECKING:
    from kvcore_mxfp8.numba_tensors import CompiledTensor


def _stored(pool: PoolView, names: tuple[str, ...], format: Format) -> list[CompiledTensor]:
    from kvcore_mxfp8.numba_tensors import CompiledTensor  # here: it imports Numba

    if not isinstance(format, Mxfp8):
        raise LayoutError("the layout is of a format that these kernels do not know", format=format.name)
    return [CompiledTensor(pool, name, format.scale_rule) for name in names]


class _Compiled(Kernel):
    formats = FORMATS
    priority = 15  # below Triton, which takes the CPU only where it interprets: two of one priority are an error

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Every layout of the formats on the CPU, where Numba is installed."""
        return device_support(device)


class NumbaStore(_Compiled):
    """Quantise and write, row by row."""

    op = "store"
    name = "mxfp8_numba_store"

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
            slots = plan.slots.contiguous()
            if valid is not None:
                if valid.shape != slots.shape:
                    raise LayoutError("valid does not match", expected=list(slots.shape), got=list(valid.shape))
                valid = valid.to("cpu", torch.bool).contiguous()
            for tensor in stored:
                tensor.put(layer, slots, valid, rows[tensor.name])
            return DONE

        return store


class NumbaLoad(_Compiled):
    """Read and dequantise, row by row."""

    op = "load"
    name = "mxfp8_numba_load"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        stored = _stored(pool, tensors(pool.layout), format)

        def load(layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            ids = int64_tensor(slots).contiguous()
            for tensor in stored:
                tensor.take(layer, ids, out[tensor.name])
            return DONE

        return load


class _Attend(_Compiled):
    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups on the CPU with ``k`` and ``v`` of equally many heads, where Numba is installed."""
        return attends_keys_and_values(group) and device_support(device)


def _pages(pool: PoolView, format: Format) -> tuple[TensorPages, TensorPages, int]:
    keys, values = _stored(pool, ("k", "v"), format)
    return TensorPages(keys), TensorPages(values), keys.page_size


class NumbaDecode(_Attend):
    """Dequantise the pages of rows of similar length, then attend with torch."""

    op = "attend_decode"
    name = "mxfp8_numba_attend_decode"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return decode(*_pages(pool, format))


class NumbaPrefill(_Attend):
    """Dequantise the pages of a row, then attend in blocks of queries with torch."""

    op = "attend_prefill"
    name = "mxfp8_numba_attend_prefill"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return prefill(*_pages(pool, format))


NUMBA_KERNELS: tuple[type[Kernel], ...] = (NumbaStore, NumbaLoad, NumbaDecode, NumbaPrefill)
