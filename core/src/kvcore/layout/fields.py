"""Fields: typed bytes inside a unit, with named axes in a declared order (no torch).

A field is a mixed radix per axis, so the byte offset of an element is a sum of one contribution per axis, and
addressing, slices, sizes and conversions all follow from it.

Axis orders are einops-like, outermost first, e.g. ``"head slot%32 slot//32 block"``. A term is ``axis``, ``axis//D``,
``axis%M`` or ``axis//D%M``; the terms of one axis must tile it exactly. ``@N`` says that what stands before it counts
records of ``N`` bytes, of which the field has its own bytes only: ``"slot head block @34 lane"``.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from kvcore.errors import LayoutError, nearest
from kvcore.layout.dtypes import dtype as dtype_of

Int64Array = npt.NDArray[np.int64]
FieldKind = Literal["data", "padding", "alignment"]
Tail = Literal["exact", "padded"]

_RECORD = re.compile(r"@([1-9][0-9]{0,17})")
_MAX_RECORDS = 8
"""Records within records: more than any format has, and few enough for a peer's layout to be checked quickly."""
_TERM = re.compile(r"([a-z_][a-z0-9_]*)(?://([1-9][0-9]{0,17}))?(?:%([1-9][0-9]{0,17}))?")


# --- checked values --------------------------------------------------------------------------------------------------


def index(value: Any, name: str) -> int:
    """Return ``value`` as an int; bools and floats are refused, since 64.0 and 64 would fingerprint differently."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise LayoutError("not an integer", attribute=name, got=value)


def int64(values: npt.ArrayLike, name: str) -> Int64Array:
    """Return integers of any width as int64, before any arithmetic; floats and bools are refused."""
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise LayoutError("not integers", attribute=name, dtype=str(array.dtype))
    return array.astype(np.int64, copy=False)


def integers(struct: Any, *names: str) -> None:
    """Normalise integer attributes of a frozen struct, so that equal layouts have equal bytes."""
    for name in names:
        msgspec.structs.force_setattr(struct, name, index(getattr(struct, name), name))


def items(struct: Any, name: str, of: type) -> None:
    """Normalise an attribute of a frozen struct to a tuple of ``of``; a bare string is refused."""
    value = getattr(struct, name)
    listed = tuple(value) if isinstance(value, Iterable) and not isinstance(value, str | bytes) else None
    if listed is None or not all(isinstance(item, of) for item in listed):
        raise LayoutError(f"not a list of {of.__name__}", attribute=name, got=str(value))
    msgspec.structs.force_setattr(struct, name, listed)


def words(struct: Any, **allowed: Any) -> None:
    """Check attributes against their ``Literal`` types, which msgspec does only when it decodes."""
    for name, literal in allowed.items():
        if getattr(struct, name) not in get_args(literal):
            known = get_args(literal)
            raise LayoutError("unknown word", attribute=name, got=getattr(struct, name), remedy=f"one of {known}")


def power_of_two(value: int, **where: Any) -> None:
    """Refuse an alignment that is not a power of two."""
    if value < 1 or value & (value - 1):
        raise LayoutError("alignment is not a power of two", **where, alignment=value)


# --- fields ----------------------------------------------------------------------------------------------------------


class Term(NamedTuple):
    """One physical axis: coordinate ``c`` of ``axis`` has position ``c // divisor % size``."""

    axis: str
    divisor: int
    size: int

    def position(self, coords: Any, extent: int) -> Any:
        """Position of coordinates of an axis of ``extent`` elements (ints, numpy arrays or torch tensors)."""
        if self.divisor > 1:
            coords = coords // self.divisor
        return coords % self.size if self.divisor * self.size < extent else coords


