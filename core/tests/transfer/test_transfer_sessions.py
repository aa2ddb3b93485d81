"""The protocol's state machines, message by message, with a clock and a wire that obey the test."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.errors import (
    ConfigError,
    DuplicateRequestError,
    HandshakeError,
    PeerLostError,
    ProtocolError,
    RequestError,
    TransferAbortedError,
    TransferError,
    TransferExpiredError,
    UnknownRequestError,
)
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import (
    ReceiveDone,
    ReceiveFailed,
    ReceiveProgress,
    ReceiveQuiet,
    SendDone,
    SendFailed,
    TransferOptions,
)
from kvcore.transfer.session.joined import name

R1, R2 = b"r1", b"r2"
SENDER = name(0)
# logical bytes of a unit in the kit's layout: 2 layers, k and v, 4 slots, 2 heads, 8 dims, fp32; and one byte of scale
KV, SCALE = 2 * 2 * 4 * 2 * 8 * 4, 2 * 4 * 2


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def table(*ids: int) -> dict[tuple[str, str], Any]:
    return {("full", "pages"): np.array(ids, np.int64)}


def fill(kit: ModuleType, net: Any, ids: list[int], tag: str) -> None:
    for unit in ids:
        for component in kit.COMPONENTS:
            net.sender_memory[component, unit] = (tag, component, unit)


def send_chunks(kit: ModuleType, net: Any, request: str = "x", *, engine_data: bytes = b"first token") -> None:
    """15 tokens on pages of 4, in chunks of 5: units 11, 12 | 13 | 14, 15 become final."""
    net.sender.offer(request, 0, 5, [kit.payload([11], 0)])
    net.sender.offer(request, 5, 10, [kit.payload([12], 1)])
    net.sender.note_chunk_start(request, last=True)
    net.sender.offer(request, 10, 15, [kit.payload([13, 14], 2)], last=True, engine_data=engine_data)


def begun(kit: ModuleType, net: Any, request: str = "x") -> None:
    fill(kit, net, [11, 12, 13, 14], request)
    net.sender.begin(request, 15)


def failure(session: Any) -> Any:
    """The one failure among the events."""
    (found,) = [e for e in session.events() if isinstance(e, SendFailed | ReceiveFailed)]
    return found


# --- the course of a transfer ---


@pytest.mark.parametrize("when", ["before", "between", "after"])
def test_chunks_arrive_once_and_are_committed(kit: ModuleType, net: Any, when: str) -> None:
    """J8: 15 tokens in chunks of 5 with pages of 4: every page once, the partial one with the last chunk, 4 not 6.

    The ask may come before, during or after the prefill.
    """
    receiver = net.receivers[R1]
    if when == "before":
        receiver.ask("x", table(3, 9, 4, 7), 0, 15)
        net.settle()
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    if when == "between":
        receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    net.sender.offer("x", 5, 10, [kit.payload([12], 1)])
    net.sender.offer("x", 10, 15, [kit.payload([13, 14], 2)], last=True, engine_data=b"first token")
    if when == "after":
        receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    *progress, done = receiver.events()
    assert progress == [ReceiveProgress("x", 1, 0, 5), ReceiveProgress("x", 1, 5, 10), ReceiveProgress("x", 1, 10, 15)]
    nbytes = {"full/kv": 4 * KV, "full/scale": 4 * SCALE}
    assert done == ReceiveDone("x", 1, 15, nbytes, b"first token", 0)
    assert net.sender.events() == [SendDone("x", 1, 15, nbytes, 0)]
    moved = [pair for read in net.connections[R1].reads for job in read.jobs
             for pair in zip(job.src_units.tolist(), job.dst_units.tolist(), strict=True)]  # fmt: skip
    assert moved == [(11, 3), (12, 9), (13, 4), (14, 7)]
    for (component, unit), content in net.memories[R1].items():
        assert content == ("x", component, {3: 11, 9: 12, 4: 13, 7: 14}[unit])
    assert len(net.memories[R1]) == 8
    assert not net.sender.held_units()
    assert not net.sender.requests()
    assert not receiver.requests()


def test_messages_of_a_transfer(kit: ModuleType, net: Any) -> None:
    """Nothing is accepted before the commit, and the commit only follows when all of it is pulled."""
    net.log.clear()
    net.receivers[R1].ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    send_chunks(kit, net)
    net.settle()
    assert net.log == ["Ask", "Offer", "Offer", "Offer", "Pulled", "Pulled", "Pulled", "PulledAll", "Commit", "Ack"]


def test_pulled_early_counts_by_event_order(kit: ModuleType, net: Any) -> None:
    """What was reported pulled before the last chunk started counts, whatever the clock says."""
    receiver, connection = net.receivers[R1], net.connections[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    net.settle()
    net.sender.offer("x", 5, 10, [kit.payload([12], 1)])
    net.settle(reads=False)
    connection.running[0].finish()
    receiver.tick()  # pulled here, but the report is still on the wire
    net.sender.note_chunk_start("x", last=False)
    net.sender.note_chunk_start("x", last=True)
    net.settle()
    net.sender.note_chunk_start("x", last=True)  # said twice: the first counts
    net.sender.offer("x", 10, 15, [kit.payload([13, 14], 2)], last=True)
    net.settle()
    assert receiver.events()[-1].pulled_early_bytes == KV + SCALE
    assert net.sender.events()[-1].pulled_early_bytes == KV + SCALE


@pytest.mark.parametrize("tables", [{}, table(), table(-1, -1, -1, -1)])
@pytest.mark.parametrize("early", [True, False])
def test_a_prefix_that_is_here_already_needs_no_bytes(kit: ModuleType, net: Any, tables: Any, early: bool) -> None:
    """J6: the receiver holds the full prefix: done on both sides, the sender's units released, no wire payload."""
    receiver = net.receivers[R1]
    if early:
        receiver.ask("x", tables, 15, 15)
    begun(kit, net)
    send_chunks(kit, net)
    if not early:
        receiver.ask("x", tables, 15, 15)
    net.settle()
    done = receiver.events()[-1]
    assert (type(done), done.bytes_by_component, done.engine_data) == (ReceiveDone, {}, b"first token")
    assert net.sender.events() == [SendDone("x", 1, 15, {}, 0)]
    assert net.connections[R1].reads == []
    assert not net.sender.held_units()


