"""Anonymous files as memory: made by their owner, mapped read-only by a peer, resized by nobody (no torch)."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt

from kvcore.errors import CapacityError, TransferError

Bytes = npt.NDArray[np.uint8]

_F_GET_SEALS = 1034
_F_SEAL_FUTURE_WRITE = 0x10
"""Forbids new writable maps; the owner's stays (Linux 5.1; the constant is missing from Python's fcntl)."""


def create(name: str, nbytes: int, *, populate: bool = True) -> tuple[int, Bytes]:
    """Return a descriptor and a writable map of new, zeroed, sealed memory. The array owns the map.

    Raises CapacityError where there is no such memory.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        mapped = mmap.mmap(fd, nbytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | _F_SEAL_FUTURE_WRITE)
    except (OSError, OverflowError) as error:
        os.close(fd)
        raise CapacityError("cannot allocate an arena", nbytes=nbytes, reason=str(error)) from error
    # mmap.close() would refuse while views exist, dropping the last reference never does.
    return fd, np.frombuffer(mapped, np.uint8)


class Mapping:
    """Memory of a peer, mapped read-only. Raises TransferError for a file that is too small or could shrink."""

    def __init__(self, fd: int, nbytes: int) -> None:
        if nbytes < 1 or os.fstat(fd).st_size < nbytes:
            raise TransferError("peer's arena is smaller than announced", expected=nbytes, got=os.fstat(fd).st_size)
        if not fcntl.fcntl(fd, _F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            # Reading pages that the owner has cut off would kill this process.
            raise TransferError("peer's arena is not sealed against shrinking")
        # Not populated: that would hold up whoever connects for seconds, and commit what a lazy owner has left out. The
        # first read of a page takes twice as long, once.
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self.array: Bytes = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        """Unmap."""
        self.array = np.zeros(0, np.uint8)
        # A view that a traceback still holds keeps the map until it is collected.
        with contextlib.suppress(BufferError):
            self._map.close()
