"""What travels on a staging channel of ``shm``: frames of msgpack, a length in front; and how a socket is reached.

A peer whose arenas cannot be mapped copies units into a ring of shared memory when it is asked to. The reader says which
bytes of which units, and where in the ring they go; the owner answers when they are there. The ring belongs to one
reader, so what a reader does not take away is in nobody else's way.
"""

from __future__ import annotations

import socket
import struct
import time

import msgspec

from kvcore.errors import ProtocolError

HEADER = struct.Struct("<I")
MAX_FRAME = 64 << 20
_RETRY_S = 0.002
MAX_ASKED = 8
"""Most requests of one reader that are not answered."""


class StageHello(msgspec.Struct, frozen=True):
    """The owner's first frame; the ring's descriptor comes with it.

    Attributes:
        nbytes: size of the ring; 0 where there is none.
        error: why there is none.
    """

    nbytes: int
    error: str = ""


class StageRequest(msgspec.Struct, frozen=True):
    """Copy units into the ring.

    Attributes:
        id: names the request in its reply.
        group: layer group, that is, which arena.
        offset: byte of the ring where the first unit goes; the others follow without gaps.
        pieces: ``(base, unit stride, bytes)`` of what is copied of each unit, put side by side.
        units: region unit ids, little-endian int64.
    """

    id: int
    group: str
    offset: int
    pieces: tuple[tuple[int, int, int], ...]
    units: bytes


class StageReply(msgspec.Struct, frozen=True):
    """The units are in the ring, or ``error`` says why they are not."""

    id: int
    error: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """Encode a message with its length."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data


def reach(sock: socket.socket, name: str, timeout_s: float) -> None:
    """Connect to an abstract Unix socket; one that does not block says so where many others are about to, and tries again.

    Raises OSError where nobody listens, and after ``timeout_s`` where the queue was full all the time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return sock.connect("\0" + name)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(_RETRY_S)


class Frames:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the frames that are complete. Raises ProtocolError for one that is too long."""
        self._data += data
        out = []
        while len(self._data) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._data)
            if size > MAX_FRAME:
                raise ProtocolError("a frame is too long", got=size, limit=MAX_FRAME)
            end = HEADER.size + size
            if len(self._data) < end:
                break
            out.append(bytes(self._data[HEADER.size : end]))
            del self._data[:end]
        return out
