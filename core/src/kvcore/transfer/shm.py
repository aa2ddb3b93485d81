"""The ``shm`` transport: pools in memfd arenas, mapped read-only by the peer on the same host (no torch).

The owner listens on a Unix socket in the abstract namespace and hands its memfds, with SCM_RIGHTS, to a process of the
same user that presents the token from the endpoint record. The connection then stays open and means one thing: the
owner lives. There is no name in any file system, so nothing is left behind however a process ends, and an attached
process can neither resize, write nor remove what it maps.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import itertools
import mmap
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec
import numpy as np
import numpy.typing as npt
import structlog

from kvcore.contract import (
    FULL,
    Arena,
    PeerConnection,
    ReadHandle,
    ReadJob,
    Support,
    Transport,
    TransportTraits,
    unsupported,
)
from kvcore.errors import LayoutError, PeerLostError, TransferError, UnsupportedError
from kvcore.layout import Layout
from kvcore.transfer.copier import Copier, CopyTask, ThreadCopier

_log = structlog.get_logger("kvcore.transfer.shm")

_F_GET_SEALS = 1034
_F_SEAL_SHRINK = 0x0002
_TOKEN_BYTES = 32
_MAX_FDS = 253  # SCM_MAX_FD
_CONNECT_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_HEADER = struct.Struct("<I")


class ShmEndpoint(msgspec.Struct, frozen=True):
    """Endpoint record of a transport: where to fetch the descriptors.

    Attributes:
        name: abstract socket name, without the leading zero byte.
        token: secret that the peer has to present.
        arenas: size in bytes by layer group; empty arenas are not among them.
    """

    name: str
    token: bytes
    arenas: dict[str, int]


def _peer_uid(conn: socket.socket) -> int:
    _, uid, _ = struct.unpack("3i", conn.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


class _Server:
    """Hands out descriptors; one thread, ends with :meth:`close`."""

    def __init__(self, arenas: Mapping[str, int], fds: Sequence[int]) -> None:
        self.record = ShmEndpoint(f"kvcore-{secrets.token_hex(16)}", secrets.token_bytes(_TOKEN_BYTES), dict(arenas))
        self._fds = list(fds)
        self._clients: dict[int, tuple[socket.socket, bytearray]] = {}
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._poll = select.epoll()
        try:
            self._listener.bind("\0" + self.record.name)
            self._listener.listen(64)
            for fd in (self._wake, self._listener.fileno()):
                self._poll.register(fd, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="kvcore-shm-server", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    def close(self) -> None:
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        for conn, _ in self._clients.values():
            conn.close()
        self._clients.clear()
        self._listener.close()
        self._poll.close()
        os.close(self._wake)

    def _run(self) -> None:
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._receive(fd)

    def _accept(self) -> None:
        try:
            conn, _ = self._listener.accept()
        except OSError as error:  # the client is gone already, or descriptors have run out: serve the others
            _log.warning("could not accept a peer", error=str(error))
            time.sleep(_RETRY_S)
            return
        uid = _peer_uid(conn)
        if uid != os.getuid():
            _log.warning("peer of another user refused", uid=uid)
            conn.close()
            return
        conn.setblocking(False)
        self._clients[conn.fileno()] = (conn, bytearray())
        self._poll.register(conn.fileno(), select.EPOLLIN)

    def _receive(self, fd: int) -> None:
        conn, buffer = self._clients[fd]
        try:
            data = conn.recv(_TOKEN_BYTES + 1)
            # An attached client has nothing more to say: whatever it sends, like its end, closes the connection.
            if not data or len(buffer) + len(data) > _TOKEN_BYTES:
                self._drop(fd)
                return
            buffer += data
            if len(buffer) == _TOKEN_BYTES:
                if not hmac.compare_digest(bytes(buffer), self.record.token):
                    _log.warning("peer with a wrong token refused")
                    self._drop(fd)
                    return
                names = msgspec.msgpack.encode(list(self.record.arenas))
                socket.send_fds(conn, [_HEADER.pack(len(names)) + names], self._fds)
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("peer lost while attaching", error=str(error))
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        conn, _ = self._clients.pop(fd)
        self._poll.unregister(fd)
        conn.close()


class _Mapping:
    """A peer's arena, mapped read-only."""

    def __init__(self, fd: int, nbytes: int) -> None:
        if os.fstat(fd).st_size < nbytes:
            raise TransferError("peer's arena is smaller than announced", expected=nbytes, got=os.fstat(fd).st_size)
        if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
            # Reading pages that the owner has cut off would kill this process.
            raise TransferError("peer's arena is not sealed against shrinking")
        self._map = mmap.mmap(fd, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, mmap.PROT_READ)
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self.array = np.zeros(0, np.uint8)
        # A view that a traceback still holds keeps the map until it is collected.
        with contextlib.suppress(BufferError):
            self._map.close()


