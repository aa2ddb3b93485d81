"""The kernels as they are launched on chips that are not here."""

from __future__ import annotations

from functools import cache
from typing import Any

import triton.language as tl

from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore.testing.triton import Compiled, compile_for
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2
from kvcore_mxfp8.geometry import Geometry, geometry
from kvcore_mxfp8.triton import attention as triton_attention
from kvcore_mxfp8.triton import rows as triton_rows
from kvcore_mxfp8.triton.attend import Tiles, decode_tiles, prefill_tiles
from kvcore_mxfp8.triton.kernels import row_tile
from kvcore_mxfp8.triton.support import Chip

CHIPS = {
    "sm_90": Chip(native=True, block_scaled=False, processors=132),
    "sm_100": Chip(native=True, block_scaled=True, processors=148, large_tiles=True),
    "sm_120": Chip(native=True, block_scaled=True, processors=170),
    "gfx950": Chip(native=False, block_scaled=True, processors=256, cuda=False),
    "gfx942": Chip(native=False, block_scaled=False, processors=304, cuda=False),
    "sm_80": Chip(native=False, block_scaled=False, processors=108),
}

_POINTERS = {
    "rows": "*i16",
    "valid": "*u8",
    "slots": "*i64",
    "out": "*i16",
    "q": "*i16",
    "partial": "*fp32",
    "lengths": "*i64",
    "positions": "*i64",
    "indptr": "*i64",
    "tables": "*i64",
    "sinks": "*fp32",
    "bias": "*fp32",
    **{f"{t}payload": "*u8" for t in ("", "k_", "v_")},
    **{f"{t}scales": "*u8" for t in ("", "k_", "v_")},
    **{f"{t}tensor_scale": "*fp32" for t in ("", "k_", "v_")},
}
_NUMBERS = {
    **dict.fromkeys(("q_token", "q_head", "out_token", "out_head", "stride_token", "stride_head", "table_row"), "i32"),
    "bias_token": "i32",
    "bias_head": "i32",
    "window": "i32",
    "count": "i32",
    "sm_scale": "fp32",
}
_EVEN = {"q_token", "q_head", "out_token", "out_head", "stride_token", "stride_head", "table_row"}
"""Multiples of 16, as those of dense tensors with heads of at least 16 are."""


def of(dim: int = 128, *, e5m2: bool = False, scales: str = "flat", page_size: int = 128) -> Geometry:
    """Geometry of a tensor with heads of ``dim``."""
    group = LayerGroup("full", (0, 1), (TensorSpec("k", 8, dim), TensorSpec("v", 8, dim)), num_query_heads=32)
    kind = (Mxfp8E5m2 if e5m2 else Mxfp8)(scale_layout=scales)  # type: ignore[arg-type]
    layout = kind.layout(group, page_size=page_size, shard=Shard(), arena="page_major")
    return geometry(layout, layout.place({"pages": 64}), "k")


def compiled(kernel: Any, chip: str, constants: dict[str, Any], **options: Any) -> Compiled:
    """A kernel compiled with every tensor where torch would put it."""
    types = _POINTERS | _NUMBERS
    return compile_for(kernel, chip, types=types, constants=constants, even=_EVEN | set(_POINTERS), **options)


@cache
def store(chip: str, g: Geometry) -> Compiled:
    """The store as it is launched."""
    constants = {
        "g": g,
        "rceil": True,
        "bf16": True,
        "masked": False,
        "native": CHIPS[chip].native,
        "tile": row_tile(CHIPS[chip], g.columns),
    }
    return compiled(triton_rows.store_rows, chip, constants, enable_fp_fusion=False)


@cache
def load(chip: str, g: Geometry) -> Compiled:
    """The load as it is launched."""
    native, tile = CHIPS[chip].native, row_tile(CHIPS[chip], g.columns)
    constants = {"g": g, "bf16": True, "native": native, "tile": tile}
    return compiled(triton_rows.load_rows, chip, constants, enable_fp_fusion=False)


@cache
def decode(chip: str, g: Geometry, *, extras: bool = False) -> Compiled:
    """Attention of one query a row, four query heads a stored head, in eight splits."""
    tiles = decode_tiles(CHIPS[chip], g.columns)
    more = {"rows": tiles.rows, "splits": 8}
    return _attention(triton_attention.decode_queries, chip, g, tiles, extras, more)


@cache
def prefill(chip: str, g: Geometry, *, extras: bool = False) -> Compiled:
    """Attention of many queries a row, four query heads a stored head."""
    tiles = prefill_tiles(CHIPS[chip], g.columns)
    return _attention(triton_attention.prefill_queries, chip, g, tiles, extras, {"rows": tiles.rows})


@cache
def merge(chip: str, g: Geometry) -> Compiled:
    """What puts eight splits together."""
    constants = {"vg": g, "splits": 8, "has_sinks": True, "out_bf16": True, "native": CHIPS[chip].native}
    return compiled(triton_attention.merge_splits, chip, constants, enable_fp_fusion=True)


def _attention(kernel: Any, chip: str, g: Geometry, tiles: Tiles, extras: bool, more: dict[str, Any]) -> Compiled:
    constants = {
        "kg": g,
        "vg": g,
        "group": 4,
        "has_window": extras,
        "has_sinks": extras,
        "has_bias": extras,
        "tile": tiles.keys,
        "bf16": True,
        "out_bf16": True,
        "dot": tl.bfloat16,
        "precision": "ieee",
        "scaled": tiles.scaled,
        "native": CHIPS[chip].native,
        **more,
    }
    return compiled(kernel, chip, constants, num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=True)
