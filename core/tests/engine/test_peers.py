"""A prefill cache and a decode cache joined by shm, in one process: units and endpoint events kept in step."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvcore.builtin.commands.keys import write_pair
from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, ReceiveSide, SendDone, SendFailed, SendSide
from kvcore.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    HandshakeError,
    PeerLostError,
    PromptTooLongError,
    RequestError,
    TransferAbortedError,
)
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE, LAYERS = 4, (0, 1)
HEADS = (TensorSpec("k", 2, 16), TensorSpec("v", 2, 8))
MODEL = ModelSpec("toy", (LayerGroup("full", LAYERS, HEADS, num_query_heads=4),), "fp32")


def build(**overrides: object) -> KVCache:
    config = load_config(None, {"cache.page_size": PAGE, "cache.memory": "64KiB", **overrides})
    return KVCache.create(MODEL, config, load_plugins(config))


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


def take_read(side: ReceiveSide, at_least: int, seconds: float = 10) -> int:
    """Wait until so many bytes were read; returns how many were."""
    deadline = time.monotonic() + seconds
    while side.stats().bytes_read < at_least and time.monotonic() < deadline:
        time.sleep(0.005)
    assert side.stats().bytes_read >= at_least
    return side.stats().bytes_read


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
    pairs = {name: [str(p) for p in write_pair(name, tmp_path)] for name in ("prefill", "decode", "stranger")}

    def keys(mine: str, *peers: str) -> dict[str, object]:
        return {"transfer.curve_certificate": pairs[mine][1], "transfer.curve_peers": [pairs[p][0] for p in peers]}

    with build(**keys("prefill", "decode")) as prefill:
        send = prefill.serve()
        with build(**keys("decode", "prefill")) as decode:
            receive = decode.connect(send.address)
            receive.ask("r", 3)
            prefill.admit("r", 3)
            send.begin("r", 3)
            prefill_chunk(prefill, send, "r", 3, 0, 3, 3)
            assert isinstance(take(receive, (ReceiveDone, ReceiveFailed)), ReceiveDone)
        for mine, peer in (("decode", "stranger"), ("stranger", "prefill")):
            with build(**keys(mine, peer)) as decode, pytest.raises(HandshakeError):
                decode.connect(send.address)
        with build(**keys("decode", "stranger", "prefill")) as decode:
            with pytest.raises(ConfigError, match="peers"):
                decode.connect(send.address)
            decode.connect(send.address, peer=pairs["prefill"][0])
    with pytest.raises(ConfigError, match="CURVE"):
        build(**{"transfer.curve_certificate": str(tmp_path / "none"), "transfer.curve_peers": ["x"]})


# --- layers while the others are computed ---


def test_layers_are_pulled_while_the_next_are_computed(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    """The last chunk is pulled layer by layer: when it is through, only its last layer has still to move."""
    (prefill, decode), (send, receive) = caches, sides
    receive.ask("x", 10)
    prefill.admit("x", 10)
    send.begin("x", 10)
    prefill_chunk(prefill, send, "x", 7, 0, 6, 10)
    take_read(receive, 1)
    assert send.layerwise("x")
    before = receive.stats().bytes_read
    with prefill.begin([("x", 4)]) as step:
        step.store(0, token_rows(7, 6, 4))
        send.offer_layers("x", 6, 10, [0], last=True)
        moved = take_read(receive, before + 1) - before
        assert not any(isinstance(event, ReceiveDone) for event in receive.events()), (
            "nothing is done before everything is"
        )
        step.store(1, token_rows(7, 6, 4))
        step.commit()
    send.offer("x", 6, 10, last=True, engine_data=b"first")
    done = take(receive, (ReceiveDone,))
    assert isinstance(done, ReceiveDone)
    # units 1 and 2 are final with the last chunk: 2 units, K of 2 × 16 and V of 2 × 8 fp32, 4 slots, in each of 2 layers
    layer = 2 * 4 * (2 * 16 + 2 * 8) * 4
    assert moved == layer
    assert done.bytes_by_component == {"full/kv": 3 * layer}, "unit 0 in both layers, units 1 and 2 in each"
    take(send, (SendDone,))
    assert_holds(decode, "x", 7, 10)


def test_a_chunk_is_completed_as_its_layers_were_offered(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    (prefill, _), (send, receive) = caches, sides
    receive.ask("x", 8)
    prefill.admit("x", 8)
    send.begin("x", 8)
    with prefill.begin([("x", 8)]) as step:
        for layer in LAYERS:
            step.store(layer, token_rows(7, 0, 8))
        send.offer_layers("x", 0, 8, [0], last=True)
        with pytest.raises(RequestError, match="twice"):
            send.offer_layers("x", 0, 8, [1, 0], last=True)
        with pytest.raises(RequestError, match="another chunk"):
            send.offer_layers("x", 0, 4, [1])
        step.commit()
    with pytest.raises(RequestError, match="another chunk"):
        send.offer("x", 0, 4)
    send.offer("x", 0, 8, last=True)
    take(receive, (ReceiveDone,))


def test_an_abandoned_step_takes_back_the_layers_it_offered(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    """What was pulled of it is never accepted: the step may be computed again, with other values."""
    (prefill, decode), (send, receive) = caches, sides
    receive.ask("x", 8)
    prefill.admit("x", 8)
    send.begin("x", 8)
    with prefill.begin([("x", 8)]) as step:
        step.store(0, token_rows(7, 0, 8))
        send.offer_layers("x", 0, 8, [0], last=True)
    failed = take(receive, (ReceiveFailed,))
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(failed.error, TransferAbortedError)
    take(send, (SendFailed,))
    for cache in (prefill, decode):
        cache.check_integrity()
        assert "x" not in cache.manager


# --- what is offered is not written to ---


def test_a_prompt_that_is_offered_is_not_computed_on(
    caches: tuple[KVCache, KVCache], sides: tuple[SendSide, ReceiveSide]
) -> None:
    """A receiver reads its last page and its states; a fork goes on in units of its own."""
    (prefill, decode), (send, receive) = caches, sides
    prefill.admit("x", 6)
    send.begin("x", 6)
    prefill_chunk(prefill, send, "x", 7, 0, 4, 6)
    with prefill.begin([("x", 2)]) as step:
        for layer in LAYERS:
            step.store(layer, token_rows(7, 4, 2))
        step.commit()
    prefill.fork("x", "y", 6)
    send.offer("x", 4, 6, last=True)
    with pytest.raises(RequestError, match="fork"):
        prefill.begin([("x", 1)])
    with prefill.begin([("y", 1)]) as step:
        for layer in LAYERS:
            step.store(layer, token_rows(9, 6, 1))
        step.commit()
    receive.ask("never begun", 6)
    with pytest.raises(RequestError, match="in a transfer"):
        decode.begin([("never begun", 1)])
    receive.ask("x", 6)
    take(receive, (ReceiveDone,))
    assert_holds(decode, "x", 7, 6)
    with decode.begin([("x", 1)]):
        pass
    take(send, (SendDone,))


# --- the budget of what waits ---


def test_prompts_that_nobody_takes_over_stop_admission(caches: tuple[KVCache, KVCache]) -> None:
    """Prefill must not fill its memory for decode processes that are slow or dead; it goes on when leases end."""
    del caches
    # 64 KiB: 10 units of 4 tokens, 2 layers, 2 × (16 + 8) fp32 each
    with build(**{"transfer.lease_s": 1.5, "transfer.heartbeat_s": 0.2, "transfer.held_fraction": 0.5}) as prefill:
        send = prefill.serve()
        total = prefill.token_capacity
        assert total is not None
        taken = 0
        while prefill.can_admit(4):
            name = f"r{taken}"
            prefill.admit(name, 4)
            send.begin(name, 4)
            prefill_chunk(prefill, send, name, 1, 0, 4, 4)
            taken += 1
        assert taken == total // 4 // 2 + 1, "one over half the units"
        assert prefill.manager.can_admit(4), "there is memory, but not for prefill"
        with pytest.raises(CapacityError) as refused:
            prefill.admit("more", 4)
        assert refused.value.fields["held_units"] == taken
        assert refused.value.fields["limit_units"] == taken - 1
        deadline = time.monotonic() + 10
        while not prefill.can_admit(4) and time.monotonic() < deadline:
            send.wait_event(0.1)
        prefill.admit("more", 4)
        prefill.check_integrity()
