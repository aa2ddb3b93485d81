"""Programs of n-dimensional strided moves between two placed layouts (no torch).

A :class:`Program` is made once for a pair of layouts and applied to any number of pairs of unit ids. Equal layouts
become whole units, moved raw; layouts that differ in axis order, arena order, shard or layers become a few strided
moves each. Nothing is stored per unit, per layer (where layers are evenly spaced) or per token.

How the moves are found: along one axis an element has a byte offset on either side. Where both advance evenly, the
axis is one dimension of a move; the even stretches are again evenly spaced where an axis is split (``slot%32``), and so
on. The layers of a group are treated as one more axis.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import LayoutError, nearest
from kvcore.fields import int64
from kvcore.layout import Buffer, Field, Int64Array, Layout, Placement, Region
from kvcore.strides import Dims, Piece, coalesce, even

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Move:
    """One strided copy, applied to every pair of units.

    Attributes:
        components: the components the bytes belong to (several where neighbouring regions merged).
        src_offset, src_unit_stride: source unit ``u`` starts at ``src_offset + u * src_unit_stride`` bytes.
        dst_offset, dst_unit_stride: the same for the destination.
        dims: ``(count, source stride, destination stride)`` in bytes, outermost first.
        run_bytes: contiguous bytes copied at every point of ``dims``.
    """

    components: tuple[str, ...]
    src_offset: int
    src_unit_stride: int
    dst_offset: int
    dst_unit_stride: int
    dims: Dims
    run_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes one pair of units moves."""
        return self.run_bytes * math.prod(count for count, _, _ in self.dims)

    @property
    def dense(self) -> bool:
        """Whether neighbouring units are contiguous on both sides."""
        return not self.dims and self.run_bytes == self.src_unit_stride == self.dst_unit_stride


@dataclass(frozen=True, eq=False)
class Descriptors:
    """Flat copies: ``nbytes[i]`` bytes from ``src[i]`` to ``dst[i]``, offsets from the start of the arenas (int64)."""

    src: Int64Array
    dst: Int64Array
    nbytes: Int64Array

    def __len__(self) -> int:
        return len(self.nbytes)

    @property
    def total_bytes(self) -> int:
        """Sum of the sizes."""
        return int(self.nbytes.sum())


