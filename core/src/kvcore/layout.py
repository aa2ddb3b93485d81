"""The layout language: every byte of a cache described once (no torch).

A :class:`Layout` is data: frozen, hashable, serialisable. It says which *regions* a layer group owns, which *fields*
(:mod:`kvcore.fields`) lie inside one unit of a region, which index spaces its units belong to, and in which order an
arena holds them. Sizes, addresses, slices, conversions and the fingerprint are derived from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Literal

import msgspec
import numpy.typing as npt

from kvcore.errors import LayoutError, nearest
from kvcore.fields import Axis, BlockOf, Field, Int64Array, Term, int64, integers, items, padding, power_of_two, words
from kvcore.fields import index as _index

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
    "UnitRange",
    "padding",
    "region",
]

ArenaOrder = Literal["layer_major", "page_major"]
UnitKind = Literal["page", "row", "state_slot"]

MAX_ARENA_BYTES = 2**63 - 1
"""Offsets are int64."""


class SpaceSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How tokens of a request map to units of one index space.

    Attributes:
        name: unique inside the layer group.
        kind: name of a registered :class:`kvcore.contract.IndexSpace` (``sequence``, …).
        unit: what one index addresses: ``page``, ``row`` or ``state_slot``.
        tokens_per_unit: tokens one unit stands for (the page size of a page); 0 where units do not grow with length.
        options: further integers of the kind, such as ``(("window", 512),)``.
    """

    name: str
    kind: str
    unit: UnitKind
    tokens_per_unit: int
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        integers(self, "tokens_per_unit")
        words(self, unit=UnitKind)
        try:
            options = tuple(sorted((str(name), _index(value, name)) for name, value in self.options))
        except (TypeError, ValueError) as error:
            if isinstance(error, LayoutError):
                raise
            raise LayoutError("options are not a list of (name, value)", space=self.name) from error
        if len({name for name, _ in options}) != len(options):
            raise LayoutError("option set twice", space=self.name, options=options)
        msgspec.structs.force_setattr(self, "options", options)
        if self.tokens_per_unit < 0 or (self.unit == "page" and self.tokens_per_unit < 1):
            raise LayoutError("page size must be at least 1", space=self.name, page_size=self.tokens_per_unit)

    def option(self, name: str, default: int = 0) -> int:
        """Value of an option, ``default`` where it is not set."""
        return dict(self.options).get(name, default)


class UnitRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named range of a region's units that has its own index space and its own null unit (its first)."""

    name: str
    space: str


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """One array of units per layer.

    Attributes:
        name: unique inside the layout.
        component: the component it moves with, e.g. ``full/kv``.
        fields: the bytes of one unit; they cover it without holes or overlaps.
        unit_bytes: bytes of one unit.
        ranges: names of the unit ranges the array is made of, in order.
    """

    name: str
    component: str
    fields: tuple[Field, ...]
    unit_bytes: int
    ranges: tuple[str, ...]

    def __post_init__(self) -> None:
        integers(self, "unit_bytes")
        items(self, "fields", Field)
        items(self, "ranges", str)
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise LayoutError("field declared twice", region=self.name, fields=names)
        if not self.ranges or len(set(self.ranges)) != len(self.ranges):
            raise LayoutError("a region needs distinct unit ranges", region=self.name, ranges=self.ranges)
        if not self.data_fields:
            raise LayoutError("a region needs a field that carries data", region=self.name, fields=names)
        end = 0
        for field in sorted(self.fields, key=lambda f: f.offset):
            if field.offset != end:
                what = "fields overlap" if field.offset < end else "bytes belong to no field"
                raise LayoutError(what, region=self.name, field=field.name, expected=end, got=field.offset)
            end = field.offset + field.nbytes
        if end != self.unit_bytes:
            raise LayoutError("fields do not cover the unit", region=self.name, expected=self.unit_bytes, got=end)

    @property
    def data_fields(self) -> tuple[Field, ...]:
        """The fields that carry data."""
        return tuple(field for field in self.fields if field.kind == "data")

    @property
    def logical_bytes(self) -> int:
        """Bytes of a unit that carry data."""
        return sum(field.logical_bytes for field in self.fields)

    @property
    def alignment_bytes(self) -> int:
        """Bytes of a unit that are only there for alignment."""
        return sum(field.nbytes for field in self.fields if field.kind == "alignment")

    def field(self, name: str) -> Field:
        """Return the field called ``name``."""
        for field in self.fields:
            if field.name == name:
                return field
        raise LayoutError(
            "no such field", region=self.name, field=name, remedy=nearest(name, (f.name for f in self.fields))
        )


