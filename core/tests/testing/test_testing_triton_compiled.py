"""Kernels compiled for chips that are not here: what a launch says shows in the assembly, and what does not fit is seen."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", "3.9", reason="assembly is that of Triton 3.9, which is not installed")

import triton
import triton.language as tl

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.testing.triton import compile_for


@triton.jit
def double(x, out, count, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * tile + tl.arange(0, tile)
    tl.store(out + at, tl.load(x + at, mask=at < count) * 2, mask=at < count)


@triton.jit
def hoards(x, out, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    """Two squares of values at once, in the registers of one warp."""
    row, column = tl.arange(0, tile)[:, None], tl.arange(0, tile)[None, :]
    values = tl.load(x + row * tile + column)
    tl.debug_barrier()
    total = tl.sum(values, 0)[:, None] + tl.sum(values, 1)[None, :]
    tl.store(out + row * tile + column, values * total)


TYPES = {"x": "*fp32", "out": "*fp32", "count": "i32", "other": "*i8"}
NO_FUSION = {"enable_fp_fusion": False}  # said, as the default differs between versions


@pytest.mark.parametrize(
    ("chip", "wide", "narrow"),
    [
        ("sm_90", r"ld\.global\.v4\.b32", r"ld\.global\.b32"),
        ("sm_100", r"ld\.global\.v4\.b32", r"ld\.global\.b32"),
        ("gfx950", r"buffer_load_dwordx4|global_load_dwordx4", r"(?:buffer|global)_load_dword\b"),
    ],
)
def test_compiles_for_a_chip_that_is_not_here(chip: str, wide: str, narrow: str) -> None:
    """What a launch knows to be even is read in words of 16 bytes, and what it does not is not."""
    even = compile_for(double, chip, types=TYPES, constants={"tile": 1024}, even=["x", "out", "count"], **NO_FUSION)
    even.check(uses=[wide], avoids=[narrow], registers=64, shared=0)
    assert (even.kernel, even.chip) == ("double", chip)
    assert even.registers > 0
    odd = compile_for(double, chip, types=TYPES, constants={"tile": 1024}, **NO_FUSION)
    odd.check(uses=[narrow], avoids=[wide])


@pytest.mark.parametrize(("chip", "options"), [("sm_90", {"maxnreg": 40}), ("gfx950", {"waves_per_eu": 6})])
def test_what_does_not_fit_is_seen_as_spilled(chip: str, options: dict[str, int]) -> None:
    """The same kernel fits where nothing limits its registers."""
    given: dict[str, Any] = {"types": TYPES, "constants": {"tile": 64}, "num_warps": 1, **NO_FUSION}
    compile_for(hoards, chip, **given).check()
    found = compile_for(hoards, chip, **given, **options)
    assert found.shared > 0
    with pytest.raises(AssertionError, match=rf"hoards on {chip}: {found.spilled} spilled, 0 allowed"):
        found.check()


def test_the_register_budget_is_that_of_the_options() -> None:
    few, many = (
        compile_for(hoards, "sm_90", types=TYPES, constants={"tile": 64}, num_warps=warps, **NO_FUSION).registers
        for warps in (8, 1)
    )
    assert few < many


@pytest.mark.parametrize(
    ("chip", "types", "constants", "words"),
    [
        ("h100", TYPES, {"tile": 64}, "not the name of a chip"),
        ("sm_90x", TYPES, {"tile": 64}, "not the name of a chip"),
        ("sm_90", {"x": "*fp32"}, {"tile": 64}, r"without_type=\['out', 'count'\]"),
        ("sm_90", TYPES, {"tile": 64, "title": 1}, r"no_arguments=\['title'\]"),
    ],
)
def test_what_cannot_be_compiled_is_said(chip: str, types: Any, constants: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        compile_for(double, chip, types=types, constants=constants)


def test_a_function_that_triton_does_not_compile() -> None:
    with pytest.raises(UnsupportedError, match=r"triton\.jit"):
        compile_for(double.fn, "sm_90", types=TYPES)