@dataclass(frozen=True)
class Program:
    """Every move of one pair of placed layouts; build it with :meth:`build`.

    Attributes:
        moves: what is copied for each pair of units.
        components: what the program carries, in the destination's order.
        unit_bytes: bytes with meaning moved a pair of units, by component (padding left out, all common layers).
        whole_units: the moves write every byte of the destination's units, so nothing there needs to be cleared first.
        src_units, dst_units: number of units on either side; ids are checked against them.
        src_bytes, dst_bytes: sizes of the arenas.
    """

    moves: tuple[Move, ...]
    components: tuple[str, ...]
    unit_bytes: Mapping[str, int]
    whole_units: bool
    src_units: int
    dst_units: int
    src_bytes: int
    dst_bytes: int

    @classmethod
    def build(
        cls,
        src: Layout,
        src_placement: Placement,
        dst: Layout,
        dst_placement: Placement,
        components: Collection[str] | None = None,
    ) -> Program:
        """Plan the moves from ``src`` to ``dst``.

        Layers and sharded axes are matched by their global ids: what only one side holds is left out. An axis without
        ids counts as ids ``0, 1, …``.

        Args:
            src, src_placement: the source and where it lies.
            dst, dst_placement: the destination and where it lies.
            components: what to move; None means all. They must share their unit ranges, since one list of unit ids
                serves them all.

        Raises:
            LayoutError: the layouts cannot be converted, or a component is unknown. Names region, field, both values.
        """
        names = _select(dst, components)
        _check_layouts(src, dst)
        regions = [(_partner(src, dst, r), r) for r in dst.regions if r.component in names]
        _check_ranges([r for _, r in regions])
        common = [layer for layer in dst.layers if layer in set(src.layers)]
        src_at, dst_at = _index_buffers(src_placement), _index_buffers(dst_placement)
        moves: list[Move] = []
        unit_bytes = dict.fromkeys(names, 0)
        for src_region, dst_region in regions:
            pieces = _region_pieces(src_region, dst_region)
            logical = dst_region.logical_bytes if _raw(src_region, dst_region) else sum(p.nbytes for p in pieces)
            unit_bytes[dst_region.component] += logical * len(common)
            pairs = [(_at(src_at, layer, src_region), _at(dst_at, layer, dst_region)) for layer in common]
            moves += _over_layers(dst_region.component, pieces, pairs)
        written = sum(move.nbytes for move in moves)
        return cls(
            moves=_merge(moves),
            components=names,
            unit_bytes=unit_bytes,
            whole_units=written == sum(r.unit_bytes for _, r in regions) * len(dst.layers),
            src_units=_num_units(src_at, src, regions[0][0]),
            dst_units=_num_units(dst_at, dst, regions[0][1]),
            src_bytes=src_placement.arena_bytes,
            dst_bytes=dst_placement.arena_bytes,
        )

    @property
    def bytes_per_unit(self) -> int:
        """Bytes with meaning that one pair of units moves, all components together."""
        return sum(self.unit_bytes.values())

    def pairs(self, src_units: npt.ArrayLike, dst_units: npt.ArrayLike) -> tuple[Int64Array, Int64Array]:
        """Check unit ids and drop the pairs with a −1 on either side.

        Raises:
            LayoutError: lists of unlike length, or an id outside the arena.
        """
        src, dst = _ids(src_units, "src_units"), _ids(dst_units, "dst_units")
        if src.shape != dst.shape:
            raise LayoutError("as many source as destination units are needed", expected=src.size, got=dst.size)
        keep = (src != -1) & (dst != -1)
        if not keep.all():
            src, dst = src[keep], dst[keep]
        for side, ids, count in (("source", src, self.src_units), ("destination", dst, self.dst_units)):
            if ids.size and (ids.min() < 0 or ids.max() >= count):
                bad = int(ids[(ids < 0) | (ids >= count)][0])
                raise LayoutError("unit id outside the arena", side=side, unit=bad, num_units=count)
        return src, dst

    def descriptors(self, src_units: npt.ArrayLike, dst_units: npt.ArrayLike) -> Descriptors:
        """Flat copies for pairs of units, in order of destination, merged where both sides are contiguous.

        Args:
            src_units, dst_units: ``[N]`` region unit ids; −1 on either side drops the pair.
        """
        src_ids, dst_ids = self.pairs(src_units, dst_units)
        parts = [_flat(move, src_ids, dst_ids) for move in self.moves if src_ids.size]
        if not parts:
            empty = np.zeros(0, np.int64)
            return Descriptors(empty, empty.copy(), empty.copy())
        return _merge_flat(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def run_program(program: Program, src: Bytes, dst: Bytes, src_units: npt.ArrayLike, dst_units: npt.ArrayLike) -> int:
    """Copy units from one arena to another in this process.

    Args:
        program: the plan.
        src, dst: the arenas, contiguous ``uint8 [arena_bytes]`` (or longer); ``dst`` is writable. A conversion
            within one arena is allowed where no destination unit is also a source unit.
        src_units, dst_units: ``[N]`` region unit ids; −1 on either side drops the pair.

    Returns:
        Bytes with meaning moved (padding not counted).

    Raises:
        LayoutError: arenas too small, or unit ids that :meth:`Program.pairs` refuses; nothing is written.
    """
    _check_arena(src, program.src_bytes, "source")
    _check_arena(dst, program.dst_bytes, "destination")
    if not dst.flags.writeable:
        raise LayoutError("the destination arena is read-only", nbytes=dst.nbytes)
    src_ids, dst_ids = program.pairs(src_units, dst_units)
    if not src_ids.size:
        return 0
    starts = _run_starts(src_ids, dst_ids)
    scattered = 2 * starts.size > src_ids.size
    strided = []
    for move in program.moves:
        views = _views(move, program, src, dst)
        if scattered and move.dense and src_ids.size > 1 and bool((np.diff(dst_ids) == 1).all()):
            _take(*views, src_ids, int(dst_ids[0]))
        else:
            strided.append(views)
    stops = np.append(starts[1:], src_ids.size)
    runs = zip(src_ids[starts].tolist(), dst_ids[starts].tolist(), (stops - starts).tolist(), strict=True)
    for s, d, count in runs:
        for src_view, dst_view in strided:
            if count == 1:  # one index less for numpy to walk
                dst_view[d] = src_view[s]
            else:
                dst_view[d : d + count] = src_view[s : s + count]
    return program.bytes_per_unit * int(src_ids.size)


# --- what can be converted -------------------------------------------------------------------------------------------


def _select(dst: Layout, components: Collection[str] | None) -> tuple[str, ...]:
    if components is None:
        return dst.components
    wanted = {components} if isinstance(components, str) else set(components)
    for name in sorted(wanted - set(dst.components)):
        raise LayoutError("no such component", component=name, remedy=nearest(name, dst.components))
    if not wanted:
        raise LayoutError("no component to move", group=dst.group, known=dst.components)
    return tuple(name for name in dst.components if name in wanted)


def _check_layouts(src: Layout, dst: Layout) -> None:
    for name in ("format", "revision", "group"):
        _same(f"layouts differ in {name}", getattr(dst, name), getattr(src, name), field=name)


def _check_ranges(regions: Sequence[Region]) -> None:
    for region in regions:
        if region.ranges != regions[0].ranges:
            raise LayoutError(
                "components of one program must share their unit ranges",
                region=region.name,
                expected=regions[0].ranges,
                got=region.ranges,
                remedy="build one program for each set of components that moves under one list of unit ids",
            )


def _partner(src: Layout, dst: Layout, region: Region) -> Region:
    """Return the source's region of the same name, checked to be convertible into ``region``."""
    if all(item.name != region.name for item in src.regions):
        raise LayoutError(
            "the source lacks a region", region=region.name, expected=region.name, got=[r.name for r in src.regions]
        )
    other = src.region(region.name)
    where = {"region": region.name}
    _same("regions belong to different components", region.component, other.component, **where)
    _same("regions have different unit ranges", region.ranges, other.ranges, **where)
    for name in region.ranges:
        ours, theirs = dst.space_of_range(name), src.space_of_range(name)
        page_sizes = ours.tokens_per_unit, theirs.tokens_per_unit
        _same("page sizes differ", *page_sizes, field="tokens_per_unit", range=name, **where)
        for what in ("kind", "unit", "options"):
            mine, got = getattr(ours, what), getattr(theirs, what)
            _same(f"index spaces differ in {what}", mine, got, field=what, range=name, **where)
    fields, others = ({f.name: f for f in r.data_fields} for r in (region, other))
    _same("regions have different fields", sorted(fields), sorted(others), **where)
    for name, field in fields.items():
        _check_fields(others[name], field, region=region.name, field=name)
    return other


def _check_fields(src: Field, dst: Field, **where: Any) -> None:
    _same("fields differ in dtype", dst.dtype, src.dtype, **where)
    names = sorted(axis.name for axis in dst.axes)
    _same("fields have different axes", names, sorted(axis.name for axis in src.axes), **where)
    for axis in dst.axes:
        other = src.axis(axis.name)
        if not axis.ids and not other.ids:
            _same("unsharded axes differ in size", axis.size, other.size, axis=axis.name, **where)
        blocks, theirs = (a.blocks and (a.blocks.axis, a.blocks.block_size) for a in (axis, other))
        _same("axes count different blocks", blocks, theirs, axis=axis.name, **where)


def _same(message: str, expected: Any, got: Any, **where: Any) -> None:
    if expected != got:
        raise LayoutError(message, **where, expected=expected, got=got)


# --- moves -----------------------------------------------------------------------------------------------------------


def _raw(src: Region, dst: Region) -> bool:
    """Whether units of both regions have the same bytes, so that they can be moved whole."""
    return src.unit_bytes == dst.unit_bytes and src.fields == dst.fields


def _region_pieces(src: Region, dst: Region) -> list[Piece]:
    if _raw(src, dst):
        return [Piece(0, 0, (), dst.unit_bytes)]
    return [piece for field in dst.data_fields for piece in _field_pieces(src.field(field.name), field)]


def _field_pieces(src: Field, dst: Field) -> list[Piece]:
    per_axis = [_axis_pieces(src, dst, axis.name) for axis in dst.axes]
    pieces = []
    for combination in itertools.product(*per_axis):
        dims = tuple(dim for part in combination for dim in part.dims)
        start = src.offset + sum(part.src for part in combination), dst.offset + sum(part.dst for part in combination)
        pieces.append(coalesce(Piece(*start, dims, dst.itemsize)))
    return pieces


def _axis_pieces(src: Field, dst: Field, name: str) -> list[Piece]:
    """Even stretches of the ids of one axis that both fields hold, as byte offsets on either side."""
    ours, theirs = dst.axis(name), src.axis(name)
    if ours.ids == theirs.ids and ours.size == theirs.size:
        src_coords = dst_coords = np.arange(ours.size, dtype=np.int64)
    else:
        _, src_coords, dst_coords = np.intersect1d(
            src.global_ids(name), dst.global_ids(name), assume_unique=True, return_indices=True
        )
        order = np.argsort(dst_coords)
        src_coords, dst_coords = src_coords[order], dst_coords[order]
    return even(src.contribution(name, src_coords), dst.contribution(name, dst_coords))


def _over_layers(component: str, pieces: Iterable[Piece], buffers: Sequence[tuple[Buffer, Buffer]]) -> list[Move]:
    """Repeat the pieces of one region in every layer, folding evenly spaced layers into a dimension."""
    if not buffers:
        return []
    layers = even([s.base for s, _ in buffers], [d.base for _, d in buffers])
    src_stride, dst_stride = buffers[0][0].unit_stride, buffers[0][1].unit_stride
    moves = []
    for layer, piece in itertools.product(layers, pieces):
        src, dst, dims, run = coalesce(
            Piece(layer.src + piece.src, layer.dst + piece.dst, layer.dims + piece.dims, piece.run)
        )
        moves.append(Move((component,), src, src_stride, dst, dst_stride, dims, run))
    return moves


def _merge(moves: list[Move]) -> tuple[Move, ...]:
    """Join moves that continue one another on both sides, so that neighbouring regions travel as one piece."""
    while True:
        merged: list[Move] = []
        for move in sorted(moves, key=lambda m: (m.dst_offset, m.src_offset)):
            if merged and _continues(merged[-1], move):
                merged[-1] = _join(merged[-1], move)
            else:
                merged.append(move)
        if len(merged) == len(moves):
            return tuple(merged)
        moves = merged


def _continues(first: Move, second: Move) -> bool:
    same = (first.dims, first.src_unit_stride, first.dst_unit_stride)
    return (
        same == (second.dims, second.src_unit_stride, second.dst_unit_stride)
        and second.src_offset - first.src_offset == first.run_bytes
        and second.dst_offset - first.dst_offset == first.run_bytes
    )


def _join(first: Move, second: Move) -> Move:
    piece = coalesce(Piece(first.src_offset, first.dst_offset, first.dims, first.run_bytes + second.run_bytes))
    components = tuple(dict.fromkeys(first.components + second.components))
    return Move(components, piece.src, first.src_unit_stride, piece.dst, first.dst_unit_stride, piece.dims, piece.run)


def _index_buffers(placement: Placement) -> dict[tuple[int, str], Buffer]:
    return {(buffer.layer, buffer.region): buffer for buffer in placement.buffers}


def _at(buffers: Mapping[tuple[int, str], Buffer], layer: int, region: Region) -> Buffer:
    try:
        buffer = buffers[layer, region.name]
    except KeyError:
        raise LayoutError("the placement lacks a buffer", region=region.name, layer=layer) from None
    if buffer.unit_bytes != region.unit_bytes:
        raise LayoutError(
            "the placement is of another layout",
            region=region.name,
            layer=layer,
            expected=region.unit_bytes,
            got=buffer.unit_bytes,
        )
    return buffer


def _num_units(buffers: Mapping[tuple[int, str], Buffer], layout: Layout, region: Region) -> int:
    return min(_at(buffers, layer, region).num_units for layer in layout.layers)


# --- applying them ---------------------------------------------------------------------------------------------------


def _ids(units: npt.ArrayLike, what: str) -> Int64Array:
    ids = int64(units, what)
    if ids.ndim != 1:
        raise LayoutError("unit ids are not a list", attribute=what, shape=ids.shape)
    return ids


def _run_starts(src: Int64Array, dst: Int64Array) -> Int64Array:
    """Positions where a run of units that advances by one on both sides begins."""
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    return np.concatenate([np.zeros(1, np.int64), breaks])


def _flat(move: Move, src_ids: Int64Array, dst_ids: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
    src = move.src_offset + src_ids * move.src_unit_stride
    dst = move.dst_offset + dst_ids * move.dst_unit_stride
    for count, src_stride, dst_stride in move.dims:
        steps = np.arange(count, dtype=np.int64)
        src, dst = np.add.outer(src, steps * src_stride), np.add.outer(dst, steps * dst_stride)
    return src.reshape(-1), dst.reshape(-1), np.full(src.size, move.run_bytes, np.int64)


def _merge_flat(src: Int64Array, dst: Int64Array, nbytes: Int64Array) -> Descriptors:
    if bool((np.diff(dst) < 0).any()):
        order = np.argsort(dst, kind="stable")
        src, dst, nbytes = src[order], dst[order], nbytes[order]
    apart = (src[1:] - src[:-1] != nbytes[:-1]) | (dst[1:] - dst[:-1] != nbytes[:-1])
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(apart) + 1])
    return Descriptors(src[starts], dst[starts], np.add.reduceat(nbytes, starts))


