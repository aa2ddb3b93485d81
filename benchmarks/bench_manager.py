"""What a decode step costs its manager, a row: ``plan_step`` and ``commit``, without a store and without a model."""

from __future__ import annotations

import statistics

from benchmarks.timing import Figure, figure, seconds
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import BUILTIN_SPACES

LENGTH, STEPS = 500, 64
GOALS = {8: None, 64: 3.0, 256: 1.5}
"""µs a row."""


def run() -> list[Figure]:
    """Pages of 16: a row in sixteen takes a page in each step. Batches of one age, staggered over the pages."""
    return [
        figure(f"decode step of {rows} rows, a row", _row_us(rows, 16), unit="µs", at_most=goal)
        for rows, goal in GOALS.items()
    ] + [figure("decode step of 256 rows, pages of one token, a row", _row_us(256, 1), unit="µs")]


def _row_us(rows: int, page: int) -> float:
    spec = SpaceSpec("full", "sequence", "page", page)
    units = rows * ((LENGTH + 16 * STEPS) // page + 2)
    manager = Manager([RangeBudget("full", "pages", spec, units, 0, ("full/kv",))], BUILTIN_SPACES)
    for row in range(rows):
        manager.admit(f"r{row}", LENGTH + row % page)
        manager.commit(manager.plan_step([(f"r{row}", LENGTH + row % page)]))
    step = [(f"r{row}", 1) for row in range(rows)]

    def steps() -> None:
        for _ in range(STEPS):
            manager.commit(manager.plan_step(step))

    return statistics.median(seconds(steps) for _ in range(9)) / STEPS / rows * 1e6
