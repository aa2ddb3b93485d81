"""One rank's memory: pools, kernels and the batch of the current step. Obeys step plans, decides nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from kvcore.batch import BatchBuilder
from kvcore.contract import DONE, Arena, AttendParams, BatchPlan, Fence, Format, Kernel, PoolBuilder
from kvcore.dispatch import ChosenKernels, KernelChoice, KernelTable, choose_kernels
from kvcore.errors import (
    ConfigError,
    IntegrityError,
    LayoutError,
    PluginError,
    StaleHandleError,
    UnsupportedError,
    nearest,
)
from kvcore.layout import Layout
from kvcore.pool import Pool
from kvcore.spec import LayerGroup, ModelSpec, Shard
from kvcore.stepplan import RangePlan, StepPlan
from kvcore.tensors import int64_tensor

_T = TypeVar("_T")


@dataclass
class _GroupState:
    """What the store keeps of one layer group."""

    group: LayerGroup
    row_shapes: dict[str, tuple[int, int]]
    pool: Pool
    table: KernelTable
    builders: dict[str, BatchBuilder]
    plans: dict[str, BatchPlan] = field(default_factory=dict)
    plan: BatchPlan | None = None


@dataclass(frozen=True, slots=True)
class _Route:
    """Where a model layer's bytes are."""

    state: _GroupState
    layer: int
    writes: bool


