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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvcore.errors import LayoutError
from kvcore.layout import Buffer, Field, Int64Array, Layout, Placement, Region
from kvcore.layout.fields import int64
from kvcore.layout.moves.applying import Bytes, Descriptors, Move, check_arena, copy_units, flatten
from kvcore.layout.moves.matching import (
    AxisIds,
    Selection,
    check_layouts,
    check_names,
    check_ranges,
    chosen_ids,
    common_ids,
    common_layers,
    is_chosen,
    partner,
    select_components,
)
from kvcore.layout.strides import Piece, coalesce, even

__all__ = ["Bytes", "Descriptors", "Move", "Program", "Selection", "run_program"]


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
        only: Selection | None = None,
    ) -> Program:
        """Plan the moves from ``src`` to ``dst``.

        Layers and sharded axes are matched by their global ids: what only one side holds is left out. An axis without
        ids counts as ids ``0, 1, …``.

        Args:
            src, src_placement: the source and where it lies.
            dst, dst_placement: the destination and where it lies.
            components: what to move; None means all. They must share their unit ranges, since one list of unit ids
                serves them all.
            only: what of it to move; None means all. Units travel raw, padding included, only where a region is moved
                whole.

        Raises:
            LayoutError: the layouts cannot be converted, a component is unknown, or ``only`` names what the two sides do
                not both hold. Names region, field, both values.
        """
        names = select_components(dst, components)
        check_layouts(src, dst)
        regions = [(partner(src, dst, r), r) for r in dst.regions if r.component in names]
        check_ranges([r for _, r in regions])
        common = common_layers(src, dst, only)
        if only is not None:
            check_names(dst, only)
        src_at, dst_at = _index_buffers(src_placement), _index_buffers(dst_placement)
        moves: list[Move] = []
        unit_bytes = dict.fromkeys(names, 0)
        for src_region, dst_region in regions:
            pieces, logical = _region_pieces(src_region, dst_region, only)
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
        return flatten(self.moves, *self.pairs(src_units, dst_units))


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
    check_arena(src, program.src_bytes, "source")
    check_arena(dst, program.dst_bytes, "destination")
    if not dst.flags.writeable:
        raise LayoutError("the destination arena is read-only", nbytes=dst.nbytes)
    src_ids, dst_ids = program.pairs(src_units, dst_units)
    copy_units(program.moves, src, dst, (program.src_units, program.dst_units), src_ids, dst_ids)
    return program.bytes_per_unit * int(src_ids.size)


def _ids(units: npt.ArrayLike, what: str) -> Int64Array:
    ids = int64(units, what)
    if ids.ndim != 1:
        raise LayoutError("unit ids are not a list", attribute=what, shape=ids.shape)
    return ids


# --- moves -----------------------------------------------------------------------------------------------------------


def _raw(src: Region, dst: Region) -> bool:
    """Whether units of both regions have the same bytes, so that they can be moved whole."""
    return src.unit_bytes == dst.unit_bytes and src.fields == dst.fields


def _region_pieces(src: Region, dst: Region, only: Selection | None) -> tuple[list[Piece], int]:
    """The copies of one unit of a region, and the bytes with meaning among them."""
    chosen = [(field, chosen_ids(src, dst, field, only)) for field in dst.data_fields if is_chosen(dst, field, only)]
    if _raw(src, dst) and len(chosen) == len(dst.data_fields) and all(ids is None for _, ids in chosen):
        return [Piece(0, 0, (), dst.unit_bytes)], dst.logical_bytes
    pieces = [piece for field, ids in chosen for piece in _field_pieces(src.field(field.name), field, ids)]
    return pieces, sum(piece.nbytes for piece in pieces)


def _field_pieces(src: Field, dst: Field, ids: AxisIds | None) -> list[Piece]:
    per_axis = [
        _axis_pieces(src, dst, axis.name, ids[1] if ids is not None and ids[0] == axis.name else None)
        for axis in dst.axes
    ]
    pieces = []
    for combination in itertools.product(*per_axis):
        dims = tuple(dim for part in combination for dim in part.dims)
        start = src.offset + sum(part.src for part in combination), dst.offset + sum(part.dst for part in combination)
        pieces.append(coalesce(Piece(*start, dims, dst.itemsize)))
    return pieces


def _axis_pieces(src: Field, dst: Field, name: str, chosen: Int64Array | None) -> list[Piece]:
    """Even stretches of the ids of one axis that both fields hold (or the chosen ones), as byte offsets on either side."""
    ours, theirs = dst.axis(name), src.axis(name)
    if chosen is None and ours.ids == theirs.ids and ours.size == theirs.size:
        src_coords = dst_coords = np.arange(ours.size, dtype=np.int64)
    else:
        common, src_coords, dst_coords = common_ids(src, dst, name)
        order = np.argsort(dst_coords)
        if chosen is not None:
            order = order[np.isin(common[order], chosen, assume_unique=True)]
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
