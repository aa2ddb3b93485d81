"""Where bytes lie, worked out again from a layout's declarations alone: the oracle of the suites.

Nothing here calls the addressing code of :mod:`kvcore.layout.fields`, :mod:`kvcore.layout` or :mod:`kvcore.layout.moves`; only what a
layout *declares* is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from kvcore.layout import Field, Int64Array, Layout

Bytes = npt.NDArray[np.uint8]

ITEM_BYTES = {
    "u8": 1, "i8": 1, "u16": 2, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "bf16": 2, "fp32": 4,
    "e4m3fn": 1, "e4m3fnuz": 1, "e5m2": 1, "e5m2fnuz": 1, "e8m0": 1,
}  # fmt: skip
"""Bytes of an element, by storage dtype."""

POISON = 0xFF
"""Fills memory before a check: NaN in every float dtype, −1 in every integer one."""


def element_offsets(field: Field, *, padded: bool = False) -> Int64Array:
    """Byte offset inside the unit of every element of a field: ``int64 [*logical shape]``; the padding of its axes is
    among them on demand."""
    sizes = {axis.name: max(axis.size, axis.padded if padded else 0) for axis in field.axes}
    stored = {axis.name: max(axis.size, axis.padded) for axis in field.axes}
    terms = []
    for word in field.order.split():
        if word.startswith("@"):
            terms.append(("", int(word[1:]), 0))
            continue
        rest, _, modulus = word.partition("%")
        name, _, divisor = rest.partition("//")
        step = int(divisor or 1)
        terms.append((name, step, int(modulus or stored[name] // step)))
    places = dict(zip(sizes, np.indices(tuple(sizes.values()), dtype=np.int64), strict=True))
    offsets = np.full(tuple(sizes.values()), field.offset, np.int64)
    stride = ITEM_BYTES[field.dtype]
    for name, step, count in reversed(terms):
        if not name:  # the next axis outwards counts records
            stride = step
            continue
        offsets += places[name] // step % count * stride
        stride *= count
    return offsets


@lru_cache(maxsize=1024)
def element_bytes(field: Field) -> Int64Array:
    """Offsets of every byte that carries data: ``int64 [*logical shape, item size]``, read-only."""
    found = element_offsets(field)[..., None] + np.arange(ITEM_BYTES[field.dtype])
    found.flags.writeable = False
    return found


class Map:
    """The addresses of one placed layout.

    Args:
        layout: what is placed.
        units: units of every range, the null unit included.
    """

    def __init__(self, layout: Layout, units: Mapping[str, int]) -> None:
        self.layout = layout
        self.ids = {
            r.name: [_first(layout, units, name) + n for name in r.ranges for n in range(units[name])]
            for r in layout.regions
        }
        """Unit ids of every region, ascending."""
        self.starts: dict[tuple[int, str], tuple[int, int]] = {}
        """Layer and region → where unit 0 is or would be, and the step to the next unit."""
        self.arena_bytes = 0
        everywhere = [(layer, region) for layer in layout.layers for region in layout.regions]
        arrays = [[place] for place in everywhere]
        if layout.arena == "page_major":
            kinds = list(dict.fromkeys(region.ranges for region in layout.regions))
            arrays = [[place for place in everywhere if place[1].ranges == kind] for kind in kinds]
        for places in arrays:
            step = sum(region.unit_bytes for _, region in places)
            low, high = self.ids[places[0][1].name][0], self.ids[places[0][1].name][-1] + 1
            at = max(0, self.arena_bytes - low * step)
            self.arena_bytes = at + high * step
            for layer, region in places:
                self.starts[layer, region.name] = (at, step)
                at += region.unit_bytes

    def unit(self, layer: int, region: str, unit: int) -> slice:
        """The bytes of one unit."""
        base, step = self.starts[layer, region]
        return slice(base + unit * step, base + unit * step + self.layout.region(region).unit_bytes)

    def units(self, arena: Bytes, unit: int, component: str | None = None, range_name: str | None = None) -> Bytes:
        """Copy of one unit over all layers and regions (of one component, of one range), layer by layer."""
        regions = [
            r.name
            for r in self.layout.regions
            if component in (None, r.component) and (range_name is None or range_name in r.ranges)
        ]
        parts = [arena[self.unit(layer, name, unit)] for layer in self.layout.layers for name in regions]
        return np.concatenate(parts) if parts else np.zeros(0, np.uint8)

    def element(self, layer: int, region: str, field: Field, unit: int, slot: int | None) -> Int64Array:
        """Byte addresses of a field's elements in one slot of a unit (None: no slot axis): ``[*other axes, item]``."""
        base, step = self.starts[layer, region]
        inside = element_bytes(field)
        if slot is not None:
            axis = [axis.name for axis in field.axes].index("slot")
            inside = np.take(inside, slot, axis=axis)
        return np.asarray(base + unit * step + inside, np.int64)

    def logical(self, component: str) -> int:
        """Bytes with meaning of one unit of a component, all layers."""
        regions = [r for r in self.layout.regions if r.component == component]
        return len(self.layout.layers) * sum(element_bytes(f).size for r in regions for f in r.data_fields)


def _first(layout: Layout, units: Mapping[str, int], name: str) -> int:
    """First unit of a range: past every range that comes before it in some region."""
    before = [r.ranges[: r.ranges.index(name)] for r in layout.regions if name in r.ranges]
    return max((_first(layout, units, part[-1]) + units[part[-1]] for part in before if part), default=0)


def pattern(nbytes: int, seed: int) -> Bytes:
    """Random bytes, none of them :data:`POISON`."""
    return np.random.default_rng(seed).integers(0, POISON, nbytes, np.uint8)
