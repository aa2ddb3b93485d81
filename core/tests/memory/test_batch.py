"""The batch of a step: ragged plans in buffers whose addresses never change."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.contract import BatchPlan
from kvcore.errors import IntegrityError, StaleHandleError, StepTooLargeError
from kvcore.memory.batch import BatchBuilder
from kvcore.memory.uploads import Uploads
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow

TENSORS = ("lengths", "query_indptr", "positions", "slots", "page_table")


def step(number: int, rows: list[tuple[int, int, list[int]]]) -> StepPlan:
    """Rows are ``(start, count, unit ids)``."""
    indptr = np.cumsum([0, *(len(units) for _, _, units in rows)])
    units = [unit for _, _, ids in rows for unit in ids]
    none: list[int] = []
    part = RangePlan("full", "pages", *(np.array(x, np.int64) for x in (indptr, units, none, none, none)))
    names = "abcdefgh"
    return StepPlan(number, tuple(StepRow(names[n], 1, s, c) for n, (s, c, _) in enumerate(rows)), (part,))


def build(builder: BatchBuilder, plan: StepPlan, page_size: int = 4) -> BatchPlan:
    return builder.build(plan, plan.ranges[0], page_size)


def test_a_ragged_step() -> None:
    builder = BatchBuilder(8, 64, 16)
    plan = build(builder, step(7, [(0, 5, [9, 3]), (8, 1, [4, 5, 6]), (2, 0, [1])]))
    assert (plan.step, plan.page_size, plan.num_rows, plan.num_tokens) == (7, 4, 3, 6)
    assert plan.lengths.tolist() == [5, 9, 2]
    assert plan.host_lengths == (5, 9, 2)
    assert plan.query_indptr.tolist() == [0, 5, 6, 6]
    assert plan.host_query_indptr == (0, 5, 6, 6)
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 8]
    assert plan.slots.tolist() == [36, 37, 38, 39, 12, 24]
    assert plan.page_table.tolist() == [[9, 3, 0], [4, 5, 6], [1, 0, 0]]
    assert all(getattr(plan, name).dtype == torch.int64 for name in TENSORS)


def test_addresses_never_change() -> None:
    builder = BatchBuilder(8, 64, 16)
    plans = [
        build(builder, step(1, [(0, 5, [9, 3])])),
        build(builder, step(2, [(0, 60, list(range(1, 16)))] + [(3, 1, [20])] * 4)),
        build(builder, step(3, [])),
        build(builder, step(4, [(3, 1, [8])])),
    ]
    for name in TENSORS:
        assert len({getattr(plan, name).data_ptr() for plan in plans if getattr(plan, name).numel()}) == 1
    assert plans[0].page_table.stride() == plans[1].page_table.stride() == (16, 1)


def test_nothing_of_a_larger_step_remains() -> None:
    """A captured graph may run over whole buffers: what the step does not use is neutral."""
    builder = BatchBuilder(4, 16, 8, null_unit=40)
    first = build(builder, step(1, [(0, 6, [41, 42]), (0, 6, [43, 44]), (0, 4, [45])]))
    slots = first.slots
    table, lengths = first.page_table, first.lengths
    build(builder, step(2, [(0, 1, [46])]))
    assert slots.tolist() == [46 * 4] + [-1] * 15
    assert table.tolist() == [[46, 40], [40, 40], [40, 40]]
    assert lengths.tolist() == [1, 0, 0]


def test_dead_units_take_no_writes() -> None:
    """A window's dead logical units hold the null unit: reads give zeros, writes are dropped."""
    builder = BatchBuilder(4, 16, 8)
    plan = build(builder, step(1, [(6, 4, [0, 0, 7])]))
    assert plan.slots.tolist() == [-1, -1, 28, 29]


def test_steps_that_do_not_fit_are_refused() -> None:
    builder = BatchBuilder(2, 8, 3)
    with pytest.raises(StepTooLargeError, match="more rows"):
        build(builder, step(1, [(0, 1, [1])] * 3))
    with pytest.raises(StepTooLargeError, match="more tokens") as error:
        build(builder, step(1, [(0, 9, [1, 2, 3])]))
    assert (error.value.fields["got"], error.value.remedy) == (9, "raise cache.max_tokens")
    with pytest.raises(StepTooLargeError, match="more units"):
        build(builder, step(1, [(0, 1, [1, 2, 3, 4])]))
    with pytest.raises(IntegrityError, match="too few units") as short:
        build(builder, step(1, [(0, 1, [1]), (3, 2, [2])]))
    assert (short.value.fields["request"], short.value.fields["expected"], short.value.fields["got"]) == ("b", 2, 1)


def test_invalidated_rows_reach_nothing() -> None:
    """E3: the row of a finished request neither writes nor reads the units it had, in the same buffers."""
    builder = BatchBuilder(4, 16, 8)
    with pytest.raises(StaleHandleError):
        builder.invalidate([0])
    plan = build(builder, step(1, [(0, 2, [5]), (4, 3, [6, 7])]))
    after = builder.invalidate([1])
    assert after is not plan
    assert plan.slots.tolist() == after.slots.tolist() == [20, 21, -1, -1, -1]
    assert after.page_table.tolist() == [[5, 0], [0, 0]]
    assert after.lengths.tolist() == [2, 7]
    assert all(getattr(plan, name).data_ptr() == getattr(after, name).data_ptr() for name in TENSORS)


