"""A store without a manager, and slow oracles for it: bytes are addressed and attention is computed by plain loops.

The oracles share no code with kvcore: addresses come from the geometry alone, values from numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvcore.builtin.formats import PLAIN_FORMATS
from kvcore.builtin.kernels.reference import REFERENCE_KERNELS
from kvcore.builtin.kernels.tuned import TORCH_KERNELS
from kvcore.builtin.pools.memfd import MemfdArena, MemfdPool
from kvcore.contract import AttendParams
from kvcore.memory.store import Store
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec

ITEM = {"fp32": 4, "fp16": 2, "bf16": 2}
KERNELS = {
    "reference": [kernel() for kernel in REFERENCE_KERNELS],
    "torch": [kernel() for kernel in TORCH_KERNELS],
    "both": [kernel() for kernel in (*REFERENCE_KERNELS, *TORCH_KERNELS)],
}
FORMATS = {kind.name: kind for kind in PLAIN_FORMATS}


class LazyPool(MemfdPool):
    """Memory that is committed when touched: pools larger than this machine."""

    name = "lazy"

    def allocate(self, nbytes: int, device: str) -> MemfdArena:
        return MemfdArena(nbytes, populate=False)


@dataclass(frozen=True)
class Geometry:
    """A pool's shape, as the oracles see it."""

    format: str = "fp32"
    order: str = "head_major"
    arena: str = "page_major"
    layers: tuple[int, ...] = (0, 1)
    heads: int = 2
    dim_k: int = 8
    dim_v: int = 8
    heads_v: int = 0
    page_size: int = 4
    units: int = 12
    group: int = 2
    """Query heads a key head."""

    @property
    def tensors(self) -> dict[str, tuple[int, int]]:
        return {"k": (self.heads, self.dim_k), "v": (self.heads_v or self.heads, self.dim_v)}

    @property
    def query_heads(self) -> int:
        return self.group * math.lcm(self.heads, self.heads_v or self.heads)

    def model(self) -> ModelSpec:
        tensors = tuple(TensorSpec(name, heads, dim) for name, (heads, dim) in self.tensors.items())
        return ModelSpec("test", (LayerGroup("full", self.layers, tensors, self.query_heads),), "fp32")

    def store(self, kernels: str = "both", *, max_rows: int = 8, max_tokens: int = 256, builder: Any = None) -> Store:
        model = self.model()
        fmt = FORMATS[self.format](order=self.order)
        layout = fmt.layout(model.groups[0], page_size=self.page_size, shard=Shard(), arena=self.arena)
        return Store(
            model,
            {"full": layout},
            {"full": fmt},
            {"full": {"pages": self.units}},
            [builder or MemfdPool()],
            KERNELS[kernels],
            max_rows=max_rows,
            max_tokens=max_tokens,
        )

    # --- the byte oracle ---

    def unit_bytes(self, name: str) -> int:
        heads, dim = self.tensors[name]
        used = heads * dim * self.page_size * ITEM[self.format]
        return (used + 15) // 16 * 16

    def address(self, layer: int, name: str, unit: int, slot: int = 0, head: int = 0, dim: int = 0) -> int:
        """Byte offset of an element in the arena."""
        names = list(self.tensors)
        before = 0
        for other_layer in self.layers:
            for other in names:
                if (other_layer, other) == (layer, name):
                    break
                before += self.unit_bytes(other)
            else:
                continue
            break
        if self.arena == "page_major":
            start = unit * len(self.layers) * sum(self.unit_bytes(n) for n in names) + before
        else:
            start = before * self.units + unit * self.unit_bytes(name)
        heads, width = self.tensors[name]
        if self.order == "head_major":
            element = (head * self.page_size + slot) * width + dim
        else:
            element = (slot * heads + head) * width + dim
        return start + element * ITEM[self.format]

    def value(self, raw: np.ndarray, layer: int, name: str, unit: int, slot: int, head: int, dim: int) -> float:
        """The stored number, decoded from the arena's bytes."""
        at = self.address(layer, name, unit, slot, head, dim)
        item = raw[at : at + ITEM[self.format]].tobytes()
        if self.format == "bf16":
            return float(np.frombuffer(b"\0\0" + item, "<f4")[0])
        return float(np.frombuffer(item, "<f4" if self.format == "fp32" else "<f2")[0])

    def rounded(self, values: torch.Tensor) -> np.ndarray:
        """What the format keeps of fp32 values, by integer arithmetic for bf16 and by numpy for the others."""
        array = values.detach().to(torch.float32).numpy()
        if self.format == "fp32":
            return array.astype(np.float64)
        if self.format == "fp16":
            return array.astype(np.float16).astype(np.float64)
        bits = array.view(np.uint32).astype(np.uint64)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16
        return bits.astype(np.uint32).view(np.float32).astype(np.float64)

    def poison(self, store: Store, byte: int = 0xFF) -> None:
        """Fill everything but the null unit."""
        store.pools["full"].fill(np.arange(1, self.units), byte)


@dataclass
class Book:
    """A stand-in for the manager: hands out units in a given order and writes step plans."""

    units: list[int]
    page_size: int
    step: int = 0
    tables: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def plan(self, rows: Sequence[tuple[str, int]], copies: Sequence[tuple[int, int]] = ()) -> StepPlan:
        """Plan ``(request, new tokens)``; lengths advance at once."""
        self.step += 1
        fresh: list[int] = []
        out, indptr, units = [], [0], []
        for name, count in rows:
            table, start = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            while len(table) * self.page_size < start + count:
                table.append(self.units.pop(0))
                fresh.append(table[-1])
            out.append(StepRow(name, 1, start, count))
            units += table
            indptr.append(len(units))
            self.lengths[name] = start + count
        array = lambda ids: np.array(ids, np.int64)  # noqa: E731
        part = RangePlan(
            "full",
            "pages",
            array(indptr),
            array(units),
            array(fresh),
            array([a for a, _ in copies]),
            array([b for _, b in copies]),
        )
        return StepPlan(self.step, tuple(out), (part,))


def dense(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, position: int, params: AttendParams, bias: np.ndarray | None
) -> np.ndarray:
    """Attention of one query ``[Hq, Dk]`` at ``position`` over ``keys [L, Hk, Dk]``, ``values [L, Hv, Dv]``; ``bias [Hq, L]``."""
    out = np.zeros((q.shape[0], values.shape[2]))
    for head in range(q.shape[0]):
        k = keys[:, head * keys.shape[1] // q.shape[0]]
        v = values[:, head * values.shape[1] // q.shape[0]]
        weights, total = {}, 0.0
        if params.sinks is not None:
            total += math.exp(float(params.sinks[head]))
        for j in range(len(keys)):
            if j > position or (params.window is not None and position - j >= params.window):
                continue
            score = params.sm_scale * float(np.dot(q[head], k[j]))
            if bias is not None:
                score += float(bias[head, j])
            weights[j] = math.exp(score)
            total += weights[j]
        for j, weight in weights.items():
            out[head] += weight / total * v[j]
    return out
