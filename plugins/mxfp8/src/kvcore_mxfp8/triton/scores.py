# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Scores on block-scaled matrix units: queries and keys are multiplied as 8-bit floats, scales go with them.

Queries are rounded to a sum of two e4m3 terms, each with block scales of its own: what the second leaves is at most
2 ** -8 of a block's largest magnitude, as in bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_mxfp8.triton.codec import decode, place, quantise, scale_values


@triton.jit
def split_queries(q, rows: tl.constexpr, columns: tl.constexpr, native: tl.constexpr):
    """Queries fp32 ``[rows, columns * 32]`` as codes and scales of two terms."""
    blocks = tl.reshape(q, (rows, columns, 32))
    codes, scale = quantise(blocks, False, True, native)
    rest = blocks - decode(codes, False, native) * scale_values(scale)[:, :, None]
    low, low_scale = quantise(rest, False, True, native)
    return tl.reshape(codes, (rows, columns * 32)), scale, tl.reshape(low, (rows, columns * 32)), low_scale


@triton.jit
def scaled_scores(codes, scale, low, low_scale, payload, scales, unit, offset, head, live, g: tl.constexpr):
    """``q · k`` of queries in two terms and the keys ``[N]`` of one tile: fp32 ``[rows, N]``, 0 where not ``live``."""
    dim = tl.arange(0, g.columns * 32)
    block = tl.arange(0, g.columns)
    at = unit * g.unit + place(head, g.head) + place(offset, g.slot)
    inside = live[:, None] & (dim < g.dim)[None, :]
    keys = tl.load(payload + at[:, None] + place(dim, g.dims)[None, :], mask=inside, other=0)
    at = unit * g.scale_unit + place(head, g.scale_head) + place(offset, g.scale_slot)
    inside = live[:, None] & (block < g.blocks)[None, :]
    key_scale = tl.load(scales + at[:, None] + place(block, g.scale_block)[None, :], mask=inside, other=0)
    high, rest = codes.to(tl.float8e4nv, bitcast=True), low.to(tl.float8e4nv, bitcast=True)
    turned = tl.trans(keys.to(tl.float8e5 if g.e5m2 else tl.float8e4nv, bitcast=True))
    kind: tl.constexpr = "e5m2" if g.e5m2 else "e4m3"
    scores = tl.dot_scaled(rest, low_scale, "e4m3", turned, key_scale, kind)
    return tl.dot_scaled(high, scale, "e4m3", turned, key_scale, kind, acc=scores)
