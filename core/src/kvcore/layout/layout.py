"""The layout language: every byte of a cache described once (no torch).

A :class:`Layout` is data: frozen, hashable, serialisable. It says which *regions* a layer group owns, which *fields*
(:mod:`kvcore.layout.fields`) lie inside one unit of a region, which index spaces its units belong to, and in which order an
arena holds them. Sizes, addresses, slices, conversions and the fingerprint are derived from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Literal

import msgspec
import numpy.typing as npt

from kvcore.errors import LayoutError, nearest
from kvcore.layout.fields import (
    Axis,
    BlockOf,
    Field,
    Int64Array,
    Term,
    int64,
    integers,
    items,
    padding,
    power_of_two,
    words,
)
from kvcore.layout.fields import index as _index
from kvcore.layout.regions import Region, SpaceSpec, UnitKind, UnitRange, region

__all__ = [
    "ArenaOrder",
    "Axis",
    "BlockOf",
    "Buffer",
    "Field",
    "Int64Array",
    "Layout",
    "Placement",
    "Region",
    "SpaceSpec",
    "Term",
    "UnitKind",
    "UnitRange",
    "padding",
    "region",
]

ArenaOrder = Literal["layer_major", "page_major"]
MAX_ARENA_BYTES = 2**63 - 1
"""Offsets are int64."""


class Buffer(msgspec.Struct, frozen=True):
    """One layer's array of one region: never assumed dense.

    Attributes:
        component, layer, region: whose bytes they are.
        base: bytes from the start of the arena; unit ``u`` starts at ``base + u * unit_stride``.
        unit_stride, unit_bytes: from unit to unit, and of one.
        num_units: exclusive end of its unit ids.
        first_unit: its first unit. Lower ids are of unit ranges that the region does not have: where they would lie are
            other bytes of the arena.
    """

    component: str
    layer: int
    region: str
    base: int
    unit_stride: int
    unit_bytes: int
    num_units: int
    first_unit: int = 0

    def offsets(self, units: npt.ArrayLike) -> Int64Array:
        """Byte offsets of units from the start of the arena; int64 whatever integers ``units`` are.

        Raises:
            LayoutError: a unit the buffer does not have (−1 included).
        """
        ids = int64(units, "units")
        if ids.size and not self.first_unit <= int(ids.min()) <= int(ids.max()) < self.num_units:
            bad = int(ids[(ids < self.first_unit) | (ids >= self.num_units)].flat[0])
            raise LayoutError(
                "unit outside its buffer",
                region=self.region,
                unit=bad,
                first_unit=self.first_unit,
                num_units=self.num_units,
            )
        return self.base + ids * self.unit_stride


class Placement(msgspec.Struct, frozen=True):
    """Where everything lies in one arena.

    Attributes:
        buffers: one entry a layer and region, layers outermost.
        ranges: per region, ``(range name, first unit, number of units)`` in order. A range starts at the same unit in
            every region that has it.
        arena_bytes: size of the arena.
    """

    buffers: tuple[Buffer, ...]
    ranges: dict[str, tuple[tuple[str, int, int], ...]]
    arena_bytes: int

    def buffer(self, layer: int, region: str) -> Buffer:
        """Return the buffer of a storage layer id and a region."""
        for buffer in self.buffers:
            if buffer.layer == layer and buffer.region == region:
                return buffer
        raise LayoutError("no such buffer", layer=layer, region=region)


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """All bytes of one layer group on one rank.

    Attributes:
        format: id of the format that gives the bytes their meaning, and its ``revision``.
        group: name of the layer group.
        layers: storage layer ids, in storage order.
        regions: what every layer holds.
        spaces: the index spaces of the group.
        ranges: the unit ranges, each bound to a space.
        arena: ``layer_major`` (one array a layer and region) or ``page_major`` (all of a unit side by side).
        alignment: every unit is a multiple of it, so that envelopes have no hidden gaps.
    """

    format: str
    revision: int
    group: str
    layers: tuple[int, ...]
    regions: tuple[Region, ...]
    spaces: tuple[SpaceSpec, ...]
    ranges: tuple[UnitRange, ...]
    arena: ArenaOrder = "page_major"
    alignment: int = 16

    def __post_init__(self) -> None:
        integers(self, "revision", "alignment")
        words(self, arena=ArenaOrder)
        for name, of in (("layers", object), ("regions", Region), ("spaces", SpaceSpec), ("ranges", UnitRange)):
            items(self, name, of)
        msgspec.structs.force_setattr(self, "layers", tuple(_index(layer, "layers") for layer in self.layers))
        _check_layout(self)

    # --- names ---

    @property
    def components(self) -> tuple[str, ...]:
        """Component names in region order."""
        return tuple(dict.fromkeys(region.component for region in self.regions))

    def region(self, name: str) -> Region:
        """Return the region called ``name``."""
        for item in self.regions:
            if item.name == name:
                return item
        raise LayoutError("no such region", region=name, remedy=nearest(name, (r.name for r in self.regions)))

    def regions_of(self, component: str) -> tuple[Region, ...]:
        """Regions that move with ``component``."""
        return tuple(item for item in self.regions if item.component == component)

    @property
    def constant_regions(self) -> tuple[Region, ...]:
        """Regions that belong to the model: filled before the first request, and never moved."""
        return tuple(item for item in self.regions if self.space_of_range(item.ranges[0]).constant)

    @property
    def token_range(self) -> str:
        """The range whose batch the ops of a group are given: the first that is not constant."""
        return next((item.name for item in self.ranges if not self.space(item.space).constant), self.ranges[0].name)

    @property
    def moving_regions(self) -> tuple[Region, ...]:
        """Regions whose units belong to requests."""
        return tuple(item for item in self.regions if not self.space_of_range(item.ranges[0]).constant)

    def space(self, name: str) -> SpaceSpec:
        """Return the index space called ``name``."""
        for item in self.spaces:
            if item.name == name:
                return item
        raise LayoutError("no such index space", space=name, remedy=nearest(name, (s.name for s in self.spaces)))

    def space_of_range(self, name: str) -> SpaceSpec:
        """Return the index space of a unit range."""
        for item in self.ranges:
            if item.name == name:
                return self.space(item.space)
        raise LayoutError("no such unit range", range=name, remedy=nearest(name, (r.name for r in self.ranges)))

    # --- sizes ---

    @property
    def envelope_bytes(self) -> int:
        """Bytes of one unit over all layers and regions, those of the model left out: the unit stride of a page-major
        arena where these regions have the same unit ranges."""
        return sum(item.unit_bytes for item in self.moving_regions) * len(self.layers)

    def bytes_per_token(self) -> dict[str, Fraction]:
        """Bytes one more token costs, by component, over all layers, alignment padding left out.

        Ranges whose units stand for tokens count, windows among them; :mod:`kvcore.engine.sizing` knows which of them grow.
        """
        return self._per_token(lambda item: item.unit_bytes - item.alignment_bytes)

    def alignment_bytes_per_token(self) -> Fraction:
        """Alignment padding that one more token costs."""
        return sum(self._per_token(lambda item: item.alignment_bytes).values(), Fraction(0))

    def _per_token(self, size: Callable[[Region], int]) -> dict[str, Fraction]:
        out = dict.fromkeys(self.components, Fraction(0))
        for item in self.regions:
            for name in item.ranges:
                tokens = self.space_of_range(name).tokens_per_unit
                if tokens:
                    out[item.component] += Fraction(size(item) * len(self.layers), tokens)
        return out

    def place(self, units: Mapping[str, int]) -> Placement:
        """Place ``units[range]`` units (the null unit included) of every range in one arena.

        Raises:
            LayoutError: a range without a count, a count without a range, a count below 1, an arena that int64
                offsets cannot address.
        """
        counts = _unit_counts(self, units)
        firsts = _first_units(self, counts)
        ranges = {item.name: tuple((name, firsts[name], counts[name]) for name in item.ranges) for item in self.regions}
        bases: dict[tuple[int, str], tuple[int, int]] = {}
        end = 0
        for members in self._arrays():
            stride = sum(item.unit_bytes for _, item in members)
            spans = ranges[members[0][1].name]
            first, stop = spans[0][1], spans[-1][1] + spans[-1][2]
            # Ids below `first` cost nothing, but views start at unit 0: it has to lie inside the arena.
            start = max(end, first * stride)
            base, end = start - first * stride, start + (stop - first) * stride
            for layer, item in members:
                bases[layer, item.name] = base, stride
                base += item.unit_bytes
        if end > MAX_ARENA_BYTES:
            raise LayoutError("arena too large for 64-bit offsets", group=self.group, arena_bytes=end)
        buffers = []
        for layer in self.layers:
            for item in self.regions:
                base, stride = bases[layer, item.name]
                (_, first, _), (_, last, count) = ranges[item.name][0], ranges[item.name][-1]
                buffers.append(
                    Buffer(item.component, layer, item.name, base, stride, item.unit_bytes, last + count, first)
                )
        return Placement(tuple(buffers), ranges, end)

    def _arrays(self) -> list[list[tuple[int, Region]]]:
        """What lies side by side in each array of units of the arena, arrays in order.

        Page-major: every layer of all regions with the same unit ranges. Layer-major: one layer of one region.
        """
        if self.arena == "layer_major":
            return [[(layer, item)] for layer in self.layers for item in self.regions]
        alike: dict[tuple[str, ...], list[Region]] = {}
        for item in self.regions:
            alike.setdefault(item.ranges, []).append(item)
        return [[(layer, item) for layer in self.layers for item in members] for members in alike.values()]

    # --- identity ---

    def to_json(self) -> bytes:
        """Serialise; :meth:`from_json` gives an equal layout."""
        return msgspec.json.encode(self, order="deterministic")

    @classmethod
    def from_json(cls, data: bytes | str) -> Layout:
        """Decode and validate; raise :class:`LayoutError` whatever is wrong."""
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.ValidationError as error:
            if isinstance(error.__cause__, LayoutError):
                raise error.__cause__ from None
            raise LayoutError(f"not a layout: {error}") from error
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise LayoutError(f"not a layout: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical JSON: equal in every process and Python version."""
        return hashlib.sha256(self.to_json()).hexdigest()


