"""Copies between a device's arena and host memory, in torch: gathered on the device, moved in one piece a chunk.

What differs from device to device (streams, events, pinning) is behind :class:`Streams`; everything else is torch and
runs on any device, the CPU included.
"""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.contract import DONE, CopyQueue, Fence, Piece
from kvcore.errors import StaleHandleError, TransferError
from kvcore.layout import Int64Array
from kvcore.layout.moves import Move, Program

Bytes = npt.NDArray[np.uint8]

_BOUNCE_BYTES = 16 << 20
"""Device memory that units are gathered into on their way: a chunk of a copy, at least one unit."""

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def query(self) -> bool:
        """Whether the device has reached it. Raises RuntimeError where the device failed."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for it."""


class Streams(ABC):
    """What copies need of a device."""

    @abstractmethod
    def written(self) -> Event | None:
        """A new event on the calling thread's current stream; None where its work is being recorded, not done."""

    @abstractmethod
    def copying(self, after: Sequence[Event]) -> AbstractContextManager[None]:
        """Torch's work inside goes to the stream of the copies, and waits on the device for ``after``."""

    @abstractmethod
    def copied(self) -> Event:
        """A new event on the stream of the copies."""

    @abstractmethod
    def pin(self, memory: Bytes) -> Callable[[], None]:
        """See :meth:`kvcore.contract.CopyQueue.pin`."""

    @abstractmethod
    def upload(self, ids: Int64Array) -> torch.Tensor:
        """Ids on the device, in the order of the current stream, without waiting for it."""


class EventFence(Fence):
    """The work before an event. Keeps what that work uses alive until it is done."""

    def __init__(self, event: Any, *keep: object) -> None:
        self._event = event
        self._keep: tuple[object, ...] = keep
        self._error: TransferError | None = None
        self._over = False

    def done(self) -> bool:
        if not self._over:
            try:
                self._over = bool(self._event.query())
            except RuntimeError as error:
                self._fail(error)
            if self._over:
                self._keep = ()
        return self._over

    def wait(self) -> None:
        if not self._over:
            try:
                self._event.synchronize()
            except RuntimeError as error:
                self._fail(error)
            self._over, self._keep = True, ()
        if self._error is not None:
            raise self._error

    def _fail(self, error: RuntimeError) -> None:
        # A device that has failed does nothing more: the work is over.
        self._over = True
        self._error = TransferError("the device failed", cause=str(error))