class Store:
    """Pools and kernels of one rank.

    Args:
        model: the model's layer groups; layer ids are distinct over all of them.
        layouts, formats, units: by group prefix: the bytes of this rank, what gives them meaning, and the units of every
            range (null units included).
        pool_builders: exactly one of them must serve the device.
        kernels: the candidates of every op.
        device: ``cpu``, ``cuda:0``, …
        max_rows, max_tokens: the largest step.
        shard: which heads of the model this rank holds.

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
    ) -> None:
        self.model = model
        self.op_counts: Counter[str] = Counter()
        self._device = device
        self._sizes = (max_rows, max_tokens)
        self._groups: dict[str, _GroupState] = {}
        self._routes: dict[int, _Route] = {}
        self._step: StepPlan | None = None
        self._last_step: int | None = None
        self._decode = False
        self._longest = model.max_length or _longest_request(layouts, units)
        ready = []
        for group in model.groups:
            layout, fmt = _of(layouts, group, "layout"), _of(formats, group, "format")
            _check_format(group, layout, fmt)
            builder = choose_builder(pool_builders, device, layout)
            ready.append((group, layout, fmt, builder, choose_kernels(kernels, device, layout, group)))
        _check_layers(model)
        try:
            for group, layout, fmt, builder, chosen in ready:
                self._add(group, layout, fmt, _of(units, group, "unit counts"), builder, chosen, shard or Shard())
        except BaseException:
            self.close()
            raise

    def _add(
        self,
        group: LayerGroup,
        layout: Layout,
        fmt: Format,
        units: Mapping[str, int],
        builder: PoolBuilder,
        chosen: ChosenKernels,
        shard: Shard,
    ) -> None:
        pool = Pool(layout, units, builder, self._device)
        builders = {}
        for item in layout.ranges:
            tokens = layout.space_of_range(item.name).tokens_per_unit
            # The table of a window counts units that are dead too: it is longer than its range has units.
            evicts = layout.space_of_range(item.name).option("window") > 0
            longest = self._longest if evicts else self.model.max_length
            first = pool.first_unit(item.name)
            builders[item.name] = BatchBuilder(
                *self._sizes,
                max(units[item.name], -(-longest // tokens) if tokens else 1),
                null_unit=first,
                device=self._device,
                whole_rows=layout.space_of_range(item.name).unit == "row",
            )
        shapes = {t.name: (shard.num_heads(t), t.head_dim) for t in group.tensors}
        state = _GroupState(group, shapes, pool, chosen.bind(pool, group, fmt), builders)
        self._groups[group.prefix] = state
        for layer in layout.layers:
            self._routes[layer] = _Route(state, layer, True)
        for layer, storage in group.shares:
            if storage in layout.layers:
                self._routes[layer] = _Route(state, storage, False)

    # --- what there is ---

    @property
    def pools(self) -> dict[str, Pool]:
        """Pools by group prefix."""
        return {name: state.pool for name, state in self._groups.items()}

    @property
    def tables(self) -> dict[str, KernelTable]:
        """Kernel tables by group prefix."""
        return {name: state.table for name, state in self._groups.items()}

    def arenas(self) -> dict[str, Arena]:
        """Arenas by group prefix, as transports register them."""
        return {name: state.pool.arena for name, state in self._groups.items()}

    def explain(self) -> dict[str, tuple[KernelChoice, ...]]:
        """The kernel of every op, and why the others were refused, by group prefix."""
        return {name: state.table.choices for name, state in self._groups.items()}

    def plan(self, group: str, range_name: str | None = None) -> BatchPlan:
        """The batch of the current step for a range of a group (None: its first). Raises StaleHandleError before
        the first step."""
        if group not in self._groups:
            raise ConfigError("no such layer group", group=group, remedy=nearest(group, self._groups))
        state = self._groups[group]
        name = range_name or state.pool.layout.ranges[0].name
        if name not in state.plans:
            state.pool.layout.space_of_range(name)
            raise StaleHandleError("no step has begun", group=group)
        return state.plans[name]

    # --- steps ---

    def begin(self, plan: StepPlan) -> None:
        """Start a step: copy-on-write first, then zero fresh units, with the batch tensors built.

        Raises StaleHandleError for a step that is not newer than the last, which stays current; IntegrityError or
        CapacityError for a plan that does not fit this store, and then no step is current. No byte of a pool has
        changed in either case.
        """
        if self._last_step is not None and plan.step <= self._last_step:
            raise StaleHandleError("step is older than the store's last one", step=plan.step, last=self._last_step)
        self._end_step()
        work: list[tuple[_GroupState, RangePlan]] = []
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
                page_size = state.pool.layout.space_of_range(item.name).tokens_per_unit
                plans[name][item.name] = state.builders[item.name].build(plan, part, page_size)
                work.append((state, part))
        for state, part in work:
            if len(part.copies_src):
                src = int64_tensor(part.copies_src, self._device)
                state.table.copy_units(part.range, src, int64_tensor(part.copies_dst, self._device), DONE)
                self.op_counts["copy_units"] += 1
        for state, part in work:
            state.pool.zero(part.fresh, state.pool.components_of(part.range))
        for name, state in self._groups.items():
            state.plans = plans[name]
            state.plan = state.plans[state.pool.layout.ranges[0].name]
        self._step, self._last_step = plan, plan.step
        self._decode = all(row.count == 1 for row in plan.rows)

    def invalidate(self, request_id: str) -> None:
        """Cut a released request off from its units for the rest of the step: its writes are dropped, it reads zeros.

        A request that is not in the current step is left alone.
        """
        rows = [n for n, row in enumerate(self._step.rows) if row.request == request_id] if self._step else []
        if not rows:
            return
        for state in self._groups.values():
            state.plans = {name: builder.invalidate(rows) for name, builder in state.builders.items()}
            state.plan = state.plans[state.pool.layout.ranges[0].name]

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
        _check_rows(route.state, rows, plan.num_tokens, valid)
        self.op_counts["store"] += 1
        with torch.no_grad():
            return route.state.table.store(route.layer, rows, plan, valid, after)

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
        _check_attend(plan, q, out, params)
        _check_window(route.state.group, params)
        op = "attend_decode" if self._decode else "attend_prefill"
        self.op_counts[op] += 1
        table = route.state.table
        with torch.no_grad():
            if self._decode:
                return table.attend_decode(route.layer, q, out, plan, params, after)
            return table.attend_prefill(route.layer, q, out, plan, params, after)

    def load(self, layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
        """Fill ``out[name][N, H, D]`` from ``slots [N]`` (any integer dtype) of a model layer; −1 gives zeros."""
        route = self._route(layer)
        ids = int64_tensor(slots, self._device)
        _check_load(route.state, ids, out)
        self.op_counts["load"] += 1
        with torch.no_grad():
            return route.state.table.load(route.layer, ids, out, after)

    def close(self) -> None:
        """Give the memory back. Idempotent; the store is of no use afterwards."""
        self._end_step()
        self._routes.clear()
        while self._groups:
            self._groups.popitem()[1].pool.close()

    def _route(self, layer: int) -> _Route:
        try:
            return self._routes[layer]
        except KeyError:
            raise ConfigError("no such layer on this rank", layer=layer, layers=sorted(self._routes)) from None

    def _current(self, route: _Route) -> BatchPlan:
        if route.state.plan is None:
            raise StaleHandleError("no step has begun", group=route.state.group.prefix)
        return route.state.plan


def _longest_request(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int:
    """Tokens of the longest request that any range has units for."""
    return max(
        (
            units.get(group, {}).get(item.name, 0) * layout.space(item.space).tokens_per_unit
            for group, layout in layouts.items()
            for item in layout.ranges
        ),
        default=0,
    )


def choose_builder(builders: Sequence[PoolBuilder], device: str, layout: Layout) -> PoolBuilder:
    """Return the one pool builder that serves a device and layout.

    Raises UnsupportedError with every refusal where there is none, PluginError where there are several.
    """
    answers = [(builder, builder.supports(device, layout)) for builder in builders]
    able = [builder for builder, answer in answers if answer]
    if not able:
        raise UnsupportedError(
            "no pool builder for the device",
            device=device,
            group=layout.group,
            refused=[f"{builder.name}: {answer.reason}" for builder, answer in answers],
            remedy="enable a plugin that has one, or choose another device",
        )
    if len(able) > 1:
        raise PluginError(
            "several pool builders serve the device",
            device=device,
            builders=sorted(builder.name for builder in able),
            remedy="disable the plugin of one of them",
        )
    return able[0]


def _of(items: Mapping[str, _T], group: LayerGroup, what: str) -> _T:
    if group.prefix not in items:
        raise ConfigError(f"layer group has no {what}", group=group.prefix, got=sorted(items))
    return items[group.prefix]


def _check_format(group: LayerGroup, layout: Layout, fmt: Format) -> None:
    fmt.supports(group).require("the format cannot hold the layer group", format=fmt.name, group=group.prefix)
    if (layout.format, layout.revision) != (fmt.name, fmt.revision):
        raise LayoutError(
            "layout is of another format",
            group=group.prefix,
            expected=f"{fmt.name} revision {fmt.revision}",
            got=f"{layout.format} revision {layout.revision}",
        )


def _check_layers(model: ModelSpec) -> None:
    owner: dict[int, str] = {}
    for group in model.groups:
        for layer in (*group.layers, *(layer for layer, _ in group.shares)):
            if layer in owner:
                raise ConfigError("a layer is in two groups", layer=layer, groups=[owner[layer], group.prefix])
            owner[layer] = group.prefix


def _check_rows(state: _GroupState, rows: Mapping[str, torch.Tensor], tokens: int, valid: torch.Tensor | None) -> None:
    for name, shape in state.row_shapes.items():
        if name not in rows or tuple(rows[name].shape) != (tokens, *shape):
            got = list(rows[name].shape) if name in rows else sorted(rows)
            raise LayoutError(
                "rows do not match the step", group=state.group.prefix, tensor=name, expected=[tokens, *shape], got=got
            )
    if len(rows) != len(state.row_shapes):
        raise LayoutError(
            "rows name unknown tensors", group=state.group.prefix, expected=list(state.row_shapes), got=sorted(rows)
        )
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (tokens,)):
        raise LayoutError("valid is not one bool a token", expected=[tokens], got=f"{valid.dtype} {list(valid.shape)}")


def _check_attend(plan: BatchPlan, q: torch.Tensor, out: torch.Tensor, params: AttendParams) -> None:
    if q.ndim != 3 or q.shape[0] != plan.num_tokens or out.ndim != 3 or out.shape[:2] != q.shape[:2]:
        raise LayoutError(
            "queries do not match the step",
            expected=f"q [{plan.num_tokens}, Hq, Dk] and out [{plan.num_tokens}, Hq, Dv]",
            got=[list(q.shape), list(out.shape)],
        )
    if params.window is not None and params.window < 1:
        raise ConfigError("a window holds at least the token itself", window=params.window)
    if params.sinks is not None and tuple(params.sinks.shape) != (q.shape[1],):
        raise LayoutError("sinks are one logit a query head", expected=[q.shape[1]], got=list(params.sinks.shape))
    if params.position_bias is not None:
        shape = (*q.shape[:2], plan.max_length)
        if tuple(params.position_bias.shape) != shape:
            raise LayoutError(
                "position bias does not match the step", expected=list(shape), got=list(params.position_bias.shape)
            )


def _check_window(group: LayerGroup, params: AttendParams) -> None:
    held = dict(group.space_options).get("window") if group.space == "window" else None
    if held is not None and (params.window is None or params.window > held):
        raise UnsupportedError(
            "the layer group keeps a window only, and attention asks for more",
            group=group.prefix,
            expected=f"a window of at most {held}",
            got=params.window,
            remedy="pass AttendParams(window=…)",
        )


def _check_load(state: _GroupState, slots: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
    layout = state.pool.layout
    item = layout.ranges[0].name
    end = state.pool.end_unit(item) * layout.space_of_range(item).tokens_per_unit
    if slots.ndim != 1 or bool(((slots < -1) | (slots >= end)).any()):
        raise IntegrityError("slot is outside the pool", group=layout.group, expected=f"[N] in -1 … {end - 1}")
    for name, shape in state.row_shapes.items():
        if name not in out or tuple(out[name].shape) != (len(slots), *shape):
            raise LayoutError("output does not match the slots", tensor=name, expected=[len(slots), *shape])
