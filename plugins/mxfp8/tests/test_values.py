"""Scales and elements: bit for bit what torchao's ``to_mx`` computes, and exact arithmetic where it has none."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest
import torch

from kvcore.memory.tensors import torch_dtype
from kvcore_mxfp8.cpu.fast import Dequantiser, Quantiser
from kvcore_mxfp8.elements import BLOCK, E4M3, E5M2, ELEMENTS, Element
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2
from kvcore_mxfp8.reference import dequantise, quantise

Quantise = Callable[[torch.Tensor, Element, str], tuple[torch.Tensor, torch.Tensor]]

ELEMENT = pytest.mark.parametrize("element", [E4M3, E5M2], ids=list(ELEMENTS))
RULE = pytest.mark.parametrize("rule", ["rceil", "floor"])


def tuned(values: torch.Tensor, element: Element, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The CPU kernel's quantiser, over poison."""
    rows = values.reshape(-1, values.shape[-1])
    codes = torch.full(tuple(rows.shape), 0xFF, dtype=torch.uint8)
    scales = torch.full((len(rows), -(-rows.shape[1] // BLOCK)), 0xFF, dtype=torch.uint8)
    make = Quantiser(element, rule, rows.shape[1])  # type: ignore[arg-type]
    for at in range(0, len(rows), 1000):
        make(rows[at : at + 1000], codes[at : at + 1000], scales[at : at + 1000], None)
    return codes.view(torch_dtype(element.dtype)).reshape(values.shape), scales.reshape(*values.shape[:-1], -1)


def untuned(values: torch.Tensor, element: Element, rule: str) -> tuple[torch.Tensor, torch.Tensor]:
    return quantise(values, element, rule)  # type: ignore[arg-type]


@pytest.fixture(params=["untuned", "tuned", "compiled"])
def how(request: pytest.FixtureRequest) -> Quantise:
    """Each way to quantise: the reference, torch as tuned for the CPU, and what Numba compiles."""
    if request.param == "compiled":
        return request.getfixturevalue("compiled").quantise  # type: ignore[no-any-return]
    return tuned if request.param == "tuned" else untuned


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal codes, but for the sign and payload of NaN."""
    ours, theirs = got.view(torch.uint8), want.view(torch.uint8)
    differ = (ours != theirs) & ~(got.float().isnan() & want.float().isnan())
    assert not differ.any(), f"{int(differ.sum())} elements differ, the first at {differ.nonzero()[0].tolist()}"


def same_values(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal, signs of zeros too, but for the sign of NaN."""
    kept = torch.int32 if want.dtype == torch.float32 else torch.int16
    differ = (got.view(kept) != want.view(kept)) & ~(got.isnan() & want.isnan())
    assert not differ.any(), f"{int(differ.sum())} values differ, the first at {differ.nonzero()[0].tolist()}"


@ELEMENT
@RULE
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_bf16_amax_is_what_torchao_makes_of_it(
    blocks: ModuleType, how: Quantise, element: Element, rule: str, dtype: torch.dtype
) -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    values = blocks.every_bf16_amax(1).to(dtype)
    scale, codes = mx.to_mx(values, torch_dtype(element.dtype), BLOCK, getattr(mx.ScaleCalculationMode, rule.upper()))
    elements, scales = how(values, element, rule)
    assert torch.equal(scales, scale.view(torch.uint8).reshape(scales.shape))
    same(elements, codes)


@ELEMENT
@RULE
def test_adversarial_blocks_are_what_torchao_makes_of_them(
    blocks: ModuleType, how: Quantise, element: Element, rule: str
) -> None:
    """Where torchao's logarithm in fp32 rounds, which it does for an amax a few fp32 steps above largest * 2**n, the
    scale is that of exact arithmetic."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    values = torch.cat([blocks.adversarial(seed) for seed in (1, 2)])
    scale, codes = mx.to_mx(values, torch_dtype(element.dtype), BLOCK, getattr(mx.ScaleCalculationMode, rule.upper()))
    theirs = scale.view(torch.uint8).reshape(-1)
    elements, scales = how(values, element, rule)
    ours = scales.reshape(-1)
    odd = (ours != theirs).nonzero().flatten().tolist()
    for row in odd:
        amax = float(values[row].abs().max())
        want = blocks.exact_exponent(amax, element.dtype, rule)
        assert int(ours[row]) == want == int(theirs[row]) + 1, (row, amax)
        assert rule == "rceil"
        step = amax / float(blocks.LARGEST[element.dtype]) / 2.0 ** (want - 128)
        assert 1 < step < 1 + 2**-18, "not next to a power of two"
    keep = torch.ones(len(values), dtype=torch.bool)
    keep[odd] = False
    same(elements[keep], codes[keep])


@ELEMENT
@RULE
def test_scales_are_exact(blocks: ModuleType, how: Quantise, element: Element, rule: str) -> None:
    """All around every power of two and every multiple of the largest element, in fp32 steps."""
    edges = [m * 2.0**e for m in (1.0, 1.75) for e in range(-149, 128)]
    near = torch.tensor(edges, dtype=torch.float32).view(torch.int32)
    amax = torch.cat([near + step for step in (-1, 0, 1, 2)]).clamp(0, 0x7F7FFFFF).view(torch.float32)
    values = torch.zeros(len(amax), BLOCK)
    values[:, 7] = amax
    _, scales = how(values, element, rule)
    want = [blocks.exact_exponent(float(value), element.dtype, rule) for value in amax]
    assert scales.flatten().tolist() == want


@ELEMENT
@RULE
def test_values_are_the_nearest(blocks: ModuleType, how: Quantise, element: Element, rule: str) -> None:
    """Against all 256 codes in fp64: nothing else of the block is nearer, and of two the even code is taken."""
    rng = np.random.default_rng(3)
    values = torch.from_numpy(
        (rng.standard_normal((40, BLOCK)) * 2.0 ** rng.integers(-20, 20, (40, 1))).astype(np.float32)
    )
    values[:, :4] = torch.tensor([0.0, -0.0, 17 / 16, 19 / 16]) * 2.0 ** torch.arange(40)[:, None]
    elements, scales = how(values, element, rule)
    codes = np.array(
        [c for c in range(256) if np.isfinite(blocks.values_of(np.uint8([c]), element.dtype))[0]], np.uint8
    )
    grid = blocks.values_of(codes, element.dtype)
    for row, (block, scale) in enumerate(zip(values.double().numpy(), scales.flatten().tolist(), strict=True)):
        for n, value in enumerate(block / 2.0 ** (scale - 127)):
            gap = np.abs(grid - value)
            best = [int(c) for c in codes[gap == gap.min()] if (c >= 128) == (math.copysign(1, value) < 0)]
            want = min(best, key=lambda c: c % 2)
            assert int(elements.view(torch.uint8)[row, n]) == want, (row, n, value)


def test_largest_elements_and_ties(how: Quantise) -> None:
    """B2: the values of the largest binade are exact, and ties go to the even code."""
    exact = [256.0, 288.0, 320.0, 352.0, 384.0, 416.0, 448.0]
    for rule in ("rceil", "floor"):
        values = torch.zeros(1, 32)
        values[0, :9] = torch.tensor([*exact, 17.0, 19.0])
        elements, scales = how(values, E4M3, rule)
        assert scales.tolist() == [[127]]
        assert elements.float()[0, :9].tolist() == [*exact, 16.0, 20.0]


@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_what_is_too_large_saturates(how: Quantise, rule: str) -> None:
    """B3: finite values saturate at the largest element and never become NaN or infinite; NaN stays NaN and infinity is
    as documented, the same on every version of torch."""
    for element in (E4M3, E5M2):
        top = element.largest
        for large in (465.0 / 448 * top, 1000.0 / 448 * top, -1000.0 / 448 * top):
            values = torch.zeros(1, 32)
            values[0, 3] = large
            elements, scales = how(values, element, rule)
            back = dequantise(elements, scales)[0, 3]
            assert math.isfinite(back)
            if rule == "floor":  # both are above 1.75 in their binade
                assert abs(elements.float()[0, 3]) == top
                assert float(back) == math.copysign(1.75 * 2.0 ** (math.frexp(large)[1] - 1), large)
            else:
                assert abs(float(back) - large) <= abs(large) / (16 if element is E4M3 else 8)
        for value, shown in ((math.inf, math.inf), (-math.inf, -math.inf)):
            values = torch.ones(1, 32)
            values[0, 3] = value
            elements, scales = how(values, element, rule)
            assert elements.float()[0, 3] == math.copysign(top, value)
            assert dequantise(elements, scales)[0, 3] == shown
            assert not dequantise(elements, scales)[0, 4:].any()
        values = torch.ones(1, 64)
        values[0, 3] = math.nan
        elements, scales = how(values, element, rule)
        back = dequantise(elements, scales)
        assert back[0, :32].isnan().all()
        assert back[0, 32:].eq(1).all()


@ELEMENT
@pytest.mark.parametrize("which", ["torch", "numba"])
def test_every_code_under_every_scale(
    request: pytest.FixtureRequest, blocks: ModuleType, element: Element, which: str
) -> None:
    """The reference and the decoders for the CPU against fp64, in fp32 and in bf16."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(256, 1)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(8)[:, None]
    exact = blocks.values_of(codes.numpy(), element.dtype) * np.ldexp(1.0, scales.numpy().astype(np.int64) - 127)
    exact[scales[:, 0].numpy() == 255] = np.nan
    with np.errstate(over="ignore"):
        want = torch.from_numpy(exact.astype(np.float32))
    plain = dequantise(codes.view(torch_dtype(element.dtype)), scales)
    same_values(plain, want)
    decode = Dequantiser(element, 32)
    if which == "numba":
        decode = request.getfixturevalue("compiled").Dequantiser(element, 32)
    for dtype, row in itertools.product((torch.float32, torch.bfloat16), range(len(codes))):
        out = torch.full((1, 32), torch.nan, dtype=dtype)
        decode(codes[row : row + 1], scales[row : row + 1], out, None)  # one block at a time: no rare one beside it
        same_values(out, want[row : row + 1].to(dtype))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.full((2048, 32), torch.nan, dtype=dtype)
        decode(codes, scales, out, None)
        same_values(out, want.to(dtype))


@ELEMENT
@RULE
@pytest.mark.parametrize("dim", [1, 31, 33, 80, 100, 128])
def test_a_shorter_last_block_is_a_block(
    blocks: ModuleType, how: Quantise, element: Element, rule: str, dim: int
) -> None:
    """As if it were filled up with zeros."""
    source = blocks.adversarial(5, 256).reshape(-1, 128)[:, :dim].contiguous()
    elements, scales = how(source, element, rule)
    count = -(-dim // 32)
    assert scales.shape == (64, count)
    for n in range(count):
        block = torch.zeros(64, 32)
        part = source[:, 32 * n : 32 * n + 32]
        block[:, : part.shape[1]] = part
        want, scale = untuned(block, element, rule)
        assert torch.equal(scales[:, n], scale[:, 0])
        same(elements[:, 32 * n : 32 * n + 32].contiguous(), want[:, : part.shape[1]].contiguous())


def test_rceil_never_saturates_and_floor_does() -> None:
    generator = torch.Generator().manual_seed(4)
    values = torch.randn((3000, 64), generator=generator)
    error = {}
    for fmt in (Mxfp8, Mxfp8E5m2):
        for rule in ("rceil", "floor"):
            elements, scales = untuned(values, fmt.element, rule)
            scaled = values.view(-1, 2, 32) / 2.0 ** (scales.double() - 127)[..., None]
            over = float(scaled.abs().max()) > fmt.element.largest
            assert over == (rule == "floor")
            error[fmt.name, rule] = float((dequantise(elements, scales) - values).square().mean().sqrt())
    assert error["mxfp8", "rceil"] < error["mxfp8", "floor"] < error["mxfp8_e5m2", "rceil"]
