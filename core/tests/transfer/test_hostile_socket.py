"""Floods at a sender's TCP port, with and without keys: the honest pair is served meanwhile, and nothing is left of them."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, TransferOptions
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire.endpoint import CurveKeys, ReceiverEndpoint, SenderEndpoint

UNITS = 32
QUICK = TransferOptions(heartbeat_s=0.2, hello_timeout_s=5.0, peer_timeout_s=20.0)
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Honest:
    """A sender, and a receiver that pulls from it, again and again."""

    def __init__(self, kit: ModuleType, *, curve: bool) -> None:
        self.kit, self.number, self.took = kit, 0, list[float]()
        item = kit.layout()
        size = item.place({"pages": UNITS}).arena_bytes
        self.arenas = [kit.MemArena(size) for _ in range(2)]
        self.transports = [ShmTransport() for _ in range(2)]
        records = [t.register({"full": a}) for t, a in zip(self.transports, self.arenas, strict=True)]
        self.source, self.target = (a.array().reshape(UNITS, -1) for a in self.arenas)
        self.source[:] = np.random.default_rng(3).integers(0, 255, self.source.shape, np.uint8)
        (s_public, s_secret), (r_public, r_secret) = zmq.curve_keypair(), zmq.curve_keypair()
        manifest = msgspec.structs.replace(kit.manifest("sender", "s", item, units=UNITS), endpoint=records[0])
        theirs = CurveKeys(s_public, s_secret, (r_public,)) if curve else None
        mine = CurveKeys(r_public, r_secret, (s_public,)) if curve else None
        self.server_key = s_public if curve else b""
        self.sender = SenderEndpoint(manifest, options=QUICK, keys=theirs)
        self.receiver = ReceiverEndpoint(
            self.sender.address, kit.manifest("receiver", "r", item, units=UNITS), self.transports[1], options=QUICK,
            keys=mine,
        )  # fmt: skip

    def pull(self) -> None:
        """One prompt: whole and right."""
        self.number += 1
        request, began = f"q{self.number}", time.monotonic()
        self.target[:] = 0xFF
        self.receiver.ask(request, {self.kit.KEY: np.array([7, 1])}, 0, 8)
        self.sender.begin(request, 8)
        self.sender.offer(request, 0, 8, [self.kit.payload([3, 4], 0)], last=True)
        event: Any = None
        while not isinstance(event, ReceiveDone | ReceiveFailed):
            event = self.receiver.wait_event(20)
            assert event is not None, "an honest request does not end"
        assert isinstance(event, ReceiveDone), event
        assert (self.target[[7, 1]] == self.source[[3, 4]]).all()
        assert (self.target[0] == 0xFF).all()
        self.took.append(time.monotonic() - began)

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()
        del self.source, self.target
        for item in (*self.transports, *self.arenas):
            item.close()


@pytest.fixture(params=["plain", "curve"])
def honest(kit: ModuleType, request: pytest.FixtureRequest) -> Iterator[Honest]:
    made = Honest(kit, curve=request.param == "curve")
    yield made
    made.close()


def tcp_garbage(honest: Honest, rng: random.Random, stop: threading.Event) -> None:
    """Connections that say nothing, or anything, or half a greeting; some stay."""
    host, port = honest.sender.address.removeprefix("tcp://").rsplit(":", 1)
    idle: list[socket.socket] = []
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(1) + bytes(31)
    while not stop.is_set():
        with contextlib.suppress(OSError):
            raw = socket.create_connection((host, int(port)), timeout=1)
            idle.append(raw)
            raw.sendall(
                rng.choice(
                    (b"", rng.randbytes(200), b"GET / HTTP/1.1\r\n\r\n", greeting, greeting + b"\x02" + b"\xff" * 8)
                )
            )
        if len(idle) > 50:
            idle.pop(0).close()
        time.sleep(0.001)
    for raw in idle:
        raw.close()


def zmq_garbage(honest: Honest, hostile: ModuleType, rng: random.Random, stop: threading.Event) -> None:
    """Sockets that speak ZeroMQ, with a key that is not listed where keys are asked for, and no sense."""
    context = zmq.Context()
    manifest = honest.kit.manifest("receiver", "foe", units=UNITS).encode()
    speaker = hostile.Speaker("foe", "s", manifest, "q1")
    while not stop.is_set():
        peer = context.socket(zmq.DEALER)
        peer.setsockopt(zmq.LINGER, 0)
        peer.setsockopt(zmq.SNDHWM, 100)
        if honest.server_key and rng.random() < 0.8:
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.curve_serverkey = honest.server_key
        peer.connect(honest.sender.address)
        for _ in range(50):
            data = hostile.pack(speaker.message(rng.choice(hostile.KINDS)))
            frames = rng.choice(([data], [data], [hostile.mutated(rng, data, data)], [b""], [data] * 5, [b"x"] * 300))
            with contextlib.suppress(zmq.Again):
                peer.send_multipart(frames, zmq.NOBLOCK)
        if rng.random() < 0.2:
            with contextlib.suppress(zmq.Again):
                peer.send(bytes(control.MAX_MESSAGE_BYTES + 1), zmq.NOBLOCK)
        time.sleep(0.01)
        peer.close()
    context.destroy(linger=0)


def within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("seconds", [0.5, pytest.param(2.0, marks=pytest.mark.slow)])
def test_a_flooded_sender_serves_its_receiver(
    honest: Honest, hostile: ModuleType, seconds: float, record_property: Callable[[str, object], None]
) -> None:
    for _ in range(3):
        honest.pull()
    before, threads = descriptors(), threading.active_count()
    stop, rng = threading.Event(), random.Random(1)
    floods = [
        threading.Thread(target=tcp_garbage, args=(honest, rng, stop)),
        threading.Thread(target=zmq_garbage, args=(honest, hostile, rng, stop)),
    ]
    for thread in floods:
        thread.start()
    honest.took.clear()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        honest.pull()
    stop.set()
    for thread in floods:
        thread.join()
    record_property("prompts under the flood", len(honest.took))
    record_property("p99 in ms", round(1000 * float(np.quantile(honest.took, 0.99)), 1))
    honest.pull()
    assert within(QUICK.hello_timeout_s + 5, lambda: descriptors() <= before)
    assert within(5, lambda: threading.active_count() <= threads + 1)  # the one that reads hellos
