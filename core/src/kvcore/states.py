"""State groups in a store: which slot the state of each row of a step lies in. Whoever computes a state writes it there."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kvcore.layout import Int64Array
from kvcore.stepplan import RangePlan
from kvcore.tensors import int64_tensor


class StateSlots:
    """The state slot of every row of a step for one unit range, in a buffer whose address never changes.

    Args:
        max_rows: most requests of a step.
        null_unit: first unit of the range: what stands where a row has no slot.
        device: where the buffer lives.
    """

    def __init__(self, max_rows: int, null_unit: int, device: str) -> None:
        self._null = null_unit
        self._rows = 0
        # A buffer made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)

    @property
    def slots(self) -> torch.Tensor:
        """``int64 [R]`` of the last step, −1 for rows without a state. Past R the buffer holds −1."""
        return self._slots[: self._rows]

    def build(self, part: RangePlan) -> None:
        """Take the slots of a step: of each row its first unit."""
        self._rows = part.num_rows
        self._slots.fill_(-1)
        self._slots[: self._rows] = int64_tensor(self._first_units(part), str(self._slots.device))

    def _first_units(self, part: RangePlan) -> Int64Array:
        starts, stops = part.indptr[:-1], part.indptr[1:]
        slots = (stops - starts).clip(max=1) - 1  # −1 for rows without a unit
        held = slots == 0
        slots[held] = part.units[starts[held]]
        slots[slots == self._null] = -1
        return slots

    def invalidate(self, rows: Collection[int]) -> None:
        """Cut rows off from their slots."""
        self._slots[list(rows)] = -1
