"""A prefill engine and a decode engine in one process: what arrives, what is counted, what a failure leaves."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvcore.contract import DONE
from kvcore.errors import (
    DuplicateRequestError,
    HandshakeError,
    KVCoreError,
    PeerLostError,
    ProtocolError,
    TransferError,
)
from kvcore_transformers.serving.engine import Engine, FirstToken
from kvcore_transformers.serving.requests import (
    AskedEvent,
    DoneEvent,
    FailedEvent,
    GenerationRequest,
    PrefilledEvent,
    ReceivedEvent,
    State,
)

LENGTHS = (1, 15, 16, 17, 64, 65, 100)
PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4


class Both:
    """The two engines, stepped in turn by one thread."""

    def __init__(self, tiny_model, make_cache, *, chunk=16, memory="4MiB", policy="backup", prefill_memory="4MiB"):
        left, right = tiny_model("llama"), tiny_model("llama")
        self.caches = (make_cache(left, memory=prefill_memory), make_cache(right, memory=memory, policy=policy))
        self.sender = self.caches[0].serve()
        self.prefill = Engine(left, self.caches[0], chunk=chunk, sender=self.sender)
        self.receiver = self.caches[1].connect(self.sender.address)
        self.decode = Engine(right, self.caches[1], chunk=chunk, receiver=self.receiver)
        self.requests = {}
        self.received = {}
        self.results = {}
        self.prefilled = []
        self.prefill_results = {}

    def submit(self, request):
        self.requests[request.id] = request
        self.decode.submit(request)

    def turn(self, prefill=True):
        self.decode.step()
        for event in self.decode.events():
            if isinstance(event, AskedEvent):
                self.prefill.submit(self.requests[event.request])
            elif isinstance(event, ReceivedEvent):
                self.received[event.request] = event
            elif isinstance(event, DoneEvent):
                self.results[event.request] = event.tokens
            elif isinstance(event, FailedEvent):
                self.results[event.request] = event.exception()
        if prefill:
            self.prefill.step()
            for event in self.prefill.events():
                if isinstance(event, PrefilledEvent):
                    self.prefilled.append(event)
                elif isinstance(event, DoneEvent | FailedEvent):
                    self.prefill_results[event.request] = event
        for cache in self.caches:
            cache.check_integrity()

    def drain(self, seconds=20.0, prefill=True):
        deadline = time.monotonic() + seconds
        while self.decode.busy or (prefill and self.prefill.busy):
            assert time.monotonic() < deadline, "no end"
            self.turn(prefill)

    def all_free(self):
        """Whether every unit of both caches has come back; transfers may need a moment for it."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            self.turn()
            if all(r.free == r.capacity for cache in self.caches for r in cache.stats().manager.ranges):
                return True
            time.sleep(0.01)
        return False


@pytest.fixture
def both(tiny_model, make_cache):
    return lambda **options: Both(tiny_model, make_cache, **options)


