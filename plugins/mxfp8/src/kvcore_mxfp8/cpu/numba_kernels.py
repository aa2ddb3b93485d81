# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Store and load, compiled for the CPU by Numba: one pass over each row, and no memory but the rows and the pool.

Arguments are addresses and numbers, so that a call costs as little as one of Python; whoever calls has checked them.
Blocks are rounded in :mod:`kvcore_mxfp8.cpu.numba_lanes`.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable

import numpy as np
from numba import float32, int64, njit, uint8, uint32

from kvcore_mxfp8.cpu import numba_lanes
from kvcore_mxfp8.cpu.numba_lanes import (
    INFINITY,
    LARGEST_SCALE,
    LEAST_SCALE,
    QUIET_NAN,
    WITHOUT_SIGN,
    bits_of,
    decode_e4m3,
    decode_e5m2,
    encode_e4m3,
    encode_e5m2,
    largest_of,
    number_of,
    prefetch,
    read,
    read_wide,
    short_decode_e4m3,
    short_decode_e5m2,
    short_encode_e4m3,
    short_encode_e5m2,
    width_of,
    write,
)
from kvcore_mxfp8.elements import BLOCK

_ABOVE_LARGEST = (1 << 23) - 1 - 0x600000
"""Added to fp32 bits: carries into the exponent exactly where the mantissa is above that of the largest element."""


@njit(nogil=True, error_model="numpy", forceinline=True)
def _scale_of(top, largest_exponent, rceil):
    """Biased exponent of the scale of a block whose largest magnitude has bits ``top``."""
    if top > INFINITY:
        return int64(255)
    if rceil and top == INFINITY:
        return int64(254)
    return max(((int64(top) + (_ABOVE_LARGEST if rceil else 0)) >> 23) - largest_exponent, 0)


@njit(nogil=True, error_model="numpy", forceinline=True)
def _multiplier(scale, rceil):
    """What a block is multiplied with before it is rounded, for scales below 255."""
    if rceil and scale == 0:
        return float32(1.0)
    if rceil and scale == 254:
        return number_of(uint32(1 << 22))
    return number_of(uint32((254 - min(max(scale, 1), 253)) << 23))


@njit(nogil=True, error_model="numpy")
def _encode_nan(address, like, to, rceil):
    """A block with a NaN: what is none becomes NaN by one rule and 0 by the other."""
    for n in range(BLOCK):
        bits = bits_of(read_wide(address + n * width_of(like), like))
        finite = uint32(bits & WITHOUT_SIGN) < INFINITY
        code = 0 if finite and not rceil else 0x7F
        write(to + n, uint8(code | ((bits >> 24) & 0x80)))


@njit(nogil=True, error_model="numpy", forceinline=True)
def _encode(address, like, to, scale, e5m2, rceil):
    """Round 32 numbers over their scale."""
    if scale == 255:
        _encode_nan(address, like, to, rceil)
        return
    short = width_of(like) == 2 and LEAST_SCALE <= scale <= LARGEST_SCALE
    if short and (short_encode_e5m2(address, to, scale) if e5m2 else short_encode_e4m3(address, to, scale)):
        return
    if e5m2:
        encode_e5m2(address, like, to, _multiplier(scale, rceil))
    else:
        encode_e4m3(address, like, to, _multiplier(scale, rceil))


@njit(nogil=True, error_model="numpy")
def _encode_part(address, like, to, left, e5m2, rceil, factor, piece, rounded):
    """Divide up to 32 numbers by the scale of the tensor, fill them up with zeros, and round them; returns their scale.

    ``piece`` is room for 32 numbers in fp32, and ``rounded`` for their codes. Arrays, whose addresses are taken here: an
    array that is not used any more is freed, whatever still has its address.
    """
    for n in range(BLOCK):
        value = read_wide(address + n * width_of(like), like) if n < left else float32(0.0)
        piece[n] = float32(value / factor)
    scale = _scale_of(largest_of(piece.ctypes.data, float32(0.0)), 15 if e5m2 else 8, rceil)
    _encode(piece.ctypes.data, float32(0.0), rounded.ctypes.data, scale, e5m2, rceil)
    for n in range(min(left, BLOCK)):
        write(to + n, rounded[n])
    return scale


@njit(nogil=True, error_model="numpy", forceinline=True)
def _decode(address, to, like, scale, e5m2, scaled, tensor_scale):
    """Multiply 32 codes with their scale and with that of the tensor."""
    short = width_of(like) == 2 and not scaled and LEAST_SCALE <= scale <= LARGEST_SCALE
    if short and (short_decode_e5m2(address, to, scale) if e5m2 else short_decode_e4m3(address, to, scale)):
        return
    bits = uint32(scale << 23)
    if scale == 0:
        bits = uint32(1 << 22)
    elif scale == 255:
        bits = uint32(QUIET_NAN)
    if e5m2:
        decode_e5m2(address, to, like, number_of(bits), float32(tensor_scale))
    else:
        decode_e4m3(address, to, like, number_of(bits), float32(tensor_scale))


@njit(nogil=True, error_model="numpy")
def _outside(slots, count, page, first_unit, end_unit):
    """The first token whose slot is outside the pool, or −1."""
    for token in range(count):
        slot = read(slots + 8 * token, int64(0))
        if slot >= 0 and not first_unit <= slot // page < end_unit:
            return token
    return -1


