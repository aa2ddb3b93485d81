"""``shm`` for arenas that cannot be mapped, on a device whose copies end late: bytes, bounds, and peers that misbehave."""

from __future__ import annotations

import gc
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.builtin.pools.memfd import MemfdArena
from kvcore.contract import ReadJob, Transport
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout.moves import Program
from kvcore.plugins.registry import Registry
from kvcore.testing import TransportSuite
from kvcore.transfer.shm.stage_wire import StageHello, StageRequest, frame
from kvcore.transfer.shm.transport import ShmEndpoint, ShmTransport

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")

UNITS = 16
CHILD = Path(__file__).parents[1] / "support" / "stage_child.py"


class StagedSuite(TransportSuite):
    """The conformance suite over arenas that only copy. ``kinds``: of the source and of the destination."""

    source_on_device = target_on_device = True
    stage_bytes = 1 << 20

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        kinds = [
            (lambda nbytes: device.FakeArena(nbytes, strict=False)) if on_device else MemfdArena
            for on_device in (self.source_on_device, self.target_on_device)
        ]
        return device.registry_of(device.FakePool(*kinds))

    @pytest.fixture
    def new_transport(self) -> Callable[[], Transport]:
        return lambda: ShmTransport(stage_bytes=self.stage_bytes)


class TestDeviceToDevice(StagedSuite):
    """Both ends on a device."""


class TestDeviceToHost(StagedSuite):
    """Only the source is on a device."""

    target_on_device = False


class TestHostToDevice(StagedSuite):
    """Only the destination is on a device."""

    source_on_device = False


class TestTightRing(StagedSuite):
    """A ring that barely holds a unit: no two halves, a request a unit."""

    stage_bytes = 110_000


class Pair:
    """A serving transport whose arena is on a device, full of random bytes, and a poisoned receiving one."""

    def __init__(self, kit: ModuleType, device: ModuleType, *, target: Any = None, **options: Any) -> None:
        self.layout = kit.layout()
        place = self.layout.place({"pages": UNITS})
        self.unit = place.arena_bytes // UNITS
        self.source = device.FakeArena(place.arena_bytes)
        self.target = target or device.FakeArena(place.arena_bytes)
        self.source.array()[:] = np.random.default_rng(0).integers(0, 256, place.arena_bytes, np.uint8)
        self.source.fake.mark()
        self.target.array()[:] = 0xFF
        self.options = {"stage_bytes": 4 * self.unit, "stage_timeout_s": 2.0, **options}
        self.server, self.client = ShmTransport(**self.options), ShmTransport(**self.options)
        self.record = self.server.register({"full": self.source})
        self.client.register({"full": self.target})
        self.program = Program.build(self.layout, place, self.layout, place)

    def job(self, src: list[int], dst: list[int]) -> ReadJob:
        return ReadJob("full", self.program, np.array(src, np.int64), np.array(dst, np.int64))

    def landed(self, src: list[int], dst: list[int]) -> bool:
        rows, got = (arena.array().reshape(UNITS, -1) for arena in (self.source, self.target))
        return bool((got[dst] == rows[src]).all())

    def close(self) -> None:
        for item in (self.client, self.server, self.source, self.target):
            item.close()


@pytest.fixture
def pair(kit: ModuleType, device: ModuleType) -> Iterator[Pair]:
    made = Pair(kit, device)
    yield made
    made.source.fake.stuck = False
    made.close()
    assert not made.source.fake.pinned
    assert not made.target.fake.pinned


