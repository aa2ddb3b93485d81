"""Kernels compiled for the CPU by Numba, where it is installed. Attention is that of torch over pages read by them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvcore.contract import DONE, BatchPlan, Fence, Format, Kernel, PoolView, Support
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.memory.paged_attention import attends_keys_and_values
from kvcore.memory.tensors import int64_tensor
from kvcore.spec import LayerGroup
from kvcore_mxfp8.cpu.kernels_torch import FORMATS, Mxfp8Decode, Mxfp8Prefill, PagedAttend, scale_rule_of
from kvcore_mxfp8.cpu.numba_support import device_support
from kvcore_mxfp8.cpu.pages import Gathers
from kvcore_mxfp8.regions import tensors

if TYPE_CHECKING:
    from kvcore_mxfp8.cpu.numba_tensors import CompiledTensor


def _stored(pool: PoolView, names: tuple[str, ...], format: Format) -> list[CompiledTensor]:
    from kvcore_mxfp8.cpu.numba_tensors import CompiledTensor  # here: it imports Numba

    rule = scale_rule_of(format)
    return [CompiledTensor(pool, name, rule) for name in names]


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


class _CompiledAttend(PagedAttend):
    priority = _Compiled.priority

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups on the CPU with ``k`` and ``v`` of equally many heads, where Numba is installed."""
        return attends_keys_and_values(group) and device_support(device)

    def stored(self, pool: PoolView, names: tuple[str, ...], format: Format) -> Sequence[Gathers]:
        """The tensors of a pool, read by what Numba compiles."""
        return _stored(pool, names, format)


class NumbaDecode(_CompiledAttend, Mxfp8Decode):
    """Dequantise the pages of rows of similar length, then attend with torch."""

    name = "mxfp8_numba_attend_decode"


class NumbaPrefill(_CompiledAttend, Mxfp8Prefill):
    """Dequantise the pages of a row, then attend in blocks of queries with torch."""

    name = "mxfp8_numba_attend_prefill"


NUMBA_KERNELS: tuple[type[Kernel], ...] = (NumbaStore, NumbaLoad, NumbaDecode, NumbaPrefill)
