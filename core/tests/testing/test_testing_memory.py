"""The kit's own addresses against the tests' slow oracle, element by element: split orders, padded axes, all arenas."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from kvcore.layout.dtypes import DTYPES
from kvcore.testing.memory import ITEM_BYTES, POISON, Map, element_offsets, pattern


def test_elements_lie_where_their_order_says(loop: ModuleType, cases: ModuleType) -> None:
    split = 0
    for name, layout in cases.everything().items():
        for region in layout.regions:
            for field in region.data_fields:
                if np.prod(field.logical_shape) > 20_000:
                    continue
                found = element_offsets(field)
                names = [axis.name for axis in field.axes]
                for coords in loop.coordinates(field):
                    assert found[tuple(coords[n] for n in names)] == loop.offset(field, coords), (name, field.name)
                split += "%" in field.order
    assert split, "no case has a split order"


def test_units_lie_where_the_arena_says(loop: ModuleType, cases: ModuleType) -> None:
    for name, layout in cases.everything().items():
        units = {item.name: 2 + n for n, item in enumerate(layout.ranges)}
        addresses, nbytes = loop.unit_addresses(layout, units)
        own = Map(layout, units)
        assert own.arena_bytes == nbytes, name
        for (layer, region, unit), address in addresses.items():
            assert own.unit(layer, region, unit).start == address, name


def test_every_dtype_has_its_size() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_patterns_hold_no_poison() -> None:
    assert (pattern(10_000, 1) != POISON).all()
    assert len(np.unique(pattern(10_000, 1))) == 255
