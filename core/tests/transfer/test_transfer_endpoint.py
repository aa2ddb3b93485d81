"""Endpoints over real sockets and threads: what the session tests cannot see."""

from __future__ import annotations

import contextlib
import gc
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
import zmq

from kvcore.errors import (
    ConfigError,
    DuplicateRequestError,
    HandshakeError,
    PeerLostError,
    RequestError,
    TransferAbortedError,
    TransferError,
    UnknownRequestError,
)
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import (
    ReceiveDone,
    ReceiveFailed,
    ReceiveProgress,
    SendDone,
    SendFailed,
    TransferOptions,
)
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire.endpoint import CurveKeys, ReceiverEndpoint, SenderEndpoint

UNITS = 32
QUICK = TransferOptions(heartbeat_s=0.2, hello_timeout_s=1.5, peer_timeout_s=3.0)

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
    return sorted(name for name in found)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread, socket or descriptor outlives a test."""
    before, threads = descriptors(), set(threading.enumerate())
    yield
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline and (descriptors() != before or set(threading.enumerate()) != threads):
        time.sleep(0.02)
    assert descriptors() == before
    assert set(threading.enumerate()) == threads


class Host:
    """One process's half: an arena, a transport, an endpoint."""

    def __init__(self, kit: ModuleType, role: str, instance: str, layout: Any = None, **changes: Any) -> None:
        self.layout = layout or kit.layout()
        self.arena = kit.MemArena(self.layout.place({"pages": UNITS}).arena_bytes)
        self.units = self.arena.array().reshape(UNITS, -1)
        self.transport = ShmTransport()
        record = self.transport.register({"full": self.arena})
        plain = kit.manifest(role, instance, self.layout, units=UNITS, endpoint=record if role == "sender" else b"")
        self.manifest = msgspec.structs.replace(plain, **changes)
        self.endpoint: Any = None

    def serve(self, **options: Any) -> SenderEndpoint:
        self.endpoint = SenderEndpoint(self.manifest, options=QUICK, **options)
        return self.endpoint

    def connect(self, address: str, **options: Any) -> ReceiverEndpoint:
        self.endpoint = ReceiverEndpoint(address, self.manifest, self.transport, **{"options": QUICK, **options})
        return self.endpoint

    def close(self) -> None:
        if self.endpoint is not None:
            self.endpoint.close()
        del self.units
        self.transport.close()
        self.arena.close()


@pytest.fixture
def hosts(kit: ModuleType) -> Iterator[Any]:
    made: list[Host] = []

    def host(role: str, instance: str, **changes: Any) -> Host:
        made.append(Host(kit, role, instance, **changes))
        made[-1].units[:] = 0xFF
        if role == "sender":
            made[-1].units[:] = np.random.default_rng(3).integers(0, 255, made[-1].units.shape, np.uint8)
        return made[-1]

    yield host
    for item in reversed(made):
        item.close()


@pytest.fixture
def pair(hosts: Any) -> tuple[Host, Host]:
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    sender.serve()
    receiver.connect(sender.endpoint.address)
    return sender, receiver


def take(endpoint: Any, *kinds: type) -> Any:
    """The next event of one of the kinds."""
    while True:
        event = endpoint.wait_event(10)
        assert event is not None, "no event came"
        if isinstance(event, kinds):
            return event


def pull(kit: ModuleType, sender: Host, receiver: Host, request: str, src: list[int], dst: list[int]) -> None:
    tokens = 4 * len(src)
    receiver.endpoint.ask(request, {kit.KEY: np.array(dst)}, 0, tokens)
    sender.endpoint.begin(request, tokens)
    for n, unit in enumerate(src):
        sender.endpoint.offer(request, 4 * n, 4 * n + 4, [kit.payload([unit], n)], last=n == len(src) - 1)
    done = take(receiver.endpoint, ReceiveDone, ReceiveFailed)
    assert isinstance(done, ReceiveDone)
    assert done.request == request
    assert isinstance(take(sender.endpoint, SendDone, SendFailed), SendDone)
    assert (receiver.units[dst] == sender.units[src]).all()


