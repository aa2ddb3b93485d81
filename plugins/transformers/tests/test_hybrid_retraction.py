"""Models with states in little memory: what is taken off the device comes back whole, or starts afresh."""

from __future__ import annotations

import pytest

from kvcore_transformers.serving.engine import Engine

LENGTHS, NEW = (22, 17, 6), 14
PAGES = 14
"""Too few for all requests to end: 9 + 8 + 5 are needed."""


def engine_of(hybrid_kit, make_cache, model, backend="host_tensor"):
    how = {"policy": "recompute"} if backend == "recompute" else {"backend": backend}
    memory = hybrid_kit.memory_for(make_cache, model, PAGES, **how)
    return Engine(model, make_cache(model, **{**hybrid_kit.OPTIONS, **how, "memory": memory}), chunk=16)


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("inkling", "host_tensor"),
        ("inkling", "host_pool"),
        ("inkling", "recompute"),
        ("inkling_scaled", "host_tensor"),
        ("qwen3_next", "host_tensor"),
        ("qwen3_next", "host_pool"),
        ("qwen3_next", "recompute"),
    ],
)
def test_retraction_changes_no_token(zoo, hybrid_kit, make_cache, make_requests, name, backend):
    """H1: the states are saved with the pages and come back into other slots. Computed again, a request starts from a
    fresh state: nothing of its first life is read, its slots are NaN meanwhile."""
    model = zoo.make(name)
    engine = engine_of(hybrid_kit, make_cache, model, backend)
    requests = make_requests(LENGTHS, new=NEW)
    results = hybrid_kit.serve(engine, requests)
    assert results == hybrid_kit.plain_tokens(zoo.make(name), requests, results)
    stats = engine.stats
    assert stats.retractions > 0
    assert (stats.recomputed if backend == "recompute" else stats.resumed) == stats.retractions


@pytest.mark.parametrize(("name", "lost"), [("inkling", "state/conv"), ("qwen3_next", "state/recurrent")])
def test_a_state_that_is_left_behind_shows(zoo, hybrid_kit, make_cache, make_requests, monkeypatch, name, lost):
    """H1 on purpose: all but one component comes back, and other tokens come out."""
    model = zoo.make(name)
    engine = engine_of(hybrid_kit, make_cache, model)
    cache = engine._cache
    resume = cache.resume

    def without(handle):
        resume(handle)
        cache.store.pools["state"].zero(cache.units(handle.request, "state", "slots"), (lost,))

    monkeypatch.setattr(cache, "resume", without)
    requests = make_requests(LENGTHS, new=NEW)
    results = hybrid_kit.serve(engine, requests)
    assert engine.stats.resumed > 0
    assert results != hybrid_kit.plain_tokens(zoo.make(name), requests, results)


def test_a_request_that_is_computed_again_has_the_state_of_one_that_never_was(
    zoo, hybrid_kit, make_cache, make_requests
):
    """Byte for byte the slot of the same tokens computed for the first time, in the same chunks."""
    model = zoo.make("qwen3_next")
    engine = engine_of(hybrid_kit, make_cache, model, "recompute")
    cache, begin = engine._cache, engine._cache.begin
    seen = {}

    def watch(rows):
        for name, _ in rows:
            (slot,) = cache.units(name, "state", "slots").tolist()
            if cache.length(name):
                field = cache.state("state").field(0, "recurrent", "x")
                seen.setdefault((name, cache.length(name)), []).append(field[slot].clone())
        return begin(rows)

    cache.begin = watch
    hybrid_kit.serve(engine, make_requests(LENGTHS, new=NEW))
    again = {key: found for key, found in seen.items() if len(found) > 1 and key[1] % 16 == 0}
    assert engine.stats.recomputed > 0
    assert again
    assert all((a == b).all() for a, b in again.values())
