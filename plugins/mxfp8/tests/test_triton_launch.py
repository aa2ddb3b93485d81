"""What is launched on a GPU: the bound functions run as they are, but for the chip and the launch itself, which are not
here. Every argument is bound, specialised and compiled for sm_90 as Triton would do at the first call."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kvcore.contract import AttendParams

pytest.importorskip("triton", "3.9", reason="assembly is that of Triton 3.9, which is not installed")

DEVICE = 77
"""Kernels are kept by device: of no other test."""


class _Driver:
    """Says which chip there is."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0


def load(path: str, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...], Any]]]:
    """Name, grid and compiled kernel of every launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from kvcore_mxfp8.triton import attend as triton_attend
    from kvcore_mxfp8.triton import kernels as triton_kernels
    from kvcore_mxfp8.triton.support import Chip

    found: list[tuple[str, tuple[int, ...], Any]] = []
    launch = JITFunction.run

    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = launch(self, *arguments, grid=grid, warmup=True, **options)
        found.append((self.__name__, tuple(grid), kernel))
        return kernel

    monkeypatch.setattr(JITFunction, "run", run)
    for module in (triton_attend, triton_kernels):
        monkeypatch.setattr(module, "chip_of", lambda _: Chip(native=True, block_scaled=False, processors=132))
    before = driver._active
    driver.set_active(_Driver())
    yield found
    driver._active = before


@pytest.fixture(scope="module")
def rig() -> Any:
    made = load("interpreted/triton_rig.py", "mxfp8_triton_rig")
    return made.Rig((2, 80), (2, 64), query_heads=8, page_size=64, options={"tensor_scale": 0.5})


def test_store_and_load(rig: Any, launches: list[Any]) -> None:
    plan = rig.plan([70, 3], [9, 3])
    rows = {"k": torch.zeros((12, 2, 80), dtype=torch.bfloat16), "v": torch.zeros((12, 2, 64), dtype=torch.bfloat16)}
    store, _ = rig.bind("store")
    store(2, rows, plan, torch.ones(12, dtype=torch.bool))
    assert [(name, grid) for name, grid, _ in launches] == [("store_rows", (1,)), ("store_rows", (1,))]
    assert "satfinite.e4m3x2" in launches[0][2].asm["ptx"]
    load_, _ = rig.bind("load")
    load_(2, plan.slots, {name: values.clone() for name, values in rows.items()})
    assert [name for name, _, _ in launches[2:]] == ["load_rows", "load_rows"]


def test_decode_splits_keys_where_the_batch_is_small(rig: Any, launches: list[Any]) -> None:
    plan = rig.plan([640], [1])
    q, out = (torch.zeros((1, 8, dim), dtype=torch.bfloat16) for dim in (80, 64))
    attend, _ = rig.bind("attend_decode")
    attend(5, q, out, plan, AttendParams(0.1, None, torch.zeros(8)))
    assert [(name, grid) for name, grid, _ in launches] == [("decode_queries", (1, 2, 8)), ("merge_splits", (1, 8))]
    assert "mma.sync" in launches[0][2].asm["ptx"]
    # A window of 100 lies in at most three tiles of 64.
    attend(5, q, out, plan, AttendParams(0.1, 100, torch.zeros(8)))
    assert [grid for _, grid, _ in launches[2:]] == [(1, 2, 2), (1, 8)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_prefill_in_every_dtype(rig: Any, launches: list[Any], dtype: torch.dtype) -> None:
    """5 s of compiling each. fp16 queries go through tf32, fp32 ones through three terms of it."""
    plan = rig.plan([70, 33], [9, 33])
    q, out = (torch.zeros((42, 8, dim), dtype=dtype) for dim in (80, 64))
    attend, _ = rig.bind("attend_prefill")
    attend(5, q, out, plan, AttendParams(0.1, None, None, torch.zeros((42, 8, 70))))
    ((name, grid, kernel),) = launches
    assert (name, grid) == ("prefill_queries", (3, 2, 2))
    used = "bf16" if dtype == torch.bfloat16 else "tf32"
    assert f".{used}" in kernel.asm["ptx"]
