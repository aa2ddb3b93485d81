"""Triton attention in the interpreter against the reference, which is in fp64. Run by test_triton_interpreter.py.

In the interpreter tiles are multiplied in fp32. ``BOUND`` is what its roundings explain: outputs are mixtures of values
of about 1, over at most 200 keys.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from triton_rig import LAYOUTS, SLOW, Rig, slow_dtypes

from kvcore.contract import AttendParams, BatchPlan
from kvcore_mxfp8.triton import attend as triton_attend
from kvcore_mxfp8.triton.attend import Tiles, split_count
from kvcore_mxfp8.triton.support import chip_of

BOUND = 2e-6


def deviation(rig: Rig, op: str, plan: BatchPlan, params: AttendParams, dtype: torch.dtype = torch.float32) -> float:
    """Largest deviation from the reference; outputs start as NaN, and so does whatever is not a key."""
    generator = torch.Generator().manual_seed(9)
    shape = (plan.num_tokens, rig.query_heads)
    q = torch.randn((*shape, rig.k[1]), generator=generator).to(dtype)
    mine, reference = rig.bind(op)
    rig.fill(plan)
    got, want = (torch.full((*shape, rig.v[1]), torch.nan, dtype=dtype) for _ in range(2))
    mine(5, q, got, plan, params)
    exact = torch.full((*shape, rig.v[1]), torch.nan, dtype=torch.float64)
    reference(5, q, exact, plan, params)
    assert exact.isfinite().all()
    assert exact.abs().max() > 0.1
    want.copy_(exact)
    assert got.isfinite().all()
    return float((got.double() - (exact if dtype == torch.float32 else want.double())).abs().max())


def params(
    rig: Rig, plan: BatchPlan, *, window: int | None = None, sinks: bool = False, bias: bool = False
) -> AttendParams:
    generator = torch.Generator().manual_seed(11)
    shape = (plan.num_tokens, rig.query_heads, plan.max_length)
    return AttendParams(
        rig.k[1] ** -0.5,
        window,
        torch.randn(rig.query_heads, generator=generator) if sinks else None,
        torch.randn(shape, generator=generator) if bias else None,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda item: "-".join(item.values()))
@pytest.mark.parametrize("name", ["mxfp8", pytest.param("mxfp8_e5m2", marks=SLOW)])
def test_layouts_and_odd_heads(name: str, layout: dict[str, str]) -> None:
    """Groups of three query heads, K and V of different widths with a shorter last block, tails of pages that are NaN."""
    rig = Rig((2, 80), (2, 48), query_heads=6, name=name, options=layout)
    plan = rig.plan([40, 1], [1, 1])
    assert deviation(rig, "attend_decode", plan, params(rig, plan)) < BOUND
    plan = rig.plan([40, 5], [7, 5])
    assert deviation(rig, "attend_prefill", plan, params(rig, plan)) < BOUND


@pytest.mark.parametrize("op", ["attend_decode", "attend_prefill"])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        pytest.param({"window": 20, "sinks": True}, marks=SLOW),
        pytest.param({"window": 500}, marks=SLOW),
        pytest.param({"sinks": True}, marks=SLOW),
        pytest.param({"bias": True}, marks=SLOW),
        {"window": 9, "sinks": True, "bias": True},
    ],
    ids=lambda item: "-".join(f"{k}={v}" for k, v in item.items()),
)
def test_window_sinks_and_bias(op: str, options: dict[str, Any]) -> None:
    rig = Rig((1, 32), (1, 32), query_heads=4)
    # Queries 63 and 64 share a tile, and the second sees no key of the page of the first through the smallest windows.
    plan = rig.plan([69, 41, 3], [1, 1, 1] if op == "attend_decode" else [10, 9, 3])
    assert deviation(rig, op, plan, params(rig, plan, **options)) < BOUND


@pytest.mark.parametrize("op", ["attend_decode", "attend_prefill"])
def test_dead_pages_of_a_window_are_not_read(op: str) -> None:
    """Pages before the window name the null unit, here one of NaN; a tile of keys begins with one of them."""
    rig = Rig((1, 32), (1, 32), query_heads=2, page_size=16)
    plan = rig.plan([100], [1] if op == "attend_decode" else [6])
    full = params(rig, plan, window=15)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn((plan.num_tokens, 2, 32), generator=generator)
    rig.fill(plan)
    mine, reference = rig.bind(op)
    want = torch.full_like(q, torch.nan)
    reference(5, q, want, plan, full)
    plan.page_table[0, :5] = 0
    rig.pools[0].field(5, "k", "x")[0] = 0x7F
    rig.pools[0].field(5, "v", "x")[0] = 0x7F
    got = torch.full_like(q, torch.nan)
    mine(5, q, got, plan, full)
    assert float((got - want).abs().max()) < BOUND


@pytest.mark.parametrize("page_size", [48, *(pytest.param(size, marks=SLOW) for size in (16, 8))])
def test_tiles_of_keys_that_lie_in_one_page_and_that_cross_pages(page_size: int) -> None:
    rig = Rig((1, 32), (1, 32), query_heads=2, page_size=page_size, units=30)
    plan = rig.plan([100, 17], [1, 1])
    assert deviation(rig, "attend_decode", plan, params(rig, plan, window=50)) < BOUND
    plan = rig.plan([100, 17], [3, 17])
    assert deviation(rig, "attend_prefill", plan, params(rig, plan, window=50)) < BOUND


@pytest.mark.parametrize("sinks", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(
    ("lengths", "splits"), [([130, 5], 8), pytest.param([200], 8, marks=SLOW), pytest.param([70, 1, 31], 4, marks=SLOW)]
)
def test_split_keys_are_put_together(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], splits: int, sinks: bool
) -> None:
    """Short rows leave splits with nothing to see, and a window leaves whole tiles out."""
    rig = Rig((1, 32), (1, 48), query_heads=3)
    plan = rig.plan(lengths, [1] * len(lengths))
    chip = replace(chip_of("cpu"), processors=8)
    monkeypatch.setattr(triton_attend, "chip_of", lambda _: chip)
    monkeypatch.setattr(triton_attend, "decode_tiles", lambda *_: Tiles(16, 16, scaled=False, warps=4, stages=1))
    assert split_count(len(lengths), -(-max(lengths) // 16), 8) == splits
    for window in (None, 30):
        assert deviation(rig, "attend_decode", plan, params(rig, plan, window=window, sinks=sinks)) < BOUND


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow_dtypes(torch.float16)], ids=str)
@pytest.mark.parametrize("op", ["attend_decode", pytest.param("attend_prefill", marks=SLOW)])
def test_half_precision_queries_and_outputs(op: str, dtype: torch.dtype) -> None:
    """Within one step of the output's dtype at the largest output, about 2."""
    rig = Rig((2, 64), (2, 64), query_heads=4)
    plan = rig.plan([40, 3], [1, 1] if op == "attend_decode" else [5, 3])
    assert deviation(rig, op, plan, params(rig, plan), dtype) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("op", ["attend_decode", "attend_prefill"])
