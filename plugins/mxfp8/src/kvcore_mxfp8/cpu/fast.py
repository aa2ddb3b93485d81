"""Quantise and dequantise on the CPU, a piece that fits into the cache at a time: bit for bit what the reference gives.

Torch does little to 8-bit floats at speed, so that most of the work is done on integers of the same bits:

- The largest magnitude of a block is the largest integer among its fp32 bits without the sign, and the scale follows from
  it by an addition and a shift.
- An e4m3 code moved up by 7 bits is the fp16 number of 2**-8 times its value, and an e5m2 code moved up by 8 bits is its
  own fp16 number; fp16 is converted fast.

What is rare and different (NaN, infinity) sends a piece to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kvcore.memory.paged_attention import Workspace
from kvcore.memory.tensors import torch_dtype
from kvcore_mxfp8.elements import BLOCK, E4M3, Element, ScaleRule
from kvcore_mxfp8.reference import dequantise, multipliers, quantise, scale_values

PIECE = 1 << 18
"""Elements worked on at once: small enough for the cache, large enough that calls do not show."""

_INFINITY = 0x7F800000
_MANTISSA_BITS = 23
_ABOVE_LARGEST = (1 << _MANTISSA_BITS) - 1 - 0x600000
"""Added to fp32 bits: carries into the exponent exactly where the mantissa is above that of the largest element."""

_E4M3_NAN = 0x7F
_RARE_SCALE = 247
"""From this scale on, which only blocks near the end of fp32 have, the scale times 2**8 is out of its range."""


class Quantiser:
    """Rows to elements and scales.

    Args:
        element, rule: what to round to.
        dim: elements a head.
    """

    def __init__(self, element: Element, rule: ScaleRule, dim: int) -> None:
        self.element, self.rule, self.dim = element, rule, dim
        self.blocks = -(-dim // BLOCK)
        self._dtype = torch_dtype(element.dtype)
        up = _ABOVE_LARGEST if rule == "rceil" else 0
        self._offset = up - (element.largest_exponent << _MANTISSA_BITS)
        self._multipliers = multipliers(torch.arange(256), rule)
        self._work, self._size = Kept(torch.float32, dim, _by_block), Kept(torch.int32, dim, _by_block)
        self._top = Kept(torch.int32, self.blocks, partial(_one_a_block, dim=dim))

    def __call__(
        self, values: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor | None
    ) -> None:
        """Quantise ``values [M, D]`` of any floating dtype into ``codes uint8 [M, D]``, contiguous, and
        ``scales uint8 [M, ≥ blocks]``. M is at most a piece."""
        count = values.shape[0]
        if not count:
            return
        if scales.shape[1] > self.blocks:
            scales = scales[:, : self.blocks]
        work, size, top = self._work.take(count), self._size.take(count), self._top.take(count)
        if tensor_scale is not None:
            values = work.all.copy_(values).div_(tensor_scale)
        elif values.dtype != torch.float32 or not values.is_contiguous():
            values = work.all.copy_(values)
        torch.abs(values, out=size.all.view(torch.float32))
        for part, into in zip(size.parts, top.parts, strict=True):
            torch.amax(part, -1, out=into)
        if int(top.all.max()) >= _INFINITY:
            elements, found = quantise(values, self.element, self.rule)
            codes.copy_(elements.view(torch.uint8))
            scales.copy_(found)
            return
        biased = top.all.add_(self._offset).bitwise_right_shift_(_MANTISSA_BITS).clamp_(min=0)
        scales.copy_(biased)
        factors = self._multipliers.index_select(0, biased.view(-1)).view(count, self.blocks)
        source = work.parts if values is work.all else _by_block(values)
        for part, factor, into in zip(source, _one_a_block(factors, self.dim), work.parts, strict=True):
            torch.mul(part, factor[..., None], out=into)
        if self.rule == "floor":  # what rceil scales never exceeds the largest element
            work.all.clamp_(-self.element.largest, self.element.largest)
        codes.view(self._dtype).copy_(work.all)


class Dequantiser:
    """Elements and scales to rows.

    Args:
        element: what was rounded to.
        dim: elements a head.
    """

    def __init__(self, element: Element, dim: int) -> None:
        self.element, self.dim = element, dim
        self.blocks = -(-dim // BLOCK)
        self._narrow = element == E4M3
        self._dtype = torch_dtype(element.dtype)
        self._scales = scale_values(torch.arange(256, dtype=torch.uint8)) * (256.0 if self._narrow else 1.0)
        self._work = Kept(torch.float32, dim, _by_block)
        self._wide = Kept(torch.int16, dim, _unsplit)
        self._index = Kept(torch.int32, self.blocks, _unsplit)

    def __call__(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, tensor_scale: torch.Tensor | None
    ) -> None:
        """Dequantise ``codes uint8 [M, D]`` with ``scales uint8 [M, ≥ blocks]`` into ``out [M, D]`` of any floating dtype,
        piece by piece."""
        rows, count = max(1, PIECE // self.dim), codes.shape[0]
        if scales.shape[1] > self.blocks:
            scales = scales[:, : self.blocks]
        if count <= rows:
            self._piece(codes, scales, out, tensor_scale)
            return
        for at in range(0, count, rows):
            stop = at + rows
            self._piece(codes[at:stop], scales[at:stop], out[at:stop], tensor_scale)

    def _piece(
        self, codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor, tensor_scale: torch.Tensor | None
    ) -> None:
        count = codes.shape[0]
        if not count:
            return
        work = self._work.take(count)
        if self._is_rare(codes, scales):
            work.all.copy_(dequantise(codes.view(self._dtype), scales))
        else:
            wide = self._wide.take(count).all.copy_(codes.view(torch.int8))
            if self._narrow:
                # Bits s s eeee mmm: the upper sign bit stays, the lower one is where fp16 has its fifth exponent bit.
                wide.mul_(1 << 7).bitwise_and_(~(1 << 14))
            else:
                wide.mul_(1 << 8)
            work.all.copy_(wide.view(torch.float16))
            index = self._index.take(count).all.copy_(scales)
            factors = self._scales.index_select(0, index.view(-1)).view(count, self.blocks)
            for part, factor in zip(work.parts, _one_a_block(factors, self.dim), strict=True):
                part.mul_(factor[..., None])
        if tensor_scale is not None:
            work.all.mul_(tensor_scale)
        out.copy_(work.all)

    def _is_rare(self, codes: torch.Tensor, scales: torch.Tensor) -> bool:
        """Whether e4m3 has a NaN, which is a number in fp16, or a scale that cannot be taken times 2**8."""
        if not self._narrow:
            return False
        if int(scales.max()) >= _RARE_SCALE:
            return True
        # The codes of NaN are the largest of all, as bytes with a sign and as bytes without.
        return int(codes.view(torch.int8).max()) == _E4M3_NAN or int(codes.max()) == _E4M3_NAN | 0x80


@dataclass(frozen=True)
class Rows:
    """``[M, n]`` and views of it.

    Attributes:
        all: the whole.
        parts: views of the same memory, such as whole blocks and the tail.
    """

    all: torch.Tensor
    parts: tuple[torch.Tensor, ...]


class Kept:
    """Memory for the rows of a piece, with its views: making them takes as long as working on a small piece."""

    def __init__(
        self, dtype: torch.dtype, width: int, split: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> None:
        self._dtype, self._width, self._split = dtype, width, split
        self._space = Workspace()
        self._last: tuple[int, Rows] | None = None

    def take(self, count: int) -> Rows:
        """Rows ``[count, width]``, valid until the next call."""
        if self._last is None or self._last[0] != count:
            # Views made in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                rows = self._space.take("rows", (count, self._width), self._dtype)
                self._last = count, Rows(rows, self._split(rows))
        return self._last[1]


def _by_block(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Elements ``[M, D]``: ``[M, D // 32, 32]`` and ``[M, 1, D % 32]``, what there is of them."""
    end = values.shape[1] // BLOCK * BLOCK
    whole = (values[:, :end].unfold(1, BLOCK, BLOCK),) if end else ()
    return (*whole, values[:, None, end:]) if end < values.shape[1] else whole


def _one_a_block(values: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    """One number a block, ``[M, blocks]``, split as :func:`_by_block` splits heads of ``dim`` elements."""
    whole = dim // BLOCK
    return tuple(part for part in (values[:, :whole], values[:, whole:]) if part.shape[1])


def _unsplit(values: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return ()
