"""Ratios of interleaved runs in one process: what the machine does meanwhile hits both sides."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypedDict


class Figure(TypedDict):
    """One measured figure: a ratio to a baseline of the same process, or a time."""

    name: str
    value: float
    unit: str
    goal: str
    met: bool | None


def seconds(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def speed_ratio(work: Callable[[], object], baseline: Callable[[], object], rounds: int = 15) -> float:
    """Median of baseline time ÷ work time over interleaved rounds: 1.0 is as fast as the baseline."""
    work()
    baseline()
    return statistics.median(seconds(baseline) / seconds(work) for _ in range(rounds))


def figure(
    name: str, value: float, unit: str = "× memcpy", at_least: float | None = None, at_most: float | None = None
) -> Figure:
    """Build a figure; ``met`` says whether it reaches its goal, where it has one."""
    if at_least is not None:
        return Figure(name=name, value=value, unit=unit, goal=f"≥ {at_least:g}", met=value >= at_least)
    if at_most is not None:
        return Figure(name=name, value=value, unit=unit, goal=f"≤ {at_most:g}", met=value <= at_most)
    return Figure(name=name, value=value, unit=unit, goal="", met=None)
