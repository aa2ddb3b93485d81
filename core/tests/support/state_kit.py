"""A model whose state is a number that depends on every token and their order: what is read from a wrong slot shows.

Caches are poisoned; the oracle folds token lists in plain Python and shares nothing with what it checks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from kvcore.config import load_config
from kvcore.contract import FULL, StateComponent, Support
from kvcore.engine.cache import KVCache
from kvcore.engine.step import Step
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry as Plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard, StateSpec, TensorSpec
from kvcore.testing.harness import Subject, poison

PAGE = 4
TOKENS = LayerGroup("full", (0, 2), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), num_query_heads=1)
_NUMBER = StateSpec("h", "recurrent", "i64", (("one", 1),))
CHAIN = LayerGroup("chain", (1, 3), (), kind="state", space="per_request", states=(_NUMBER,))
COUNT = LayerGroup("count", (2,), (), kind="state", space="per_request", states=(_NUMBER,), role="draft")
MODEL = ModelSpec("chain", (CHAIN, TOKENS, COUNT), "fp32")
STATES = (("chain", "slots", (1, 3)), ("draft/count", "slots", (2,)))


class Numbers(StateComponent):
    """One int64 a layer."""

    name = "numbers"

    def applies(self, group: LayerGroup) -> bool:
        return group.kind == "state"

    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        field = Field("x", "i64", "one", (Axis("one", 1),))
        return Layout(
            self.name, 1, group.prefix, group.layers,
            (region("h", f"{group.prefix}/recurrent", [field], ranges=("slots",)),),
            (SpaceSpec(group.name, group.space, "state_slot", 0),), (UnitRange("slots", group.name),), arena,
        )  # fmt: skip

    def checkpoint(self, group: LayerGroup) -> Support:
        return FULL


@cache
def _builtins() -> Plugins:
    return load_plugins(())


class Registry(Subject):
    """The built-ins, and these state components."""

    def __init__(self, *components: StateComponent) -> None:
        super().__init__(_builtins())
        self._components = list(components)

    def state_components(self) -> list[StateComponent]:
        return self._components


def build(model: ModelSpec = MODEL, *components: StateComponent, **settings: object) -> KVCache:
    """A poisoned cache: 4 requests, none of them with a slot put aside for a checkpoint unless ``settings`` say so."""
    base = {"cache.page_size": PAGE, "cache.memory": "32KiB", "cache.max_tokens": 64, "cache.max_requests": 4}
    cache = KVCache.create(model, load_config(None, {**base, **settings}), Registry(*(components or (Numbers(),))))
    cache.poison_freed = True
    poison(cache)
    return cache


def fold(tokens: Sequence[int], layer: int) -> int:
    """The state after these tokens."""
    value = 0
    for token in tokens:
        value = (value * 31 + token + layer) % 1_000_003
    return value


def compute(cache: KVCache, step: Step, rows: Sequence[Sequence[int]], *, writes: int = 1 << 30) -> None:
    """What a model would do: from each row's slot, token by token, to wherever the step wants the state kept.

    Args:
        rows: new tokens of each row.
        writes: stop after so many writes, as a pass that fails half-way does.
    """
    flat = torch.tensor([token for tokens in rows for token in tokens], dtype=torch.float32)
    for layer in TOKENS.layers:
        step.store(layer, {name: flat[:, None, None].expand(-1, 1, 8).contiguous() for name in ("k", "v")})
    for group, name, layers in STATES:
        if group not in cache.layouts:
            continue
        slots, trail = step.state_slots(group, name).tolist(), step.state_trail(group, name).tolist()
        for layer in layers:
            h, at = cache.state(group).field(layer, "h", "x"), 0
            for slot, tokens in zip(slots, rows, strict=True):
                value = int(h[slot]) if slot >= 0 else 0
                for token in tokens:
                    value = (value * 31 + token + layer) % 1_000_003
                    if trail[at] >= 0 and writes > 0:
                        h[trail[at]] = value
                        writes -= 1
                    at += 1


def run(
    cache: KVCache, *rows: tuple[str, Sequence[int]], accepted: Sequence[int] | None = None, speculative: bool = False
) -> None:
    """A whole step."""
    with cache.begin([(name, len(tokens)) for name, tokens in rows], speculative=speculative) as step:
        compute(cache, step, [tokens for _, tokens in rows])
        step.commit(accepted)
    poison(cache)


def states(cache: KVCache, name: str) -> dict[tuple[str, int], int]:
    """The state of a request as it lies in memory."""
    found = {}
    for group, range_name, layers in STATES:
        if group in cache.layouts:
            (slot,) = cache.units(name, group, range_name)
            found |= {(group, layer): int(cache.state(group).field(layer, "h", "x")[slot]) for layer in layers}
    return found


def check(cache: KVCache, name: str, tokens: Sequence[int]) -> None:
    """Every state, key and value of a request is that of these tokens."""
    assert cache.length(name) == len(tokens)
    if not tokens:
        return
    got = states(cache, name)
    assert got == {(group, layer): fold(tokens, layer) for group, layer in got}
    units = cache.units(name, "full", "pages")
    slots = torch.tensor([int(units[n // PAGE]) * PAGE + n % PAGE for n in range(len(tokens))])
    want = torch.tensor(tokens, dtype=torch.float32)[:, None, None].expand(-1, 1, 8)
    for layer in TOKENS.layers:
        out = {tensor: torch.full((len(tokens), 1, 8), torch.nan) for tensor in ("k", "v")}
        cache.store.load(layer, slots, out).wait()
        assert torch.equal(out["k"], want)
        assert torch.equal(out["v"], want)


def begin(cache: KVCache, name: str, tokens: Sequence[int]) -> None:
    """Admit a request and compute all of its prompt."""
    cache.admit(name, len(tokens))
    run(cache, (name, tokens))


def finish(cache: KVCache) -> None:
    """Release everything; no unit may be missing then."""
    cache.check_integrity()
    for item in cache.manager.requests:
        cache.release(item.id)
    cache.check_integrity()
    assert all(part.free == part.capacity for part in cache.stats().manager.ranges), "a unit leaked"
