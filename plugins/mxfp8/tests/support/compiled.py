"""Quantise and dequantise by the kernels that Numba compiles, over poison, as tensors of dense rows."""

from __future__ import annotations

import numpy as np
import torch

from kvcore_mxfp8.cpu.numba_kernels import load_rows, store_rows
from kvcore_mxfp8.elements import BLOCK, E5M2, Element

LIKE = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
NONE = np.zeros((2, 1), np.int64)


def places(count: int, dim: int) -> tuple[object, ...]:
    """A unit a row, one head, one token: rows lie one after the other."""
    blocks = -(-dim // BLOCK)
    return (1, 0, count, dim, blocks, dim), NONE, NONE, np.arange(blocks)


def quantise(
    values: torch.Tensor, element: Element, rule: str, tensor_scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``[…, D]`` in bf16 or fp32, as the reference's ``quantise`` has it."""
    rows = values.reshape(-1, values.shape[-1]).contiguous()
    count, dim = rows.shape
    codes = torch.full((count, dim), 0xFF, dtype=torch.uint8)
    scales = torch.full((count, -(-dim // BLOCK)), 0xFF, dtype=torch.uint8)
    step, slots = dim * rows.element_size(), torch.arange(count)
    extra = (element is E5M2, rule == "rceil", tensor_scale is not None, 1.0 if tensor_scale is None else tensor_scale)
    addresses = codes.data_ptr(), scales.data_ptr()
    given = LIKE[rows.dtype], rows.data_ptr(), step, step, slots.data_ptr(), 0, count
    assert store_rows(*given, *places(count, dim), *addresses, extra) == -1
    dtype = getattr(torch, {"e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2"}[element.dtype])
    return codes.view(dtype).reshape(values.shape), scales.reshape(*values.shape[:-1], -1)


class Dequantiser:
    """Called as the plugin's own for torch."""

    def __init__(self, element: Element, dim: int) -> None:
        self.element, self.dim = element, dim

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, tensor_scale: float | None
    ) -> None:
        count, step, slots = len(codes), self.dim * out.element_size(), torch.arange(len(codes))
        extra = (self.element is E5M2, True, tensor_scale is not None, 1.0 if tensor_scale is None else tensor_scale)
        given = LIKE[out.dtype], out.data_ptr(), step, step, slots.data_ptr(), count
        assert load_rows(*given, *places(count, self.dim), codes.data_ptr(), scales.data_ptr(), extra) == -1
