"""Plans of flat reads: any pair of layouts over a wire of any cost, and what is decided for which move."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.contract import TransportTraits
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.layout.moves import Move, Program
from kvcore.transfer.flat.staging import StagingPlan, StagingPlanner


def traits(min_run_bytes: int, cost_us: float = 0.0) -> TransportTraits:
    return TransportTraits(executes_programs=False, min_run_bytes=min_run_bytes, descriptor_cost_us=cost_us)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pair_of_layouts(data: st.DataObject, flat: ModuleType, loop: ModuleType, cases: ModuleType) -> None:
    """Every byte arrives and no other is written, however much is staged; what is read over adds up."""
    src, dst = data.draw(cases.pairs())
    wire = traits(data.draw(st.sampled_from([0, 2, 8, 64, 1024])), data.draw(st.sampled_from([0.0, 0.004, 0.1])))
    number = data.draw(st.integers(0, 4))
    ids = [data.draw(st.lists(st.integers(0, 7), min_size=number, max_size=number, unique=True)) for _ in range(2)]
    size = data.draw(st.sampled_from([1, 2, 5]))
    largest = max(StagingPlan.build(flat.Peers(src, dst).program, wire).staged_bytes, 1)
    peers = flat.Peers(src, dst, traits=wire, staging_bytes=size * largest, wire=flat.Wire(steps=2))
    flat.finish(peers.read(*ids))
    peers.check(loop, *ids)
    stats, log = peers.client.reader.stats, peers.client.wire.log
    read = sum(reads.total_bytes for _, reads, _ in log)
    assert read == stats.read_bytes == sum(m.nbytes for m in peers.program.moves) * number + stats.read_over_bytes
    assert stats.staged_bytes == sum(reads.total_bytes for _, reads, staged in log if staged)
    assert stats.descriptors == sum(len(reads) for _, reads, _ in log)
    for _, reads, staged in log:
        assert not staged or bool((reads.dst[1:] >= (reads.dst + reads.nbytes)[:-1]).all()), "windows overlap"
    peers.close()


def test_gaps_are_bridged_up_to_the_price_of_a_descriptor(cases: ModuleType) -> None:
    """Two heads of four, token-major: gaps of 16 bytes; buffers of 128 bytes; k and v of a layer side by side."""
    src, dst = cases.kv(heads=4, ids=((0, 4),)), cases.kv(heads=2, ids=((0, 2),))
    program = Program.build(src, src.place({"pages": 9}), dst, dst.place({"pages": 9}))

    def plan(min_run: int, cost_us: float = 0.0, rate: float = 2000.0) -> StagingPlan:
        return StagingPlan.build(program, traits(min_run, cost_us), bytes_per_us=rate)

    assert plan(16).direct == program.moves, "runs of 16 bytes are long enough"
    assert (plan(17).direct, len(plan(17).windows)) == ((), 1)
    assert plan(17).read_over_bytes == 768 - 16 - 384
    expensive = StagingPlan.build(program, traits(16, 100.0))
    assert expensive.direct == program.moves, "a run that is long enough is never staged"


@pytest.mark.parametrize(
    ("min_run", "cost_us", "rate", "bridged"),
    [
        (9, 0.0, 1.0, False),
        (23, 0.0, 1.0, False),
        (24, 0.0, 1.0, True),
        (9, 8.0, 1.0, False),
        (9, 8.0, 3.0, True),
        (9, 23.9, 1.0, False),
        (9, 24.0, 1.0, True),
    ],
)
def test_the_formula(cases: ModuleType, min_run: int, cost_us: float, rate: float, bridged: bool) -> None:
    """One head of four: runs of 8 bytes with gaps of 24, bridged where max(min_run, cost × rate) is 24 at least."""
    src, dst = cases.kv(heads=4, ids=((0, 4),)), cases.kv(heads=1, ids=((1, 2),))
    program = Program.build(src, src.place({"pages": 9}), dst, dst.place({"pages": 9}))
    plan = StagingPlan.build(program, traits(min_run, cost_us), bytes_per_us=rate)
    if bridged:
        assert (len(plan.windows), plan.window_bytes, plan.read_over_bytes) == (1, 768 - 24, 768 - 24 - 192)
        assert plan.direct == ()
    else:
        assert (plan.direct, plan.windows, plan.read_over_bytes) == (program.moves, (), 0)


def test_windows_of_moves_that_run_backwards_or_lie_in_one_another() -> None:
    """A move of descending heads begins at its last byte; a short span inside of a long one does not end the window."""
    backwards = Move(("a",), 124, 128, 0, 999, ((4, -32, 8),), 4)  # bytes 28 … 128
    inside = Move(("a",), 44, 128, 500, 999, (), 4)  # between two of its runs
    behind = Move(("a",), 4, 128, 700, 999, ((2, 4, 8),), 4)  # bytes 4 … 12, one gap of 16 before the rest
    program = Program((backwards, inside, behind), ("a",), {"a": 28}, False, 9, 9, 9 * 128, 9 * 999)
    (window,) = StagingPlan.build(program, traits(32)).windows
    assert (window.src_offset, window.run_bytes, window.src_unit_stride) == (4, 124, 128)
    some = StagingPlan.build(program, traits(8))
    assert some.direct == (backwards, inside), "no gap of theirs is short enough"
    assert [(window.src_offset, window.run_bytes) for window in some.windows] == [(4, 8)]


def test_only_short_runs_are_staged(cases: ModuleType) -> None:
    """Data of long runs goes straight, its scales of short runs through the buffer."""
    sides = [
        cases.mxfp8("slot head block", heads=heads, dim=64, ids=((0, heads),), layers=range(4)) for heads in (4, 2)
    ]
    places = [side.place({"pages": 9}) for side in sides]
    program = Program.build(sides[0], places[0], sides[1], places[1])
    plan = StagingPlan.build(program, traits(128))
    assert {name for move in plan.direct for name in move.components} == {"full/kv"}
    assert {name for move in plan.staged for name in move.components} == {"full/block_scale"}
    # k_scale and v_scale of a layer are side by side (32 bytes each, the last 4 of each gap-ridden run not wanted).
    assert (len(plan.windows), plan.window_bytes) == (4, 4 * (64 - 4))
    assert plan.read_over_bytes == 4 * (64 - 4 - 32)
    assert plan.staged_bytes == 4 * 64


def test_staged_bytes_keep_their_alignment(cases: ModuleType) -> None:
    """A window that starts at byte 24 of 32 stays 8 bytes past a multiple of 16, so that wide words stay wide."""
    src, dst = cases.kv(heads=4, ids=((0, 4),), arena="layer_major"), cases.kv(heads=1, ids=((3, 4),))
    program = Program.build(src, src.place({"pages": 9}), dst, dst.place({"pages": 9}))
    plan = StagingPlan.build(program, traits(64))
    assert len(plan.windows) == 6
    assert all(window.dst_offset % 16 == window.src_offset % 16 == 8 for window in plan.windows)
    assert plan.staged_bytes % 16 == 0
    assert len(plan.staged) <= 2, "evenly placed windows are one dimension again"


def test_plans_are_made_once(cases: ModuleType) -> None:
    src, dst = cases.kv("NHD"), cases.kv("HND")
    places = src.place({"pages": 9}), dst.place({"pages": 9})
    programs = [Program.build(src, places[0], dst, places[1]) for _ in range(2)]
    planner = StagingPlanner(traits(64))
    plans = [planner.plans(program) for program in programs]
    assert all(planner.plans(program) is plan for program, plan in zip(programs, plans, strict=True))
    assert plans[0][0].program is programs[0]
    assert plans[1][0].program is programs[1]


def _large(order: str, tp: int, arena: Any) -> Layout:
    axes = (Axis("slot", 64), Axis("head", 8 // tp, ids=((0, 8 // tp),)), Axis("dim", 128))
    regions = tuple(region(n, "full/kv", [Field("x", "bf16", order, axes)], ranges=("pages",)) for n in ("k", "v"))
    spaces, ranges = (SpaceSpec("full", "sequence", "page", 64),), (UnitRange("pages", "full"),)
    return Layout("bf16", 1, "full", tuple(range(61)), regions, spaces, ranges, arena=arena)


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_planning_is_quick(arena: Any) -> None:
    """61 layers, token-major heads of a rank: made once a program, in milliseconds; few moves are left to run."""
    src, dst = _large("slot head dim", 1, arena), _large("head slot dim", 4, "page_major")
    program = Program.build(src, src.place({"pages": 99}), dst, dst.place({"pages": 99}))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        plan = StagingPlan.build(program, traits(16384, 40.0))
        times.append(time.perf_counter() - start)
    assert len(plan.windows) == (1 if arena == "page_major" else 122)
    assert len(plan.staged) <= 4
    assert min(times) < 0.05, "tenfold of what it takes, so that a busy machine does not fail it"
