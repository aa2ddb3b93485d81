"""The ``shm`` transport: pools in memfd arenas, mapped read-only by the peer on the same host (no torch).

The owner listens on a Unix socket in the abstract namespace and hands its memfds, with SCM_RIGHTS, to a process of the
same user that presents the token from the endpoint record. The connection then stays open and means one thing: the
owner lives. There is no name in any file system, so nothing is left behind however a process ends, and an attached
process can neither resize, write nor remove what it maps.

Arenas on a device cannot be mapped. Their owner copies units into a ring of pinned shared memory when a reader asks, on
a second connection (:mod:`kvcore.transfer.shm.stage_server`); a reader whose own arenas are on a device goes through pinned
memory of its own (:mod:`kvcore.transfer.shm.stage_reader`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import ClassVar

import msgspec

from kvcore.config import parse_bytes
from kvcore.contract import (
    FULL,
    Arena,
    PeerConnection,
    ReadHandle,
    ReadJob,
    Support,
    Transport,
    TransportTraits,
)
from kvcore.errors import ConfigError, LayoutError, PeerLostError, TransferError, UnsupportedError
from kvcore.layout import Layout
from kvcore.layout.moves import Program
from kvcore.transfer.copier import Copier, CopyTask, ThreadCopier
from kvcore.transfer.shm.memfd import Bytes
from kvcore.transfer.shm.memfd import Mapping as MappedArena
from kvcore.transfer.shm.server import HEADER, ShmEndpoint, ShmServer
from kvcore.transfer.shm.stage_reader import StagedJob, StagedReads, StagedTask
from kvcore.transfer.shm.stage_server import Device
from kvcore.transfer.shm.stage_wire import reach
from kvcore.transfer.shm.windows import Windows, windows_of
from kvcore.transfer.users import is_own, unix_uid

__all__ = ["ShmConnection", "ShmEndpoint", "ShmTransport"]

_MAX_FDS = 253  # SCM_MAX_FD
_CONNECT_TIMEOUT_S = 5.0


class ShmConnection(PeerConnection):
    """A mapped peer. Made by :meth:`ShmTransport.connect`."""

    def __init__(
        self, record: ShmEndpoint, local: Mapping[str, Bytes | Device], copier: Copier, *, stage_timeout_s: float
    ) -> None:
        self._record = record
        self._local = dict(local)
        self._copier = copier
        self._stage_timeout_s = stage_timeout_s
        self._stage: tuple[StagedReads, Copier] | None = None
        self._windows: dict[int, tuple[Program, Windows]] = {}
        self._maps: dict[str, MappedArena] = {}
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
            reach(self._socket, record.name, _CONNECT_TIMEOUT_S)
            if not is_own(uid := unix_uid(self._socket)):
                raise TransferError("the peer belongs to another user", uid=uid)
            self._socket.sendall(record.token)
            data, fds, _, _ = socket.recv_fds(self._socket, HEADER.size, _MAX_FDS, socket.MSG_CMSG_CLOEXEC)
            while len(data) < HEADER.size:
                data += self._more(HEADER.size - len(data))
            (size,) = HEADER.unpack(data)
            payload = b""
            while len(payload) < size:
                payload += self._more(size - len(payload))
            names = msgspec.msgpack.decode(payload, type=list[str])
            if len(names) != len(fds) or set(names) != set(record.arenas):
                raise TransferError("peer did not hand over its arenas", expected=sorted(record.arenas), got=names)
            for name, fd in zip(names, fds, strict=True):
                self._maps[name] = MappedArena(fd, record.arenas[name])
            self._socket.setblocking(False)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
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
        checked = [self._checked(job) for job in jobs]
        staged = any(source is None or isinstance(target, Device) for _, source, target in checked)
        with self._lock:
            self._check_open()
            reads, copier = self._staging() if staged else (None, self._copier)
            self._in_flight += 1
        task: CopyTask | StagedTask
        if reads is None:
            direct = [(j, s, t) for j, s, t in checked if s is not None and not isinstance(t, Device)]
            task = CopyTask(direct, self._finished)
        else:
            items = [
                StagedJob(job, self._windows_of(job.program), source, t.queue if isinstance(t, Device) else t)
                for job, source, t in checked
            ]
            task = StagedTask(reads, items, self._finished)
        copier.submit(task)
        return task

    def _checked(self, job: ReadJob) -> tuple[ReadJob, Bytes | None, Bytes | Device]:
        """The job with its source (None where it has to be staged) and its destination. TransferError for a bad one."""
        mapped, local = self._maps.get(job.group), self._local.get(job.group)
        if local is None or (mapped is None and job.group not in self._record.staged):
            raise TransferError("no registered arena for the group on both sides", group=job.group)
        try:
            job.program.pairs(job.src_units, job.dst_units)
        except LayoutError as error:
            raise TransferError(error.message, group=job.group, **error.fields) from error
        for side, nbytes, need in (
            (
                "source",
                self._record.staged[job.group] if mapped is None else mapped.array.nbytes,
                job.program.src_bytes,
            ),
            ("destination", local.nbytes, job.program.dst_bytes),
        ):
            if nbytes < need:
                raise TransferError("arena is smaller than the plan", group=job.group, side=side, expected=need)
        return job, None if mapped is None else mapped.array, local

    def _staging(self) -> tuple[StagedReads, Copier]:
        """What staged reads run on: a thread of this connection, so that one owner never waits for another."""
        if self._stage is None:
            reads = StagedReads(self._record.name, self._record.stage_token, self._stage_timeout_s)
            self._stage = reads, ThreadCopier()
        return self._stage

    def _windows_of(self, program: Program) -> Windows:
        # Programs are made once a peer; keeping them makes their ids theirs for good.
        if id(program) not in self._windows:
            self._windows[id(program)] = program, windows_of(program)
        return self._windows[id(program)][1]

    def _check_open(self) -> None:
        if self._closed or not self._alive:
            raise PeerLostError("the connection is closed")

    def peek(self, group: str) -> Bytes:
        """A peer's mapped arena, read-only ``uint8 [nbytes]``; valid until :meth:`close`. For inspection."""
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
            stage = self._stage
            if not self._in_flight:
                self._release()
        if stage is not None:
            # Ends what waits for the owner, and the copies under way; the lock is free for their last words.
            reads, copier = stage
            reads.cancel()
            copier.close()
            reads.close()

    def _release(self) -> None:
        for mapped in self._maps.values():
            mapped.close()
        self._maps.clear()
        self._local.clear()
        self._poll.close()
        self._socket.close()
        os.close(self._wake)


