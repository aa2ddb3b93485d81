"""Move programs in one process: conversions between layouts against memcpy, and how long planning takes.

Arenas are mapped like pools (memfd) and populated before anything is timed. Every round uses other units, so nothing
starts in the cache.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.timing import Figure, figure, seconds, speed_ratio
from kvcore.builtin.pools import MemfdPool
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.moves import Program, run_program

LAYERS, HEADS, DIM, PAGE = 16, 4, 16, 16  # × k and v × bf16: units of 64 KiB
UNIT_BYTES, UNITS, MOVED = 64 << 10, 4096, 512  # arenas of 256 MiB, 32 MiB moved
ORDERS = {"NHD": "slot head dim", "HND": "head slot dim"}


def run() -> list[Figure]:
    """Time each conversion with scattered pages on both sides."""
    arenas = [MemfdPool().allocate(UNIT_BYTES * UNITS, "cpu") for _ in range(2)]
    src, dst = (item.array() for item in arenas)
    src[:], dst[:] = 1, 0
    rng = np.random.default_rng(0)
    memcpy = partial(np.copyto, dst[: MOVED * UNIT_BYTES], src[: MOVED * UNIT_BYTES])

    def move(program: Program) -> None:
        run_program(program, src, dst, _scattered(rng), _scattered(rng))

    cases = {
        "same layout": _program("HND", "HND"),
        "page-major → layer-major": _program("HND", "HND", "layer_major"),
        "NHD → HND": _program("NHD", "HND"),
    }
    figures = [
        figure(f"moves of 32 MiB, {name}", speed_ratio(partial(move, program), memcpy))
        for name, program in cases.items()
    ]
    for item in arenas:
        item.close()
    build = min(seconds(partial(_program, "NHD", "HND", layers=61)) for _ in range(10))
    return [*figures, figure("program for 61 layers, NHD → HND", 1e3 * build, unit="ms", at_most=5.0)]


def _layout(order: str, arena: ArenaOrder, layers: int) -> Layout:
    axes = (Axis("slot", PAGE), Axis("head", HEADS), Axis("dim", DIM))
    field = Field("x", "bf16", ORDERS[order], axes)
    regions = tuple(region(name, "full/kv", [field], ranges=("pages",)) for name in ("k", "v"))
    space, ranges = SpaceSpec("full", "sequence", "page", PAGE), (UnitRange("pages", "full"),)
    return Layout("bf16", 1, "full", tuple(range(layers)), regions, (space,), ranges, arena=arena)


def _program(src: str, dst: str, dst_arena: ArenaOrder = "page_major", layers: int = LAYERS) -> Program:
    ours, theirs = _layout(src, "page_major", layers), _layout(dst, dst_arena, layers)
    units = {"pages": UNITS}
    return Program.build(ours, ours.place(units), theirs, theirs.place(units))


def _scattered(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    return 1 + rng.permutation(UNITS - 1)[:MOVED]
