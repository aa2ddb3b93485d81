"""A prefill cache and a decode cache joined by shm, in one process: units and endpoint events kept in step."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import zmq.auth

from kvcore.cache import KVCache
from kvcore.config import load_config
from kvcore.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    HandshakeError,
    PeerLostError,
    PromptTooLongError,
    TransferAbortedError,
)
from kvcore.peers import ReceiveDone, ReceiveFailed, ReceiveSide, SendDone, SendFailed, SendSide
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE, LAYERS = 4, (0, 1)
HEADS = (TensorSpec("k", 2, 16), TensorSpec("v", 2, 8))
MODEL = ModelSpec("toy", (LayerGroup("full", LAYERS, HEADS, num_query_heads=4),), "fp32")


def build(**overrides: object) -> KVCache:
    config = load_config(None, {"cache.page_size": PAGE, "cache.memory": "64KiB", **overrides})
    return KVCache.create(MODEL, config, load_plugins(config.plugins))


@pytest.fixture
def caches() -> Iterator[tuple[KVCache, KVCache]]:
    with build() as prefill, build() as decode:
        decode.store.pools["full"].arena.array()[:] = 0xFF
        for cache in (prefill, decode):
            cache.poison_freed = True
        yield prefill, decode


@pytest.fixture
def sides(caches: tuple[KVCache, KVCache]) -> tuple[SendSide, ReceiveSide]:
    send = caches[0].serve()
    return send, caches[1].connect(send.address)


def token_rows(request: int, start: int, count: int) -> dict[str, torch.Tensor]:
    """Values that name their request and position."""
    position = torch.arange(start, start + count, dtype=torch.float32).reshape(-1, 1, 1)
    return {t.name: (1000 * request + position).expand(-1, t.num_heads, t.head_dim).contiguous() for t in HEADS}


def prefill_chunk(cache: KVCache, side: SendSide, name: str, number: int, start: int, stop: int, total: int) -> None:
    side.chunk_starts(name, last=stop == total)
    with cache.begin([(name, stop - start)]) as step:
        for layer in LAYERS:
            step.store(layer, token_rows(number, start, stop - start))
        step.commit()
    side.offer(name, start, stop, last=stop == total, engine_data=b"first" if stop == total else b"")


def take_all(side: SendSide | ReceiveSide, kinds: tuple[type, ...], count: int, seconds: float = 10) -> list[object]:
    """The next events of these kinds, exactly ``count``."""
    deadline, found = time.monotonic() + seconds, list[object]()
    while len(found) < count and time.monotonic() < deadline:
        side.wait_event(0.2)
        found += [event for event in side.events() if isinstance(event, kinds)]
    assert len(found) == count
    return found


def take(side: SendSide | ReceiveSide, kinds: tuple[type, ...]) -> object:
    """The next event of these kinds."""
    return take_all(side, kinds, 1)[0]


def assert_holds(cache: KVCache, name: str, number: int, length: int) -> None:
    assert cache.length(name) == length
    units, position = torch.from_numpy(cache.units(name, "full", "pages")), torch.arange(length)
    for layer in LAYERS:
        out = {t.name: torch.full((length, t.num_heads, t.head_dim), -1.0) for t in HEADS}
        cache.store.load(layer, units[position // PAGE] * PAGE + position % PAGE, out)
        want = token_rows(number, 0, length)
        assert all(torch.equal(out[t.name], want[t.name]) for t in HEADS)


def assert_empty(cache: KVCache) -> None:
    cache.check_integrity()
    assert all(part.free == part.capacity for part in cache.stats().manager.ranges)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 15, 16])
@pytest.mark.parametrize("ask_first", [True, False])
def test_prompt_streams_over_and_both_pools_drain(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide], length: int, ask_first: bool
) -> None:
    (prefill, decode), (send, receive) = caches, sides
    if ask_first:
        receive.ask("r", length)
    prefill.admit("r", length)
    send.begin("r", length)
    for start in range(0, length, 5):
        prefill_chunk(prefill, send, "r", 7, start, min(start + 5, length), length)
    if not ask_first:
        receive.ask("r", length)
    done = take(receive, (ReceiveDone, ReceiveFailed))
    assert isinstance(done, ReceiveDone)
    assert done.engine_data == b"first"
    pages = -(-length // PAGE)
    assert done.bytes_by_component == {"full/kv": pages * PAGE * 2 * 2 * (16 + 8) * 4}
    assert_holds(decode, "r", 7, length)
    assert isinstance(take(send, (SendDone, SendFailed)), SendDone)
    assert_empty(prefill)
    decode.release("r")
    assert_empty(decode)


def test_recycled_units_keep_requests_apart(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    (prefill, decode), (send, receive) = caches, sides
    for round_ in range(12):
        names = [f"{round_}.{i}" for i in range(3)]
        for i, name in enumerate(names):
            receive.ask(name, 9 + i)
            prefill.admit(name, 9 + i)
            send.begin(name, 9 + i)
        for i, name in enumerate(names):
            prefill_chunk(prefill, send, name, i, 0, 9 + i, 9 + i)
        received = take_all(receive, (ReceiveDone, ReceiveFailed), len(names))
        assert all(isinstance(event, ReceiveDone) for event in received)
        for i, name in enumerate(names):
            assert_holds(decode, name, i, 9 + i)
            decode.release(name)
        sent = take_all(send, (SendDone, SendFailed), len(names))
        assert all(isinstance(event, SendDone) for event in sent)
    assert_empty(prefill)
    assert_empty(decode)


@pytest.mark.parametrize("who", ["sender", "receiver"])
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_abort_gives_all_units_back(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide], who: str, chunks: int
) -> None:
    (prefill, decode), (send, receive) = caches, sides
    receive.ask("r", 12)
    prefill.admit("r", 12)
    send.begin("r", 12)
    for start in range(0, 5 * chunks, 5):
        prefill_chunk(prefill, send, "r", 1, start, start + 5, 12)
    (send if who == "sender" else receive).abort("r", "changed my mind")
    failed = take(receive, (ReceiveDone, ReceiveFailed))
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(failed.error, TransferAbortedError)
    sent = take(send, (SendDone, SendFailed))
    assert isinstance(sent, SendFailed)
    assert_empty(prefill)
    assert_empty(decode)
    prefill.admit("r", 4)  # the id is free, also for a transfer
    send.begin("r", 4)
    receive.ask("r", 4)
    prefill_chunk(prefill, send, "r", 2, 0, 4, 4)
    assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveDone)
    assert_holds(decode, "r", 2, 4)


def test_units_stay_held_when_an_engine_releases_a_request_under_way(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    """E3/J1: neither the sender's offered units nor the receiver's destination may be handed out meanwhile."""
    (prefill, decode), (send, receive) = caches, sides
    receive.ask("r", 9)
    prefill.admit("r", 9)
    send.begin("r", 9)
    prefill_chunk(prefill, send, "r", 1, 0, 5, 9)
    prefill.release("r")
    decode.release("r")
    for cache in caches:
        (part,) = cache.stats().manager.ranges
        assert (part.used, part.quarantined) == (0, 3)
    take(receive, (ReceiveFailed,))
    take(send, (SendFailed,))
    assert_empty(prefill)
    assert_empty(decode)


@pytest.mark.parametrize("leave", ["release", "retract"])
def test_a_request_that_its_engine_takes_away_is_never_committed(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide], leave: str
) -> None:
    """J1: a fork then owns the offered units alone and writes into them in place; a commit would vouch for its bytes."""
    (prefill, decode), (send, receive) = caches, sides
    prefill.admit("r", 9)
    send.begin("r", 9)
    prefill_chunk(prefill, send, "r", 1, 0, 9, 9)
    prefill.fork("r", "fork", 7)
    getattr(prefill, leave)("r")
    with prefill.begin([("fork", 2)]) as step:
        for layer in LAYERS:
            step.store(layer, token_rows(5, 7, 2))
        step.commit()
    receive.ask("r", 9)
    assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveFailed)
    assert isinstance(take(send, (SendDone, SendFailed)), SendFailed)
    prefill.release("fork")
    assert_empty(prefill)
    assert_empty(decode)


def test_refused_asks_hold_nothing(caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]) -> None:
    (_, decode), (_, receive) = caches, sides
    limit = decode.manager.max_request_tokens
    assert limit is not None
    for tokens, error in ((0, EmptyPromptError), (limit + 1, PromptTooLongError)):
        with pytest.raises(error):
            receive.ask("r", tokens)
    receive.ask("a", limit - PAGE)
    for name, error in (("a", DuplicateRequestError), ("b", CapacityError)):
        with pytest.raises(error):
            receive.ask(name, limit)
    receive.abort("a", "enough")
    take(receive, (ReceiveFailed,))
    assert_empty(decode)


@pytest.mark.parametrize("closer", ["sender", "receiver"])
def test_closing_one_side_fails_the_other_typed(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide], closer: str
) -> None:
    (prefill, decode), (send, receive) = caches, sides
    receive.ask("r", 12)
    prefill.admit("r", 12)
    send.begin("r", 12)
    prefill_chunk(prefill, send, "r", 1, 0, 5, 12)
    if closer == "sender":
        send.close()
        failed = take(receive, (ReceiveDone, ReceiveFailed))
        assert isinstance(failed, ReceiveFailed)
        assert isinstance(failed.error, PeerLostError | TransferAbortedError)
    else:
        receive.close()
        sent = take(send, (SendDone, SendFailed))
        assert isinstance(sent, SendFailed)
    for side in sides:
        side.close()
    assert_empty(prefill)
    assert_empty(decode)


def test_event_of_an_earlier_request_does_not_release_a_new_one_of_the_same_id(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    (prefill, _), (send, _) = caches, sides
    send.begin("r", 5)
    send.abort("r", "before it was admitted")
    send.begin("r", 5)
    prefill.admit("r", 5)
    assert [type(event) for event in send.events()] == [SendFailed]
    assert "r" in prefill.manager


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cache.page_size": 8}, "page size"),
        ({"cache.format": "bf16"}, "format"),
    ],
)
def test_peers_that_cannot_exchange_data_are_refused(change: dict[str, object], field: str) -> None:
    with build() as prefill, build(**change) as decode:
        send = prefill.serve()
        with pytest.raises(HandshakeError) as caught:
            decode.connect(send.address)
        assert caught.value.fields["field"] == field
        assert {str(caught.value.fields["local"]), str(caught.value.fields["remote"])} == {
            str(next(iter(change.values()))),
            str({"page size": PAGE, "format": "fp32"}[field]),
        }


def test_arena_orders_may_differ() -> None:
    with build() as prefill, build(**{"cache.arena": "layer_major"}) as decode:
        send = prefill.serve()
        receive = decode.connect(send.address)
        receive.ask("r", 9)
        prefill.admit("r", 9)
        send.begin("r", 9)
        prefill_chunk(prefill, send, "r", 3, 0, 9, 9)
        assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveDone)
        assert_holds(decode, "r", 3, 9)


def test_curve_certificates_from_files(tmp_path: Path) -> None:
    pairs = {name: zmq.auth.create_certificates(tmp_path, name) for name in ("prefill", "decode", "stranger")}

    def keys(mine: str, peer: str) -> dict[str, object]:
        return {"transfer.curve_certificate": pairs[mine][1], "transfer.curve_peer": pairs[peer][0]}

    with build(**keys("prefill", "decode")) as prefill:
        send = prefill.serve()
        with build(**keys("decode", "prefill")) as decode:
            receive = decode.connect(send.address)
            receive.ask("r", 3)
            prefill.admit("r", 3)
            send.begin("r", 3)
            prefill_chunk(prefill, send, "r", 3, 0, 3, 3)
            assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveDone)
        with build(**keys("decode", "stranger")) as decode, pytest.raises(HandshakeError):
            decode.connect(send.address)
    with build(**{"transfer.curve_certificate": str(tmp_path / "none"), "transfer.curve_peer": "x"}) as lost:
        call: Callable[[], object] = lost.serve
        with pytest.raises(ConfigError, match="CURVE"):
            call()
