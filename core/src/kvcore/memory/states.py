"""State groups in a store: which slot the state of each row of a step lies in. Whoever computes a state writes it there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from kvcore.layout import Int64Array
from kvcore.memory.tensors import int64_tensor
from kvcore.requests.stepplan import RangePlan


class StateSlots:
    """The state slots of a step for one unit range, by row and by new token, in buffers whose addresses never change.

    Args:
        max_rows, max_tokens: most requests, and new tokens, of a step.
        null_unit: first unit of the range: what stands where a row has no slot.
        device: where the buffers live.
    """

    def __init__(self, max_rows: int, max_tokens: int, null_unit: int, device: str) -> None:
        self._null = null_unit
        self._device = device
        self._ends = np.empty(0, np.int64)
        # A buffer made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            self._slots = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
            self._trail = torch.full((max_tokens,), -1, dtype=torch.int64, device=device)

    @property
    def slots(self) -> torch.Tensor:
        """``int64 [R]`` of the last step, −1 for rows without a state. Past R the buffer holds −1."""
        return self._slots[: len(self._ends)]

    @property
    def trail(self) -> torch.Tensor:
        """``int64 [T]`` of the last step: where the state after each new token goes, −1 where it need not be kept.

        The last token of a row has the row's slot. Past T the buffer holds −1.
        """
        return self._trail[: self._ends[-1] if len(self._ends) else 0]

    def build(self, part: RangePlan, counts: Sequence[int]) -> None:
        """Take the slots of a step: of each row its first unit; ``counts`` are the rows' new tokens."""
        slots = self._first_units(part)
        self._ends = np.cumsum(np.array(counts, np.int64))
        if len(part.trail):
            trail = part.trail.copy()
            trail[trail == self._null] = -1
        else:
            trail = np.full(self._ends[-1] if len(self._ends) else 0, -1, np.int64)
            trail[self._ends - 1] = slots
        for buffer, values in ((self._slots, slots), (self._trail, trail)):
            buffer.fill_(-1)
            buffer[: len(values)] = int64_tensor(values, self._device)

    def _first_units(self, part: RangePlan) -> Int64Array:
        starts, stops = part.indptr[:-1], part.indptr[1:]
        slots = (stops - starts).clip(max=1) - 1  # −1 for rows without a unit
        held = slots == 0
        slots[held] = part.units[starts[held]]
        slots[slots == self._null] = -1
        return slots

    def invalidate(self, rows: Collection[int]) -> None:
        """Cut rows off from their slots."""
        starts = np.concatenate((np.zeros(1, np.int64), self._ends))
        for row in rows:
            self._slots[row] = -1
            self._trail[starts[row] : starts[row + 1]] = -1
