"""Caches for the suites: the real façade around one thing under test, and what is read out of it byte by byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.config import load_config
from kvcore.contract import (
    FULL,
    Backup,
    Format,
    IndexSpace,
    Kernel,
    PoolBuilder,
    PoolView,
    StateComponent,
    Support,
    Transport,
    unsupported,
)
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed
from kvcore.errors import UnsupportedError
from kvcore.layout import ArenaOrder, Field, Layout, Region
from kvcore.plugins.registry import Registry
from kvcore.requests.spaces import BUILTIN_SPACES
from kvcore.spec import LayerGroup, ModelSpec, Shard
from kvcore.testing.memory import POISON, Bytes, Map, pattern

TIMEOUT_S = 20.0
"""How long a suite waits for something that takes milliseconds."""


def skip_unsupported(support: Support, what: str) -> None:
    """Skip a check because the subject declares that it cannot: the only reason for which the kit skips.

    A refusal without a reason is a failure.
    """
    if not support:
        assert support.reason, f"{what} is refused without a reason"
        pytest.skip(f"{what}: {support.reason}")


class _NoAttention(Kernel):
    """Serves groups with tensors that nothing attends over, so that how they are stored and moved can be checked."""

    formats = ("*",)
    priority = -1_000_000

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups that the reference does not attend over."""
        names = {tensor.name for tensor in group.tensors}
        attended = {"k", "v"} <= names or "latent" in names
        return unsupported("a real kernel serves this group") if attended else FULL

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """Return a function that refuses."""

        def attend(*arguments: object) -> None:
            raise UnsupportedError("the conformance kit does not attend over this group", group=group.prefix)

        return attend


class NoDecode(_NoAttention):
    """No decode."""

    op = "attend_decode"
    name = "conformance_no_decode"


class NoPrefill(_NoAttention):
    """No prefill."""

    op = "attend_prefill"
    name = "conformance_no_prefill"


class Subject(Registry):
    """A registry in which one thing is an instance given by a test; everything else comes from ``base``."""

    def __init__(
        self,
        base: Registry,
        *,
        format: Format | None = None,
        backup: Callable[[], Backup] | None = None,
        transport: Callable[[], Transport] | None = None,
        state: StateComponent | None = None,
    ) -> None:
        super().__init__([])
        self._base = base
        self._state = state
        self._format, self._backup, self._transport = format, backup, transport

    def format(self, name: str, /, **options: Any) -> Format:
        """The format under test."""
        return self._format or self._base.format(name, **options)

    def backup(self, name: str, /, **options: Any) -> Backup:
        """The backup under test."""
        return self._backup() if self._backup else self._base.backup(name, **options)

    def transport(self, name: str, /, **options: Any) -> Transport:
        """The transport under test."""
        return self._transport() if self._transport else self._base.transport(name, **options)

    def kernels(self) -> list[Kernel]:
        """Kernels of the base, and stand-ins for attention over groups that no attention exists for."""
        return [*self._base.kernels(), NoDecode(), NoPrefill()]

    def pool_builders(self) -> list[PoolBuilder]:
        """Pool builders of the base."""
        return self._base.pool_builders()

    def index_spaces(self) -> dict[str, IndexSpace]:
        """Index spaces of the base."""
        return self._base.index_spaces()

    def state_components(self) -> list[StateComponent]:
        """The state component under test, or those of the base."""
        return self._base.state_components() if self._state is None else [self._state]


@contextmanager
def open_cache(
    registry: Registry, group: LayerGroup, *, page_size: int, arena: ArenaOrder, pages: int = 12
) -> Iterator[KVCache]:
    """A cache for one group, every byte poisoned but those of null units.

    It holds ``pages`` pages of tokens (units of the widest kind), and what as many requests have put aside.
    """
    probe = registry.format("subject").layout(group, page_size=page_size, shard=Shard(), arena=arena)
    spaces = registry.index_spaces()
    tokens = pages * max(page_size, widest_unit(probe), 2)
    units = enough_units(probe, spaces, tokens, requests=pages)
    settings = {
        "cache.page_size": page_size,
        "cache.arena": arena,
        "cache.memory": Map(probe, units).arena_bytes,
        "cache.max_requests": pages,
        "cache.max_tokens": tokens,
    }
    config = load_config(None, settings)
    with KVCache.create(ModelSpec("conformance", (group,), "fp32"), config, registry) as cache:
        cache.poison_freed = True
        View(cache, group, spaces).poison()
        yield cache


