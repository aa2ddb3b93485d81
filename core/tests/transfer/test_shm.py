"""The ``shm`` transport: what it maps, what it refuses, and that nothing is left behind however a process ends."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
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
from kvcore.errors import ConfigError, PeerLostError, TransferError, UnsupportedError
from kvcore.layout.moves import Program
from kvcore.transfer.copier import CopyTask, InlineCopier, ThreadCopier
from kvcore.transfer.shm import memfd
from kvcore.transfer.shm.transport import ShmEndpoint, ShmTransport

CHILD = Path(__file__).parents[1] / "support" / "transfer_child.py"

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("small_heap"),
]


def descriptors() -> list[str]:
    gc.collect()
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(entry.readlink()))
        except FileNotFoundError:  # the listing's own
            continue
    return sorted(found)


def abstract_sockets() -> set[str]:
    return {word for word in Path("/proc/net/unix").read_text().split() if word.startswith("@kvcore-")}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before, threads = descriptors(), threading.active_count()
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and descriptors() != before:
        time.sleep(0.02)
    assert descriptors() == before
    assert threading.active_count() == threads


class Pair:
    """A serving transport with unit-numbered bytes, and a poisoned receiving one."""

    def __init__(self, kit: ModuleType, units: int = 16, copier: Any = None, **options: Any) -> None:
        self.layout = kit.layout(**options)
        place = self.layout.place({"pages": units})
        self.source, self.destination = kit.MemArena(place.arena_bytes), kit.MemArena(place.arena_bytes)
        self.source.array()[:] = np.random.default_rng(0).integers(0, 256, place.arena_bytes, np.uint8)
        self.destination.array()[:] = 0xFF
        self.server, self.client = ShmTransport(), ShmTransport(copier)
        self.record = self.server.register({"full": self.source})
        self.client.register({"full": self.destination})
        self.program = Program.build(self.layout, place, self.layout, place, kit.COMPONENTS)

    def job(self, src: list[int], dst: list[int], group: str = "full") -> ReadJob:
        return ReadJob(group, self.program, np.array(src, np.int64), np.array(dst, np.int64))

    def close(self) -> None:
        for item in (self.client, self.server, self.source, self.destination):
            item.close()


@pytest.fixture
def pair(kit: ModuleType) -> Iterator[Pair]:
    made = Pair(kit)
    yield made
    made.close()


def wait(handle: Any, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not handle.poll():
        assert time.monotonic() < deadline, "read did not end"
        time.sleep(0.001)


def test_reads_move_exactly_the_units(pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    handle = connection.read([pair.job([3, 4, 9], [7, 1, 2]), pair.job([5], [15])])
    wait(handle)
    source, landed = (arena.array().reshape(16, -1) for arena in (pair.source, pair.destination))
    for src, dst in ((3, 7), (4, 1), (9, 2), (5, 15)):
        assert (landed[dst] == source[src]).all()
    untouched = [unit for unit in range(16) if unit not in (7, 1, 2, 15)]
    assert (landed[untouched] == 0xFF).all()
    assert handle.seconds > 0
    assert handle.nbytes == 4 * pair.program.bytes_per_unit
    assert connection.alive()
    assert connection.quiesce(1)


def test_an_end_of_a_read_wakes_whoever_waits_on_the_descriptor(pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    handle = connection.read([pair.job([3], [7])])
    assert poll.poll(5000)
    assert connection.alive()
    assert handle.poll()
    assert poll.poll(0) == [], "alive() resets it"


@pytest.mark.parametrize("bad", [16, -2, 2**40])
@pytest.mark.parametrize("side", ["src", "dst"])
def test_ids_out_of_range_are_refused_before_any_byte(pair: Pair, bad: int, side: str) -> None:
    """Even with good jobs before the bad one."""
    connection = pair.client.connect(pair.record)
    job = pair.job([3, bad], [7, 8]) if side == "src" else pair.job([3, 4], [7, bad])
    with pytest.raises(TransferError, match="outside the arena"):
        connection.read([pair.job([1], [2]), job])
    assert connection.quiesce(0)
    assert (pair.destination.array() == 0xFF).all()


def test_plans_larger_than_the_arenas_and_unknown_groups_are_refused(kit: ModuleType, pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    with pytest.raises(TransferError, match="no registered arena"):
        connection.read([pair.job([1], [2], "draft/full")])
    large = pair.layout.place({"pages": 99})
    program = Program.build(pair.layout, large, pair.layout, pair.layout.place({"pages": 16}), kit.COMPONENTS)
    with pytest.raises(TransferError, match="smaller than the plan"):
        connection.read([ReadJob("full", program, np.array([50]), np.array([2]))])
    assert (pair.destination.array() == 0xFF).all()


def test_no_units_is_a_read_like_any_other(pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    wait(connection.read([pair.job([], [])]))
    wait(connection.read([]))
    assert (pair.destination.array() == 0xFF).all()


def test_wrong_token_gets_no_descriptor(pair: Pair) -> None:
    record = msgspec.msgpack.decode(pair.record, type=ShmEndpoint)
    wrong = msgspec.structs.replace(record, token=b"x" * 32)
    with pytest.raises(TransferError):
        pair.client.connect(msgspec.msgpack.encode(wrong))
    with socket.socket(socket.AF_UNIX) as raw:
        raw.settimeout(5)
        raw.connect("\0" + record.name)
        raw.sendall(b"y" * 40)
        with contextlib.suppress(ConnectionResetError):  # as good as an end: no byte was handed over
            assert raw.recv(100) == b""
    pair.client.connect(pair.record)


def test_a_client_that_says_nothing_does_not_block_the_others(pair: Pair) -> None:
    record = msgspec.msgpack.decode(pair.record, type=ShmEndpoint)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect("\0" + record.name)
        silent.sendall(b"abc")
        pair.client.connect(pair.record)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", msgspec.msgpack.encode({"name": "x"})])
def test_endpoint_records_that_are_none(pair: Pair, garbage: bytes) -> None:
    with pytest.raises(TransferError):
        pair.client.connect(garbage)


def test_nobody_listens(pair: Pair) -> None:
    gone = ShmEndpoint("kvcore-nobody", b"x" * 32, {"full": 4096})
    with pytest.raises(PeerLostError):
        pair.client.connect(msgspec.msgpack.encode(gone))


def test_announced_size_must_be_there(kit: ModuleType, pair: Pair) -> None:
    record = msgspec.msgpack.decode(pair.record, type=ShmEndpoint)
    larger = msgspec.structs.replace(record, arenas={"full": record.arenas["full"] + (1 << 20)})
    with pytest.raises(TransferError, match="smaller than announced"):
        pair.client.connect(msgspec.msgpack.encode(larger))
    other = msgspec.structs.replace(record, arenas={"other": 4096})
    with pytest.raises(TransferError, match="hand over"):
        pair.client.connect(msgspec.msgpack.encode(other))


def test_arenas_that_could_shrink_are_not_mapped(kit: ModuleType) -> None:
    """A page cut off by its owner would kill the reader with SIGBUS."""
    arena, local = kit.MemArena(8192, sealed=False), kit.MemArena(8192)
    server, client = ShmTransport(), ShmTransport()
    record = server.register({"full": arena})
    client.register({"full": local})
    with pytest.raises(TransferError, match="sealed"):
        client.connect(record)
    for item in (client, server, arena, local):
        item.close()


def test_connecting_commits_no_page_of_the_owner() -> None:
    """An owner may leave memory out until it is used; and pages of tens of GiB are not walked while a peer waits."""
    fd, array = memfd.create("lazy", 64 << 20, populate=False)
    mapped = memfd.Mapping(fd, 64 << 20)
    try:
        assert os.fstat(fd).st_blocks == 0
        array[5 << 20] = 7
        assert mapped.array[5 << 20] == 7
        assert os.fstat(fd).st_blocks * 512 <= 2 << 20
    finally:
        mapped.close()
        os.close(fd)


def test_registration(kit: ModuleType) -> None:
    """J12: overlapping arenas are refused, adjacent ones are not, an empty one is skipped."""

    class Fake:
        device = "cpu"

        def __init__(self, address: int, nbytes: int, fd: int | None) -> None:
            self.address, self.nbytes, self.fd = address, nbytes, fd

        def array(self) -> Any:
            return np.zeros(self.nbytes, np.uint8)

        def queue(self) -> None:
            return None

    real = kit.MemArena(4096)
    transport = ShmTransport()
    with pytest.raises(TransferError, match="overlap"):
        transport.register({"a": Fake(1000, 128, real.fd), "b": Fake(1064, 128, real.fd)})
    with pytest.raises(UnsupportedError, match="descriptor"):
        transport.register({"a": Fake(1000, 128, None)})
    with pytest.raises(TransferError, match="larger than its file"):
        transport.register({"a": Fake(1000, 8192, real.fd)})
    with pytest.raises(TransferError, match="register"):
        transport.connect(b"")
    record = transport.register(
        {"a": Fake(1000, 64, real.fd), "b": Fake(1064, 64, real.fd), "empty": Fake(1032, 0, None)}
    )
    assert set(msgspec.msgpack.decode(record, type=ShmEndpoint).arenas) == {"a", "b"}
    with pytest.raises(TransferError, match="once"):
        transport.register({})
    transport.close()
    transport.close()
    real.close()
    with pytest.raises(TransferError):
        transport.register({})


def test_no_arenas_at_all(kit: ModuleType) -> None:
    server, client = ShmTransport(), ShmTransport()
    record = server.register({})
    client.register({})
    assert client.connect(record).alive()
    client.close()
    server.close()


def test_supports(kit: ModuleType) -> None:
    """Any device: what cannot be mapped is staged, and an arena that can do neither is refused when registered."""
    transport = ShmTransport()
    assert transport.supports("cpu", kit.layout())
    assert transport.supports("cuda:0", kit.layout())
    assert transport.traits.executes_programs
    transport.close()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"stage_bytes": "32MB?"}, "stage_bytes"),
        ({"stage_bytes": 0}, "stage_bytes"),
        ({"stage_readers": 0}, "stage_readers"),
        ({"stage_readers": True}, "stage_readers"),
        ({"stage_timeout_s": 0.0}, "stage_timeout_s"),
        ({"stage_timeout_s": float("inf")}, "stage_timeout_s"),
    ],
)
def test_options_are_refused_by_key(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ShmTransport(**options)
    assert caught.value.fields["key"] == f"transfer.options.{key}"


def test_closing_waits_for_reads_before_it_unmaps(kit: ModuleType) -> None:
    class Slow(ThreadCopier):
        """Runs a task when it is told to."""

        def __init__(self) -> None:
            super().__init__()
            self.go = threading.Event()

        def submit(self, task: CopyTask) -> None:
            run = task.run

            def later() -> None:
                self.go.wait(5)
                run()

            task.run = later  # type: ignore[method-assign]
            super().submit(task)

    copier = Slow()
    pair = Pair(kit, copier=copier)
    connection = pair.client.connect(pair.record)
    handle = connection.read([pair.job([3], [7])])
    queued = connection.read([pair.job([4], [8])])
    assert not connection.quiesce(0.05)
    connection.close()
    assert not connection.alive()
    with pytest.raises(PeerLostError):
        connection.read([pair.job([3], [9])])
    copier.go.set()
    assert connection.quiesce(5)
    wait(handle)
    wait(queued)
    with pytest.raises(PeerLostError):
        connection.read([pair.job([3], [9])])
    assert (pair.destination.array().reshape(16, -1)[7] == pair.source.array().reshape(16, -1)[3]).all()
    pair.close()


def test_a_closed_copier_cancels(kit: ModuleType) -> None:
    pair = Pair(kit)
    connection = pair.client.connect(pair.record)
    pair.client._copier.close()
    handle = connection.read([pair.job([3], [7])])
    with pytest.raises(TransferError, match="closed"):
        handle.poll()
    assert connection.quiesce(0)
    assert (pair.destination.array() == 0xFF).all()
    pair.close()


def test_a_copy_that_fails_is_quiet_and_typed(kit: ModuleType) -> None:
    pair = Pair(kit, copier=InlineCopier())
    connection = pair.client.connect(pair.record)
    job = pair.job([3], [7])

    class Broken:
        src_bytes = dst_bytes = 0

        def pairs(self, src: Any, dst: Any) -> None:
            return None

    handle = connection.read([ReadJob("full", Broken(), job.src_units, job.dst_units)])  # type: ignore[arg-type]
    with pytest.raises(TransferError, match="copy failed"):
        handle.poll()
    assert connection.quiesce(0)
    pair.close()


def test_death_of_the_owner_is_seen_at_once(pair: Pair) -> None:
    connection = pair.client.connect(pair.record)
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    assert connection.alive()
    pair.server.close()
    assert poll.poll(5000)
    assert not connection.alive()
    assert poll.poll(0) == [], "a dead peer must not keep the poller busy"
    with pytest.raises(PeerLostError):
        connection.read([pair.job([3], [7])])


# --- several processes ---


def child(role: str, config: dict[str, Any]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(CHILD), role, json.dumps(config)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


@pytest.mark.parametrize("end", ["exit", "tidy", "kill"])
def test_a_clients_exit_leaves_the_owners_memory(kit: ModuleType, end: str) -> None:
    """N6: a child attaches and goes, in whatever way: the memory is still there, readable, and can be attached to."""
    pair = Pair(kit)
    config = {"endpoint": pair.record.hex(), "byte": int(pair.source.array()[0]), "tidy": end == "tidy"}
    with child("attach", {**config, "wait": end == "kill"}) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "attached\n"
        if end == "kill":
            process.send_signal(signal.SIGKILL)
        assert process.wait(10) == (-9 if end == "kill" else 0)
    assert pair.source.array()[0] == config["byte"]
    wait(pair.client.connect(pair.record).read([pair.job([3], [7])]))
    assert (pair.destination.array().reshape(16, -1)[7] == pair.source.array().reshape(16, -1)[3]).all()
    pair.close()


def test_nothing_is_left_of_a_killed_owner(pair: Pair) -> None:
    """No socket name, no segment; and a map made before is still readable."""
    config = {"units": 16, "instance": "s", "options": {}}
    with child("sender", config) as process:
        assert process.stdout is not None
        hello = json.loads(process.stdout.readline())
        record = msgspec.msgpack.decode(bytes.fromhex(hello["endpoint"]), type=ShmEndpoint)
        connection = pair.client.connect(bytes.fromhex(hello["endpoint"]))
        assert "@" + record.name in abstract_sockets()
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        deadline = time.monotonic() + 5
        while connection.alive() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert not connection.alive()
    assert "@" + record.name not in abstract_sockets()
    assert not [entry for entry in Path("/dev/shm").iterdir() if "kvcore" in entry.name]
    assert len(bytes(connection.peek("full")[:100])) == 100
