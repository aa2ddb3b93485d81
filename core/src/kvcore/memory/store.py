"""One rank's memory: pools, kernels and the batch of the current step. Obeys step plans, decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from kvcore.contract import (
    DONE,
    OPS,
    Arena,
    AttendParams,
    BatchPlan,
    Fence,
    Format,
    IndexSpace,
    Kernel,
    Op,
    PoolBuilder,
    PoolView,
    Unique,
    all_fences,
)
from kvcore.errors import (
    ConfigError,
    StaleHandleError,
    UnsupportedError,
    nearest,
)
from kvcore.layout import Layout
from kvcore.memory.batch import BatchBuilder, longest_request, most_units
from kvcore.memory.constants import ConstantFields
from kvcore.memory.groups import GroupState, Route
from kvcore.memory.opchecks import check_attend, check_format, check_layers, check_load, check_rows, check_window
from kvcore.memory.pool import Pool
from kvcore.memory.states import StateSlots
from kvcore.memory.tensors import int64_tensor
from kvcore.plugins.dispatch import ChosenKernels, KernelChoice, KernelTable, choose_builder, choose_kernels
from kvcore.requests.spaces import BUILTIN_SPACES
from kvcore.requests.stepplan import RangePlan, StepPlan
from kvcore.spec import LayerGroup, ModelSpec, Shard

_T = TypeVar("_T")

_Tokens = tuple[Format, ChosenKernels]
"""What a group of attention has and a group of state does not."""


class Store(Unique):
    """Pools and kernels of one rank.

    Args:
        model: the model's layer groups; layer ids are distinct over those of attention. A layer may also be in groups of
            state.
        layouts, formats, units: by group prefix: the bytes of this rank, what gives them meaning (groups of attention
            only), and the units of every range (null units included).
        pool_builders: exactly one of them must serve the device.
        kernels: the candidates of every op.
        device: ``cpu``, ``cuda:0``, …
        max_rows, max_tokens: the largest step.
        shard: which heads of the model this rank holds.
        spaces: index spaces by kind, which say how wide the page tables of a range may become.

    Raises UnsupportedError, PluginError or ConfigError for what cannot work, before memory is allocated; CapacityError
    where memory is missing, with nothing kept.
    """

    def __init__(
        self,
        model: ModelSpec,
        layouts: Mapping[str, Layout],
        formats: Mapping[str, Format],
        units: Mapping[str, Mapping[str, int]],
        pool_builders: Sequence[PoolBuilder],
        kernels: Sequence[Kernel],
        *,
        device: str = "cpu",
        max_rows: int,
        max_tokens: int,
        shard: Shard | None = None,
        spaces: Mapping[str, IndexSpace] = BUILTIN_SPACES,
    ) -> None:
        self.model = model
        self.op_counts: Counter[str] = Counter()
        self._device = device
        self._sizes = (max_rows, max_tokens)
        self._groups: dict[str, GroupState] = {}
        self._routes: dict[int, Route] = {}
        self._step: StepPlan | None = None
        self._last_step: int | None = None
        self._decode = False
        self._spaces = spaces
        # A step that begins below the model's length may end beyond it, by drafts that are rejected.
        self._longest = model.max_length + max_tokens if model.max_length else longest_request(layouts, units)
        ready: list[tuple[LayerGroup, Layout, PoolBuilder, _Tokens | None]] = []
        for group in model.groups:
            layout, tokens = _of(layouts, group, "layout"), None
            if group.kind == "attention":
                fmt = _of(formats, group, "format")
                check_format(group, layout, fmt)
                tokens = (fmt, choose_kernels(kernels, device, layout, group, fmt.ops))
            ready.append((group, layout, choose_builder(pool_builders, device, layout), tokens))
        check_layers(model)
        try:
            for group, layout, builder, tokens in ready:
                self._add(group, layout, _of(units, group, "unit counts"), builder, tokens, shard or Shard())
        except BaseException:
            self.close()
            raise

    def _add(
        self,
        group: LayerGroup,
        layout: Layout,
        units: Mapping[str, int],
        builder: PoolBuilder,
        tokens_as: _Tokens | None,
        shard: Shard,
    ) -> None:
        pool = Pool(layout, units, builder, self._device)
        builders = {}
        slots = {}
        for item in layout.ranges:
            first = pool.first_unit(item.name)
            builders[item.name] = BatchBuilder(
                *self._sizes,
                most_units(self._spaces, layout.space_of_range(item.name), units[item.name], self._longest),
                null_unit=first,
                device=self._device,
                whole_rows=layout.space_of_range(item.name).unit == "row",
            )
            if group.kind == "state" and layout.space_of_range(item.name).unit == "state_slot":
                slots[item.name] = StateSlots(*self._sizes, first, self._device)
        constants = ConstantFields(pool)
        shapes = {t.name: (shard.num_heads(t), t.head_dim) for t in group.tensors}
        fmt = tokens_as[0] if tokens_as is not None else None
        state = GroupState(group, shapes, pool, constants, fmt, None, builders, slots)
        self._groups[group.prefix] = state  # from here on closed with the store
        if tokens_as is None:
            return
        fmt, chosen = tokens_as
        if constants:
            constants.write(fmt.constants(layout), fmt.check_constants)
        table = state.table = chosen.bind(pool, group, fmt)
        for layer in layout.layers:
            self._routes[layer] = Route(state, table, layer, True)
        for layer, storage in group.shares:
            if storage in layout.layers:
                self._routes[layer] = Route(state, table, storage, False)

    # --- what there is ---

    @property
    def pools(self) -> dict[str, Pool]:
        """Pools by group prefix."""
        return {name: state.pool for name, state in self._groups.items()}

    @property
    def tables(self) -> dict[str, KernelTable]:
        """Kernel tables by group prefix, of groups of attention."""
        return {name: state.table for name, state in self._groups.items() if state.table is not None}

    def arenas(self) -> dict[str, Arena]:
        """Arenas by group prefix, as transports register them."""
        return {name: state.pool.arena for name, state in self._groups.items()}

    def explain(self) -> dict[str, tuple[KernelChoice, ...]]:
        """The kernel of every op, and why the others were refused, by group prefix; groups of state have no ops."""
        return {name: table.choices for name, table in self.tables.items()}

    def plan(self, group: str, range_name: str | None = None) -> BatchPlan:
        """The batch of the current step for a range of a group (None: its first). Raises StaleHandleError before
        the first step."""
        state = self._group(group)
        name = range_name or state.pool.layout.token_range
        if name not in state.plans:
            state.pool.layout.space_of_range(name)
            raise StaleHandleError("no step has begun", group=group)
        return state.plans[name]

    def _group(self, group: str) -> GroupState:
        if group not in self._groups:
            raise ConfigError("no such layer group", group=group, remedy=nearest(group, self._groups))
        return self._groups[group]

    # --- states ---

    def state(self, group: str) -> PoolView:
        """Views of a group of state: ``field(layer, region, field)[slot]``, slots as of :meth:`state_slots`.

        Raises UnsupportedError for a group of attention, whose bytes only its kernels write.
        """
        found = self._group(group)
        if found.group.kind != "state":
            raise UnsupportedError(
                "the group stores tokens, not a state", group=group, remedy="use store, load and attend"
            )
        return found.pool

    def state_slots(self, group: str, range_name: str | None = None) -> torch.Tensor:
        """The slot of each row of the current step: ``int64 [R]`` on the device, −1 for a row without one.

        The tensor has the same address in every step. A slot was zeroed when the request was first given it, and a fork
        has its own copy before it first writes.

        Args:
            group: a group of state.
            range_name: one of its unit ranges; None: its first of state slots.
        """
        return self._slots_of(group, range_name).slots

    def state_trail(self, group: str, range_name: str | None = None) -> torch.Tensor:
        """Where the state after each new token of the current step goes: ``int64 [T]`` on the device, −1 where it need
        not be kept. Arguments and address as of :meth:`state_slots`.

        The last token of a row has the row's own slot, which holds the state before the step. In a step that is not
        speculative all others are −1; in one that is they are zeroed slots, for the caller to write whole.
        """
        return self._slots_of(group, range_name).trail

    def _slots_of(self, group: str, range_name: str | None) -> StateSlots:
        self.state(group)
        found = self._group(group)
        name = range_name or next(iter(found.slots), found.pool.layout.token_range)
        if name not in found.slots:
            found.pool.layout.space_of_range(name)
            raise UnsupportedError(
                "units of this range are no state slots", group=group, range=name, remedy="read its batch"
            )
        if not found.plans:
            raise StaleHandleError("no step has begun", group=group)
        return found.slots[name]

    # --- constants ---

    def set_constants(self, group: str, values: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Fill constants of a group: ``(region, field)`` → ``[L, *axes]``, see :class:`kvcore.memory.constants.ConstantFields`.

        Nothing that was stored before may still be in use: :meth:`kvcore.engine.cache.KVCache.set_constants` sees to that.
        """
        state = self._group(group)
        state.constants.write(values, state.format.check_constants if state.format is not None else None)
        state.pool.mark()

    def constants(self, group: str) -> dict[str, str]:
        """Digests of a group's constants, for peers to compare: see :meth:`kvcore.memory.constants.ConstantFields.digests`."""
        return self._group(group).constants.digests()

    def require_constants(self) -> None:
        """Raise ConfigError while a constant of any group is unset."""
        for state in self._groups.values():
            state.constants.require()

    # --- steps ---

    def begin(self, plan: StepPlan) -> None:
        """Start a step: copy-on-write first, then zero fresh units, with the batch tensors built.

        Raises StaleHandleError for a step that is not newer than the last, which stays current; IntegrityError or
        CapacityError for a plan that does not fit this store, UnsupportedError for a speculative one of a range without
        state slots, and then no step is current. No byte of a pool has
        changed in either case.
        """
        if self._last_step is not None and plan.step <= self._last_step:
            raise StaleHandleError("step is older than the store's last one", step=plan.step, last=self._last_step)
        self.require_constants()
        self._end_step()
        work: list[tuple[GroupState, RangePlan]] = []
        plans: dict[str, dict[str, BatchPlan]] = {}
        for name, state in self._groups.items():
            plans[name] = {}
            for item in state.pool.layout.ranges:
                part = plan.of(name, item.name)
                components = state.pool.components_of(item.name)
                state.pool.checked_units(components, part.units)
                state.pool.checked_units(components, part.copies_src)
                state.pool.checked_units(components, part.copies_dst, writable=True)
                state.pool.checked_units(components, part.fresh, writable=True)
                state.pool.checked_units(components, part.trail[part.trail >= 0], writable=True)
                if len(part.trail) and item.name not in state.slots:
                    raise UnsupportedError(
                        "nobody writes the state after each token of this range",
                        group=name,
                        range=item.name,
                        remedy="step without speculation, or hold the state in slots of a group of state",
                    )
                page_size = state.pool.layout.space_of_range(item.name).tokens_per_unit
                plans[name][item.name] = state.builders[item.name].build(plan, part, page_size)
                work.append((state, part))
        for state, part in work:
            if len(part.copies_src):
                src = int64_tensor(part.copies_src, self._device)
                state.copy_units(part.range, src, int64_tensor(part.copies_dst, self._device))
                self.op_counts["copy_units"] += 1
        for state, part in work:
            state.pool.zero(part.fresh, state.pool.components_of(part.range))
        for name, state in self._groups.items():
            state.set_plans(plans[name])
            for range_name, slots in state.slots.items():
                slots.build(plan.of(name, range_name), [row.count for row in plan.rows])
        self._step, self._last_step = plan, plan.step
        self._decode = all(row.count == 1 for row in plan.rows)

    def demand_current(self, step: int) -> None:
        """Raise StaleHandleError unless ``step`` is the step whose batch the ops of this store use."""
        if self._step is None or self._step.step != step:
            raise StaleHandleError(
                "the store is at another step", step=step, current=None if self._step is None else self._step.step
            )

    def invalidate(self, request_id: str) -> None:
        """Cut a released request off from its units for the rest of the step: its writes are dropped, it reads zeros.

        A request that is not in the current step is left alone.
        """
        rows = [n for n, row in enumerate(self._step.rows) if row.request == request_id] if self._step else []
        if not rows:
            return
        for state in self._groups.values():
            state.set_plans({name: builder.invalidate(rows) for name, builder in state.builders.items()})
            for slots in state.slots.values():
                slots.invalidate(rows)

    def _end_step(self) -> None:
        self._step = None
        for state in self._groups.values():
            state.plans, state.plan = {}, None

    # --- ops of the current step ---

    def store(
        self,
        layer: int,
        rows: Mapping[str, torch.Tensor],
        valid: torch.Tensor | None = None,
        after: Fence = DONE,
    ) -> Fence:
        """Store the step's new tokens of one model layer.

        Args:
            layer: model layer id; a layer that shares another's storage has nothing of its own to store.
            rows: tensor name → ``[T, H, D]``, floating, T as in the plan and H as held by this rank.
            valid: bool ``[T]``; rows marked False are dropped.
            after: work to wait for.
        """
        route = self._route(layer)
        if not route.writes:
            raise UnsupportedError("layer reads another layer's storage", layer=layer, storage_layer=route.layer)
        plan = self._current(route)
        check_rows(route.state.group, route.state.row_shapes, rows, plan.num_tokens, valid)
        self.op_counts["store"] += 1
        with torch.no_grad():
            return route.state.issued(route.table.store(route.layer, rows, plan, valid, after))

    def attend(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, params: AttendParams, after: Fence = DONE
    ) -> Fence:
        """Attention of the step's new tokens, already stored, over everything their requests hold.

        Args:
            layer: model layer id.
            q: ``[T, Hq, Dk]``.
            out: ``[T, Hq, Dv]``, written.
            params: scale, window, sinks, bias.
            after: work to wait for.

        A step with one token for every row is served by ``attend_decode``, any other by ``attend_prefill``.
        """
        route = self._route(layer)
        plan = self._current(route)
        check_attend(plan, q, out, params)
        check_window(route.state.group, params)
        op = "attend_decode" if self._decode else "attend_prefill"
        self.op_counts[op] += 1
        with torch.no_grad():
            if self._decode:
                return route.state.issued(route.table.attend_decode(route.layer, q, out, plan, params, after))
            return route.state.issued(route.table.attend_prefill(route.layer, q, out, plan, params, after))

    def run(self, op: Op, layer: int, buffers: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
        """Run an op of the format's own on the current step.

        Args:
            op: one of those in :attr:`kvcore.contract.Format.ops` that are not standard.
            layer: model layer id.
            buffers: what it reads and writes besides the pool, as the op documents.
            after: work to wait for.

        UnsupportedError for an op that the format of the layer does not have.
        """
        route = self._route(layer)
        kernel = route.table.others.get(op)
        if kernel is None:
            raise UnsupportedError(
                "the format has no such op of its own",
                op=op,
                layer=layer,
                format=route.state.pool.layout.format,
                remedy=f"Step.{op} is its method" if op in OPS else nearest(op, route.table.others),
            )
        plan = self._current(route)
        self.op_counts[op] += 1
        with torch.no_grad():
            return route.state.issued(kernel(route.layer, plan, buffers, after))

    def load(self, layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
        """Fill ``out[name][N, H, D]`` from ``slots [N]`` (any integer dtype) of a model layer; −1 gives zeros."""
        route = self._route(layer)
        ids = int64_tensor(slots, self._device)
        check_load(route.state.pool, route.state.row_shapes, ids, out)
        self.op_counts["load"] += 1
        with torch.no_grad():
            return route.state.issued(route.table.load(route.layer, ids, out, after))

    def mark(self) -> Fence:
        """The fence of everything this thread has given the device to do to any pool.

        Every op of a step marks its own pool. To be called after work of another kind: the replay of a captured graph,
        states written by their own kernels. Free on the CPU.
        """
        return all_fences([state.pool.mark() for state in self._groups.values()])

    def close(self) -> None:
        """Give the memory back. Idempotent; the store is of no use afterwards."""
        self._end_step()
        self._routes.clear()
        while self._groups:
            self._groups.popitem()[1].pool.close()

    def _route(self, layer: int) -> Route:
        try:
            return self._routes[layer]
        except KeyError:
            raise ConfigError(
                "no such layer stores tokens on this rank", layer=layer, layers=sorted(self._routes)
            ) from None

    def _current(self, route: Route) -> BatchPlan:
        if route.state.plan is None:
            raise StaleHandleError("no step has begun", group=route.state.group.prefix)
        return route.state.plan


def _of(items: Mapping[str, _T], group: LayerGroup, what: str) -> _T:
    if group.prefix not in items:
        raise ConfigError(f"layer group has no {what}", group=group.prefix, got=sorted(items))
    return items[group.prefix]
