"""MXFP8 on the CPU: quantise, dequantise, store, load and decode, against copies of as many bytes and against torchao.

Traffic is bytes read plus bytes written. A ratio of 1 means that an op takes as long as a copy with the same traffic. Goals
are set for the kernels that serve: those that Numba compiles, or those of torch where it is not installed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import Figure, figure, speed_ratio
from kvcore.builtin.kernels.tuned import TORCH_KERNELS as ANY_FORMAT
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import AttendParams, Kernel
from kvcore.memory.store import Store
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore_mxfp8.cpu.fast import PIECE, Dequantiser, Quantiser
from kvcore_mxfp8.cpu.kernels_numba import NUMBA_KERNELS
from kvcore_mxfp8.cpu.kernels_torch import TORCH_KERNELS
from kvcore_mxfp8.elements import BLOCK, E4M3
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.regions import ScaleLayout

PAGE, HEADS, GROUP, DIM = 128, 8, 4, 128
ROWS, CONTEXT = 8, 1024
TOKENS = 8192


def run() -> list[Figure]:
    """Every figure: of torch, and of what Numba compiles where it is installed."""
    kinds = {"torch": TORCH_KERNELS}
    if find_spec("numba") is not None:
        kinds["Numba"] = NUMBA_KERNELS
    ops = (item for kind in kinds for layout in ("flat", "interleaved") for item in _ops(layout, kind, kinds[kind]))  # type: ignore[arg-type]
    return [*_values(list(kinds)), *ops]


def _copy_of(traffic: int) -> Callable[[], object]:
    """A copy that reads and writes so many bytes together."""
    src, dst = torch.ones(traffic // 2, dtype=torch.uint8), torch.zeros(traffic // 2, dtype=torch.uint8)
    return lambda: dst.copy_(src)


def _values(kinds: list[str]) -> list[Figure]:
    count = TOKENS * HEADS
    rows = torch.randn(count, DIM).to(torch.bfloat16)
    codes, scales = torch.empty(count, DIM, dtype=torch.uint8), torch.empty(count, DIM // BLOCK, dtype=torch.uint8)
    back = torch.empty_like(rows)
    copy = _copy_of(rows.nbytes + codes.nbytes + scales.nbytes)
    figures = []
    for kind in kinds:
        quantise, dequantise = {"torch": _by_torch, "Numba": _by_numba}[kind](rows, codes, scales, back)
        quantise()
        made = [(f"mxfp8, {kind}: quantise, bf16", quantise), (f"mxfp8, {kind}: dequantise, bf16", dequantise)]
        serves = kind == kinds[-1]
        goal = 0.10 if serves else None
        figures += [figure(name, speed_ratio(work, copy), "× copy traffic", at_least=goal) for name, work in made]
        figures += _against_torchao(rows, made, goal=4.0 if serves else None)
    return figures


def _by_torch(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, back: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    to, of, step = Quantiser(E4M3, "rceil", DIM), Dequantiser(E4M3, DIM), PIECE // DIM

    def quantise() -> None:
        for at in range(0, len(rows), step):
            to(rows[at : at + step], codes[at : at + step], scales[at : at + step], None)

    return quantise, lambda: of(codes, scales, back, None)


def _by_numba(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, back: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """The kernels on a pool of one row a unit, so that rows, codes and scales are read and written in order."""
    from kvcore_mxfp8.cpu.numba_kernels import load_rows, store_rows

    count, step, none = len(rows), 2 * DIM, np.zeros((2, 1), np.int64)
    slots = torch.arange(count)
    places = (1, 0, count, DIM, DIM // BLOCK, DIM), none, none, np.arange(DIM // BLOCK)
    where = *places, codes.data_ptr(), scales.data_ptr(), (False, True, False, 1.0)
    like = np.uint16(0)

    def quantise() -> int:
        return store_rows(like, rows.data_ptr(), step, step, slots.data_ptr(), 0, count, *where)

    return quantise, lambda: load_rows(like, back.data_ptr(), step, step, slots.data_ptr(), count, *where)


def _against_torchao(
    rows: torch.Tensor, made: list[tuple[str, Callable[[], object]]], goal: float | None
) -> list[Figure]:
    try:
        from torchao.prototype.mx_formats.mx_tensor import ScaleCalculationMode, to_dtype, to_mx
    except ImportError:
        return []
    shapes, rule = (torch.float8_e4m3fn, BLOCK), ScaleCalculationMode.RCEIL
    scales, codes = to_mx(rows, *shapes, rule)
    theirs = (lambda: to_mx(rows, *shapes, rule), lambda: to_dtype(codes, scales, *shapes, torch.bfloat16))
    return [
        figure(name, speed_ratio(work, baseline, rounds=5), "× torchao", at_least=goal)
        for (name, work), baseline in zip(made, theirs, strict=True)
    ]


def _make(layout: ScaleLayout, kernels: Sequence[type[Kernel]]) -> Store:
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
        [kernel() for kernel in (*kernels, *ANY_FORMAT)],
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


def _ops(layout: ScaleLayout, kind: str, kernels: Sequence[type[Kernel]]) -> list[Figure]:
    store = _make(layout, kernels)
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
    what = f"mxfp8, {kind}"
    return [
        figure(f"{what}: store, {tokens} tokens, {layout}", write, "× copy traffic"),
        figure(f"{what}: load, {tokens} shuffled tokens, {layout}", read, "× copy traffic"),
        figure(f"{what}: store, {ROWS} tokens, {layout}", small, "µs", at_most=70 if kind == "Numba" else None),
        figure(f"{what}: paged decode, {ROWS} × {CONTEXT}, {layout}", dense, "× dense torch attention in bf16"),
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