def test_part_of_the_prefix_is_here(kit: ModuleType, net: Any) -> None:
    net.receivers[R1].ask("x", table(-1, -1, 4, 7), 8, 15)
    begun(kit, net)
    send_chunks(kit, net)
    net.settle()
    assert net.receivers[R1].events()[-1].bytes_by_component == {"full/kv": 2 * KV, "full/scale": 2 * SCALE}
    assert {unit for _, unit in net.memories[R1]} == {4, 7}


def test_zero_tokens(kit: ModuleType, net: Any) -> None:
    net.receivers[R1].ask("x", {}, 0, 0)
    net.sender.begin("x", 0)
    net.sender.offer("x", 0, 0, [], last=True, engine_data=b"e")
    net.settle()
    assert net.receivers[R1].events()[-1] == ReceiveDone("x", 1, 0, {}, b"e", 0)
    assert net.sender.events() == [SendDone("x", 1, 0, {}, 0)]


def test_components_may_be_offered_apart(kit: ModuleType, net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9), 0, 8)
    begun(kit, net, "x")
    net.sender.abort("x", "make room")
    net.settle()
    receiver.events()
    receiver.ask("y", table(3, 9), 0, 8)
    net.sender.begin("y", 8)
    net.sender.offer("y", 0, 8, [kit.payload([11, 12], 0, ["full/scale"]), kit.payload([13], 0, ["full/kv"]),
                                 kit.payload([14], 1, ["full/kv"])], last=True)  # fmt: skip
    net.settle()
    assert isinstance(receiver.events()[-1], ReceiveDone)
    assert net.memories[R1]["full/kv", 9][2] == 14
    assert net.memories[R1]["full/scale", 9][2] == 12


def test_several_receivers_and_requests(kit: ModuleType, net: Any) -> None:
    for n, peer in enumerate([R1, R2, R1, R2]):
        fill(kit, net, [20 + n], f"q{n}")
        net.sender.begin(f"q{n}", 3)
        net.receivers[peer].ask(f"q{n}", table(5 + n), 0, 3)
    for n in (2, 0, 3, 1):
        net.sender.offer(f"q{n}", 0, 3, [kit.payload([20 + n], 0)], last=True, engine_data=bytes([n]))
    net.settle()
    for peer, names in ((R1, ["q2", "q0"]), (R2, ["q3", "q1"])):
        done = [e for e in net.receivers[peer].events() if isinstance(e, ReceiveDone)]
        assert sorted(e.request for e in done) == sorted(names)
        assert all(e.engine_data == bytes([int(e.request[1])]) for e in done)
    assert len(net.sender.events()) == 4
    assert net.memories[R1]["full/kv", 7] == ("q2", "full/kv", 22)


# --- what the engine may not do ---