@given(
    counts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=6),
    page_size=st.sampled_from([1, 3, 4, 16]),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_equals_a_loop(counts: list[tuple[int, int]], page_size: int, data: st.DataObject, rig: ModuleType) -> None:
    ids = iter(data.draw(st.permutations(range(1, 400))))
    rows = []
    for start, count in counts:
        spare = data.draw(st.integers(0, 2))
        rows.append((start, count, [next(ids) for _ in range(-(-(start + count) // page_size) + spare)]))
    builder = BatchBuilder(8, 128, 64)
    build(builder, step(1, [(0, 40, list(range(1, 41)))]), 1)
    plan = build(builder, step(2, rows), page_size)
    slots, positions, ptr = [], [], [0]
    for start, count, units in rows:
        for position in range(start, start + count):
            positions.append(position)
            slots.append(units[position // page_size] * page_size + position % page_size)
        ptr.append(len(slots))
    width = max([1, *(len(units) for _, _, units in rows)])
    assert plan.slots.tolist() == slots
    assert plan.positions.tolist() == positions
    assert plan.query_indptr.tolist() == list(plan.host_query_indptr) == ptr
    assert plan.page_table.tolist() == [units + [0] * (width - len(units)) for _, _, units in rows]
    assert plan.lengths.tolist() == [start + count for start, count, _ in rows]


def test_rows_of_whole_ratios_only() -> None:
    """A compressed space: tokens after the last whole run of 3 have no slot; one run too few is an error."""
    builder = BatchBuilder(4, 16, 8, whole_rows=True)
    plan = build(builder, step(1, [(2, 6, [5, 7]), (0, 2, [])]), page_size=3)
    assert plan.slots.tolist() == [5 * 3 + 2, 21, 22, 23, -1, -1, -1, -1]
    assert plan.page_table.tolist() == [[5, 7], [0, 0]]
    with pytest.raises(IntegrityError):
        build(builder, step(2, [(0, 6, [5])]), page_size=3)


def test_positions_go_round_a_ring() -> None:
    """Of tokens that would go to one row, the newest does."""
    builder = BatchBuilder(4, 16, 8)
    plan = build(builder, step(1, [(0, 2, [4, 5, 6]), (5, 1, [7, 8, 9]), (1, 5, [10, 11, 12])]), page_size=0)
    assert plan.slots.tolist() == [4, 5, 9, -1, -1, 10, 11, 12]
    assert plan.lengths.tolist() == [2, 6, 6]


def test_a_state_slot_is_named_by_the_newest_token() -> None:
    builder = BatchBuilder(4, 16, 8)
    plan = build(builder, step(1, [(0, 3, [4]), (7, 1, [9]), (2, 1, [])]), page_size=0)
    assert plan.slots.tolist() == [-1, -1, 4, 9, -1]
    assert plan.page_table.tolist() == [[4], [9], [0]]


class LateUploads(Uploads):
    """Copies when the builder waits or a test says so: tables written too early arrive wrong."""

    def __init__(self) -> None:
        self.under_way: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.ended = True

    def pin(self, table: torch.Tensor) -> torch.Tensor:
        return table.clone()

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert src.is_contiguous(), "copied without waiting only where it is contiguous"
        self.ended = False
        self.under_way.append((dst, src))

    def sent(self) -> None:
        self.ended = True

    def wait(self) -> None:
        assert self.ended, "nothing marks the end of what was sent"
        for dst, src in self.under_way:
            dst.copy_(src)
        self.under_way.clear()


def test_tables_reach_the_device_late_and_whole() -> None:
    """Every step's plan, once its copies have ended, is what a builder on the CPU gives; addresses stay."""
    uploads, plain = LateUploads(), BatchBuilder(4, 16, 8, null_unit=40)
    builder = BatchBuilder(4, 16, 8, null_unit=40, uploads=uploads)
    steps = [
        step(1, [(0, 6, [41, 42]), (0, 6, [43, 44]), (0, 4, [45])]),
        step(2, [(0, 1, [46])]),
        step(3, [(3, 2, [47, 48]), (30, 1, [41, 42, 43, 44, 45, 46, 47, 48])]),
        step(4, []),
        step(5, [(0, 3, [50])]),
    ]
    addresses = set()
    for number, item in enumerate(steps):
        got, want = build(builder, item), build(plain, item)
        if number != 2:  # else the copies end when the next step is built, which must not have written before
            uploads.wait()
            for name in TENSORS:
                assert getattr(got, name).tolist() == getattr(want, name).tolist()
        addresses.add(builder._device["page_table"].data_ptr())
    assert len(addresses) == 1
    last = build(builder, step(6, [(0, 3, [51]), (4, 1, [52, 53])]))
    last = builder.invalidate([0])
    uploads.wait()
    assert last.slots.tolist() == [-1, -1, -1, 53 * 4]
    assert last.page_table.tolist() == [[40, 40], [52, 53]]


def test_a_step_whose_copies_are_under_way_is_not_overwritten() -> None:
    uploads = LateUploads()
    builder = BatchBuilder(4, 16, 8, uploads=uploads)
    first = build(builder, step(1, [(0, 5, [9, 3])]))
    kept = []
    ended = uploads.wait

    def wait() -> None:
        ended()
        kept.append((first.slots.tolist(), first.page_table.tolist()))

    uploads.wait = wait  # type: ignore[method-assign]
    build(builder, step(2, [(0, 5, [1, 2])]))
    assert kept == [([36, 37, 38, 39, 12], [[9, 3]])]
