"""The ops of ``kivi2`` on the CPU: store, and attention over quantised groups and the newest tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch

from kvcore.contract import (
    DONE,
    FULL,
    AttendParams,
    BatchPlan,
    Fence,
    Format,
    Kernel,
    LayerGroup,
    Layout,
    Op,
    PoolView,
    Support,
    unsupported,
)
from kvcore_kivi2.codes import decode_groups, encode_groups, to_fp16
from kvcore_kivi2.format import GROUP, GROUPS, NEWEST, PARTS, RECENT, RING

TENSORS = ("k", "v")


class _Cpu(Kernel):
    formats: ClassVar[tuple[str, ...]] = ("kivi2",)
    priority: ClassVar[int] = 10

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Any layer group of the format, on the CPU."""
        return FULL if device == "cpu" else unsupported(f"written for the CPU, not for {device}")


class _Pool:
    """The fields of one pool, by layer and region."""

    def __init__(self, pool: PoolView) -> None:
        self._fields = {
            (layer, item.name): pool.field(layer, item.name, "x")
            for layer in pool.layout.layers
            for item in pool.layout.regions
        }

    def recent(self, layer: int, name: str) -> torch.Tensor:
        """fp16 ``[units, H, D]``."""
        return self._fields[layer, f"{name}_recent"]

    def write(self, layer: int, name: str, units: torch.Tensor, rows: torch.Tensor) -> None:
        """Quantise whole groups: fp16 ``rows [N, 32, H, D]`` into ``units [N]``."""
        for part, values in zip(PARTS, encode_groups(rows.flatten(0, 1), keys=name == "k"), strict=True):
            self._fields[layer, name + part][units] = values

    def read(self, layer: int, name: str, units: torch.Tensor) -> torch.Tensor:
        """The groups of ``units [R, N]`` as fp32 ``[R, H, N * 32, D]``."""
        stored = (self._fields[layer, name + part][units.flatten()] for part in PARTS)
        rows = decode_groups(*stored, keys=name == "k")
        return rows.reshape(len(units), units.shape[1] * GROUP, *rows.shape[1:]).transpose(1, 2)


@dataclass(frozen=True)
class _Completed:
    """Groups that a step completes.

    Attributes:
        units: int64 ``[N]``, where they go.
        tokens: int64 ``[N, 32]``, which new token of the step each of their tokens is; negative where it is an older one.
        old: int64 ``[N, 32]``, its place in the ring.
    """

    units: torch.Tensor
    tokens: torch.Tensor
    old: torch.Tensor

    @classmethod
    def of(cls, plan: BatchPlan, valid: torch.Tensor | None) -> _Completed:
        """By where the last token of each group is stored; a group of which a token is dropped is not written."""
        slots = plan.ranges[GROUPS].slots
        (last,) = ((slots >= 0) & (plan.positions % GROUP == GROUP - 1)).nonzero(as_tuple=True)
        row = torch.searchsorted(plan.query_indptr, last, right=True) - 1
        back = torch.arange(1 - GROUP, 1)
        tokens = last[:, None] + back
        tokens = torch.where(tokens >= plan.query_indptr[row][:, None], tokens, -1)
        old = plan.page_table[row[:, None], (plan.positions[last][:, None] + back) % RING]
        units = slots[last] // GROUP
        if valid is not None:
            whole = (valid[tokens.clamp(min=0)] | (tokens < 0)).all(1)
            units, tokens, old = units[whole], tokens[whole], old[whole]
        return cls(units, tokens, old)


class Store(_Cpu):
    """New tokens into the ring, and every group that they complete, quantised, into its unit."""

    op: ClassVar[Op] = "store"
    name: ClassVar[str] = "kivi2_store"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        stored = _Pool(pool)
        seen: tuple[BatchPlan | None, _Completed | None] = (None, None)

        def completed(plan: BatchPlan, valid: torch.Tensor | None) -> _Completed:
            nonlocal seen
            if valid is not None:  # its contents may change between calls
                return _Completed.of(plan, valid)
            if seen[0] is not plan or seen[1] is None:  # once a step, not once a layer
                seen = (plan, _Completed.of(plan, None))
            return seen[1]  # type: ignore[return-value]

        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            plan = plan.ranges[RECENT]
            groups = completed(plan, valid)
            keep = plan.slots >= 0 if valid is None else (plan.slots >= 0) & valid
            for name in TENSORS:
                new, recent = to_fp16(rows[name]), stored.recent(layer, name)
                if len(groups.units):  # before the ring is written: a long step overwrites what they still need
                    old = recent[groups.old]
                    there = (groups.tokens >= 0)[..., None, None]
                    whole = torch.where(there, new[groups.tokens.clamp(min=0)], old)
                    stored.write(layer, name, groups.units, whole)
                recent[plan.slots[keep]] = new[keep]
            return DONE

        return store


