"""Kernels for GPUs, in Triton: rows (no Triton at import). Attention is in :mod:`kvcore_mxfp8.triton.attend`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcore.contract import DONE, FULL, BatchPlan, Fence, Format, Kernel, PoolView, Support, unsupported
from kvcore.layout import Layout
from kvcore.spec import LayerGroup
from kvcore_mxfp8.geometry import MAX_UNIT_BYTES
from kvcore_mxfp8.regions import tensors
from kvcore_mxfp8.triton.support import Chip, chip_of, device_support, on
from kvcore_mxfp8.triton.tensors import StoredTensor, Writable, readable, scale_rule

FORMATS = ("mxfp8", "mxfp8_e5m2")
PRIORITY = 20

_TILE_ELEMENTS = 4096
"""Elements a program quantises: 32 a thread."""

_INTERPRETED_ELEMENTS = 32768
"""In the interpreter a program costs the same whatever its size."""


def row_tile(chip: Chip, columns: int) -> int:
    """Rows of a program, for rows of ``columns`` blocks."""
    elements = _INTERPRETED_ELEMENTS if chip.interpreted else _TILE_ELEMENTS
    return max(1, elements // (columns * 32))


def layout_support(device: str, layout: Layout) -> Support:
    """The device, and units that 32-bit offsets reach."""
    answer = device_support(device)
    if not answer:
        return answer
    large = [region.name for region in layout.regions if region.unit_bytes > MAX_UNIT_BYTES]
    return unsupported(f"units of {', '.join(large)} are larger than {MAX_UNIT_BYTES} bytes") if large else FULL


class TritonStore(Kernel):
    """Quantise and scatter: one launch a tensor."""

    op = "store"
    name = "mxfp8_triton_store"
    formats = FORMATS
    priority = PRIORITY

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Every layout of the formats, on GPUs."""
        return layout_support(device, layout)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        from kvcore_mxfp8.triton.rows import store_rows

        stored = [StoredTensor(pool, name) for name in tensors(pool.layout)]
        rceil, chip = scale_rule(format) == "rceil", chip_of(pool.device)

        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None = None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            mask = plan.slots if valid is None else valid.contiguous().view(torch.uint8)
            with on(pool.device):
                for tensor in stored:
                    tensor.check(rows[tensor.name], "rows")
                    values, bf16 = readable(rows[tensor.name])
                    g = tensor.geometry
                    count, tile = values.shape[0] * g.heads, row_tile(chip, g.columns)
                    if not count:
                        continue
                    store_rows[(-(-count // tile),)](
                        values,
                        mask,
                        plan.slots,
                        tensor.constant[layer],
                        tensor.payload[layer],
                        tensor.scales[layer],
                        count,
                        values.stride(0),
                        values.stride(1),
                        g=g,
                        rceil=rceil,
                        bf16=bf16,
                        masked=valid is not None,
                        native=chip.native,
                        tile=tile,
                        enable_fp_fusion=False,
                    )
            return DONE

        return store


class TritonLoad(Kernel):
    """Gather and dequantise: one launch a tensor."""

    op = "load"
    name = "mxfp8_triton_load"
    formats = FORMATS
    priority = PRIORITY

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Every layout of the formats, on GPUs."""
        return layout_support(device, layout)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        from kvcore_mxfp8.triton.rows import load_rows

        stored = [StoredTensor(pool, name) for name in tensors(pool.layout)]
        chip = chip_of(pool.device)

        def load(layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            ids = slots.to(device=pool.device, dtype=torch.int64).contiguous()
            with on(pool.device):
                for tensor in stored:
                    tensor.check(out[tensor.name], "outputs")
                    target = Writable(out[tensor.name])
                    g = tensor.geometry
                    count, tile = len(ids) * g.heads, row_tile(chip, g.columns)
                    if not count:
                        continue
                    load_rows[(-(-count // tile),)](
                        target.tensor,
                        ids,
                        tensor.constant[layer],
                        tensor.payload[layer],
                        tensor.scales[layer],
                        count,
                        target.tensor.stride(0),
                        target.tensor.stride(1),
                        g=g,
                        bf16=target.bf16,
                        native=chip.native,
                        tile=tile,
                        enable_fp_fusion=False,
                    )
                    target.done()
            return DONE

        return load