def test_begin_twice_is_refused_and_the_first_untouched(kit: ModuleType, net: Any) -> None:
    """J4: a request id in use is refused; after it is over the id is free again."""
    for _ in range(2):
        net.receivers[R1].ask("x", table(3, 9, 4, 7), 0, 15)
        begun(kit, net)
        net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
        with pytest.raises(DuplicateRequestError):
            net.sender.begin("x", 3)
        with pytest.raises(DuplicateRequestError):
            net.receivers[R1].ask("x", table(1), 0, 3)
        net.sender.offer("x", 5, 15, [kit.payload([12, 13, 14], 1)], last=True)
        net.settle()
        assert isinstance(net.receivers[R1].events()[-1], ReceiveDone)
        assert [type(e) for e in net.sender.events()] == [SendDone]


def test_second_ask_is_refused_and_the_first_untouched(kit: ModuleType, net: Any) -> None:
    """J4: two receivers ask for one request; before and after it is begun."""
    first, second = net.receivers[R1], net.receivers[R2]
    first.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    second.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    assert isinstance(failure(second).error, DuplicateRequestError)
    begun(kit, net)
    second.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    assert isinstance(failure(second).error, DuplicateRequestError)
    send_chunks(kit, net)
    net.settle()
    assert isinstance(first.events()[-1], ReceiveDone)
    assert [type(e) for e in net.sender.events()] == [SendDone]


@pytest.mark.parametrize(
    ("start", "stop", "last", "ids", "first"),
    [(0, 5, False, [12], 1), (6, 10, False, [12], 1), (5, 16, False, [12], 1), (5, 10, True, [12], 1),
     (5, 4, False, [], 1), (5, 10, False, [12], 0)],
)  # fmt: skip
def test_offers_that_do_not_fit(
    kit: ModuleType, net: Any, start: int, stop: int, last: bool, ids: list[int], first: int
) -> None:
    """J8: a gap, a repetition, a unit offered twice: refused, and the request goes on as if nothing had been said."""
    net.receivers[R1].ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    with pytest.raises(RequestError):
        net.sender.offer("x", start, stop, [kit.payload(ids, first)], last=last)
    net.sender.offer("x", 5, 15, [kit.payload([12, 13, 14], 1)], last=True)
    net.settle()
    assert isinstance(net.receivers[R1].events()[-1], ReceiveDone)
    with pytest.raises(UnknownRequestError):
        net.sender.offer("x", 15, 15, [])


def test_engine_data_and_names_are_bounded(kit: ModuleType, net: Any) -> None:
    begun(kit, net)
    with pytest.raises(RequestError, match="engine data"):
        net.sender.offer("x", 0, 15, [], last=True, engine_data=b"x" * 65537)
    with pytest.raises(RequestError, match="engine data"):
        net.sender.offer("x", 0, 5, [], engine_data=b"x")
    with pytest.raises(RequestError, match="manifest"):
        net.sender.offer("x", 0, 5, [kit.payload([11], 0, ["full/other"])])
    with pytest.raises(RequestError):
        net.sender.begin("", 3)
    with pytest.raises(RequestError):
        net.sender.begin("y", -1)
    with pytest.raises(UnknownRequestError):
        net.sender.note_chunk_start("y", last=True)
    net.sender.offer("x", 0, 15, [kit.payload([11, 12, 13, 14], 0)], last=True)
    with pytest.raises(RequestError, match="complete"):
        net.sender.offer("x", 15, 15, [])


@pytest.mark.parametrize(
    ("tables", "start", "stop"),
    [({}, 0, 15), ({("full", "other"): np.array([1])}, 0, 15), (table(0), 0, 3), (table(64), 0, 3), (table(5, 5), 0, 8),
     (table(5), 4, 3), (table(5), -1, 3)],
)  # fmt: skip
def test_asks_that_do_not_fit(net: Any, tables: Any, start: int, stop: int) -> None:
    """The null unit, foreign units, a unit twice, a forgotten range: refused before anything is sent."""
    with pytest.raises(RequestError):
        net.receivers[R1].ask("x", tables, start, stop)
    net.settle()
    assert "Ask" not in net.log
    assert not net.receivers[R1].has("x")


@pytest.mark.parametrize("begin_first", [True, False])
def test_ask_for_another_length(kit: ModuleType, net: Any, begin_first: bool) -> None:
    if begin_first:
        begun(kit, net)
    net.receivers[R1].ask("x", table(3, 9), 0, 8)
    net.settle()
    if not begin_first:
        begun(kit, net)
        net.settle()
    assert failure(net.receivers[R1]).error.fields["num_tokens"] == 15
    net.receivers[R2].ask("x", table(3, 9, 4, 7), 0, 15)  # the sender's request is as good as before
    send_chunks(kit, net)
    net.settle()
    assert isinstance(net.receivers[R2].events()[-1], ReceiveDone)