class ShmTransport(Transport):
    """Single-copy transfer between processes of one user on one host; staged where an arena is on a device.

    Args:
        copier: where copies between mapped arenas run; a thread of its own by default.
        stage_bytes: pinned memory that this process, where its arenas are on a device, sets aside for each reader, or a
            size such as ``"32MiB"``. At least one unit has to fit.
        stage_readers: most readers that get some.
        stage_timeout_s: how long a reader waits for units to be staged before the read fails.
    """

    name: ClassVar[str] = "shm"
    traits: ClassVar[TransportTraits] = TransportTraits(executes_programs=True)

    def __init__(
        self,
        copier: Copier | None = None,
        *,
        stage_bytes: int | str = 32 << 20,
        stage_readers: int = 16,
        stage_timeout_s: float = 5.0,
    ) -> None:
        self._stage_bytes = _option_bytes("stage_bytes", stage_bytes)
        if isinstance(stage_readers, bool) or not isinstance(stage_readers, int) or stage_readers < 1:
            raise ConfigError("not a number of readers", key="transfer.options.stage_readers", got=stage_readers)
        if not 0 < stage_timeout_s < float("inf"):
            raise ConfigError("not a time", key="transfer.options.stage_timeout_s", got=stage_timeout_s)
        self._stage_readers, self._stage_timeout_s = stage_readers, stage_timeout_s
        self._copier = copier or ThreadCopier()
        self._arenas: dict[str, Bytes | Device] = {}
        self._server: ShmServer | None = None
        self._connections: list[ShmConnection] = []
        self._registered = False
        self._closed = False

    def supports(self, device: str, layout: Layout) -> Support:
        """Arenas of any layout that peers can map or that copy to host memory: :meth:`register` sees which."""
        return FULL

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
        fds, sizes, devices = list[int](), dict[str, int](), dict[str, Device]()
        for group, arena in used.items():
            queue = arena.queue()
            if arena.fd is not None:
                if os.fstat(arena.fd).st_size < arena.nbytes:
                    raise TransferError("arena is larger than its file", group=group, nbytes=arena.nbytes)
                fds.append(arena.fd)
                sizes[group] = arena.nbytes
            elif queue is not None:
                devices[group] = Device(queue, arena.nbytes)
            else:
                raise UnsupportedError(
                    "shm can only serve arenas that have a file descriptor or copy to host memory",
                    group=group,
                    device=arena.device,
                    remedy="use the pool builder memfd, or one of a device",
                )
        self._arenas = {group: devices.get(group) or arena.array() for group, arena in used.items()}
        self._server = ShmServer(sizes, fds, devices, stage_bytes=self._stage_bytes, stage_readers=self._stage_readers)
        self._registered = True
        return msgspec.msgpack.encode(self._server.record)

    def connect(self, endpoint: bytes) -> ShmConnection:
        """Map the peer's arenas. Raises PeerLostError where it is gone, TransferError where it is not to be trusted."""
        if not self._registered or self._closed:
            raise TransferError("register the local arenas before connecting", closed=self._closed)
        try:
            record = msgspec.msgpack.decode(endpoint, type=ShmEndpoint)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise TransferError(f"not an endpoint record of shm: {error}") from error
        connection = ShmConnection(record, self._arenas, self._copier, stage_timeout_s=self._stage_timeout_s)
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


def _option_bytes(option: str, value: int | str) -> int:
    try:
        size = parse_bytes(value)
    except ConfigError as error:
        error.fields = {"key": f"transfer.options.{option}", **error.fields}
        raise
    if not size:
        raise ConfigError("size of nothing", key=f"transfer.options.{option}", got=value)
    return size
