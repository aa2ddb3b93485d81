"""The suite for state components: what can be checked without a model that computes the state.

Their layout and sizes are checked, and that a cache hands out zeroed slots, which go with their request through retraction
and transfer. Values, checkpoints and rollback are not: those belong to the model that writes the state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from kvcore.cache import KVCache
from kvcore.config import load_config
from kvcore.contract import FULL, StateComponent, unsupported
from kvcore.layout import ArenaOrder, Int64Array, Layout
from kvcore.plugins import load_plugins
from kvcore.pool import Pool
from kvcore.registry import Registry
from kvcore.spec import LayerGroup, ModelSpec, Shard
from kvcore.store import choose_builder
from kvcore.testing.harness import Subject, pull, skip_unsupported
from kvcore.testing.memory import POISON, Map, element_bytes, pattern
from kvcore.testing.sample import GROUPS, STATE_GROUPS


class StateComponentSuite:
    """What a state component promises. Override the fixture ``component``.

    Attributes:
        groups: state groups to try; those it does not apply to are skipped.
    """

    groups: ClassVar[Mapping[str, LayerGroup]] = STATE_GROUPS

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a check once for every group and arena order it asks for."""
        if "group" in metafunc.fixturenames:
            metafunc.parametrize("group", list(self.groups.values()), ids=list(self.groups))
        if "arena" in metafunc.fixturenames:
            metafunc.parametrize("arena", get_args(ArenaOrder))

    @pytest.fixture
    def registry(self) -> Registry:
        """Where pools and backups come from."""
        return load_plugins(())

    @pytest.fixture
    def layout(self, component: StateComponent, group: LayerGroup, arena: ArenaOrder) -> Layout:
        """The layout of a group it applies to."""
        applies = component.applies(group)
        what = f"layer group {[tensor.name for tensor in group.tensors]}"
        skip_unsupported(FULL if applies else unsupported("the component does not apply to it"), what)
        return component.layout(group, shard=Shard(), arena=arena)

    def test_applies_to_some_group(self, component: StateComponent) -> None:
        """A component that applies to no group is not checked: give the suite ``groups`` that it holds."""
        assert any(component.applies(group) for group in self.groups.values()), list(self.groups)

    def test_leaves_attention_alone(self, component: StateComponent) -> None:
        """Groups of tokens belong to the format."""
        assert not any(component.applies(group) for group in GROUPS.values())

    def test_declares_when_it_is_final(self, component: StateComponent) -> None:
        """``each_chunk`` or ``prompt_done``, and whether it can be checkpointed, with a reason if not."""
        assert component.final in ("each_chunk", "prompt_done")
        for group in self.groups.values():
            answer = component.checkpoint(group)
            assert answer.ok or answer.reason

    def test_lives_in_state_slots(self, layout: Layout, group: LayerGroup) -> None:
        """One unit a request, named after its group, for every layer of it."""
        assert layout.group == group.prefix
        assert layout.layers == group.layers
        assert all(name.startswith(f"{group.prefix}/") for name in layout.components)
        assert {space.unit for space in layout.spaces} == {"state_slot"}
        assert {space.tokens_per_unit for space in layout.spaces} == {0}
        assert not any(layout.bytes_per_token().values())

    def test_describes_every_byte_once(self, layout: Layout) -> None:
        """No byte of a slot belongs to two elements."""
        for region in layout.regions:
            owners = np.zeros(region.unit_bytes, np.int64)
            for field in region.data_fields:
                np.add.at(owners, element_bytes(field).reshape(-1), 1)
            assert owners.max() == 1, f"fields of {region.name} overlap"
            assert sum(field.nbytes for field in region.fields) == region.unit_bytes

    def test_survives_json(self, layout: Layout) -> None:
        """A peer that reads the layout has the same one."""
        assert Layout.from_json(layout.to_json()) == layout

    def test_comes_back_bit_for_bit(self, layout: Layout, registry: Registry) -> None:
        """Slots saved to host memory and restored into another, poisoned slot."""
        counts = dict.fromkeys((item.name for item in layout.ranges), 5)
        places = Map(layout, counts)
        pool = Pool(layout, counts, choose_builder(registry.pool_builders(), "cpu", layout))
        backup = registry.backup("host_tensor")
        try:
            arena = pool.arena.array()
            arena[:] = np.random.default_rng(1).integers(0, 256, arena.nbytes, np.uint8)
            before = {name: places.units(arena, 2, name) for name in layout.components}
            backup.save("a", [pool.block([name], [2]) for name in layout.components]).wait()
            arena[:] = POISON
            backup.restore("a", [pool.block([name], [4]) for name in layout.components]).wait()
            for name, values in before.items():
                np.testing.assert_array_equal(places.units(arena, 4, name), values, name)
        finally:
            backup.close()
            pool.close()

    def test_is_zero_when_handed_out(
        self, layout: Layout, registry: Registry, component: StateComponent, group: LayerGroup
    ) -> None:
        """Every request of a step has a slot of its own, zeroed though the pool was full of 0xFF; nothing else changes."""
        with _cache(registry, component, group, layout) as cache:
            places = _poisoned(cache, group)
            mine = np.zeros(places.arena_bytes, bool)
            for name in ("a", "b"):
                cache.admit(name, 3)
            with cache.begin([("a", 3), ("b", 1)]) as step:
                for item in layout.ranges:
                    slots = step.state_slots(group.prefix, item.name).tolist()
                    assert len(set(slots)) == 2
                    assert min(slots) > 0
                    for region in layout.regions:
                        if item.name in region.ranges:
                            for layer in layout.layers:
                                for slot in slots:
                                    mine[places.unit(layer, region.name, slot)] = True
                step.commit()
            arena = cache.store.pools[group.prefix].arena.array()
            assert not arena[mine].any()
            assert arena[~mine].max() == POISON
            assert (arena[~mine] == POISON).sum() == (~mine).sum() - _null_bytes(layout)

    def test_goes_with_its_request(
        self, layout: Layout, registry: Registry, component: StateComponent, group: LayerGroup
    ) -> None:
        """Retracted and resumed into other slots, then pulled by another cache: every element, bit for bit."""
        other = replace(layout, arena="layer_major" if layout.arena == "page_major" else "page_major")
        with _cache(registry, component, group, layout) as cache, _cache(registry, component, group, other) as target:
            _poisoned(target, group)
            cache.poison_freed = True
            cache.admit("a", 8)
            with cache.begin([("a", 8)]) as step:
                step.commit()
            arena = cache.store.pools[group.prefix].arena.array()
            written = _elements(cache, group, "a")
            for n, where in enumerate(written.values()):
                arena[where] = pattern(where.size, n).reshape(where.shape)
            want = {key: arena[where].copy() for key, where in written.items()}
            assert want
            handle = cache.retract("a")
            cache.admit("tenant", 1)  # takes the slot
            cache.resume(handle)
            for key, where in _elements(cache, group, "a").items():
                np.testing.assert_array_equal(arena[where], want[key], str(key))
            pull(cache, target, "a", 8)
            for key, where in _elements(target, group, "a").items():
                got = target.store.pools[group.prefix].arena.array()[where]
                np.testing.assert_array_equal(got, want[key], str(key))