def _check_arena(arena: Bytes, nbytes: int, side: str) -> None:
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
        raise LayoutError(
            "an arena is a contiguous array of bytes", side=side, dtype=str(arena.dtype), shape=arena.shape
        )
    if arena.nbytes < nbytes:
        raise LayoutError("the arena is smaller than its placement", side=side, expected=nbytes, got=arena.nbytes)


_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}


def _views(move: Move, program: Program, src: Bytes, dst: Bytes) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views ``[unit, *dims, words]`` of both arenas in the widest word that every stride allows."""
    strides = [s for dim in move.dims for s in dim[1:]]
    starts = (src.ctypes.data + move.src_offset, dst.ctypes.data + move.dst_offset)
    word = math.gcd(8, move.run_bytes, move.src_unit_stride, move.dst_unit_stride, *strides, *starts)
    counts = tuple(count for count, _, _ in move.dims)
    sides = (
        (src, program.src_units, move.src_offset, move.src_unit_stride, tuple(s for _, s, _ in move.dims)),
        (dst, program.dst_units, move.dst_offset, move.dst_unit_stride, tuple(d for _, _, d in move.dims)),
    )
    src_view, dst_view = (
        np.ndarray(
            (units, *counts, move.run_bytes // word),
            _WORDS[word],
            buffer=arena.data,
            offset=offset,
            strides=(unit_stride, *inner, word),
        )
        for arena, units, offset, unit_stride, inner in sides
    )
    return src_view, dst_view


def _take(src: npt.NDArray[Any], dst: npt.NDArray[Any], src_ids: Int64Array, first: int) -> None:
    """Gather scattered units into one contiguous stretch.

    ``mode="clip"``: the ids are checked already, and any other mode would make numpy go through a buffer.
    """
    np.take(src, src_ids, axis=0, out=dst[first : first + src_ids.size], mode="clip")