def test_tensor_scales(op: str) -> None:
    """A3: keys and values have their own, of each layer."""
    rig = Rig((1, 32), (1, 32), query_heads=2, options={"tensor_scale": "calibrated"})
    plan = rig.plan([60], [1] if op == "attend_decode" else [4])
    assert deviation(rig, op, plan, params(rig, plan, sinks=True)) < BOUND


def test_rows_that_an_invalidated_request_left_do_not_matter() -> None:
    """Its table names the null unit, which reads as zeros."""
    rig = Rig((1, 32), (1, 32), query_heads=2)
    plan = rig.plan([40, 40], [1, 1])
    plan.page_table[1] = 0
    q, got, want = torch.randn(2, 2, 32), torch.full((2, 2, 32), torch.nan), torch.full((2, 2, 32), torch.nan)
    keep = rig.plan([40], [1])
    rig.fill(keep)
    mine, reference = rig.bind("attend_decode")
    mine(5, q, got, plan, AttendParams(0.2))
    reference(5, q, want, plan, AttendParams(0.2))
    assert float((got - want).abs().max()) < BOUND


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("mxfp8_e5m2", marks=SLOW)])
@pytest.mark.parametrize("op", ["attend_prefill", pytest.param("attend_decode", marks=SLOW)])
def test_block_scaled_scores(monkeypatch: pytest.MonkeyPatch, op: str, name: str) -> None:
    """Queries rounded to two terms: as far off as bf16 queries would be, and far nearer than one term would."""
    rig = Rig((2, 80), (2, 48), query_heads=4, name=name)
    plan = rig.plan([70, 9], [1, 1] if op == "attend_decode" else [5, 9])
    tiles = Tiles(16, 16, scaled=True, warps=4, stages=1)
    monkeypatch.setattr(triton_attend, "decode_tiles", lambda *_: tiles)
    monkeypatch.setattr(triton_attend, "prefill_tiles", lambda *_: tiles)
    assert BOUND < deviation(rig, op, plan, params(rig, plan)) < 6e-3
