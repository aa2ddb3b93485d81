"""Attention over paged keys and values on the CPU, for any format whose pages can be gathered (torch).

A kernel gives two :class:`PageSource`, one of keys and one of values, and gets the function of its op. Pages are gathered
into memory that is kept, and what is not a token of the request is zeroed there: a mask alone does not help, since
0 × NaN is NaN. Query heads of one group are folded into the query axis, so that each key is read once a group. Attention
accumulates in fp32.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcore.contract import DONE, FULL, AttendParams, BatchPlan, Fence, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.spec import LayerGroup

_QUERY_BLOCK = 512
"""Queries attended at once: bounds the mask, and skips most of what causality hides."""

_MAX_PADDING = 2
"""Rows are attended together while the longest has at most this many times the pages of the shortest."""


class Workspace:
    """Memory that grows to the largest call and is then reused: a fresh result pays a page fault per page."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory of a shape; the same bytes for every call with one name."""
        need = math.prod(shape) * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < need:
            # Memory made in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                buffer = self._buffers[name] = torch.empty(need + need // 4, dtype=torch.uint8)
        return buffer[:need].view(dtype).view(shape)


class PageSource(ABC):
    """Pages of one stored tensor, keys or values.

    Attributes:
        heads: heads held by this rank.
        exact: dtypes that hold every stored value as it is.
    """

    heads: int
    exact: frozenset[torch.dtype]

    @abstractmethod
    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gather ``pages`` (int64 ``[N]``) as ``[heads, N * page_size, D]`` in ``dtype``.

        The result is valid until the next call and may be written.
        """


def attends_keys_and_values(group: LayerGroup) -> Support:
    """Groups with ``k`` and ``v`` of equally many heads: what the functions of this module attend over. Other tensors of a
    group are not read."""
    names = sorted(tensor.name for tensor in group.tensors)
    if not {"k", "v"} <= set(names):
        return unsupported(f"attends over k and v, not over {', '.join(names) or 'nothing'}")
    if group.tensor("k").num_heads != group.tensor("v").num_heads:
        return unsupported("needs as many heads in v as in k")
    return FULL


def _compute_dtype(q: torch.Tensor, keys: PageSource, values: PageSource, params: AttendParams) -> torch.dtype:
    """The dtype of keys, values and masks: that of the queries where it is exact, else fp32, in which additive masks stay
    exact too."""
    plain = params.sinks is None and params.position_bias is None
    return q.dtype if plain and q.dtype in keys.exact and q.dtype in values.exact else torch.float32


def _grouped(q: torch.Tensor, heads: int) -> torch.Tensor:
    """Queries ``[N, Hq, D]`` as ``[H, N, G, D]``: G query heads read one head of keys."""
    if q.shape[1] % heads:
        raise LayoutError("query heads are not a multiple of key heads", num_query_heads=q.shape[1], num_kv_heads=heads)
    return q.reshape(q.shape[0], heads, q.shape[1] // heads, q.shape[2]).permute(1, 0, 2, 3)


@dataclass(frozen=True)
class _Bucket:
    """Rows of a decode step that are attended together, padded to ``width`` pages. Made of lengths alone: no unit ids.

    Attributes:
        rows: int64 ``[B]``, or None for all rows in order.
        columns: int64 ``[B, width]``, page table columns that are gathered.
        keys: int64 ``[B, width * page_size]``, position of every gathered token.
        hidden: bool ``[B, width * page_size]``: not a token of the request, or outside the window.
        garbage: ``(row, token)`` indices of gathered slots past the request's end.
    """

    rows: torch.Tensor | None
    columns: torch.Tensor
    keys: torch.Tensor
    hidden: torch.Tensor
    garbage: tuple[torch.Tensor, torch.Tensor] | None


def _buckets(lengths: tuple[int, ...], page_size: int, window: int | None) -> list[_Bucket]:
    ends = [-(-length // page_size) for length in lengths]
    firsts = [0 if window is None else max(0, length - window) // page_size for length in lengths]
    pages = [end - first for end, first in zip(ends, firsts, strict=True)]
    order = sorted(range(len(lengths)), key=lambda row: -pages[row])
    groups: list[list[int]] = []
    for row in order:
        if groups and pages[groups[-1][0]] <= _MAX_PADDING * max(1, pages[row]):
            groups[-1].append(row)
        else:
            groups.append([row])
    return [_bucket(sorted(g), lengths, ends, max(pages[r] for r in g), page_size, window) for g in groups]


def _bucket(
    rows: list[int], lengths: tuple[int, ...], ends: list[int], width: int, page_size: int, window: int | None
) -> _Bucket:
    index = torch.tensor(rows, dtype=torch.int64)
    # The last `width` pages of each row; a shorter row is padded at its end, where the table names the null unit.
    base = torch.tensor([max(0, ends[row] - width) for row in rows], dtype=torch.int64)
    columns = base[:, None] + torch.arange(width)
    keys = (columns[:, :, None] * page_size + torch.arange(page_size)).flatten(1)
    length = torch.tensor([lengths[row] for row in rows], dtype=torch.int64)[:, None]
    past = keys >= length
    hidden = past if window is None else past | (keys < length - window)
    where = past.nonzero(as_tuple=True)
    return _Bucket(
        rows=None if len(rows) == len(lengths) else index,
        columns=columns,
        keys=keys,
        hidden=hidden,
        garbage=(where[0], where[1]) if len(where[0]) else None,
    )


def decode(keys: PageSource, values: PageSource, page_size: int) -> Callable[..., Any]:
    """The function of ``attend_decode``: rows of similar length together, padded."""
    shapes: dict[int | None, list[_Bucket]] = {}
    last: list[BatchPlan | None] = [None]

    def attend(
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: BatchPlan,
        params: AttendParams,
        after: Fence = DONE,
    ) -> Fence:
        after.wait()
        if plan is not last[0]:
            shapes.clear()
            last[0] = plan
        if params.window not in shapes:
            shapes[params.window] = _buckets(plan.host_lengths, page_size, params.window)
        dtype = _compute_dtype(q, keys, values, params)
        for bucket in shapes[params.window]:
            rows = bucket.rows
            table = plan.page_table if rows is None else plan.page_table[rows]
            pages = table.gather(1, bucket.columns)
            queries = q if rows is None else q[rows]
            got = _attend_bucket(layer, queries, pages, bucket, params, keys, values, dtype)
            if rows is None:
                out.copy_(got)
            else:
                out[rows] = got.to(out.dtype)
        return DONE

    return attend


def _attend_bucket(
    layer: int,
    q: torch.Tensor,
    pages: torch.Tensor,
    bucket: _Bucket,
    params: AttendParams,
    keys: PageSource,
    values: PageSource,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attention of ``q [B, Hq, Dk]`` over ``pages [B, width]``; returns ``[B, Hq, Dv]``."""
    rows, heads = q.shape[0], keys.heads
    tokens = bucket.keys.shape[1]
    grouped = _grouped(q, heads).to(dtype)
    k = keys.gather(layer, pages.reshape(-1), dtype).view(heads, rows, tokens, -1)
    v = values.gather(layer, pages.reshape(-1), dtype).view(heads, rows, tokens, -1)
    if bucket.garbage is not None:
        # Rest of the last page: it may hold anything, and NaN survives any mask.
        k[:, bucket.garbage[0], bucket.garbage[1]] = 0
        v[:, bucket.garbage[0], bucket.garbage[1]] = 0
    if params.sinks is None and params.position_bias is None:
        mask = ~bucket.hidden[None, :, None, :]
        got = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=params.sm_scale)
        return got.permute(1, 0, 2, 3).reshape(rows, q.shape[1], -1)
    scores = torch.matmul(grouped * params.sm_scale, k.transpose(-1, -2))
    if params.position_bias is not None:
        bias = params.position_bias if bucket.rows is None else params.position_bias[bucket.rows]
        at = bucket.keys.clamp(max=bias.shape[2] - 1)[:, None, :].expand(-1, bias.shape[1], -1)
        scores += _grouped(bias.gather(2, at), heads)
    scores.masked_fill_(bucket.hidden[None, :, None, :], -torch.inf)
    got = torch.matmul(_softmax(scores, params.sinks), v)
    return got.permute(1, 0, 2, 3).reshape(rows, q.shape[1], -1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """Softmax over the last axis of ``scores [H, N, G, S]``, with one more logit a query head that has no value."""
    if sinks is None:
        return scores.softmax(-1)
    heads, _, group, _ = scores.shape
    sink = sinks.to(scores.dtype).view(heads, 1, group, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sink)
    weights = (scores - top).exp_()
    return weights.div_(weights.sum(-1, keepdim=True) + (sink - top).exp_())


def prefill(keys: PageSource, values: PageSource, page_size: int) -> Callable[..., Any]:
    """The function of ``attend_prefill``: row by row, in blocks of queries."""

    def attend(
        layer: int,
        q: torch.Tensor,
        out: torch.Tensor,
        plan: BatchPlan,
        params: AttendParams,
        after: Fence = DONE,
    ) -> Fence:
        after.wait()
        dtype = _compute_dtype(q, keys, values, params)
        ptr = plan.host_query_indptr
        for row, length in enumerate(plan.host_lengths):
            begin, end = ptr[row], ptr[row + 1]
            if begin == end:
                continue
            start = length - (end - begin)
            first = 0 if params.window is None else max(0, start - params.window + 1) // page_size
            pages = plan.page_table[row, first : -(-length // page_size)]
            k = keys.gather(layer, pages, dtype)
            v = values.gather(layer, pages, dtype)
            for at in range(begin, end, _QUERY_BLOCK):
                stop = min(at + _QUERY_BLOCK, end)
                _attend_block(q[at:stop], out[at:stop], k, v, start + at - begin, first * page_size, params, at)
        return DONE

    return attend


def _attend_block(
    q: torch.Tensor,
    out: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    position: int,
    origin: int,
    params: AttendParams,
    token: int,
) -> None:
    """Queries ``q [n, Hq, Dk]`` at ``position`` and after, over keys ``k [H, S, Dk]`` from position ``origin`` on."""
    count, heads = q.shape[0], k.shape[0]
    low = origin if params.window is None else max(origin, position - params.window + 1)
    high = position + count
    # Slots past `high` are cut off here, whatever they hold.
    k, v = k[:, None, low - origin : high - origin], v[:, None, low - origin : high - origin]
    grouped = _grouped(q, heads).to(k.dtype)
    if count > 1:
        # [H, G, n, D]: the group becomes a batch axis, over which keys are broadcast without a copy.
        grouped = grouped.transpose(1, 2)
        k, v = (x.expand(heads, grouped.shape[1], *x.shape[2:]) for x in (k, v))
    at, asked = torch.arange(low, high), torch.arange(position, high)[:, None]
    hidden = at > asked
    if params.window is not None:
        hidden |= at <= asked - params.window
    if params.sinks is None and params.position_bias is None:
        causal = low == position and count > 1 and (params.window is None or params.window >= count)
        mask = None if causal or count == 1 else ~hidden
        got = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, is_causal=causal, scale=params.sm_scale)
    else:
        scores = torch.matmul(grouped * params.sm_scale, k.transpose(-1, -2))
        if params.position_bias is not None:
            bias = _grouped(params.position_bias[token : token + count, :, low:high], heads)
            scores += bias.transpose(1, 2) if count > 1 else bias
        scores.masked_fill_(hidden, -torch.inf)
        if count > 1:
            weights = _softmax(scores.transpose(1, 2), params.sinks).transpose(1, 2)
        else:
            weights = _softmax(scores, params.sinks)
        got = torch.matmul(weights, v)
    if count > 1:
        got = got.transpose(1, 2)
    out.copy_(got.permute(1, 0, 2, 3).reshape(count, q.shape[1], -1))
