"""The owner's side of ``shm``: descriptors for those who present the token, staging for what has none (no torch)."""

from __future__ import annotations

import hmac
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from kvcore.log import get_logger, plain_trace
from kvcore.transfer.shm.stage_server import Device, Stager
from kvcore.transfer.users import is_own, unix_uid

_log = get_logger("kvcore.transfer.shm")

_TOKEN_BYTES = 32
_RETRY_S = 0.05
_FENCE_POLL_S = 50e-6
HEADER = struct.Struct("<I")
_Size = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class ShmEndpoint(msgspec.Struct, frozen=True):
    """Endpoint record of a transport: where to fetch the descriptors.

    Attributes:
        name: abstract socket name, without the leading zero byte.
        token: secret that the peer has to present.
        arenas: size in bytes by layer group of the arenas that are mapped; empty ones are not among them.
        staged: the same of those that cannot be mapped, whose units are copied for the reader.
        stage_token: secret for the staging server under the same name.
    """

    name: str
    token: Annotated[bytes, msgspec.Meta(min_length=_TOKEN_BYTES, max_length=_TOKEN_BYTES)]
    arenas: dict[str, _Size]
    staged: dict[str, _Size] = {}
    stage_token: Annotated[bytes, msgspec.Meta(max_length=_TOKEN_BYTES)] = b""


class ShmServer:
    """Hands out descriptors and stages units; one thread, ends with :meth:`close`.

    Args:
        arenas: size in bytes by layer group, and ``fds``, of the arenas that peers map.
        devices: those whose units are copied for peers.
        stage_bytes, stage_readers: memory for the copies of one peer, and most peers that get some.
    """

    def __init__(
        self,
        arenas: Mapping[str, int],
        fds: Sequence[int],
        devices: Mapping[str, Device],
        *,
        stage_bytes: int,
        stage_readers: int,
    ) -> None:
        self.record = ShmEndpoint(
            f"kvcore-{secrets.token_hex(16)}",
            secrets.token_bytes(_TOKEN_BYTES),
            dict(arenas),
            {group: device.nbytes for group, device in devices.items()},
            secrets.token_bytes(_TOKEN_BYTES),
        )
        self._fds = list(fds)
        self._stager = Stager(devices, stage_bytes, stage_readers) if devices else None
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
        """End the thread; copies for peers have ended when this returns."""
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        self._release()

    def _release(self) -> None:
        if self._stager is not None:
            self._stager.close()
        for conn, _ in self._clients.values():
            conn.close()
        self._clients.clear()
        self._listener.close()
        self._poll.close()
        os.close(self._wake)

    def _run(self) -> None:
        stager = self._stager
        while True:
            busy = stager is not None and stager.busy
            for fd, _ in self._poll.poll(0 if busy else None):
                if fd == self._wake:
                    return
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._serve(fd)
            if stager is not None and busy:
                for fd in stager.pump():
                    self._drop(fd)
                time.sleep(_FENCE_POLL_S)

    def _serve(self, fd: int) -> None:
        """Read what a client sends. Whatever goes wrong costs its own connection, not the service of others."""
        try:
            if self._stager is None or fd not in self._stager:
                self._receive(fd)
            elif not self._stager.receive(fd):
                self._drop(fd)
        except Exception as error:  # noqa: BLE001 -- see above
            _log.error("a peer could not be served", trace=plain_trace(error))
            if fd in self._clients:
                self._drop(fd)

    def _accept(self) -> None:
        try:
            conn, _ = self._listener.accept()
        except OSError as error:  # the client is gone already, or descriptors have run out: serve the others
            _log.warning("could not accept a peer", error=str(error))
            time.sleep(_RETRY_S)
            return
        uid = unix_uid(conn)
        if not is_own(uid):
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
                if self._stager is not None and hmac.compare_digest(bytes(buffer), self.record.stage_token):
                    if not self._stager.open(conn):
                        self._drop(fd)
                    return
                if not hmac.compare_digest(bytes(buffer), self.record.token):
                    _log.warning("peer with a wrong token refused")
                    self._drop(fd)
                    return
                names = msgspec.msgpack.encode(list(self.record.arenas))
                socket.send_fds(conn, [HEADER.pack(len(names)) + names], self._fds)
        except BlockingIOError:
            return
        except OSError as error:
            _log.warning("peer lost while attaching", error=str(error))
            self._drop(fd)

    def _drop(self, fd: int) -> None:
        if self._stager is not None and fd in self._stager:
            self._stager.drop(fd)
        conn, _ = self._clients.pop(fd)
        self._poll.unregister(fd)
        conn.close()
