"""Ops of the plain formats: what a dispatch costs, and the tuned kernels against plain torch on dense tensors."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import Figure, figure, speed_ratio
from kvcore.builtin.formats import PLAIN_FORMATS
from kvcore.builtin.kernels.tuned import TORCH_KERNELS
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import DONE, FULL, OPS, AttendParams, Fence, Format, Kernel, PoolView, Support
from kvcore.layout import Layout
from kvcore.memory.store import Store
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec

PAGE, KV_HEADS, GROUP, DIM = 16, 8, 4, 128
ROWS, CONTEXT = 8, 1024


def run() -> list[Figure]:
    """Dispatch, store, load and decode attention."""
    return [*_dispatch(), *_store("fp32"), *_decode("fp32"), *_decode("bf16")]


def _nothing(*args: object) -> Fence:
    return DONE


def _idle_kernels() -> list[Kernel]:
    """Kernels that do nothing: what is left is the cost of reaching them."""

    class Idle(Kernel):
        formats = ("*",)

        def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
            return FULL

        def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
            return _nothing

    return [type(f"Idle_{op}", (Idle,), {"op": op, "name": f"idle_{op}"})() for op in OPS]


def _make(name: str, kernels: list[Kernel], *, rows: int = ROWS, tokens: int = 8192) -> Store:
    tensors = (TensorSpec("k", KV_HEADS, DIM), TensorSpec("v", KV_HEADS, DIM))
    model = ModelSpec("bench", (LayerGroup("full", (0, 1), tensors, KV_HEADS * GROUP),), name)
    fmt = next(kind for kind in PLAIN_FORMATS if kind.name == name)()
    layout = fmt.layout(model.groups[0], page_size=PAGE, shard=Shard(), arena="page_major")
    units = {"full": {"pages": ROWS * CONTEXT // PAGE + 1}}
    return Store(
        model, {"full": layout}, {"full": fmt}, units, [MemfdPool()], kernels, max_rows=rows, max_tokens=tokens
    )


def _plan(step: int, start: int, count: int) -> StepPlan:
    """All rows alike, on shuffled units."""
    pages = -(-(start + count) // PAGE)
    units = np.random.default_rng(0).permutation(ROWS * CONTEXT // PAGE)[: ROWS * pages] + 1
    none = np.empty(0, np.int64)
    part = RangePlan("full", "pages", np.arange(ROWS + 1) * pages, units, none, none, none)
    return StepPlan(step, tuple(StepRow(str(row), 1, start, count) for row in range(ROWS)), (part,))


def _per_call(work: Callable[[], object], calls: int = 20000) -> float:
    """Best CPU microseconds a call of nine batches (CPU time: other processes do not count)."""
    best = []
    for _ in range(9):
        start = time.thread_time()
        for _ in range(calls):
            work()
        best.append((time.thread_time() - start) / calls * 1e6)
    return min(best)


def _dispatch() -> list[Figure]:
    store = _make("fp32", _idle_kernels())
    store.begin(_plan(1, 0, 1))
    table, plan = store.tables["full"], store.plan("full")
    rows = {name: torch.zeros(ROWS, KV_HEADS, DIM) for name in ("k", "v")}
    direct = _per_call(lambda: _nothing(0, rows, plan, None, DONE))
    bound = _per_call(lambda: table.store(0, rows, plan, None, DONE))
    checked = _per_call(lambda: store.store(0, rows))
    store.close()
    over = max(0.0, bound - direct)
    return [
        Figure(name="dispatch: resolved op over a direct call", value=over, unit="µs", goal="≤ 0.5", met=over <= 0.5),
        Figure(name="dispatch: Store.store with argument checks", value=checked, unit="µs", goal="", met=None),
    ]


def _store(name: str) -> list[Figure]:
    store = _make(name, [kernel() for kernel in TORCH_KERNELS])
    dtype = store.pools["full"].field(0, "k", "x").dtype
    few = {tensor: torch.randn(ROWS, KV_HEADS, DIM).to(dtype) for tensor in ("k", "v")}
    store.begin(_plan(1, 0, 1))
    small = statistics.median(_per_call(lambda: store.store(0, few), 200) for _ in range(3))
    many = {tensor: torch.randn(ROWS * 256, KV_HEADS, DIM).to(dtype) for tensor in ("k", "v")}
    copies = {tensor: torch.zeros_like(values) for tensor, values in many.items()}
    store.begin(_plan(2, 0, 256))

    def copy() -> None:
        for tensor, values in many.items():
            copies[tensor].copy_(values)

    ratio = speed_ratio(lambda: store.store(0, many), copy)
    store.close()
    return [
        Figure(name=f"store, 8 tokens, {name}", value=small, unit="µs", goal="", met=None),
        figure(f"store, 2048 tokens, {name}", ratio, "× dense copy"),
    ]


def _decode(name: str) -> list[Figure]:
    """Paged attention against torch's attention on dense keys and values, its query group folded like ours."""
    store = _make(name, [kernel() for kernel in TORCH_KERNELS])
    for region in ("k", "v"):
        store.pools["full"].field(0, region, "x").normal_()
    store.begin(_plan(1, CONTEXT - 1, 1))
    dtype = store.pools["full"].field(0, "k", "x").dtype
    q = torch.randn(ROWS, KV_HEADS * GROUP, DIM).to(dtype)
    out, params = torch.empty_like(q), AttendParams(DIM**-0.5)
    k, v = (torch.randn(ROWS, KV_HEADS, CONTEXT, DIM).to(dtype) for _ in range(2))
    folded = q.view(ROWS, KV_HEADS, GROUP, DIM)
    ratio = speed_ratio(
        lambda: store.attend(0, q, out, params), lambda: scaled_dot_product_attention(folded, k, v), rounds=9
    )
    store.close()
    return [figure(f"paged decode, {ROWS} × {CONTEXT} tokens, {name}", ratio, "× dense torch attention")]


if __name__ == "__main__":
    for item in run():
        print(f"{item['name']:50} {item['value']:.3g} {item['unit']} {item['goal']}")
