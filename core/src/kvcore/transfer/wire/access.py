"""Who may talk to a sender: the holders of listed keys."""

from __future__ import annotations

from collections.abc import Collection

import zmq
from zmq.utils import z85

from kvcore.log import get_logger

_log = get_logger("kvcore.transfer.wire")

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
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind(_ZAP_ADDRESS)

    def guard(self, listener: zmq.Socket[bytes]) -> None:
        """Have a socket, before it is bound, take nobody else."""
        listener.curve_server = True
        listener.zap_domain = _DOMAIN

    def turn(self) -> None:
        """Answer whoever asks. Never waits."""
        while self.socket.poll(0):
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
            version, number, domain, address, _, mechanism, key = [*frames, *[b""] * _REQUEST_FRAMES][:_REQUEST_FRAMES]
            welcome = (domain, mechanism) == (_DOMAIN, b"CURVE") and key in self._allowed
            if not welcome:
                _log.warning("who holds no listed key is refused", address=address.decode("ascii", "replace"))
            status = (b"200", b"OK") if welcome else (b"400", b"not on the list")
            self.socket.send_multipart([version, number, *status, b"", b""])
