"""``python -m benchmarks.chaos``: simulated engines under random faults, counted as a table or ``--json``.

Every round comes from one number: ``--seed N --rounds 1`` runs a round again and, where it fails, prints what happened.
``docs/faults.md`` says what a round is and what is demanded of it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

SUPPORT = Path(__file__).resolve().parents[1] / "core" / "tests" / "support"
NEVER = ("wrong bytes", "lost units", "broken rule", "unexpected error", "left behind")


def main() -> None:
    """Run rounds; exit with 1 where something happened that must never happen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, help="500, or 16 with --processes")
    parser.add_argument("--processes", action="store_true", help="real processes: killed, stopped, started again")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    # What a simulated peer does wrong is logged as it would be in production: thousands of warnings.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    sys.path.insert(0, str(SUPPORT))
    rounds = importlib.import_module("chaos.processes" if options.processes else "chaos.rounds")
    number = options.rounds or (16 if options.processes else 500)
    clock = time.monotonic if options.processes else time.process_time
    started = clock()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("rounds", total=number)
        if options.processes:
            report = rounds.run(number, options.seed, tell=lambda: progress.advance(task))
        else:
            report = rounds.run(range(options.seed, options.seed + number), tell=lambda: progress.advance(task))
    seconds = clock() - started
    if options.json:
        timed = {"seconds" if options.processes else "cpu_seconds": seconds}
        print(json.dumps({**vars(report), **timed}, indent=2))
    else:
        _show(report, "seconds" if options.processes else "CPU seconds", seconds)
    sys.exit(bool(report.violations))


def _show(report: Any, unit: str, seconds: float) -> None:
    table = Table("what", "count")
    table.add_row("rounds", str(report.rounds))
    table.add_row(unit, f"{seconds:.0f}")
    for title, counts in (("outcomes", report.outcomes), ("faults", report.faults)):
        table.add_section()
        table.add_row(f"[bold]{title}", "")
        for kind, count in sorted(counts.items(), key=lambda item: -item[1]):
            table.add_row(kind, str(count))
    table.add_section()
    table.add_row("[bold]must be 0", "")
    for kind in NEVER:
        table.add_row(kind, str(report.violations[kind]))
    console = Console()
    console.print(table)
    for line in report.words:
        console.print(line, markup=False)
    if report.story and report.violations and report.rounds == 1:
        console.print("\n".join(report.story), markup=False)


if __name__ == "__main__":
    main()