def enough_units(layout: Layout, spaces: Mapping[str, IndexSpace], tokens: int, *, requests: int) -> dict[str, int]:
    """Units of every range for so many tokens, and where a request holds a bounded number of them (rings, windows,
    states), for so many requests and one step of all the tokens."""
    units = {}
    for item in layout.ranges:
        spec = layout.space(item.space)
        space = spaces[spec.kind]
        bound = space.units_per_request(spec)
        count = -(-tokens // spec.tokens_per_unit) if spec.tokens_per_unit else 0
        if bound is not None:
            count = requests * (bound + 1) + count if count else requests * bound
        units[item.name] = space.reserved_units(spec) + count
    return units


def widest_unit(layout: Layout) -> int:
    """Tokens of the unit that stands for most; 0 where none stands for tokens."""
    return max((layout.space(item.space).tokens_per_unit for item in layout.ranges), default=0)


class View:
    """One group of a cache: random rows, and its bytes by the kit's own addresses.

    Args:
        spaces: index spaces by kind; those of core by default.
        format: of the group, where its encode and decode are the oracle.
    """

    def __init__(
        self,
        cache: KVCache,
        group: LayerGroup,
        spaces: Mapping[str, IndexSpace] = BUILTIN_SPACES,
        format: Format | None = None,
    ) -> None:
        self.cache = cache
        self.group = group
        self.spaces = spaces
        self.format = format
        self.layout: Layout = cache.layouts[group.prefix]
        self.pool = cache.store.pools[group.prefix]
        self.map = Map(self.layout, {name: n for spans in self.pool.placement.ranges.values() for name, _, n in spans})
        self.range = self.layout.token_range
        self.page_size = self.layout.space_of_range(self.range).tokens_per_unit
        self.tokens = 2 * widest_unit(self.layout) + 5
        """Whole units and a partial one, of every range."""

    def can_attend(self) -> Support:
        """Whether attention over the group is served by a kernel, and not by the kit's stand-in."""
        if self.ops["attend_decode"] == NoDecode.name:
            return unsupported("no kernel attends over these tensors")
        names = {tensor.name for tensor in self.group.tensors}
        if not ({"k", "v"} <= names or "latent" in names):
            return unsupported("what it is over these tensors only their plugin knows")
        return FULL if self.group.num_query_heads else unsupported("the group has no query heads")

    @property
    def ops(self) -> dict[str, str]:
        """The kernel that serves each op that the format declares."""
        return {choice.op: choice.chosen for choice in self.cache.explain()[self.group.prefix]}

    def declares(self, *ops: str) -> Support:
        """Whether the format declares these ops."""
        missing = [op for op in ops if op not in self.ops]
        return unsupported(f"the format declares no op {missing[0]!r}") if missing else FULL

    def has(self, *ops: str) -> Support:
        """Whether the format declares these ops, and each of its tokens has a place and bytes of its own."""
        if not self.declares(*ops):
            return self.declares(*ops)
        if self.format is not None and self.format.encodes == "units":
            return unsupported("the format encodes whole units")
        spec = self.layout.space_of_range(self.range)
        if self.page_size == 1 or (self.page_size > 1 and spec.unit == "page"):
            return FULL
        return unsupported(f"units of range {self.range!r} (space {spec.kind!r}) have no place for each token")

    def needs(self, *ops: str) -> None:
        """Skip a check of single tokens through these ops where the format :meth:`has` none."""
        skip_unsupported(self.has(*ops), ", ".join(ops))

    def token_regions(self) -> list[Region]:
        """Regions that hold something of each token; what else there is, such as compressed rows, has other units."""
        return [region for region in self.layout.moving_regions if self.range in region.ranges]

    @property
    def arena(self) -> Bytes:
        """The live arena."""
        return self.pool.arena.array()

    def poison(self) -> None:
        """Fill everything but null units and what belongs to the model."""
        null, constant = self.null_bytes(), self.constant_bytes()
        kept = self.arena[constant].copy()
        self.arena[:] = POISON
        self.arena[null] = 0
        self.arena[constant] = kept

    def null_bytes(self) -> Any:
        """Addresses of every null unit."""
        units: dict[str, list[int]] = {}
        for region, spans in self.pool.placement.ranges.items():
            for name, first, _ in spans:
                spec = self.layout.space_of_range(name)
                kept = 1 if spec.constant else self.spaces[spec.kind].reserved_units(spec)
                units.setdefault(region, []).extend(range(first, first + kept))
        return self._bytes_of(units)

    def constant_bytes(self) -> Any:
        """Addresses of every constant unit."""
        return self._bytes_of({region.name: self.map.ids[region.name][1:] for region in self.layout.constant_regions})

    def _bytes_of(self, units: Mapping[str, Sequence[int]]) -> Any:
        spans = [
            np.arange(span.start, span.stop)
            for layer in self.layout.layers
            for region, ids in units.items()
            for unit in ids
            for span in [self.map.unit(layer, region, unit)]
        ]
        return np.concatenate([np.zeros(0, np.int64), *spans])

    def rows(self, tokens: int, seed: int, layer: int = 0) -> dict[str, torch.Tensor]:
        """Random rows of every tensor, of widely differing size."""
        generator = torch.Generator().manual_seed(seed * 1000 + layer)
        return make_rows(self.group, tokens, generator)

    def write(self, request: str, tokens: int, seed: int, valid: torch.Tensor | None = None) -> dict[int, Any]:
        """Store random tokens in every layer through the façade; returns what was stored, by layer.

        A format without the op ``store`` is written by its plugin's own ops alone: random bytes stand for what they do.
        """
        stored = {layer: self.rows(tokens, seed, layer) for layer in self.layout.layers}
        with self.cache.begin([(request, tokens)]) as step:
            if "store" in self.ops:
                for layer, rows in stored.items():
                    step.store(layer, rows, valid).wait()
            else:
                self._fill(request, seed)
            step.commit()
        return stored

    def _fill(self, request: str, seed: int) -> None:
        for addresses in self._data(self.tables(request)).values():
            self.arena[addresses] = pattern(addresses.size, seed).reshape(addresses.shape)

    def _data(self, units: Mapping[str, Sequence[int]]) -> dict[tuple[str, int, str, str], Any]:
        """Addresses of every element of units (by range, null units left out): by range, layer, region and field."""
        return {
            (name, layer, region.name, field.name): np.stack(
                [self.map.element(layer, region.name, field, unit, None).ravel() for unit in ids]
            )
            for name, every in units.items()
            for ids in [[unit for unit in every if unit != self.null(name)]]
            for region in self.layout.regions
            if ids and name in region.ranges
            for layer in self.layout.layers
            for field in region.data_fields
        }

    def moved(self, request: str) -> dict[tuple[str, int, str, str], Bytes]:
        """Copies of all data that moves with a request, ``[units, bytes]`` by range, layer, region and field."""
        return {key: self.arena[addresses] for key, addresses in self._data(self.final(request)).items()}

    def slots(self, request: str, start: int, stop: int) -> torch.Tensor:
        """Slots of tokens of a request, from its unit table: ``int64 [stop - start]``, −1 in units that are dead."""
        units, page = self.cache.units(request, self.group.prefix, self.range), self.page_size
        places = [(int(units[token // page]), token % page) for token in range(start, stop)]
        return torch.tensor([-1 if unit == self.null(self.range) else unit * page + at for unit, at in places])

    def free(self, range_name: str) -> set[int]:
        """Units of a range that nobody holds."""
        return set(self.cache.manager.free_units(self.group.prefix, range_name).tolist())

    def null(self, range_name: str) -> int:
        """The null unit of a range."""
        return next(first for spans in self.pool.placement.ranges.values() for n, first, _ in spans if n == range_name)

    def stored(self, layer: int, region: str, field: Field, slot: int) -> Bytes:
        """Bytes of a field's elements of the token in a slot: ``[*axes, item size]``."""
        unit, at = divmod(slot, self.page_size)
        return self.arena[self.map.element(layer, region, field, unit, at if field.has_axis("slot") else None)]

    def load(self, layer: int, slots: torch.Tensor) -> dict[str, torch.Tensor]:
        """Decoded rows of slots, over an output full of NaN."""
        out = {t.name: torch.full((len(slots), t.num_heads, t.head_dim), float("nan")) for t in self.group.tensors}
        self.cache.store.load(layer, slots, out).wait()
        return out

    def tables(self, request: str) -> dict[str, list[int]]:
        """Unit ids of a request in logical order, by range."""
        return {r.name: self.cache.units(request, self.group.prefix, r.name).tolist() for r in self.layout.ranges}

    def final(self, request: str) -> dict[str, list[int]]:
        """Units that move with a request as long as it is now, in logical order, by range."""
        length, out = self.cache.length(request), {}
        for name, units in self.tables(request).items():
            spec = self.layout.space_of_range(name)
            first, end = self.spaces[spec.kind].final_units(spec, 0, length, last=True)
            needed = self.spaces[spec.kind].needed_units(spec, length)
            out[name] = [units[n] for lo, hi in needed for n in range(max(first, lo), min(end, hi))]
        return out

    def request_bytes(self, request: str, component: str | None = None) -> Bytes:
        """Copy of every byte of the units that move with a request (of one component), in logical order."""
        parts = [
            self.map.units(self.arena, unit, component, name)
            for name, units in self.final(request).items()
            for unit in units
        ]
        return np.concatenate(parts)

    def sizes(self, request: str) -> dict[str, int]:
        """Bytes with meaning that move with a request, by component."""
        out = dict.fromkeys(self.layout.components, 0)
        for name, units in self.final(request).items():
            for component in {r.component for r in self.layout.regions if name in r.ranges}:
                out[component] += self.map.logical(component) * len(units)
        return out


def make_rows(group: LayerGroup, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Random rows ``[T, H, D]`` by tensor: every element differs, sizes of tokens and heads differ."""
    rows = {}
    for tensor in group.tensors:
        values = torch.randn(tokens, tensor.num_heads, tensor.head_dim, generator=generator)
        size = torch.rand(tokens, tensor.num_heads, 1, generator=generator) * 3 + 0.1
        rows[tensor.name] = values * size
    return rows


def poison(cache: KVCache, byte: int = POISON) -> None:
    """Fill every unit that nobody holds, of every range of a cache: what is read unwritten, or left behind, shows."""
    for group, layout in cache.layouts.items():
        pool = cache.store.pools[group]
        for item in layout.ranges:
            pool.fill(cache.manager.free_units(group, item.name), byte, pool.components_of(item.name))


def pull(source: KVCache, target: KVCache, request: str, tokens: int) -> ReceiveDone:
    """Move a request from one cache to another as a prefill and a decode process would, in two chunks."""
    sender, receiver = source.serve(), None
    try:
        receiver = target.connect(sender.address)
        sender.begin(request, tokens)
        receiver.ask(request, tokens)
        sender.offer(request, 0, tokens // 2)
        sender.offer(request, tokens // 2, tokens, last=True, engine_data=b"engine data")
        end = time.monotonic() + TIMEOUT_S
        while time.monotonic() < end:
            receiver.wait_event(0.05)
            sender.events()
            for event in receiver.events():
                if isinstance(event, ReceiveFailed):
                    raise event.error
                if isinstance(event, ReceiveDone):
                    return event
        raise AssertionError(f"no transfer within {TIMEOUT_S} s")
    finally:
        if receiver is not None:
            receiver.close()
        sender.close()