class ShmConnection(PeerConnection):
    """A mapped peer. Made by :meth:`ShmTransport.connect`."""

    def __init__(self, record: ShmEndpoint, local: Mapping[str, npt.NDArray[np.uint8]], copier: Copier) -> None:
        self._local = dict(local)
        self._copier = copier
        self._maps: dict[str, _Mapping] = {}
        self._alive = True
        self._closed = False
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._in_flight = 0
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poll = select.epoll()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._attach(record)
            self._poll.register(self._wake, select.EPOLLIN)
            self._poll.register(self._socket.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        except BaseException:
            self._release()
            raise

    def _attach(self, record: ShmEndpoint) -> None:
        fds: list[int] = []
        try:
            self._socket.settimeout(_CONNECT_TIMEOUT_S)
            self._socket.connect("\0" + record.name)
            if _peer_uid(self._socket) != os.getuid():
                raise TransferError("the peer belongs to another user", uid=_peer_uid(self._socket))
            self._socket.sendall(record.token)
            data, fds, _, _ = socket.recv_fds(self._socket, _HEADER.size, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            while len(data) < _HEADER.size:
                data += self._more(_HEADER.size - len(data))
            (size,) = _HEADER.unpack(data)
            payload = b""
            while len(payload) < size:
                payload += self._more(size - len(payload))
            names = msgspec.msgpack.decode(payload, type=list[str])
            if len(names) != len(fds) or set(names) != set(record.arenas):
                raise TransferError("peer did not hand over its arenas", expected=sorted(record.arenas), got=names)
            for name, fd in zip(names, fds, strict=True):
                self._maps[name] = _Mapping(fd, record.arenas[name])
            self._socket.setblocking(False)
        except (OSError, msgspec.MsgspecError) as error:
            raise PeerLostError("could not attach to the peer's memory", cause=str(error)) from error
        finally:
            for fd in fds:
                os.close(fd)

    def _more(self, size: int) -> bytes:
        data = self._socket.recv(size)
        if not data:
            raise PeerLostError("the peer closed the connection while attaching (wrong token?)")
        return data

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        """Start pulling. Every id is checked before any byte moves."""
        self._check_open()
        copies = []
        for job in jobs:
            mapped, local = self._maps.get(job.group), self._local.get(job.group)
            if mapped is None or local is None:
                raise TransferError("no registered arena for the group on both sides", group=job.group)
            try:
                job.program.pairs(job.src_units, job.dst_units)
            except LayoutError as error:
                raise TransferError(error.message, group=job.group, **error.fields) from error
            for side, array, need in (
                ("source", mapped.array, job.program.src_bytes),
                ("destination", local, job.program.dst_bytes),
            ):
                if array.nbytes < need:
                    raise TransferError("arena is smaller than the plan", group=job.group, side=side, expected=need)
            copies.append((job, mapped.array, local))
        with self._lock:
            self._check_open()
            self._in_flight += 1
        task = CopyTask(copies, self._finished)
        self._copier.submit(task)
        return task

    def _check_open(self) -> None:
        if self._closed or not self._alive:
            raise PeerLostError("the connection is closed")

    def peek(self, group: str) -> npt.NDArray[np.uint8]:
        """The peer's arena of a group, read-only ``uint8 [nbytes]``; valid until :meth:`close`. For inspection."""
        return self._maps[group].array

    def _finished(self) -> None:
        with self._lock:
            self._in_flight -= 1
            self._idle.notify_all()
            if self._closed:
                if not self._in_flight:
                    self._release()
            else:
                os.eventfd_write(self._wake, 1)

    def alive(self) -> bool:
        """Whether the owner of the memory lives; resets :meth:`fileno`."""
        with self._lock:
            if self._closed:
                return False
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
            if self._alive:
                try:
                    # The owner never sends anything more: readable means that it is gone.
                    self._socket.recv(1)
                    self._alive = False
                except BlockingIOError:
                    pass
                except OSError:
                    self._alive = False
                if not self._alive:
                    self._poll.unregister(self._socket.fileno())
            return self._alive

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def fileno(self) -> int | None:
        """Readable when the owner is gone or a read has ended."""
        return None if self._closed else self._poll.fileno()

    def quiesce(self, timeout_s: float) -> bool:
        """Wait for the reads under way."""
        with self._lock:
            return self._idle.wait_for(lambda: not self._in_flight, timeout_s)

    def close(self) -> None:
        """Disconnect; the maps go once the last read under way has ended."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if not self._in_flight:
                self._release()

    def _release(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        self._local.clear()
        self._poll.close()
        self._socket.close()
        os.close(self._wake)


class ShmTransport(Transport):
    """Single-copy transfer between processes of one user on one host.

    Args:
        copier: where copies run; a thread of its own by default.
    """

    name: ClassVar[str] = "shm"
    traits: ClassVar[TransportTraits] = TransportTraits(executes_programs=True)

    def __init__(self, copier: Copier | None = None) -> None:
        self._copier = copier or ThreadCopier()
        self._arenas: dict[str, npt.NDArray[np.uint8]] = {}
        self._server: _Server | None = None
        self._connections: list[ShmConnection] = []
        self._registered = False
        self._closed = False

    def supports(self, device: str, layout: Layout) -> Support:
        """CPU arenas of any layout."""
        return FULL if device == "cpu" else unsupported(f"shm maps host memory, the pool is on {device}")

    def register(self, arenas: Mapping[str, Arena]) -> bytes:
        """Serve arenas; empty ones are skipped. Raises TransferError or UnsupportedError for what cannot be served."""
        if self._closed or self._registered:
            raise TransferError("arenas are registered once, before the transport is closed", closed=self._closed)
        used = {group: arena for group, arena in arenas.items() if arena.nbytes}
        spans = sorted((arena.address, arena.address + arena.nbytes, group) for group, arena in used.items())
        for (_, end, first), (start, _, second) in itertools.pairwise(spans):
            if start < end:
                raise TransferError("arenas overlap", first=first, second=second)
        if len(used) > _MAX_FDS:
            raise UnsupportedError("too many arenas for one endpoint", limit=_MAX_FDS, got=len(used))
        fds: list[int] = []
        for group, arena in used.items():
            if arena.fd is None:
                raise UnsupportedError(
                    "shm can only serve arenas with a file descriptor", group=group, device=arena.device,
                    remedy="use the memfd pool builder",
                )  # fmt: skip
            if os.fstat(arena.fd).st_size < arena.nbytes:
                raise TransferError("arena is larger than its file", group=group, nbytes=arena.nbytes)
            fds.append(arena.fd)
        self._arenas = {group: arena.array() for group, arena in used.items()}
        self._server = _Server({group: arena.nbytes for group, arena in used.items()}, fds)
        self._registered = True
        return msgspec.msgpack.encode(self._server.record)

    def connect(self, endpoint: bytes) -> ShmConnection:
        """Map the peer's arenas. Raises PeerLostError where it is gone, TransferError where it is not to be trusted."""
        if not self._registered or self._closed:
            raise TransferError("register the local arenas before connecting", closed=self._closed)
        try:
            record = msgspec.msgpack.decode(endpoint, type=ShmEndpoint)
        except (msgspec.MsgspecError, ValueError) as error:
            raise TransferError(f"not an endpoint record of shm: {error}") from error
        connection = ShmConnection(record, self._arenas, self._copier)
        self._connections = [item for item in self._connections if not item.closed] + [connection]
        return connection

    def close(self) -> None:
        """Stop serving and copying, close connections. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for connection in self._connections:
            connection.close()
        self._copier.close()
        if self._server is not None:
            self._server.close()
        self._arenas = {}
