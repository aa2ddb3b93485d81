"""Blocks that are hard to quantise, and exact arithmetic on them: no code is shared with the plugin."""

from __future__ import annotations

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

BLOCK = 32
NUMPY = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
LARGEST = {"e4m3fn": Fraction(448), "e5m2": Fraction(57344)}


def every_bf16_amax(seed: int) -> torch.Tensor:
    """``bf16 [32768, 32]``: every pattern without a sign, NaN and infinity included, is the largest of one block."""
    amax = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    blocks = ((torch.rand((len(amax), BLOCK), generator=generator) * 2 - 1) * amax.float()[:, None]).to(torch.bfloat16)
    place = torch.randint(0, BLOCK, (len(amax),), generator=generator)
    sign = torch.randint(0, 2, (len(amax),), generator=generator) * 2 - 1
    blocks[torch.arange(len(amax)), place] = amax * sign.to(torch.bfloat16)
    return blocks


def adversarial(seed: int, count: int = 4096) -> torch.Tensor:
    """``fp32 [count, 32]``: scales of every size, ties of both elements and their neighbours, zeros of both signs,
    subnormals, infinities, NaN of several patterns, one number beside thousands of binades."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-149, 128, (count, 1)) + rng.integers(-30, 1, (count, BLOCK))
    mantissa = rng.choice(
        [1.0, 1.0625, 1.125, 1.1875, 1.25, 1.5, 1.75, 1.875, 1.9375, 1 + 2**-23, 2 - 2**-23], (count, BLOCK)
    )
    values = np.ldexp(mantissa, np.clip(exponent, -149, 127)).astype(np.float32)
    dense = rng.standard_normal((count, BLOCK)).astype(np.float32)
    values = np.where(rng.random((count, 1)) < 0.5, values, dense * np.ldexp(1.0, rng.integers(-120, 120, (count, 1))))
    values = (values * rng.choice([-1.0, 1.0], values.shape)).astype(np.float32)
    values[rng.random(values.shape) < 0.05] = -0.0
    values[rng.random(count) < 0.02] = 0.0
    bits = values.view(np.uint32)
    for pattern in (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001, 0x807FFFFF, 0x00800000):
        bits[rng.integers(0, count, 12), rng.integers(0, BLOCK, 12)] = pattern
    return torch.from_numpy(values)


def values_of(codes: np.ndarray, dtype: str) -> np.ndarray:
    """fp64 values of 8-bit codes."""
    return codes.view(NUMPY[dtype]).astype(np.float64)


def exact_exponent(amax: float, dtype: str, rule: str) -> int:
    """Biased exponent of the scale of a finite block, in exact arithmetic."""
    if amax == 0:
        return 0
    value, largest = Fraction(amax), LARGEST[dtype]
    if rule == "rceil":
        found = math.frexp(amax)[1] - 20
        while largest * Fraction(2) ** found < value:
            found += 1
        while largest * Fraction(2) ** (found - 1) >= value:
            found -= 1
    else:
        found = math.frexp(amax)[1] - 1 - (math.frexp(float(largest))[1] - 1)
    return max(0, found + 127)
