"""The suite for state components: what can be checked without a model that computes the state.

Their layout, sizes and shards are checked, and that a cache hands out zeroed slots, which go with their request through
retraction and transfer, and come back from checkpoints. Values are not: those belong to the model that writes the state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar, get_args

import numpy as np
import pytest
from msgspec.structs import replace

from kvcore.config import load_config
from kvcore.contract import FULL, StateComponent, unsupported
from kvcore.engine.cache import KVCache
from kvcore.errors import UnsupportedError
from kvcore.layout import ArenaOrder, Int64Array, Layout
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.plugins.dispatch import choose_builder
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, ModelSpec, Shard, StateSpec
from kvcore.testing.harness import Subject, pull, skip_unsupported
from kvcore.testing.memory import ITEM_BYTES, POISON, Bytes, Map, element_bytes, pattern
from kvcore.testing.sample import GROUPS, STATE_GROUPS

Elements = dict[tuple[int, str, str], Bytes]
"""Bytes of every element of a state, by layer, region and field."""


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

    @pytest.fixture(scope="class")
    def registry(self) -> Registry:
        """Where pools and backups come from."""
        return load_plugins(())

    @pytest.fixture
    def layout(self, component: StateComponent, group: LayerGroup, arena: ArenaOrder) -> Layout:
        """The layout of a group it applies to."""
        applies = component.applies(group)
        what = f"layer group {[*(state.name for state in group.states), *(tensor.name for tensor in group.tensors)]}"
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
            assert sum(field.nbytes for field in region.fields) == region.unit_bytes > 0

    def test_holds_every_state(self, layout: Layout, group: LayerGroup) -> None:
        """A slot has room for every tensor of state of a layer; one of no elements takes none, and no region."""
        held = sum(element_bytes(field).size for region in layout.regions for field in region.data_fields)
        assert held >= sum(math.prod(_shape(state)) * ITEM_BYTES[state.dtype] for state in group.states)

    def test_an_empty_tensor_is_nothing(
        self, layout: Layout, component: StateComponent, group: LayerGroup, arena: ArenaOrder
    ) -> None:
        """A convolution over one token keeps no inputs: no bytes, and no region that is registered or looked up."""
        for state in group.states[:1]:
            axes = tuple((name, size if name == state.split else 0) for name, size in state.axes)
            empty = replace(state, name="empty", axes=axes)
            widened = replace(group, states=(*group.states, empty))
            assert component.applies(widened)
            assert component.layout(widened, shard=Shard(), arena=arena) == layout

    def test_layers_of_a_stage(
        self, layout: Layout, component: StateComponent, group: LayerGroup, arena: ArenaOrder
    ) -> None:
        """A pipeline stage holds the states of its own layers and of no other."""
        stage = component.layout(group, shard=Shard(layers=group.layers[:1]), arena=arena)
        assert stage.layers == group.layers[:1]
        assert stage.regions == layout.regions

    @pytest.mark.parametrize("tp_size", [2, 4])
    def test_ranks_share_every_id(
        self, layout: Layout, component: StateComponent, group: LayerGroup, arena: ArenaOrder, tp_size: int
    ) -> None:
        """The slots of all ranks together hold every id of an axis that is split: once, or as often as heads repeat."""
        try:
            ranks = [component.layout(group, shard=Shard(rank, tp_size), arena=arena) for rank in range(tp_size)]
        except UnsupportedError as error:
            skip_unsupported(unsupported(str(error)), "tensor parallelism")
        states = {state.name: state for state in group.states}
        for region in layout.regions:
            for field in region.data_fields:
                for axis in field.axes:
                    held = [item.region(region.name).field(field.name).axis(axis.name) for item in ranks]
                    if not any(item.ids for item in held):
                        assert [item.size for item in held] == [axis.size] * tp_size, "replicated, but not whole"
                        continue
                    ids = [[n for lo, hi in item.ids for n in range(lo, hi)] for item in held]
                    assert [len(part) for part in ids] == [item.size for item in held]
                    assert all(part == sorted(set(part)) for part in ids)
                    assert {n for part in ids for n in part} == set(range(axis.size)), "ids that no rank holds"
                    state = states.get(region.name)
                    if state is not None and state.split == axis.name:
                        assert ids == [_share(state, rank, tp_size) for rank in range(tp_size)]

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
            want = _fill(cache, group, _slots(cache, group, "a"), 0)
            assert want
            handle = cache.retract("a")
            cache.admit("tenant", 1)  # takes the slot
            cache.resume(handle)
            _check(cache, group, "a", want)
            pull(cache, target, "a", 8)
            _check(target, group, "a", want)

    def test_goes_back_to_a_checkpoint(
        self, layout: Layout, registry: Registry, component: StateComponent, group: LayerGroup
    ) -> None:
        """Every element as it was at that length, however the steps after it rewrote the state; or refused, with the
        component's reason, and nothing changed."""
        answer = component.checkpoint(group)
        with _cache(registry, component, group, layout) as cache:
            _poisoned(cache, group)
            want = _begin(cache, group)
            if not answer:
                with pytest.raises(UnsupportedError) as refused:
                    cache.checkpoint("a")
                assert refused.value.fields["reason"] == answer.reason
                assert not cache.manager.get("a").checkpoints
                _check(cache, group, "a", want)
                return
            cache.checkpoint("a")
            for seed in (1, 2):
                with cache.begin([("a", 2)]) as step:
                    later = _fill(cache, group, _slots(cache, group, "a"), seed)
                    step.commit()
                _check(cache, group, "a", later)
            assert cache.rollback("a", 4).length == 3
            _check(cache, group, "a", want)
            cache.check_integrity()

    def test_keeps_the_state_after_every_token(
        self, layout: Layout, registry: Registry, component: StateComponent, group: LayerGroup
    ) -> None:
        """A speculative step of three tokens of which two, or none, are accepted; or refused, with the reason."""
        answer = component.checkpoint(group)
        with _cache(registry, component, group, layout) as cache:
            _poisoned(cache, group)
            want = _begin(cache, group)
            if not answer:
                with pytest.raises(UnsupportedError) as refused:
                    cache.begin([("a", 3)], speculative=True)
                assert refused.value.fields["reason"] == answer.reason
                return
            for accepted in (2, 0):
                with cache.begin([("a", 3)], speculative=True) as step:
                    trails = {r.name: step.state_trail(group.prefix, r.name).tolist() for r in layout.ranges}
                    kept = []
                    for n in range(3):
                        units = {name: trail[n] for name, trail in trails.items()}
                        assert min(units.values()) > 0
                        found = _read(cache, group, units)
                        assert n == 2 or not any(values.any() for values in found.values()), "not zeroed"
                        kept.append(_fill(cache, group, units, 10 * accepted + n))
                    step.commit([accepted])
                want = kept[accepted - 1] if accepted else want
                _check(cache, group, "a", want)
            cache.check_integrity()