def _store_rows(
    like, rows, stride_token, stride_head, slots, valid, count, sizes, heads, tokens, blocks, payload, scales, extra
):
    """Quantise rows and write them to their slots.

    Args:
        like: a number of the type of the rows: ``uint16`` for bf16, or ``float32``.
        rows, stride_token, stride_head: address of ``[T, H, D]``, whose last axis is dense, and its strides in bytes.
        slots, valid, count: addresses of int64 ``[T]`` and of bool ``[T]`` (0 for none), and T. Rows with a slot below 0
            and rows that are not valid are dropped.
        sizes, heads, tokens, blocks: see :class:`kvcore_mxfp8.cpu.numba_tensors.Places`.
        payload, scales: addresses of unit 0.
        extra: ``(e5m2, rceil, whether there is a tensor scale, it)``.

    Returns:
        −1, or the first token whose slot is outside the pool, in which case nothing was written.
    """
    page, first_unit, end_unit, unit, scale_unit, dim = sizes
    e5m2, rceil, scaled, tensor_scale = extra
    bad = _outside(slots, count, page, first_unit, end_unit)
    if bad >= 0:
        return bad
    largest_exponent = 15 if e5m2 else 8
    piece, rounded = np.zeros(BLOCK, np.float32), np.zeros(BLOCK, np.uint8)
    for token in range(count):
        slot = read(slots + 8 * token, int64(0))
        if slot < 0 or (valid != 0 and read(valid + token, uint8(0)) == 0):
            continue
        in_page = slot % page
        base = payload + slot // page * unit + tokens[0, in_page]
        scale_base = scales + slot // page * scale_unit + tokens[1, in_page]
        for head in range(heads.shape[1]):
            row = rows + token * stride_token + head * stride_head
            to, scale_to = base + heads[0, head], scale_base + heads[1, head]
            for block in range(blocks.shape[0]):
                at, left = row + block * BLOCK * width_of(like), dim - block * BLOCK
                if left >= BLOCK and not scaled:
                    scale = _scale_of(largest_of(at, like), largest_exponent, rceil)
                    _encode(at, like, to + block * BLOCK, scale, e5m2, rceil)
                else:
                    factor = float32(tensor_scale)
                    scale = _encode_part(at, like, to + block * BLOCK, left, e5m2, rceil, factor, piece, rounded)
                write(scale_to + blocks[block], uint8(scale))
    return -1


def _load_rows(
    like, rows, stride_token, stride_head, slots, count, sizes, heads, tokens, blocks, payload, scales, extra
):
    """Read slots and dequantise them into rows; slots below 0 give 0. Arguments and result as of :func:`store_rows`."""
    page, first_unit, end_unit, unit, scale_unit, dim = sizes
    e5m2, _, scaled, tensor_scale = extra
    bad = _outside(slots, count, page, first_unit, end_unit)
    if bad >= 0:
        return bad
    found, piece = np.zeros(BLOCK, np.uint8), np.zeros(4 * BLOCK, np.uint8)
    for token in range(count):
        slot = read(slots + 8 * token, int64(0))
        next_slot = max(read(slots + 8 * min(token + 1, count - 1), int64(0)), 0)
        next_base = payload + next_slot // page * unit + tokens[0, next_slot % page]
        next_scales = scales + next_slot // page * scale_unit + tokens[1, next_slot % page]
        base = payload + max(slot, 0) // page * unit + tokens[0, max(slot, 0) % page]
        scale_base = scales + max(slot, 0) // page * scale_unit + tokens[1, max(slot, 0) % page]
        for head in range(heads.shape[1]):
            row = rows + token * stride_token + head * stride_head
            for line in range(0, dim, 64):
                prefetch(next_base + heads[0, head] + line)
            prefetch(next_scales + heads[1, head])
            if slot < 0:
                for n in range(dim * width_of(like)):
                    write(row + n, uint8(0))
                continue
            at, scale_at = base + heads[0, head], scale_base + heads[1, head]
            for block in range(blocks.shape[0]):
                scale = int64(read(scale_at + blocks[block], uint8(0)))
                left, to = dim - block * BLOCK, row + block * BLOCK * width_of(like)
                if left >= BLOCK:
                    _decode(at + block * BLOCK, to, like, scale, e5m2, scaled, tensor_scale)
                    continue
                for n in range(left):
                    found[n] = read(at + block * BLOCK + n, uint8(0))
                _decode(found.ctypes.data, piece.ctypes.data, like, scale, e5m2, scaled, tensor_scale)
                for n in range(left * width_of(like)):
                    write(to + n, piece[n])
    return -1


def _compiled(function: Callable[..., int]) -> Callable[..., int]:
    """Compiled on the first call, and kept on disk where there is a place that can be written."""
    options = {"nogil": True, "error_model": "numpy"}
    try:
        # The cache looks at the file of a kernel alone, and has its name: that says what else it was compiled from.
        function.__qualname__ += f"_{zlib.crc32(inspect.getsource(numba_lanes).encode()):08x}"
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except (RuntimeError, OSError):  # no directory for the cache, or no sources
        return njit(**options)(function)  # type: ignore[no-any-return]


store_rows, load_rows = _compiled(_store_rows), _compiled(_load_rows)