def finish(handle: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not handle.poll():
        assert time.monotonic() < deadline, "read did not end"
        time.sleep(0.001)


ALL = list(range(1, UNITS))
BACK = ALL[::-1]


def test_more_units_than_the_ring_holds(pair: Pair) -> None:
    """Two halves in turn; every copy through pinned memory."""
    connection = pair.client.connect(pair.record)
    handle = connection.read([pair.job(ALL, BACK)])
    finish(handle)
    assert pair.landed(ALL, BACK)
    assert (pair.target.array().reshape(UNITS, -1)[0] == 0xFF).all()
    assert handle.nbytes == len(ALL) * pair.program.bytes_per_unit
    assert handle.seconds > 0
    assert (pair.source.fake.slow, pair.target.fake.slow) == (0, 0)
    assert pair.source.fake.issued.count("gather") == -(-len(ALL) // 2)


def test_what_is_written_after_the_last_mark_is_not_what_is_sent(pair: Pair) -> None:
    """A mark is what orders the owner's writes before the copy: without one the device's copy may be older."""
    before = pair.source.array().reshape(UNITS, -1)[3].copy()
    pair.source.array().reshape(UNITS, -1)[3] = 0x11
    connection = pair.client.connect(pair.record)
    finish(connection.read([pair.job([3], [4])]))
    assert (pair.target.array().reshape(UNITS, -1)[4] == before).all()
    pair.source.fake.mark()
    finish(connection.read([pair.job([3], [4])]))
    assert pair.landed([3], [4])


def test_a_unit_larger_than_the_ring_is_refused_with_the_remedy(kit: ModuleType, device: ModuleType) -> None:
    pair = Pair(kit, device, stage_bytes=64)
    with pytest.raises(TransferError, match="larger than the peer's staging memory") as caught:
        finish(pair.client.connect(pair.record).read([pair.job([1], [1])]))
    assert "stage_bytes" in caught.value.remedy
    assert (pair.target.array() == 0xFF).all()
    pair.close()


def test_a_device_that_fails_fails_the_read_and_the_next_may_work(pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    pair.source.fake.fail = "unspecified launch failure"
    with pytest.raises(TransferError, match="could not stage") as caught:
        finish(connection.read([pair.job([1], [2])]))
    assert "launch failure" in str(caught.value.fields["reason"])
    pair.source.fake.fail = ""
    pair.target.fake.fail = "unspecified launch failure"
    handle = connection.read([pair.job(ALL, ALL)])
    with pytest.raises(TransferError, match="copy failed"):
        finish(handle)
    assert not pair.target.fake.pending
    pair.target.fake.fail = ""
    finish(connection.read([pair.job([5], [6])]))
    assert pair.landed([5], [6])


# --- peers that misbehave ---


def test_an_owner_that_does_not_answer_holds_up_its_own_reads_and_not_for_long(
    kit: ModuleType, device: ModuleType
) -> None:
    stopped, healthy = (Pair(kit, device, stage_timeout_s=0.3) for _ in range(2))
    slow, fast = stopped.client.connect(stopped.record), stopped.client.connect(healthy.record)
    finish(slow.read([stopped.job([1], [1])]))
    stopped.source.fake.stuck = True
    began = time.monotonic()
    waiting = slow.read([stopped.job([2], [2])])
    queued = slow.read([stopped.job([3], [3])])
    finish(fast.read([healthy.job([4], [4])]))
    assert time.monotonic() - began < 0.3, "a stopped owner held up another one's reads"
    for handle in (waiting, queued):
        with pytest.raises(TransferError, match="in time"):
            finish(handle, 3)
    assert slow.quiesce(0)
    assert (stopped.target.array().reshape(UNITS, -1)[2] == 0xFF).all()
    stopped.source.fake.stuck = False
    finish(slow.read([stopped.job([2], [2])]))
    assert stopped.landed([2], [2])
    for item in (stopped, healthy):
        item.close()


def test_closing_does_not_wait_for_an_owner_that_does_not_answer(kit: ModuleType, device: ModuleType) -> None:
    pair = Pair(kit, device, stage_timeout_s=60.0)
    connection = pair.client.connect(pair.record)
    pair.source.fake.stuck = True
    handles = [connection.read([pair.job([n], [n])]) for n in (1, 2)]
    time.sleep(0.05)
    assert not connection.quiesce(0)
    pair.client.connect(pair.record).close()  # the server's thread polls its copies, and has time for others
    began = time.monotonic()
    connection.close()
    assert time.monotonic() - began < 5
    for handle in handles:
        with pytest.raises(TransferError, match="closed"):
            handle.poll()
    assert connection.quiesce(0)
    assert (pair.target.array() == 0xFF).all()
    pair.source.fake.stuck = False
    pair.close()


def test_death_of_the_owner_ends_a_read_that_waits(kit: ModuleType, device: ModuleType) -> None:
    pair = Pair(kit, device, stage_timeout_s=60.0)
    connection = pair.client.connect(pair.record)
    finish(connection.read([pair.job([1], [1])]))
    pair.source.fake.stuck = True
    handle = connection.read([pair.job([2], [2])])
    time.sleep(0.05)
    closer = threading.Thread(target=pair.server.close)
    closer.start()
    time.sleep(0.05)
    assert closer.is_alive(), "the server went although a copy of its arena was under way"
    pair.source.fake.stuck = False
    closer.join(5)
    assert not closer.is_alive()
    with pytest.raises(PeerLostError):
        finish(handle)
    assert not connection.alive()
    with pytest.raises(PeerLostError):
        connection.read([pair.job([1], [1])])
    pair.close()


def test_a_reader_that_goes_leaves_no_memory_and_nobody_waits_for_it(kit: ModuleType, device: ModuleType) -> None:
    """Its ring is given back when the device has ended the copies into it, and not before."""
    pair = Pair(kit, device, stage_readers=1)
    raw, _ = attach(pair.record)
    raw.sendall(ask(pair))
    wait_for(lambda: pair.source.fake.issued == ["gather"])
    pair.source.fake.stuck = True
    raw.sendall(ask(pair, offset=pair.unit))
    wait_for(lambda: len(pair.source.fake.issued) == 2)
    raw.close()
    with pytest.raises(TransferError, match="staging memory") as caught:
        finish(pair.client.connect(pair.record).read([pair.job([1], [1])]))
    assert "stage_readers" in str(caught.value.fields["reason"])
    assert len(pair.source.fake.pinned) == 1
    pair.source.fake.stuck = False
    wait_for(lambda: not pair.source.fake.pinned)
    finish(pair.client.connect(pair.record).read([pair.job([1], [1])]))
    assert pair.landed([1], [1])
    pair.close()


def test_a_reader_that_takes_nothing_away_is_in_nobodys_way(pair: Pair) -> None:
    raw, ring = attach(pair.record)
    assert ring == 4 * pair.unit
    raw.sendall(ask(pair, units=(1, 2, 3, 4)))
    finish(pair.client.connect(pair.record).read([pair.job(ALL, ALL)]))
    assert pair.landed(ALL, ALL)
    raw.close()


@pytest.mark.parametrize(
    "changes",
    [
        {"group": "draft"},
        {"offset": -1},
        {"offset": 1 << 40},
        {"units": (1, 2, 3, 4, 5)},
        {"units": ()},
        {"units": (-1,)},
        {"units": (UNITS,)},
        {"units": (1 << 60,)},
        {"pieces": ()},
        {"pieces": ((-8, 64, 8),)},
        {"pieces": ((0, 4, 8),)},
        {"pieces": ((0, 0, 0),)},
        {"pieces": ((0, 1 << 62, 8),)},
    ],
)
def test_requests_that_reach_outside_are_not_served(pair: Pair, changes: dict[str, Any]) -> None:
    """Every number comes from another process. It is cut off, before a byte is copied; others go on."""
    raw, _ = attach(pair.record)
    raw.sendall(ask(pair, **changes))
    assert raw.recv(100) == b""
    raw.close()
    assert pair.source.fake.issued == []
    finish(pair.client.connect(pair.record).read([pair.job([1], [1])]))


@pytest.mark.parametrize("data", [b"\xff" * 8, struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 0)])
def test_what_is_no_request_cuts_the_reader_off(pair: Pair, data: bytes) -> None:
    raw, _ = attach(pair.record)
    raw.sendall(data)
    assert raw.recv(100) == b""
    raw.close()


def test_requests_that_overlap_or_pile_up_are_not_served(pair: Pair) -> None:
    pair.source.fake.stuck = True
    raw, _ = attach(pair.record)
    raw.sendall(ask(pair, id=1) + ask(pair, id=2))
    assert raw.recv(100) == b""
    raw.close()
    raw, _ = attach(pair.record)
    many = [ask(pair, id=n, offset=n, pieces=((0, pair.unit, 1),)) for n in range(9)]
    raw.sendall(b"".join(many))
    assert raw.recv(100) == b""
    raw.close()


def test_the_ring_is_not_for_those_without_the_token(pair: Pair) -> None:
    record = msgspec.msgpack.decode(pair.record, type=ShmEndpoint)
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5)
        raw.connect("\0" + record.name)
        raw.sendall(b"y" * 32)
        assert raw.recv(100) == b""


def test_nothing_is_left(kit: ModuleType, device: ModuleType) -> None:
    def footprint() -> tuple[int, int]:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir())), threading.active_count()

    def once() -> None:
        pair = Pair(kit, device)
        finish(pair.client.connect(pair.record).read([pair.job(ALL, ALL)]))
        pair.close()

    once()
    before = footprint()
    once()
    assert footprint() == before


