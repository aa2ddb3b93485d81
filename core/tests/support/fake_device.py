"""A device without a device: memory that kvcore cannot address, and copies that end late and in any order.

What a missing wait would do to a real device shows here as wrong bytes: a copy out takes what was there at the last mark
(not what was written after it), and takes it when the copy ends (not when it is issued); until then its host memory is
garbage. A copy in reads its host memory when it ends.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvcore.contract import FULL, Arena, CopyQueue, Fence, PoolBuilder, Support, unsupported
from kvcore.errors import UnsupportedError

GARBAGE = 0xA5


class LateFence(Fence):
    """Ends after some polls, or when it is waited for."""

    def __init__(self, device: Device, work: Callable[[], None], polls: int) -> None:
        self.device, self.work, self.polls = device, work, polls
        self.host = -1
        self.over = threading.Event()
        self.error: Exception | None = None
        self.claim = threading.Lock()

    def finish(self) -> None:
        with self.claim:
            if self.over.is_set():
                return
            try:
                self.work()
            except Exception as error:  # noqa: BLE001 -- raised by wait()
                self.error = error
            self.device.pending.discard(self)
            self.over.set()

    def done(self) -> bool:
        if self.over.is_set():
            return True
        if self.device.stuck:
            return False
        self.polls -= 1
        if self.polls < 0:
            self.finish()
        return self.over.is_set()

    def wait(self) -> None:
        while self.device.stuck and not self.over.is_set():
            self.over.wait(0.005)
        self.finish()
        if self.error is not None:
            raise self.error


class Device(CopyQueue):
    """Memory of ``nbytes``, and its copies.

    Attributes:
        live: the bytes as the device's own work sees them.
        settled: the bytes as of the last mark; what copies out see, unless ``strict`` is False.
        stuck: no copy ends.
        fail: message of the error that every copy issued from now on ends with.
        pinned: host memory that is pinned now, by address.
        slow: copies from or to host memory that was not pinned.
    """

    def __init__(self, nbytes: int, *, strict: bool = True, seed: int = 0) -> None:
        self.live = np.zeros(nbytes, np.uint8)
        self.settled = self.live.copy() if strict else self.live
        self.strict = strict
        self.stuck = False
        self.fail = ""
        self.pending: set[LateFence] = set()
        self.pinned: dict[int, int] = {}
        self.slow = 0
        self.marks = 0
        self.issued: list[str] = []
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()

    def mark(self) -> Fence:
        self.marks += 1
        if self.strict:
            self.settled[:] = self.live
        return LateFence(self, lambda: None, 3)

    def gather(self, pieces: Sequence[Any], units: Any, dst: Any) -> Fence:
        dst[:] = GARBAGE

        def work() -> None:
            dst[:] = np.concatenate([self.settled[at] for at in self._where(pieces, units)])

        return self._issue("gather", work, dst)

    def scatter(self, pieces: Sequence[Any], units: Any, src: Any) -> Fence:
        def work() -> None:
            start = 0
            for at in self._where(pieces, units):
                size = at.stop - at.start
                self._write(at, src[start : start + size])
                start += size

        return self._issue("scatter", work, src)

    def apply(self, program: Any, src: Any, dst_units: Any) -> Fence:
        def work() -> None:
            for n, unit in enumerate(dst_units.tolist()):
                for move in program.moves:
                    for index in np.ndindex(*(count for count, _, _ in move.dims)):
                        s = move.src_offset + n * move.src_unit_stride
                        d = move.dst_offset + unit * move.dst_unit_stride
                        s += sum(i * dim[1] for i, dim in zip(index, move.dims, strict=True))
                        d += sum(i * dim[2] for i, dim in zip(index, move.dims, strict=True))
                        self._write(slice(d, d + move.run_bytes), src[s : s + move.run_bytes])

        return self._issue("apply", work, src)

    def pin(self, memory: Any) -> Callable[[], None]:
        address = memory.ctypes.data
        assert address not in self.pinned, "pinned twice"
        self.pinned[address] = memory.nbytes
        return lambda: self._unpin(address)

    def _unpin(self, address: int) -> None:
        size = self.pinned.pop(address)
        under = [fence for fence in self.pending if address <= fence.host < address + size]
        assert not under, "unpinned under a copy"

    def _where(self, pieces: Sequence[Any], units: Any) -> list[slice]:
        out = []
        for unit in units.tolist():
            for piece in pieces:
                assert 0 <= unit < piece.num_units
                start = piece.base + unit * piece.unit_stride
                assert start + piece.nbytes <= len(self.live)
                out.append(slice(start, start + piece.nbytes))
        return out

    def _write(self, at: slice, data: Any) -> None:
        assert len(self.live[at]) == len(data)
        self.live[at] = data
        self.settled[at] = data

    def _issue(self, what: str, work: Callable[[], None], host: Any) -> Fence:
        at = host.ctypes.data
        if not any(start <= at and at + host.nbytes <= start + size for start, size in self.pinned.items()):
            self.slow += 1
        if self.fail:
            message = self.fail

            def work() -> None:
                raise RuntimeError(message)

        with self._lock:
            fence = LateFence(self, work, int(self._rng.integers(0, 4)))
            fence.host = at
            self.issued.append(what)
            self.pending.add(fence)
        return fence


class FakeArena(Arena):
    """An arena of a device. Tests may look into it, kvcore may not."""

    def __init__(self, nbytes: int, *, strict: bool = True) -> None:
        self.nbytes, self.device, self.fd = nbytes, "cpu", None
        self.fake = Device(nbytes, strict=strict)
        self.address = int(self.fake.live.ctypes.data)
        self.closed = False

    def tensor(self) -> Any:
        import torch

        return torch.from_numpy(self.fake.live)

    def array(self) -> Any:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith("kvcore.") and not caller.startswith("kvcore.testing"):
            raise UnsupportedError("memory of the fake device", caller=caller)
        return self.fake.live

    def queue(self) -> Device:
        return self.fake

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            assert not self.fake.pending, "copies under way when the arena went"


class FakePool(PoolBuilder):
    """Builds arenas on the fake device, or of ``kinds`` in turn; keeps them for the test to look into."""

    name = "fake"

    def __init__(self, *kinds: Callable[[int], Arena], strict: bool = True) -> None:
        self.kinds = kinds or (lambda nbytes: FakeArena(nbytes, strict=strict),)
        self.made: list[Any] = []

    def supports(self, device: str, layout: Any) -> Support:
        return FULL if device == "cpu" else unsupported("the fake device is called cpu")

    def allocate(self, nbytes: int, device: str) -> Arena:
        self.made.append(self.kinds[len(self.made) % len(self.kinds)](nbytes))
        return self.made[-1]


def registry_of(builder: PoolBuilder) -> Any:
    """The built-ins, with this pool builder in place of theirs."""
    from kvcore.plugins import load_plugins
    from kvcore.testing.harness import Subject

    class Only(Subject):
        def pool_builders(self) -> list[PoolBuilder]:
            return [builder]

        def kernels(self) -> list[Any]:
            return self._base.kernels()

    return Only(load_plugins(()))
