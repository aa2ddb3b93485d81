"""Peers that send as fast as they can: they are cut off, and engines and other peers do not notice."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import zmq

from kvcore.errors import PeerLostError, ProtocolError
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone, SendFailed, TransferOptions
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire import budget
from kvcore.transfer.wire.budget import Budget, Inlet, Unsent
from kvcore.transfer.wire.endpoint import ReceiverEndpoint, SenderEndpoint

UNITS = 32
QUICK = TransferOptions(heartbeat_s=0.2, hello_timeout_s=1.5, peer_timeout_s=3.0)

pytestmark = [
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
    pytest.mark.usefixtures("small_heap"),
]


class Sides:
    """A sender and receivers in this process."""

    def __init__(self, kit: ModuleType) -> None:
        self.kit = kit
        self.stack = contextlib.ExitStack()
        self.context = self.stack.enter_context(zmq.Context())
        self.stack.callback(self.context.destroy, linger=0)
        self.manifest, _ = self.half("sender", "s")
        self.sender = self.stack.enter_context(SenderEndpoint(self.manifest, options=QUICK))

    def half(self, role: str, instance: str) -> tuple[Any, ShmTransport]:
        layout = self.kit.layout()
        arena = self.stack.enter_context(
            contextlib.closing(self.kit.MemArena(layout.place({"pages": UNITS}).arena_bytes))
        )
        transport = self.stack.enter_context(contextlib.closing(ShmTransport()))
        record = transport.register({"full": arena})
        endpoint = record if role == "sender" else b""
        return self.kit.manifest(role, instance, layout, units=UNITS, endpoint=endpoint), transport

    def receiver(self, instance: str, address: str | None = None) -> ReceiverEndpoint:
        manifest, transport = self.half("receiver", instance)
        endpoint = ReceiverEndpoint(address or self.sender.address, manifest, transport, options=QUICK)
        return self.stack.enter_context(endpoint)

    def dealer(self, instance: bytes = b"") -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        if instance:
            socket.setsockopt(zmq.ROUTING_ID, instance)
        socket.connect(self.sender.address)
        return socket

    def greeted(self, instance: str) -> zmq.Socket[bytes]:
        """A socket that has said hello and was welcomed."""
        manifest, _ = self.half("receiver", instance)
        socket = self.dealer(instance.encode())
        hello = control.Hello(src=instance, dst="", protocol=(1, 0), manifest=manifest.encode())
        socket.send(control.encode(hello))
        assert socket.poll(5000)
        assert isinstance(control.decode(socket.recv()), control.Welcome)
        return socket

    def pull(self, receiver: ReceiverEndpoint, request: str) -> None:
        receiver.ask(request, {self.kit.KEY: np.array([7])}, 0, 4)
        self.sender.begin(request, 4)
        self.sender.offer(request, 0, 4, [self.kit.payload([3], 0)], last=True)
        assert isinstance(take(receiver, ReceiveDone, ReceiveFailed), ReceiveDone)
        assert isinstance(take(self.sender, SendDone), SendDone)


def take(endpoint: Any, *kinds: type) -> Any:
    while True:
        event = endpoint.wait_event(5)
        assert event is not None, "no event came"
        if isinstance(event, kinds):
            return event


@pytest.fixture
def sides(kit: ModuleType) -> Iterator[Sides]:
    made = Sides(kit)
    with made.stack:
        yield made


@contextlib.contextmanager
def flooding(socket: zmq.Socket[bytes], *frames: bytes) -> Iterator[None]:
    """Send the same message as fast as it is taken, from a thread of its own that has the socket to itself."""
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            with contextlib.suppress(zmq.Again):
                for _ in range(100):
                    socket.send_multipart(frames, zmq.NOBLOCK)
            time.sleep(0)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


# --- what a peer may send ---


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_budget_fills_up_with_time() -> None:
    clock = Clock()
    share = Budget(clock)
    assert share.take(40_000, 0) is None
    error = share.take(1, 0)
    assert isinstance(error, ProtocolError)
    assert error.fields["messages_per_s"] == 20_000
    clock.now += 0.5
    assert share.take(9_000, 128 << 20) is None
    assert share.take(1, 1) is not None
    clock.now += 1000
    assert share.take(1, 128 << 20) is None
    assert share.take(1, 1) is not None


def test_a_steady_peer_at_its_rate_is_never_over() -> None:
    clock = Clock()
    share = Budget(clock)
    for _ in range(10_000):
        clock.now += 0.001
        assert share.take(20, 64 << 10) is None


# --- what a turn takes ---


@pytest.fixture
def ends() -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes]]]:
    with zmq.Context() as context:
        router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
        router.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.ROUTING_ID, b"me")
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        yield router, dealer
        context.destroy(linger=0)


def arrived(inlet: Inlet, socket: zmq.Socket[bytes], number: int) -> tuple[list[budget.Arrived], int]:
    """So many messages, and the number of turns it took."""
    found: list[budget.Arrived] = []
    turns = 0
    while len(found) < number:
        assert socket.poll(2000)
        found += inlet.take()
        turns += 1
    return found, turns


def test_a_turn_is_bounded_in_messages_and_bytes(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    router, dealer = ends
    inlet = Inlet(router, routed=True)
    monkeypatch.setattr(budget, "TURN_MESSAGES", 10)
    for number in range(35):
        dealer.send(bytes([number]))
    found, turns = arrived(inlet, router, 35)
    assert [item.data[0] for item in found] == list(range(35))
    assert {item.peer for item in found} == {b"me"}
    assert turns >= 4
    monkeypatch.setattr(budget, "TURN_BYTES", 100)
    for _ in range(6):
        dealer.send(bytes(60))
    assert arrived(inlet, router, 6)[1] >= 3


def test_frames_are_counted_and_not_put_together(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of several frames is none, however many turns it takes to pass it over."""
    router, dealer = ends
    inlet = Inlet(router, routed=True)
    monkeypatch.setattr(budget, "TURN_MESSAGES", 10)
    dealer.send_multipart([b"ab"] * 95)
    dealer.send(b"next")
    (first, second), turns = arrived(inlet, router, 2)
    assert (first.data, first.frames, first.nbytes, first.peer) == (b"", 95, 190, b"me")
    assert (second.data, second.frames, second.peer) == (b"next", 1, b"me")
    assert turns >= 9


