"""Checks that every component of a format moves with its request: payloads, retraction, transfer, conversion."""

from __future__ import annotations

from itertools import count, pairwise
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
from kvcore.testing.formats.base import FormatBase, encoded_fields, encoded_together
from kvcore.testing.formats.values import raw_elements
from kvcore.testing.harness import View, make_rows, open_cache, pull, skip_unsupported
from kvcore.testing.memory import POISON, Bytes, Map

REQUEST = "a"


class FormatMoves(FormatBase):
    """Nothing of a request is forgotten, and nothing is counted twice."""

    def test_payloads_list_every_component_once(self, view: View) -> None:
        """Over the chunks of a prompt, every component of every unit is listed exactly once."""
        tokens = view.tokens
        view.cache.admit(REQUEST, tokens)
        view.write(REQUEST, tokens, seed=1)
        listed: list[tuple[str, str, int]] = []
        for start, stop in pairwise(sorted({0, 3, tokens // 2 - 1, tokens})):
            for payload in view.cache.manager.payloads(REQUEST, start, stop, last=stop == tokens, total=tokens):
                assert payload.group == view.group.prefix
                listed += [(payload.range, part, unit) for part in payload.components for unit in payload.ids.tolist()]
        wanted = {
            (name, region.component, unit)
            for name, units in view.final(REQUEST).items()
            for region in view.layout.regions
            if name in region.ranges
            for unit in units
        }
        assert set(listed) == wanted
        assert len(listed) == len(wanted), "a component is listed twice"

    def test_comes_back_from_retraction_bit_for_bit(self, view: View) -> None:
        """Retracted to host memory and restored into other, poisoned units: every byte of every component."""
        view.cache.admit(REQUEST, view.tokens)
        view.write(REQUEST, view.tokens, seed=2)
        before = {name: view.request_bytes(REQUEST, name) for name in view.layout.components}
        old, want = view.final(REQUEST), view.sizes(REQUEST)
        handle = view.cache.retract(REQUEST, engine_data=b"engine data")
        assert not handle.recompute, "nothing was saved"
        view.poison()
        for tenant in count():  # the first also sees to it that units come out of quarantine
            view.cache.admit(f"tenant{tenant}", view.tokens)
            if not any(set(units) & view.free(name) for name, units in old.items()):
                break
        view.cache.resume(handle)
        new = view.final(REQUEST)
        for name, units in old.items():
            assert not set(units) & set(new[name])
        assert {c: handle.bytes_by_component.get(c, 0) for c in want} == want
        for name, values in before.items():
            np.testing.assert_array_equal(view.request_bytes(REQUEST, name), values, name)

    @pytest.mark.parametrize("target_arena", get_args(ArenaOrder))
    def test_arrives_at_another_cache(
        self, view: View, subject: Registry, target_arena: ArenaOrder, kv_format: Format
    ) -> None:
        """Pulled through the transport into a cache of either arena order: the same values, each byte once."""
        view.cache.admit(REQUEST, view.tokens)
        stored = view.write(REQUEST, view.tokens, seed=3)
        sent = view.moved(REQUEST)
        with open_cache(subject, view.group, page_size=self.page_size, arena=target_arena) as cache:
            target = View(cache, view.group, view.spaces, kv_format)
            done = pull(view.cache, cache, REQUEST, view.tokens)
            want = target.sizes(REQUEST)
            moved = {component: done.bytes_by_component.get(component, 0) for component in want}
            assert moved == want, "bytes moved are not the bytes of the request"
            assert set(done.bytes_by_component) <= set(want)
            assert (done.num_tokens, done.engine_data) == (view.tokens, b"engine data")
            arrived = target.moved(REQUEST)
            assert arrived.keys() == sent.keys()
            for key, values in sent.items():
                np.testing.assert_array_equal(arrived[key], values, str(key))
            assert not target.arena[target.null_bytes()].any(), "a null unit was written"
            if not target.has("store", "load"):
                return
            slots = target.slots(REQUEST, 0, view.tokens)
            for layer, rows in stored.items():
                loaded = target.load(layer, slots)
                encoded = kv_format.encode(view.layout, rows)
                for name, wanted in kv_format.decode(view.layout, encoded, torch.float32).items():
                    wanted[slots < 0] = 0  # of a dead unit
                    torch.testing.assert_close(loaded[name], wanted, rtol=0, atol=0, msg=name)

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
        wide = [
            axis.size for r in whole.moving_regions for f in r.data_fields for axis in f.axes if axis.name == "slot"
        ]
        tokens = max(wide, default=1) if kv_format.encodes == "tokens" else encoded_together(kv_format, whole)
        rows = make_rows(held, tokens, torch.Generator().manual_seed(4))
        own = Map(whole, units)
        target = np.full(own.arena_bytes, POISON, np.uint8)
        want = target.copy()
        _place(want, own, kv_format, rows)
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
                unit = own.ids[layout.regions_of(components[0])[0].name][1]
                run_program(program, source, target, [unit], [unit])
        for layer in whole.layers:
            for region in whole.moving_regions:
                for field in region.data_fields:
                    where = own.element(layer, region.name, field, own.ids[region.name][1], None)
                    np.testing.assert_array_equal(target[where], want[where], f"{region.name}.{field.name}")


def _moving_together(layout: Layout) -> list[list[str]]:
    """Components by the unit ranges they share."""
    found: dict[tuple[str, ...], list[str]] = {}
    for component in layout.components:
        found.setdefault(layout.regions_of(component)[0].ranges, []).append(component)
    return list(found.values())


def _place(arena: Bytes, places: Map, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
    """Write encoded rows into the slots of one unit of every region, by the kit's own addresses."""
    raw = raw_elements(kv_format.encode(places.layout, rows))
    for layer in places.layout.layers:
        for region, field, _, unit in encoded_fields(kv_format, places.layout):
            slots = range(field.axis("slot").size) if field.has_axis("slot") and not unit else [None]
            for slot in slots:
                where = places.element(layer, region.name, field, places.ids[region.name][1], slot)
                arena[where] = raw[region.name, field.name][slot or 0]
