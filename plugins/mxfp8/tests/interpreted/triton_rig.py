"""Two pools with the same bytes: one for the kernel under test, one for the reference of the core."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.builtin.kernels.reference import ReferenceDecode, ReferenceLoad, ReferencePrefill, ReferenceStore
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import BatchPlan, Kernel
from kvcore.memory.pool import Pool
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2
from kvcore_mxfp8.triton.attend import TritonDecode, TritonPrefill
from kvcore_mxfp8.triton.kernels import TritonLoad, TritonStore

FORMATS = {"mxfp8": Mxfp8, "mxfp8_e5m2": Mxfp8E5m2}
PAIRS: dict[str, tuple[type[Kernel], type[Kernel]]] = {
    "store": (TritonStore, ReferenceStore),
    "load": (TritonLoad, ReferenceLoad),
    "attend_decode": (TritonDecode, ReferenceDecode),
    "attend_prefill": (TritonPrefill, ReferencePrefill),
}

SLOW = pytest.mark.slow
LAYOUTS = [
    {"order": "head_major", "scale_layout": "interleaved"},
    pytest.param({"order": "head_major", "scale_layout": "flat"}, marks=SLOW),
    pytest.param({"order": "token_major", "scale_layout": "flat"}, marks=SLOW),
    pytest.param({"order": "token_major", "scale_layout": "interleaved"}, marks=SLOW),
]
"""Of what is slow in the interpreter, 0.1 s a program, one of each kind is run every time."""


def slow_dtypes(*dtypes: torch.dtype) -> list[Any]:
    """Parameters of slow checks."""
    return [pytest.param(dtype, marks=SLOW) for dtype in dtypes]


@dataclass
class Rig:
    """A small cache, twice. ``k`` and ``v`` are ``(heads, head dim)``."""

    k: tuple[int, int] = (2, 64)
    v: tuple[int, int] = (2, 64)
    query_heads: int = 4
    name: str = "mxfp8"
    page_size: int = 32
    units: int = 12
    arena: str = "page_major"
    options: dict[str, Any] = field(default_factory=dict)
    layers: tuple[int, ...] = (2, 5)

    def __post_init__(self) -> None:
        self.group = LayerGroup(
            "full", self.layers, (TensorSpec("k", *self.k), TensorSpec("v", *self.v)), num_query_heads=self.query_heads
        )
        self.format = FORMATS[self.name](**self.options)
        layout = self.format.layout(self.group, page_size=self.page_size, shard=Shard(), arena=self.arena)
        ranges = {item.name: self.units if item.name == "pages" else 2 for item in layout.ranges}
        self.pools = [Pool(layout, ranges, MemfdPool()) for _ in range(2)]
        for pool in self.pools:
            # NaN in both element formats and as a scale, but for the null unit.
            pool.arena.tensor().fill_(0xFF)
            for view in pool.unit_views("pages"):
                view[0] = 0
            if self.format.tensor_scale is not None:
                for n, layer in enumerate(self.layers):
                    for at, tensor in enumerate("kv"):
                        pool.field(layer, "tensor_scale", tensor)[1] = 0.3 + 1.7 * at + n

    def bind(self, op: str) -> tuple[Any, Any]:
        """The op of the kernel under test over the first pool, and of the reference over the second."""
        return tuple(
            kernel().bind(pool, self.group, self.format) for kernel, pool in zip(PAIRS[op], self.pools, strict=True)
        )  # type: ignore[return-value]

    def bytes(self) -> tuple[np.ndarray, np.ndarray]:
        """Every byte of both arenas, NaN without their sign."""
        for pool in self.pools:
            for layer in self.layers:
                for tensor in "kv":
                    view = pool.field(layer, tensor, "x")
                    least = 0x7F if self.name == "mxfp8" else 0x7D
                    view[(view & 0x7F) >= least] &= 0x7F
        first, second = (pool.arena.tensor().numpy() for pool in self.pools)
        return first, second

    def fill(self, plan: BatchPlan, seed: int = 0) -> None:
        """Store random rows of every position of the plan's rows into both pools, by the reference."""
        generator = torch.Generator().manual_seed(seed)
        for pool in self.pools:
            generator.manual_seed(seed)
            store = ReferenceStore().bind(pool, self.group, self.format)
            for row, length in enumerate(plan.host_lengths):
                at = torch.arange(length)
                slots = plan.page_table[row][at // plan.page_size] * plan.page_size + at % plan.page_size
                for layer in self.layers:
                    rows = {
                        name: torch.randn((length, *shape), generator=generator)
                        for name, shape in (("k", self.k), ("v", self.v))
                    }
                    store(layer, rows, one_row(plan, slots))

    def plan(self, lengths: list[int], new: list[int], seed: int = 0, dead: int = 0) -> BatchPlan:
        """A batch with rows of ``lengths`` tokens, the last ``new`` of each new, over units in random order.

        The first ``dead`` pages of a row name the null unit, as a window leaves them.
        """
        order = torch.randperm(self.units - 1, generator=torch.Generator().manual_seed(seed)) + 1
        # Columns past the used ones and a stride that is not the width, as in the buffers of a store.
        wide = torch.zeros((len(lengths), self.units + 3), dtype=torch.int64)
        at = 0
        for row, length in enumerate(lengths):
            count = -(-length // self.page_size)
            wide[row, :count] = order[at : at + count]
            wide[row, :dead] = 0
            at += count
        assert at <= len(order)
        positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, new, strict=True)])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(new))
        slots = wide[owners, positions // self.page_size] * self.page_size + positions % self.page_size
        indptr = (0, *accumulate(new))
        return BatchPlan(
            1,
            self.page_size,
            torch.tensor(lengths),
            torch.tensor(indptr),
            positions,
            slots,
            wide[:, : self.units],
            tuple(lengths),
            indptr,
        )


def one_row(plan: BatchPlan, slots: torch.Tensor) -> BatchPlan:
    """A plan that stores at ``slots``."""
    empty = torch.empty(0, dtype=torch.int64)
    return BatchPlan(1, plan.page_size, empty, empty, empty, slots, plan.page_table, (len(slots),), (0, len(slots)))