def _unit_counts(layout: Layout, units: Mapping[str, int]) -> dict[str, int]:
    known = [item.name for item in layout.ranges]
    for name in units:
        if name not in known:
            raise LayoutError("a unit count for no range", range=name, remedy=nearest(name, known))
    counts = {name: _index(count, name) for name, count in units.items()}
    for item in layout.regions:
        for name in item.ranges:
            if name not in counts:
                raise LayoutError("no unit count for a range", region=item.name, range=name)
            if counts[name] < 1:
                raise LayoutError("a unit range needs at least its null unit", range=name, got=counts[name])
    return counts


def _first_units(layout: Layout, counts: Mapping[str, int]) -> dict[str, int]:
    """First unit id of every range: past all ranges that precede it in any region, so the same in all of them."""
    firsts = dict.fromkeys(counts, 0)
    for _ in range(len(counts) + 1):
        moved = False
        for item in layout.regions:
            end = 0
            for name in item.ranges:
                moved |= firsts[name] < end
                firsts[name] = max(firsts[name], end)
                end = firsts[name] + counts[name]
        if not moved:
            return firsts
    raise LayoutError(
        "regions have their unit ranges in different orders",
        group=layout.group,
        got={item.name: item.ranges for item in layout.regions},
        remedy="name the ranges in one order in every region",
    )


