"""Checks that every component of a format moves with its request: payloads, retraction, transfer, conversion."""

from __future__ import annotations

from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from kvcore.contract import Format, unsupported
from kvcore.errors import LayoutError, UnsupportedError
from kvcore.layout import ArenaOrder, Layout
from kvcore.layout.moves import Program, run_program
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, Shard
from kvcore.testing.formats.base import FormatBase
from kvcore.testing.formats.values import raw_elements
from kvcore.testing.harness import View, make_rows, open_cache, pull, skip_unsupported
from kvcore.testing.memory import POISON, Bytes, Map

REQUEST = "a"


class FormatMoves(FormatBase):
    """Nothing of a request is forgotten, and nothing is counted twice."""

    @property
    def tokens(self) -> int:
        """Length of the requests that move: whole pages and a partial one."""
        return 2 * self.page_size + 5

    def test_payloads_list_every_component_once(self, view: View) -> None:
        """Over the chunks of a prompt, every component of every unit is listed exactly once."""
        view.cache.admit(REQUEST, self.tokens)
        view.write(REQUEST, self.tokens, seed=1)
        listed: list[tuple[str, str, int]] = []
        cuts = [0, 3, self.page_size + 1, self.tokens]
        for start, stop in pairwise(cuts):
            for payload in view.cache.manager.payloads(REQUEST, start, stop, last=stop == self.tokens):
                assert payload.group == view.group.prefix
                listed += [(payload.range, part, unit) for part in payload.components for unit in payload.ids.tolist()]
        wanted = {
            (name, region.component, unit)
            for name, units in view.tables(REQUEST).items()
            for region in view.layout.regions
            if name in region.ranges
            for unit in units
        }
        assert set(listed) == wanted
        assert len(listed) == len(wanted), "a component is listed twice"

    def test_comes_back_from_retraction_bit_for_bit(self, view: View) -> None:
        """Retracted to host memory and restored into other, poisoned units: every byte of every component."""
        view.cache.admit(REQUEST, self.tokens)
        view.write(REQUEST, self.tokens, seed=2)
        before = {name: view.request_bytes(REQUEST, name) for name in view.layout.components}
        old = view.tables(REQUEST)
        handle = view.cache.retract(REQUEST, engine_data=b"engine data")
        assert not handle.recompute, "nothing was saved"
        view.poison()
        view.cache.admit("tenant", self.tokens)
        view.cache.resume(handle)
        new = view.tables(REQUEST)
        for name, units in old.items():
            assert not set(units) & set(new[name])
            pages = len(units)
            want = {c: view.map.logical(c) * pages for c in _components(view, name)}
            assert {c: handle.bytes_by_component.get(c) for c in want} == want
        for name, values in before.items():
            np.testing.assert_array_equal(view.request_bytes(REQUEST, name), values, name)

    @pytest.mark.parametrize("target_arena", get_args(ArenaOrder))
    def test_arrives_at_another_cache(
        self, view: View, subject: Registry, target_arena: ArenaOrder, kv_format: Format
    ) -> None:
        """Pulled through the transport into a cache of either arena order: the same values, each byte once."""
        view.cache.admit(REQUEST, self.tokens)
        stored = view.write(REQUEST, self.tokens, seed=3)
        with open_cache(subject, view.group, page_size=self.page_size, arena=target_arena) as cache:
            target = View(cache, view.group)
            done = pull(view.cache, cache, REQUEST, self.tokens)
            pages = {name: len(units) for name, units in target.tables(REQUEST).items()}
            want = {
                component: sum(
                    target.map.logical(component) * n
                    for name, n in pages.items()
                    if component in _components(target, name)
                )
                for component in target.layout.components
            }
            moved = {component: done.bytes_by_component.get(component, 0) for component in want}
            assert moved == want, "bytes moved are not the bytes of the request"
            assert set(done.bytes_by_component) <= set(want)
            assert (done.num_tokens, done.engine_data) == (self.tokens, b"engine data")
            for layer, rows in stored.items():
                raw = raw_elements(kv_format.encode(view.layout, rows))
                for region in target.layout.moving_regions:
                    for field in region.data_fields:
                        for token in (0, self.page_size, self.tokens - 1):
                            unit = target.tables(REQUEST)[target.range][token // self.page_size]
                            where = target.map.element(layer, region.name, field, unit, token % self.page_size)
                            got, name = target.arena[where], f"{region.name}.{field.name} of token {token}"
                            np.testing.assert_array_equal(got, raw[region.name, field.name][token], name)
                loaded = target.load(layer, target.slots(REQUEST, 0, self.tokens))
                for name, values in kv_format.decode(
                    view.layout, kv_format.encode(view.layout, rows), torch.float32
                ).items():
                    torch.testing.assert_close(loaded[name], values, rtol=0, atol=0, msg=name)
            assert not target.arena[target.null_bytes()].any(), "a null unit was written"

    def test_another_configuration_is_another_layout(self, view: View, kv_format: Format) -> None:
        """Bytes of another format are never taken for this one's: the move is refused."""
        units = dict.fromkeys((r.name for r in view.layout.ranges), 2)
        for change in ({"format": "another"}, {"revision": view.layout.revision + 1}):
            other = replace(view.layout, **change)
            with pytest.raises(LayoutError):
                Program.build(view.layout, view.layout.place(units), other, other.place(units))

    def test_ranks_add_up(self, held: LayerGroup, arena: ArenaOrder, kv_format: Format) -> None:
        """The pages of two tensor-parallel ranks, moved into one cache, are what one rank would have stored."""
        whole = kv_format.layout(held, page_size=self.page_size, shard=Shard(), arena=arena)
        units = dict.fromkeys((r.name for r in whole.ranges), 2)
        rows = make_rows(held, self.page_size, torch.Generator().manual_seed(4))
        target = np.full(Map(whole, units).arena_bytes, POISON, np.uint8)
        want = target.copy()
        _place(want, Map(whole, units), kv_format, rows)
        for rank in (0, 1):
            shard = Shard(rank, 2)
            try:
                layout = kv_format.layout(held, page_size=self.page_size, shard=shard, arena=arena)
            except UnsupportedError as error:
                skip_unsupported(unsupported(str(error)), "tensor parallelism")
            ids = {t.name: shard.heads(t) or ((0, t.num_heads),) for t in held.tensors}
            mine = {name: torch.cat([values[:, lo:hi] for lo, hi in ids[name]], 1) for name, values in rows.items()}
            source = np.full(Map(layout, units).arena_bytes, POISON, np.uint8)
            _place(source, Map(layout, units), kv_format, mine)
            for components in _moving_together(layout):
                program = Program.build(layout, layout.place(units), whole, whole.place(units), components)
                run_program(program, source, target, [1], [1])
        own = Map(whole, units)
        for layer in whole.layers:
            for region in whole.moving_regions:
                for field in region.data_fields:
                    for slot in range(self.page_size):
                        where = own.element(layer, region.name, field, 1, slot)
                        np.testing.assert_array_equal(target[where], want[where], f"{region.name}.{field.name}")


def _components(view: View, range_name: str) -> set[str]:
    return {region.component for region in view.layout.regions if range_name in region.ranges}


def _moving_together(layout: Layout) -> list[list[str]]:
    """Components by the unit ranges they share."""
    found: dict[tuple[str, ...], list[str]] = {}
    for component in layout.components:
        found.setdefault(layout.regions_of(component)[0].ranges, []).append(component)
    return list(found.values())


def _place(arena: Bytes, places: Map, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
    """Write encoded rows into the slots of unit 1, by the kit's own addresses."""
    raw = raw_elements(kv_format.encode(places.layout, rows))
    for layer in places.layout.layers:
        for region in places.layout.moving_regions:
            for field in region.data_fields:
                values = raw[region.name, field.name]
                for token in range(len(values)):
                    arena[places.element(layer, region.name, field, 1, token)] = values[token]
