"""Retraction backends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from kvcore.contract.base import Fence, Support
from kvcore.contract.pools import CopyQueue
from kvcore.layout import Layout

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class UnitBlock(ABC):
    """The units of one component set of one request, as a backup sees them: bytes to copy out and in again.

    Attributes:
        group, components: what it is, for messages and accounting.
        num_units, nbytes: its size; ``nbytes`` is what :meth:`copy_out` writes.
    """

    group: str
    components: tuple[str, ...]
    num_units: int
    nbytes: int

    @abstractmethod
    def copy_out(self, dst: npt.NDArray[np.uint8]) -> Fence:
        """Gather the units into ``dst [nbytes]``."""

    @abstractmethod
    def copy_in(self, src: npt.NDArray[np.uint8]) -> Fence:
        """Scatter ``src [nbytes]`` into the units."""

    def cut(self, first: int, count: int) -> UnitBlock | None:
        """The block of the units ``[first, first + count)``, so that a backend can keep them in several pieces.

        Every unit has the same number of bytes, in an order that depends on how many are copied together: a restore cuts
        as its save did. None where blocks of this pool are copied whole; that never changes.
        """
        return None


class Backup(ABC):
    """A retraction backend: keeps the bytes of retracted requests until they are resumed or dropped.

    A failed call must leave nothing behind: ``save`` keeps no bytes and no key, ``restore`` may be repeated. A copy may
    go on after ``save`` or ``restore`` has returned; then its failure is raised by ``wait`` of the fence, and means the
    same. Its units are left alone until the fence is done, by both sides.

    Attributes:
        name: the id used in configurations.
        max_bytes: most bytes it keeps at once, padding of units included; None where nothing bounds them beforehand.
    """

    name: ClassVar[str]
    max_bytes: int | None = None

    @abstractmethod
    def carries(self, layout: Layout, component: str) -> Support:
        """Whether it can carry a component; asked at configuration."""

    def prepare(self, queue: CopyQueue) -> None:
        """Called once, before the first save, where units will come from a device: to pin host memory for its copies.

        Not needed for right bytes, so by default nothing is done.
        """

    @abstractmethod
    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Copy all blocks out under ``key``.

        Raises CapacityError when full (the request is then recomputed), at once and with nothing begun.
        """

    @abstractmethod
    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Copy all blocks of ``key`` back into the given units, in the given order.

        Blocks are matched by group, components and size; several alike come back in the order they were saved in. A
        save still under way is waited for or refused (BackupError): half a copy is never read.
        """

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget ``key``, also while its copy is under way. Unknown keys raise BackupError."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes kept now."""

    def close(self) -> None:
        """Forget everything. Copies under way end, or are given up, before it returns. Idempotent."""