# --- nothing is done unless everything arrived ---


def test_units_that_were_never_offered_fail_the_request(kit: ModuleType, net: Any) -> None:
    net.receivers[R1].ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    net.sender.offer("x", 0, 15, [kit.payload([11, 12], 0), kit.payload([14], 3)], last=True)
    net.settle()
    failed = failure(net.receivers[R1])
    assert "did not offer every unit" in failed.error.message
    assert failed.error.fields["first_missing"] == 2
    assert isinstance(failure(net.sender).error, TransferError)


def test_a_component_that_was_forgotten_fails_the_request(kit: ModuleType, net: Any) -> None:
    """I5: half of the pools arriving is not 'done'."""
    net.receivers[R1].ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0, ["full/kv"])], last=True)
    net.settle()
    assert failure(net.receivers[R1]).error.fields["component"] == "full/scale"


@pytest.mark.parametrize(
    "change",
    [{"seq": 2}, {"start": 6}, {"stop": 16}, {"stop": 5, "last": True}, {"src_unit": 0}, {"src_unit": 64},
     {"first": 0}, {"first": 4}, {"component": "full/other"}, {"range": "other"}],
)  # fmt: skip
def test_offers_a_sender_must_not_make(kit: ModuleType, net: Any, change: dict[str, Any]) -> None:
    """A sender that skips, repeats, or names units it does not have: the request fails typed, nothing is read."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    net.settle()
    fields = {"seq": 1, "start": 5, "stop": 10, "last": False}
    item = kit.payload([change.get("src_unit", 12)], change.get("first", 1), [change.get("component", "full/kv")])
    item = msgspec.structs.replace(item, range=change.get("range", "pages"))
    fields |= {key: value for key, value in change.items() if key in fields}
    at = {"src": "sender-1", "dst": "r1", "request": "x", "attempt": 1}
    receiver.handle(SENDER, control.Offer(**at, payloads=(item,), **fields))
    assert isinstance(failure(receiver).error, ProtocolError)
    assert len(net.connections[R1].reads) == 1
    net.settle()
    assert isinstance(failure(net.sender).error, ProtocolError)


def test_commit_must_match_what_was_pulled(kit: ModuleType, net: Any) -> None:
    at = {"src": "sender-1", "dst": "r1", "request": "x"}
    good = {"attempt": 1, "num_tokens": 3, "num_offers": 1, "nbytes": {"full/kv": KV, "full/scale": SCALE}}
    rest = {"pulled_early_bytes": 0, "engine_data": b"", "checksums": {}}
    for n, change in enumerate([{"num_tokens": 4}, {"num_offers": 2}, {"nbytes": {"full/kv": KV}}, {"attempt": 9}]):
        receiver = net.receivers[R1]
        attempt = receiver.ask("x", table(3), 0, 3)
        assert attempt == n + 1
        net.sender.begin("x", 3)
        net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
        net.collect()
        net.deliver_up(R1)
        net.deliver_down(R1)
        net.connections[R1].running[0].finish()
        receiver.tick()
        receiver.handle(SENDER, control.Commit(**at, **{**good, "attempt": attempt, **change}, **rest))
        if "attempt" in change:
            net.settle()
            assert isinstance(receiver.events()[-1], ReceiveDone), "a commit of another attempt changes nothing"
        else:
            assert isinstance(failure(receiver).error, ProtocolError)
            net.settle()


@pytest.mark.parametrize("reading", [True, False])
def test_no_commit_is_accepted_before_everything_was_reported(kit: ModuleType, net: Any, reading: bool) -> None:
    """Even one whose numbers fit: nothing asked for it, so it proves nothing."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3) if reading else {}, 0 if reading else 3, 3)
    net.sender.begin("x", 3)
    if reading:
        net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle(reads=False)
    numbers = {"num_tokens": 3, "num_offers": int(reading), "nbytes": {}, "pulled_early_bytes": 0}
    at = {"src": "sender-1", "dst": "r1", "request": "x", "attempt": 1}
    receiver.handle(SENDER, control.Commit(**at, **numbers, engine_data=b"", checksums={}))
    net.settle()
    assert isinstance(failure(receiver).error, ProtocolError)


def test_sender_checks_what_a_receiver_reports(kit: ModuleType, net: Any) -> None:
    at = {"src": "r1", "dst": "sender-1", "request": "x"}
    cases = [
        lambda a: control.Pulled(**at, attempt=a, seq=7, nbytes={}),
        lambda a: control.Pulled(**at, attempt=a, seq=0, nbytes={"nonsense": 1}),
        lambda a: control.PulledAll(**at, attempt=a, nbytes={}, units=()),
        lambda a: control.Ack(**at, attempt=a),
    ]
    for case in cases:
        attempt = net.receivers[R1].ask("x", table(3), 0, 3)
        net.sender.begin("x", 3)
        net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
        net.settle(reads=False)
        net.sender.handle(R1, case(attempt))
        assert isinstance(failure(net.sender).error, ProtocolError)
        net.settle()
        assert isinstance(failure(net.receivers[R1]).error, ProtocolError)