class Records(NamedTuple):
    """``number`` records of ``nbytes`` bytes, one behind the other."""

    number: int
    nbytes: int


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
    tail: Tail = "exact"

    def __post_init__(self) -> None:
        integers(self, "extent", "block_size")
        words(self, tail=Tail)
        if self.extent < 1 or self.block_size < 1:
            raise LayoutError(
                "blocks and what they are cut from have at least one element",
                axis=self.axis,
                extent=self.extent,
                scale_block_size=self.block_size,
            )


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
        integers(self, "size", "padded")
        msgspec.structs.force_setattr(self, "ids", _id_ranges(self))
        ids = self.ids
        if self.size < 1 or (self.padded != 0 and self.padded < self.size):
            raise LayoutError("axis must hold at least one element", axis=self.name, size=self.size, padded=self.padded)
        if self.padded == self.size:  # says the same as 0: one layout, one fingerprint
            msgspec.structs.force_setattr(self, "padded", 0)
        if any(lo < 0 or hi <= lo for lo, hi in ids):
            raise LayoutError("axis has an empty or negative id range", axis=self.name, ids=ids)
        if ids and sum(hi - lo for lo, hi in ids) != self.size:
            raise LayoutError("id ranges do not match the axis", axis=self.name, expected=self.size, got=ids)
        ascending = sorted(ids)
        if any(then < end for (_, end), (then, _) in itertools.pairwise(ascending)):
            raise LayoutError("an id is held twice", axis=self.name, ids=ids)
        if self.blocks is not None:
            self._check_blocks(self.blocks)

    def _check_blocks(self, blocks: BlockOf) -> None:
        want = -(-blocks.extent // blocks.block_size)
        if blocks.extent % blocks.block_size and blocks.tail == "exact":
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
        dtype: storage dtype name, see :mod:`kvcore.layout.dtypes`.
        order: physical axis order, outermost first; ``@N`` in it where the field is one of several in a record.
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
    kind: FieldKind = "data"
    alignment: int = 0

    def __post_init__(self) -> None:
        integers(self, "offset", "alignment")
        items(self, "axes", Axis)
        words(self, kind=FieldKind)
        if not isinstance(self.order, str):
            raise LayoutError("an axis order is a string", field=self.name, got=str(self.order))
        msgspec.structs.force_setattr(self, "order", " ".join(self.order.split()))
        item = dtype_of(self.dtype).itemsize
        if self.alignment:
            power_of_two(self.alignment, field=self.name)
        align = max(self.alignment, item)
        if self.offset < 0 or self.offset % align:
            raise LayoutError(
                "field is misaligned", field=self.name, offset=self.offset, expected=f"multiple of {align}"
            )
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError("axis declared twice", field=self.name, axes=names)
        _order(self)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtype_of(self.dtype).itemsize

    @property
    def terms(self) -> tuple[Term, ...]:
        """Physical axes, outermost first."""
        return _order(self).terms

    @property
    def records(self) -> tuple[Records, ...]:
        """The arrays of records the field is a part of, outermost first; empty where its bytes lie together."""
        return _order(self).records

    @property
    def shape(self) -> tuple[int, ...]:
        """Physical shape, padding included."""
        return tuple(term.size for term in self.terms)

    @property
    def strides(self) -> tuple[int, ...]:
        """Byte strides of :attr:`shape`: C order, and from record to record where there are any."""
        return _order(self).strides

    @property
    def nbytes(self) -> int:
        """Bytes the field takes in a unit, those of others in its records left out."""
        return math.prod(self.shape) * self.itemsize

    @property
    def span(self) -> int:
        """Bytes from its first to its last: :attr:`nbytes` unless it lies in records."""
        return sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True)) + self.itemsize

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
        """Bytes that coordinates of one axis add to the offset of an element (int64, shape of ``coords``).

        Padding of the axis may be addressed; anything outside it is a LayoutError.
        """
        extent, c = self.axis(axis).extent, int64(coords, axis)
        if c.size and not 0 <= int(c.min()) <= int(c.max()) < extent:
            raise LayoutError(
                "coordinate outside its axis", field=self.name, axis=axis, extent=extent, got=_outside(c, extent)
            )
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

        Works on ints, numpy arrays and torch tensors alike (only ``//`` and ``%`` are used). Coordinates are not
        checked: drop −1 before.
        """
        extents = {axis.name: axis.extent for axis in self.axes}
        for name in coords:
            self.axis(name)
        return (
            unit,
            *(t.position(coords[t.axis], extents[t.axis]) if t.axis in coords else slice(None) for t in self.terms),
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
        self.axis(axis)
        chosen = np.unique(int64(coords, axis))
        if not chosen.size:
            return chosen.astype(np.int64), chosen.astype(np.int64)
        parts = [self.contribution(a.name, chosen if a.name == axis else np.arange(a.size)) for a in self.axes]
        offsets = np.sort(np.asarray(sum(np.ix_(*parts))).reshape(-1)) + self.offset
        cut = np.flatnonzero(np.diff(offsets) != self.itemsize) + 1
        bounds = np.concatenate([[0], cut, [offsets.size]]).astype(np.int64)
        return offsets[bounds[:-1]], np.diff(bounds) * self.itemsize


def padding(name: str, nbytes: int, offset: int, *, alignment_only: bool = False) -> Field:
    """Return a padding field of ``nbytes`` bytes at ``offset``."""
    kind: FieldKind = "alignment" if alignment_only else "padding"
    return Field(name=name, dtype="u8", order="byte", axes=(Axis("byte", nbytes),), offset=offset, kind=kind)


def _id_ranges(axis: Axis) -> tuple[tuple[int, int], ...]:
    try:
        return tuple((index(lo, "ids"), index(hi, "ids")) for lo, hi in axis.ids)
    except (TypeError, ValueError) as error:
        if isinstance(error, LayoutError):
            raise
        raise LayoutError("ids are not a list of (start, stop)", axis=axis.name, got=str(axis.ids)) from error


def _outside(coords: Int64Array, extent: int) -> int:
    return int(coords[(coords < 0) | (coords >= extent)].flat[0])


class _Order(NamedTuple):
    terms: tuple[Term, ...]
    strides: tuple[int, ...]
    records: tuple[Records, ...]


@lru_cache(maxsize=4096)
def _order(field: Field) -> _Order:
    words = field.order.split()
    terms = _terms(field, [word for word in words if not _RECORD.fullmatch(word)])
    align = max(field.alignment, field.itemsize)
    strides: list[int] = []  # innermost first, as are the records
    records: list[Records] = []
    step = field.itemsize
    for word, before in zip(reversed(words), reversed(["@", *words][: len(words)]), strict=True):
        match = _RECORD.fullmatch(word)
        if match is None:
            size = terms[-1 - len(strides)].size
            strides.append(step)
            step *= size
            if records:
                records[-1] = records[-1]._replace(number=records[-1].number * size)
            continue
        where = {"field": field.name, "order": field.order, "term": word}
        size = int(match[1])
        if before.startswith("@"):
            raise LayoutError("no axis counts these records", **where)
        if size < step:
            raise LayoutError("a record is smaller than what lies in it", **where, expected=step, got=size)
        if size % align:
            raise LayoutError(
                "elements of a record are misaligned",
                **where,
                dtype=field.dtype,
                expected=f"multiple of {align}",
                got=size,
                remedy='store their bytes: dtype "u8" with an axis of bytes, and view them in encode and decode',
            )
        records.append(Records(1, size))
        step = size
    if len(records) > _MAX_RECORDS:
        raise LayoutError("records too deep", field=field.name, expected=f"at most {_MAX_RECORDS}", got=len(records))
    return _Order(terms, tuple(reversed(strides)), tuple(reversed(records)))


def _terms(field: Field, words: list[str]) -> tuple[Term, ...]:
    extents = {axis.name: axis.extent for axis in field.axes}
    terms = []
    for text in words:
        match = _TERM.fullmatch(text)
        if not match or match[1] not in extents:
            raise LayoutError("bad term in axis order", field=field.name, term=text, axes=sorted(extents))
        extent, divisor = extents[match[1]], int(match[2] or 1)
        if extent % divisor:
            raise LayoutError("split does not divide the axis", field=field.name, term=text, extent=extent)
        terms.append(Term(match[1], divisor, int(match[3]) if match[3] else extent // divisor))
    for name, extent in extents.items():
        if all(term.axis != name for term in terms):
            raise LayoutError("axis is missing from the order", field=field.name, axis=name, order=field.order)
        reached = 1
        for divisor, size in sorted((t.divisor, t.size) for t in terms if t.axis == name):
            if divisor != reached:
                raise LayoutError(
                    "splits of an axis leave a gap or overlap",
                    field=field.name,
                    axis=name,
                    expected=reached,
                    got=divisor,
                )
            reached *= size
        if reached != extent:
            raise LayoutError(
                "splits of an axis do not cover it", field=field.name, axis=name, expected=extent, got=reached
            )
    return tuple(terms)
