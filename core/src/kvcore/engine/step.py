"""One forward pass over a cache: what an engine and its attention see of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from kvcore.contract import DONE, AttendParams, BatchPlan, Fence, Op, Unique
from kvcore.engine.turns import Turns, in_turn
from kvcore.errors import StaleHandleError
from kvcore.memory.store import Store
from kvcore.requests.manager import Manager
from kvcore.requests.stepplan import StepPlan, StepRow

if TYPE_CHECKING:
    import torch


class Step(Unique):
    """One forward pass: what the rows store, and what they attend to. Made by :meth:`kvcore.engine.cache.KVCache.begin`.

    A context manager: leaving it without :meth:`commit` (an exception, an abort) abandons the step, and the cache is as
    if it had never begun. Every op of a step that is over, or that is not the one its cache has open, raises
    StaleHandleError and touches nothing.

    Attributes:
        plan: its rows and units.
    """

    def __init__(
        self,
        manager: Manager,
        store: Store,
        plan: StepPlan,
        turns: Turns,
        on_abandon: Callable[[Collection[str]], None],
    ) -> None:
        self.plan = plan
        self._turns = turns
        self._on_abandon = on_abandon
        self._manager = manager
        self._store = store
        self._open = True

    @property
    def is_open(self) -> bool:
        """Whether it is neither committed nor abandoned."""
        return self._open

    @in_turn
    def batch(self, group: str, range_name: str | None = None) -> BatchPlan:
        """The batch of one layer group, as its kernels see it; of its first unit range, or another one."""
        self._check()
        return self._store.plan(group, range_name)

    @in_turn
    def state_slots(self, group: str, range_name: str | None = None) -> torch.Tensor:
        """Where the state of each row lies: ``int64 [R]``, −1 for none. See :meth:`kvcore.memory.store.Store.state_slots`."""
        self._check()
        return self._store.state_slots(group, range_name)

    @in_turn
    def state_trail(self, group: str, range_name: str | None = None) -> torch.Tensor:
        """Where the state after each new token goes: ``int64 [T]``, −1 where it need not be kept. See
        :meth:`kvcore.memory.store.Store.state_trail`."""
        self._check()
        return self._store.state_trail(group, range_name)

    @in_turn
    def store(
        self,
        layer: int,
        rows: Mapping[str, torch.Tensor],
        valid: torch.Tensor | None = None,
        after: Fence = DONE,
    ) -> Fence:
        """Encode and write the new tokens of a layer: ``rows[name] [T, H, D]``; ``valid`` bool ``[T]`` drops rows."""
        self._check()
        return self._store.store(layer, rows, valid, after)

    @in_turn
    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, params: AttendParams, after: Fence = DONE
    ) -> Fence:
        """Attention of the step's queries ``[T, Hq, Dk]`` on the pools, into ``out [T, Hq, Dv]``."""
        self._check()
        return self._store.attend(layer, q, out, params, after)

    @in_turn
    def run(self, op: Op, layer: int, buffers: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
        """An op of the format's own, by name: see :meth:`kvcore.memory.store.Store.run`."""
        self._check()
        return self._store.run(op, layer, buffers, after)

    @in_turn
    def load(self, layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
        """Decode stored rows at ``slots`` int64 ``[N]`` into ``out[name] [N, H, D]``; −1 gives zeros."""
        self._check()
        return self._store.load(layer, slots, out, after)

    @in_turn
    def commit(self, accepted: Sequence[int] | None = None) -> tuple[StepRow, ...]:
        """Make the step's tokens part of their requests; ``accepted[r]`` keeps only the first tokens of row r.

        Where the model has a state, tokens can be rejected of a speculative step only (UnsupportedError, the step stays
        open). Returns the rows whose request was released meanwhile: nothing of them is kept.
        """
        self._check()
        self._store.mark()
        stale = self._manager.commit(self.plan, accepted)
        self._open = False
        return stale

    @in_turn
    def abandon(self) -> None:
        """Undo the step: lengths are as before, units it reserved stay with their requests.

        A transfer that was offered layers of it is aborted.
        """
        self._check()
        self._on_abandon([row.request for row in self.plan.rows])
        self._manager.abandon(self.plan)
        self._open = False

    def _check(self) -> None:
        self._turns.demand_open("a step")
        if not self._open:
            raise StaleHandleError(
                "step is already committed or abandoned",
                step=self.plan.step,
                remedy="begin another one: what it stored belongs to its requests, or to nobody",
            )
        self._store.demand_current(self.plan.step)

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._open:
            self.abandon()
