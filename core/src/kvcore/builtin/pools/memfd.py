"""CPU arenas in memfd: memory that a peer process can map read-only, and nobody can resize."""

from __future__ import annotations

import itertools
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

from kvcore.contract import FULL, Arena, PoolBuilder, Support, unsupported
from kvcore.errors import CapacityError, ConfigError, StaleHandleError
from kvcore.layout import Layout
from kvcore.transfer.shm import memfd

if TYPE_CHECKING:
    import torch

_HEADROOM_BYTES = 64 << 20
"""Memory an allocation leaves to everybody else."""

_NUMBERS = itertools.count()


class MemfdArena(Arena):
    """An anonymous file mapped into this process, zeroed and populated.

    ``close`` closes the descriptor and drops the map. While tensors or arrays over it are still alive the pages stay
    mapped, so that reading one is never a crash, and go back with the last of them.

    Args:
        nbytes: size, at least 1.
        populate: touch every page now (a first touch during a transfer costs tenfold).
    """

    device = "cpu"

    def __init__(self, nbytes: int, *, populate: bool = True) -> None:
        if nbytes < 1:
            raise ConfigError("an arena needs at least one byte", nbytes=nbytes)
        if populate:
            _check_available(nbytes)
        self.nbytes = nbytes
        fd, array = memfd.create(f"kvcore-arena-{next(_NUMBERS)}", nbytes, populate=populate)
        self.fd: int | None = fd
        # Not __del__: when a process ends with an open cache, the modules that it would need are gone before it.
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._array: npt.NDArray[np.uint8] | None = array
        self.address = int(array.ctypes.data)

    def array(self) -> npt.NDArray[np.uint8]:
        """The whole arena as ``uint8 [nbytes]``; raises StaleHandleError after :meth:`close`."""
        if self._array is None:
            raise StaleHandleError("the arena is closed", nbytes=self.nbytes)
        return self._array

    def tensor(self) -> torch.Tensor:
        """The same as a tensor, sharing memory."""
        # Sizing and `kvcore plugins` import this module without needing tensors.
        from kvcore.memory.tensors import tensor_of

        return tensor_of(self.array())

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.fd = self._array = None
        self._close_fd()


class MemfdPool(PoolBuilder):
    """Memfd arenas on the CPU, for the ``shm`` transport and for everything else."""

    name: ClassVar[str] = "memfd"

    def supports(self, device: str, layout: Layout) -> Support:
        """The CPU, any layout."""
        return FULL if device == "cpu" else unsupported(f"memfd arenas are CPU memory, the device is {device}")

    def allocate(self, nbytes: int, device: str) -> Arena:
        """Allocate zeroed, populated memory.

        Raises CapacityError naming size and available memory where it does not fit, instead of leaving the choice of
        a victim to the kernel.
        """
        return MemfdArena(nbytes)

    def total_bytes(self, device: str) -> int | None:
        """The memory of the machine, within the limit of this process's control group."""
        return total_memory() if device == "cpu" else None


POOL_BUILDERS: tuple[type[PoolBuilder], ...] = (MemfdPool,)


def total_memory() -> int:
    """Bytes of memory this process could use were it alone: the machine's, within the limit of its control group."""
    limit = _group_limit()
    total = _meminfo("MemTotal")
    return total if limit is None else min(total, limit)


def available_memory() -> int:
    """Bytes this process may still use: what the kernel calls available, within the limit of its control group."""
    found = [_meminfo("MemAvailable")]
    limit, used = _group_limit(), Path("/sys/fs/cgroup/memory.current")
    if limit is not None and used.exists():
        found.append(max(0, limit - int(used.read_text())))
    return min(found)


def _group_limit() -> int | None:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    return None if text == "max" else int(text)


def _meminfo(name: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) * 1024
    raise ConfigError("the kernel does not say how much memory is available", field=name)


def _check_available(nbytes: int) -> None:
    available = available_memory()
    if nbytes + _HEADROOM_BYTES > available:
        raise CapacityError(
            "not enough memory for an arena",
            nbytes=nbytes,
            available_bytes=available,
            remedy="give the cache less memory",
        )