def _check_layout(layout: Layout) -> None:
    if not layout.layers or len(set(layout.layers)) != len(layout.layers) or min(layout.layers) < 0:
        raise LayoutError("a layout needs distinct layer ids from 0 up", group=layout.group, layers=layout.layers)
    power_of_two(layout.alignment, group=layout.group)
    for what, names in (
        ("region", [r.name for r in layout.regions]),
        ("index space", [s.name for s in layout.spaces]),
        ("unit range", [r.name for r in layout.ranges]),
    ):
        if not names or len(set(names)) != len(names):
            raise LayoutError(f"a layout needs {what}s with distinct names", group=layout.group, names=names)
    for unit_range in layout.ranges:
        layout.space(unit_range.space)
    for item in layout.regions:
        if item.unit_bytes % layout.alignment:
            raise LayoutError(
                "unit is not a multiple of the alignment",
                region=item.name,
                expected=f"multiple of {layout.alignment}",
                got=item.unit_bytes,
                remedy="declare padding, or build the region with kvcore.layout.region()",
            )
        _check_region(layout, item)
        constant = [name for name in item.ranges if layout.space_of_range(name).constant]
        if constant and len(item.ranges) > 1:
            raise LayoutError("constants need a region of their own", region=item.name, got=item.ranges)
    for item in layout.regions:
        peers = [other.ranges for other in layout.regions_of(item.component)]
        if any(ranges != item.ranges for ranges in peers):
            raise LayoutError("regions of one component must share unit ranges", component=item.component, got=peers)
    _first_units(layout, {item.name: 1 for item in layout.ranges})


def _check_region(layout: Layout, item: Region) -> None:
    for name in item.ranges:
        space = layout.space_of_range(name)
        for field in item.data_fields:
            if space.unit == "page" and (
                not field.has_axis("slot") or field.axis("slot").size != space.tokens_per_unit
            ):
                got = field.axis("slot").size if field.has_axis("slot") else None
                raise LayoutError(
                    "field of a page must have one slot a token",
                    region=item.name,
                    field=field.name,
                    expected=space.tokens_per_unit,
                    got=got,
                )
    for field in item.data_fields:
        if max(field.alignment, field.itemsize) > layout.alignment:
            raise LayoutError(
                "units are aligned less than a field in them demands",
                region=item.name,
                field=field.name,
                expected=max(field.alignment, field.itemsize),
                got=layout.alignment,
                remedy="raise the layout's alignment",
            )
        for axis in field.axes:
            blocks = axis.blocks
            if blocks is None:
                continue
            extents = {
                a.size
                for r in layout.regions
                for f in r.data_fields
                for a in f.axes
                if a.name == blocks.axis and f != field
            }
            if extents and blocks.extent not in extents:
                raise LayoutError(
                    "blocks are counted over an axis that no field has",
                    region=item.name,
                    field=field.name,
                    axis=blocks.axis,
                    expected=sorted(extents),
                    got=blocks.extent,
                )