# --- what waits to be sent ---


def test_what_a_socket_does_not_take_waits_in_order_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_UNSENT_BYTES", 100)
    sent: list[bytes] = []
    room = 2

    def send(peer: bytes, data: bytes) -> None:
        if len(sent) >= room:
            raise zmq.Again
        sent.append(data)

    unsent = Unsent(send)
    messages = [bytes([n]) * 20 for n in range(8)]
    assert [unsent.put(b"p", data) for data in messages] == [True] * 7 + [False]
    assert unsent.peers() == [b"p"]
    room = 4
    unsent.flush(b"p")
    assert unsent
    assert unsent.put(b"p", messages[7])
    room = 100
    unsent.flush(b"p")
    assert sent == messages
    assert not unsent


def test_a_burst_of_an_honest_peer_passes(sides: Sides) -> None:
    """4000 offers at once, to a receiver that cannot take them for a while."""
    receiver = sides.receiver("r")
    request, tokens = "x", 4000
    receiver.ask(request, {sides.kit.KEY: np.full(1000, -1)}, 0, tokens)
    sides.sender.begin(request, tokens)
    with receiver._lock:
        for token in range(tokens):
            sides.sender.offer(request, token, token + 1, [], last=token == tokens - 1)
        time.sleep(0.1)
    assert isinstance(take(receiver, ReceiveDone, ReceiveFailed), ReceiveDone)
    assert isinstance(take(sides.sender, SendDone, SendFailed), SendDone)
    assert sides.sender.stats().peers_cut == receiver.stats().peers_cut == 0


def test_a_peer_that_takes_nothing_is_lost(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "MAX_UNSENT_BYTES", 1000)
    mute = sides.greeted("r")
    mute.send(
        control.encode(
            control.Ask(src="r", dst="s", request="x", attempt=1, start=0, stop=4, layerwise=False, token=b"")
        )
    )
    sides.sender.begin("x", 4)
    monkeypatch.setattr(sides.sender._unsent, "_send", full)
    failed = None
    for _ in range(100):
        with contextlib.suppress(Exception):
            sides.sender.offer("x", 0, 0, [])
        failed = next((event for event in sides.sender.events() if isinstance(event, SendFailed)), None)
        if failed is not None:
            break
        time.sleep(0.01)
    assert failed is not None
    assert isinstance(failed.error, PeerLostError)


def full(peer: bytes, data: bytes) -> None:
    raise zmq.Again


# --- floods over real sockets ---


@pytest.mark.parametrize("frames", [(b"8 bytes.",), (b"a", b"b", b"c")])
def test_a_stranger_that_floods_is_cut_off(sides: Sides, frames: tuple[bytes, ...]) -> None:
    receiver = sides.receiver("r")
    stranger = sides.dealer()
    with flooding(stranger, *frames):
        deadline = time.monotonic() + 2
        while not sides.sender.stats().peers_cut:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        slowest = 0.0
        for number in range(20):
            started = time.perf_counter()
            sides.sender.has("x")
            slowest = max(slowest, time.perf_counter() - started)
            if number % 5 == 0:
                sides.pull(receiver, f"x{number}")
    assert slowest < 0.2
    assert sides.sender.stats().peers_cut == 1  # it is closed: nothing comes of it any more
    assert sides.sender.stats().peers == 1


