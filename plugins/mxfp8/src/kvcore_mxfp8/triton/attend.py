"""Attention kernels for GPUs, in Triton: what is launched, and with which tiles (no Triton at import)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvcore.contract import DONE, AttendParams, BatchPlan, Fence, Format, Kernel, PoolView, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.layout import Layout
from kvcore.spec import LayerGroup
from kvcore_mxfp8.geometry import power_of_two
from kvcore_mxfp8.triton.kernels import FORMATS, PRIORITY, TritonLoad, TritonStore, layout_support
from kvcore_mxfp8.triton.support import Chip, chip_of, on
from kvcore_mxfp8.triton.tensors import StoredTensor, Writable, readable

MAX_SPLITS = 64
"""A power of two: the kernel that merges splits has all of them in one tile."""

_PROGRAMS = 4
"""Programs a processor is given before the keys of a row are split no further."""

_FEWEST_ROWS = 16
"""Rows of a tile that matrix units take."""


@dataclass(frozen=True)
class Tiles:
    """Sizes of an attention kernel.

    Attributes:
        rows: queries times query heads of a program, at least.
        keys: keys of a step.
        scaled: keys go to block-scaled matrix units with their scales.
        warps, stages: of the launch.
    """

    rows: int
    keys: int
    scaled: bool
    warps: int
    stages: int


def decode_tiles(chip: Chip, columns: int) -> Tiles:
    """Sizes for decoding: one query a row, so what counts is memory."""
    if chip.interpreted:
        return Tiles(_FEWEST_ROWS, 32, scaled=False, warps=4, stages=1)
    return Tiles(_FEWEST_ROWS, 64 if columns <= 4 else 32, scaled=False, warps=4, stages=2)


def prefill_tiles(chip: Chip, columns: int) -> Tiles:
    """Sizes for prefill, the largest whose registers are hardly spilled. Block-scaled matrix units are used where a head fills them."""
    if chip.interpreted:
        return Tiles(_FEWEST_ROWS, 32, scaled=False, warps=4, stages=1)
    if chip.block_scaled and columns == 4:
        size = 128 if chip.large_tiles else 64
        return Tiles(size, size, scaled=True, warps=8 if chip.cuda else 4, stages=1)
    if chip.cuda:
        return Tiles(64, 64 if columns <= 4 else 32, scaled=False, warps=8, stages=1)
    return Tiles(64 if columns <= 4 else 32, 64 if columns <= 2 else 32, scaled=False, warps=4, stages=1)


def split_count(pairs: int, tiles: int, processors: int) -> int:
    """Parts that the keys of a row are cut into: a power of two.

    Args:
        pairs: rows times stored heads.
        tiles: tiles of keys of the longest row.
        processors: of the chip.
    """
    wanted = min(_PROGRAMS * processors // max(1, pairs), tiles, MAX_SPLITS)
    return power_of_two(wanted + 1) // 2 if wanted > 1 else 1


def most_split_rows(processors: int) -> int:
    """Rows times stored heads times splits are never more than this where there is more than one split."""
    return _PROGRAMS * processors


class _Attention:
    """What both kernels keep of a pool."""

    def __init__(self, pool: PoolView) -> None:
        self.k, self.v = StoredTensor(pool, "k"), StoredTensor(pool, "v")
        self.chip = chip_of(pool.device)

    def group(self, q: torch.Tensor, out: torch.Tensor) -> int:
        """Query heads a stored head. Raises LayoutError for shapes that do not fit."""
        kg, vg = self.k.geometry, self.v.geometry
        if q.shape[1] % kg.heads or q.shape[2] != kg.dim or out.shape[2] != vg.dim:
            raise LayoutError(
                "queries do not fit the keys",
                q=list(q.shape[1:]),
                out=list(out.shape[1:]),
                k=[kg.heads, kg.dim],
                v=[vg.heads, vg.dim],
            )
        return q.shape[1] // kg.heads

    def arithmetic(self, q: torch.Tensor) -> dict[str, Any]:
        """How tiles are multiplied: in a dtype that holds queries and keys exactly.

        fp16 queries go through tf32, which has their mantissa and the range of keys; fp32 ones as three tf32 terms, which
        is as exact as fp32 here, since keys have few bits.
        """
        import triton.language as tl

        wide = self.chip.interpreted or q.dtype != torch.bfloat16
        precision = "ieee"
        if wide and self.chip.cuda and not self.chip.interpreted:
            precision = "tf32" if q.dtype == torch.float16 else "tf32x3"
        return {"dot": tl.float32 if wide else tl.bfloat16, "precision": precision}

    def extras(
        self, params: AttendParams, unread: torch.Tensor
    ) -> tuple[list[torch.Tensor], list[int], dict[str, bool]]:
        """Sinks and position bias: pointers, strides of the bias, and what is there."""
        sinks, bias = params.sinks, params.position_bias
        if sinks is not None:
            sinks = sinks.to(torch.float32).contiguous()
        strides = [0, 0]
        if bias is not None:
            bias = bias.to(torch.float32)
            bias = bias if bias.stride(2) == 1 else bias.contiguous()
            strides = [bias.stride(0), bias.stride(1)]
        have = {
            "has_window": params.window is not None,
            "has_sinks": sinks is not None,
            "has_bias": bias is not None,
        }
        return [unread if sinks is None else sinks, unread if bias is None else bias], strides, have

    def pointers(self, layer: int) -> list[torch.Tensor]:
        """The pool of one layer, in the order of the kernels' arguments."""
        return [view[layer] for t in (self.k, self.v) for view in (t.payload, t.scales, t.constant)]


