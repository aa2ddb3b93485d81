"""Prove the Triton kernels where there is a GPU: ``python scripts/prove_triton.py [--device cuda:0] [--quick]``.

Every check prints a line; the exit code is 1 when any failed. With ``TRITON_INTERPRET=1`` and ``--device cpu --quick`` the
same checks run in Triton's interpreter, so that the script itself is tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from kvcore.builtin.kernels.reference import REFERENCE_KERNELS
from kvcore.builtin.pools.cuda import CudaPool
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import AttendParams, BatchPlan, Format
from kvcore.memory.pool import Pool
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2
from kvcore_mxfp8.regions import ScaleLayout
from kvcore_mxfp8.triton.attend import TRITON_KERNELS

SCALES: tuple[ScaleLayout, ...] = ("flat", "interleaved")
GOALS = {"store": 0.85, "decode": 0.75}
"""Of the device's copy rate: printed with the figures, not checked."""


@dataclass(frozen=True)
class Setting:
    """Where, and how large the figures are."""

    device: str
    quick: bool = False

    def sync(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            torch.cuda.synchronize(self.device)

    def pool(self, format: Format, group: LayerGroup, units: int, page_size: int, arena: Any) -> Pool:
        """A pool on the device, every byte NaN but those of the null unit."""
        layout = format.layout(group, page_size=page_size, shard=Shard(), arena=arena)
        builder = MemfdPool() if self.device == "cpu" else CudaPool()
        pool = Pool(layout, {"pages": units}, builder, self.device)
        pool.arena.tensor().fill_(0xFF)
        for view in pool.unit_views("pages"):
            view[0] = 0
        return pool

    def seconds(self, call: Callable[[], object]) -> float:
        """Median time of a call on the device, over what it takes to launch it."""
        call()
        self.sync()
        times = []
        for _ in range(1 if self.quick else 9):
            began = time.perf_counter()
            for _ in range(1 if self.quick else 5):
                call()
            self.sync()
            times.append((time.perf_counter() - began) / (1 if self.quick else 5))
        return statistics.median(times)


def bind(kernels: Any, op: str, pool: Pool, group: LayerGroup, format: Format) -> Any:
    """The function of an op; AssertionError where the kernel refuses."""
    (kernel,) = [item() for item in kernels if item.op == op]
    answer = kernel.supports(pool.device, pool.layout, group)
    assert answer, f"{kernel.name} refuses: {answer.reason}"
    return kernel.bind(pool, group, format)


def batch(device: str, lengths: list[int], new: list[int], units: int, page_size: int) -> BatchPlan:
    """Rows of ``lengths`` tokens, the last ``new`` of each new, over units in random order."""
    order = torch.randperm(units - 1, generator=torch.Generator().manual_seed(1)) + 1
    table = torch.zeros((len(lengths), -(-max(lengths) // page_size)), dtype=torch.int64)
    at = 0
    for row, length in enumerate(lengths):
        count = -(-length // page_size)
        table[row, :count] = order[at : at + count]
        at += count
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, new, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(new))
    slots = table[owners, positions // page_size] * page_size + positions % page_size
    indptr = (0, *accumulate(new))
    return BatchPlan(
        step=1,
        page_size=page_size,
        lengths=torch.tensor(lengths).to(device),
        query_indptr=torch.tensor(indptr).to(device),
        positions=positions.to(device),
        slots=slots.to(device),
        page_table=table.to(device),
        host_lengths=tuple(lengths),
        host_query_indptr=indptr,
    )


def _groups(setting: Setting) -> Iterator[tuple[Format, LayerGroup, str]]:
    kinds = (Mxfp8, Mxfp8E5m2)
    every = itertools.product(kinds, ("flat", "interleaved"), ("head_major", "token_major"), ("rceil", "floor"))
    widths = ((80, 48), (128, 128))
    for n, (kind, scales, order, rule) in enumerate(every):
        if setting.quick and n not in (0, 15):
            continue
        k, v = widths[n % 2] if setting.quick else widths[n // 2 % 2]
        group = LayerGroup("full", (0, 1), (TensorSpec("k", 2, k), TensorSpec("v", 2, v)), num_query_heads=8)
        yield kind(order, scales, rule), group, ("page_major", "layer_major")[n % 2]  # type: ignore[arg-type]


def rows_are_exact(setting: Setting) -> str:
    """Store and load against the reference, byte for byte, with subnormals, Inf and NaN among the values."""
    checked = 0
    for format, group, arena in _groups(setting):
        pools = [setting.pool(format, group, 12, 64, arena) for _ in range(2)]
        plan = batch(setting.device, [150, 64, 3], [150, 64, 3], 12, 64)
        generator = torch.Generator().manual_seed(2)
        rows = {}
        for tensor in group.tensors:
            exponents = torch.randint(-140, 120, (217, 2, 1), generator=generator).double()
            values = torch.randn((217, 2, tensor.head_dim), generator=generator).double() * 2.0**exponents
            values[5, 0, 3], values[9, 1, 4] = torch.inf, torch.nan
            rows[tensor.name] = values.to(torch.bfloat16).to(setting.device)
        valid = torch.rand(217, generator=generator).to(setting.device) > 0.2
        for kernels, pool in zip((TRITON_KERNELS, REFERENCE_KERNELS), pools, strict=True):
            bind(kernels, "store", pool, group, format)(1, rows, plan, valid)
        least = 0x7F if format.name == "mxfp8" else 0x7D
        for pool, tensor in itertools.product(pools, group.tensors):
            for layer in pool.layout.layers:
                view = pool.field(layer, tensor.name, "x")
                view.copy_(torch.where((view & 0x7F) >= least, view & 0x7F, view))  # NaN without their sign
        assert torch.equal(pools[0].arena.tensor(), pools[1].arena.tensor()), f"store differs: {pools[0].layout}"
        slots = torch.cat([plan.slots[valid], plan.slots.new_tensor([-1, 0])])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            outs = []
            for kernels, pool in zip((TRITON_KERNELS, REFERENCE_KERNELS), pools, strict=True):
                out = {
                    n: torch.zeros((len(slots), *r.shape[1:]), dtype=dtype, device=r.device) for n, r in rows.items()
                }
                bind(kernels, "load", pool, group, format)(1, slots, out)
                outs.append(out)
            for name in rows:
                equal = torch.equal(outs[0][name].nan_to_num(1.5), outs[1][name].nan_to_num(1.5))
                assert equal, f"load differs: {name} {dtype} {pools[0].layout}"
                assert torch.equal(outs[0][name].isnan(), outs[1][name].isnan()), "load differs in NaN"
        checked += 1
    return f"{checked} layouts: store and load equal the reference, byte for byte"


def attention_is_right(setting: Setting) -> str:
    """Decode, in one part and in several, and prefill against the reference in fp64."""
    worst: dict[str, float] = {}
    for n, (format, group, arena) in enumerate(_groups(setting)):
        pool = setting.pool(format, group, 40, 64, arena)
        lengths = [70, 1] if setting.quick else [1500, 1, 64, 129]
        everything = batch(setting.device, lengths, lengths, 40, 64)
        generator = torch.Generator().manual_seed(n)
        rows = {
            t.name: torch.randn((everything.num_tokens, 2, t.head_dim), generator=generator).to(setting.device)
            for t in group.tensors
        }
        bind(REFERENCE_KERNELS, "store", pool, group, format)(0, rows, everything)
        sinks = torch.randn(8, generator=generator).to(setting.device)
        for op, new in (
            ("attend_decode", [1] * len(lengths)),
            ("attend_prefill", [min(length, 5) for length in lengths]),
        ):
            plan = batch(setting.device, lengths, new, 40, 64)
            for dtype, window in itertools.product((torch.bfloat16, torch.float16, torch.float32), (None, 50)):
                if setting.quick and (dtype != torch.bfloat16 or window is None):
                    continue
                k, v = (t.head_dim for t in group.tensors)
                q = torch.randn((plan.num_tokens, 8, k), generator=generator).to(setting.device, dtype)
                params = AttendParams(k**-0.5, window, sinks)
                got = torch.full((plan.num_tokens, 8, v), torch.nan, dtype=dtype, device=setting.device)
                want = torch.full_like(got, torch.nan, dtype=torch.float64)
                bind(TRITON_KERNELS, op, pool, group, format)(0, q, got, plan, params)
                bind(REFERENCE_KERNELS, op, pool, group, format)(0, q, want, plan, params)
                off = float((got.double() - want).abs().max())
                bound = {torch.bfloat16: 2.5e-2, torch.float16: 4e-3, torch.float32: 1e-4}[dtype]
                assert off < bound, f"{op} {dtype} window {window} is off by {off}: {pool.layout}"
                name = f"{op} {str(dtype)[6:]}"
                worst[name] = max(worst.get(name, 0.0), off)
    return "off by at most " + ", ".join(f"{name} {off:.1e}" for name, off in worst.items())


def _copy_rate(setting: Setting) -> float:
    """Bytes read and written a second by a copy."""
    source = torch.zeros((1 << 14) if setting.quick else (1 << 30), dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    return 2 * source.numel() / setting.seconds(lambda: target.copy_(source))


def figures(setting: Setting) -> str:
    """Not checked: store and decode as fractions of the copy rate, and decode against bf16 in torch."""
    heads, dim, page = 1 if setting.quick else 8, 128, 128
    queries = 4 * heads
    rows, length = (1, 128) if setting.quick else (8, 32768)
    units = rows * length // page + 1
    group = LayerGroup(
        "full", (0,), (TensorSpec("k", heads, dim), TensorSpec("v", heads, dim)), num_query_heads=queries
    )
    copy = _copy_rate(setting)
    lines = [f"copy {copy / 1e9:.0f} GB/s (read and written)"]
    for scales in SCALES:
        format = Mxfp8(scale_layout=scales)
        pool = setting.pool(format, group, units, page, "page_major")
        plan = batch(setting.device, [length] * rows, [length] * rows, units, page)
        values = {
            n: torch.randn((rows * length, heads, dim), device=setting.device, dtype=torch.bfloat16) for n in "kv"
        }
        store = bind(TRITON_KERNELS, "store", pool, group, format)
        taken = setting.seconds(partial(store, 0, values, plan))
        stored = 2 * rows * length * heads * (dim + dim // 32)
        rate = (2 * rows * length * heads * dim * 2 + stored) / taken / copy
        lines.append(f"store {scales} {rate:.2f} of it (goal {GOALS['store']})")
        one = batch(setting.device, [length] * rows, [1] * rows, units, page)
        q = torch.randn((rows, queries, dim), device=setting.device, dtype=torch.bfloat16)
        out = torch.empty_like(q)
        attend = bind(TRITON_KERNELS, "attend_decode", pool, group, format)
        taken = setting.seconds(partial(attend, 0, q, out, one, AttendParams(dim**-0.5)))
        lines.append(
            f"decode {scales} {stored / taken / copy:.2f} of it (goal {GOALS['decode']}), {taken * 1e6:.0f} µs"
        )
        # Query heads of a stored head as queries: torch then reads each key once.
        folded = q.view(rows, heads, 4, dim)
        k, v = (values[n].view(rows, length, heads, dim).transpose(1, 2).contiguous() for n in "kv")
        plain = setting.seconds(partial(torch.nn.functional.scaled_dot_product_attention, folded, k, v))
        lines.append(f"bf16 in torch, contiguous, {plain * 1e6:.0f} µs: {plain / taken:.2f} times that")
        pool.close()
    return "; ".join(lines)


CHECKS: tuple[Callable[[Setting], str], ...] = (rows_are_exact, attention_is_right, figures)


def main() -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="few layouts, tiny figures")
    given = parser.parse_args()
    setting = Setting(given.device, given.quick)
    name = torch.cuda.get_device_name(given.device) if given.device != "cpu" else "Triton's interpreter"
    print(f"torch {torch.__version__}, {name}", flush=True)
    failed = 0
    for check in CHECKS:
        began = time.perf_counter()
        try:
            line = f"ok    {check(setting)}"
        except Exception:  # noqa: BLE001 -- printed, and the exit code says so; the other checks still run
            failed += 1
            line = "WRONG " + traceback.format_exc().strip()
        print(f"{check.__name__:<20} {time.perf_counter() - began:6.1f} s  {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
