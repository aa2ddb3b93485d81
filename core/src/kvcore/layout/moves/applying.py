"""Strided moves applied to units: copied in this process, or written out as flat descriptors (no torch).

:mod:`kvcore.layout.moves` finds the moves of a pair of layouts; here is what a move is and what it costs to carry out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcore.errors import LayoutError
from kvcore.layout.fields import Int64Array
from kvcore.layout.strides import Dims

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


def unrolled(move: Move, dims: Collection[int]) -> Iterator[Move]:
    """A move as moves without some of its dimensions, which are given by their places in ``move.dims``."""
    kept = tuple(dim for n, dim in enumerate(move.dims) if n not in dims)
    gone = [dim for n, dim in enumerate(move.dims) if n in dims]
    for point in itertools.product(*(range(count) for count, _, _ in gone)):
        src = sum(at * step for at, (_, step, _) in zip(point, gone, strict=True))
        dst = sum(at * step for at, (_, _, step) in zip(point, gone, strict=True))
        yield replace(move, src_offset=move.src_offset + src, dst_offset=move.dst_offset + dst, dims=kept)


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


def flatten(moves: Sequence[Move], src_ids: Int64Array, dst_ids: Int64Array) -> Descriptors:
    """Flat copies for pairs of units, in order of destination, merged where both sides are contiguous."""
    order = np.argsort(dst_ids, kind="stable")
    starts = [_run_starts_of(move, src_ids[order], dst_ids[order]) for move in moves if order.size]
    # Moves that repeat at the same steps, such as two regions in every layer, take turns: then nothing is left to sort.
    groups: dict[tuple[int, int], list[_Runs]] = {}
    for runs in sorted(starts, key=lambda runs: int(runs.dst_steps[0] + runs.dst_inner[0])):
        steps = runs.dst_steps
        groups.setdefault((steps.size, int(steps[-1] - steps[0])), []).append(runs)
    src, dst, nbytes = np.empty((3, sum(runs.size for runs in starts)), np.int64)
    at = 0
    for (rounds, _), group in groups.items():
        width = sum(runs.src_inner.size for runs in group)
        blocks = [column[at : at + rounds * width].reshape(rounds, width) for column in (src, dst, nbytes)]
        at, column = at + rounds * width, 0
        for runs in group:
            part = slice(column, column + runs.src_inner.size)
            np.add(runs.src_steps[:, None], runs.src_inner, out=blocks[0][:, part])
            np.add(runs.dst_steps[:, None], runs.dst_inner, out=blocks[1][:, part])
            blocks[2][:, part] = runs.nbytes
            column = part.stop
    return _merge_flat(src, dst, nbytes)


def copy_units(
    moves: Sequence[Move], src: Bytes, dst: Bytes, units: tuple[int, int], src_ids: Int64Array, dst_ids: Int64Array
) -> None:
    """Copy pairs of units between two arenas of this process.

    Args:
        moves: what to copy of each pair.
        src, dst: the arenas, large enough for ``units`` units (source, destination).
        src_ids, dst_ids: ``[N]`` unit ids, checked.
    """
    if not src_ids.size:
        return
    starts = _run_starts(src_ids, dst_ids)
    scattered = 2 * starts.size > src_ids.size
    strided = []
    for move in moves:
        views = _views(move, src, dst, units)
        if scattered and move.dense and src_ids.size > 1 and bool((np.diff(dst_ids) == 1).all()):
            _take(*views, src_ids, int(dst_ids[0]))
        elif scattered and not move.dims and src_ids.size > 1 and bool((np.diff(src_ids) == 1).all()):
            views[1][dst_ids] = views[0][src_ids[0] : src_ids[0] + src_ids.size]  # one loop of numpy's, not of Python's
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


def _run_starts(src: Int64Array, dst: Int64Array) -> Int64Array:
    """Positions where a run of units that advances by one on both sides begins."""
    breaks = np.flatnonzero((np.diff(src) != 1) | (np.diff(dst) != 1)) + 1
    return np.concatenate([np.zeros(1, np.int64), breaks])


class _Runs(NamedTuple):
    """Where the runs of a move start: ``steps[i] + inner[j]`` on either side."""

    src_steps: Int64Array
    dst_steps: Int64Array
    src_inner: Int64Array
    dst_inner: Int64Array
    nbytes: int

    @property
    def size(self) -> int:
        return self.src_steps.size * self.src_inner.size


def _run_starts_of(move: Move, src_ids: Int64Array, dst_ids: Int64Array) -> _Runs:
    """Every run of a move: in order of destination where units and dimensions do not interleave."""
    axes = [(abs(d), np.arange(count) * s, np.arange(count) * d) for count, s, d in move.dims]
    axes.append((move.dst_unit_stride, src_ids * move.src_unit_stride, dst_ids * move.dst_unit_stride))
    axes.sort(key=lambda axis: -axis[0])
    src = dst = np.zeros(1, np.int64)
    for _, src_steps, dst_steps in axes[1:]:
        src, dst = np.add.outer(src, src_steps).reshape(-1), np.add.outer(dst, dst_steps).reshape(-1)
    _, src_steps, dst_steps = axes[0]
    return _Runs(src_steps, dst_steps, src + move.src_offset, dst + move.dst_offset, move.run_bytes)


def _merge_flat(src: Int64Array, dst: Int64Array, nbytes: Int64Array) -> Descriptors:
    if not dst.size:
        return Descriptors(src, dst, nbytes)
    if bool((dst[1:] < dst[:-1]).any()):
        order = np.argsort(dst, kind="stable")  # moves are sorted already, so that this only has to interleave them
        src, dst, nbytes = src[order], dst[order], nbytes[order]
    apart = dst[:-1] + nbytes[:-1] != dst[1:]
    apart |= src[:-1] + nbytes[:-1] != src[1:]
    if bool(apart.all()):
        return Descriptors(src, dst, nbytes)
    starts = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(apart) + 1])
    return Descriptors(src[starts], dst[starts], np.add.reduceat(nbytes, starts))


def check_arena(arena: Bytes, nbytes: int, side: str) -> None:
    """Raise LayoutError unless ``arena`` is a contiguous ``uint8`` array of at least ``nbytes`` bytes."""
    if arena.dtype != np.uint8 or arena.ndim != 1 or not arena.flags.c_contiguous:
        raise LayoutError(
            "an arena is a contiguous array of bytes", side=side, dtype=str(arena.dtype), shape=arena.shape
        )
    if arena.nbytes < nbytes:
        raise LayoutError("the arena is smaller than its placement", side=side, expected=nbytes, got=arena.nbytes)


_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_LONG_RUN_BYTES = 2048  # from here on a call of memcpy for each run costs nothing beside the run


def _views(move: Move, src: Bytes, dst: Bytes, units: tuple[int, int]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Views ``[unit, *dims]`` or ``[unit, *dims, words]`` of both arenas, in the element that numpy copies fastest."""
    strides = [s for dim in move.dims for s in dim[1:]]
    starts = (src.ctypes.data + move.src_offset, dst.ctypes.data + move.dst_offset)
    word = math.gcd(8, move.run_bytes, move.src_unit_stride, move.dst_unit_stride, *strides, *starts)
    counts = tuple(count for count, _, _ in move.dims)
    inner: tuple[int, ...] = ()
    if word == move.run_bytes:
        element = _WORDS[word]
    elif move.run_bytes < _LONG_RUN_BYTES and move.dims:
        element = np.dtype((np.void, move.run_bytes))  # else numpy would start a loop of its own for every short run
    else:
        element, counts, inner = _WORDS[word], (*counts, move.run_bytes // word), (word,)
    sides = (
        (src, units[0], move.src_offset, move.src_unit_stride, tuple(s for _, s, _ in move.dims)),
        (dst, units[1], move.dst_offset, move.dst_unit_stride, tuple(d for _, _, d in move.dims)),
    )
    src_view, dst_view = (
        np.ndarray(
            (number, *counts),
            element,
            buffer=arena.data,
            offset=offset,
            strides=(unit_stride, *steps, *inner),
        )
        for arena, number, offset, unit_stride, steps in sides
    )
    return src_view, dst_view


def _take(src: npt.NDArray[Any], dst: npt.NDArray[Any], src_ids: Int64Array, first: int) -> None:
    """Gather scattered units into one contiguous stretch.

    ``mode="clip"``: the ids are checked already, and any other mode would make numpy go through a buffer.
    """
    np.take(src, src_ids, axis=0, out=dst[first : first + src_ids.size], mode="clip")
