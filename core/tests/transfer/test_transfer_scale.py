"""What a turn looks at does not grow with the requests under way; and what a peer may leave waiting is bounded."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from kvcore.errors import DuplicateRequestError, ProtocolError, TransferError, TransferExpiredError
from kvcore.transfer.messages import control
from kvcore.transfer.session import waiting
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone, SendFailed
from kvcore.transfer.session.incoming import Incoming
from kvcore.transfer.session.outgoing import Outgoing

R1, R2 = b"r1", b"r2"


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def table(*ids: int) -> dict[tuple[str, str], Any]:
    return {("full", "pages"): np.array(ids, np.int64)}


class Touched:
    """Counts the attributes of requests that are read."""

    def __init__(self, patch: pytest.MonkeyPatch, *kinds: type) -> None:
        self.count = 0

        def spy(record: Any, name: str) -> Any:
            self.count += 1
            return object.__getattribute__(record, name)

        for kind in kinds:
            patch.setattr(kind, "__getattribute__", spy, raising=False)


def asks(net: Any, count: int, first: int = 0) -> None:
    for number in range(first, first + count):
        net.receivers[R1].ask(f"n{number}", table(number % 60 + 1), 0, 3)
    net.settle()


def serves(kit: ModuleType, net: Any, request: str = "honest", unit: int = 20) -> None:
    net.receivers[R2].ask(request, table(9), 0, 3)
    net.sender.begin(request, 3)
    net.sender.offer(request, 0, 3, [kit.payload([unit], 0)], last=True)
    net.settle()
    assert isinstance(net.receivers[R2].events()[-1], ReceiveDone)
    assert isinstance(net.sender.events()[-1], SendDone)


@pytest.mark.parametrize("state", ["waiting", "begun", "finished"])
def test_an_idle_tick_looks_at_no_request(
    kit: ModuleType, net: Any, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked for, begun, or finished and pulled (the last read of each still under way)."""
    asks(net, 60)
    if state != "waiting":
        for number in range(60):
            net.sender.begin(f"n{number}", 3)
            if state == "finished":
                net.sender.offer(f"n{number}", 0, 3, [kit.payload([number + 1], 0)], last=True)
        net.settle(reads=False)
    serves(kit, net)  # ends whatever may have come up late
    kinds = [Outgoing] if state == "finished" else [Outgoing, Incoming]
    touched = Touched(monkeypatch, *kinds)
    before = net.sender._requests.leases.visits, net.sender._waiting.deadlines.visits
    for _ in range(20):
        net.sender.tick()
        if state != "finished":  # reads under way are asked how they are
            net.receivers[R1].tick()
    assert (net.sender._requests.leases.visits, net.sender._waiting.deadlines.visits) == before
    assert touched.count == 0


