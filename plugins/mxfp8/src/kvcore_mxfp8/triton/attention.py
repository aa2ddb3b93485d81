# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Attention over pages: a tile of queries of one head against all keys they may see, a tile of keys at a time.

The rows of a tile are queries times the query heads of one stored head. Logits are in base 2: ``exp2`` is what chips
have. Payload times block scale is exact in bf16 and tf32. Block scales of keys either go to block-scaled matrix units
(``scaled``) or are multiplied first; those of values run along the output, where matrix units cannot take them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcore_mxfp8.triton.codec import narrow, widen
from kvcore_mxfp8.triton.rows import read_rows
from kvcore_mxfp8.triton.scores import scaled_scores, split_queries

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _attend(
    q,
    k_payload,
    k_scales,
    v_payload,
    v_scales,
    table,
    head,
    position,
    first,
    start,
    stop,
    window,
    factor,
    bias,
    bias_row,
    bias_live,
    kg: tl.constexpr,
    vg: tl.constexpr,
    rows: tl.constexpr,
    has_window: tl.constexpr,
    has_bias: tl.constexpr,
    tile: tl.constexpr,
    dot: tl.constexpr,
    precision: tl.constexpr,
    scaled: tl.constexpr,
    native: tl.constexpr,
):
    """Online softmax of ``q`` fp32 ``[rows, columns * 32]`` over the keys ``[max(first, start), stop)``.

    Returns the largest logit, the sum and the weighted values, not yet divided: ``[rows]``, ``[rows]``, ``[rows, …]``.
    """
    width: tl.constexpr = vg.columns * 32
    largest = tl.full((rows,), float("-inf"), tl.float32)
    total = tl.zeros((rows,), tl.float32)
    mixed = tl.zeros((rows, width), tl.float32)
    if scaled:
        codes, scale, low, low_scale = split_queries(q, rows, kg.columns, native)
    queries = q.to(dot)
    for begin in range(start, stop, tile):
        at = begin + tl.arange(0, tile)
        live = (at >= first) & (at < stop)
        if kg.page_size % tile == 0:
            # A tile lies in one page, as `start` is a multiple of it.
            unit = tl.load(table + begin // kg.page_size)
        else:
            unit = tl.load(table + at // kg.page_size, mask=live, other=0)
        offset = at % kg.page_size
        if scaled:
            scores = scaled_scores(codes, scale, low, low_scale, k_payload, k_scales, unit, offset, head, live, kg)
        else:
            keys = tl.reshape(
                read_rows(k_payload, k_scales, unit, offset, head, live, kg, native), (tile, kg.columns * 32)
            )
            scores = tl.dot(queries, tl.trans(keys.to(dot)), input_precision=precision)
        scores = scores * factor
        if has_bias:
            inside = bias_live[:, None] & live[None, :]
            scores += LOG2E * tl.load(bias + bias_row[:, None] + at[None, :], mask=inside, other=0.0).to(tl.float32)
        visible = live[None, :] & (at[None, :] <= position[:, None])
        if has_window:
            visible = visible & (at[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(largest, tl.max(scores, axis=1))
        # Where nothing is visible yet: -inf less -inf would be NaN.
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(largest - base)
        weights = tl.exp2(scores - base[:, None])
        values = tl.reshape(read_rows(v_payload, v_scales, unit, offset, head, live, vg, native), (tile, width))
        total = total * shrink + tl.sum(weights, axis=1)
        mixed = mixed * shrink[:, None] + tl.dot(weights.to(dot), values.to(dot), input_precision=precision)
        largest = highest
    return largest, total, mixed


@triton.jit
def _finish(largest, total, mixed, sinks, query_head, live, value_scale, has_sinks: tl.constexpr):
    """Divide, with a sink as one more logit. Rows that saw nothing become 0."""
    if has_sinks:
        sink = tl.load(sinks + query_head, mask=live, other=0.0) * LOG2E
        highest = tl.maximum(largest, sink)
        base = tl.where(highest == float("-inf"), 0.0, highest)
        shrink = tl.exp2(largest - base)
        total = total * shrink + tl.exp2(sink - base)
        mixed = mixed * shrink[:, None]
    return mixed / tl.where(total == 0.0, 1.0, total)[:, None] * value_scale


@triton.jit
def decode_queries(
    q,
    out,
    partial,
    lengths,
    positions,
    tables,
    sinks,
    bias,
    k_payload,
    k_scales,
    k_tensor_scale,
    v_payload,
    v_scales,
    v_tensor_scale,
    sm_scale,
    window,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    bias_token,
    bias_head,
    kg: tl.constexpr,
    vg: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    splits: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
    has_bias: tl.constexpr,
    tile: tl.constexpr,
    bf16: tl.constexpr,
    out_bf16: tl.constexpr,
    dot: tl.constexpr,
    precision: tl.constexpr,
    scaled: tl.constexpr,
    native: tl.constexpr,
):
    """One query a row of the batch. Programs: ``(row, stored head, split)``; ``group`` query heads a stored head.

    With several splits each writes the state of its part of the keys to ``partial [R, Hq, splits, 2 + Dv]``, which
    :func:`merge_splits` puts together: value columns, then the largest logit and the sum.
    """
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    m = tl.arange(0, rows)
    live = m < group
    query_head = head * group + m
    dim = tl.arange(0, kg.columns * 32)
    at = row * q_token + query_head.to(tl.int64) * q_head
    inside = live[:, None] & (dim < kg.dim)[None, :]
    queries = widen(tl.load(q + at[:, None] + dim[None, :], mask=inside, other=0), bf16)

    last = tl.load(positions + row).to(tl.int32)
    stop = tl.minimum(tl.load(lengths + row).to(tl.int32), last + 1)
    first = last * 0
    if has_window:
        first = tl.maximum(last - window + 1, 0)
    # Tiles of this split.
    lowest = first // tile
    share = tl.cdiv(tl.maximum(tl.cdiv(stop, tile) - lowest, 0), splits)
    start = (lowest + split * share) * tile
    end = tl.minimum(stop, start + share * tile)

    factor = sm_scale * LOG2E
    if kg.scaled:
        factor = factor * tl.load(k_tensor_scale)
    position = last + m * 0
    largest, total, mixed = _attend(
        queries,
        k_payload,
        k_scales,
        v_payload,
        v_scales,
        tables + row * table_row,
        head,
        position,
        first,
        start,
        end,
        window,
        factor,
        bias,
        row * bias_token + query_head.to(tl.int64) * bias_head,
        live,
        kg,
        vg,
        rows,
        has_window,
        has_bias,
        tile,
        dot,
        precision,
        scaled,
        native,
    )
    column = tl.arange(0, vg.columns * 32)
    inside = live[:, None] & (column < vg.dim)[None, :]
    if splits > 1:
        at = ((row * (tl.num_programs(1) * group) + query_head) * splits + split) * (vg.dim + 2)
        tl.store(partial + at[:, None] + column[None, :], mixed, mask=inside)
        tl.store(partial + at + vg.dim, largest, mask=live)
        tl.store(partial + at + vg.dim + 1, total, mask=live)
    else:
        value_scale = 1.0
        if vg.scaled:
            value_scale = tl.load(v_tensor_scale)
        mixed = _finish(largest, total, mixed, sinks, query_head, live, value_scale, has_sinks)
        at = row * out_token + query_head.to(tl.int64) * out_head
        value = narrow(mixed, out.dtype.element_ty, out_bf16, native)
        tl.store(out + at[:, None] + column[None, :], value, mask=inside)


@triton.jit
def merge_splits(
    partial,
    out,
    sinks,
    v_tensor_scale,
    out_token,
    out_head,
    vg: tl.constexpr,
    splits: tl.constexpr,
    has_sinks: tl.constexpr,
    out_bf16: tl.constexpr,
    native: tl.constexpr,
):
    """Put the splits of one query and head together. Programs: ``(row, query head)``."""
    row, query_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split = tl.arange(0, splits)
    column = tl.arange(0, vg.columns * 32)
    at = ((row * tl.num_programs(1) + query_head) * splits + split) * (vg.dim + 2)
    largest = tl.load(partial + at + vg.dim)
    highest = tl.max(largest, axis=0)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(largest - base)
    total = tl.sum(tl.load(partial + at + vg.dim + 1) * shrink, axis=0)
    mixed = tl.load(partial + at[:, None] + column[None, :], mask=(column < vg.dim)[None, :], other=0.0)
    mixed = tl.sum(mixed * shrink[:, None], axis=0)
    value_scale = 1.0
    if vg.scaled:
        value_scale = tl.load(v_tensor_scale)
    one = tl.arange(0, 1)
    merged = _finish(
        highest + one * 0.0,
        total + one * 0.0,
        mixed[None, :],
        sinks,
        query_head + one,
        one == 0,
        value_scale,
        has_sinks,
    )
    at = row * out_token + query_head.to(tl.int64) * out_head
    value = narrow(merged, out.dtype.element_ty, out_bf16, native)
    tl.store(out + at + column[None, :], value, mask=(column < vg.dim)[None, :])


@triton.jit
def prefill_queries(
    q,
    out,
    indptr,
    lengths,
    positions,
    tables,
    sinks,
    bias,
    k_payload,
    k_scales,
    k_tensor_scale,
    v_payload,
    v_scales,
    v_tensor_scale,
    sm_scale,
    window,
    q_token,
    q_head,
    out_token,
    out_head,
    table_row,
    bias_token,
    bias_head,
    kg: tl.constexpr,
    vg: tl.constexpr,
    group: tl.constexpr,
    rows: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
    has_bias: tl.constexpr,
    tile: tl.constexpr,
    bf16: tl.constexpr,
    out_bf16: tl.constexpr,
    dot: tl.constexpr,
    precision: tl.constexpr,
    scaled: tl.constexpr,
    native: tl.constexpr,
):
    """Any number of queries a row, causal. Programs: ``(tile of queries, row, stored head)``."""
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(2)
    count: tl.constexpr = rows // group
    token_start, token_stop = tl.load(indptr + row), tl.load(indptr + row + 1)
    begin = token_start + tl.program_id(0).to(tl.int64) * count
    if begin < token_stop:
        m = tl.arange(0, rows)
        token = begin + m // group
        live = (m < count * group) & (token < token_stop)
        query_head = head * group + m % group
        dim = tl.arange(0, kg.columns * 32)
        at = token * q_token + query_head.to(tl.int64) * q_head
        inside = live[:, None] & (dim < kg.dim)[None, :]
        queries = widen(tl.load(q + at[:, None] + dim[None, :], mask=inside, other=0), bf16)

        position = tl.load(positions + token, mask=live, other=-1).to(tl.int32)
        stop = tl.minimum(tl.load(lengths + row).to(tl.int32), tl.max(position, axis=0) + 1)
        first = stop * 0
        if has_window:
            lowest = tl.min(tl.where(live, position, 0x7FFFFFFF), axis=0)
            first = tl.maximum(lowest - window + 1, 0)
        factor = sm_scale * LOG2E
        if kg.scaled:
            factor = factor * tl.load(k_tensor_scale)
        largest, total, mixed = _attend(
            queries,
            k_payload,
            k_scales,
            v_payload,
            v_scales,
            tables + row * table_row,
            head,
            position,
            first,
            first // tile * tile,
            stop,
            window,
            factor,
            bias,
            token * bias_token + query_head.to(tl.int64) * bias_head,
            live,
            kg,
            vg,
            rows,
            has_window,
            has_bias,
            tile,
            dot,
            precision,
            scaled,
            native,
        )
        value_scale = 1.0
        if vg.scaled:
            value_scale = tl.load(v_tensor_scale)
        mixed = _finish(largest, total, mixed, sinks, query_head, live, value_scale, has_sinks)
        column = tl.arange(0, vg.columns * 32)
        at = token * out_token + query_head.to(tl.int64) * out_head
        value = narrow(mixed, out.dtype.element_ty, out_bf16, native)
        tl.store(out + at[:, None] + column[None, :], value, mask=live[:, None] & (column < vg.dim)[None, :])