@dataclass(frozen=True)
class _Rows:
    """Rows that are attended together.

    Attributes:
        groups: int64 ``[R, N]``, units of the quantised groups.
        recent: int64 ``[R, 2 * 32]``, units of the newest rows.
        keys: int64 ``[R, N * 32 + 2 * 32]``, position of every key that is read.
        there: bool, of the same shape: whether it is a token of the request.
    """

    groups: torch.Tensor
    recent: torch.Tensor
    keys: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(cls, plan: BatchPlan, rows: slice) -> _Rows:
        """What the queries of a step's rows read: whole groups in 2 bits, but the newest one and what follows in fp16."""
        recent, groups = plan.ranges[RECENT], plan.ranges[GROUPS]
        lengths = recent.lengths[rows, None]
        first = (lengths // GROUP - 1).clamp(min=0) * GROUP  # of the newest tokens
        width = max((n // GROUP - 1 for n in recent.host_lengths[rows]), default=0)
        quantised = torch.arange(max(0, width) * GROUP).expand(len(lengths), -1)
        newest = first + torch.arange(NEWEST)
        return cls(
            groups.page_table[rows, : max(0, width)],
            recent.page_table[rows].gather(1, newest % RING),
            torch.cat((quantised, newest), 1),
            torch.cat((quantised < first, newest < lengths), 1),
        )


class _Attend(_Cpu):
    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        stored = _Pool(pool)
        seen: tuple[BatchPlan | None, list[tuple[slice, slice, _Rows]]] = (None, [])

        def attend(
            layer: int, q: torch.Tensor, out: torch.Tensor, plan: BatchPlan, params: AttendParams, after: Fence = DONE
        ) -> Fence:
            nonlocal seen
            after.wait()
            if seen[0] is not plan:  # once a step, not once a layer
                seen = (plan, [(rows, tokens, _Rows.of(plan, rows)) for rows, tokens in self.batches(plan)])
            for _, tokens, batch in seen[1]:
                out[tokens] = _attention(stored, layer, q[tokens], plan.positions[tokens], batch, tokens, params)
            return DONE

        return attend

    @abstractmethod
    def batches(self, plan: BatchPlan) -> list[tuple[slice, slice]]:
        """Rows that are attended together, and their tokens: equally many each."""


class AttendDecode(_Attend):
    """All rows together, padded to the longest."""

    op: ClassVar[Op] = "attend_decode"
    name: ClassVar[str] = "kivi2_attend_decode"

    def batches(self, plan: BatchPlan) -> list[tuple[slice, slice]]:
        """One batch."""
        return [(slice(0, plan.num_rows), slice(0, plan.num_tokens))]


class AttendPrefill(_Attend):
    """Row by row."""

    op: ClassVar[Op] = "attend_prefill"
    name: ClassVar[str] = "kivi2_attend_prefill"

    def batches(self, plan: BatchPlan) -> list[tuple[slice, slice]]:
        """A batch a row."""
        ends = pairwise(plan.host_query_indptr)
        return [(slice(row, row + 1), slice(start, stop)) for row, (start, stop) in enumerate(ends)]


def _attention(
    stored: _Pool,
    layer: int,
    q: torch.Tensor,
    positions: torch.Tensor,
    batch: _Rows,
    tokens: slice,
    params: AttendParams,
) -> torch.Tensor:
    """Attention in fp32 of ``q [R * T, Hq, Dk]``, the T queries of each of R rows: ``[R * T, Hq, Dv]``."""
    rows = len(batch.keys)
    # What is not a token of the request is zeroed, not only hidden: 0 * NaN is NaN.
    k, v = (
        torch.cat(
            (stored.read(layer, name, batch.groups), stored.recent(layer, name)[batch.recent].float().transpose(1, 2)),
            2,
        ).masked_fill(~batch.there[:, None, :, None], 0.0)
        for name in TENSORS
    )
    heads = k.shape[1]
    queries = q.float().reshape(rows, -1, heads, q.shape[1] // heads, q.shape[2])  # [R, T, H, G, Dk]
    at, keys = positions.view(rows, -1, 1), batch.keys[:, None]
    hidden = (keys > at) | ~batch.there[:, None]
    if params.window is not None:
        hidden |= keys <= at - params.window
    scores = torch.einsum("rthgd,rhsd->rhgts", queries, k) * params.sm_scale
    if params.position_bias is not None:
        bias = (
            params.position_bias[tokens].float().reshape(rows, -1, q.shape[1], params.position_bias.shape[-1])
        )  # [R, T, Hq, max length]
        where = batch.keys.clamp(max=bias.shape[-1] - 1)[:, None, None].expand(-1, *bias.shape[1:3], -1)
        scores += bias.gather(-1, where).permute(0, 2, 1, 3).reshape(scores.shape)
    scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.float().view(1, heads, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    result = torch.einsum("rhgts,rhsd->rthgd", weights, v)
    return result.flatten(2, 3).flatten(0, 1).to(q.dtype)


KERNELS: tuple[type[Kernel], ...] = (Store, AttendDecode, AttendPrefill)
