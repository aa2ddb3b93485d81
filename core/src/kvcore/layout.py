"""The layout language: every byte of a cache described once (no torch).

A :class:`Layout` is data: frozen, hashable, serialisable. It says which *regions* a layer group owns, which *fields*
lie inside one unit of a region, and how each field's named axes are ordered, e.g. ``"head slot%32 slot//32 block"``.
A field is a mixed radix per axis, so the byte offset of an element is a sum of one contribution per axis, and
addressing, slices, sizes and conversions all follow from it.

Axis orders are einops-like, outermost first. A term is ``axis``, ``axis//D``, ``axis%M`` or ``axis//D%M``; the terms of
one axis must tile it exactly.
"""

from __future__ import annotations

import hashlib
import math
import operator
import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.dtypes import dtype as dtype_of
from kvcore.errors import LayoutError, nearest

Int64Array = npt.NDArray[np.int64]
ArenaOrder = Literal["layer_major", "page_major"]

_TERM = re.compile(r"([a-z_][a-z0-9_]*)(?://([1-9][0-9]*))?(?:%([1-9][0-9]*))?")


class Term(NamedTuple):
    """One physical axis: coordinate ``c`` of ``axis`` has position ``c // divisor % size``."""

    axis: str
    divisor: int
    size: int


class BlockOf(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Says that an axis counts blocks of another axis (the elements that share one scale).

    Attributes:
        axis: the axis that is cut into blocks, usually ``dim``.
        extent: its number of elements.
        block_size: elements a block (``scale_block_size``).
        tail: ``exact`` demands that blocks divide the extent; ``padded`` declares a shorter last block.
    """

    axis: str
    extent: int
    block_size: int
    tail: Literal["exact", "padded"] = "exact"


class Axis(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named axis of a field, as this rank holds it.

    Attributes:
        name: ``slot``, ``head``, ``dim``, ``block``, ``channel``, …
        size: number of elements that carry data.
        padded: number of elements stored; 0 means ``size``. The rest is padding inside the field.
        ids: global id ranges ``(start, stop)`` in local order; empty means unsharded (replicated on every rank).
        blocks: what the axis counts, for scales.
    """

    name: str
    size: int
    padded: int = 0
    ids: tuple[tuple[int, int], ...] = ()
    blocks: BlockOf | None = None

    def __post_init__(self) -> None:
        _integers(self, "size", "padded")
        ids = tuple((_index(lo, "ids"), _index(hi, "ids")) for lo, hi in self.ids)
        msgspec.structs.force_setattr(self, "ids", ids)
        if self.size < 1 or (self.padded and self.padded < self.size):
            raise LayoutError("axis must hold at least one element", axis=self.name, size=self.size, padded=self.padded)
        if any(lo < 0 or hi <= lo for lo, hi in ids):
            raise LayoutError("axis has an empty or negative id range", axis=self.name, ids=ids)
        if ids and sum(hi - lo for lo, hi in ids) != self.size:
            raise LayoutError("id ranges do not match the axis", axis=self.name, expected=self.size, got=ids)
        if any(a < d and c < b for n, (a, b) in enumerate(ids) for c, d in ids[n + 1 :]):
            raise LayoutError("an id is held twice", axis=self.name, ids=ids)
        if self.blocks is not None:
            self._check_blocks(self.blocks)

    def _check_blocks(self, blocks: BlockOf) -> None:
        want = -(-blocks.extent // blocks.block_size) if blocks.block_size > 0 else 0
        if blocks.extent % max(1, blocks.block_size) and blocks.tail == "exact":
            raise LayoutError(
                "scale block does not divide the axis and no padded tail is declared",
                axis=blocks.axis,
                extent=blocks.extent,
                scale_block_size=blocks.block_size,
                remedy='declare BlockOf(tail="padded") or choose a block size that divides the extent',
            )
        if self.size != want:
            raise LayoutError("wrong number of blocks", axis=self.name, expected=want, got=self.size)

    @property
    def extent(self) -> int:
        """Elements stored, padding included."""
        return self.padded or self.size


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True, cache_hash=True):
    """Named, typed bytes inside a unit.

    Attributes:
        name: unique inside its region.
        dtype: storage dtype name, see :mod:`kvcore.dtypes`.
        order: physical axis order, outermost first.
        axes: the logical axes; every one appears in ``order``.
        offset: bytes from the start of the unit.
        kind: ``data``; ``padding`` (bytes the format itself leaves unused); ``alignment`` (bytes only there to make
            the unit a multiple of the layout's alignment).
        alignment: demanded alignment of ``offset`` in bytes, a power of two; 0 means the item size.
    """

    name: str
    dtype: str
    order: str
    axes: tuple[Axis, ...]
    offset: int = 0
    kind: Literal["data", "padding", "alignment"] = "data"
    alignment: int = 0

    def __post_init__(self) -> None:
        _integers(self, "offset", "alignment")
        msgspec.structs.force_setattr(self, "axes", tuple(self.axes))
        item = dtype_of(self.dtype).itemsize
        align = self.alignment or item
        if align & (align - 1) or align < 1:
            raise LayoutError("alignment is not a power of two", field=self.name, alignment=align)
        if self.offset < 0 or self.offset % align or self.offset % item:
            raise LayoutError("field is misaligned", field=self.name, offset=self.offset, expected=f"multiple of {align}")
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError("axis declared twice", field=self.name, axes=names)
        _terms(self)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtype_of(self.dtype).itemsize

    @property
    def terms(self) -> tuple[Term, ...]:
        """Physical axes, outermost first."""
        return _terms(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """Physical shape, padding included."""
        return tuple(term.size for term in self.terms)

    @property
    def strides(self) -> tuple[int, ...]:
        """Byte strides of :attr:`shape` (C order)."""
        strides, step = [], self.itemsize
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    @property
    def nbytes(self) -> int:
        """Bytes the field takes in a unit."""
        return math.prod(self.shape) * self.itemsize

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Sizes of :attr:`axes` in declaration order, without padding."""
        return tuple(axis.size for axis in self.axes)

    @property
    def logical_bytes(self) -> int:
        """Bytes that carry data: no padding field, no padded tail."""
        return math.prod(self.logical_shape) * self.itemsize if self.kind == "data" else 0

    def axis(self, name: str) -> Axis:
        """Return the axis called ``name``."""
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError("no such axis", field=self.name, axis=name, remedy=nearest(name, (a.name for a in self.axes)))

    def has_axis(self, name: str) -> bool:
        """Whether the field has an axis called ``name``."""
        return any(axis.name == name for axis in self.axes)

    def contribution(self, axis: str, coords: npt.ArrayLike) -> Int64Array:
        """Bytes that coordinates of one axis add to the offset of an element (int64, shape of ``coords``)."""
        c = np.asarray(coords, np.int64)
        total = np.zeros(c.shape, np.int64)
        for term, stride in zip(self.terms, self.strides, strict=True):
            if term.axis == axis:
                total += c // term.divisor % term.size * stride
        return total

    def offsets(self, **coords: npt.ArrayLike) -> Int64Array:
        """Byte offsets inside a unit of elements at broadcastable ``coords``, one per axis."""
        missing = {axis.name for axis in self.axes} ^ set(coords)
        if missing:
            raise LayoutError("coordinates do not match the axes", field=self.name, axes=sorted(missing))
        total: Any = np.int64(self.offset)
        for name, c in coords.items():
            total = total + self.contribution(name, c)
        return np.asarray(total, np.int64)

    def index(self, unit: Any = slice(None), **coords: Any) -> tuple[Any, ...]:
        """Index expression into a view ``[unit, *shape]``: positions for given axes, full slices for the others.

        Works on ints, numpy arrays and torch tensors alike (only ``//`` and ``%`` are used).
        """
        return (
            unit,
            *(coords[t.axis] // t.divisor % t.size if t.axis in coords else slice(None) for t in self.terms),
        )

    def global_ids(self, axis: str) -> Int64Array:
        """Global ids of an axis in local order (``arange`` where unsharded)."""
        a = self.axis(axis)
        if not a.ids:
            return np.arange(a.size, dtype=np.int64)
        return np.concatenate([np.arange(lo, hi, dtype=np.int64) for lo, hi in a.ids])

    def runs(self, axis: str, coords: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Contiguous byte runs ``(starts, lengths)`` holding local ``coords`` of one axis and all of the others.

        This is a tensor-parallel slice when ``axis`` is ``head``. Starts are offsets inside a unit, ascending.
        """
        parts = [
            self.contribution(a.name, coords if a.name == axis else np.arange(a.size)).reshape(-1) for a in self.axes
        ]
        self.axis(axis)
        offsets = np.sort(np.asarray(sum(np.ix_(*parts))).reshape(-1)) + self.offset
        cut = np.flatnonzero(np.diff(offsets) != self.itemsize) + 1
        starts = offsets[np.concatenate([[0], cut]).astype(np.int64)]
        lengths = np.diff(np.concatenate([[0], cut, [offsets.size]])).astype(np.int64) * self.itemsize
        return starts, lengths


def padding(name: str, nbytes: int, offset: int, *, alignment_only: bool = False) -> Field:
    """Return a padding field of ``nbytes`` bytes at ``offset``."""
    kind: Literal["padding", "alignment"] = "alignment" if alignment_only else "padding"
    return Field(name=name, dtype="u8", order="byte", axes=(Axis("byte", nbytes),), offset=offset, kind=kind)


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
    unit: Literal["page", "row", "state_slot"]
    tokens_per_unit: int
    options: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        _integers(self, "tokens_per_unit")
        msgspec.structs.force_setattr(self, "options", tuple((str(k), _index(v, k)) for k, v in self.options))
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
        _integers(self, "unit_bytes")
        msgspec.structs.force_setattr(self, "fields", tuple(self.fields))
        msgspec.structs.force_setattr(self, "ranges", tuple(self.ranges))
        names = [field.name for field in self.fields]
        if len(set(names)) != len(names):
            raise LayoutError("field declared twice", region=self.name, fields=names)
        if not self.ranges or len(set(self.ranges)) != len(self.ranges):
            raise LayoutError("a region needs distinct unit ranges", region=self.name, ranges=self.ranges)
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


def region(name: str, component: str, fields: Iterable[Field], *, ranges: tuple[str, ...], alignment: int = 16) -> Region:
    """Build a region whose unit is padded, by a declared field, to a multiple of ``alignment`` bytes."""
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
        _integers(self, "revision", "alignment")
        for name in ("layers", "regions", "spaces", "ranges"):
            msgspec.structs.force_setattr(self, name, tuple(getattr(self, name)))
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

        Only ranges whose space grows with length count.
        """
        return self._per_token(lambda item: item.unit_bytes - item.alignment_bytes)

    def alignment_bytes_per_token(self) -> Fraction:
        """Alignment padding that one more token costs."""
        return sum(self._per_token(lambda item: item.alignment_bytes).values(), Fraction(0))

    def _per_token(self, size: Any) -> dict[str, Fraction]:
        out = dict.fromkeys(self.components, Fraction(0))
        for item in self.regions:
            for name in item.ranges:
                tokens = self.space_of_range(name).tokens_per_unit
                if tokens:
                    out[item.component] += Fraction(size(item) * len(self.layers), tokens)
        return out

    def place(self, units: Mapping[str, int]) -> Placement:
        """Place ``units[range]`` units (the null unit included) of every range in one arena."""
        ranges: dict[str, tuple[tuple[str, int, int], ...]] = {}
        for item in self.regions:
            first, spans = 0, []
            for name in item.ranges:
                if name not in units:
                    raise LayoutError("no unit count for a range", region=item.name, range=name)
                count = _index(units[name], name)
                if count < 1:
                    raise LayoutError("a unit range needs at least its null unit", range=name, got=count)
                spans.append((name, first, count))
                first += count
            ranges[item.name] = tuple(spans)
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
        except msgspec.DecodeError as error:
            raise LayoutError(f"not a layout: {error}") from error

    def fingerprint(self) -> str:
        """SHA-256 (hex) of the canonical JSON: equal in every process and Python version."""
        return hashlib.sha256(self.to_json()).hexdigest()


@lru_cache(maxsize=4096)
def _terms(field: Field) -> tuple[Term, ...]:
    extents = {axis.name: axis.extent for axis in field.axes}
    terms = []
    for text in field.order.split():
        match = _TERM.fullmatch(text)
        if not match or match[1] not in extents:
            raise LayoutError("bad term in axis order", field=field.name, term=text, axes=sorted(extents))
        extent, divisor = extents[match[1]], int(match[2] or 1)
        if extent % divisor:
            raise LayoutError("split does not divide the axis", field=field.name, term=text, extent=extent)
        terms.append(Term(match[1], divisor, int(match[3]) if match[3] else extent // divisor))
    for name, extent in extents.items():
        reached = 1
        for divisor, size in sorted((t.divisor, t.size) for t in terms if t.axis == name):
            if divisor != reached:
                raise LayoutError(
                    "splits of an axis leave a gap or overlap", field=field.name, axis=name, expected=reached, got=divisor
                )
            reached *= size
        if reached != extent:
            raise LayoutError(
                "splits of an axis do not cover it", field=field.name, axis=name, expected=extent, got=reached
            )
    return tuple(terms)


def _check_layout(layout: Layout) -> None:
    if not layout.layers or len(set(layout.layers)) != len(layout.layers):
        raise LayoutError("a layout needs distinct layer ids", group=layout.group, layers=layout.layers)
    if layout.alignment < 1 or layout.alignment & (layout.alignment - 1):
        raise LayoutError("alignment is not a power of two", group=layout.group, alignment=layout.alignment)
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
            if space.unit == "page" and (not field.has_axis("slot") or field.axis("slot").size != space.tokens_per_unit):
                got = field.axis("slot").size if field.has_axis("slot") else None
                raise LayoutError(
                    "field of a page must have one slot a token",
                    region=item.name,
                    field=field.name,
                    expected=space.tokens_per_unit,
                    got=got,
                )
    for field in item.data_fields:
        for axis in field.axes:
            blocks = axis.blocks
            if blocks is None:
                continue
            extents = {
                a.size for r in layout.regions for f in r.data_fields for a in f.axes if a.name == blocks.axis and f != field
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


def _index(value: Any, name: str) -> int:
    if isinstance(value, bool):
        raise LayoutError("not an integer", field=name, got=value)
    try:
        return operator.index(value)
    except TypeError:
        raise LayoutError("not an integer", field=name, got=value) from None


def _integers(struct: Any, *names: str) -> None:
    """Normalise integer attributes, so that equal layouts have equal bytes (64 and 64.0 compare equal)."""
    for name in names:
        msgspec.structs.force_setattr(struct, name, _index(getattr(struct, name), name))
