"""Two real processes: bytes arrive, and ``kill -9`` or a stop of the sender at any point is a typed failure."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import PeerLostError
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, ReceiveProgress, TransferOptions
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire.endpoint import ReceiverEndpoint

CHILD = Path(__file__).parents[1] / "support" / "transfer_child.py"
UNITS = 24
OPTIONS = {"heartbeat_s": 0.2, "peer_timeout_s": 2.0}


def content(unit: int, nbytes: int) -> Any:
    """What the child wrote, worked out byte by byte."""
    return np.array([(n * 7 + unit * 13) % 251 for n in range(nbytes)], np.uint8)


def descriptors() -> list[str]:
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return sorted(found)


class Sender:
    """The child process."""

    def __init__(self, instance: str = "s1") -> None:
        config = {"units": UNITS, "instance": instance, "options": OPTIONS}
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD), "sender", json.dumps(config)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.hello = self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def do(self, *words: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(str(word) for word in words) + "\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait(10)


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@pytest.fixture
def receiver(kit: ModuleType, sender: Sender) -> Iterator[Any]:
    """A connected endpoint over poisoned memory; everything it took is given back afterwards."""
    before, threads = descriptors(), set(threading.enumerate())
    layout = kit.layout()
    arena = kit.MemArena(layout.place({"pages": UNITS}).arena_bytes)
    arena.array()[:] = 0xFF
    transport = ShmTransport()
    transport.register({"full": arena})
    manifest = kit.manifest("receiver", "r1", layout, units=UNITS)
    endpoint = ReceiverEndpoint(sender.hello["address"], manifest, transport, options=TransferOptions(**OPTIONS))
    yield endpoint, arena
    endpoint.close()
    transport.close()
    arena.close()
    deadline = time.monotonic() + 5
    while descriptors() != before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert descriptors() == before
    assert set(threading.enumerate()) == threads


def ask(kit: ModuleType, endpoint: ReceiverEndpoint, request: str, units: list[int], tokens: int) -> None:
    endpoint.ask(request, {kit.KEY: np.array(units, np.int64)}, 0, tokens)


def take(endpoint: ReceiverEndpoint, *kinds: type) -> Any:
    while True:
        event = endpoint.wait_event(10)
        assert event is not None, "no event came in ten seconds"
        if isinstance(event, kinds):
            return event


def test_bytes_arrive_in_the_other_process(kit: ModuleType, sender: Sender, receiver: Any) -> None:
    endpoint, arena = receiver
    ask(kit, endpoint, "x", [5, 17, 6, 2], 15)
    sender.do("begin", "x", 15)
    sender.do("offer", "x", 0, 5, 0, "11", 0)
    assert take(endpoint, ReceiveProgress).stop == 5
    sender.do("offer", "x", 5, 10, 1, "4", 0)
    sender.do("offer", "x", 10, 15, 2, "20,9", 1)
    done = take(endpoint, ReceiveDone, ReceiveFailed)
    assert (type(done), done.engine_data) == (ReceiveDone, b"e")
    assert sender.do("event") == {"event": "SendDone"}
    units = arena.array().reshape(UNITS, -1)
    for dst, src in ((5, 11), (17, 4), (6, 20), (2, 9)):
        assert (units[dst] == content(src, units.shape[1])).all()
    assert (units[[u for u in range(UNITS) if u not in (5, 17, 6, 2)]] == 0xFF).all()
    del units


@pytest.mark.parametrize("point", ["hello", "asked", "streaming", "pulled", "stopped"])
def test_sender_killed(kit: ModuleType, sender: Sender, receiver: Any, point: str) -> None:
    """Every request on it fails within ten seconds, quiet and typed; a later ask is refused."""
    endpoint, _ = receiver
    if point != "hello":
        ask(kit, endpoint, "x", [5, 17, 6, 2], 15)
        ask(kit, endpoint, "y", [8], 3)
    if point in ("streaming", "pulled", "stopped"):
        sender.do("begin", "x", 15)
        sender.do("offer", "x", 0, 5, 0, "11", 0)
        take(endpoint, ReceiveProgress)
    if point == "pulled":
        sender.do("offer", "x", 5, 10, 1, "4", 0)
    started = time.monotonic()
    sender.process.send_signal(signal.SIGSTOP if point == "stopped" else signal.SIGKILL)
    if point != "hello":
        failed = [take(endpoint, ReceiveFailed) for _ in range(2)]
        assert time.monotonic() - started < 10
        assert {event.request for event in failed} == {"x", "y"}
        assert all(event.quiet and isinstance(event.error, PeerLostError) for event in failed)
    while endpoint.connected:
        assert time.monotonic() - started < 10
        time.sleep(0.01)
    with pytest.raises(PeerLostError):
        ask(kit, endpoint, "z", [9], 3)
    assert endpoint.events() == []


def test_receiver_killed(kit: ModuleType, sender: Sender, receiver: Any) -> None:
    """The sender notices a receiver that is gone, releases what it held for it, and serves the next."""
    endpoint, _ = receiver
    sender.do("begin", "x", 15)
    sender.do("offer", "x", 0, 5, 0, "11", 0)
    code = (
        "import importlib.util, sys, os, signal\n"
        "import numpy as np\n"
        "from kvcore.transfer.wire.endpoint import ReceiverEndpoint\n"
        "from kvcore.transfer.shm.transport import ShmTransport\n"
        "spec = importlib.util.spec_from_file_location('kit', sys.argv[1])\n"
        "kit = importlib.util.module_from_spec(spec); spec.loader.exec_module(kit)\n"
        "layout = kit.layout()\n"
        "arena = kit.MemArena(layout.place({'pages': 24}).arena_bytes)\n"
        "transport = ShmTransport(); transport.register({'full': arena})\n"
        "end = ReceiverEndpoint(sys.argv[2], kit.manifest('receiver', 'r2', layout, units=24), transport)\n"
        "end.ask('x', {kit.KEY: np.array([1, 2, 3, 4])}, 0, 15)\n"
        "assert end.wait_event(10).stop == 5\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    kit_path = CHILD.with_name("transfer_kit.py")
    other = subprocess.run(
        [sys.executable, "-c", code, str(kit_path), sender.hello["address"]], check=False, timeout=30
    )
    assert other.returncode == -signal.SIGKILL
    assert sender.do("event") == {"event": "SendFailed"}
    ask(kit, endpoint, "x", [5, 17, 6, 2], 15)
    sender.do("begin", "x", 15)
    sender.do("offer", "x", 0, 15, 0, "11,4,20,9", 1)
    assert isinstance(take(endpoint, ReceiveDone, ReceiveFailed), ReceiveDone)


def test_nothing_is_printed_at_exit(sender: Sender) -> None:
    """A clean end: exit code 0, no thread that hangs."""
    assert sender.process.stdin is not None
    sender.process.stdin.write("quit\n")
    sender.process.stdin.flush()
    assert sender.process.wait(10) == 0
