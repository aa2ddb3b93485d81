"""E2M1: one sign bit, two exponent bits, one mantissa bit; and two of them in a byte."""

from __future__ import annotations

import torch

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of every code without its sign bit (8). There is no infinity and no NaN."""

# Half-way points between neighbours. Ties go to the even code, so those below an even code (0.75, 1.75, 3.5) round up.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def to_codes(values: torch.Tensor) -> torch.Tensor:
    """Round fp32 values to the nearest code, ties to even; past 6 they saturate. NaN gives code 0.

    Returns ``uint8`` of the same shape, 0 … 15; −0 keeps its sign.
    """
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for bound in _TIES_DOWN:
        code += (size > bound).to(torch.uint8)
    for bound in _TIES_UP:
        code += (size >= bound).to(torch.uint8)
    return code | (values.signbit().to(torch.uint8) << 3)


def from_codes(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of codes 0 … 15."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=codes.device)
    return table[codes.to(torch.int64)]


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Two codes a byte along the last axis, the even one in the low half: ``[…, D]`` to ``[…, D / 2]``."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Inverse of :func:`pack`."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
