"""How a transport of flat reads carries out a program: what it reads straight, what by way of a staging buffer (no I/O).

A strided move is many short runs, and every descriptor of a wire has a fixed price. So where runs are short, whole
*windows* of the source are read raw, side by side, into a bounded staging buffer, and the same moves, re-based onto it,
run locally from there. What a window holds beside the bytes of its moves is read over, counted, and reported.

The cost of a read, in microseconds, is taken as ::

    descriptors × descriptor_cost_us + bytes read ÷ bytes_per_us

so that a gap between two runs is cheaper read over than left out up to ``descriptor_cost_us × bytes_per_us`` bytes. The
local copy is left out of it: it runs while the next batch is read. Nothing shorter than ``min_run_bytes`` is worth a
descriptor, hence a gap is bridged up to ::

    max(min_run_bytes, descriptor_cost_us × bytes_per_us)

A move is read straight where its runs have ``min_run_bytes`` at least, or where no two of them come to lie in one window,
so that staging would only add a copy. What is read straight is merged where runs of neighbouring units touch.

Units are taken together in the same way: windows of source units that are no further apart than that are one read, and
lie in the staging buffer as they do in the source. So short units that are neighbours at the source and scattered here are
read *across*: a second plan stages every run that a descriptor costs more than, and the ids of a read say which of the
two plans is cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvcore.contract import TransportTraits
from kvcore.layout import Int64Array
from kvcore.layout.moves import Descriptors, Move, Program
from kvcore.layout.moves.applying import flatten, unrolled
from kvcore.layout.strides import Dims, Piece, coalesce, even

DEFAULT_BYTES_PER_US = 2000.0
"""Rate of a wire of which nothing else is known: 2 GB/s."""

_ALIGNMENT = 16
_MAX_PLANS = 1024


@dataclass(frozen=True)
class Block:
    """Windows of one unit stride as they lie in the staging buffer; their units there are called slots.

    Attributes:
        windows: moves without dimensions from the source to the staging buffer, whose units are slots.
        moves: from the staging buffer to the destination.
        reach: source units that are no further apart than this are one read; 0 where every unit is one of its own.
        apart: slots that a unit takes where the next one is out of reach.
    """

    windows: tuple[Move, ...]
    moves: tuple[Move, ...]
    reach: int
    apart: int

    def joins(self, src_ids: Int64Array) -> npt.NDArray[np.bool_]:
        """Whether each unit but the first is one read with the one before it."""
        steps = np.diff(src_ids)
        return (steps > 0) & (steps <= self.reach)

    def slots(self, src_ids: Int64Array) -> Int64Array:
        """The slot of each unit, for ascending ids: as far apart as in the source where they are one read."""
        steps = np.where(self.joins(src_ids), np.diff(src_ids), self.apart)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(steps)])

    def reads(self, src_ids: Int64Array, slots: Int64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Offsets at the source and in the staging buffer, and sizes."""
        breaks = np.flatnonzero(~self.joins(src_ids))
        first, last = np.append(0, breaks + 1), np.append(breaks, src_ids.size - 1)
        rows = [(w.src_offset, w.src_unit_stride, w.dst_offset, w.dst_unit_stride, w.run_bytes) for w in self.windows]
        src, src_stride, dst, dst_stride, size = np.array(rows, np.int64).T[:, :, None]
        sizes = (src_ids[last] - src_ids[first]) * src_stride + size
        sides = src + src_ids[first] * src_stride, dst + slots[first] * dst_stride
        return sides[0].reshape(-1), sides[1].reshape(-1), sizes.reshape(-1)