@contextmanager
def _cache(registry: Registry, component: StateComponent, group: LayerGroup, layout: Layout) -> Iterator[KVCache]:
    """A cache for three requests of this group alone."""
    memory = Map(layout, dict.fromkeys((item.name for item in layout.ranges), 64)).arena_bytes
    settings = {"cache.memory": memory, "cache.max_requests": 3, "cache.checkpoints": 3, "cache.arena": layout.arena}
    config = load_config(None, settings)
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


def _shape(state: StateSpec) -> list[int]:
    return [size for _, size in state.axes]


def _share(state: StateSpec, rank: int, tp_size: int) -> list[int]:
    """Ids of the split axis that a rank holds: of every part the elements of its heads, or of the head it shares."""
    ids: list[int] = []
    base = 0
    for part in state.parts:
        for head in range(part.num_heads):
            of_head = rank * part.num_heads // tp_size == head
            if of_head if tp_size > part.num_heads else head * tp_size // part.num_heads == rank:
                ids += range(base + head * part.width, base + (head + 1) * part.width)
        base += part.num_heads * part.width
    return ids


def _begin(cache: KVCache, group: LayerGroup) -> Elements:
    """A request of three tokens; returns its state."""
    cache.admit("a", 3)
    with cache.begin([("a", 3)]) as step:
        want = _fill(cache, group, _slots(cache, group, "a"), 0)
        step.commit()
    return want


def _slots(cache: KVCache, group: LayerGroup, request: str) -> dict[str, int]:
    """The unit of a request in every range."""
    ranges = cache.layouts[group.prefix].ranges
    found = {item.name: cache.units(request, group.prefix, item.name).tolist() for item in ranges}
    assert all(len(units) == 1 for units in found.values()), f"not one unit a request: {found}"
    return {name: unit for name, (unit,) in found.items()}


def _elements(cache: KVCache, group: LayerGroup, units: Mapping[str, int]) -> dict[tuple[int, str, str], Int64Array]:
    """Byte addresses of every element of one unit a range, by layer, region and field."""
    places = _map(cache, group)
    return {
        (layer, region.name, field.name): places.element(layer, region.name, field, units[name], None)
        for region in places.layout.regions
        for name in region.ranges
        for layer in places.layout.layers
        for field in region.data_fields
    }


def _read(cache: KVCache, group: LayerGroup, units: Mapping[str, int]) -> Elements:
    arena = cache.store.pools[group.prefix].arena.array()
    return {key: arena[where].copy() for key, where in _elements(cache, group, units).items()}


def _fill(cache: KVCache, group: LayerGroup, units: Mapping[str, int], seed: int) -> Elements:
    """Write random bytes to every element; returns them."""
    arena = cache.store.pools[group.prefix].arena.array()
    for n, where in enumerate(_elements(cache, group, units).values()):
        arena[where] = pattern(where.size, 1000 * seed + n).reshape(where.shape)
    return _read(cache, group, units)


def _check(cache: KVCache, group: LayerGroup, request: str, want: Elements) -> None:
    for key, values in _read(cache, group, _slots(cache, group, request)).items():
        np.testing.assert_array_equal(values, want[key], str(key))