class TorchCopyQueue(CopyQueue):
    """Copies of one arena.

    Args:
        arena: the whole arena, ``uint8 [nbytes]``.
        streams: of its device.
        bounce_bytes: device memory for units on their way.
    """

    def __init__(self, arena: torch.Tensor, streams: Streams, *, bounce_bytes: int = _BOUNCE_BYTES) -> None:
        self._arena = arena
        self._streams = streams
        self._bounce_bytes = bounce_bytes
        self._bounce: torch.Tensor | None = None
        self._lock = threading.Lock()  # one copy is issued at a time: they share the bounce buffer, in stream order
        self._written: dict[int, Event] = {}  # the last mark of every thread, by its id
        self._last: Fence = DONE
        self._closed = False

    def mark(self) -> Fence:
        """See :class:`kvcore.contract.CopyQueue`. While a graph is captured nothing is noted: the replay is marked."""
        event = self._streams.written()
        if event is None:
            return DONE
        self._written[threading.get_ident()] = event
        return EventFence(event)

    def gather(self, pieces: Sequence[Piece], units: Int64Array, dst: Bytes) -> Fence:
        """See :class:`kvcore.contract.CopyQueue`."""
        if not len(units):
            return DONE
        host = torch.from_numpy(dst).view(len(units), -1)

        def copy(ids: torch.Tensor, lo: int, hi: int, buffer: torch.Tensor) -> None:
            for rows, columns in self._columns(pieces, buffer):
                torch.index_select(rows, 0, ids, out=columns)
            host[lo:hi].copy_(buffer, non_blocking=True)

        return self._run(units, host.shape[1], copy, dst)

    def scatter(self, pieces: Sequence[Piece], units: Int64Array, src: Bytes) -> Fence:
        """See :class:`kvcore.contract.CopyQueue`."""
        if not len(units):
            return DONE
        host = torch.from_numpy(src).view(len(units), -1)

        def copy(ids: torch.Tensor, lo: int, hi: int, buffer: torch.Tensor) -> None:
            buffer.copy_(host[lo:hi], non_blocking=True)
            for rows, columns in self._columns(pieces, buffer):
                rows.index_copy_(0, ids, columns)

        return self._run(units, host.shape[1], copy, src)

    def apply(self, program: Program, src: Bytes, dst_units: Int64Array) -> Fence:
        """See :class:`kvcore.contract.CopyQueue`."""
        if not len(dst_units):
            return DONE
        size = program.src_bytes // program.src_units
        host = torch.from_numpy(src[: len(dst_units) * size]).view(len(dst_units), size)

        def copy(ids: torch.Tensor, lo: int, hi: int, buffer: torch.Tensor) -> None:
            buffer.copy_(host[lo:hi], non_blocking=True)
            for move in program.moves:
                source, target = _sides(move, buffer, hi - lo, self._arena, program.dst_units)
                target.index_copy_(0, ids, source)

        return self._run(dst_units, size, copy, src)

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """See :class:`kvcore.contract.CopyQueue`."""
        return self._streams.pin(memory)

    def close(self) -> None:
        """Wait for every copy, whatever became of it, and let go of the arena. Copies issued later are refused."""
        with self._lock:
            # Whoever was told of a copy's failure has waited for it; here only its end matters.
            with contextlib.suppress(TransferError):
                self._last.wait()
            self._closed, self._bounce = True, None
            self._arena = self._arena[:0].clone()

    def _run(
        self,
        units: Int64Array,
        size: int,
        copy: Callable[[torch.Tensor, int, int, torch.Tensor], None],
        host: Bytes,
    ) -> Fence:
        step = max(1, self._bounce_bytes // size)
        # Views of an arena made in inference mode may be written in it and outside of it.
        marks = list(self._written.values())
        with self._lock, torch.inference_mode(False), torch.no_grad(), self._streams.copying(marks):
            if self._closed:
                raise StaleHandleError("the arena is closed")
            ids = self._streams.upload(units)
            for lo in range(0, len(units), step):
                hi = min(lo + step, len(units))
                copy(ids[lo:hi], lo, hi, self._buffer((hi - lo) * size).view(hi - lo, size))
            self._last = EventFence(self._streams.copied(), host, ids)
            return self._last

    def _buffer(self, nbytes: int) -> torch.Tensor:
        """Memory that the stream of the copies uses in its order, so that a chunk may follow the last at once."""
        if self._bounce is None or self._bounce.numel() < nbytes:
            self._bounce = torch.empty(nbytes, dtype=torch.uint8, device=self._arena.device)
        return self._bounce[:nbytes]

    def _columns(self, pieces: Sequence[Piece], buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Every piece as rows of the arena and as columns of ``buffer [units, bytes]``, in the widest words that fit."""
        start = 0
        for piece in pieces:
            size, dtype = _word(piece.base, piece.unit_stride, piece.nbytes, start, buffer.shape[1])
            words = _words(self._arena, size, dtype)
            rows = words.as_strided(
                (piece.num_units, piece.nbytes // size), (piece.unit_stride // size, 1), piece.base // size
            )
            columns = buffer.view(dtype)[:, start // size : (start + piece.nbytes) // size]
            yield rows, columns
            start += piece.nbytes


def _word(*numbers: int) -> tuple[int, torch.dtype]:
    """The widest word that all offsets, strides and sizes are multiples of: devices copy words faster than bytes."""
    return next(word for word in _WORDS if not any(number % word[0] for number in numbers))


def _words(memory: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    return memory[: memory.numel() // size * size].view(dtype)


def _sides(
    move: Move, buffer: torch.Tensor, count: int, arena: torch.Tensor, num_units: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A move as ``[units, *dims, run]`` on either side."""
    numbers = [move.src_offset, move.src_unit_stride, move.dst_offset, move.dst_unit_stride, move.run_bytes]
    size, dtype = _word(*numbers, *(stride for _, *strides in move.dims for stride in strides))
    shape = (*(n for n, _, _ in move.dims), move.run_bytes // size)
    source = _words(buffer.view(-1), size, dtype).as_strided(
        (count, *shape),
        (move.src_unit_stride // size, *(src // size for _, src, _ in move.dims), 1),
        move.src_offset // size,
    )
    target = _words(arena, size, dtype).as_strided(
        (num_units, *shape),
        (move.dst_unit_stride // size, *(dst // size for _, _, dst in move.dims), 1),
        move.dst_offset // size,
    )
    return source, target
