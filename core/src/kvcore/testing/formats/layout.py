"""Checks of a format's layout: every byte described once, sizes that are real, an identity that peers can compare."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from kvcore.contract import FULL, Format, unsupported
from kvcore.errors import UnsupportedError
from kvcore.layout import ArenaOrder, Layout
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, Shard
from kvcore.testing.formats.base import FormatBase
from kvcore.testing.harness import View, open_cache, skip_unsupported
from kvcore.testing.memory import ITEM_BYTES, Map, element_bytes, element_offsets
from kvcore.testing.sample import GROUPS


class FormatLayout(FormatBase):
    """The layout alone."""

    def test_own_kernels_serve(self, subject: Registry, kv_format: Format) -> None:
        """Kernels that name the format serve some group; where none is installed, the derived reference was checked."""
        own = {kernel.name for kernel in subject.kernels() if kv_format.name in kernel.formats}
        missing = unsupported(f"no installed kernel names {kv_format.name}: the derived reference kernels were checked")
        skip_unsupported(FULL if own else missing, "kernels of its own")
        chosen = set()
        for group in self.groups.values():
            if kv_format.supports(group):
                with open_cache(subject, group, page_size=self.page_size, arena="page_major") as cache:
                    chosen |= {choice.chosen for choice in cache.explain()[group.prefix]}
        assert own & chosen, f"none of {sorted(own)} serves any group"

    def test_holds_some_group(self, kv_format: Format) -> None:
        """A format that refuses every group is not checked: give the suite ``groups`` that it holds. Its own sample groups
        are tried, and it holds each of them."""
        for group in kv_format.sample_groups():
            answer = kv_format.supports(group)
            assert answer, f"refuses a sample group of its own, {group.prefix!r}: {answer.reason}"
            tried = group in self.groups.values() or self.groups is not GROUPS
            assert tried, (
                f"sample group {group.prefix!r} is not tried: set groups = groups_of({type(kv_format).__name__}())"
            )
        refused = {name: kv_format.supports(group).reason for name, group in self.groups.items()}
        assert any(kv_format.supports(group) for group in self.groups.values()), refused

    def test_refuses_states(self, kv_format: Format) -> None:
        """A format stores tokens: a state group needs a state component."""
        group = LayerGroup("state", (0,), next(iter(self.groups.values())).tensors, kind="state")
        answer = kv_format.supports(group)
        assert not answer
        assert answer.reason

    def test_says_whose_bytes_they_are(self, layout: Layout, held: LayerGroup, kv_format: Format) -> None:
        """Format, revision, group, layers and component prefixes are those asked for."""
        assert (layout.format, layout.revision) == (kv_format.name, kv_format.revision)
        assert layout.group == held.prefix
        assert layout.layers == held.layers
        for component in layout.components:
            assert component.startswith(f"{held.prefix}/"), "components are named after their group"

    def test_describes_every_byte_once(self, layout: Layout) -> None:
        """No byte of a unit belongs to two elements or to none: data, or declared padding."""
        for region in layout.regions:
            owners = np.zeros(region.unit_bytes, np.int64)
            for field in region.data_fields:
                where = element_bytes(field)
                assert where.min() >= field.offset
                assert where.max() < region.unit_bytes, f"{region.name}.{field.name} leaves its unit"
                np.add.at(owners, where.reshape(-1), 1)
            assert owners.max() <= 1, f"fields of {region.name} overlap"
            spans = np.zeros(region.unit_bytes, np.int64)
            for field in region.fields:
                for byte in range(ITEM_BYTES[field.dtype]):
                    np.add.at(spans, element_offsets(field, padded=True).reshape(-1) + byte, 1)
            assert (spans == 1).all(), f"fields of {region.name} do not tile its unit"

    def test_arenas_hold_every_unit_apart(self, layout: Layout) -> None:
        """Units of all layers and regions lie in the arena without overlap, where the layout places them."""
        units = dict.fromkeys((item.name for item in layout.ranges), 3)
        own, placed = Map(layout, units), layout.place(units)
        assert placed.arena_bytes == own.arena_bytes
        owners = np.zeros(own.arena_bytes, np.int64)
        for layer, region in own.starts:
            base, step = own.starts[layer, region]
            buffer = placed.buffer(layer, region)
            assert (buffer.base, buffer.unit_stride) == (base, step)
            assert (buffer.first_unit, buffer.num_units) == (own.ids[region][0], own.ids[region][-1] + 1)
            for unit in own.ids[region]:
                owners[own.unit(layer, region, unit)] += 1
        assert owners.max() == 1
        if layout.arena == "page_major" or len({item.ranges for item in layout.regions}) == 1:
            assert owners.min() == 1

    def test_survives_json(self, layout: Layout) -> None:
        """A peer that reads the layout has the same one."""
        again = Layout.from_json(layout.to_json())
        assert again == layout
        assert again.fingerprint() == layout.fingerprint()

    def test_is_the_same_every_time(
        self, layout: Layout, held: LayerGroup, arena: ArenaOrder, kv_format: Format
    ) -> None:
        """Two processes get one fingerprint; another page size gets another, where it makes another layout."""
        same = kv_format.layout(held, page_size=self.page_size, shard=Shard(), arena=arena)
        other = kv_format.layout(held, page_size=2 * self.page_size, shard=Shard(), arena=arena)
        assert same.fingerprint() == layout.fingerprint()
        assert (other.fingerprint() == layout.fingerprint()) == (other == layout)

    def test_sizes_are_real(self, layout: Layout) -> None:
        """``bytes_per_token`` is what lies in memory: data and padding of the format, by component."""
        promised = layout.bytes_per_token()
        for component in layout.components:
            real = Fraction(0)
            for region in layout.regions_of(component):
                spare = sum(f.nbytes for f in region.fields if f.kind == "alignment")
                tokens = [layout.space_of_range(name).tokens_per_unit for name in region.ranges]
                real += sum(Fraction((region.unit_bytes - spare) * len(layout.layers), n) for n in tokens if n)
            assert promised[component] == real, component

    def test_layers_of_a_stage(self, layout: Layout, held: LayerGroup, arena: ArenaOrder, kv_format: Format) -> None:
        """A pipeline stage holds its own layers and no other."""
        mine = held.layers[:1]
        stage = kv_format.layout(held, page_size=self.page_size, shard=Shard(layers=mine), arena=arena)
        assert stage.layers == mine
        assert stage.regions == layout.regions

    def test_heads_of_a_rank(self, held: LayerGroup, arena: ArenaOrder, kv_format: Format) -> None:
        """A tensor-parallel rank holds the elements of its own heads: two ranks together no more than one alone."""
        whole = kv_format.layout(held, page_size=self.page_size, shard=Shard(), arena=arena)
        try:
            ranks = [kv_format.layout(held, page_size=self.page_size, shard=Shard(n, 2), arena=arena) for n in (0, 1)]
        except UnsupportedError as error:
            skip_unsupported(unsupported(str(error)), "tensor parallelism")
        sharded = {tensor.name for tensor in held.tensors if tensor.sharded}
        for component in whole.components:
            sizes = [Map(item, dict.fromkeys((r.name for r in item.ranges), 2)).logical(component) for item in ranks]
            one = Map(whole, dict.fromkeys((r.name for r in whole.ranges), 2)).logical(component)
            assert sizes[0] == sizes[1]
            if whole.regions_of(component)[0] in whole.constant_regions:
                assert one <= sum(sizes) <= 2 * one, component
            elif len(sharded) == len(held.tensors):
                assert sum(sizes) == one, component
            else:
                assert one <= sum(sizes) <= 2 * one, component
        if sharded:
            assert ranks[0].fingerprint() != ranks[1].fingerprint(), "ranks cannot be told apart"

    def test_what_is_planned_is_allocated(self, view: View) -> None:
        """The pool takes the bytes that the layout asks for."""
        assert view.pool.arena.nbytes == view.map.arena_bytes
        assert view.cache.stats().allocated_bytes == {view.group.prefix: view.map.arena_bytes}
