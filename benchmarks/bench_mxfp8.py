"""MXFP8 on the CPU: quantise, dequantise, store, load and decode, against copies of as many bytes and against torchao.

Traffic is bytes read plus bytes written. A ratio of 1 means that an op takes as long as a copy with the same traffic.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import Figure, figure, speed_ratio
from kvcore.builtin.kernels_torch import TORCH_KERNELS as ANY_FORMAT
from kvcore.builtin.pools import MemfdPool
from kvcore.contract import AttendParams
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore.stepplan import RangePlan, StepPlan, StepRow
from kvcore.store import Store
from kvcore_mxfp8.elements import BLOCK, E4M3
from kvcore_mxfp8.fast import PIECE, Dequantiser, Quantiser
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.kernels_torch import TORCH_KERNELS
from kvcore_mxfp8.regions import ScaleLayout

PAGE, HEADS, GROUP, DIM = 128, 8, 4, 128
ROWS, CONTEXT = 8, 1024
TOKENS = 8192


def run() -> list[Figure]:
    """Every figure."""
    return [*_values(), *(item for layout in ("flat", "interleaved") for item in _ops(layout))]  # type: ignore[arg-type]


def _copy_of(traffic: int) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    src, dst = torch.ones(traffic // 2, dtype=torch.uint8), torch.zeros(traffic // 2, dtype=torch.uint8)
    return lambda: dst.copy_(src)


def _values() -> list[Figure]:
    count = TOKENS * HEADS
    rows = torch.randn(count, DIM).to(torch.bfloat16)
    codes, scales = torch.empty(count, DIM, dtype=torch.uint8), torch.empty(count, DIM // BLOCK, dtype=torch.uint8)
    back = torch.empty_like(rows)
    copy = _copy_of(rows.nbytes + codes.nbytes + scales.nbytes)
    to, of, step = Quantiser(E4M3, "rceil", DIM), Dequantiser(E4M3, DIM), PIECE // DIM

    def quantise() -> None:
        for at in range(0, count, step):
            to(rows[at : at + step], codes[at : at + step], scales[at : at + step], None)

    def dequantise() -> None:
        of(codes, scales, back, None)

    figures = [
        figure("mxfp8: quantise, bf16", speed_ratio(quantise, copy), "× copy traffic", at_least=0.10),
        figure("mxfp8: dequantise, bf16", speed_ratio(dequantise, copy), "× copy traffic", at_least=0.10),
    ]
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
    except ImportError:
        return figures
    theirs, shapes = to_mx(rows, torch.float8_e4m3fn, BLOCK, ScaleCalculationMode.RCEIL), (torch.float8_e4m3fn, BLOCK)
    there = speed_ratio(quantise, lambda: to_mx(rows, *shapes, ScaleCalculationMode.RCEIL), rounds=5)
    again = speed_ratio(dequantise, lambda: to_dtype(theirs[1], theirs[0], *shapes, torch.bfloat16), rounds=5)
    return [
        *figures,
        figure("mxfp8: quantise, bf16", there, "× torchao", at_least=4.0),
        figure("mxfp8: dequantise, bf16", again, "× torchao", at_least=4.0),
    ]


def _make(layout: ScaleLayout) -> Store:
    tensors = (TensorSpec("k", HEADS, DIM), TensorSpec("v", HEADS, DIM))
    model = ModelSpec("bench", (LayerGroup("full", (0, 1), tensors, HEADS * GROUP),), "bf16")
    fmt = Mxfp8(scale_layout=layout)
    placed = fmt.layout(model.groups[0], page_size=PAGE, shard=Shard(), arena="page_major")
    return Store(
        model,
        {"full": placed},
        {"full": fmt},
        {"full": {"pages": ROWS * CONTEXT // PAGE + 1}},
        [MemfdPool()],
        [kernel() for kernel in (*TORCH_KERNELS, *ANY_FORMAT)],
        max_rows=ROWS,
        max_tokens=ROWS * CONTEXT,
    )


def _plan(step: int, start: int, count: int) -> StepPlan:
    """All rows alike, on shuffled units."""
    pages = -(-(start + count) // PAGE)
    units = np.random.default_rng(0).permutation(ROWS * CONTEXT // PAGE)[: ROWS * pages] + 1
    none = np.empty(0, np.int64)
    part = RangePlan("full", "pages", np.arange(ROWS + 1) * pages, units, none, none, none)
    return StepPlan(step, tuple(StepRow(str(row), 1, start, count) for row in range(ROWS)), (part,))


def _ops(layout: ScaleLayout) -> list[Figure]:
    store = _make(layout)
    tokens = ROWS * CONTEXT
    rows = {name: torch.randn(tokens, HEADS, DIM).to(torch.bfloat16) for name in ("k", "v")}
    store.begin(_plan(1, 0, CONTEXT))
    stored = 2 * tokens * HEADS * (DIM + DIM // BLOCK)
    copy = _copy_of(stored + sum(values.nbytes for values in rows.values()))
    write = speed_ratio(lambda: store.store(0, rows), copy)
    slots = torch.randperm(tokens, generator=torch.Generator().manual_seed(1)) + PAGE
    out = {name: torch.empty_like(values) for name, values in rows.items()}
    read = speed_ratio(lambda: store.load(0, slots, out), copy)
    store.begin(_plan(2, CONTEXT - 1, 1))
    few = {name: values[:ROWS].clone() for name, values in rows.items()}
    q = torch.randn(ROWS, HEADS * GROUP, DIM).to(torch.bfloat16)
    answer, params = torch.empty_like(q), AttendParams(DIM**-0.5)
    k, v = (torch.randn(ROWS, HEADS, CONTEXT, DIM).to(torch.bfloat16) for _ in range(2))
    folded = q.view(ROWS, HEADS, GROUP, DIM)
    dense = speed_ratio(
        lambda: store.attend(0, q, answer, params), lambda: scaled_dot_product_attention(folded, k, v), rounds=7
    )
    small = _microseconds(lambda: store.store(0, few))
    store.close()
    return [
        figure(f"mxfp8: store, {tokens} tokens, {layout}", write, "× copy traffic"),
        figure(f"mxfp8: load, {tokens} shuffled tokens, {layout}", read, "× copy traffic"),
        figure(f"mxfp8: store, {ROWS} tokens, {layout}", small, "µs"),
        figure(f"mxfp8: paged decode, {ROWS} × {CONTEXT}, {layout}", dense, "× dense torch attention in bf16"),
    ]


def _microseconds(work: Callable[[], object], calls: int = 50) -> float:
    times = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(calls):
            work()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(times)


if __name__ == "__main__":
    for item in run():
        print(f"{item['name']:60} {item['value']:.3g} {item['unit']} {item['goal']}")