# --- aborts, leases, lost peers ---


def test_receiver_abort_waits_for_its_reads(kit: ModuleType, net: Any) -> None:
    """J1: a late read lands in units that are still held; only then is the failure reported."""
    receiver, connection = net.receivers[R1], net.connections[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    net.settle(reads=False)
    receiver.abort("x", "client left")
    receiver.abort("x", "said twice")
    net.settle(reads=False)
    assert receiver.events() == []
    assert receiver.has("x")
    assert isinstance(failure(net.sender).error, TransferAbortedError)
    net.tick(1)
    assert receiver.events() == []
    connection.running[0].finish()
    receiver.tick()
    failed = failure(receiver)
    assert failed.quiet
    assert isinstance(failed.error, TransferAbortedError)
    assert "client left" in failed.error.message
    with pytest.raises(UnknownRequestError):
        receiver.abort("x", "again")
    # a new attempt is free to succeed
    assert receiver.ask("x", table(3, 9, 4, 7), 0, 15) == 2
    begun(kit, net)
    send_chunks(kit, net)
    net.settle()
    assert isinstance(receiver.events()[-1], ReceiveDone)


def test_reads_that_never_end_retire_the_transport(kit: ModuleType, net: Any) -> None:
    receiver, connection = net.receivers[R1], net.connections[R1]
    for request, unit in (("x", 3), ("y", 5)):
        receiver.ask(request, table(unit), 0, 3)
        net.sender.begin(request, 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle(reads=False)
    receiver.abort("x", "client left")
    net.pass_time(net.options.quiesce_s + 1, reads=False)
    failed = [e for e in receiver.events() if isinstance(e, ReceiveFailed)]
    assert [(e.request, e.quiet) for e in failed] == [("x", False), ("y", True)]
    assert receiver.reads_in_flight == 1
    with pytest.raises(PeerLostError):
        receiver.ask("z", table(6), 0, 3)
    connection.running[0].finish()
    receiver.tick()
    assert receiver.events() == [ReceiveQuiet("x", 1)]
    assert receiver.reads_in_flight == 0


@pytest.mark.parametrize("step", range(9))
@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_abort_at_every_step(kit: ModuleType, net: Any, side: str, step: int) -> None:
    """After any number of deliveries: one terminal event a side, nothing held, nothing kept without a commit."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    send_chunks(kit, net)
    for _ in range(step):
        net.collect()
        if not net.deliver_down(R1) and not net.deliver_up(R1):
            for read in net.connections[R1].running:
                read.finish()
            receiver.tick()
    session = net.sender if side == "sender" else receiver
    if session.has("x"):
        session.abort("x", "test")
    net.settle()
    (mine,) = [e for e in receiver.events() if isinstance(e, ReceiveDone | ReceiveFailed)]
    (theirs,) = [e for e in net.sender.events() if isinstance(e, SendDone | SendFailed)]
    for event in (mine, theirs):
        if isinstance(event, ReceiveFailed | SendFailed):
            assert isinstance(event.error, TransferAbortedError)
    if isinstance(theirs, SendDone):
        assert isinstance(mine, ReceiveDone)
    if isinstance(mine, ReceiveDone):
        assert net.log.count("Commit") == 1
    assert not net.sender.held_units()
    assert not receiver.reads_in_flight


def test_lease_of_a_prompt_nobody_asks_for(kit: ModuleType, net: Any) -> None:
    begun(kit, net)
    net.sender.offer("x", 0, 5, [kit.payload([11], 0)])
    net.pass_time(100)
    assert net.sender.events() == [], "the lease starts when the prompt is done"
    net.sender.offer("x", 5, 15, [kit.payload([12, 13, 14], 1)], last=True)
    net.pass_time(net.options.lease_s - 3)
    assert net.sender.events() == []
    net.pass_time(4)
    assert isinstance(failure(net.sender).error, TransferExpiredError)
    assert not net.sender.held_units()


def test_heartbeats_renew_the_lease_while_reads_move(kit: ModuleType, net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    send_chunks(kit, net)
    net.settle(reads=False)
    net.pass_time(net.options.read_timeout_s - 2, reads=False)  # alive and reading
    assert net.sender.events() == []
    net.pass_time(net.options.lease_s + 3, reads=False)  # alive, but the read has hung for too long
    assert isinstance(failure(net.sender).error, TransferExpiredError)
    net.settle()
    failed = failure(receiver)
    assert isinstance(failed.error, TransferExpiredError)
    assert failed.quiet


def test_a_pull_that_outlives_the_lease_is_expired(kit: ModuleType, net: Any) -> None:
    """A one-sided read may succeed on units that belong to another request by now: nothing of it is kept."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    begun(kit, net)
    send_chunks(kit, net)
    net.settle(reads=False)
    net.clock.now += net.options.lease_s + 1
    net.sender._peers[R1].heard_at = net.clock.now  # heartbeats without renewals have been heard
    net.sender.tick()
    assert isinstance(failure(net.sender).error, TransferExpiredError)
    net.sender.outbox()  # the notice is lost with the wire; the reads succeed
    fill(kit, net, [11, 12, 13, 14], "another request")
    for read in net.connections[R1].running:
        read.finish()
    receiver.links[0]._heard_at = net.clock.now
    net.settle()
    assert net.log[-1] == "Expired"
    assert isinstance(failure(receiver).error, TransferExpiredError)


def test_ask_for_what_is_never_begun(net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    net.pass_time(net.options.ask_timeout_s - 2)
    assert receiver.has("x")
    net.pass_time(3)
    assert isinstance(failure(receiver).error, TransferExpiredError)
    receiver.ask("x", table(3), 0, 3)
    net.settle()
    receiver.abort("x", "client left")
    net.settle()
    net.sender.begin("x", 3)
    net.settle()
    assert isinstance(failure(receiver).error, TransferAbortedError)
    assert net.sender.requests() == ("x",), "the ask that was taken back is forgotten"


@pytest.mark.parametrize("how", ["abort", "lease"])
def test_ask_that_comes_after_the_end_is_answered_at_once(kit: ModuleType, net: Any, how: str) -> None:
    """Once: a second ask may be for a request that the engine will begin again."""
    begun(kit, net)
    if how == "abort":
        net.sender.abort("x", "client left")
    else:
        send_chunks(kit, net)
        net.pass_time(net.options.lease_s + 1)
    receiver = net.receivers[R1]
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    kind = TransferAbortedError if how == "abort" else TransferExpiredError
    assert isinstance(failure(receiver).error, kind)
    receiver.ask("x", table(3, 9, 4, 7), 0, 15)
    net.settle()
    begun(kit, net)
    send_chunks(kit, net)
    net.settle()
    assert isinstance(receiver.events()[-1], ReceiveDone)


def test_an_attempt_the_sender_does_not_know_ends(kit: ModuleType, net: Any) -> None:
    """An ask that was lost is noticed by the next heartbeat instead of waiting for ever."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    receiver.outbox()
    net.pass_time(2)
    assert isinstance(failure(receiver).error, TransferExpiredError)


def test_report_is_repeated_until_answered(kit: ModuleType, net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.deliver_up(R1)
    net.deliver_down(R1)
    net.connections[R1].running[0].finish()
    receiver.tick()
    net.deliver_up(R1)
    net.deliver_up(R1)
    net.down[R1].clear()  # the commit is lost
    net.pass_time(2)
    assert isinstance(receiver.events()[-1], ReceiveDone)
    assert [type(e) for e in net.sender.events()] == [SendDone]


@pytest.mark.parametrize("how", ["connection", "silence", "bye"])
def test_sender_lost(kit: ModuleType, net: Any, how: str) -> None:
    receiver, other = net.receivers[R1], net.receivers[R2]
    for request, peer in (("x", receiver), ("y", receiver), ("z", other)):
        peer.ask(request, table(3 if request == "x" else 4), 0, 3)
        net.sender.begin(request, 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)])
    net.settle(reads=False)
    if how == "connection":
        net.connections[R1].up = False
    elif how == "silence":
        net.clock.now += net.options.peer_timeout_s + 0.1
        other._heard_at = net.clock.now
    else:
        net.sender.close("going down")
        net.settle(reads=False)
    receiver.tick()
    (quick,) = [e for e in receiver.events() if isinstance(e, ReceiveFailed)]
    kind = TransferAbortedError if how == "bye" else PeerLostError
    assert (quick.request, quick.quiet, type(quick.error)) == ("y", True, kind)
    net.connections[R1].running[0].fail()
    receiver.tick()
    late = failure(receiver)
    assert (late.request, late.quiet, type(late.error)) == ("x", True, kind)
    with pytest.raises(PeerLostError):
        receiver.ask("w", table(3), 0, 3)
    assert other.has("z") is (how != "bye")


@pytest.mark.parametrize("how", ["wire", "silence", "bye"])
def test_receiver_lost(kit: ModuleType, net: Any, how: str) -> None:
    for request, peer in (("x", R1), ("y", R1), ("z", R2)):
        net.receivers[peer].ask(request, table(3 if request == "x" else 4), 0, 3)
    net.sender.begin("x", 3)
    net.sender.begin("z", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle(reads=False)
    if how == "wire":
        net.sender.lost(R1, "cut")
    elif how == "bye":
        net.receivers[R1].close()
        net.settle(reads=False)
    else:
        net.clock.now += net.options.peer_timeout_s + 0.1
        net.sender._peers[R2].heard_at = net.clock.now
        net.sender.tick()
    failed = failure(net.sender)
    assert failed.request == "x"
    assert isinstance(failed.error, PeerLostError | TransferAbortedError)
    assert not net.sender.held_units()
    net.sender.begin("y", 3)
    assert net.sender.requests() == ("z", "y"), "the other receiver's request goes on"
    assert list(net.sender.peers()) == [R2]
    net.sender.lost(R1, "said twice")


def test_restarted_sender_refuses_the_old_conversation(kit: ModuleType, net: Any) -> None:
    """J10: a sender restarted at the same address has a new instance id: in-flight requests fail at once, messages with
    the old id are refused, and the next handshake works."""
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    net.settle()
    net.start_sender("sender-2")
    net.pass_time(2)
    assert isinstance(failure(receiver).error, PeerLostError)
    assert not net.sender.peers()
    fresh = net.start_receiver(R1, "r1-again")
    fresh.ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle()
    assert isinstance(fresh.events()[-1], ReceiveDone)
    # and what an old sender still had on the wire means nothing to the new conversation
    fresh.ask("y", table(3), 0, 3)
    fresh.handle(SENDER, control.Expired(src="sender-1", dst="r1-again", request="y", attempt=2))
    fresh.handle(SENDER, control.Expired(src="sender-2", dst="r1", request="y", attempt=2))
    assert fresh.has("y")


def test_restarted_receiver_replaces_the_old_one(kit: ModuleType, net: Any) -> None:
    """J10, the other side: the old instance's requests fail, its late messages are refused."""
    old = net.receivers[R1]
    old.ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.settle()
    fresh = net.start_receiver(R1, "r1-again")
    assert isinstance(failure(net.sender).error, PeerLostError)
    net.sender.begin("x", 3)
    fresh.ask("x", table(5), 0, 3)
    net.settle()
    late = control.Abort(
        src="r1", dst="sender-1", request="x", attempt=1, error=control.WireError.of(TransferAbortedError("late"))
    )
    net.sender.handle(R1, late)
    assert net.sender.has("x")
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle()
    assert isinstance(fresh.events()[-1], ReceiveDone)


# --- hello ---


def test_hello_is_refused_by_either_side(kit: ModuleType) -> None:
    net = kit.Net([])
    wrong = msgspec.structs.replace(kit.manifest("receiver", "r1"), model="other")
    receiver = net.start_receiver(R1, "r1", hello=False)
    receiver.links[0].manifest = wrong
    receiver.hello()
    net.settle()
    assert isinstance(receiver.failure, HandshakeError)
    assert receiver.failure.fields["field"] == "model"
    assert not net.sender.peers()

    picky = net.start_receiver(R2, "r2", hello=False)
    picky.manifest = msgspec.structs.replace(picky.manifest, layouts={"full": kit.layout(layers=(0, 1, 9))})
    picky.hello()
    net.settle()
    assert isinstance(picky.failure, HandshakeError), "what no rank of the sender holds"
    assert picky.failure.fields["field"] == "layers"
    assert not net.sender.peers(), "the sender is told"
    assert picky.links[0].connection is None, "no buffer was touched"


def test_another_major_version_is_refused_before_the_manifest_is_read(kit: ModuleType) -> None:
    """I6: both versions are named even where the rest cannot be understood any more."""
    net = kit.Net([])
    receiver = net.start_receiver(R1, "r1", hello=False)
    net.sender.handle(R1, control.Hello(src="r1", dst="", protocol=(2, 3), manifest=b"from the future"))
    net.settle()
    assert isinstance(receiver.failure, HandshakeError)
    assert receiver.failure.fields == {"field": "protocol", "local": "1.0", "remote": "2.3"}


def test_no_answer_to_the_hello(kit: ModuleType) -> None:
    net = kit.Net([])
    receiver = net.start_receiver(R1, "r1", hello=False)
    receiver.hello()
    receiver.outbox()
    net.clock.now += net.options.hello_timeout_s + 0.1
    receiver.tick()
    assert isinstance(receiver.failure, HandshakeError)
    with pytest.raises(PeerLostError):
        receiver.ask("x", table(3), 0, 3)


def test_a_connection_that_cannot_be_opened(kit: ModuleType) -> None:
    net = kit.Net([])
    receiver = net.start_receiver(R1, "r1", hello=False)

    def gone(endpoint: bytes) -> Any:
        raise PeerLostError("could not attach")

    receiver.links[0]._connect = gone
    receiver.hello()
    net.settle()
    assert isinstance(receiver.failure, PeerLostError)
    assert not net.sender.peers()


# --- garbage ---


def test_garbage_from_a_stranger(net: Any) -> None:
    net.sender.broken(b"??", ProtocolError("garbage"))
    ((_, bye),) = [item for item in net.sender.outbox() if item[0] == b"??"]
    assert isinstance(bye, control.Bye)
    net.sender.handle(b"??", control.Ack(src="x", dst="y", request="r", attempt=1))
    ((_, bye),) = net.sender.outbox()
    assert isinstance(bye, control.Bye)
    net.sender.handle(b"??", bye)
    assert not net.sender.outbox(), "a goodbye is never answered"
    assert set(net.sender.peers()) == {R1, R2}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_garbage_in_a_conversation(kit: ModuleType, net: Any, named: bool, direction: str) -> None:
    """I6: a broken message fails the request it names, or the conversation, typed and at once; others go on."""
    for n, (request, peer) in enumerate([("x", R1), ("y", R1), ("z", R2)]):
        net.receivers[peer].ask(request, table(3 + n), 0, 3)
        net.sender.begin(request, 3)
        fill(kit, net, [11 + n], request)
    net.settle()
    garbage = b"\xc1garbage"
    if named:
        garbage = msgspec.msgpack.encode({"type": "pulled", "request": "x", "attempt": 1})
    (net.up if direction == "up" else net.down)[R1].append(garbage)
    net.settle()
    lost = ["x"] if named else ["x", "y"]
    assert [e.request for e in net.receivers[R1].events()] == lost
    failed = net.sender.events()
    assert [e.request for e in failed] == lost
    assert all(isinstance(e.error, ProtocolError) for e in failed)
    for n, request in enumerate(["x", "y", "z"]):
        if request not in lost:
            net.sender.offer(request, 0, 3, [kit.payload([11 + n], 0)], last=True)
    net.settle()
    assert isinstance(net.receivers[R2].events()[-1], ReceiveDone)


def test_messages_for_the_other_side(kit: ModuleType, net: Any) -> None:
    at = {"src": "r1", "dst": "sender-1", "request": "x", "attempt": 1}
    net.sender.handle(R1, control.Expired(**at))
    assert set(net.sender.peers()) == {R2}
    net.receivers[R2].ask("x", table(3), 0, 3)
    net.receivers[R2].handle(SENDER, control.Ack(**{**at, "src": "sender-1", "dst": "r2"}))
    assert isinstance(failure(net.receivers[R2]).error, ProtocolError)


def test_close_ends_everything(kit: ModuleType, net: Any) -> None:
    net.receivers[R1].ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.sender.begin("y", 3)
    net.settle()
    net.sender.close()
    net.sender.close()
    assert [e.request for e in net.sender.events()] == ["x", "y"]
    net.settle()
    assert isinstance(failure(net.receivers[R1]).error, TransferAbortedError)
    net.receivers[R2].close()
    net.receivers[R2].close()
    assert net.receivers[R2].events() == []


def test_options_are_checked() -> None:
    for wrong in ({"lease_s": 0}, {"heartbeat_s": -1}, {"lease_s": 1, "heartbeat_s": 2}, {"quiesce_s": float("nan")}):
        with pytest.raises(ConfigError):
            TransferOptions(**wrong)  # type: ignore[arg-type]


def test_a_long_read_is_renewed_while_others_are_asked_for(net: Any, kit: Any) -> None:
    """Renewals come at their own time, whatever else a receiver has to say."""
    receiver = net.receivers[R1]
    receiver.ask("long", table(3), 0, 4)
    net.sender.begin("long", 4)
    net.sender.offer("long", 0, 4, [kit.payload([11], 0)], last=True)
    net.settle(reads=False)
    step = net.options.heartbeat_s / 2
    for number in range(int(net.options.lease_s / step / 2) * 2 - 2):
        receiver.ask(f"other-{number}", {}, 4, 4)
        net.clock.now += step
        receiver.tick()
        net.settle(reads=False)
        net.sender.tick()
    net.clock.now += 5 * step
    net.sender.tick()
    assert net.sender.has("long")
    assert not net.sender.events()
