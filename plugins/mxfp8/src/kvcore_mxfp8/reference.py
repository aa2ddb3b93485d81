"""Quantise and dequantise, exactly as declared and not fast: the oracle of every kernel.

Bit for bit what ``torchao.prototype.mx_formats.mx_tensor.to_mx`` computes, but for one rounding of its own: it takes the
ceiling of a logarithm in fp32, which for an amax a few fp32 steps above ``largest * 2**n`` is one too small. The bits
decide here, as in the instruction of the chips.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from kvcore.memory.tensors import torch_dtype
from kvcore_mxfp8.elements import BLOCK, Element, ScaleRule

NAN_SCALE = 255
INF_SCALE = 254

_INFINITY = 0x7F800000
_MANTISSA_BITS = 23
_THREE_QUARTERS = 0x600000
"""Mantissa of the largest element of either format: 448 = 1.75 * 2**8, 57344 = 1.75 * 2**15."""


def quantise(values: torch.Tensor, element: Element, rule: ScaleRule) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise ``[…, D]`` of any floating dtype.

    Returns:
        Elements ``[…, D]`` in the element dtype and scales ``uint8 […, ceil(D / 32)]``: the biased exponent of E8M0.

    A block with a NaN gets scale 255, so that all of it reads as NaN. An infinity reads as infinity; beside it, finite
    values read as 0 (``rceil``) or are rounded to the largest scale (``floor``). The sign of a NaN means nothing.
    """
    dim = values.shape[-1]
    blocks = -(-dim // BLOCK)
    padded = pad(values.to(torch.float32), (0, blocks * BLOCK - dim)).view(*values.shape[:-1], blocks, BLOCK)
    amax = padded.abs().amax(-1)  # NaN where there is one
    scales = scale_bytes(amax, element, rule)
    scaled = padded * multipliers(scales, rule)[..., None]
    # Clamped first: whether a cast saturates depends on the dtype and on the version of torch. NaN stays NaN.
    elements = scaled.clamp(-element.largest, element.largest).to(torch_dtype(element.dtype))
    return elements.flatten(-2)[..., :dim].contiguous(), scales


def scale_bytes(amax: torch.Tensor, element: Element, rule: ScaleRule) -> torch.Tensor:
    """Scales of blocks by their largest magnitude: fp32 to the biased exponent, ``uint8``."""
    bits = amax.view(torch.int32)
    up = (bits & 0x7FFFFF) > _THREE_QUARTERS
    biased = (bits >> _MANTISSA_BITS) - element.largest_exponent + (up if rule == "rceil" else 0)
    biased = biased.clamp(min=0)
    if rule == "rceil":
        biased = torch.where(bits == _INFINITY, INF_SCALE, biased)
    return torch.where(amax.isnan(), NAN_SCALE, biased).to(torch.uint8)


def multipliers(scales: torch.Tensor, rule: ScaleRule) -> torch.Tensor:
    """What values are multiplied with before they are rounded: fp32, the inverse of the scale but at the ends.

    Scale 0: ``rceil`` multiplies by 1, so that the block becomes 0; ``floor`` by the inverse of the smallest normal
    number, 2**126, and not by 2**127. Scale 255: ``rceil`` makes every element NaN; ``floor`` leaves NaN where it was and
    makes 0 of the rest, which reads as NaN too.
    """
    biased = scales.to(torch.int32)
    inverse = ((254 - biased.clamp(1, 253)) << _MANTISSA_BITS).view(torch.float32)
    if rule == "floor":
        return torch.where(biased == NAN_SCALE, 0.0, inverse)
    inverse = torch.where(biased == 0, 1.0, inverse)
    inverse = torch.where(biased == INF_SCALE, 2.0**-127, inverse)
    return torch.where(biased == NAN_SCALE, torch.nan, inverse)


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Values of scales: fp32, ``2 ** (byte - 127)``; 255 is NaN."""
    biased = scales.view(torch.uint8).to(torch.int32)
    values = (biased << _MANTISSA_BITS).view(torch.float32)
    values = torch.where(biased == 0, 2.0**-127, values)
    return torch.where(biased == NAN_SCALE, torch.nan, values)


def dequantise(elements: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Elements ``[…, D]`` times their scales ``[…, ceil(D / 32)]``: fp32, exact but for results outside its range."""
    dim = elements.shape[-1]
    spread = scale_values(scales).repeat_interleave(BLOCK, -1)[..., :dim]
    return elements.to(torch.float32) * spread