def test_tokens_bytes_and_units(both, tiny_model, make_requests, greedy):
    """What is pulled is every page of every prompt once: J8, and what comes back is everything."""
    pair = both()
    pair.caches[1].store.pools["full"].fill(pair.caches[1].manager.free_units("full", "pages"), 0xFF)
    requests = make_requests(LENGTHS)
    for request in requests:
        pair.submit(request)
    pair.drain()
    assert pair.results == {r.id: greedy(tiny_model("llama"), r.prompt, r.max_new_tokens) for r in requests}
    for request in requests:
        pages = -(-len(request.prompt) // 16)
        assert pair.received[request.id].bytes_by_component == {"full/kv": pages * PAGE_BYTES}
    assert pair.all_free()
    for engine, op in ((pair.prefill, "attend_prefill"), (pair.decode, "attend_decode")):
        assert engine.stats.ops[op] > 0
        assert "load" not in engine.stats.ops
    assert "attend_prefill" not in pair.decode.stats.ops
    assert {event.request: event.token for event in pair.prefilled} == {
        name: tokens[0] for name, tokens in pair.results.items()
    }


def test_most_of_a_long_prompt_is_pulled_before_its_last_chunk(both, prompt):
    """By event order: what the receiver had reported when the sender's last chunk began."""
    pair = both(chunk=16)
    pair.submit(GenerationRequest("long", prompt(64, 0), 2))
    while not pair.prefilled:
        before = len(pair.prefill_results)
        pair.turn()
        time.sleep(0.05)  # a forward pass of a real model takes longer than this
        assert len(pair.prefill_results) == before
    pair.drain()
    event = pair.received["long"]
    assert event.bytes_by_component["full/kv"] == 4 * PAGE_BYTES
    assert event.pulled_early_bytes == 3 * PAGE_BYTES


def test_layers_of_the_last_chunk_are_offered_as_they_are_computed(both, tiny_model, prompt, greedy):
    """All but the last layer, which goes with the offer of the chunk; nothing of other chunks; and once each."""
    pair = both(chunk=16)
    request = GenerationRequest("r", prompt(40, 0), 6)
    calls, attended = [], []
    offer_layers, attend = pair.sender.offer_layers, pair.caches[0].store.attend

    def spy(name, start, stop, layers, **options):
        calls.append((name, start, stop, list(layers), options, len(attended)))
        offer_layers(name, start, stop, layers, **options)

    def spy_attend(layer, *args):
        attended.append(layer)
        return attend(layer, *args)

    pair.sender.offer_layers, pair.caches[0].store.attend = spy, spy_attend
    pair.submit(request)
    pair.turn(prefill=False)
    deadline = time.monotonic() + 10
    while not pair.prefilled:
        assert time.monotonic() < deadline
        pair.turn()
        time.sleep(0.05)  # so that the ask is there before the last chunk
    # Two chunks of three layers before it, then a layer is offered when the ones below it have been attended to.
    assert calls == [("r", 32, 40, [layer], {"last": True, "after": DONE}, 6 + layer) for layer in range(2)]
    pair.drain()
    assert pair.results["r"] == greedy(tiny_model("llama"), request.prompt, 6)
    assert pair.received["r"].bytes_by_component == {"full/kv": 3 * PAGE_BYTES}
    assert pair.all_free()


def test_a_forward_pass_that_fails_after_layers_were_offered_is_kept_by_nobody(both, prompt):
    """What was pulled of the chunk was never committed here."""
    pair = both(chunk=16)
    pair.submit(GenerationRequest("r", prompt(20, 0), 6))
    while pair.prefill._scheduler.live.get("r") is None or not pair.prefill._scheduler.live["r"].computed:
        pair.turn()
        time.sleep(0.05)

    def fail(layer, *args):
        if layer == 2:
            raise RuntimeError("the device is gone")
        return attend(layer, *args)

    attend, pair.caches[0].store.attend = pair.caches[0].store.attend, fail
    with pytest.raises(RuntimeError, match="gone"):
        pair.prefill.step()
    pair.caches[0].store.attend = attend
    deadline = time.monotonic() + 10
    while "r" not in pair.results:
        assert time.monotonic() < deadline
        pair.turn(prefill=False)
    assert isinstance(pair.results["r"], TransferError)
    while pair.prefill.busy:
        assert time.monotonic() < deadline
        pair.turn()
    assert pair.all_free()


def test_one_token_requests_end_with_the_token_that_came_along(both, tiny_model, make_requests, greedy):
    pair = both()
    requests = make_requests((5, 40), new=1)
    for request in requests:
        pair.submit(request)
    pair.drain()
    assert pair.results == {r.id: greedy(tiny_model("llama"), r.prompt, 1) for r in requests}
    assert pair.all_free()


@pytest.mark.parametrize("policy", ["backup", "recompute"])
def test_retraction_on_the_decode_side(both, tiny_model, make_requests, greedy, policy):
    pair = both(memory=10 * PAGE_BYTES, policy=policy)
    requests = make_requests((30, 31, 14, 47, 1, 62), new=40)
    for request in requests:
        pair.submit(request)
    pair.drain()
    assert pair.results == {r.id: greedy(tiny_model("llama"), r.prompt, 40) for r in requests}
    stats = pair.decode.stats
    assert stats.retractions > 0
    assert (stats.resumed, stats.recomputed) == (
        (stats.retractions, 0) if policy == "backup" else (0, stats.retractions)
    )
    assert pair.all_free()


def test_a_decode_side_without_room_does_not_make_prompts_wait(both, prompt):
    """Nothing is computed before the decode side holds its units: a lease cannot run out on a full decode side."""
    pair = both(memory=6 * PAGE_BYTES)
    for n in range(3):
        pair.submit(GenerationRequest(f"r{n}", prompt(60, n), 3))
    while len(pair.results) < 3:
        pair.turn()
        waiting = {s.id for s in pair.decode._scheduler.live.values() if s.state is State.WAITING}
        assert not waiting & set(pair.prefill._scheduler.live)
    assert pair.all_free()


def test_a_request_that_cannot_grow_waits_for_one_that_is_being_received(both, tiny_model, make_requests, greedy):
    """It is the only one running, yet not alone: what is being received becomes something to retract."""
    pair = both(memory=6 * PAGE_BYTES)
    first, second = make_requests((16, 30), new=45)
    pair.submit(first)
    while first.id not in pair.received:
        pair.turn()
    pair.submit(second)
    for _ in range(60):
        pair.turn(prefill=False)
    assert (pair.decode._scheduler.live[first.id].computed, pair.results) == (48, {})  # three pages, and no fourth
    assert pair.decode._scheduler.live[second.id].state is State.RECEIVING
    pair.drain()
    assert pair.results == {r.id: greedy(tiny_model("llama"), r.prompt, 45) for r in (first, second)}
    assert pair.decode.stats.retractions > 0


def test_a_transfer_that_ends_while_requests_are_admitted(both, tiny_model, make_requests, greedy):
    """The units of a request go back while another is announced: no chunk of it may be computed after that."""
    pair = both(chunk=8)
    first, second = make_requests((64, 20), new=4)
    pair.submit(first)
    for _ in range(3):
        pair.turn()
    pair.decode.abort(first.id, "enough")
    assert pair.sender.wait_event(5.0)
    poll, calls = pair.prefill._poll_transfers, []

    def late() -> bool:
        calls.append(None)
        return len(calls) > 1 and poll()  # the event comes just after the first look

    pair.prefill._poll_transfers = late
    pair.submit(second)
    pair.drain()
    assert pair.results[second.id] == greedy(tiny_model("llama"), second.prompt, 4)
    assert isinstance(pair.prefill_results[first.id], FailedEvent)
    assert pair.all_free()


@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize("when", ["before", "middle", "after"])
def test_abort_from_either_side(both, tiny_model, make_requests, greedy, side, when):
    """Both sides end typed, the other request goes on, all units come back."""
    pair = both(chunk=8)
    requests = make_requests((64, 40), new=6)
    for request in requests:
        pair.submit(request)
    pair.turn(prefill=False)
    turns = {"before": 1, "middle": 4, "after": 0}[when]
    if when == "after":
        while not any(s.state is State.SENDING for s in pair.prefill._scheduler.live.values()):
            pair.prefill.step()  # the decode side does not look, so its acknowledgement of this one may be under way
        (victim,) = [s.id for s in pair.prefill._scheduler.live.values() if s.state is State.SENDING][:1]
    else:
        for _ in range(turns):
            pair.prefill.step()
        victim = "r0"
    getattr(pair, side).abort(victim, "enough")
    held = pair.caches[0 if side == "prefill" else 1].manager
    assert victim in held, "units of a transfer are the transfer's until it says that nothing touches them any more"
    pair.drain()
    other = next(request for request in requests if request.id != victim)
    assert pair.results[other.id] == greedy(tiny_model("llama"), other.prompt, 6)
    ended = pair.results[victim]
    if side == "decode" or when != "after":
        assert isinstance(ended, KVCoreError), ended
        assert "enough" in ended.message
    assert pair.all_free()


@pytest.mark.parametrize("again", [False, True])
def test_an_abort_just_after_the_last_byte_leaks_nothing(both, tiny_model, make_requests, greedy, again):
    """D5: the transfer is done but the engine has not looked yet; its id may even be waiting again."""
    pair = both()
    (request,) = make_requests((40,), new=4)
    pair.submit(request)
    pair.turn()
    while pair.prefill.busy:  # the acknowledgement is the receiver's last word
        pair.prefill.step()
    pair.decode.abort(request.id, "too late")
    assert request.id in pair.caches[1].manager
    if again:
        pair.decode.submit(request)
    pair.turn()
    pair.drain()
    if again:
        assert pair.results[request.id] == greedy(tiny_model("llama"), request.prompt, 4)
    else:
        assert pair.results[request.id].message == "too late"
    assert pair.all_free()


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", msgspec.msgpack.encode(FirstToken(97)), msgspec.msgpack.encode({"token": "x"})]
)
def test_engine_data_that_is_nonsense_fails_the_request_only(both, make_requests, monkeypatch, data):
    pair = both()
    monkeypatch.setattr("kvcore_transformers.serving.engine.msgspec.msgpack.encode", lambda value: data)
    bad, good = make_requests((20, 30), new=3)
    pair.submit(bad)
    pair.drain()
    monkeypatch.undo()
    pair.submit(good)
    pair.drain()
    assert isinstance(pair.results[bad.id], ProtocolError)
    assert len(pair.results[good.id]) == 3
    assert pair.all_free()


