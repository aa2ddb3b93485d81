"""``python -m benchmarks``: every figure as a table, or ``--json``. Ratios are to a baseline in the same process."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import bench_kernels, bench_manager, bench_moves, bench_mxfp8, bench_retraction, bench_transfer
from benchmarks.timing import Figure

BENCHES = (bench_manager, bench_moves, bench_transfer, bench_retraction, bench_kernels, bench_mxfp8)


def main() -> None:
    """Run all benchmarks; exit with 1 where a goal is missed."""
    figures: list[Figure] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("benchmarks", total=len(BENCHES))
        for bench in BENCHES:
            progress.update(task, description=bench.__name__)
            figures += bench.run()
            progress.advance(task)
    if "--json" in sys.argv[1:]:
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
