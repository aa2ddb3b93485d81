"""``python -m benchmarks``: every figure as a table, or ``--json``. Ratios are to a baseline in the same process."""

from __future__ import annotations

import argparse
import json
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import (
    bench_kernels,
    bench_manager,
    bench_moves,
    bench_mxfp8,
    bench_retraction,
    bench_scale,
    bench_transfer,
)
from benchmarks.timing import Figure

MODULES = (bench_manager, bench_moves, bench_transfer, bench_scale, bench_retraction, bench_kernels, bench_mxfp8)
BENCHES = {module.__name__.rpartition("_")[2]: module for module in MODULES}


def main() -> None:
    """Run benchmarks; exit with 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measure, against goals; minutes in all.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(BENCHES)}; all by default")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHES))
    if unknown:
        parser.error(f"no such benchmark: {', '.join(unknown)} (there are {', '.join(BENCHES)})")
    chosen = [BENCHES[name] for name in options.names or BENCHES]
    figures: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("benchmarks", total=len(chosen))
        for bench in chosen:
            progress.update(task, description=bench.__name__)
            figures += bench.run()
            progress.advance(task)
    if options.json:
        print(json.dumps({"figures": figures}, indent=2))
    else:
        table = Table("figure", "value", "unit", "goal", "met")
        for item in figures:
            met = "" if item["met"] is None else ("yes" if item["met"] else "no")
            table.add_row(item["name"], f"{item['value']:.3g}", item["unit"], item["goal"], met)
        Console().print(table)
    sys.exit(any(item["met"] is False for item in figures))


if __name__ == "__main__":
    main()
