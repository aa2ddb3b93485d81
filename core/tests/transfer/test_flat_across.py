"""Flat reads of short units: neighbours at the source are one read, however they are scattered here, and the reverse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

from kvcore.contract import TransportTraits
from kvcore.transfer.flat.reads import FlatStats

ALL, SHUFFLED = [1, 2, 3, 4, 5, 6, 7], [5, 2, 7, 1, 3, 6, 4]
UNIT = 384
"""Bytes of a unit: 3 layers, k and v, 4 tokens of 2 heads, 8 bytes each; 64 a layer of k or v."""


def wire(min_run_bytes: int, cost_us: float = 0.0) -> TransportTraits:
    return TransportTraits(executes_programs=False, min_run_bytes=min_run_bytes, descriptor_cost_us=cost_us)


@pytest.fixture
def equal(flat: ModuleType, cases: ModuleType) -> Iterator[Callable[..., Any]]:
    """Peers whose layouts are equal: nothing within a unit has to be staged."""
    made: list[Any] = []

    def make(traits: TransportTraits, arena: str = "page_major", **options: Any) -> Any:
        layout = cases.kv(arena=arena)
        made.append(flat.Peers(layout, layout, traits=traits, **options))
        return made[-1]

    yield make
    for item in made:
        item.close()


@pytest.mark.parametrize("traits", [wire(16384), wire(0, 40.0), wire(16384, 40.0)], ids=["run", "cost", "both"])
@pytest.mark.parametrize(("src", "dst"), [(ALL, SHUFFLED), (SHUFFLED, ALL), (SHUFFLED, SHUFFLED[::-1])])
@pytest.mark.parametrize(("arena", "buffers"), [("page_major", 1), ("layer_major", 6)])
def test_neighbours_at_the_source_are_one_read(
    flat: ModuleType,
    loop: ModuleType,
    equal: Callable[..., Any],
    traits: TransportTraits,
    src: list[int],
    dst: list[int],
    arena: str,
    buffers: int,
) -> None:
    """All seven units, in any order at either end: a descriptor a buffer, and not a byte too many."""
    made = equal(traits, arena)
    flat.finish(made.read(src, dst))
    made.check(loop, src, dst)
    stats = made.client.reader.stats
    if arena == "layer_major":  # its buffers are so near to one another that some or all of them are one read
        assert 1 <= stats.descriptors <= buffers
        return
    assert stats == FlatStats(buffers, 7 * UNIT, 0, 7 * UNIT, 1)


def test_a_descriptor_a_buffer(flat: ModuleType, loop: ModuleType, equal: Callable[..., Any]) -> None:
    """Layer-major, gaps worth three units of a buffer: 7 units × 6 buffers in 6 reads."""
    made = equal(wire(200), "layer_major")
    flat.finish(made.read(ALL, SHUFFLED))
    made.check(loop, ALL, SHUFFLED)
    assert made.client.reader.stats == FlatStats(6, 7 * UNIT, 0, 7 * UNIT, 1)


@pytest.mark.parametrize(
    ("gap", "descriptors", "over"),
    [
        (385, 1, 3 * UNIT),  # a unit between two is cheaper read over than left out
        (384, 4, 0),  # it costs what it saves: straight
        (1, 4, 0),
    ],
)
def test_scattered_sources_are_bridged(
    flat: ModuleType, loop: ModuleType, equal: Callable[..., Any], gap: int, descriptors: int, over: int
) -> None:
    """Every other unit at the source, side by side here."""
    made = equal(wire(gap))
    src, dst = [7, 1, 5, 3], [4, 1, 3, 2]
    flat.finish(made.read(src, dst))
    made.check(loop, src, dst)
    stats = made.client.reader.stats
    assert (stats.descriptors, stats.read_over_bytes, stats.read_bytes) == (descriptors, over, 4 * UNIT + over)
    assert bool(stats.staged_bytes) == bool(over)


def test_what_is_merged_anyway_is_read_straight(flat: ModuleType, loop: ModuleType, equal: Callable[..., Any]) -> None:
    """Side by side at both ends: one read, and no copy."""
    made = equal(wire(16384, 40.0))
    flat.finish(made.read([1, 2, 3, 4], [3, 4, 5, 6]))
    made.check(loop, [1, 2, 3, 4], [3, 4, 5, 6])
    assert made.client.reader.stats == FlatStats(1, 4 * UNIT)


def test_far_apart_is_read_straight(flat: ModuleType, loop: ModuleType, equal: Callable[..., Any]) -> None:
    """Nothing to join: staging would only add a copy."""
    made = equal(wire(400))
    flat.finish(made.read([1, 4, 7], [6, 2, 4]))
    made.check(loop, [1, 4, 7], [6, 2, 4])
    assert made.client.reader.stats == FlatStats(3, 3 * UNIT)


@pytest.mark.parametrize(
    ("staging", "reads"),
    [(2 * 1024, [2, 2, 2, 1]), (1024, [1] * 7), (383, [1] * 7)],
    ids=["two units a slot", "one unit a slot", "not one unit"],
)
def test_the_buffer_bounds_a_read(
    flat: ModuleType, loop: ModuleType, equal: Callable[..., Any], staging: int, reads: list[int]
) -> None:
    """As many units as a slot holds are one read; where that is one, or none at all, they go straight."""
    made = equal(wire(16384), staging_bytes=staging)
    flat.finish(made.read(ALL, SHUFFLED))
    made.check(loop, ALL, SHUFFLED)
    log = made.client.wire.log
    assert [nbytes // UNIT for _, read, _ in log for nbytes in read.nbytes.tolist()] == reads
    assert [staged for _, _, staged in log] == ([True] * 4 if reads[0] > 1 else [False])
