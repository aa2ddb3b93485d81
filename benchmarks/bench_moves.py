"""Move programs in one process: conversions between layouts against memcpy, and how long planning takes.

The model has 8 KV heads of 128 in bf16. Arenas are mapped like pools (memfd) and populated before anything is timed.
Every round moves other, scattered units, so nothing starts in the cache. A rate is that of the destination: bytes
moved a second, as a fraction of what one memcpy of as many bytes takes.
"""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.timing import Figure, figure, seconds, speed_ratio
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.layout.moves import Program, run_program

HEADS, DIM, PAGE, LAYERS = 8, 128, 16, 16
ARENA_BYTES, MOVED_BYTES, UNITS = 256 << 20, 32 << 20, 256
ORDERS = {"token-major": "slot head dim", "head-major": "head slot dim"}
ARENAS: tuple[ArenaOrder, ...] = ("page_major", "layer_major")
MANY_PAGES, MANY_LAYERS = 2048, 61  # 128k tokens on pages of 64


def run() -> list[Figure]:
    """Time each conversion, then planning and descriptors."""
    return [*_conversions(), *_planning(), *_descriptors()]


def _conversions() -> list[Figure]:
    arenas = [MemfdPool().allocate(ARENA_BYTES, "cpu") for _ in range(2)]
    src, dst = (item.array() for item in arenas)
    src[:], dst[:] = 1, 0
    rng = np.random.default_rng(0)
    head, token = (partial(_layout, order) for order in ("head-major", "token-major"))
    cases = [
        ("same layout", head(), head(), 0.9),
        ("page-major → layer-major", head(), head(arena="layer_major"), 0.9),
        ("TP 2→1, head-major", head(tp=2), head(), 0.7),
        ("TP 4→2, head-major", head(tp=4), head(tp=2), 0.7),
        ("TP 2→1, token-major", token(tp=2), token(), 0.5),
        ("TP 4→2, token-major", token(tp=4), token(tp=2), 0.5),
        ("token-major → head-major", token(), head(), 0.35),
        ("head-major → token-major", head(), token(), 0.35),
        ("TP 2→1, token-major → head-major", token(tp=2), head(), 0.35),
    ]
    figures = []
    for name, ours, theirs, goal in cases:
        program = _program(ours, theirs)
        number = min(MOVED_BYTES // program.bytes_per_unit, UNITS // 2)
        moved = number * program.bytes_per_unit

        def move(program: Program = program, number: int = number) -> None:
            run_program(program, src, dst, _scattered(rng, UNITS, number), _scattered(rng, UNITS, number))

        ratio = speed_ratio(move, partial(np.copyto, dst[:moved], src[:moved]))
        figures.append(figure(f"moves, {name}", ratio, at_least=goal))
    for item in arenas:
        item.close()
    return figures


def _planning() -> list[Figure]:
    """Every pair of orders, arenas and TP degrees: the slowest program to build, and the one of most moves."""
    sides = [
        _layout(order, arena=arena, tp=tp, layers=MANY_LAYERS)
        for order, arena, tp in itertools.product(ORDERS, ARENAS, (1, 2, 4))
    ]
    placed = [(side, side.place({"pages": UNITS})) for side in sides]
    times, moves = [], []
    for ours, theirs in itertools.product(placed, placed):
        build = partial(Program.build, *ours, *theirs)
        times.append(min(seconds(build) for _ in range(3)))
        moves.append(len(build().moves))
    return [
        figure(f"slowest of {len(times)} programs to build, {MANY_LAYERS} layers", 1e3 * max(times), "ms", at_most=5.0),
        figure(f"most moves of {len(moves)} programs", max(moves), "moves", at_most=10),
    ]


def _descriptors() -> list[Figure]:
    """Shuffled ids of 128k tokens, equal layouts: nothing merges, and a layer-major arena has a run a layer."""
    rng, figures = np.random.default_rng(0), []
    for arena in ARENAS:
        layout = _layout("head-major", arena=arena, layers=MANY_LAYERS, page=64)
        program = _program(layout, layout, 2 * MANY_PAGES)

        def flatten(program: Program = program) -> None:
            program.descriptors(*(_scattered(rng, 2 * MANY_PAGES, MANY_PAGES) for _ in range(2)))

        flatten()
        best = min(seconds(flatten) for _ in range(9))
        title = f"descriptors of 128k tokens × {MANY_LAYERS} layers, {arena}"
        figures.append(figure(title, 1e3 * best, "ms", at_most=10.0))
    return figures


def _layout(
    order: str, *, arena: ArenaOrder = "page_major", tp: int = 1, layers: int = LAYERS, page: int = PAGE
) -> Layout:
    """One rank of ``tp``: its first heads."""
    heads = HEADS // tp
    axes = (Axis("slot", page), Axis("head", heads, ids=((0, heads),)), Axis("dim", DIM))
    field = Field("x", "bf16", ORDERS[order], axes)
    regions = tuple(region(name, "full/kv", [field], ranges=("pages",)) for name in ("k", "v"))
    space, ranges = SpaceSpec("full", "sequence", "page", page), (UnitRange("pages", "full"),)
    return Layout("bf16", 1, "full", tuple(range(layers)), regions, (space,), ranges, arena=arena)


def _program(src: Layout, dst: Layout, units: int = UNITS) -> Program:
    return Program.build(src, src.place({"pages": units}), dst, dst.place({"pages": units}))


def _scattered(rng: np.random.Generator, units: int, number: int) -> npt.NDArray[np.int64]:
    return 1 + rng.permutation(units - 1)[:number]