def test_a_message_without_end_is_cut_off(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that ZeroMQ keeps until the last has come: only the connection itself tells of them."""
    monkeypatch.setattr("kvcore.transfer.wire.strangers.MAX_UNSEEN_BYTES", 1 << 20)
    receiver = sides.receiver("r")
    host, port = sides.sender.address.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as endless:
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        endless.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(1) + bytes(31))
        endless.sendall(b"\x04" + bytes([len(ready)]) + ready)
        frame = b"\x01\x64" + bytes(100)  # one more follows, and one more
        endless.settimeout(2)
        answer = b""
        while b"READY" not in answer:  # before it, frames are no part of a message
            answer += endless.recv(4096)
        deadline = time.monotonic() + 3
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < deadline:
                endless.sendall(frame * 1000)
                time.sleep(0.005)
        assert time.monotonic() < deadline
    assert sides.sender.stats().peers_cut == 1
    sides.pull(receiver, "x")


def test_many_bytes_in_whole_messages_are_not_without_end(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcore.transfer.wire.strangers.MAX_UNSEEN_BYTES", 3 << 20)
    monkeypatch.setattr("kvcore.transfer.wire.strangers._LOOK_S", 0.02)
    mate = sides.greeted("q")
    renew = tuple(control.Renewal("x" * 200, number) for number in range(100))
    heartbeat = control.encode(control.Heartbeat(src="q", dst="s", renew=renew))
    for _ in range(300):
        mate.send(heartbeat)
        time.sleep(0.001)
    assert sides.sender.stats().peers_cut == 0
    assert sides.sender.stats().peers == 1


def test_a_peer_over_its_share_loses_its_conversation_and_nobody_else(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, mate = sides.receiver("r"), sides.greeted("q")
    monkeypatch.setattr(budget, "MESSAGES_PER_S", 200)
    monkeypatch.setattr(budget, "BURST_S", 1)
    mate.send(
        control.encode(
            control.Ask(src="q", dst="s", request="y", attempt=1, start=0, stop=4, layerwise=False, token=b"")
        )
    )
    sides.sender.begin("y", 4)
    heartbeat = control.encode(control.Heartbeat(src="q", dst="s"))
    for _ in range(400):
        mate.send(heartbeat)
    failed = take(sides.sender, SendFailed)
    assert failed.request == "y"
    assert isinstance(failed.error, ProtocolError)
    assert "more than its share" in failed.error.message
    told = None
    while not isinstance(told, control.Bye):
        assert mate.poll(2000)
        told = control.decode(mate.recv())
    assert told.error.code == "protocol"
    assert sides.sender.stats().peers == 1
    sides.pull(receiver, "x")
    assert sides.sender.stats().peers_cut == 1


def test_hellos_weigh_more(sides: Sides) -> None:
    """A peer that says hello again and again is over its share long before it is over its messages."""
    mate = sides.greeted("q")
    manifest, _ = sides.half("receiver", "q")
    hello = control.encode(control.Hello(src="q", dst="", protocol=(1, 0), manifest=manifest.encode()))
    for _ in range(60):
        mate.send(hello)
    deadline = time.monotonic() + 2
    while not sides.sender.stats().peers_cut:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.05)  # a hello of before may be read only now
    assert sides.sender.stats().peers == 0


def test_a_sender_over_its_share_loses_its_receiver(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver's bounds are the sender's: it fails typed, and reads no more of it."""
    monkeypatch.setattr(budget, "MESSAGES_PER_S", 1000)
    router = sides.context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    address = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
    over = threading.Event()

    def hostile() -> None:
        peer, _ = router.recv_multipart()
        manifest = sides.manifest.encode()
        router.send_multipart(
            [peer, control.encode(control.Welcome(src="s", dst="r", protocol=(1, 0), manifest=manifest))]
        )
        assert router.poll(2000)
        while not over.is_set():
            router.send_multipart([peer, control.encode(control.Heartbeat(src="s", dst="r"))])

    thread = threading.Thread(target=hostile)
    thread.start()
    try:
        receiver = sides.receiver("r", address)
        receiver.ask("x", {sides.kit.KEY: np.array([7])}, 0, 4)
        failed = take(receiver, ReceiveFailed)
        assert isinstance(failed.error, ProtocolError)
        assert "more than its share" in failed.error.message
        assert not receiver.connected
        assert receiver.stats().peers_cut == 1
    finally:
        over.set()
        thread.join()


def test_engine_calls_come_before_the_next_message(sides: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many messages wait: who calls waits for one of them, not for a turn."""
    session = sides.sender._sender
    plain = session.handle
    mate = sides.greeted("q")

    def slow(peer: bytes, message: Any) -> None:
        time.sleep(0.005)
        plain(peer, message)

    monkeypatch.setattr(session, "handle", slow)
    heartbeat = control.encode(control.Heartbeat(src="q", dst="s"))
    for _ in range(200):
        mate.send(heartbeat)
    time.sleep(0.02)
    waits = []
    for _ in range(20):
        started = time.perf_counter()
        sides.sender.has("x")
        waits.append(time.perf_counter() - started)
    assert sorted(waits)[10] < 0.05
    monkeypatch.undo()