def test_pages_arrive(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    assert sender.endpoint.address.startswith("tcp://127.0.0.1:")
    pull(kit, sender, receiver, "x", [3, 4, 9], [7, 1, 2])
    untouched = [unit for unit in range(UNITS) if unit not in (7, 1, 2)]
    assert (receiver.units[untouched] == 0xFF).all()
    stats = receiver.endpoint.stats()
    assert stats.bytes_read == 3 * (1024 + 16)
    assert stats.copy_seconds > 0
    assert (stats.reads_in_flight, stats.peers) == (0, 1)
    assert sender.endpoint.stats().held_units == 0
    assert sender.endpoint.stats().peers == 1


def test_two_receivers_at_once(kit: ModuleType, hosts: Any) -> None:
    sender, first, second = hosts("sender", "s"), hosts("receiver", "r1"), hosts("receiver", "r2")
    sender.serve()
    for receiver in (first, second):
        receiver.connect(sender.endpoint.address)
    pull(kit, sender, first, "x", [3, 4], [7, 1])
    pull(kit, sender, second, "y", [5, 6], [7, 1])
    first.endpoint.close()
    pull(kit, sender, second, "z", [5, 6], [9, 10])


def test_errors_come_out_of_the_call(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    sender.endpoint.begin("x", 4)
    with pytest.raises(DuplicateRequestError):
        sender.endpoint.begin("x", 4)
    with pytest.raises(UnknownRequestError):
        sender.endpoint.abort("y", "never begun")
    with pytest.raises(UnknownRequestError):
        receiver.endpoint.abort("y", "never asked for")
    with pytest.raises(RequestError):
        receiver.endpoint.ask("x", {}, 0, 4)
    assert sender.endpoint.has("x")
    assert not receiver.endpoint.has("x")
    sender.endpoint.abort("x", "enough")
    assert isinstance(take(sender.endpoint, SendFailed).error, TransferAbortedError)
    assert sender.endpoint.wait_event(0.01) is None
    assert sender.endpoint.events() == []


def test_abort_over_the_wire(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    sender.endpoint.begin("x", 4)
    receiver.endpoint.abort("x", "client left")
    failed = take(receiver.endpoint, ReceiveFailed)
    assert failed.quiet
    assert "client left" in str(take(sender.endpoint, SendFailed).error)
    pull(kit, sender, receiver, "x", [3], [7])


def test_handshake_is_refused_in_the_constructor(hosts: Any) -> None:
    sender = hosts("sender", "s")
    sender.serve()
    receiver = hosts("receiver", "r", model="another")
    with pytest.raises(HandshakeError) as found:
        receiver.connect(sender.endpoint.address)
    assert found.value.fields["field"] == "model"
    assert (receiver.units == 0xFF).all()


def test_nobody_answers(hosts: Any) -> None:
    receiver = hosts("receiver", "r")
    started = time.monotonic()
    with pytest.raises(HandshakeError, match="no answer"):
        receiver.connect("tcp://127.0.0.1:1")
    assert time.monotonic() - started < 5


def test_an_interrupt_during_the_handshake_leaves_no_thread(hosts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ReceiverEndpoint, "_shake_hands", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hosts("receiver", "r").connect("tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["nonsense", "tcp://127.0.0.1:notaport"])
def test_addresses_that_are_none(hosts: Any, address: str) -> None:
    with pytest.raises(ConfigError):
        hosts("receiver", "r").connect(address)
    with pytest.raises(ConfigError):
        hosts("sender", "s").serve(bind=address)


def test_address_in_use(hosts: Any) -> None:
    address = hosts("sender", "s").serve().address
    with pytest.raises(ConfigError, match="cannot bind"):
        hosts("sender", "t").serve(bind=address)


def test_closing_the_sender_fails_the_receiver_at_once(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    sender.endpoint.begin("x", 4)
    sender.endpoint.begin("y", 4)
    sender.endpoint.close()
    sender.endpoint.close()
    assert [type(event) for event in sender.endpoint.events()] == [SendFailed, SendFailed]
    assert sender.endpoint.wait_event(1) is None
    with pytest.raises(TransferError, match="closed"):
        sender.endpoint.begin("z", 4)
    assert isinstance(take(receiver.endpoint, ReceiveFailed).error, TransferAbortedError | PeerLostError)
    deadline = time.monotonic() + 5
    while receiver.endpoint.connected and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(PeerLostError, match="not connected"):
        receiver.endpoint.ask("z", {kit.KEY: np.array([7])}, 0, 4)


def test_closing_the_receiver_frees_the_senders_units(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    receiver.endpoint.ask("x", {kit.KEY: np.array([7, 8])}, 0, 8)
    sender.endpoint.begin("x", 8)
    sender.endpoint.offer("x", 0, 4, [kit.payload([3], 0)])
    take(receiver.endpoint, ReceiveProgress)
    receiver.endpoint.close()
    assert isinstance(take(sender.endpoint, SendFailed).error, TransferAbortedError)
    assert sender.endpoint.stats().held_units == 0
    (failed,) = receiver.endpoint.events()
    assert (type(failed), failed.quiet) == (ReceiveFailed, True)


def test_restart_at_the_same_address(kit: ModuleType, hosts: Any) -> None:
    """J10: in-flight requests fail fast, the old endpoint stays down, a new handshake works."""
    sender, receiver = hosts("sender", "s1"), hosts("receiver", "r1")
    address = sender.serve().address
    receiver.connect(address)
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    sender.endpoint.close()
    assert isinstance(take(receiver.endpoint, ReceiveFailed).error, PeerLostError | TransferAbortedError)
    again, fresh = hosts("sender", "s2"), hosts("receiver", "r2")
    again.serve(bind=address)
    time.sleep(0.3)
    with pytest.raises(PeerLostError):
        receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    assert again.endpoint.stats().peers == 0
    fresh.connect(address)
    pull(kit, again, fresh, "x", [3], [7])


def test_garbage_on_the_senders_socket(kit: ModuleType, pair: Any) -> None:
    """Strangers, broken messages, wrong frames: answered or dropped, and the others are served."""
    sender, receiver = pair
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.connect(sender.endpoint.address)
    frames = [[b"\xc1"], [b""], [b"a", b"b"], [b"x" * 100_000], [control.encode(control.Heartbeat(src="q", dst="s"))]]
    for item in frames:
        stranger.send_multipart(item)
    for _ in frames:
        assert stranger.poll(5000)
        assert isinstance(control.decode(stranger.recv()), control.Bye)
    pull(kit, sender, receiver, "x", [3], [7])
    context.destroy(linger=0)


def test_garbage_from_the_sender_fails_the_receiver_typed(kit: ModuleType, hosts: Any) -> None:
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    sender.serve()
    receiver.connect(sender.endpoint.address)
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    with sender.endpoint._lock:  # the socket is the I/O thread's: a message that encodes to garbage takes the usual way

        class Garbage(control.Heartbeat, tag="nonsense"):
            pass

        sender.endpoint._sender._outbox.append((b"r", Garbage(src="s", dst="r")))
        sender.endpoint._wake()
    assert take(receiver.endpoint, ReceiveFailed).error.code == "protocol"


@pytest.mark.parametrize("host", ["sender", "receiver"])
@pytest.mark.parametrize("where", ["handled", "encoded"])
def test_what_one_message_breaks_is_not_the_thread(
    kit: ModuleType, hosts: Any, monkeypatch: pytest.MonkeyPatch, host: str, where: str
) -> None:
    """A bug or want of memory met by one peer's message ends that request or conversation; others are served."""
    sender, bad, good = hosts("sender", "s"), hosts("receiver", "r"), hosts("receiver", "q")
    sender.serve()
    bad.connect(sender.endpoint.address)
    good.connect(sender.endpoint.address)
    bad.endpoint.ask("x", {kit.KEY: np.array([7, 8])}, 0, 8)
    sender.endpoint.begin("x", 8)
    sender.endpoint.offer("x", 0, 4, [kit.payload([3], 0)])
    take(bad.endpoint, ReceiveProgress)
    victim = sender if host == "sender" else bad
    session = victim.endpoint._session
    peer = b"r" if host == "sender" else b"0"
    with victim.endpoint._lock:
        if where == "handled":
            plain = session.handle

            def handle(who: bytes, message: Any) -> None:
                if who == peer:
                    raise MemoryError
                plain(who, message)

            monkeypatch.setattr(session, "handle", handle)
        else:
            src, dst = ("s", "r") if host == "sender" else ("r", "s")
            outbox = session._outbox if host == "sender" else session.links[0]._outbox
            outbox.append((b"r", control.Heartbeat(src=src, dst=dst, renew=(control.Renewal("y", 2**70),))))
            victim.endpoint._wake()
    failed = take(sender.endpoint, SendFailed)
    assert (failed.request, failed.error.code) == ("x", "protocol")
    assert take(bad.endpoint, ReceiveFailed).error.code == "protocol"
    monkeypatch.undo()
    pull(kit, sender, good, "y", [3], [5])


def test_a_failing_io_thread_is_no_silence(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    sender.endpoint.begin("x", 4)

    def broken() -> None:
        raise ZeroDivisionError("a bug")

    for host, kind in ((sender, SendFailed), (receiver, ReceiveFailed)):
        host.endpoint._session.tick = broken
        failed = take(host.endpoint, kind)
        assert failed.request == "x"
        if host is sender:
            assert "ZeroDivisionError" in failed.error.fields["cause"]
        with pytest.raises(TransferError, match="I/O thread has failed") as found:
            host.endpoint.wait_event(5)
        assert isinstance(found.value.__cause__, ZeroDivisionError)
        with pytest.raises(TransferError, match="I/O thread has failed"):
            host.endpoint.abort("x", "test")
        with pytest.raises(TransferError, match="I/O thread has failed"):
            host.endpoint.events()


@pytest.mark.parametrize("call", ["alive", "fileno"])
def test_a_transport_that_raises_costs_its_link(
    kit: ModuleType, hosts: Any, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Whatever its connection raises, at work and at the end: typed, and nothing of ZeroMQ is left behind."""
    sender, receiver, other = hosts("sender", "s"), hosts("receiver", "r"), hosts("receiver", "q")
    sender.serve()
    receiver.connect(sender.endpoint.address)
    other.connect(sender.endpoint.address)
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    (link,), (wire,) = receiver.endpoint._receiver.links, receiver.endpoint._wires.values()
    close = link.connection.close

    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("a bug")

    with receiver.endpoint._lock:
        if call == "fileno":
            receiver.endpoint._poller.unregister(wire.conn_fd)
            wire.conn_fd = None
        for name in (call, "quiesce", "close"):
            monkeypatch.setattr(link.connection, name, broken)
        receiver.endpoint._wake()
    failed = take(receiver.endpoint, ReceiveFailed)
    assert isinstance(failed.error, PeerLostError)
    assert "ZeroDivisionError" in str(failed.error)
    assert receiver.endpoint.events() == []
    receiver.endpoint.close()
    assert receiver.endpoint.events() == []
    close()
    sender.endpoint.events()
    pull(kit, sender, other, "y", [3], [5])


def test_a_failing_thread_says_so_before_it_is_logged(
    kit: ModuleType, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program's logger may take its time: engines know by then."""
    sender, _ = pair
    sender.endpoint.begin("x", 4)
    known = threading.Event()
    seen: list[tuple[bool, dict[str, Any]]] = []

    class Slow:
        def error(self, event: str, **fields: Any) -> None:
            seen.append((known.wait(5), fields))

    def broken() -> None:
        local_of_a_frame = "x" * 10  # noqa: F841
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("kvcore.transfer.wire.loop._log", Slow())
    sender.endpoint._session.tick = broken
    assert take(sender.endpoint, SendFailed).request == "x"
    with pytest.raises(TransferError, match="I/O thread has failed"):
        sender.endpoint.wait_event(5)
    known.set()
    sender.endpoint._thread.join(5)
    ((before, fields),) = seen
    assert before
    assert "a bug" in fields["trace"]
    assert "exc_info" not in fields


def _connections(address: str, number: int, *, greet: bool) -> list[socket.socket]:
    """Connections to a sender whose other end says nothing, or (``greet``) shakes ZeroMQ's hands and no more."""
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    made = [socket.create_connection((host, int(port))) for _ in range(number)]
    if greet:
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        for item in made:
            with contextlib.suppress(OSError):  # closed by now: there are many
                item.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(1) + bytes(31))
                item.sendall(b"\x04" + bytes([len(ready)]) + ready)
    return made


def _closed(item: socket.socket, seconds: float) -> bool:
    item.settimeout(seconds)
    try:
        while item.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


@pytest.mark.parametrize("greet", [True, False])
def test_who_says_no_hello_is_closed(kit: ModuleType, hosts: Any, greet: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection without a hello is closed in time, or at once where there are many; who was welcomed stays."""
    monkeypatch.setattr("kvcore.transfer.wire.strangers.MAX_STRANGERS", 4)
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    sender.endpoint = SenderEndpoint(sender.manifest, options=TransferOptions(heartbeat_s=0.2, hello_timeout_s=0.8))
    receiver.connect(sender.endpoint.address)
    idle = _connections(sender.endpoint.address, 8, greet=greet)
    try:
        started = time.monotonic()
        assert all(_closed(item, 0.6) for item in idle[:4])
        assert time.monotonic() - started < 0.6
        assert not _closed(idle[-1], 0.05)
        assert all(_closed(item, 3) for item in idle[4:])
        pull(kit, sender, receiver, "x", [3], [7])
    finally:
        for item in idle:
            item.close()


def test_silent_peers_are_lost(kit: ModuleType, hosts: Any) -> None:
    """A stopped process keeps its connection: only silence gives it away."""
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    sender.serve()
    context = zmq.Context()
    mute = context.socket(zmq.DEALER)
    mute.setsockopt(zmq.ROUTING_ID, b"r")
    mute.connect(sender.endpoint.address)
    mute.send(control.encode(control.Hello(src="r", dst="", protocol=(1, 0), manifest=receiver.manifest.encode())))
    assert isinstance(control.decode(mute.recv()), control.Welcome)
    mute.send(
        control.encode(
            control.Ask(src="r", dst="s", request="x", attempt=1, start=0, stop=4, layerwise=False, token=b"")
        )
    )
    sender.endpoint.begin("x", 4)
    started = time.monotonic()
    failed = take(sender.endpoint, SendFailed)
    assert isinstance(failed.error, PeerLostError)
    assert time.monotonic() - started < QUICK.peer_timeout_s + 2
    context.destroy(linger=0)


def test_a_cut_connection_is_noticed_by_the_next_heartbeat(kit: ModuleType, hosts: Any) -> None:
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    sender.serve()
    context = zmq.Context()
    peer = context.socket(zmq.DEALER)
    peer.connect(sender.endpoint.address)
    peer.send(control.encode(control.Hello(src="r", dst="", protocol=(1, 0), manifest=receiver.manifest.encode())))
    peer.recv()
    peer.send(
        control.encode(
            control.Ask(src="r", dst="s", request="x", attempt=1, start=0, stop=4, layerwise=False, token=b"")
        )
    )
    sender.endpoint.begin("x", 4)
    while not sender.endpoint._sender._requests.get("x").readers:
        time.sleep(0.01)
    context.destroy(linger=0)
    started = time.monotonic()
    assert "connection was closed" in str(take(sender.endpoint, SendFailed).error)
    assert time.monotonic() - started < 1.5


def test_a_control_connection_that_is_cut_is_not_taken_up_again(kit: ModuleType, hosts: Any) -> None:
    """The sender's memory may live on: messages may be gone, so the requests fail at once."""
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def welcome() -> None:
        peer, _ = router.recv_multipart()
        manifest = sender.manifest.encode()
        router.send_multipart(
            [peer, control.encode(control.Welcome(src="s", dst="r", protocol=(1, 0), manifest=manifest))]
        )

    answering = threading.Thread(target=welcome)
    answering.start()
    receiver.connect(f"tcp://127.0.0.1:{port}")
    answering.join()
    receiver.endpoint.ask("x", {kit.KEY: np.array([7])}, 0, 4)
    started = time.monotonic()
    context.destroy(linger=0)
    failed = take(receiver.endpoint, ReceiveFailed)
    assert isinstance(failed.error, PeerLostError)
    assert "control connection" in str(failed.error)
    assert time.monotonic() - started < QUICK.peer_timeout_s / 2
    assert not receiver.endpoint.connected


# --- CURVE ---


def keyring(*names: str) -> dict[str, tuple[bytes, bytes]]:
    return {name: zmq.curve_keypair() for name in names}


def keys(ring: dict[str, tuple[bytes, bytes]], mine: str, *peers: str) -> CurveKeys:
    return CurveKeys(*ring[mine], tuple(ring[peer][0] for peer in peers))


def test_curve(kit: ModuleType, hosts: Any) -> None:
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    ring = keyring("s", "r", "q")
    sender.serve(keys=keys(ring, "s", "q", "r"))
    receiver.connect(sender.endpoint.address, keys=keys(ring, "r", "s"))
    pull(kit, sender, receiver, "x", [3, 4], [7, 1])
    hosts("receiver", "q").connect(sender.endpoint.address, keys=keys(ring, "q", "s"))
    assert sender.endpoint.stats().peers == 2


@pytest.mark.parametrize("wrong", ["plain", "other server", "not listed"])
def test_wrong_curve_keys_get_no_answer(kit: ModuleType, hosts: Any, wrong: str) -> None:
    """Nor do they disturb who is connected: refused soon, and told nothing of the sender's model."""
    sender, receiver = hosts("sender", "s"), hosts("receiver", "r")
    ring = keyring("s", "r", "stranger")
    sender.serve(keys=keys(ring, "s", "r"))
    receiver.connect(sender.endpoint.address, keys=keys(ring, "r", "s"))
    theirs = {
        "plain": None,
        "other server": keys(ring, "r", "stranger"),
        "not listed": keys(ring, "stranger", "s"),
    }
    began = time.monotonic()
    with pytest.raises(HandshakeError) as caught:
        hosts("receiver", "other").connect(sender.endpoint.address, keys=theirs[wrong])
    assert time.monotonic() - began < 1
    assert set(caught.value.fields) == {"address"}
    assert sender.endpoint.stats().peers == 1
    pull(kit, sender, receiver, "x", [3, 4], [7, 1])


def test_a_plain_sender_gets_no_receiver_with_keys(hosts: Any) -> None:
    ring = keyring("s", "r")
    address = hosts("sender", "s").serve().address
    with pytest.raises(HandshakeError):
        hosts("receiver", "r").connect(address, keys=keys(ring, "r", "s"))


def test_another_users_receiver_is_refused_at_once(hosts: Any) -> None:
    address = hosts("sender", "s").serve(uids=lambda callers: {}).address
    began = time.monotonic()
    with pytest.raises(HandshakeError, match="not welcome") as caught:
        hosts("receiver", "r").connect(address)
    assert time.monotonic() - began < 1
    assert "kvcore keys new" in caught.value.remedy
    assert caught.value.fields == {}


def test_curve_keys_are_checked(hosts: Any) -> None:
    ring = keyring("r", "s", "t")
    for given in [(b"short", b"x" * 40, (b"x" * 40,)), (b"x" * 40, b"x" * 40, (b"short",)), (b"x" * 40, b"x" * 40, ())]:
        with pytest.raises(ConfigError):
            CurveKeys(*given)
    with pytest.raises(ConfigError):
        hosts("receiver", "r").connect("tcp://127.0.0.1:1", keys=keys(ring, "r", "s", "t"))
    bad = CurveKeys(b"\x00" * 40, b"\x01" * 40, (b"\x02" * 40,))
    with pytest.raises(ConfigError):
        hosts("receiver", "r").connect("tcp://127.0.0.1:1", keys=bad)


def test_calls_from_many_threads(kit: ModuleType, pair: Any) -> None:
    sender, receiver = pair
    names = [f"q{n}" for n in range(24)]

    def send(mine: list[str]) -> None:
        for name in mine:
            sender.endpoint.begin(name, 4)
            sender.endpoint.offer(name, 0, 4, [kit.payload([1 + int(name[1:])], 0)], last=True)

    def ask(mine: list[str]) -> None:
        for name in mine:
            receiver.endpoint.ask(name, {kit.KEY: np.array([31 - int(name[1:])])}, 0, 4)

    threads = [threading.Thread(target=call, args=(names[n::3],)) for call in (send, ask) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done = {take(receiver.endpoint, ReceiveDone, ReceiveFailed).request for _ in names}
    sent = {take(sender.endpoint, SendDone, SendFailed).request for _ in names}
    assert done == sent == set(names)
    for n in range(24):
        assert (receiver.units[31 - n] == sender.units[1 + n]).all()