@contextmanager
def _cache(registry: Registry, component: StateComponent, group: LayerGroup, layout: Layout) -> Iterator[KVCache]:
    """A cache for three requests of this group alone."""
    memory = Map(layout, dict.fromkeys((item.name for item in layout.ranges), 64)).arena_bytes
    config = load_config(None, {"cache.memory": memory, "cache.max_requests": 3, "cache.arena": layout.arena})
    model = ModelSpec("conformance", (group,), "fp32")
    with KVCache.create(model, config, Subject(registry, state=component)) as cache:
        yield cache


def _map(cache: KVCache, group: LayerGroup) -> Map:
    return Map(cache.layouts[group.prefix], cache.capacity.units[group.prefix])


def _poisoned(cache: KVCache, group: LayerGroup) -> Map:
    """Fill all slots but null ones."""
    places, arena = _map(cache, group), cache.store.pools[group.prefix].arena.array()
    arena[:] = POISON
    for region in places.layout.regions:
        for layer in places.layout.layers:
            arena[places.unit(layer, region.name, places.ids[region.name][0])] = 0
    return places


def _null_bytes(layout: Layout) -> int:
    return sum(region.unit_bytes for region in layout.regions) * len(layout.layers)


def _elements(cache: KVCache, group: LayerGroup, request: str) -> dict[tuple[int, str, str], Int64Array]:
    """Byte addresses of every element of a request's state, by layer, region and field."""
    places = _map(cache, group)
    return {
        (layer, region.name, field.name): places.element(layer, region.name, field, int(unit), None)
        for region in places.layout.regions
        for name in region.ranges
        for unit in cache.units(request, group.prefix, name)
        for layer in places.layout.layers
        for field in region.data_fields
    }
