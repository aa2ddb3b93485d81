"""The engine on its own: the tokens of plain transformers, whatever the memory, the chunks and the company."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    KVCoreError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import DoneEvent, FailedEvent, GenerationRequest, State, TokenEvent

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 64, 100)
PAGE_BYTES = 3 * 2 * 2 * 16 * 16 * 4  # layers, k and v, heads, slots, dim, fp32


def serve(engine, requests, poison=True):
    """Run to the end with every free unit full of NaN before each step; results by id."""
    cache = engine._cache
    for request in requests:
        engine.submit(request)
    results = {}
    steps = 0
    while engine.busy:
        if poison:
            cache.store.pools["full"].fill(cache.manager.free_units("full", "pages"), 0xFF)
        engine.step()
        cache.check_integrity()
        steps += 1
        assert steps < 5000, "no progress"
        for event in engine.events():
            if isinstance(event, DoneEvent):
                results[event.request] = event.tokens
            elif isinstance(event, FailedEvent):
                results[event.request] = event.exception()
    (pages,) = cache.stats().manager.ranges
    assert pages.free == pages.capacity, "units did not come back"
    return results


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_tokens_are_those_of_plain_transformers(tiny_model, make_cache, make_requests, greedy, family):
    plain, model = tiny_model(family), tiny_model(family)
    requests = make_requests(LENGTHS)
    engine = Engine(model, make_cache(model), chunk=16)
    results = serve(engine, requests)
    assert results == {r.id: greedy(plain, r.prompt, r.max_new_tokens) for r in requests}
    assert "load" not in engine.stats.ops
    assert engine.stats.ops["attend_decode"] > 0
    assert engine.stats.ops["attend_prefill"] > 0


@pytest.mark.parametrize("options", [{"page_size": 1}, {"page_size": 4}, {"page_size": 32}, {"arena": "layer_major"}])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_page_size_arena_and_chunk_do_not_change_the_tokens(
    tiny_model, make_cache, make_requests, greedy, options, chunk
):
    model = tiny_model("llama")
    requests = make_requests((1, 16, 33))
    results = serve(Engine(model, make_cache(model, **options), chunk=chunk), requests)
    assert results == {r.id: greedy(tiny_model("llama"), r.prompt, r.max_new_tokens) for r in requests}


@pytest.mark.parametrize("policy", ["backup", "recompute"])
@pytest.mark.parametrize("pages", [9, 12])
def test_retraction_changes_no_token(tiny_model, make_cache, make_requests, greedy, policy, pages):
    """Memory so small that running requests are taken off; their old units are poisoned before they come back."""
    model = tiny_model("llama")
    requests = make_requests((30, 31, 14, 47, 1, 62), new=40)
    engine = Engine(model, make_cache(model, memory=(pages + 1) * PAGE_BYTES, policy=policy), chunk=16)
    results = serve(engine, requests)
    assert results == {r.id: greedy(tiny_model("llama"), r.prompt, r.max_new_tokens) for r in requests}
    stats = engine.stats
    assert stats.retractions > 0
    assert stats.resumed + stats.recomputed == stats.retractions
    assert (stats.resumed if policy == "backup" else stats.recomputed) == stats.retractions
    assert "load" not in stats.ops


def test_the_youngest_is_retracted_and_comes_back_before_anyone_new(tiny_model, make_cache, make_requests):
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model, memory=7 * PAGE_BYTES), chunk=64)
    for request in make_requests((30, 30, 30, 30), new=50):
        engine.submit(request)
    order, before = [], {}
    while engine.busy:
        engine.step()
        live = dict(engine._scheduler.live)
        for name, sequence in live.items():
            was = before.get(name)
            if sequence.state is State.RETRACTED and was is State.RUNNING:
                running = [s.order for s in live.values() if s.state is State.RUNNING]
                assert all(sequence.order > other for other in running)
                order.append(f"out {name}")
            if was in (State.WAITING, State.RETRACTED) and sequence.state not in (State.WAITING, State.RETRACTED):
                order.append(f"in {name}")
        before = {name: sequence.state for name, sequence in live.items()}
    assert engine.stats.retractions > 0
    out = next(n for n, entry in enumerate(order) if entry.startswith("out"))
    victim = order[out].removeprefix("out ")
    assert next(entry for entry in order[out + 1 :] if entry.startswith("in")) == f"in {victim}"


def test_nothing_new_is_admitted_while_a_retracted_request_waits(tiny_model, make_cache, make_requests, prompt):
    """A small newcomer that would fit does not take the room a retracted request needs to come back."""
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model, memory=7 * PAGE_BYTES), chunk=64)
    for request in make_requests((30, 30), new=60):
        engine.submit(request)
    while not engine._scheduler.retracted:
        engine.step()
    engine.submit(GenerationRequest("small", prompt(3, 9), 2))
    waited = 0
    while engine._scheduler.retracted:
        assert engine._scheduler.live["small"].state is State.WAITING
        engine.step()
        waited += 1
    assert waited > 3
    assert len(serve(engine, [])["small"]) == 2


def test_a_large_request_is_not_overtaken(tiny_model, make_cache, make_requests):
    """FIFO: small requests that would fit wait behind one that does not fit yet."""
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model, memory=9 * PAGE_BYTES), chunk=64)
    for request in make_requests((60, 100, 3, 3), new=4):
        engine.submit(request)
    started = []
    while engine.busy:
        engine.step()
        for sequence in engine._scheduler.live.values():
            if sequence.state is not State.WAITING and sequence.id not in started:
                started.append(sequence.id)
    assert started == ["r0", "r1", "r2", "r3"]


def test_a_request_that_outgrows_the_cache_fails_typed_and_the_others_go_on(tiny_model, make_cache, prompt, greedy):
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model, memory=5 * PAGE_BYTES), chunk=16)
    small = GenerationRequest("small", prompt(10, 1), 20)
    results = serve(engine, [GenerationRequest("big", prompt(50, 0), 200), small])
    assert isinstance(results["big"], CapacityError)
    assert results["big"].fields["request"] == "big"
    assert results["big"].fields["capacity"] == 64
    assert results["big"].fields["generated"] == 15  # 50 prompt tokens and 14 generated ones fill 64 slots
    assert results["small"] == greedy(tiny_model("llama"), small.prompt, 20)


def test_a_prompt_that_fills_the_pool_to_the_last_slot(tiny_model, make_cache, prompt, greedy):
    """C4, D3: whole pages, and the newest token needs no slot."""
    model = tiny_model("llama")
    for length, new in ((64, 1), (63, 2)):
        engine = Engine(model, make_cache(model, memory=5 * PAGE_BYTES), chunk=16)
        request = GenerationRequest("r", prompt(length, 0), new)
        assert serve(engine, [request]) == {"r": greedy(tiny_model("llama"), request.prompt, new)}


def test_bad_requests_are_refused_and_touch_nothing(tiny_model, make_cache, prompt, greedy):
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model, memory=5 * PAGE_BYTES), chunk=16)
    good = GenerationRequest("good", prompt(20, 0), 5)
    engine.submit(good)
    for error, request in (
        (DuplicateRequestError, GenerationRequest("good", prompt(3, 0), 5)),
        (EmptyPromptError, GenerationRequest("empty", (), 5)),
        (PromptTooLongError, GenerationRequest("long", prompt(65, 0), 5)),
        (PromptTooLongError, GenerationRequest("model", prompt(10, 0), 4090)),
        (RequestError, GenerationRequest("none", prompt(3, 0), 0)),
    ):
        with pytest.raises(error):
            engine.submit(request)
    with pytest.raises(UnknownRequestError):
        engine.abort("empty")
    assert engine.run([]) == {"good": greedy(tiny_model("llama"), good.prompt, 5)}
    engine.submit(good)  # the id is free again


def test_run_reports_refused_requests_beside_the_others(tiny_model, make_cache, prompt):
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model), chunk=16)
    results = engine.run([GenerationRequest("a", prompt(4, 0), 3), GenerationRequest("b", (), 3)])
    assert len(results["a"]) == 3
    assert isinstance(results["b"], EmptyPromptError)


def test_an_end_token_ends_the_text_and_is_part_of_it(tiny_model, make_cache, prompt, greedy):
    model = tiny_model("llama")
    want = greedy(tiny_model("llama"), prompt(20, 0), 12)
    stop = want[5]
    engine = Engine(model, make_cache(model), chunk=16)
    results = serve(engine, [GenerationRequest("r", prompt(20, 0), 12, eos=(stop,))])
    assert results["r"] == want[: want.index(stop) + 1]


def test_token_events_spell_the_result(tiny_model, make_cache, make_requests):
    model = tiny_model("llama")
    engine = Engine(model, make_cache(model), chunk=16)
    for request in make_requests((5, 40), new=6):
        engine.submit(request)
    spelled, done = {"r0": [], "r1": []}, {}
    while engine.busy:
        engine.step()
        for event in engine.events():
            if isinstance(event, TokenEvent):
                assert event.request not in done
                spelled[event.request].append(event.token)
            else:
                done[event.request] = event.tokens
    assert done == {name: tuple(tokens) for name, tokens in spelled.items()}


@pytest.mark.parametrize("state", [State.WAITING, State.PREFILLING, State.RUNNING, State.RETRACTED])
@pytest.mark.parametrize("policy", ["backup", "recompute"])
def test_abort_in_every_state(tiny_model, make_cache, make_requests, greedy, state, policy):
    """All units and backup bytes come back; the others' tokens do not change."""
    model = tiny_model("llama")
    requests = make_requests((30, 31, 33, 60), new=40)
    cache = make_cache(model, memory=9 * PAGE_BYTES, policy=policy)
    engine = Engine(model, cache, chunk=16)
    for request in requests:
        engine.submit(request)
    victim = None
    for _ in range(2000):
        found = [s.id for s in engine._scheduler.live.values() if s.state is state]
        if found:
            victim = found[-1]
            break
        engine.step()
    assert victim is not None, f"no request was ever {state}"
    engine.abort(victim, "changed my mind")
    results = serve(engine, [])
    assert isinstance(results[victim], KVCoreError)
    assert results[victim].message == "changed my mind"
    for request in requests:
        if request.id != victim:
            assert results[request.id] == greedy(tiny_model("llama"), request.prompt, 40)
    assert cache.stats().backup_bytes == 0


