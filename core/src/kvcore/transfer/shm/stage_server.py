"""The owner's side of staging: units of device arenas copied into a ring of pinned memory for each reader.

All methods are called by the server's one thread. It never waits for a copy: fences are polled, so a slow device holds
up its own readers' requests and nothing else.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from kvcore.contract import CopyQueue, Fence, Piece
from kvcore.errors import KVCoreError, ProtocolError
from kvcore.layout import Int64Array
from kvcore.log import get_logger
from kvcore.transfer.shm import memfd
from kvcore.transfer.shm.stage_wire import MAX_ASKED, Frames, StageHello, StageReply, StageRequest, frame

_log = get_logger("kvcore.transfer.shm")

_RECV_BYTES = 1 << 18


@dataclass(frozen=True)
class Device:
    """An arena that is staged: its copies and its size in bytes."""

    queue: CopyQueue
    nbytes: int


@dataclass
class _Copy:
    request: int
    start: int
    stop: int
    fence: Fence


class Ring:
    """Shared memory of one reader, pinned for the device; given back when nothing is copied into it any more."""

    def __init__(self, nbytes: int, queue: CopyQueue) -> None:
        self.fd, self.memory = memfd.create("kvcore-stage", nbytes)
        self.nbytes = nbytes
        self.copies: list[_Copy] = []
        try:
            self._unpin: Callable[[], None] = queue.pin(self.memory)
        except BaseException:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Wait for copies under way, then give the memory back. Idempotent."""
        for copy in self.copies:
            _ended(copy.fence)
        self.copies.clear()
        fd, self.fd = self.fd, -1
        if fd >= 0:
            self._unpin()
            os.close(fd)


