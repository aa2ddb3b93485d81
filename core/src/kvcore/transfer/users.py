"""Which user of this machine is at the other end of a connection (no I/O but for the kernel's table of connections)."""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

_TABLE = Path("/proc/net/tcp")


@dataclass(frozen=True)
class Caller:
    """Who has connected, as far as the accepted connection tells.

    Attributes:
        uid: user of the process at the other end; None where it has to be looked up.
        row: its row in the kernel's table of TCP connections, which is of this host only; "" where there is none.
    """

    uid: int | None = None
    row: str = ""


def caller_of(connection: socket.socket) -> Caller:
    """Describe the other end. Raises OSError where it has gone."""
    if connection.family == socket.AF_UNIX:
        return Caller(uid=unix_uid(connection))
    if connection.family == socket.AF_INET:
        return Caller(row=f"{_column(connection.getpeername())} {_column(connection.getsockname())}")
    return Caller()


def unix_uid(connection: socket.socket) -> int:
    """The user at the other end of a connection by a Unix socket."""
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return int(uid)


def uids_of(callers: Collection[Caller]) -> dict[Caller, int]:
    """The user of each caller; who is not on this host, or has gone, is left out. The table is read once."""
    found = {caller: caller.uid for caller in callers if caller.uid is not None}
    rows = {caller.row: caller for caller in callers if caller.row}
    if rows:
        for row, uid in _connections().items():
            if row in rows:
                found[rows[row]] = uid
    return found


def is_own(uid: int | None) -> bool:
    """Whether a user is this process's own; nobody knows who None is."""
    return uid == os.geteuid()


def _column(address: tuple[str, int]) -> str:
    host, port = address[:2]
    number = int.from_bytes(socket.inet_aton(host), sys.byteorder)  # the table shows the bytes as the host's number
    return f"{number:08X}:{port:04X}"


def _connections() -> dict[str, int]:
    """Owner of every TCP socket of this host by its own and its peer's address. Closed ones, whose owner the kernel has
    forgotten and shows as root, are left out."""
    owners = {}
    try:
        lines = _TABLE.read_text().splitlines()[1:]
    except OSError:
        return {}
    for line in lines:
        columns = line.split()
        if len(columns) > 9 and columns[9] != "0":
            owners[f"{columns[1]} {columns[2]}"] = int(columns[7])
    return owners
