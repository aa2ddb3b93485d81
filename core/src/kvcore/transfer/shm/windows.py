"""Reading memory that cannot be mapped: which bytes of a unit a program reads, and the program over a copy of them.

A program reads its source arena where it lies. Where only copies of units can be had, its windows say which bytes of
every unit those are, and the same moves run from a staging area in which staged unit ``i`` has its windows side by side
at ``i * unit_bytes`` (no torch, no I/O).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvcore.contract import Piece
from kvcore.layout.moves import Move, Program
from kvcore.layout.moves.applying import unrolled

_WIDE_GAP = 4096
"""Bytes between runs that are worth a piece of their own; shorter ones are staged too."""


@dataclass(frozen=True)
class Windows:
    """What a program reads of a unit.

    Attributes:
        pieces: the bytes, as pieces of the source arena; few and without overlap.
        unit_bytes: their sum: bytes of a staged unit.
        read_over: bytes a unit that are staged and that no move reads.
        _program: the moves, from a staging area of any number of units.
    """

    pieces: tuple[Piece, ...]
    unit_bytes: int
    read_over: int
    _program: Program

    def program(self, capacity: int) -> Program:
        """The program from a staging area of ``capacity`` units into the destination."""
        return replace(self._program, src_units=capacity, src_bytes=capacity * self.unit_bytes)


def windows_of(program: Program) -> Windows:
    """Return the windows of a program's source units.

    A move that walks out of its unit (over the layers of a layer-major arena) or over wide gaps (the other ranks' heads)
    becomes several that do not; strides of the moves that result are positive on both sides.
    """
    parts = [part for move in program.moves for part in _within(move)]
    spans = sorted((part.src_unit_stride, part.src_offset, part.src_offset + _extent(part)) for part in parts)
    pieces: list[Piece] = []
    for stride, start, stop in spans:
        last = pieces[-1] if pieces else None
        if last is not None and last.unit_stride == stride and start <= last.base + last.nbytes:
            size = max(last.nbytes, stop - last.base)
            if size <= stride:
                pieces[-1] = replace(last, nbytes=size)
                continue
        pieces.append(Piece(start, stride, stop - start, program.src_units))
    starts = [0, *itertools.accumulate(piece.nbytes for piece in pieces)]
    unit_bytes = starts[-1]
    moves = tuple(_moved(part, pieces, starts, unit_bytes) for part in parts)
    read = sum(part.nbytes for part in parts)
    staged = replace(program, moves=moves, src_units=0, src_bytes=0)
    return Windows(tuple(pieces), unit_bytes, max(0, unit_bytes - read), staged)


def _within(move: Move) -> Iterator[Move]:
    """The move as moves that stay inside their source unit, and leave its wide gaps out."""
    return unrolled(move, set(_split_dims(move)))


def _split_dims(move: Move) -> Iterator[int]:
    extent = move.run_bytes
    for n in sorted(range(len(move.dims)), key=lambda n: move.dims[n][1]):
        count, src, dst = move.dims[n]
        if not 0 < src < move.src_unit_stride or dst <= 0 or src - extent >= _WIDE_GAP:
            yield n
        else:
            extent += (count - 1) * src


def _extent(move: Move) -> int:
    return move.run_bytes + sum((count - 1) * src for count, src, _ in move.dims)


def _moved(move: Move, pieces: list[Piece], starts: list[int], unit_bytes: int) -> Move:
    """The move from the staged copy of the piece that it lies in."""
    for piece, start in zip(pieces, starts, strict=False):
        inside = move.src_offset - piece.base
        if piece.unit_stride == move.src_unit_stride and inside >= 0 and inside + _extent(move) <= piece.nbytes:
            return replace(move, src_offset=start + inside, src_unit_stride=unit_bytes)
    raise AssertionError("every move lies in a piece that was made of it")
