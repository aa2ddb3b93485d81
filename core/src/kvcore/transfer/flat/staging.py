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
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvcore.contract import TransportTraits
from kvcore.layout import Int64Array
from kvcore.layout.moves import Descriptors, Move, Program
from kvcore.layout.moves.applying import flatten
from kvcore.layout.strides import Dims, Piece, coalesce, even

DEFAULT_BYTES_PER_US = 2000.0
"""Rate of a wire of which nothing else is known: 2 GB/s."""

_ALIGNMENT = 16
_MAX_PLANS = 1024


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
    """

    program: Program
    direct: tuple[Move, ...]
    windows: tuple[Move, ...]
    staged: tuple[Move, ...]
    staged_bytes: int
    window_bytes: int
    read_over_bytes: int

    @classmethod
    def build(
        cls,
        program: Program,
        traits: TransportTraits,
        bytes_per_us: float = DEFAULT_BYTES_PER_US,
    ) -> StagingPlan:
        """Decide for every move whether it is read straight.

        Args:
            program: what to move.
            traits: the wire's ``min_run_bytes`` and ``descriptor_cost_us``.
            bytes_per_us: rate of the wire.
        """
        gap = max(traits.min_run_bytes, int(traits.descriptor_cost_us * bytes_per_us))
        long = [m for m in program.moves if m.run_bytes >= traits.min_run_bytes]
        spans = [_Spans.of(move, gap) for move in program.moves if move not in long]
        windows = [_Windows.cover(same, gap) for same in _by_stride(spans)]
        alone = [span.move for window in windows for span in window.spans if not window.joins_runs_of(span)]
        direct = [move for move in program.moves if move in long or move in alone]
        kept = [span for span in spans if span.move not in alone]
        return cls._of(program, direct, [_Windows.cover(same, gap) for same in _by_stride(kept)])

    @classmethod
    def _of(cls, program: Program, direct: Sequence[Move], groups: Sequence[_Windows]) -> StagingPlan:
        offsets, end = [], 0
        for start, nbytes in ((s, n) for group in groups for s, n in zip(group.starts, group.sizes, strict=True)):
            offset = end + (start - end) % _ALIGNMENT  # a staged byte is aligned as it was in the source
            offsets.append(offset)
            end = offset + nbytes
        staged_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT
        reads, staged, at = [], [], iter(offsets)
        for group in groups:
            places = list(itertools.islice(at, len(group.starts)))
            for start, nbytes, offset in zip(group.starts, group.sizes, places, strict=True):
                reads.append(Move((), start, group.unit_stride, offset, staged_bytes, (), nbytes))
            staged += group.rebase(places, staged_bytes)
        window_bytes = sum(move.nbytes for move in reads)
        return cls(
            program=program,
            direct=tuple(direct),
            windows=tuple(reads),
            staged=tuple(staged),
            staged_bytes=staged_bytes,
            window_bytes=window_bytes,
            read_over_bytes=window_bytes - sum(move.nbytes for move in staged),
        )

    def direct_reads(self, src_ids: Int64Array, dst_ids: Int64Array) -> Descriptors:
        """What is read from the source's arena straight into the destination's, for checked pairs of units."""
        return flatten(self.direct, src_ids, dst_ids)

    def staged_reads(self, src_ids: Int64Array) -> Descriptors:
        """What is read from the source's arena into the staging buffer, whose unit ``i`` serves ``src_ids[i]``."""
        return flatten(self.windows, src_ids, np.arange(src_ids.size))


class StagingPlanner:
    """Plans for the programs of one wire, each made once.

    Args:
        traits: of the transport.
        bytes_per_us: rate of the wire.
    """

    def __init__(self, traits: TransportTraits, bytes_per_us: float = DEFAULT_BYTES_PER_US) -> None:
        self._traits = traits
        self._bytes_per_us = bytes_per_us
        self._plans: dict[int, StagingPlan] = {}

    def plan(self, program: Program) -> StagingPlan:
        """The plan for a program."""
        found = self._plans.get(id(program))
        if found is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            found = self._plans[id(program)] = StagingPlan.build(program, self._traits, self._bytes_per_us)
        return found  # it keeps its program, so that the id stays its own


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
