"""Regions and index spaces: the parts a layout is made of (no torch).

A *region* is one array of units a layer; its *fields* (:mod:`kvcore.layout.fields`) cover a unit without holes. Its unit ids come in
one or several *ranges*, each in an index space that says how tokens map to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import msgspec

from kvcore.errors import LayoutError, nearest
from kvcore.layout.fields import Field, Records, integers, items, padding, power_of_two, words
from kvcore.layout.fields import index as _index

UnitKind = Literal["page", "row", "state_slot"]

CONSTANT = "constant"
"""Kind of the index space whose unit belongs to the model: the only one that layouts know by name."""


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

    @property
    def constant(self) -> bool:
        """Whether its units belong to the model and not to requests: one unit a layer, behind the null unit."""
        return self.kind == CONSTANT


class UnitRange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named range of a region's units that has its own index space and its own null unit (its first)."""

    name: str
    space: str


class Region(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """One array of units per layer.

    Attributes:
        name: unique inside the layout.
        component: the component it moves with, e.g. ``full/kv``.
        fields: the bytes of one unit; they cover it, and every record in it, without holes or overlaps.
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
        end = _tiled(self.name, [_Part(f.name, f.offset, f.nbytes, f.records) for f in self.fields], 0)
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
    end = max((field.offset + field.span for field in fields), default=0)
    rest = -end % alignment
    if rest:
        fields += (padding("_alignment", rest, end, alignment_only=True),)
    return Region(name, component, fields, end + rest, ranges)


class _Part(NamedTuple):
    """A field's bytes in one record: where they start, how many they are, and the records they are in turn in."""

    field: str
    start: int
    nbytes: int
    records: tuple[Records, ...]


def _tiled(region: str, parts: Sequence[_Part], end: int) -> int:
    """Where ``parts`` end, if they follow one another from ``end`` on without holes or overlaps.

    Fields of records share their outermost ones, and fill one such record in the same way. Sizes do not matter: a peer's
    layout is checked as fast as one's own.
    """
    parts = sorted(parts, key=lambda part: part.start)
    at = 0
    while at < len(parts):
        field, start, nbytes, records = parts[at]
        if start != end:
            what = "fields overlap" if start < end else "bytes belong to no field"
            raise LayoutError(what, region=region, field=field, expected=end, got=start)
        if not records:
            end, at = end + nbytes, at + 1
            continue
        count, size = records[0]
        inside = []
        while at < len(parts) and parts[at].start < end + size:
            part = parts[at]
            if part.records[:1] != records[:1]:
                raise LayoutError(
                    "fields of one record are not in the same records",
                    region=region,
                    field=part.field,
                    expected=[count, size],
                    got=list(part.records[0]) if part.records else None,
                )
            inside.append(part._replace(nbytes=part.nbytes // count, records=part.records[1:]))
            at += 1
        got = _tiled(region, inside, end)
        if got != end + size:
            raise LayoutError("fields do not cover their record", region=region, expected=size, got=got - end)
        end += count * size
    return end
