"""Arenas in the memory of a CUDA device, allocated by torch."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import numpy as np
import numpy.typing as npt
import torch

from kvcore.builtin.pools.device_copies import Event, Streams, TorchCopyQueue
from kvcore.contract import FULL, Arena, CopyQueue, PoolBuilder, Support, unsupported
from kvcore.errors import CapacityError, ConfigError, StaleHandleError, UnsupportedError
from kvcore.layout import Int64Array, Layout

_DEVICE = re.compile(r"cuda(?::(0|[1-9][0-9]*))?")

# Torch types these as returning nothing in particular.
_cuda: Any = torch.cuda


class CudaStreams(Streams):
    """One stream of copies beside the engine's; events order the two on the device, so no thread waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _cuda.Stream(device)

    def written(self) -> Event | None:
        """An event on the calling thread's current stream; None while a graph is captured on it."""
        if torch.cuda.is_current_stream_capturing():
            return None
        return self._event(torch.cuda.current_stream(self._device))

    @contextmanager
    def copying(self, after: Sequence[Event]) -> Iterator[None]:
        """Issue to the stream of the copies."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for event in after:
                self._stream.wait_event(cast(Any, event))
            yield

    def copied(self) -> Event:
        """An event after everything issued to the stream of the copies."""
        return self._event(self._stream)

    def _event(self, stream: torch.cuda.Stream) -> Event:
        # Blocking: a thread that waits for a copy sleeps instead of taking a core from the engine.
        event = _cuda.Event(blocking=True)
        event.record(stream)
        return cast(Event, event)

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Register host memory with the driver. Raises CapacityError where the system has no more to pin."""
        if not memory.nbytes:
            return _nothing
        runtime, address = _cuda.cudart(), int(memory.ctypes.data)
        with torch.cuda.device(self._device):
            code = int(runtime.cudaHostRegister(address, memory.nbytes, 0))
        if code:
            raise CapacityError(
                "host memory cannot be pinned",
                nbytes=memory.nbytes,
                code=code,
                remedy="set aside less memory for copies: retraction.options, transfer.options.stage_bytes",
            )
        once = threading.Lock()

        def unpin() -> None:
            if once.acquire(blocking=False):
                runtime.cudaHostUnregister(address)

        return unpin

    def upload(self, ids: Int64Array) -> torch.Tensor:
        """Through pinned memory of torch's own, which it reuses when the stream has passed."""
        pinned = torch.from_numpy(np.ascontiguousarray(ids)).pin_memory()
        return pinned.to(self._device, non_blocking=True)


def _nothing() -> None:
    return None


class CudaArena(Arena):
    """Zeroed device memory of torch. :meth:`array` is refused: the CPU reaches it through :meth:`queue`."""

    fd: int | None = None

    def __init__(self, nbytes: int, device: torch.device) -> None:
        if nbytes < 1:
            raise ConfigError("an arena needs at least one byte", nbytes=nbytes)
        try:
            # Memory made in inference mode could never be written outside of it.
            with torch.inference_mode(False):
                raw = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(device)
            raise CapacityError(
                "not enough device memory for an arena",
                nbytes=nbytes,
                device=str(device),
                available_bytes=free,
                total_bytes=total,
                remedy="give the cache less memory",
            ) from error
        self.nbytes, self.device = nbytes, str(device)
        self.address = int(raw.data_ptr())
        self._raw: torch.Tensor | None = raw
        self._queue = TorchCopyQueue(raw, CudaStreams(device))
        self._queue.mark()  # the zeros

    def tensor(self) -> torch.Tensor:
        """The whole arena; raises StaleHandleError after :meth:`close`."""
        if self._raw is None:
            raise StaleHandleError("the arena is closed", nbytes=self.nbytes)
        return self._raw

    def array(self) -> npt.NDArray[np.uint8]:
        """Refused: UnsupportedError."""
        raise UnsupportedError(
            "the CPU cannot address this arena", device=self.device, remedy="copy through the arena's queue()"
        )

    def queue(self) -> CopyQueue:
        """Copies on a stream of their own."""
        return self._queue

    def close(self) -> None:
        """Wait for copies under way and give the memory back to torch. Idempotent."""
        if self._raw is not None:
            self._raw = None
            self._queue.close()


class CudaPool(PoolBuilder):
    """Arenas on ``cuda`` and ``cuda:N``."""

    name: ClassVar[str] = "torch_cuda"

    def supports(self, device: str, layout: Layout) -> Support:
        """CUDA devices that torch sees, any layout."""
        match = _DEVICE.fullmatch(device)
        if match is None:
            return unsupported(f"serves cuda and cuda:N, the device is {device}")
        if not torch.cuda.is_available():
            return unsupported(f"torch {torch.__version__} sees no CUDA device")
        count = torch.cuda.device_count()
        if int(match[1] or 0) >= count:
            return unsupported(f"there is no {device}: torch sees {count} CUDA devices")
        return FULL

    def allocate(self, nbytes: int, device: str) -> Arena:
        """Allocate zeroed memory. Raises CapacityError with what is free where it does not fit."""
        index = _index(device)
        if index is None:
            raise ConfigError("not a CUDA device", device=device)
        return CudaArena(nbytes, torch.device("cuda", index))

    def total_bytes(self, device: str) -> int | None:
        """The memory of the device."""
        index = _index(device)
        if index is None or index >= torch.cuda.device_count():
            return None
        return int(torch.cuda.mem_get_info(index)[1])


def _index(device: str) -> int | None:
    match = _DEVICE.fullmatch(device)
    if match is None:
        return None
    return int(match[1]) if match[1] is not None else torch.cuda.current_device() if torch.cuda.is_available() else 0
