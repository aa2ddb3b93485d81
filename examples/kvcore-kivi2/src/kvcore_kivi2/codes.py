"""Two-bit codes with a scale and a zero point (torch)."""

from __future__ import annotations

from typing import NamedTuple

import torch

LEVELS = 4
RUN = 32
"""Values that share a scale."""
LARGEST = 65504.0
"""Largest fp16 number."""
_SHIFTS = (0, 2, 4, 6)


class Quantised(NamedTuple):
    """``value = zero + code * scale``: packed codes ``u8 [*, N / 4]``, scale and zero ``fp16 [*]`` of each run of N."""

    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor


def to_fp16(values: torch.Tensor) -> torch.Tensor:
    """Round to fp16, saturating; NaN stays NaN."""
    return values.float().clamp(-LARGEST, LARGEST).half()


def quantise(values: torch.Tensor) -> Quantised:
    """Quantise each run along the last axis (fp16 ``[*, N]``, N a multiple of 4) between its smallest and largest value.

    Codes are to the nearest step, ties to even. A run of one value gets scale 0 and reads as it was. A NaN makes zero and
    scale of its run NaN, so that the whole run reads as NaN and shows.
    """
    exact = values.float()
    zero = exact.amin(-1, keepdim=True)
    scale = ((exact.amax(-1, keepdim=True) - zero) / (LEVELS - 1)).half().float()
    steps = torch.where(scale > 0, (exact - zero) / scale, 0.0)
    codes = steps.round().clamp(0, LEVELS - 1).to(torch.uint8)
    return Quantised(_pack(codes), scale.squeeze(-1).half(), zero.squeeze(-1).half())


def dequantise(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """The values as fp32 ``[*, N]``."""
    return _unpack(codes).float() * scale.float()[..., None] + zero.float()[..., None]


def encode_groups(rows: torch.Tensor, *, keys: bool) -> Quantised:
    """Quantise rows ``[32 N, H, D]``, a channel of a key over a group and 32 channels of a value of a token together.

    Returns what is stored: codes of keys ``[N, H, D, 8]`` and of values ``[N, H, 32, D / 4]``; scales and zero points of
    keys ``[N, H, D]`` and of values ``[N, H, 32, D / 32]``.
    """
    groups = to_fp16(rows).reshape(len(rows) // RUN, RUN, *rows.shape[1:])
    if keys:
        return quantise(groups.permute(0, 2, 3, 1))
    runs = groups.permute(0, 2, 1, 3)
    found = quantise(runs.reshape(*runs.shape[:-1], rows.shape[-1] // RUN, RUN))
    return found._replace(codes=found.codes.flatten(-2))


def decode_groups(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, keys: bool) -> torch.Tensor:
    """The rows of :func:`encode_groups` as fp32 ``[32 N, H, D]``."""
    if keys:
        values = dequantise(codes, scale, zero).permute(0, 3, 1, 2)
    else:
        runs = codes.reshape(*scale.shape, codes.shape[-1] // scale.shape[-1])
        values = dequantise(runs, scale, zero).flatten(-2).permute(0, 2, 1, 3)
    return values.flatten(0, 1)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Four codes a byte, the first in the lowest bits."""
    quads = codes.reshape(*codes.shape[:-1], codes.shape[-1] // len(_SHIFTS), len(_SHIFTS))
    packed = quads[..., 0].clone()
    for n, shift in enumerate(_SHIFTS[1:], 1):
        packed |= quads[..., n] << shift
    return packed


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    return torch.stack([packed >> shift & (LEVELS - 1) for shift in _SHIFTS], -1).flatten(-2)
