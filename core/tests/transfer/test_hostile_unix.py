"""Whoever reaches the Unix sockets of ``shm`` and sends what he likes, or nothing: readers are served, nothing is left."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.contract import ReadJob
from kvcore.errors import TransferError
from kvcore.layout.moves import Program
from kvcore.transfer.shm.server import ShmServer
from kvcore.transfer.shm.stage_wire import HEADER
from kvcore.transfer.shm.transport import ShmTransport

UNITS = 16
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Pair:
    """A serving transport whose arena is on a device, or in memory that is mapped, and a poisoned receiving one."""

    def __init__(self, kit: ModuleType, device: ModuleType, *, staged: bool) -> None:
        self.layout = kit.layout()
        place = self.layout.place({"pages": UNITS})
        self.unit = place.arena_bytes // UNITS
        self.source = device.FakeArena(place.arena_bytes) if staged else kit.MemArena(place.arena_bytes)
        self.target = kit.MemArena(place.arena_bytes)
        self.source.array()[:] = np.random.default_rng(0).integers(0, 200, place.arena_bytes, np.uint8)
        if staged:
            self.source.fake.mark()
        self.server, self.client = ShmTransport(stage_bytes=4 * self.unit), ShmTransport()
        self.record = self.server.register({"full": self.source})
        self.client.register({"full": self.target})
        self.program = Program.build(self.layout, place, self.layout, place)
        self.fields: dict[str, Any] = msgspec.msgpack.decode(self.record)

    def read(self) -> None:
        """An honest reader comes, is served in time, gets the right bytes, and goes."""
        self.target.array()[:] = 0xFF
        ids = np.arange(1, UNITS, dtype=np.int64)
        connection = self.client.connect(self.record)
        handle = connection.read([ReadJob("full", self.program, ids, ids[::-1].copy())])
        deadline = time.monotonic() + 20
        while not handle.poll():
            assert time.monotonic() < deadline, "an honest reader is not served"
            time.sleep(0.001)
        there, here = (item.array().reshape(UNITS, -1) for item in (self.source, self.target))
        assert (here[ids[::-1]] == there[ids]).all()
        assert (here[0] == 0xFF).all()
        connection.close()

    def knock(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX)
        raw.settimeout(10)
        raw.connect("\0" + self.fields["name"])
        return raw

    def attach(self) -> socket.socket:
        """A reader with a ring."""
        raw = self.knock()
        raw.sendall(self.fields["stage_token"])
        _, fds, _, _ = socket.recv_fds(raw, 4096, 1)
        for fd in fds:
            os.close(fd)
        return raw

    def close(self) -> None:
        for item in (self.client, self.server, self.source, self.target):
            item.close()


@pytest.fixture(params=["mapped", "staged"])
def pair(kit: ModuleType, device: ModuleType, request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(kit, device, staged=request.param == "staged")
    yield made
    made.close()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def settles_at(most: int) -> bool:
    deadline = time.monotonic() + 10
    while descriptors() > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return descriptors() <= most


def test_spoilt_requests_to_the_staging_server(kit: ModuleType, device: ModuleType, hostile: ModuleType) -> None:
    """Each is answered or cuts its reader off; the server's thread serves the next."""
    pair = Pair(kit, device, staged=True)
    request = {"id": 1, "group": "full", "offset": 0, "pieces": [[0, pair.unit, 8]], "units": hostile.units(1, 2)}
    pair.read()
    before = descriptors()
    raw = pair.attach()
    inputs = list(hostile.spoilt(request, ("full", [[0, 1 << 62, 8]], [[0, 8, 8]] * 3)))
    for data in random.Random(1).sample(inputs, 300) + inputs[-4:]:
        raw.sendall(HEADER.pack(len(data)) + data)
        try:
            answer = raw.recv(1 << 16)
        except ConnectionResetError:  # it had not read all of it
            answer = b""
        if not answer:
            raw.close()
            raw = pair.attach()
    raw.close()
    pair.read()
    assert settles_at(before)
    assert (pair.source.array() < 200).all()
    pair.close()


def test_endpoint_records_that_are_spoilt(pair: Pair, hostile: ModuleType) -> None:
    """A sender may say anything in its record: the connection is made, or a typed error says why not."""
    pair.read()
    before, refused = descriptors(), 0
    foreign = ({"full": 8}, {"full": 1 << 40}, {"full": 2**63}, {"other": 64})
    for data in hostile.spoilt(pair.fields, foreign):
        try:
            pair.client.connect(data).close()
        except TransferError:
            refused += 1
    assert refused > 100
    assert settles_at(before)
    pair.read()


def test_strangers_at_the_socket(pair: Pair) -> None:
    """Garbage, wrong secrets, half secrets, who comes and goes and who stays: readers are served meanwhile."""
    pair.read()
    before, threads = descriptors(), threading.active_count()
    stop = threading.Event()
    idle: list[socket.socket] = []

    def flood(seed: int) -> None:
        rng = random.Random(seed)
        while not stop.is_set():
            with contextlib.suppress(OSError):
                raw = pair.knock()
                if len(idle) < 60 and rng.random() < 0.2:
                    raw.sendall(b"x" * rng.randrange(32))
                    idle.append(raw)
                    continue
                with raw:
                    raw.sendall(rng.randbytes(rng.choice((0, 1, 31, 32, 33, 100_000))))

    floods = [threading.Thread(target=flood, args=(n,)) for n in range(2)]
    for thread in floods:
        thread.start()
    until = time.monotonic() + 0.6
    while time.monotonic() < until:
        pair.read()
    stop.set()
    for thread in floods:
        thread.join()
    pair.read()
    for raw in idle:
        raw.close()
    assert settles_at(before)
    assert threading.active_count() <= threads


def test_what_goes_wrong_with_a_client_costs_its_connection(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is: the thread goes on serving the others."""
    receive, wrong = ShmServer._receive, iter([RuntimeError("a fault"), MemoryError("all of it")])

    def once(server: ShmServer, fd: int) -> None:
        for error in wrong:
            raise error
        receive(server, fd)

    monkeypatch.setattr(ShmServer, "_receive", once)
    for _ in range(2):
        with pair.knock() as raw:
            raw.sendall(b"x")
            with contextlib.suppress(ConnectionResetError):
                assert raw.recv(1) == b""
    pair.read()
