"""Hybrid models in miniature on whole caches, and what every element must be, worked out from a request's tokens alone.

Tokens are integers. A layer stores K and V of each, keeps the last inputs of short convolutions and, in the ``delta``
model, a recurrent state. The engine updates a state from what lies in its slot, as a real one does, so anything that a
slot held before shows. The oracle computes everything again from the list of tokens, by global ids, and looks for it at
addresses that the conformance kit works out apart from kvcore.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as memoize
from typing import Any

import numpy as np
import torch

from kvcore.config import load_config
from kvcore.contract import AttendParams, Backup
from kvcore.engine.cache import KVCache
from kvcore.engine.step import Step
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, ModelSpec, StatePart, StateSpec, TensorSpec
from kvcore.testing.harness import Subject, poison
from kvcore.testing.memory import Map

PAGE, WINDOW, TAPS = 4, 8, 3
KV = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 4))
FULL = LayerGroup("full", (0, 3), KV, num_query_heads=4)
SWA = LayerGroup("swa", (1, 4), KV, num_query_heads=4, space="window", space_options=(("window", WINDOW),))

_TAP = ("tap", TAPS)
CONV_K = StateSpec("conv_k", "conv", "fp32", (("channel", 16), _TAP), "channel", (StatePart(2, 8),))
CONV_MLP = StateSpec("conv_mlp", "conv", "fp32", (("channel", 5), _TAP))
NONE = StateSpec("conv_none", "conv", "fp32", (("channel", 0), _TAP), "channel", (StatePart(0, 4),))
KKV = StateSpec(
    "conv", "conv", "bf16", (("channel", 24), _TAP), "channel", (StatePart(2, 4), StatePart(2, 4), StatePart(4, 2))
)
DELTA = StateSpec("recurrent", "recurrent", "fp32", (("head", 4), ("dim", 2), ("state", 3)), "head", (StatePart(4),))


def states(name: str, layers: tuple[int, ...], *items: StateSpec) -> LayerGroup:
    """A group of state."""
    return LayerGroup(name, layers, (), kind="state", space="per_request", states=items)


_WIDE = StateSpec("conv_k", "conv", "fp32", (("channel", 32), _TAP), "channel", (StatePart(4, 8),))
MANY = ModelSpec(
    "states of many groups",
    (
        FULL,
        SWA,
        states("state_full", (0, 3), CONV_K, CONV_MLP),
        states("state_swa", (1, 4), _WIDE, CONV_MLP),
        LayerGroup("state", (0,), (), kind="state", space="per_request", role="draft", states=(KKV, DELTA)),
    ),
    "fp32",
)
"""Full and windowed layers whose convolutions are unlike, and a draft model with states of its own."""

MODELS = {
    "conv": ModelSpec("short convolutions", (FULL, SWA, states("state", (0, 1, 3, 4), CONV_K, NONE, CONV_MLP)), "fp32"),
    "delta": ModelSpec("delta rule", (FULL, SWA, states("state", (2, 5), KKV, DELTA)), "fp32"),
}
"""Full and windowed attention with four short convolutions a layer, one of them empty, or with layers of a delta rule."""

STATE_BYTES = {
    "conv": {"state/conv": 4 * (16 * 3 * 4 + 5 * 3 * 4)},  # layers · (channels · taps · bytes, of two states)
    "delta": {"state/conv": 2 * 24 * 3 * 2, "state/recurrent": 2 * 4 * 2 * 3 * 4},
}
"""Bytes of one request's state by component, counted out."""


# --- what everything must be, by global ids ---------------------------------------------------------------------------


def held(state: StateSpec, rank: int = 0, size: int = 1) -> list[int]:
    """Global ids of the split axis that a rank has, in the order of its memory. Head by head, apart from kvcore."""
    if not state.split:
        return list(range(state.axes[0][1]))
    ids, base = [], 0
    for part in state.parts:
        for head in range(part.num_heads):
            owner = (
                rank * part.num_heads // size == head
                if size > part.num_heads
                else head * size // part.num_heads == rank
            )
            if owner:
                ids += range(base + head * part.width, base + (head + 1) * part.width)
        base += part.num_heads * part.width
    return ids


def heads(rank: int = 0, size: int = 1) -> list[int]:
    """K/V heads of a rank."""
    return held(StateSpec("kv", "", "", (("head", 2),), "head", (StatePart(2),)), rank, size)


def conv_input(token: int, layer: int, state: StateSpec, channels: Sequence[int]) -> np.ndarray:
    """``[channels]``: integers below 256, which bf16 keeps, and never 0."""
    salt = sum(map(ord, state.name)) + layer * 3 + token * 7
    return np.array([(salt + channel * 5) % 251 + 1 for channel in channels], np.float32)