def region(
    name: str, component: str, fields: Iterable[Field], *, ranges: tuple[str, ...], alignment: int = 16
) -> Region:
    """Build a region whose unit is padded, by a declared field, to a multiple of ``alignment`` bytes."""
    power_of_two(alignment, region=name)
    fields = tuple(fields)
    end = max((field.offset + field.nbytes for field in fields), default=0)
    rest = -end % alignment
    if rest:
        fields += (padding("_alignment", rest, end, alignment_only=True),)
    return Region(name, component, fields, end + rest, ranges)


class Buffer(msgspec.Struct, frozen=True):
    """One layer's array of one region: never assumed dense.

    ``base`` is in bytes from the start of the arena; unit ``u`` starts at ``base + u * unit_stride``.
    """

    component: str
    layer: int
    region: str
    base: int
    unit_stride: int
    unit_bytes: int
    num_units: int

    def offsets(self, units: npt.ArrayLike) -> Int64Array:
        """Byte offsets of units from the start of the arena; int64 whatever integers ``units`` are.

        Raises:
            LayoutError: a unit the buffer does not have (−1 included).
        """
        ids = int64(units, "units")
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_units:
            bad = int(ids[(ids < 0) | (ids >= self.num_units)].flat[0])
            raise LayoutError("unit outside its buffer", region=self.region, unit=bad, num_units=self.num_units)
        return self.base + ids * self.unit_stride


class Placement(msgspec.Struct, frozen=True):
    """Where everything lies in one arena.

    Attributes:
        buffers: one entry a layer and region, layers outermost.
        ranges: per region, ``(range name, first unit, number of units)`` in order.
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
        """Bytes of one unit over all layers and regions (the unit stride of a page-major arena)."""
        return sum(item.unit_bytes for item in self.regions) * len(self.layers)

    def bytes_per_token(self) -> dict[str, Fraction]:
        """Bytes one more token costs, by component, over all layers, alignment padding left out.

        Ranges whose units stand for tokens count, windows among them; :mod:`kvcore.sizing` knows which of them grow.
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
        ranges = {item.name: _spans(item, counts) for item in self.regions}
        buffers, base = [], 0
        stride = self.envelope_bytes
        for layer in self.layers:
            for item in self.regions:
                count = sum(n for _, _, n in ranges[item.name])
                step = stride if self.arena == "page_major" else item.unit_bytes
                buffers.append(Buffer(item.component, layer, item.name, base, step, item.unit_bytes, count))
                base += item.unit_bytes if self.arena == "page_major" else item.unit_bytes * count
        if self.arena == "page_major":
            base = stride * sum(n for _, _, n in ranges[self.regions[0].name])
        if base > MAX_ARENA_BYTES:
            raise LayoutError("arena too large for 64-bit offsets", group=self.group, arena_bytes=base)
        return Placement(tuple(buffers), ranges, base)

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


def _spans(item: Region, counts: Mapping[str, int]) -> tuple[tuple[str, int, int], ...]:
    first, spans = 0, []
    for name in item.ranges:
        spans.append((name, first, counts[name]))
        first += counts[name]
    return tuple(spans)


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
    first = layout.regions[0].ranges
    for item in layout.regions:
        peers = [other.ranges for other in layout.regions_of(item.component)]
        if any(ranges != item.ranges for ranges in peers):
            raise LayoutError("regions of one component must share unit ranges", component=item.component, got=peers)
        if layout.arena == "page_major" and item.ranges != first:
            raise LayoutError(
                "page-major arenas need the same unit ranges in every region",
                region=item.name,
                expected=first,
                got=item.ranges,
                remedy='use arena="layer_major"',
            )


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