def test_held_units_is_a_count(kit: ModuleType, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asks(net, 3)
    for number in range(3):
        net.sender.begin(f"n{number}", 3)
        net.sender.offer(f"n{number}", 0, 3, [kit.payload([number + 1], 0)], last=True)
    held = sum(p.num_units for r in net.sender._requests.records() for offer in r.offers for p in offer.payloads)
    touched = Touched(monkeypatch, Outgoing)
    assert net.sender.held_units() == held > 0
    assert touched.count == 0
    monkeypatch.undo()
    net.sender.abort("n0", "test")
    net.settle()
    assert net.sender.held_units() == 0
    assert not net.sender.requests()


def test_a_lost_peer_takes_only_what_it_has_to_do_with(
    kit: ModuleType, net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(net, 40)
    for number in range(40):
        net.sender.begin(f"n{number}", 3)
    net.receivers[R2].ask("mine", table(9), 0, 3)
    net.receivers[R2].ask("later", table(8), 0, 3)
    net.settle()
    net.sender.begin("mine", 3)
    touched = Touched(monkeypatch, Outgoing)
    net.sender.lost(R2, "test")
    assert touched.count < 40
    monkeypatch.undo()
    assert [event.request for event in net.sender.events()] == ["mine"]
    assert len(net.sender.requests()) == 40
    assert not net.sender._waiting.asked_by(R2)


def test_leases_renewed_keep_a_request_and_end_once_nobody_renews(kit: ModuleType, net: Any) -> None:
    """The heap's entry comes up while the lease was renewed: filed anew, and due when it really ends."""
    asks(net, 1)
    net.sender.begin("n0", 3)
    net.sender.offer("n0", 0, 3, [kit.payload([1], 0)], last=True)
    net.settle(reads=False)
    step = net.options.heartbeat_s
    elapsed = 0.0
    while elapsed < net.options.lease_s + 10:
        net.tick(step)
        message = control.Heartbeat(src="r1", dst="sender-1", renew=(control.Renewal("n0", 1),))
        net.sender.handle(R1, message)
        elapsed += step
    assert net.sender.has("n0")
    state = net.sender._peers[R1]
    ended = net.clock.now + net.options.lease_s
    while net.clock.now < ended - step:
        net.clock.now += step
        state.heard_at = net.clock.now
        net.sender.tick()
        assert net.sender.has("n0")
    net.clock.now = ended
    net.sender.tick()
    (event,) = net.sender.events()
    assert isinstance(event, SendFailed)
    assert isinstance(event.error, TransferExpiredError)


# --- limits ---


def ask_as(net: Any, peer: bytes, request: str, attempt: int = 1) -> None:
    message = control.Ask(
        src=peer.decode(), dst="sender-1", request=request, attempt=attempt, start=0, stop=3, layerwise=False, token=b""
    )
    net.sender.handle(peer, message)


def told(net: Any) -> list[Any]:
    return [message for _, message in net.sender.outbox()]


@pytest.mark.parametrize(("mine", "total", "scope"), [(5, 100, "peer"), (100, 5, "sender")])
def test_asks_beyond_the_limit_are_refused_one_by_one(
    kit: ModuleType, net: Any, monkeypatch: pytest.MonkeyPatch, mine: int, total: int, scope: str
) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_ASKS", mine)
    monkeypatch.setattr(waiting, "MAX_WAITING_TOTAL", total)
    for number in range(8):
        ask_as(net, R1, f"never{number}")
    refused = told(net)
    assert [(type(message), message.request) for message in refused] == [
        (control.Abort, f"never{number}") for number in (5, 6, 7)
    ]
    error = refused[0].error.unpack()
    assert isinstance(error, TransferError)
    assert error.fields == {"request": "never5", "limit": 5, "scope": scope}
    net.sender.begin("never0", 3)  # one of them has its turn: room again
    ask_as(net, R1, "never8")
    assert told(net) == []
    net.clock.now += net.options.ask_timeout_s
    net.sender._peers[R1].heard_at = net.sender._peers[R2].heard_at = net.clock.now
    net.sender.tick()
    ended = [message for message in told(net) if isinstance(message, control.Expired)]
    assert sorted(message.request for message in ended) == ["never1", "never2", "never3", "never4", "never8"]


def test_a_peer_at_its_limit_costs_others_nothing(kit: ModuleType, net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_ASKS", 50)
    for number in range(500):
        ask_as(net, R1, f"never{number}")
    assert len(net.sender._waiting.deadlines) == 50
    before = net.sender._waiting.deadlines.visits
    serves(kit, net)
    assert net.sender._waiting.deadlines.visits == before
    net.receivers[R1].ask("begun", table(3), 0, 3)  # what is begun is no waiting ask
    net.sender.begin("begun", 3)
    net.receivers[R1].events()
    net.settle()
    assert not [event for event in net.receivers[R1].events() if isinstance(event, ReceiveFailed)]


def test_a_refused_ask_is_forgotten_and_may_be_asked_again(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "MAX_WAITING_ASKS", 1)
    ask_as(net, R1, "a")
    ask_as(net, R1, "b", 2)
    told(net)
    net.sender.begin("a", 3)
    ask_as(net, R1, "b", 3)
    assert told(net) == []
    ask_as(net, R1, "b", 4)
    (message,) = told(net)
    assert isinstance(message.error.unpack(), DuplicateRequestError)


def test_a_receiver_with_more_attempts_than_a_heartbeat_holds_sends_several(
    net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks(net, 7)
    monkeypatch.setattr(control, "MAX_RENEWALS", 3)
    net.clock.now += net.options.heartbeat_s
    net.receivers[R1].tick()
    beats = [message for _, message in net.receivers[R1].outbox()]
    assert [[item.request for item in beat.renew] for beat in beats] == [
        ["n0", "n1", "n2"], ["n3", "n4", "n5"], ["n6"]
    ]  # fmt: skip
    net.receivers[R2].tick()
    (beat,) = [message for _, message in net.receivers[R2].outbox()]
    assert beat.renew == ()


def test_limits_of_messages_are_kept_at_decode() -> None:
    renew = tuple(control.Renewal("x", number) for number in range(control.MAX_RENEWALS + 1))
    control.decode(
        control.encode(
            control.Heartbeat(src="a" * control.MAX_INSTANCE_ID, dst="b" * control.MAX_INSTANCE_ID, renew=renew[1:])
        )
    )
    for message in (
        control.Heartbeat(src="a", dst="b", renew=renew),
        control.Heartbeat(src="a" * (control.MAX_INSTANCE_ID + 1), dst="b"),
        control.Heartbeat(src="a", dst="b" * (control.MAX_INSTANCE_ID + 1)),
    ):
        with pytest.raises(ProtocolError):
            control.decode(control.encode(message))


@pytest.mark.parametrize("field", ["type", "request", "src", "src and request"])
def test_little_is_logged_of_a_broken_message(net: Any, field: str) -> None:
    plain: dict[str, Any] = {"type": "ask", "src": "r1", "dst": "sender-1", "request": "x", "attempt": 1}
    for name in field.split(" and "):
        plain[name] = "y" * 5_000_000
    with pytest.raises(ProtocolError) as caught:
        control.decode(control.encode(plain))  # type: ignore[arg-type]
    assert len(str(caught.value)) < 2000
    with capture_logs() as logs:
        net.sender.broken(R1, caught.value)
        net.sender.broken(R2, ProtocolError("z" * 10_000, **{"n" * 9999: ["v"] * 100_000, "huge": "w" * 10**6}))
        net.receivers[R1].broken(b"0", ProtocolError("z" * 10_000, got="w" * 10**6))
    assert len(logs) == 3
    assert all(len(str(entry)) < 2000 for entry in logs)
