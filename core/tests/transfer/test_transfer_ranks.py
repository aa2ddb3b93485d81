"""Senders and receivers of several ranks: who reads what from whom, and when it counts (I1, I8)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import (
    DuplicateRequestError,
    HandshakeError,
    PeerLostError,
    TransferAbortedError,
    TransferError,
    TransferExpiredError,
)
from kvcore.spec import Ranks
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, ReceiveProgress, SendDone, SendFailed
from kvcore.transfer.session.checksums import ReceiverChecksums, SenderChecksums
from kvcore.transfer.session.plan import plan_peer, plan_peers

LAYERS = (0, 1, 2, 3, 4)
TOKENS = 15
SOURCE = [[11, 12, 3, 20], [5, 6, 7, 8], [4, 9, 2, 1], [21, 22, 23, 10], [13, 14, 15, 16], [17, 18, 19, 2]]
TARGET = [[3, 9, 4, 7], [1, 2, 3, 4], [8, 7, 6, 5], [10, 20, 11, 21], [12, 13, 14, 15], [22, 23, 1, 2]]


def tp(ranks: ModuleType, degree: int, layers: Sequence[int] = LAYERS, **options: Any) -> list[Any]:
    """Layouts of a tensor-parallel engine of 4 KV heads; more ranks than heads hold replicas."""
    width = max(1, ranks.HEADS // degree)
    share = max(1, degree // ranks.HEADS)
    return [ranks.layout((r // share * width, r // share * width + width), layers, **options) for r in range(degree)]


def terminal(session: Any) -> list[Any]:
    return [event for event in session.events() if not isinstance(event, ReceiveProgress)]


def run(ranks: ModuleType, senders: list[Any], receivers: list[Any], **options: Any) -> Any:
    """One prompt from every rank to every rank; returns the net."""
    net = ranks.RankNet(senders, receivers, **options)
    assert all(session.connected for session in net.receiving), [session.failure for session in net.receiving]
    net.ask("x", TARGET[: len(receivers)], TOKENS)
    net.prefill("x", SOURCE[: len(senders)], 7, TOKENS)
    net.settle()
    for number, rank in enumerate(net.receivers):
        (done,) = terminal(net.receiving[number])
        assert isinstance(done, ReceiveDone)
        assert done.engine_data == b"first"
        rank.check(TARGET[number], 7, TOKENS)
        # every byte with meaning exactly once, whoever it came from
        whole = {c: sum(r.logical_bytes for r in rank.layout.regions_of(c)) for c in rank.layout.components}
        assert done.bytes_by_component == {c: 4 * n * len(rank.layout.layers) for c, n in whole.items()}
    for session in net.sending:
        (sent,) = session.events()
        assert isinstance(sent, SendDone)
        assert not session.requests()
        assert not session.held_units()
    return net


@pytest.mark.parametrize("order", ["head slot dim", "slot head dim"])
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 1), (2, 2), (8, 2), (2, 8), (8, 1)])
def test_any_two_degrees(ranks: ModuleType, order: str, there: int, here: int) -> None:
    """I8: heads are mapped by id, with more ranks than heads too; a replica that nobody reads from is released."""
    source = (SOURCE * 2)[:there] if there > 6 else SOURCE
    net = ranks.RankNet(tp(ranks, there, order=order), tp(ranks, here))
    tables = [[3 + n % 3, 9, 12, 7] for n in range(here)]
    net.ask("x", tables, TOKENS)
    net.prefill("x", source[:there], 7, TOKENS)
    net.settle()
    for rank, table, session in zip(net.receivers, tables, net.receiving, strict=True):
        assert isinstance(terminal(session)[0], ReceiveDone)
        rank.check(table, 7, TOKENS)
    events = [session.events() for session in net.sending]
    assert all(isinstance(event, SendDone) for (event,) in events)
    read = [sum(event.bytes_by_component.values()) for (event,) in events]
    if there == 8 and here <= 2:
        assert read.count(0) == 4, "of two replicas one is read"
    else:
        assert all(read), "replicas share the work"


@pytest.mark.parametrize(
    ("there", "here"),
    [
        (((0, 1, 2), (3, 4)), ((0, 1, 2, 3, 4),)),
        (((0, 1, 2, 3, 4),), ((0,), (1, 2, 3), (4,))),
        (((0,), (1, 2, 3), (4,)), ((0, 1), (2, 3, 4))),
        (((4, 2), (0, 1, 3)), ((0, 1, 2), (3, 4))),
    ],
)
@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_pipeline_stages_by_layer_id(ranks: ModuleType, there: Any, here: Any, arena: str) -> None:
    """I8: uneven stages, by layer id and never by position."""
    senders = [ranks.layout((0, 4), layers, arena=arena) for layers in there]
    run(ranks, senders, [ranks.layout((0, 4), layers) for layers in here])


def test_stages_and_heads_at_once(ranks: ModuleType) -> None:
    senders = [layout for layers in ((0, 1, 2), (3, 4)) for layout in tp(ranks, 2, layers, order="slot head dim")]
    receivers = [layout for layers in ((0,), (1, 2, 3, 4)) for layout in tp(ranks, 1, layers, arena="layer_major")]
    run(ranks, senders, receivers)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_cut_of_the_model(ranks: ModuleType, data: st.DataObject) -> None:
    """Random stages and degrees on both sides, axis and arena orders included."""

    def engine(who: str) -> list[Any]:
        layers = data.draw(st.permutations(LAYERS[:3]), label=f"{who} layers")
        cuts = sorted(data.draw(st.sets(st.integers(1, 2), max_size=2), label=f"{who} cuts"))
        stages = [layers[a:b] for a, b in zip([0, *cuts], [*cuts, 3], strict=True)]
        degree = data.draw(st.sampled_from([1, 2] if len(stages) > 1 else [1, 2, 4]), label=f"{who} degree")
        order = data.draw(st.sampled_from(["head slot dim", "slot head dim"]), label=f"{who} order")
        arena = data.draw(st.sampled_from(["page_major", "layer_major"]), label=f"{who} arena")
        return [item for stage in stages for item in tp(ranks, degree, stage, order=order, arena=arena)]

    run(ranks, engine("sender"), engine("receiver"))


# --- when it counts ---


@pytest.fixture
def net(ranks: ModuleType) -> Any:
    """TP 2 → TP 2: each rank of the receiver reads from one rank of the sender."""
    return ranks.RankNet(tp(ranks, 2), tp(ranks, 2))


def test_nothing_is_accepted_before_every_rank_has_pulled(net: Any) -> None:
    net.ask("x", TARGET[:2], TOKENS)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle(reads=False)
    net.finish_reads(0)
    net.settle(reads=False)
    assert net.receiving[0].reads_in_flight == 0, "the first rank has everything"
    assert not any(terminal(session) for session in net.receiving)
    assert not any(session.events() for session in net.sending)
    net.settle()
    assert all(isinstance(terminal(session)[0], ReceiveDone) for session in net.receiving)
    assert all(isinstance(session.events()[0], SendDone) for session in net.sending)


@pytest.mark.parametrize("how", ["killed", "aborted", "sender lost"])
def test_one_rank_fails_after_the_other_has_pulled(net: Any, how: str) -> None:
    """No rank keeps the request, every unit goes back, and the next request is served where everybody lives."""
    net.ask("x", TARGET[:2], TOKENS)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle(reads=False)
    net.finish_reads(0)
    net.settle(reads=False)
    if how == "killed":
        net.kill(1)
    elif how == "aborted":
        net.finish_reads(1)  # an abort waits for its reads
        net.receiving[1].abort("x", "changed its mind")
    else:
        net.receiving[1].lost(b"0", "its connection was closed")
        net.finish_reads(1)
    net.settle(reads=False)
    (failed,) = terminal(net.receiving[0])
    assert isinstance(failed, ReceiveFailed)
    assert failed.quiet
    assert isinstance(failed.error, TransferAbortedError if how == "aborted" else PeerLostError)
    for session in net.sending:
        (event,) = session.events()
        assert isinstance(event, SendFailed)
        assert not session.held_units()
    assert not net.receiving[0].requests()
    if how == "aborted":
        net.ask("y", TARGET[:2], TOKENS)
        net.prefill("y", SOURCE[:2], 9, TOKENS)
        net.settle()
        assert all(isinstance(terminal(session)[-1], ReceiveDone) for session in net.receiving)


def test_a_rank_that_dies_before_it_asks(net: Any) -> None:
    net.receiving[0].ask("x", {("full", "pages"): np.array(TARGET[0])}, 0, TOKENS)
    net.settle()
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle()
    net.kill(1)
    net.settle()
    (failed,) = terminal(net.receiving[0])
    assert isinstance(failed.error, PeerLostError)
    assert all(isinstance(session.events()[0], SendFailed) for session in net.sending)


def test_a_rank_that_never_asks_ends_with_the_lease(net: Any) -> None:
    """Heartbeats of the ranks that did ask do not hold the units for ever."""
    net.receiving[0].ask("x", {("full", "pages"): np.array(TARGET[0])}, 0, TOKENS)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle()
    net.pass_time(net.options.lease_s - 2)
    assert not any(session.events() for session in net.sending)
    net.pass_time(4)
    for session in net.sending:
        (event,) = session.events()
        assert isinstance(event.error, TransferExpiredError)
    assert isinstance(terminal(net.receiving[0])[0].error, TransferExpiredError)


def test_an_ask_of_another_rank_that_comes_after_the_end_is_answered(net: Any) -> None:
    """Once, with the reason; the rank that was told already may ask anew."""
    net.receiving[0].ask("x", {("full", "pages"): np.array(TARGET[0])}, 0, TOKENS)
    for session in net.sending:
        session.begin("x", TOKENS)
    net.settle()
    for session in net.sending:
        session.abort("x", "engine changed its mind")
    net.settle()
    assert isinstance(terminal(net.receiving[0])[0].error, TransferAbortedError)
    net.receiving[1].ask("x", {("full", "pages"): np.array(TARGET[1])}, 0, TOKENS)
    net.settle()
    assert isinstance(terminal(net.receiving[1])[0].error, TransferAbortedError)
    net.ask("x", TARGET[:2], TOKENS)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    for session in net.sending:
        session.events()
    net.settle()
    assert all(isinstance(terminal(session)[0], ReceiveDone) for session in net.receiving)


def test_a_rank_of_another_engine_is_refused(ranks: ModuleType, net: Any) -> None:
    other = ranks.RankNet(tp(ranks, 2), tp(ranks, 2))
    net.ask("x", TARGET[:2], TOKENS)
    net.settle()
    hello = other.receiving[0].manifest
    stranger = msgspec.structs.replace(hello, instance="q0", ranks=Ranks("Q", 0, 2))
    net.sending[0].handle(b"q0", control.Hello(src="q0", dst="", protocol=(1, 0), manifest=stranger.encode()))
    net.sending[0].handle(
        b"q0", control.Ask(src="q0", dst="s0", request="x", attempt=1, start=0, stop=TOKENS, layerwise=False, token=b"")
    )
    abort = [message for peer, message in net.sending[0].outbox() if peer == b"q0"][-1]
    assert isinstance(abort, control.Abort)
    assert isinstance(abort.error.unpack(), DuplicateRequestError)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle()
    assert all(isinstance(terminal(session)[0], ReceiveDone) for session in net.receiving)


# --- handshakes ---


def test_every_rank_of_the_sender_is_needed(ranks: ModuleType) -> None:
    net = ranks.RankNet(tp(ranks, 2), tp(ranks, 1))
    mine = net.receivers[0].manifest
    with pytest.raises(HandshakeError) as found:
        plan_peers(mine, [net.senders[0].manifest])
    assert found.value.fields["field"] == "ranks"
    with pytest.raises(HandshakeError) as found:
        plan_peers(mine, [net.senders[0].manifest] * 2)
    assert found.value.fields["field"] == "ranks"


def test_what_no_rank_holds_is_refused_by_id(ranks: ModuleType) -> None:
    for receiver, field, missing in (
        (ranks.layout((0, 4), (0, 1, 9)), "layers", 9),
        (ranks.layout((2, 6), LAYERS), "head ids", 4),
    ):
        net = ranks.RankNet(tp(ranks, 2), [receiver])
        error = net.receiving[0].failure
        assert isinstance(error, HandshakeError)
        assert error.fields["field"] == field
        assert missing in (error.fields.get("layer"), error.fields.get("id"))
        assert not any(session.peers() for session in net.sending), "the senders are told"


# --- checksums ---


def crc(role: str, rank: Any) -> Any:
    kind = SenderChecksums if role == "s" else ReceiverChecksums
    return kind(rank.manifest, {"full": rank.arena})


@pytest.mark.parametrize(("there", "here"), [(1, 1), (2, 1), (1, 2), (8, 2)])
def test_checksums_agree_across_orders_and_degrees(ranks: ModuleType, there: int, here: int) -> None:
    senders = tp(ranks, there, order="slot head dim", arena="layer_major")
    net = ranks.RankNet(senders, tp(ranks, here), checksums=crc)
    net.ask("x", TARGET[:here], TOKENS)
    net.prefill("x", (SOURCE * 2)[:there], 7, TOKENS)
    net.settle()
    assert all(isinstance(terminal(session)[0], ReceiveDone) for session in net.receiving)


@pytest.mark.parametrize("part", ["k", "latent", "s"])
def test_a_byte_that_changes_on_the_way_is_no_result(ranks: ModuleType, part: str) -> None:
    """One flipped bit in one field of one layer: typed, naming the component, on every rank."""
    net = ranks.RankNet(tp(ranks, 2), tp(ranks, 2), checksums=crc)
    net.ask("x", TARGET[:2], TOKENS)
    net.prefill("x", SOURCE[:2], 7, TOKENS)
    net.settle(reads=False)
    net.finish_reads()
    rank = net.receivers[1]
    (at,) = (at for _, layer, cells, at in rank.places(TARGET[1][2:3]) if (layer, cells.region) == (3, part))
    rank.arena[at[5, 0]] ^= 1
    net.settle()
    (failed,) = terminal(net.receiving[1])
    assert isinstance(failed, ReceiveFailed)
    assert "not what was sent" in failed.error.message
    assert failed.error.fields["components"] == ["full/scale" if part == "s" else "full/kv"]
    assert all(isinstance(session.events()[0], SendFailed) for session in net.sending)


def test_checksums_only_where_both_want_them(ranks: ModuleType) -> None:
    net = ranks.RankNet(tp(ranks, 1), tp(ranks, 1))
    mine = msgspec.structs.replace(net.receivers[0].manifest, checksum="crc32")
    with pytest.raises(HandshakeError) as found:
        plan_peer(mine, net.senders[0].manifest)
    assert found.value.fields["field"] == "checksum"
    assert isinstance(found.value, TransferError)