def test_a_sender_that_closes_fails_what_waits_and_spares_what_has_arrived(both, tiny_model, make_requests, greedy):
    pair = both(chunk=8)
    first, *late = make_requests((20, 80, 90), new=30)
    pair.submit(first)
    while first.id not in pair.received:
        pair.turn()
    for request in late:
        pair.submit(request)
    for _ in range(3):
        pair.turn()
    pair.sender.close()
    pair.drain(prefill=False)
    assert pair.results[first.id] == greedy(tiny_model("llama"), first.prompt, 30)
    for request in late:
        assert isinstance(pair.results[request.id], TransferError)
    pair.submit(GenerationRequest("later", first.prompt, 3))
    pair.drain(prefill=False)
    assert isinstance(pair.results["later"], PeerLostError)
    (pages,) = pair.caches[1].stats().manager.ranges
    assert pages.free == pages.capacity


def test_lose_peer_fails_what_waits_at_once(both, make_requests):
    pair = both(chunk=8)
    for request in make_requests((80, 90), new=3):
        pair.submit(request)
    for _ in range(2):
        pair.turn()
    pair.decode.lose_peer("killed by SIGKILL")
    assert not pair.decode.busy
    pair.turn(prefill=False)
    assert {type(error) for error in pair.results.values()} == {PeerLostError}
    assert pair.all_free()


def test_a_duplicate_on_the_prefill_side_leaves_the_first_untouched(both, tiny_model, make_requests, greedy):
    """J4: an id in use is refused there too."""
    pair = both(chunk=8)
    (request,) = make_requests((64,))
    pair.submit(request)
    for _ in range(2):
        pair.turn()
    with pytest.raises(DuplicateRequestError):
        pair.prefill.submit(request)
    pair.drain()
    assert pair.results[request.id] == greedy(tiny_model("llama"), request.prompt, request.max_new_tokens)
    pair.results.clear()
    pair.submit(request)  # and free again when it is over
    pair.drain()
    assert pair.results[request.id] == greedy(tiny_model("llama"), request.prompt, request.max_new_tokens)


def test_caches_that_do_not_fit_one_another_are_refused_at_hello(tiny_model, make_cache):
    left, right = make_cache(tiny_model("llama")), make_cache(tiny_model("llama"), page_size=32)
    sender = left.serve()
    with pytest.raises(HandshakeError, match="page"):
        right.connect(sender.address)
