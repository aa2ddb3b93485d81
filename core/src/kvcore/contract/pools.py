"""Pools: arenas, how they are copied, and what kernels see of them (no torch at import)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvcore.contract.base import Fence, Support, Unique
from kvcore.layout import Buffer, Int64Array, Layout, Placement

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from kvcore.layout.moves import Program


@dataclass(frozen=True)
class Piece:
    """Bytes that lie side by side in every unit: unit ``u`` has them at ``base + u * unit_stride``."""

    base: int
    unit_stride: int
    nbytes: int
    num_units: int


class CopyQueue(ABC):
    """Copies between an arena that the CPU cannot address and host memory.

    Whatever is issued starts after the work of the last :meth:`mark` of every thread, ends some time later, and may be
    waited for by the fence it returns. Host memory given to a copy is left alone until then, by both sides. Safe to call
    from any thread; :meth:`mark` speaks of the thread that calls it.

    Units are copied one after the other: unit ``i`` of ``n`` has its pieces at ``i * sum(nbytes of the pieces)``, in the
    order of the pieces. Ids are int64 ``[n]``, checked by the caller.
    """

    @abstractmethod
    def mark(self) -> Fence:
        """Note what this thread has given the device to do so far: copies issued from now on come after it.

        Returns its fence.
        """

    @abstractmethod
    def gather(self, pieces: Sequence[Piece], units: Int64Array, dst: npt.NDArray[np.uint8]) -> Fence:
        """Copy units of the arena into ``dst [n * bytes of a unit]``."""

    @abstractmethod
    def scatter(self, pieces: Sequence[Piece], units: Int64Array, src: npt.NDArray[np.uint8]) -> Fence:
        """Copy ``src [n * bytes of a unit]`` into units of the arena."""

    @abstractmethod
    def apply(self, program: Program, src: npt.NDArray[np.uint8], dst_units: Int64Array) -> Fence:
        """Run a program on the device: unit ``i`` of ``src`` goes to ``dst_units[i]`` of the arena.

        ``src`` is the program's source arena as far as it is needed (units ``0 … n - 1``); strides of its moves are not
        negative. No byte of the arena changes that the program does not write.
        """

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Make host memory fast for this device's copies, until what is returned is called. By default it is already."""
        return _nothing


def _nothing() -> None:
    return None


class Arena(Unique, ABC):
    """One piece of device memory, owned until :meth:`close`.

    Attributes:
        nbytes: size.
        address: address of the first byte in this process.
        device: ``cpu``, ``cuda:0``, …
        fd: file descriptor that another process can map read-only, or None.
    """

    nbytes: int
    address: int
    device: str
    fd: int | None = None

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The whole arena as ``uint8 [nbytes]``, sharing memory."""

    @abstractmethod
    def array(self) -> npt.NDArray[np.uint8]:
        """The same for numpy; raises UnsupportedError for memory the CPU cannot address."""

    def queue(self) -> CopyQueue | None:
        """What copies between this arena and host memory. None, the default, where :meth:`array` gives the bytes."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once copies under way have ended. Idempotent."""


class PoolBuilder(ABC):
    """How the regions of a group are allocated.

    Attributes:
        name: the id used in configurations.
    """

    name: ClassVar[str]

    @abstractmethod
    def supports(self, device: str, layout: Layout) -> Support:
        """Whether this builder can serve the device and layout."""

    @abstractmethod
    def allocate(self, nbytes: int, device: str) -> Arena:
        """Allocate zeroed, populated memory."""

    def total_bytes(self, device: str) -> int | None:
        """Most bytes that arenas of a device could ever hold together, were nothing else there; None, the default, where
        that is not known or the device is another builder's. A cache that asks for more is refused before anything is sized
        for it."""
        return None

    def buffer_infos(self, layout: Layout, placement: Placement) -> tuple[Buffer, ...]:
        """Every buffer of the pool, for transports and backups. Derived from the layout."""
        return placement.buffers


class PoolView(ABC):
    """What a kernel sees of a pool: typed views of the arena, resolved once when the kernel is bound."""

    layout: Layout
    placement: Placement
    device: str

    @abstractmethod
    def field(self, layer: int, region: str, field: str) -> torch.Tensor:
        """Strided view ``[units, *physical shape]`` in the storage dtype (1-byte dtypes as ``uint8``, ``u16`` as ``int16``).

        Index it with ids of the region's own unit ranges only: below its first one other bytes of the arena may show.
        """

    @abstractmethod
    def units(self, layer: int, region: str) -> torch.Tensor:
        """Raw bytes ``uint8 [units, unit_bytes]``, strided."""

    @abstractmethod
    def envelopes(self) -> torch.Tensor:
        """Page-major arenas whose regions all have the same unit ranges only: ``uint8 [units, envelope_bytes]``."""

    @abstractmethod
    def unit_views(self, range_name: str) -> tuple[torch.Tensor, ...]:
        """The fewest views ``uint8 [units, bytes]`` that hold every byte of the units of a range.

        Unit ids below the range's first may show other bytes of the arena: index them with ids of the range only.
        """
