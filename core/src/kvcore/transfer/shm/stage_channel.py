"""The reader's connection to a staging server: requests for units, and the ring they arrive in."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Sequence

import msgspec

from kvcore.contract import Piece
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout import Int64Array
from kvcore.transfer.shm import memfd
from kvcore.transfer.shm.memfd import Bytes
from kvcore.transfer.shm.stage_wire import Frames, StageHello, StageReply, StageRequest, frame, reach

_RECV_BYTES = 1 << 16


class ReaderChannel:
    """A connection to the owner's staging server, and its ring, mapped read-only.

    Every wait ends: with an answer, with the owner's end, when ``cancel`` (an eventfd) is readable, or at the deadline.
    """

    def __init__(self, name: str, token: bytes, cancel: int, timeout_s: float) -> None:
        self._cancel, self._timeout_s = cancel, timeout_s
        self._frames = Frames()
        self._replies: dict[int, StageReply] = {}
        self._last = 0
        self._ring: memfd.Mapping | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(cancel, select.POLLIN)
        fds: list[int] = []
        try:
            reach(self._socket, name, timeout_s)
            self._poll.register(self._socket.fileno(), select.POLLIN)
            self._send(token)
            deadline, hello = time.monotonic() + timeout_s, list[bytes]()
            while not hello:
                self._await(deadline)
                data, got, _, _ = socket.recv_fds(self._socket, _RECV_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
                fds += got
                hello = self._frames.feed(_some(data))
            self._ring = self._attach(msgspec.msgpack.decode(hello[0], type=StageHello), fds)
        except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
            self.close()
            raise PeerLostError("could not reach the peer's staging memory", cause=str(error)) from error
        except BaseException:
            self.close()
            raise
        finally:
            for fd in fds:
                os.close(fd)

    def _attach(self, hello: StageHello, fds: Sequence[int]) -> memfd.Mapping:
        if not hello.nbytes or len(fds) != 1:
            raise TransferError("the peer has no staging memory for this reader", reason=hello.error)
        return memfd.Mapping(fds[0], hello.nbytes)

    @property
    def ring(self) -> Bytes:
        """The ring, read-only."""
        assert self._ring is not None
        return self._ring.array

    def ask(self, group: str, offset: int, pieces: Sequence[Piece], units: Int64Array) -> int:
        """Ask for units in the ring; returns what :meth:`wait` takes."""
        self._last += 1
        plain = tuple((piece.base, piece.unit_stride, piece.nbytes) for piece in pieces)
        self._send(frame(StageRequest(self._last, group, offset, plain, units.astype("<i8").tobytes())))
        return self._last

    def wait(self, request: int) -> None:
        """Wait for the answer. Raises TransferError: refused, owner gone, cancelled, or past the deadline."""
        deadline = time.monotonic() + self._timeout_s
        while request not in self._replies:
            self._await(deadline)
            try:
                data = _some(self._socket.recv(_RECV_BYTES))
            except BlockingIOError:
                continue
            except OSError as error:
                raise PeerLostError("the peer's staging server is gone", cause=str(error)) from error
            for item in self._frames.feed(data):
                try:
                    reply = msgspec.msgpack.decode(item, type=StageReply)
                except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                    raise TransferError(f"not an answer of a staging server: {error}") from error
                self._replies[reply.id] = reply
        reply = self._replies.pop(request)
        if reply.error:
            raise TransferError("the peer could not stage units", reason=reply.error)

    def _await(self, deadline: float) -> None:
        ready = dict(self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000))
        if self._cancel in ready:
            raise TransferError("the connection was closed during a read")
        if not ready:
            raise PeerLostError("the peer does not stage units in time", timeout_s=self._timeout_s)

    def _send(self, data: bytes) -> None:
        view, deadline = memoryview(data), time.monotonic() + self._timeout_s
        while view:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                out = select.poll()
                out.register(self._socket.fileno(), select.POLLOUT)
                out.register(self._cancel, select.POLLIN)
                ready = dict(out.poll(max(0.0, deadline - time.monotonic()) * 1000))
                if self._cancel in ready or not ready:
                    raise PeerLostError("the peer takes no requests", timeout_s=self._timeout_s) from None
            except OSError as error:
                raise PeerLostError("the peer's staging server is gone", cause=str(error)) from error

    def close(self) -> None:
        """Disconnect and unmap."""
        self._socket.close()
        if self._ring is not None:
            self._ring.close()


def _some(data: bytes) -> bytes:
    if not data:
        raise PeerLostError("the peer's staging server is gone")
    return data
