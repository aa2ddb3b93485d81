"""How close moves between arenas come to memcpy, in one process.

Every round times each case once, a plain ``np.copyto`` of as many bytes first, so that a machine that slows down slows
both; the ratio of a case is the median over rounds of (memcpy time / case time). Arenas are mapped like pools (memfd)
and every page is populated before anything is timed; each round uses other units, so nothing starts in the cache.

    python benchmarks/bench_moves.py [--json] [--transfer-mib 32] [--rounds 15]
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.moves import Program, run_program

LAYERS, HEADS, DIM, PAGE = 16, 4, 16, 16  # × k and v × bf16: units of 64 KiB
UNIT_BYTES = 64 * 1024
ORDERS = {"NHD": "slot head dim", "HND": "head slot dim"}
GOALS = {"one run": 0.8, "gathered": 0.8, "scattered": 0.6}

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Result:
    """One case: GB/s moved, and the ratio to a memcpy of as many bytes (``goal`` is None where none is set)."""

    case: str
    ratio: float
    gbps: float
    memcpy_gbps: float
    goal: float | None


def layout(order: str = "HND", arena: str = "page_major") -> Layout:
    """K and V of 16 layers in units of 64 KiB."""
    axes = (Axis("slot", PAGE), Axis("head", HEADS), Axis("dim", DIM))
    field = Field("x", "bf16", ORDERS[order], axes)
    regions = tuple(region(name, "full/kv", [field], ranges=("pages",)) for name in ("k", "v"))
    space = SpaceSpec("full", "sequence", "page", PAGE)
    return Layout(
        "bf16", 1, "full", tuple(range(LAYERS)), regions, (space,), (UnitRange("pages", "full"),), arena=arena
    )


def arena(nbytes: int) -> Bytes:
    """A populated memfd arena."""
    fd = os.memfd_create("bench")
    try:
        os.ftruncate(fd, nbytes)
        memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    out = np.frombuffer(memory, np.uint8)
    out[:] = 1
    return out


def measure(*, transfer_bytes: int = 32 << 20, arena_bytes: int = 256 << 20, rounds: int = 15) -> list[Result]:
    """Time every case; results in the order of the table."""
    units, count = arena_bytes // UNIT_BYTES, transfer_bytes // UNIT_BYTES
    src, dst = arena(arena_bytes), arena(arena_bytes)
    rng = np.random.default_rng(0)
    cases: dict[str, tuple[Program, bool, bool]] = {
        "one run": (_program("HND", "HND", units), False, False),
        "gathered": (_program("HND", "HND", units), True, False),
        "scattered": (_program("HND", "HND", units), True, True),
        "page-major → layer-major": (_program("HND", "HND", units, dst_arena="layer_major"), True, True),
        "NHD → HND": (_program("NHD", "HND", units), True, True),
    }
    times: dict[str, list[float]] = {name: [] for name in ("memcpy", "memcpy by pages", *cases)}
    for _ in range(rounds):
        start, to = (int(rng.integers(1, units - count)) for _ in range(2))
        s, d = (
            slice(start * UNIT_BYTES, (start + count) * UNIT_BYTES),
            slice(to * UNIT_BYTES, (to + count) * UNIT_BYTES),
        )
        times["memcpy"].append(_time(lambda s=s, d=d: np.copyto(dst[d], src[s])))
        start = int(rng.integers(1, units - count))
        times["memcpy by pages"].append(_time(lambda start=start: _by_pages(src, dst, start, count)))
        for name, (program, scatter_src, scatter_dst) in cases.items():
            ids = [_ids(rng, units, count, scattered) for scattered in (scatter_src, scatter_dst)]
            times[name].append(_time(lambda p=program, ids=ids: run_program(p, src, dst, *ids)))
    memcpy = times["memcpy"]
    return [
        Result(
            name,
            round(statistics.median(m / t for m, t in zip(memcpy, times[name], strict=True)), 3),
            round(count * UNIT_BYTES / statistics.median(times[name]) / 1e9, 2),
            round(count * UNIT_BYTES / statistics.median(memcpy) / 1e9, 2),
            GOALS.get(name),
        )
        for name in times
        if name != "memcpy"
    ]


def build_ms(layers: int = 61) -> float:
    """Best of ten: planning a conversion (other axis order) of 61 layers, in milliseconds."""
    sides = [_many_layers(order, layers) for order in ORDERS]
    places = [side.place({"pages": 100}) for side in sides]
    return 1e3 * min(_time(lambda: Program.build(sides[0], places[0], sides[1], places[1])) for _ in range(10))


def _many_layers(order: str, layers: int) -> Layout:
    base = layout(order)
    return Layout(base.format, 1, base.group, tuple(range(layers)), base.regions, base.spaces, base.ranges)


def _program(src: str, dst: str, units: int, dst_arena: str = "page_major") -> Program:
    a, b = layout(src), layout(dst, dst_arena)
    return Program.build(a, a.place({"pages": units}), b, b.place({"pages": units}))


def _ids(rng: np.random.Generator, units: int, count: int, scattered: bool) -> npt.NDArray[np.int64]:
    if scattered:
        return 1 + rng.permutation(units - 1)[:count]
    return int(rng.integers(1, units - count)) + np.arange(count)


def _by_pages(src: Bytes, dst: Bytes, first: int, count: int) -> None:
    """What copying page by page costs at best: in order, nothing to look up."""
    for at in range(first * UNIT_BYTES, (first + count) * UNIT_BYTES, UNIT_BYTES):
        dst[at : at + UNIT_BYTES] = src[at : at + UNIT_BYTES]


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _table(results: Sequence[Result], transfer_mib: int) -> Table:
    table = Table(title=f"moves of {transfer_mib} MiB in pages of 64 KiB")
    for heading in ("case", "GB/s", "of memcpy", "goal"):
        table.add_column(heading, justify="left" if heading == "case" else "right")
    for item in results:
        goal = "" if item.goal is None else f"≥ {item.goal}"
        missed = item.goal is not None and item.ratio < item.goal
        table.add_row(item.case, f"{item.gbps:.2f}", f"{item.ratio:.2f}", goal, style="red" if missed else "")
    table.caption = f"memcpy: {results[0].memcpy_gbps:.2f} GB/s"
    return table


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--transfer-mib", type=int, default=32, help="bytes of one transfer, in MiB")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not 1 <= options.transfer_mib <= 128 or options.rounds < 1:
        parser.error("--transfer-mib is 1 to 128, --rounds at least 1")
    results = measure(transfer_bytes=options.transfer_mib << 20, rounds=options.rounds)
    planned = round(build_ms(), 3)
    if options.json:
        print(json.dumps({"results": [asdict(item) for item in results], "build_ms": planned}, indent=2))
        return
    console = Console()
    console.print(_table(results, options.transfer_mib))
    console.print(f"a program for 61 layers is built in {planned:.2f} ms")


if __name__ == "__main__":
    main()