class _TritonAttend(Kernel):
    formats = FORMATS
    priority = PRIORITY

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups that store as many heads of ``k`` as of ``v``, of any widths, on GPUs."""
        heads = {tensor.name: (tensor.num_heads, tensor.sharded) for tensor in group.tensors}
        if set(heads) != {"k", "v"}:
            return unsupported(f"attends over k and v, not over {', '.join(sorted(heads)) or 'nothing'}")
        if heads["k"] != heads["v"]:
            return unsupported(f"k has {heads['k'][0]} heads and v {heads['v'][0]}, or they are sharded unlike")
        wide = max(tensor.head_dim for tensor in group.tensors)
        if wide > 256:
            return unsupported(f"a head of {wide} elements is larger than its tiles, 256")
        return layout_support(device, layout)


class TritonDecode(_TritonAttend):
    """Keys of a row are split over programs where the batch alone does not fill the chip."""

    op = "attend_decode"
    name = "mxfp8_triton_attend_decode"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        from kvcore_mxfp8.triton.attention import decode_queries, merge_splits

        pools = _Attention(pool)
        chip, kg, vg = pools.chip, pools.k.geometry, pools.v.geometry
        tiles = decode_tiles(chip, max(kg.columns, vg.columns))
        # By query heads a stored head: large enough for every batch, as rows are split only while there are few.
        space: dict[int, torch.Tensor] = {}

        def partial_space(heads: int) -> torch.Tensor:
            if heads not in space:
                words = most_split_rows(chip.processors) * heads * (vg.dim + 2)
                space[heads] = torch.empty(words, dtype=torch.float32, device=pool.device)
            return space[heads]

        def attend(
            layer: int, q: torch.Tensor, out: torch.Tensor, plan: BatchPlan, params: AttendParams, after: Fence = DONE
        ) -> Fence:
            after.wait()
            heads = pools.group(q, out)
            if not plan.num_rows:
                return DONE
            pairs = plan.num_rows * kg.heads
            # A window begins anywhere in a tile.
            seen = plan.max_length if params.window is None else min(plan.max_length, params.window + tiles.keys)
            splits = split_count(pairs, -(-seen // tiles.keys), chip.processors)
            queries, bf16 = readable(q)
            target = Writable(out)
            (sinks, bias), bias_strides, have = pools.extras(params, plan.lengths)
            partial = partial_space(heads) if splits > 1 else plan.lengths
            strides = [target.tensor.stride(0), target.tensor.stride(1)]
            with on(pool.device):
                decode_queries[(plan.num_rows, kg.heads, splits)](
                    queries,
                    target.tensor,
                    partial,
                    plan.lengths,
                    plan.positions,
                    plan.page_table,
                    sinks,
                    bias,
                    *pools.pointers(layer),
                    float(params.sm_scale),
                    params.window or 0,
                    queries.stride(0),
                    queries.stride(1),
                    *strides,
                    plan.page_table.stride(0),
                    *bias_strides,
                    kg=kg,
                    vg=vg,
                    group=heads,
                    rows=max(tiles.rows, power_of_two(heads)),
                    splits=splits,
                    **have,
                    tile=tiles.keys,
                    bf16=bf16,
                    out_bf16=target.bf16,
                    **pools.arithmetic(q),
                    scaled=tiles.scaled,
                    native=chip.native,
                    num_warps=tiles.warps,
                    num_stages=tiles.stages,
                    enable_fp_fusion=True,
                )
                if splits > 1:
                    merge_splits[(plan.num_rows, q.shape[1])](
                        partial,
                        target.tensor,
                        sinks,
                        pools.v.constant[layer],
                        *strides,
                        vg=vg,
                        splits=splits,
                        has_sinks=have["has_sinks"],
                        out_bf16=target.bf16,
                        native=chip.native,
                        enable_fp_fusion=True,
                    )
            target.done()
            return DONE

        return attend


class TritonPrefill(_TritonAttend):
    """A program has a tile of queries of all query heads of a stored head."""

    op = "attend_prefill"
    name = "mxfp8_triton_attend_prefill"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        from kvcore_mxfp8.triton.attention import prefill_queries

        pools = _Attention(pool)
        chip, kg, vg = pools.chip, pools.k.geometry, pools.v.geometry
        tiles = prefill_tiles(chip, max(kg.columns, vg.columns))

        def attend(
            layer: int, q: torch.Tensor, out: torch.Tensor, plan: BatchPlan, params: AttendParams, after: Fence = DONE
        ) -> Fence:
            after.wait()
            heads = pools.group(q, out)
            if not plan.num_tokens:
                return DONE
            rows = max(tiles.rows, power_of_two(heads))
            queries, bf16 = readable(q)
            target = Writable(out)
            (sinks, bias), bias_strides, have = pools.extras(params, plan.lengths)
            with on(pool.device):
                prefill_queries[(-(-plan.max_query // (rows // heads)), plan.num_rows, kg.heads)](
                    queries,
                    target.tensor,
                    plan.query_indptr,
                    plan.lengths,
                    plan.positions,
                    plan.page_table,
                    sinks,
                    bias,
                    *pools.pointers(layer),
                    float(params.sm_scale),
                    params.window or 0,
                    queries.stride(0),
                    queries.stride(1),
                    target.tensor.stride(0),
                    target.tensor.stride(1),
                    plan.page_table.stride(0),
                    *bias_strides,
                    kg=kg,
                    vg=vg,
                    group=heads,
                    rows=rows,
                    **have,
                    tile=tiles.keys,
                    bf16=bf16,
                    out_bf16=target.bf16,
                    **pools.arithmetic(q),
                    scaled=tiles.scaled,
                    native=chip.native,
                    num_warps=tiles.warps,
                    num_stages=tiles.stages,
                    enable_fp_fusion=True,
                )
            target.done()
            return DONE

        return attend


TRITON_KERNELS: tuple[type[Kernel], ...] = (TritonStore, TritonLoad, TritonDecode, TritonPrefill)
