# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Kernels that write and read rows by slot. A row is one head of one token; a program has a tile of them."""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_mxfp8.triton.codec import decode, narrow, place, quantise, scale_values, widen


@triton.jit(do_not_specialize=["count"])
def store_rows(
    rows,
    valid,
    slots,
    tensor_scale,
    payload,
    scales,
    count,
    stride_token,
    stride_head,
    g: tl.constexpr,
    rceil: tl.constexpr,
    bf16: tl.constexpr,
    masked: tl.constexpr,
    native: tl.constexpr,
    tile: tl.constexpr,
):
    """Quantise ``rows [T, H, D]`` and write them at ``slots [T]``; ``count`` is ``T * H``.

    Slots below 0 are dropped, and with ``masked`` tokens whose ``valid`` is 0.
    """
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    token, head = row // g.heads, (row % g.heads).to(tl.int32)
    live = row < count
    slot = tl.load(slots + token, mask=live, other=-1)
    live = live & (slot >= 0)
    if masked:
        live = live & (tl.load(valid + token, mask=live, other=0) != 0)
    slot = tl.where(live, slot, 0)
    unit, offset = slot // g.page_size, (slot % g.page_size).to(tl.int32)

    block = tl.arange(0, g.columns)
    dim = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = live[:, None, None] & (dim < g.dim)[None, :, :]
    at = token * stride_token + head * stride_head
    values = widen(tl.load(rows + at[:, None, None] + dim[None, :, :], mask=inside, other=0), bf16)
    if g.scaled:
        # Rounded to nearest, as the reference divides; a plain division is approximate on some chips.
        values = tl.div_rn(values, tl.load(tensor_scale))
    codes, scale = quantise(values, g.e5m2, rceil, native)

    at = unit * g.unit + place(head, g.head) + place(offset, g.slot)
    tl.store(payload + at[:, None, None] + place(dim, g.dims)[None, :, :], codes, mask=inside)
    at = unit * g.scale_unit + place(head, g.scale_head) + place(offset, g.scale_slot)
    inside = live[:, None] & (block < g.blocks)[None, :]
    tl.store(scales + at[:, None] + place(block, g.scale_block)[None, :], scale, mask=inside)


@triton.jit
def read_rows(payload, scales, unit, offset, head, live, g: tl.constexpr, native: tl.constexpr):
    """Dequantise rows ``[N]``: fp32 ``[N, columns, 32]``, 0 where not ``live``; the tensor scale is left to the caller.

    Masked when loaded and not afterwards: what lies there may be NaN.
    """
    block = tl.arange(0, g.columns)
    dim = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = unit * g.unit + place(head, g.head) + place(offset, g.slot)
    inside = live[:, None, None] & (dim < g.dim)[None, :, :]
    codes = tl.load(payload + at[:, None, None] + place(dim, g.dims)[None, :, :], mask=inside, other=0)
    at = unit * g.scale_unit + place(head, g.scale_head) + place(offset, g.scale_slot)
    inside = live[:, None] & (block < g.blocks)[None, :]
    scale = tl.load(scales + at[:, None] + place(block, g.scale_block)[None, :], mask=inside, other=0)
    return decode(codes, g.e5m2, native) * scale_values(scale)[:, :, None]


@triton.jit(do_not_specialize=["count"])
def load_rows(
    out,
    slots,
    tensor_scale,
    payload,
    scales,
    count,
    stride_token,
    stride_head,
    g: tl.constexpr,
    bf16: tl.constexpr,
    native: tl.constexpr,
    tile: tl.constexpr,
):
    """Read ``slots [N]`` into ``out [N, H, D]``; ``count`` is ``N * H``. Slots below 0 give 0."""
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    token, head = row // g.heads, (row % g.heads).to(tl.int32)
    inside = row < count
    slot = tl.load(slots + token, mask=inside, other=-1)
    live = slot >= 0
    slot = tl.where(live, slot, 0)
    unit, offset = slot // g.page_size, (slot % g.page_size).to(tl.int32)
    values = read_rows(payload, scales, unit, offset, head, live, g, native)
    if g.scaled:
        # Dropped rows stay 0 whatever the scale is.
        values = tl.where(live[:, None, None], values * tl.load(tensor_scale), 0.0)
    dim = tl.arange(0, g.columns)[:, None] * 32 + tl.arange(0, 32)[None, :]
    at = token * stride_token + head * stride_head
    tl.store(
        out + at[:, None, None] + dim[None, :, :],
        narrow(values, out.dtype.element_ty, bf16, native),
        mask=inside[:, None, None] & (dim < g.dim)[None, :, :],
    )