def attach(record: bytes) -> tuple[socket.socket, int]:
    """A reader made by hand: its socket, and the size of its ring."""
    endpoint = msgspec.msgpack.decode(record, type=ShmEndpoint)
    raw = socket.socket(socket.AF_UNIX)
    raw.settimeout(5)
    raw.connect("\0" + endpoint.name)
    raw.sendall(endpoint.stage_token)
    data, fds, _, _ = socket.recv_fds(raw, 4096, 1)
    for fd in fds:
        socket.close(fd)
    hello = msgspec.msgpack.decode(data[4:], type=StageHello)
    assert len(fds) == 1
    return raw, hello.nbytes


def ask(pair: Pair, units: tuple[int, ...] = (1,), **changes: Any) -> bytes:
    base: dict[str, Any] = {"id": 1, "group": "full", "offset": 0, "pieces": ((0, pair.unit, pair.unit),)}
    return frame(StageRequest(**(base | changes), units=np.array(units, "<i8").tobytes()))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- another process ---


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_owner_that_is_stopped_or_killed(kit: ModuleType, device: ModuleType, end: str) -> None:
    """Stopped: its reads fail in time, and work again once it runs. Killed: they fail at once."""
    local = Pair(kit, device, stage_timeout_s=0.5)
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(local.source.nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        connection = local.client.connect(bytes.fromhex(child.stdout.readline()))
        want = (np.arange(local.source.nbytes) % 251).astype(np.uint8).reshape(UNITS, -1)
        got = local.target.array().reshape(UNITS, -1)
        finish(connection.read([local.job(ALL, BACK)]))
        assert (got[BACK] == want[ALL]).all()
        got[:] = 0xFF
        child.send_signal(signal.SIGSTOP if end == "stop" else signal.SIGKILL)
        began = time.monotonic()
        handle = connection.read([local.job([1], [1])])
        with pytest.raises(PeerLostError):
            finish(handle)
        assert time.monotonic() - began < (3 if end == "stop" else 0.4)
        assert connection.quiesce(0)
        assert (got == 0xFF).all()
        if end == "stop":
            assert connection.alive()
            child.send_signal(signal.SIGCONT)
            finish(connection.read([local.job([2], [3])]))
            assert (got[3] == want[2]).all()
            child.kill()
        else:
            wait_for(lambda: not connection.alive())
    local.close()
