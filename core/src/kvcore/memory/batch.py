"""The batch of a step as tensors: from a StepPlan's integers to page tables, slots and lengths at fixed addresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.contract import BatchPlan, IndexSpace
from kvcore.errors import IntegrityError, StaleHandleError, StepTooLargeError
from kvcore.layout import Int64Array, Layout, SpaceSpec
from kvcore.memory.uploads import StreamUploads, Uploads
from kvcore.requests.stepplan import RangePlan, StepPlan


class BatchBuilder:
    """Builds the :class:`kvcore.contract.BatchPlan` of one unit range, step after step, into the same buffers.

    A plan is valid until the next ``build`` or ``invalidate``, which both return a new plan object: what a kernel derives
    from a plan, it may keep for as long as it is handed that same object.

    Spaces whose units do not stand for tokens have a ``page_size`` of 0 here. There ``slots`` are unit ids: position
    ``p`` goes to logical unit ``p % N`` of the ``N`` its request holds (its place in a ring, its state slot), and of
    several new tokens that would go to one unit all but the newest are dropped.

    Args:
        max_rows: most requests of a step.
        max_tokens: most new tokens of a step.
        max_units: most logical units of a request.
        null_unit: first unit of the range; unused table entries name it.
        device: where the tensors of the plan live.
        uploads: how tables reach the device; by default in stream order, and not at all on the CPU.
        whole_rows: units hold whole runs of ``page_size`` tokens only: tokens after the last run have no slot.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_units: int,
        *,
        null_unit: int = 0,
        device: str = "cpu",
        whole_rows: bool = False,
        uploads: Uploads | None = None,
    ) -> None:
        self._whole_rows = whole_rows
        self._limits = {"rows": max_rows, "tokens": max_tokens, "units": max_units}
        self._null = null_unit
        # Buffers made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            self._host = {
                "lengths": torch.zeros(max_rows, dtype=torch.int64),
                "query_indptr": torch.zeros(max_rows + 1, dtype=torch.int64),
                "positions": torch.zeros(max_tokens, dtype=torch.int64),
                "slots": torch.full((max_tokens,), -1, dtype=torch.int64),
                # Not filled: what no request reaches is never committed, and plans show used columns only.
                "page_table": torch.empty((max_rows, max_units), dtype=torch.int64),
            }
            self._uploads = StreamUploads(device) if uploads is None and device != "cpu" else uploads
            self._device = self._host
            if self._uploads is not None:
                self._device = {name: table.to(device, copy=True) for name, table in self._host.items()}
                self._host = {name: self._uploads.pin(table) for name, table in self._host.items()}
                # Used columns of the page table, side by side: only what is contiguous is copied without waiting.
                self._columns = self._uploads.pin(torch.empty(max_rows * max_units, dtype=torch.int64))
        self._used = (0, 0, 0)
        self._plan: BatchPlan | None = None

    def build(self, plan: StepPlan, part: RangePlan, page_size: int) -> BatchPlan:
        """Return the batch of one step.

        Raises StepTooLargeError for a step larger than the buffers, IntegrityError for rows with too few units.
        """
        starts = np.array([row.start for row in plan.rows], np.int64)
        counts = np.array([row.count for row in plan.rows], np.int64)
        widths = np.diff(part.indptr)
        rows, tokens, width = len(starts), int(counts.sum()), int(widths.max(initial=1))
        self._check_size(rows=rows, tokens=tokens, units=width)
        lengths = starts + counts
        if page_size:
            needed = lengths // page_size if self._whole_rows else -(-lengths // page_size)
            short = np.flatnonzero(widths < needed)
            if short.size:
                raise IntegrityError(
                    "a row has too few units",
                    request=plan.rows[short[0]].request,
                    group=part.group,
                    range=part.range,
                    expected=int(needed[short[0]]),
                    got=int(widths[short[0]]),
                )
        self._plan = None
        if self._uploads is not None:
            self._uploads.wait()
        indptr = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        row_of = np.repeat(np.arange(rows), counts)
        positions = np.arange(tokens) - (indptr[:-1] - starts)[row_of]
        slots = self._slots(part, row_of, positions, lengths[row_of], page_size)
        self._write(lengths, indptr, positions, slots)
        self._write_table(part, widths, rows, width)
        if self._uploads is not None:
            self._uploads.sent()
        self._used = (rows, tokens, width)
        self._plan = BatchPlan(
            step=plan.step,
            page_size=page_size,
            **self._views(rows, tokens, width),
            host_lengths=tuple(lengths.tolist()),
            host_query_indptr=tuple(indptr.tolist()),
        )
        return self._plan

    def _slots(
        self, part: RangePlan, row_of: Int64Array, positions: Int64Array, ends: Int64Array, page_size: int
    ) -> Int64Array:
        """Where each new token goes, −1 where it goes nowhere. All arrays are ``[T]``."""
        widths = np.diff(part.indptr)[row_of]
        if page_size:
            index = positions // page_size
            held = index < widths
        else:
            index = positions % np.maximum(widths, 1)
            held = (widths > 0) & (positions >= ends - widths)
        units = np.full(len(positions), self._null, np.int64)
        units[held] = part.units[(part.indptr[row_of] + index)[held]]
        slots = units * page_size + positions % page_size if page_size else units
        return np.where(units == self._null, np.int64(-1), slots)

    def invalidate(self, rows: Collection[int]) -> BatchPlan:
        """Cut rows off from their units: new tokens are dropped, and what they read is the null unit.

        Returns the plan that replaces the last one. Raises StaleHandleError where nothing was built.
        """
        if self._plan is None:
            raise StaleHandleError("no batch was built")
        if self._uploads is not None:
            self._uploads.wait()
        ptr = self._plan.host_query_indptr
        for row in rows:
            for buffers in (self._host, self._device):
                buffers["slots"][ptr[row] : ptr[row + 1]] = -1
                buffers["page_table"][row, : self._used[2]] = self._null
        self._plan = replace(self._plan)
        return self._plan

    def _check_size(self, **sizes: int) -> None:
        for what, size in sizes.items():
            if size > self._limits[what]:
                raise StepTooLargeError(
                    f"step has more {what} than the store was built for",
                    expected=f"at most {self._limits[what]}",
                    got=size,
                    remedy={
                        "rows": "raise cache.max_rows",
                        "tokens": "raise cache.max_tokens",
                        "units": "say how long a request may be: the model's max_length",
                    }[what],
                )

    def _write(self, lengths: Int64Array, indptr: Int64Array, positions: Int64Array, slots: Int64Array) -> None:
        """Write used parts, and neutral values over what the last step used beyond them (a captured graph may run
        over whole buffers)."""
        tokens = len(slots)
        old_rows, old_tokens, _ = self._used
        for name, values, end, neutral in (
            ("lengths", lengths, old_rows, 0),
            ("query_indptr", indptr, old_rows + 1, tokens),
            ("positions", positions, old_tokens, 0),
            ("slots", slots, old_tokens, -1),
        ):
            host = self._array(name)
            host[: len(values)] = values
            host[len(values) : end] = neutral
            stop = max(len(values), end)
            if self._uploads is not None:
                self._uploads.send(self._device[name][:stop], self._host[name][:stop])

    def _write_table(self, part: RangePlan, widths: Int64Array, rows: int, width: int) -> None:
        all_rows, all_columns = max(rows, self._used[0]), max(width, self._used[2])
        table = self._array("page_table")
        table[:all_rows, :all_columns] = self._null
        row_of = np.repeat(np.arange(rows), widths)
        table[row_of, np.arange(len(part.units)) - part.indptr[row_of]] = part.units
        if self._uploads is not None:
            packed = self._columns[: all_rows * all_columns].view(all_rows, all_columns)
            packed.copy_(self._host["page_table"][:all_rows, :all_columns])
            self._uploads.send(self._device["page_table"][:all_rows, :all_columns], packed)

    def _array(self, name: str) -> npt.NDArray[np.int64]:
        array: npt.NDArray[np.int64] = self._host[name].numpy()
        return array

    def _views(self, rows: int, tokens: int, width: int) -> dict[str, Any]:
        buffers = self._device
        return {
            "lengths": buffers["lengths"][:rows],
            "query_indptr": buffers["query_indptr"][: rows + 1],
            "positions": buffers["positions"][:tokens],
            "slots": buffers["slots"][:tokens],
            "page_table": buffers["page_table"][:rows, :width],
        }


def longest_request(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int:
    """Tokens of the longest request that any range has units for."""
    return max(
        (
            units.get(group, {}).get(item.name, 0) * layout.space(item.space).tokens_per_unit
            for group, layout in layouts.items()
            for item in layout.ranges
        ),
        default=0,
    )


def most_units(spaces: Mapping[str, IndexSpace], spec: SpaceSpec, units: int, longest: int) -> int:
    """Most logical units of a request of up to ``longest`` tokens, in a range of ``units``."""
    space, longest = spaces.get(spec.kind), max(1, longest)
    if space is None:
        return max(units, -(-longest // spec.tokens_per_unit) if spec.tokens_per_unit else 1)
    touched = max(1, space.num_units(spec, longest))
    # A table counts units that are dead too: where some fall dead it may be longer than its range has units.
    return touched if space.evict_before(spec, longest) else min(units, touched)
