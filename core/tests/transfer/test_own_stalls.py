"""What takes long at one's own end is nobody else's silence, and does not keep others waiting."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Future
from types import ModuleType
from typing import Any, cast

import pytest

from kvcore.errors import ProtocolError, TransferError
from kvcore.transfer.messages import control
from kvcore.transfer.session import greeting
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone, SendFailed, TransferOptions
from kvcore.transfer.shm.transport import ShmTransport
from kvcore.transfer.wire.awake import AwakeClock
from kvcore.transfer.wire.endpoint import ReceiverEndpoint, SenderEndpoint
from kvcore.transfer.wire.worker import Worker

R1 = b"r1"


class Later:
    """Work that is run when a test says so."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Any, Any]] = []

    def defer(self, work: Any, then: Any) -> None:
        self.waiting.append((work, then))

    def run(self, session: Any) -> int:
        taken, self.waiting = self.waiting, []
        for work, then in taken:
            outcome: Future[Any] = Future()
            try:
                outcome.set_result(work())
            except Exception as error:  # noqa: BLE001
                outcome.set_exception(error)
            session.resume(then, outcome)
        return len(taken)


def test_a_clock_leaves_out_its_own_stalls() -> None:
    real = [100.0]
    clock = AwakeClock(0.5, lambda: real[0])
    assert clock() == 100.0
    real[0] += 0.25
    assert clock() == 100.25
    assert clock.turn() == 0
    real[0] += 60
    assert clock() == 100.75  # the thread is away: a call of the engine sees no more than a turn's time
    assert clock.turn() == pytest.approx(59.5)
    assert clock() == 100.75
    real[0] += 0.5
    assert clock.turn() == pytest.approx(0)
    assert clock() == 101.25


def test_work_is_run_in_order_and_nothing_after_the_end() -> None:
    woken = threading.Event()
    worker = Worker("test-work", woken.set)
    order: list[int] = []
    gate = threading.Event()

    def wait() -> None:
        gate.wait(5)
        order.append(0)

    worker.defer(wait, lambda _: None)
    for number in range(1, 4):
        worker.defer(lambda number=number: order.append(number), lambda _: None)
    gate.set()
    ended: list[Any] = []
    until = time.monotonic() + 5
    while len(ended) < 4 and time.monotonic() < until:
        woken.wait(0.05)
        ended += worker.ended()
    assert order == [0, 1, 2, 3]
    worker.defer(lambda: 1 / 0, lambda _: None)
    while not (failed := worker.ended()) and time.monotonic() < until:
        time.sleep(0.005)
    assert isinstance(failed[0][0].exception(), ZeroDivisionError)
    worker.close()
    worker.close()
    worker.defer(lambda: order.append(9), lambda _: None)
    assert order == [0, 1, 2, 3]
    assert not any(thread.name == "test-work" for thread in threading.enumerate())


class Sums:
    """Checksums that are right, or whatever a test wants them to be."""

    def __init__(self, result: Any = None) -> None:
        self.result = {} if result is None else result
        self.asked = 0

    def expect(self, peer: bytes, remote: Any, message: Any) -> None: ...

    def forget(self, peer: bytes) -> None: ...

    def of(self, peer: bytes, units: Any) -> dict[str, int]:
        self.asked += 1
        if isinstance(self.result, Exception):
            raise self.result
        return dict(self.result)


@pytest.fixture
def net(kit: ModuleType) -> Any:
    net = kit.Net(["r1"])
    net.sender.checksums = Sums()
    return net


def pulled(kit: ModuleType, net: Any) -> Later:
    """A request of which everything but the checksums is done."""
    later = Later()
    net.sender.defer = later.defer
    net.receivers[R1].ask("x", {("full", "pages"): kit.np.array([3, 4], kit.np.int64)}, 0, 8)
    net.sender.begin("x", 8)
    for component in kit.COMPONENTS:
        for unit in (11, 12):
            net.sender_memory[component, unit] = ("x", component, unit)
    net.sender.offer("x", 0, 8, [kit.payload([11, 12], 0)], last=True)
    net.settle()
    assert len(later.waiting) == 1
    return later


def test_a_commit_waits_for_checksums_that_are_asked_for_once(kit: ModuleType, net: Any) -> None:
    later = pulled(kit, net)
    receiver = net.receivers[R1]
    for _ in range(20):  # a prompt that takes longer than every timeout: heartbeats repeat the question
        net.clock.now += 1.0
        receiver.tick()
        net.sender.tick()
        net.settle()
    assert len(later.waiting) == 1
    assert not net.sender.events()
    assert not [event for event in receiver.events() if isinstance(event, ReceiveDone | ReceiveFailed)]
    assert later.run(net.sender) == 1
    net.settle()
    assert isinstance(receiver.events()[-1], ReceiveDone)
    assert [type(event) for event in net.sender.events()] == [SendDone]
    assert net.sender.checksums.asked == 1


def test_checksums_of_a_request_that_is_over_change_nothing(kit: ModuleType, net: Any) -> None:
    later = pulled(kit, net)
    net.sender.abort("x", "enough")
    assert [type(event) for event in net.sender.events()] == [SendFailed]
    net.sender.begin("x", 8)  # the id again: what comes of the earlier one is not its own
    later.run(net.sender)
    net.settle()
    assert not net.sender.events()
    assert net.sender.has("x")