def test_a_failed_restore_is_recomputed(tiny_model, make_cache, make_requests, greedy, monkeypatch):
    """A backup that cannot give bytes back costs time, not the request."""
    from kvcore.errors import BackupError
    from kvcore.retraction.retractor import Retractor

    def refuse(self, handle):
        raise BackupError("restoring a request failed; it is still saved", request=handle.request)

    monkeypatch.setattr(Retractor, "resume", refuse)
    model = tiny_model("llama")
    requests = make_requests((30, 31, 14), new=40)
    cache = make_cache(model, memory=9 * PAGE_BYTES)
    admit, refused = cache.admit, []

    def sometimes(request_id, tokens):
        if engine.stats.retractions and not refused:
            refused.append(request_id)
            raise CapacityError("not now")
        return admit(request_id, tokens)

    monkeypatch.setattr(cache, "admit", sometimes)
    engine = Engine(model, cache, chunk=16)
    results = serve(engine, requests)
    assert refused
    assert results == {r.id: greedy(tiny_model("llama"), r.prompt, 40) for r in requests}
    assert engine.stats.recomputed == engine.stats.retractions > 0
    assert cache.stats().backup_bytes == 0


def test_chunks_out_of_range_are_refused(tiny_model, make_cache):
    model = tiny_model("llama")
    for chunk in (0, 4097):
        with pytest.raises(ConfigError):
            Engine(model, make_cache(model, max_tokens=4096), chunk=chunk)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.sampled_from((1, 3, 4, 5, 8, 20)), st.integers(1, 12)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 7)), max_size=4),
    st.integers(9, 24),
    st.sampled_from(("backup", "recompute")),
)
def test_soak(tiny_model, make_cache, prompt, greedy, shapes, aborts, pages, policy):
    """D5: whatever finishes, is aborted or retracted, every unit comes back, and no survivor's token changes."""
    torch.set_num_threads(1)
    model = tiny_model("llama")
    cache = make_cache(model, memory=(pages + 1) * PAGE_BYTES // 4, policy=policy, page_size=4)
    engine = Engine(model, cache, chunk=8)
    requests = [GenerationRequest(f"r{n}", prompt(length, n), new) for n, (length, new) in enumerate(shapes)]
    for request in requests:
        engine.submit(request)
    results, step, plan = {}, 0, dict(aborts)
    while engine.busy:
        if step in plan and f"r{plan[step]}" in engine._scheduler.live:
            engine.abort(f"r{plan[step]}")
        engine.step()
        cache.check_integrity()
        step += 1
        assert step < 3000
        for event in engine.events():
            if isinstance(event, DoneEvent):
                results[event.request] = event.tokens
            elif isinstance(event, FailedEvent):
                results[event.request] = event.exception()
    (found,) = cache.stats().manager.ranges
    assert found.free == found.capacity
    assert cache.stats().backup_bytes == 0
    assert set(results) == {request.id for request in requests}
    for request in requests:
        if not isinstance(results[request.id], RequestError):
            assert results[request.id] == greedy(model_for(tiny_model), request.prompt, request.max_new_tokens)


_PLAIN: list[object] = []


def model_for(tiny_model):
    """One plain model for all examples: it is not given to an engine."""
    if not _PLAIN:
        _PLAIN.append(tiny_model("llama"))
    return _PLAIN[0]
