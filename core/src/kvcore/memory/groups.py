"""What a store keeps of each layer group, and where a model layer's tokens are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from kvcore.contract import DONE, BatchPlan, Fence, Format, all_fences
from kvcore.memory.batch import BatchBuilder
from kvcore.memory.constants import ConstantFields
from kvcore.memory.pool import Pool
from kvcore.memory.states import StateSlots
from kvcore.plugins.dispatch import KernelTable
from kvcore.spec import LayerGroup


@dataclass
class GroupState:
    """What the store keeps of one layer group."""

    group: LayerGroup
    row_shapes: dict[str, tuple[int, int]]
    pool: Pool
    constants: ConstantFields
    format: Format | None
    table: KernelTable | None
    """None for groups of state: what they hold is written by whoever computes it."""
    builders: dict[str, BatchBuilder]
    slots: dict[str, StateSlots]
    plans: dict[str, BatchPlan] = field(default_factory=dict)
    plan: BatchPlan | None = None

    def set_plans(self, plans: Mapping[str, BatchPlan]) -> None:
        """Make these the batches of the step; each knows those of the other ranges."""
        together: dict[str, BatchPlan] = {}
        together.update({name: replace(plan, ranges=together) for name, plan in plans.items()})
        self.plans, self.plan = together, together[self.pool.layout.token_range]

    def issued(self, fence: Fence) -> Fence:
        """The fence of an op. Kernels order their own work by the device's stream; whatever leaves the stream (an offer,
        a copy) needs an event, which the pool's mark is."""
        marked = self.pool.mark()
        return fence if marked is DONE else all_fences([fence, marked])

    def copy_units(self, range_name: str, src: torch.Tensor, dst: torch.Tensor) -> None:
        if self.table is not None:
            self.table.copy_units(range_name, src, dst, DONE)
            return
        for units in self.pool.unit_views(range_name):
            units[dst] = units[src]


@dataclass(frozen=True, slots=True)
class Route:
    """Where the tokens of a model layer are."""

    state: GroupState
    table: KernelTable
    layer: int
    writes: bool