class StageChannel:
    """One reader and its ring."""

    def __init__(self, conn: socket.socket, ring: Ring, devices: Mapping[str, Device]) -> None:
        self.ring = ring
        self._conn = conn
        self._devices = devices
        self._frames = Frames()

    def receive(self) -> bool:
        """Take what the reader has sent; False where it is gone or sent what cannot be: it is dropped then."""
        try:
            data = self._conn.recv(_RECV_BYTES)
            if not data:
                return False
            for item in self._frames.feed(data):
                self._begin(msgspec.msgpack.decode(item, type=StageRequest))
        except BlockingIOError:
            return True
        except OSError:
            return False
        except (msgspec.MsgspecError, ValueError, RecursionError, KVCoreError) as error:
            _log.warning("a reader asked for what cannot be staged", error=str(error))
            return False
        return True

    def _begin(self, request: StageRequest) -> None:
        device, pieces, units, stop = self._checked(request)
        ring = self.ring
        try:
            fence = device.queue.gather(pieces, units, ring.memory[request.offset : stop])
        except Exception as error:  # noqa: BLE001 -- the thread serves other readers; this one is told
            self._reply(StageReply(request.id, f"copying out failed: {error}"))
            return
        ring.copies.append(_Copy(request.id, request.offset, stop, fence))

    def _checked(self, request: StageRequest) -> tuple[Device, tuple[Piece, ...], Int64Array, int]:
        """Every number of a request comes from another process. Raises ProtocolError."""
        device = self._devices.get(request.group)
        if device is None:
            raise ProtocolError("no staged arena for the group", group=request.group)
        if len(self.ring.copies) >= MAX_ASKED:
            raise ProtocolError("too many requests at once", limit=MAX_ASKED)
        units = np.frombuffer(request.units, "<i8").astype(np.int64)
        if not units.size or not request.pieces or int(units.min()) < 0:
            raise ProtocolError("a request names no bytes", units=len(units), pieces=len(request.pieces))
        last = int(units.max())
        pieces = []
        for base, stride, nbytes in request.pieces:
            if base < 0 or nbytes < 1 or stride < nbytes or base + last * stride + nbytes > device.nbytes:
                raise ProtocolError("a request reads outside of the arena", group=request.group, unit=last)
            pieces.append(Piece(base, stride, nbytes, (device.nbytes - base - nbytes) // stride + 1))
        stop = request.offset + len(units) * sum(piece.nbytes for piece in pieces)
        if request.offset < 0 or stop > self.ring.nbytes:
            raise ProtocolError("a request is larger than the ring", limit=self.ring.nbytes, got=stop)
        if any(copy.start < stop and request.offset < copy.stop for copy in self.ring.copies):
            raise ProtocolError("a request overlaps one under way", request=request.id)
        return device, tuple(pieces), units, stop

    def pump(self) -> bool:
        """Answer for copies that have ended; False where the reader does not take its answers."""
        for copy in [item for item in self.ring.copies if item.fence.done()]:
            self.ring.copies.remove(copy)
            try:
                self._reply(StageReply(copy.request, _ended(copy.fence)))
            except OSError:
                return False
        return True

    def _reply(self, reply: StageReply) -> None:
        # A reader has few requests open, so answers always fit into its socket, unless it never reads them.
        data = frame(reply)
        if self._conn.send(data) < len(data):
            raise BlockingIOError("the reader does not read")


class Stager:
    """Every channel of one server.

    Args:
        devices: staged arenas by layer group.
        ring_bytes: memory for each reader.
        max_readers: most of them at once.
    """

    def __init__(self, devices: Mapping[str, Device], ring_bytes: int, max_readers: int) -> None:
        self._devices = dict(devices)
        self._ring_bytes, self._max_readers = ring_bytes, max_readers
        self._channels: dict[int, StageChannel] = {}
        self._retired: list[Ring] = []

    def __contains__(self, fd: int) -> bool:
        return fd in self._channels

    @property
    def busy(self) -> bool:
        """Whether copies are under way, so that :meth:`pump` has to be called soon."""
        return bool(self._retired) or any(channel.ring.copies for channel in self._channels.values())

    def open(self, conn: socket.socket) -> bool:
        """Give a reader its ring. False, with the reason sent, where there is none to give."""
        rings = len(self._channels) + len(self._retired)
        if rings >= self._max_readers:
            return _refuse(conn, f"{rings} readers have staging memory already; raise transfer.options.stage_readers")
        try:
            ring = Ring(self._ring_bytes, next(iter(self._devices.values())).queue)
        except KVCoreError as error:
            return _refuse(conn, str(error))
        self._channels[conn.fileno()] = StageChannel(conn, ring, self._devices)
        socket.send_fds(conn, [frame(StageHello(ring.nbytes))], [ring.fd])
        return True

    def receive(self, fd: int) -> bool:
        """See :meth:`StageChannel.receive`."""
        return self._channels[fd].receive()

    def pump(self) -> list[int]:
        """Answer what has ended. Returns readers to drop."""
        self._free_retired()
        return [fd for fd, channel in self._channels.items() if not channel.pump()]

    def drop(self, fd: int) -> None:
        """Forget a reader. Its ring stays until the device has ended its copies."""
        self._retired.append(self._channels.pop(fd).ring)
        self._free_retired()

    def _free_retired(self) -> None:
        for ring in [item for item in self._retired if all(copy.fence.done() for copy in item.copies)]:
            self._retired.remove(ring)
            ring.close()

    def close(self) -> None:
        """Wait for every copy, since the arenas go next. Idempotent."""
        for ring in [*self._retired, *(channel.ring for channel in self._channels.values())]:
            ring.close()
        self._retired.clear()
        self._channels.clear()


def _refuse(conn: socket.socket, reason: str) -> bool:
    _log.warning("a reader got no staging memory", reason=reason)
    conn.send(frame(StageHello(0, reason)))
    return False


def _ended(fence: Fence) -> str:
    """How a copy ended, waiting for it: "" or what went wrong."""
    try:
        fence.wait()
    except Exception as error:  # noqa: BLE001 -- told to the reader, whose read fails
        return f"copying out failed: {error}"
    return ""