def delta_input(token: int, layer: int, ids: Sequence[int]) -> np.ndarray:
    """``[heads, 2, 3]``."""
    head, dim, column = np.meshgrid(np.array(ids), np.arange(2), np.arange(3), indexing="ij")
    return (((token * 5 + layer + head * 13 + dim * 7 + column * 3) % 97 + 1) / 8).astype(np.float32)


def kv_rows(token: int, position: int, layer: int, tensor: TensorSpec, ids: Sequence[int]) -> np.ndarray:
    """``[heads, dims]``."""
    head, dim = np.meshgrid(np.array(ids), np.arange(tensor.head_dim), indexing="ij")
    kind = 100 if tensor.name == "v" else 0
    return (1 + kind + token * 1000 + position * 31 + layer * 211 + head * 11 + dim).astype(np.float32)


def state_after(tokens: Sequence[int], layer: int, state: StateSpec, ids: Sequence[int]) -> np.ndarray:
    """What a state is after these tokens, from nothing."""
    if state.kind == "conv":
        taps = [np.zeros(len(ids), np.float32)] * TAPS
        for token in tokens[-TAPS:]:
            taps = [*taps[1:], conv_input(token, layer, state, ids)]
        return np.stack(taps, axis=1)
    total = np.zeros((len(ids), 2, 3), np.float32)
    for token in tokens:
        total = total * np.float32(0.5) + delta_input(token, layer, ids)
    return total


SETTINGS = {
    "cache.format": "fp32",
    "cache.page_size": PAGE,
    "cache.memory": "64KiB",
    "cache.max_tokens": 64,
    "cache.max_requests": 4,
}
"""Small, and the same for every cache of a test."""


# --- an engine ----------------------------------------------------------------------------------------------------------


@memoize
def registry() -> Registry:
    """The built-ins and the plugin, loaded once."""
    return load_plugins(("mamba_backup",))


def advance(now: torch.Tensor, token: int, layer: int, state: StateSpec, ids: Sequence[int]) -> torch.Tensor:
    """What a model makes of a state and one more token, in fp32."""
    if state.kind == "conv":
        new = torch.from_numpy(conv_input(token, layer, state, ids))
        return torch.cat([now[:, 1:], new[:, None]], dim=1)
    return now * 0.5 + torch.from_numpy(delta_input(token, layer, ids))