@pytest.mark.parametrize("cause", [TransferError("no"), MemoryError("all of it")])
def test_checksums_that_fail_end_their_request_only(kit: ModuleType, net: Any, cause: Exception) -> None:
    net.sender.checksums.result = cause
    later = pulled(kit, net)
    net.sender.begin("other", 3)
    later.run(net.sender)
    (event,) = net.sender.events()
    assert isinstance(event, SendFailed)
    assert isinstance(event.error, TransferError)
    assert net.sender.has("other")


def test_a_prompt_whose_checksums_take_long_keeps_nobody_waiting(kit: ModuleType) -> None:
    """Over real threads: longer than a peer may be silent, and another receiver is served in between."""
    release, begun = threading.Event(), threading.Event()

    class Slow(Sums):
        def of(self, peer: bytes, units: Any) -> dict[str, int]:
            if not begun.is_set():
                begun.set()
                release.wait(10)
            return {}

    quick = TransferOptions(heartbeat_s=0.1, peer_timeout_s=0.5)
    arena = kit.MemArena(kit.layout().place({"pages": 8}).arena_bytes)
    transports = [ShmTransport() for _ in range(3)]
    record = transports[0].register({"full": arena})
    sender = SenderEndpoint(
        kit.manifest("sender", "s", units=8, endpoint=record), options=quick, checksums=cast(Any, Slow())
    )
    with contextlib.ExitStack() as stack:
        stack.callback(arena.close)
        for transport in transports:
            stack.callback(transport.close)
        for transport in transports[1:]:
            transport.register({"full": arena})
        stack.enter_context(sender)
        stack.callback(release.set)
        first, second = (
            stack.enter_context(
                ReceiverEndpoint(sender.address, kit.manifest("receiver", name, units=8), transport, options=quick)
            )
            for name, transport in zip(("r1", "r2"), transports[1:], strict=True)
        )
        sender.begin("x", 4)
        sender.offer("x", 0, 4, [kit.payload([1], 0)], last=True)
        first.ask("x", {kit.KEY: kit.np.array([2])}, 0, 4)
        assert begun.wait(5)
        time.sleep(2 * quick.peer_timeout_s)
        assert second.connected
        second.ask("y", {}, 4, 4)
        sender.begin("y", 4)
        assert sender.has("x")
        release.set()
        while not isinstance(event := first.wait_event(5), ReceiveDone):
            assert event is not None
            assert not isinstance(event, ReceiveFailed)


def test_a_peer_has_one_hello_read_at_a_time(kit: ModuleType) -> None:
    net = kit.Net(["r1"])
    later = Later()
    net.sender.defer = later.defer
    hello = control.Hello(src="s9", dst="", protocol=(1, 0), manifest=b"\x80")
    for _ in range(50):
        net.sender.handle(b"s9", hello)
    assert len(later.waiting) == 1
    later.run(net.sender)
    assert b"s9" not in net.sender.peers()
    net.sender.handle(b"s9", hello)
    assert len(later.waiting) == 1


def test_a_hello_that_cannot_be_worked_on_is_refused(kit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    net = kit.Net(["r1"])

    def broken(*args: Any) -> None:
        raise MemoryError("all of it")

    monkeypatch.setattr("kvcore.transfer.session.greeting.remote_manifest", broken)
    net.sender.handle(b"s9", control.Hello(src="s9", dst="", protocol=(1, 0), manifest=b"\x80"))
    messages = [message for peer, message in net.sender.outbox() if peer == b"s9"]
    assert [type(message) for message in messages] == [control.Refused]
    assert isinstance(messages[0].error.unpack(), ProtocolError)
    assert net.sender.peers() == {R1: "r1"}


def test_hellos_that_wait_to_be_read_are_bounded(kit: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes again and again as somebody else; those that are read make room."""
    net = kit.Net(["r1"])
    monkeypatch.setattr(greeting, "MAX_UNREAD_BYTES", 100)
    later = Later()
    net.sender.defer = later.defer
    net.sender.outbox()

    def hello(name: str) -> list[str]:
        net.sender.handle(name.encode(), control.Hello(src=name, dst="", protocol=(1, 0), manifest=b"\x80" * 40))
        return [message.error.message for peer, message in net.sender.outbox() if peer == name.encode()]

    assert [hello(name) for name in ("a", "b")] == [[], []]
    assert hello("c") == ["too many hellos wait to be read"]
    assert len(later.waiting) == 2
    assert net.sender.peers() == {R1: "r1"}
    later.run(net.sender)
    net.sender.outbox()
    assert hello("c") == []
    assert len(later.waiting) == 1


def test_what_is_taken_is_said_once(kit: ModuleType, net: Any) -> None:
    """Each takes a while to plan: a peer that repeats it does not keep others waiting."""
    later = Later()
    net.sender.defer = later.defer
    taken = control.Taken(src="r1", dst="sender-1", groups={})
    net.sender.handle(R1, taken)
    assert net.sender.peers() == {R1: "r1"}
    net.sender.handle(R1, taken)
    assert net.sender.peers() == {}
    assert [work.func.__name__ for work, _ in later.waiting] == ["expect", "forget"]
