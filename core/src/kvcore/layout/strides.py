"""Two sequences of byte offsets as few evenly spaced stretches (integers and numpy).

This is the arithmetic under :mod:`kvcore.layout.moves`: where two layouts both advance evenly, many small copies are one
strided copy.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Dims = tuple[tuple[int, int, int], ...]
"""``(count, source stride, destination stride)`` in bytes, outermost first."""


class Piece(NamedTuple):
    """A start on both sides, evenly spaced dimensions, and the contiguous bytes at every point of them."""

    src: int
    dst: int
    dims: Dims
    run: int

    @property
    def nbytes(self) -> int:
        return self.run * math.prod(count for count, _, _ in self.dims)


def even(src: npt.ArrayLike, dst: npt.ArrayLike) -> list[Piece]:
    """Cut two equally long sequences of offsets into evenly spaced stretches, and fold those that repeat evenly."""
    a, b = np.asarray(src, np.int64), np.asarray(dst, np.int64)
    if a.size == 0:
        return []
    step_a, step_b = np.diff(a), np.diff(b)
    turns = np.flatnonzero((np.diff(step_a) != 0) | (np.diff(step_b) != 0)) + 1
    lows = np.concatenate([[0], turns]).tolist() if a.size > 1 else []
    highs = np.concatenate([turns, [a.size - 1]]).tolist() if a.size > 1 else []
    pieces, at = [], 0
    for low, high in zip(lows, highs, strict=True):
        start = max(low, at)
        if high > start:
            dim = (high - start + 1, int(step_a[low]), int(step_b[low]))
            pieces.append(Piece(int(a[start]), int(b[start]), (dim,), 0))
            at = high + 1
    if at < a.size:
        pieces.append(Piece(int(a[at]), int(b[at]), (), 0))
    return _fold(pieces)


def _fold(pieces: list[Piece]) -> list[Piece]:
    """Turn evenly spaced repetitions of equal pieces into one more, outer dimension, until nothing repeats."""
    while True:
        folded, at = [], 0
        while at < len(pieces):
            count, step = _repetitions(pieces, at)
            first = pieces[at]
            folded.append(first._replace(dims=((count, *step), *first.dims)) if count > 1 else first)
            at += count
        if len(folded) == len(pieces):
            return folded
        pieces = folded


def _repetitions(pieces: list[Piece], at: int) -> tuple[int, tuple[int, int]]:
    first, step, count = pieces[at], (0, 0), 1
    for previous, piece in itertools.pairwise(pieces[at:]):
        gap = piece.src - previous.src, piece.dst - previous.dst
        if (piece.dims, piece.run) != (first.dims, first.run) or (count > 1 and gap != step):
            break
        step, count = gap, count + 1
    return count, step


def coalesce(piece: Piece) -> Piece:
    """Order dimensions by destination stride and join those that continue one another."""
    dims = sorted((d for d in piece.dims if d[0] > 1), key=lambda d: (abs(d[2]), abs(d[1])))  # innermost first
    run = piece.run
    while dims and dims[0][1] == dims[0][2] == run:
        run *= dims.pop(0)[0]
    joined: list[tuple[int, int, int]] = []
    for count, s, d in dims:
        if joined and s == joined[-1][0] * joined[-1][1] and d == joined[-1][0] * joined[-1][2]:
            joined[-1] = (joined[-1][0] * count, *joined[-1][1:])
        else:
            joined.append((count, s, d))
    return Piece(piece.src, piece.dst, tuple(reversed(joined)), run)
