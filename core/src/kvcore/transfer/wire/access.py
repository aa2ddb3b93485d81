"""Who may talk to a sender: the holders of listed keys, or without keys processes of the same user."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Collection, Mapping
from typing import TypeAlias

import zmq
from zmq.utils import z85

from kvcore.errors import HandshakeError
from kvcore.log import get_logger
from kvcore.transfer.messages import control
from kvcore.transfer.users import Caller, caller_of, is_own, uids_of
from kvcore.transfer.wire.budget import TURN_MESSAGES

_log = get_logger("kvcore.transfer.wire")

FindUsers: TypeAlias = Callable[[Collection[Caller]], Mapping[Caller, int]]
"""See :func:`kvcore.transfer.users.uids_of`."""

_ZAP_ADDRESS = "inproc://zeromq.zap.01"  # ZeroMQ's own: where the sockets of a context ask who may connect
_DOMAIN = b"kvcore"
_REQUEST_FRAMES = 7  # version, id, domain, address, routing id, mechanism, key


class KeyList:
    """Answers ZeroMQ's question whether the holder of a CURVE key may connect; asked before any message is read.

    Args:
        context: of the listening socket, which has no other such list.
        allowed: public keys (z85).

    Attributes:
        socket: becomes readable when somebody asks; served by :meth:`turn`.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], allowed: Collection[bytes]) -> None:
        self._allowed = {z85.decode(key) for key in allowed}
        self._said_at = -1.0
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def guard(self, listener: zmq.Socket[bytes]) -> None:
        """Have a socket, before it is bound, take nobody else."""
        listener.curve_server = True
        listener.zap_domain = _DOMAIN

    def turn(self) -> None:
        """Answer whoever asks, up to :data:`TURN_MESSAGES` of them. Never waits."""
        for _ in range(TURN_MESSAGES):
            if not self.socket.poll(0):
                return
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            version, number, domain, address, _, mechanism, key = [*frames, *[b""] * _REQUEST_FRAMES][:_REQUEST_FRAMES]
            welcome = (domain, mechanism) == (_DOMAIN, b"CURVE") and key in self._allowed
            if not welcome and time.monotonic() - self._said_at >= 1:  # whoever comes again and again
                self._said_at = time.monotonic()
                _log.warning("who holds no listed key is refused", address=address.decode("ascii", "replace"))
            status = (b"200", b"OK") if welcome else (b"400", b"not on the list")
            self.socket.send_multipart([version, number, *status, b"", b""])


class SameUser:
    """Whether connections come from this process's own user; each is looked up once, when it first says something.

    Args:
        uids: finds the users of callers; who is not in what it returns is refused.
    """

    def __init__(self, uids: FindUsers = uids_of) -> None:
        self._uids = uids
        self._callers: dict[int, Caller] = {}  # those that have said nothing
        self._own: dict[int, bool] = {}

    def forget(self, fd: int) -> None:
        """A descriptor is another connection's from now on, which is refused unless :meth:`accepted` says who it is."""
        self._callers.pop(fd, None)
        self._own.pop(fd, None)

    def accepted(self, fd: int, connection: socket.socket) -> None:
        """Somebody has connected. Raises OSError where it has gone already."""
        self._callers[fd] = caller_of(connection)

    def admits(self, fd: int) -> bool:
        """Whether a message that came over a connection is to be looked at."""
        if fd not in self._own:
            found = self._uids(self._callers.values())  # all at once: the table of connections may be long
            self._own.update({each: is_own(found.get(caller)) for each, caller in self._callers.items()})
            self._callers.clear()
        return self._own.get(fd, False)


def turned_away(sender: str, peer: bytes) -> control.Refused:
    """The answer to whoever may not talk to a sender; it tells nothing of the sender but its instance."""
    told = HandshakeError(
        "not welcome at this sender", remedy="run both sides as one user, or give them keys (kvcore keys new)"
    )
    return control.Refused(src=sender, dst=peer.decode("utf-8", "replace"), error=control.WireError.of(told))
