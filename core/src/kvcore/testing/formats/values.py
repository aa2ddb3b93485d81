"""Checks of a format's values: encode and decode in real, poisoned memory, through the kernels that would serve it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch

from kvcore.contract import DONE, FULL, Format, unsupported
from kvcore.layout import Layout
from kvcore.spec import LayerGroup
from kvcore.testing.formats.base import FormatBase, encoded_fields, encoded_together
from kvcore.testing.harness import View, make_rows, skip_unsupported, widest_unit
from kvcore.testing.memory import ITEM_BYTES, POISON, Bytes

Elements = Mapping[tuple[str, str], torch.Tensor]


def raw_elements(elements: Elements) -> dict[tuple[str, str], Bytes]:
    """Encoded elements as bytes ``[T, *axes, item size]``."""
    return {
        key: values.contiguous().view(torch.uint8).reshape(*values.shape, -1).numpy()
        for key, values in elements.items()
    }


class FormatBytes(FormatBase):
    """Values and bytes."""

    @pytest.fixture
    def rows(self, layout: Layout, held: LayerGroup, kv_format: Format) -> dict[str, torch.Tensor]:
        """Seven tokens of every tensor, or as many of what is encoded together."""
        return make_rows(held, 7 * encoded_together(kv_format, layout), torch.Generator().manual_seed(7))

    def test_encodes_every_field(self, layout: Layout, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
        """One element for every place of every data field, in its dtype, and nothing besides."""
        raw = raw_elements(kv_format.encode(layout, rows))
        want = {(item.region.name, item.field.name): item for item in encoded_fields(kv_format, layout)}
        assert set(raw) == set(want)
        tokens = 7 * encoded_together(kv_format, layout)
        for key, item in want.items():
            assert list(raw[key].shape) == [tokens // item.tokens, *item.shape, ITEM_BYTES[item.field.dtype]], key

    def test_decodes_what_it_encodes(
        self, layout: Layout, held: LayerGroup, kv_format: Format, rows: dict[str, torch.Tensor]
    ) -> None:
        """Every tensor comes back, within :attr:`kvcore.contract.Format.max_error`, in the dtype asked for."""
        for dtype in (torch.float32, torch.bfloat16):
            back = kv_format.decode(layout, kv_format.encode(layout, rows), dtype)
            assert set(back) == {tensor.name for tensor in held.tensors}
            for name, values in rows.items():
                assert back[name].dtype == dtype
                assert back[name].shape == values.shape
                error = (back[name].float() - values).abs().max() / values.abs().max()
                assert float(error) <= kv_format.max_error, name

    def test_tokens_are_encoded_apart(self, layout: Layout, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
        """What else is in the batch changes no byte of a token, or of a unit where whole units are encoded: no scale spans
        units. An empty batch encodes to nothing."""
        every = raw_elements(kv_format.encode(layout, rows))
        count = encoded_together(kv_format, layout)
        for n in (0, 6):
            part = {name: values[n * count : (n + 1) * count] for name, values in rows.items()}
            alone = raw_elements(kv_format.encode(layout, part))
            for key, values in every.items():
                size = len(values) // 7
                np.testing.assert_array_equal(alone[key], values[n * size : (n + 1) * size], str(key))
        nothing = kv_format.encode(layout, {name: values[:0] for name, values in rows.items()})
        assert all(values.shape[0] == 0 for values in nothing.values())

    def test_low_precision_rows(self, layout: Layout, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
        """A model in bf16 stores what its values are in fp32."""
        low = {name: values.to(torch.bfloat16) for name, values in rows.items()}
        got = raw_elements(kv_format.encode(layout, low))
        want = raw_elements(kv_format.encode(layout, {name: values.float() for name, values in low.items()}))
        for key in want:
            np.testing.assert_array_equal(got[key], want[key])

    def test_zero_bytes_are_zero(self, layout: Layout, kv_format: Format, rows: dict[str, torch.Tensor]) -> None:
        """Memory that was never written holds zeros, and reads as exactly 0."""
        zeros = {key: torch.zeros_like(values) for key, values in kv_format.encode(layout, rows).items()}
        for name, values in kv_format.decode(layout, zeros, torch.float32).items():
            assert not values.any(), name

    def test_stores_the_bytes_it_declares(self, view: View, kv_format: Format) -> None:
        """After a store through the chosen kernel, every declared address holds the reference's element: of every token,
        or of every unit whose tokens are all there."""
        if kv_format.encodes == "units":
            self._stores_units(view, kv_format)
            return
        view.needs("store")
        tokens, page = view.tokens, view.page_size
        view.cache.admit("a", tokens)
        stored = view.write("a", tokens, seed=1)
        slots = view.slots("a", 0, tokens).tolist()
        for layer, rows in stored.items():
            raw = raw_elements(kv_format.encode(view.layout, rows))
            for region in view.token_regions():
                for field in region.data_fields:
                    for token in (0, page - 1, page, 2 * page - 1, 2 * page, tokens - 1):
                        if slots[token] >= 0:
                            got = view.stored(layer, region.name, field, slots[token])
                            want = raw[region.name, field.name][token]
                            np.testing.assert_array_equal(got, want, f"{region.name}.{field.name} of {token}")

    def _stores_units(self, view: View, kv_format: Format) -> None:
        """Tokens of a unit come in two steps."""
        skip_unsupported(view.declares("store"), "store")
        whole = 2 * encoded_together(kv_format, view.layout)
        view.cache.admit("a", whole + 1)
        steps = [view.write("a", count, seed=count) for count in (3, whole - 2)]
        for layer in view.layout.layers:
            rows = {name: torch.cat([step[layer][name] for step in steps])[:whole] for name in steps[0][layer]}
            raw = raw_elements(kv_format.encode(view.layout, rows))
            for region, field, tokens, name in encoded_fields(kv_format, view.layout):
                for n, unit in enumerate(view.tables("a")[name][: whole // tokens]):
                    if unit != view.null(name):
                        got = view.arena[view.map.element(layer, region.name, field, unit, None)]
                        want = raw[region.name, field.name][n]
                        np.testing.assert_array_equal(got, want, f"{region.name}.{field.name} of unit {n}")

    def test_loads_what_it_stored(self, view: View, kv_format: Format) -> None:
        """The chosen kernels decode what the reference decodes, whatever the order of the slots."""
        view.needs("store", "load")
        tokens = view.tokens
        view.cache.admit("a", tokens)
        stored = view.write("a", tokens, seed=2)
        order = torch.randperm(tokens, generator=torch.Generator().manual_seed(3))
        slots = view.slots("a", 0, tokens)[order]
        for layer, rows in stored.items():
            want = kv_format.decode(view.layout, kv_format.encode(view.layout, rows), torch.float32)
            for name, values in view.load(layer, slots).items():
                want[name][order[slots < 0]] = 0  # of a dead unit
                torch.testing.assert_close(values, want[name][order], rtol=0, atol=0, msg=name)

    def test_touches_nothing_else(self, view: View) -> None:
        """A store changes the units of its request and no other byte; null units stay zero."""
        skip_unsupported(view.declares("store"), "store")
        before = view.arena.copy()
        tokens = widest_unit(view.layout) + 1
        view.cache.admit("a", tokens)
        view.write("a", tokens, seed=3)
        mine = np.zeros(view.arena.nbytes, bool)
        for name, units in view.tables("a").items():
            for region in view.layout.regions:
                if name in region.ranges:
                    for layer in view.layout.layers:
                        for unit in units:
                            mine[view.map.unit(layer, region.name, unit)] = True
        np.testing.assert_array_equal(view.arena[~mine], before[~mine])
        assert not view.arena[view.null_bytes()].any(), "a null unit was written"

    def test_unwritten_slots_are_zero(self, view: View) -> None:
        """Slots of a recycled page that nobody wrote read as exactly 0, though the page was full of 0xFF."""
        view.needs("store", "load")
        page = view.page_size
        skip_unsupported(FULL if page > 1 else unsupported("a unit holds one token"), "unwritten slots")
        view.cache.admit("old", 3 * page)
        view.write("old", 3 * page, seed=4)
        view.cache.release("old")
        view.poison()
        view.cache.admit("a", page)
        view.write("a", min(3, page - 1), seed=5)
        slots = view.slots("a", min(3, page - 1), page)
        for layer in view.layout.layers:
            for name, values in view.load(layer, slots).items():
                assert not values.any(), f"{name} of layer {layer}"

    def test_dropped_rows(self, view: View) -> None:
        """Rows marked invalid write no byte; slot −1 reads as 0 and never as the last slot of the pool."""
        view.needs("store", "load")
        view.cache.admit("a", 2)
        view.write("a", 2, seed=6)
        before = view.arena.copy()
        view.write("a", 4, seed=7, valid=torch.zeros(4, dtype=torch.bool))
        assert not view.arena[view.arena != before].any(), "a dropped row was written"  # fresh pages are zeroed
        slots = torch.tensor([-1, int(view.slots("a", 1, 2)), -1])
        for layer in view.layout.layers:
            for name, values in view.load(layer, slots).items():
                assert not values[[0, 2]].any(), name
                assert values[1].any(), name

    def test_released_rows(self, view: View) -> None:
        """A request that is released inside a step writes nothing more: its slots are −1."""
        skip_unsupported(view.declares("store"), "store")
        view.cache.admit("a", 4)
        with view.cache.begin([("a", 4)]) as step:
            view.cache.release("a")
            view.poison()
            for layer in view.layout.layers:
                step.store(layer, view.rows(4, 8, layer)).wait()
            step.commit()
        null = view.null_bytes()
        assert not view.arena[null].any(), "a null unit was written"
        view.arena[null] = view.arena[view.constant_bytes()] = POISON
        assert (view.arena == POISON).all()

    def test_copies_whole_units(self, view: View) -> None:
        """``copy_units`` copies every byte of every layer and region, and nothing else."""
        view.arena[:] = np.random.default_rng(9).integers(0, 256, view.arena.nbytes, np.uint8)
        before = view.arena.copy()
        table = view.cache.store.tables[view.group.prefix]
        for item in view.layout.ranges:
            if view.layout.space(item.space).constant:
                continue
            pairs = view.null(item.name) + torch.tensor([[2, 7], [5, 4]])
            table.copy_units(item.name, pairs[:, 0], pairs[:, 1], DONE).wait()
            for src, dst in pairs.tolist():
                for layer in view.layout.layers:
                    for region in view.layout.regions:
                        if item.name in region.ranges:
                            copied = before[view.map.unit(layer, region.name, src)]
                            before[view.map.unit(layer, region.name, dst)] = copied
        np.testing.assert_array_equal(view.arena, before)