class Work:
    """What an engine does with a cache: forward passes, and looking at every element.

    Attributes:
        tokens: what the requests of this cache have computed so far.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache, self.model, self.shard = cache, cache.model, cache.shard
        self.tokens: dict[str, list[int]] = {}
        self._places: dict[str, Map] = {}

    def poison(self) -> None:
        """Fill every unit that nobody owns."""
        poison(self.cache)

    def free(self) -> dict[str, int]:
        """Units that may be handed out, by group."""
        groups = self.cache.layouts.items()
        return {name: len(self.cache.manager.free_units(name, layout.ranges[0].name)) for name, layout in groups}

    def slot(self, name: str, group: str = "state") -> int:
        """The state slot of a request."""
        (slot,) = self.cache.units(name, group, "slots").tolist()
        return int(slot)

    def admit(self, name: str, tokens: Sequence[int]) -> None:
        """Admit a prompt and compute all of it."""
        self.cache.admit(name, len(tokens))
        self.tokens[name] = []
        self.step((name, tokens))

    def step(self, *rows: tuple[str, Sequence[int]], accepted: Sequence[int] | None = None) -> None:
        """One forward pass over all layers; a speculative one with ``accepted``."""
        with self.cache.begin([(name, len(tokens)) for name, tokens in rows], speculative=accepted is not None) as step:
            self.compute(step, rows)
            step.commit(accepted)
        for n, (name, tokens) in enumerate(rows):
            self.tokens[name] += list(tokens)[: None if accepted is None else accepted[n]]

    def compute(self, step: Step, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
        for group in self.model.groups:
            if group.prefix in self.cache.layouts:
                self._states(step, group, rows) if group.kind == "state" else self._store(step, group, rows)

    def _store(self, step: Step, group: LayerGroup, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
        ids = heads(self.shard.tp_rank, self.shard.tp_size)
        at = [(token, len(self.tokens[name]) + n) for name, tokens in rows for n, token in enumerate(tokens)]
        for layer in self.cache.layouts[group.prefix].layers:
            made = {t.name: np.stack([kv_rows(token, n, layer, t, ids) for token, n in at]) for t in group.tensors}
            step.store(layer, {name: torch.from_numpy(values) for name, values in made.items()})
            queries = group.num_query_heads * len(ids) // 2
            out = torch.full((len(at), queries, 4), torch.nan)
            params = AttendParams(1.0, window=WINDOW if group.space == "window" else None)
            step.attend(layer, torch.ones(len(at), queries, 8), out, params)
            assert not out.isnan().any(), "attention read memory that holds no token"

    def _states(self, step: Step, group: LayerGroup, rows: Sequence[tuple[str, Sequence[int]]]) -> None:
        """Of each row the state lies in its slot; the one after a token goes where the step keeps it, if it does."""
        slots, trail = step.state_slots(group.prefix).tolist(), step.state_trail(group.prefix).tolist()
        view, layout = self.cache.state(group.prefix), self.cache.layouts[group.prefix]
        for region in layout.regions:
            state = next(item for item in group.states if item.name == region.name)
            ids = held(state, self.shard.tp_rank, self.shard.tp_size)
            for layer in layout.layers:
                field, places = view.field(layer, state.name, "x"), iter(trail)
                for slot, (_, tokens) in zip(slots, rows, strict=True):
                    now = field[
                        slot
                    ].float()  # a copy; of the last slot for a row that was released, and written nowhere
                    for token in tokens:
                        now, place = advance(now, token, layer, state, ids), next(places)
                        if place >= 0:
                            field[place] = now.to(field.dtype)

    # --- reading back ---

    def check(self, *names: str) -> int:
        """Every element of these requests, by its address; returns how many were compared."""
        compared = 0
        for name in names:
            for group in self.model.groups:
                if group.prefix in self.cache.layouts:
                    check = self._check_state if group.kind == "state" else self._check_kv
                    compared += check(name, group)
        assert compared
        return compared

    def elements(self, group: str, layer: int, region: str, unit: int, slot: int | None = None) -> np.ndarray:
        """Stored elements as fp32, at addresses worked out apart from kvcore's."""
        if group not in self._places:
            self._places[group] = Map(self.cache.layouts[group], self.cache.capacity.units[group])
        (field,) = self.cache.layouts[group].region(region).data_fields
        where = self._places[group].element(layer, region, field, unit, slot)
        raw = self.cache.store.pools[group].arena.array()[where]
        if field.dtype == "fp32":
            return raw.view(np.float32)[..., 0]
        assert field.dtype == "bf16"
        return (raw.view(np.uint16)[..., 0].astype(np.uint32) << 16).view(np.float32)

    def _check_state(self, name: str, group: LayerGroup) -> int:
        compared, slot = 0, self.slot(name, group.prefix)
        for state in (item for item in group.states if item.axes[0][1]):
            ids = held(state, self.shard.tp_rank, self.shard.tp_size)
            for layer in self.cache.layouts[group.prefix].layers:
                got = self.elements(group.prefix, layer, state.name, slot)
                want = state_after(self.tokens[name], layer, state, ids)
                np.testing.assert_array_equal(got, want, f"{name} {group.prefix} {layer} {state.name}")
                compared += want.size
        return compared

    def _check_kv(self, name: str, group: LayerGroup) -> int:
        compared, tokens = 0, self.tokens[name]
        units = self.cache.units(name, group.prefix, "pages")
        first = max(0, len(tokens) + 1 - WINDOW) if group.space == "window" else 0
        ids = heads(self.shard.tp_rank, self.shard.tp_size)
        for layer in self.cache.layouts[group.prefix].layers:
            for tensor in group.tensors:
                for n in range(first, len(tokens)):
                    got = self.elements(group.prefix, layer, tensor.name, int(units[n // PAGE]), n % PAGE)
                    want = kv_rows(tokens[n], n, layer, tensor, ids)
                    np.testing.assert_array_equal(got, want, f"{name} {group.prefix} {layer} {tensor.name} {n}")
                    compared += want.size
        return compared


class Engine(Work):
    """A cache in which everything but null units is 0xFF and what is freed becomes it again.

    Args:
        kind: of :data:`MODELS`, or a model.
        backend: makes the retraction backend; by default the one of the configuration.
    """

    def __init__(self, kind: str | ModelSpec, *, backend: Callable[[], Backup] | None = None, **settings: Any) -> None:
        model = MODELS[kind] if isinstance(kind, str) else kind
        config = load_config(None, {**SETTINGS, "plugins": ["mamba_backup"], **settings})
        super().__init__(KVCache.create(model, config, Subject(registry(), backup=backend)))
        self.cache.poison_freed = True
        self.poison()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.cache.close()


def prompt(seed: int, length: int) -> list[int]:
    """Tokens of a prompt."""
    return [(seed * 37 + n * n * 3 + n) % 40 + 1 for n in range(length)]
