"""Tuned torch attention over plain pages on the CPU: how their pages are gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvcore.builtin.kernels.plain import PLAIN, PlainTensor, plain_layout
from kvcore.contract import Format, Kernel, PoolView, Support
from kvcore.layout import Layout
from kvcore.memory.paged_attention import PageSource, Workspace, attends_keys_and_values, decode, prefill
from kvcore.spec import LayerGroup


class _PlainPages(PageSource):
    """Pages of one tensor, converted where another dtype is asked for."""

    def __init__(self, pool: PoolView, region: str, page_size: int) -> None:
        self.tensor = PlainTensor(pool, region)
        self.heads = self.tensor.heads
        self.exact = frozenset((self.tensor.dtype,))
        self.page_size = page_size
        self.space = Workspace()

    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gather ``pages`` (int64 ``[N]``) in ``dtype``; the result is valid until the next call and may be written."""
        tensor, count = self.tensor, pages.shape[0]
        view = tensor.stored[layer]
        if tensor.head_major:
            # A gather along dim 1 of the whole would be twice as slow: it copies slice by slice through an iterator.
            shape = (tensor.heads, count, self.page_size, tensor.dim)
            raw = self.space.take("stored", shape, tensor.dtype)
            for head in range(tensor.heads):
                torch.index_select(view[:, head], 0, pages, out=raw[head])
        else:
            shape = (count, self.page_size, tensor.heads, tensor.dim)
            raw = torch.index_select(view, 0, pages, out=self.space.take("stored", shape, tensor.dtype))
        if dtype != tensor.dtype:
            raw = self.space.take("converted", shape, dtype).copy_(raw)
        if tensor.head_major:
            return raw.view(tensor.heads, count * self.page_size, tensor.dim)
        return raw.view(count * self.page_size, tensor.heads, tensor.dim).permute(1, 0, 2)


class _TorchAttend(Kernel):
    formats = PLAIN
    priority = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Plain layouts on the CPU with ``k`` and ``v`` of equally many heads."""
        return attends_keys_and_values(group) and plain_layout(device, layout, group)


def _pages(pool: PoolView) -> tuple[_PlainPages, _PlainPages, int]:
    page_size = pool.layout.space_of_range(pool.layout.ranges[0].name).tokens_per_unit
    return _PlainPages(pool, "k", page_size), _PlainPages(pool, "v", page_size), page_size


class TorchDecode(_TorchAttend):
    """Rows of similar length together, padded; each group's queries are folded into the query axis."""

    op = "attend_decode"
    name = "torch_attend_decode"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return decode(*_pages(pool))


class TorchPrefill(_TorchAttend):
    """Row by row, in blocks of queries."""

    op = "attend_prefill"
    name = "torch_attend_prefill"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        return prefill(*_pages(pool))