@dataclass(frozen=True)
class Area:
    """How the batches of a plan lie in a part of the staging buffer.

    Windows whose neighbours are worth one read have a stretch of their own each, in which units lie as in the source. The
    others lie side by side, unit after unit.

    Attributes:
        blocks: the windows, by stride.
        units: slots there is room for.
        nbytes: bytes they take.
    """

    blocks: tuple[Block, ...]
    units: int
    nbytes: int

    @classmethod
    def of(cls, groups: Sequence[_Windows], gap: int, units: int, *, rows: bool = False) -> Area:
        """Lay windows out for a number of units; with ``rows``, all of them unit after unit, in the same order."""
        groups = sorted(groups, key=lambda group: group.reach(gap) > 0)
        loose = [group for group in groups if rows or not group.reach(gap)]
        places, end = [], 0
        for group in loose:
            offsets, end = group.place(end, 1)
            places.append(offsets)
        pitch = _aligned(end)
        blocks = [group.block(at, pitch, reach=0, apart=1) for group, at in zip(loose, places, strict=True)]
        end = pitch * units
        for group in groups[len(loose) :]:
            offsets, end = group.place(end, units)
            apart = -(-max(group.sizes) // group.unit_stride)
            blocks.append(group.block(offsets, group.unit_stride, reach=group.reach(gap), apart=apart))
        return cls(tuple(blocks), units, _aligned(end))

    def cut(self, src_ids: Int64Array, most: int) -> Iterator[tuple[slice, tuple[Int64Array, ...]]]:
        """Ascending ids as batches that there is room for, of ``most`` ids: which, and their slots in every block."""
        slots = [block.slots(src_ids) for block in self.blocks]
        first = 0
        while first < src_ids.size:
            stop = min(first + most, *(int(np.searchsorted(some, some[first] + self.units)) for some in slots))
            yield slice(first, stop), tuple(some[first:stop] - some[first] for some in slots)
            first = stop

    def reads(self, src_ids: Int64Array, slots: Sequence[Int64Array]) -> Descriptors:
        """What a batch reads into the staging buffer, in order of destination."""
        parts = [block.reads(src_ids, some) for block, some in zip(self.blocks, slots, strict=True)]
        src, dst, nbytes = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(dst, kind="stable")
        return Descriptors(src[order], dst[order], nbytes[order])


@dataclass(frozen=True)
class Rows:
    """The windows of each unit side by side, unit after unit: what a device's program starts from.

    Attributes:
        nbytes: bytes of a unit; no more than it takes in an area of one unit.
        places: offsets of the windows in it, in the order of an area's blocks.
        _program: from any number of units; no stride of its moves is negative.
    """

    nbytes: int
    places: tuple[tuple[int, ...], ...]
    _program: Program

    def program(self, units: int) -> Program:
        """From so many units into the destination."""
        return replace(self._program, src_units=units, src_bytes=units * self.nbytes)

    def filled_from(self, area: Area) -> Iterator[tuple[Move, ...]]:
        """The moves from every block of an area; their destination's units are rows."""
        for block, places in zip(area.blocks, self.places, strict=True):
            yield tuple(
                Move((), window.dst_offset, window.dst_unit_stride, at, self.nbytes, (), window.run_bytes)
                for window, at in zip(block.windows, places, strict=True)
            )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class StagingPlan:
    """One program as flat reads; build it with :meth:`build`.

    Attributes:
        program: the whole conversion.
        direct: moves that are read straight into the destination.
        windows: moves without dimensions from the source to the staging buffer, whose units are counted from 0.
        staged: moves from the staging buffer to the destination.
        staged_bytes: bytes a pair of units takes of the staging buffer; 0 where nothing is staged.
        window_bytes: bytes a pair of units reads into the staging buffer.
        read_over_bytes: how many of them no move uses.
        gap: bytes that are cheaper read over than left out; what a descriptor costs, in bytes.
    """

    program: Program
    direct: tuple[Move, ...]
    windows: tuple[Move, ...]
    staged: tuple[Move, ...]
    staged_bytes: int
    window_bytes: int
    read_over_bytes: int
    gap: int
    _groups: tuple[_Windows, ...]
    _areas: dict[int, Area] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def build(
        cls,
        program: Program,
        traits: TransportTraits,
        bytes_per_us: float = DEFAULT_BYTES_PER_US,
        *,
        across: bool = False,
        straight: bool = True,
    ) -> StagingPlan:
        """Decide for every move whether it is read straight.

        Args:
            program: what to move.
            traits: the wire's ``min_run_bytes`` and ``descriptor_cost_us``.
            bytes_per_us: rate of the wire.
            across: for source units that lie side by side: stage whatever a descriptor costs more than.
            straight: the wire can write into the destination; else everything is staged.
        """
        gap = max(traits.min_run_bytes, int(traits.descriptor_cost_us * bytes_per_us))
        enough = gap if across else traits.min_run_bytes
        long = [m for m in program.moves if straight and m.run_bytes >= enough]
        spans = [_Spans.of(move, gap) for move in program.moves if move not in long]
        windows = [_Windows.cover(same, gap) for same in _by_stride(spans)]
        alone = [span.move for window in windows for span in window.spans if not window.joins_runs_of(span)]
        if across or not straight:
            alone = []
        direct = [move for move in program.moves if move in long or move in alone]
        kept = [span for span in spans if span.move not in alone]
        return cls._of(program, direct, [_Windows.cover(same, gap) for same in _by_stride(kept)], gap)

    @classmethod
    def _of(cls, program: Program, direct: Sequence[Move], groups: Sequence[_Windows], gap: int) -> StagingPlan:
        one = Area.of(groups, gap, 1)
        windows = tuple(window for block in one.blocks for window in block.windows)
        staged = tuple(move for block in one.blocks for move in block.moves)
        window_bytes = sum(move.nbytes for move in windows)
        return cls(
            program=program,
            direct=tuple(direct),
            windows=windows,
            staged=staged,
            staged_bytes=one.nbytes,
            window_bytes=window_bytes,
            read_over_bytes=window_bytes - sum(move.nbytes for move in staged),
            gap=gap,
            _groups=tuple(groups),
        )

    def direct_reads(self, src_ids: Int64Array, dst_ids: Int64Array) -> Descriptors:
        """What is read from the source's arena straight into the destination's, for checked pairs of units."""
        return flatten(self.direct, src_ids, dst_ids)

    @cached_property
    def rows(self) -> Rows:
        """The same for what can only be copied unit by unit from there."""
        area = Area.of(self._groups, self.gap, 1, rows=True)
        moves = (move for block in area.blocks for move in block.moves)
        forward = (
            part
            for move in moves
            for part in unrolled(move, {n for n, (_, src, dst) in enumerate(move.dims) if src <= 0 or dst <= 0})
        )
        places = tuple(tuple(window.dst_offset for window in block.windows) for block in area.blocks)
        return Rows(area.nbytes, places, replace(self.program, moves=tuple(forward), src_units=0, src_bytes=0))

    def area(self, room: int) -> Area:
        """How batches lie in ``room`` bytes of the staging buffer; at least ``staged_bytes``."""
        if room not in self._areas:
            # So many at a time that what aligns windows is the same every time.
            each = (Area.of(self._groups, self.gap, 1 + _ALIGNMENT).nbytes - self.staged_bytes) // _ALIGNMENT
            units = 1 + (room - self.staged_bytes) // max(1, each)
            area = Area.of(self._groups, self.gap, units)
            while area.nbytes > room:
                units -= 1
                area = Area.of(self._groups, self.gap, units)
            self._areas[room] = area
        return self._areas[room]


class StagingPlanner:
    """Plans for the programs of one wire, each made once: as it is for scattered units, and across neighbouring ones.

    Args:
        traits: of the transport.
        bytes_per_us: rate of the wire.
    """

    def __init__(self, traits: TransportTraits, bytes_per_us: float = DEFAULT_BYTES_PER_US) -> None:
        self._traits = traits
        self._bytes_per_us = bytes_per_us
        self._plans: dict[tuple[int, bool], tuple[StagingPlan, ...]] = {}

    def plans(self, program: Program, *, straight: bool = True) -> tuple[StagingPlan, ...]:
        """The plans for a program, to choose from by the ids of a read; the first is for any.

        Args:
            program: what to move.
            straight: the wire can write into the destination.
        """
        found = self._plans.get((id(program), straight))
        if found is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan, across = (
                StagingPlan.build(program, self._traits, self._bytes_per_us, across=across, straight=straight)
                for across in (False, True)
            )
            found = (plan,) if across.direct == plan.direct else (plan, across)
            self._plans[id(program), straight] = found
        return found  # they keep their program, so that the id stays its own


@dataclass(frozen=True)
class _Spans:
    """One move as equal spans of the source: dimensions whose gaps are worth reading over are inside of a span.

    ``src`` and ``dst`` are where the first run of each span lies on either side; the span itself begins ``low`` bytes
    from there (0 or less) and has ``nbytes`` bytes.
    """

    move: Move
    inner: Dims
    src: Int64Array
    dst: Int64Array
    low: int
    nbytes: int

    @classmethod
    def of(cls, move: Move, gap: int) -> _Spans:
        low, nbytes = 0, move.run_bytes
        inner: list[tuple[int, int, int]] = []
        outer: list[tuple[int, int, int]] = []
        for dim in sorted(move.dims, key=lambda dim: abs(dim[1])):
            count, step, _ = dim
            if outer or abs(step) - nbytes > gap:
                outer.append(dim)
                continue
            inner.append(dim)
            low += min(0, (count - 1) * step)
            nbytes += (count - 1) * abs(step)
        src, dst = np.array([move.src_offset], np.int64), np.array([move.dst_offset], np.int64)
        for count, src_step, dst_step in (dim for dim in move.dims if dim in outer):
            steps = np.arange(count, dtype=np.int64)
            src = np.add.outer(src, steps * src_step).reshape(-1)
            dst = np.add.outer(dst, steps * dst_step).reshape(-1)
        return cls(move, tuple(dim for dim in move.dims if dim in inner), src, dst, low, nbytes)

    @property
    def runs(self) -> int:
        """Runs in each span."""
        return math.prod(count for count, _, _ in self.inner)


def _by_stride(spans: Sequence[_Spans]) -> list[list[_Spans]]:
    """Spans of moves that go from unit to unit at the same pace: only they keep their distance in every unit."""
    groups: dict[int, list[_Spans]] = {}
    for span in spans:
        groups.setdefault(span.move.src_unit_stride, []).append(span)
    return list(groups.values())


@dataclass(frozen=True)
class _Windows:
    """Spans of several moves, joined where they overlap or lie close together.

    ``starts`` and ``sizes`` are the windows of unit 0, ``runs`` how many runs of moves lie in each, ``members[i]`` the
    window of every span of ``spans[i]``.
    """

    unit_stride: int
    spans: tuple[_Spans, ...]
    starts: list[int]
    sizes: list[int]
    runs: Int64Array
    members: tuple[Int64Array, ...]

    @classmethod
    def cover(cls, spans: Sequence[_Spans], gap: int) -> _Windows:
        starts = np.concatenate([span.src + span.low for span in spans])
        ends = starts + np.concatenate([np.full(span.src.size, span.nbytes) for span in spans])
        runs = np.concatenate([np.full(span.src.size, span.runs) for span in spans])
        order = np.argsort(starts, kind="stable")
        reach = np.maximum.accumulate(ends[order])
        opens = np.concatenate([[True], starts[order][1:] - reach[:-1] > gap])
        window = np.empty(starts.size, np.int64)
        window[order] = np.cumsum(opens) - 1
        first = np.flatnonzero(opens)
        lows, highs = starts[order][first], reach[np.append(first[1:], starts.size) - 1]
        members = np.split(window, np.cumsum([span.src.size for span in spans])[:-1])
        counts = np.bincount(window, weights=runs).astype(np.int64)
        stride = spans[0].move.src_unit_stride
        return cls(stride, tuple(spans), lows.tolist(), (highs - lows).tolist(), counts, tuple(members))

    def reach(self, gap: int) -> int:
        """How far apart units may be to be one read: no window then reads over more than ``gap`` bytes between them."""
        return max(0, (gap + min(self.sizes)) // self.unit_stride) if self.unit_stride > 0 else 0

    def place(self, end: int, units: int) -> tuple[list[int], int]:
        """Offsets of windows that lie behind ``end``, and the end of the last; aligned as they were in the source."""
        offsets = []
        for start, nbytes in zip(self.starts, self.sizes, strict=True):
            offsets.append(end + (start - end) % _ALIGNMENT)
            end = offsets[-1] + (units - 1) * self.unit_stride + nbytes
        return offsets, end

    def block(self, offsets: Sequence[int], pitch: int, *, reach: int, apart: int) -> Block:
        """The windows at these offsets of a staging buffer whose slots are ``pitch`` bytes apart."""
        windows = tuple(
            Move((), start, self.unit_stride, offset, pitch, (), nbytes)
            for start, nbytes, offset in zip(self.starts, self.sizes, offsets, strict=True)
        )
        return Block(windows, tuple(self.rebase(offsets, pitch)), reach, apart)

    def joins_runs_of(self, span: _Spans) -> bool:
        """Whether some run of a move shares its window with another run."""
        at = next(i for i, item in enumerate(self.spans) if item is span)
        return bool((self.runs[self.members[at]] > 1).any())

    def rebase(self, offsets: Sequence[int], unit_stride: int) -> list[Move]:
        """The moves, from windows that lie at ``offsets`` of a staged unit; evenly placed spans fold into a dimension."""
        moved = np.array(offsets, np.int64) - np.array(self.starts, np.int64)
        moves = []
        for span, windows in zip(self.spans, self.members, strict=True):
            move = span.move
            for found in even(span.src + moved[windows], span.dst):
                piece = coalesce(Piece(found.src, found.dst, (*found.dims, *span.inner), move.run_bytes))
                dst_stride = move.dst_unit_stride
                moves.append(
                    Move(move.components, piece.src, unit_stride, piece.dst, dst_stride, piece.dims, piece.run)
                )
        return moves
