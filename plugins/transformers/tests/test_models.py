"""Models beyond plain full attention: the tokens of plain transformers, whatever the memory and the company."""

from __future__ import annotations

import time

import pytest
import torch
from transformers import DynamicCache

from kvcore.errors import UnsupportedError
from kvcore.testing.harness import poison
from kvcore_transformers.modeling.attention import ATTENTION, PagedBatch
from kvcore_transformers.modeling.hf_cache import KVCoreCache
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import AskedEvent, DoneEvent, FailedEvent, ReceivedEvent

LENGTHS = (1, 15, 17, 33, 64)


def serve(engine, requests):
    """Run to the end, free units poisoned before each step; results by id."""
    cache = engine._cache
    for request in requests:
        engine.submit(request)
    results, steps = {}, 0
    while engine.busy:
        poison(cache)
        engine.step()
        cache.check_integrity()
        steps += 1
        assert steps < 5000, "no progress"
        for event in engine.events():
            if isinstance(event, DoneEvent):
                results[event.request] = event.tokens
            elif isinstance(event, FailedEvent):
                results[event.request] = event.exception()
    assert all(item.free == item.capacity for item in cache.stats().manager.ranges), "units did not come back"
    return results


def batch(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, cache, **options):
    return model.generate(
        ids,
        cache=cache,
        max_new_tokens=18,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


# --- sliding windows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["gemma3", "mistral", "qwen2"])
def test_windows_and_full_layers_give_the_tokens_of_plain_transformers(zoo, make_cache, make_requests, greedy, family):
    plain, model = zoo.sliding(family), zoo.sliding(family)
    cache = make_cache(model, page_size=4, memory="1MiB", max_requests=8, max_tokens=64)
    requests = make_requests((1, 17, 33), new=16)
    want = {r.id: greedy(plain, r.prompt, r.max_new_tokens) for r in requests}
    assert serve(Engine(model, cache, chunk=16), requests) == want
    wide = zoo.sliding(family, window=4096)
    assert want != {r.id: greedy(wide, r.prompt, r.max_new_tokens) for r in requests}, "the window does not matter"


@pytest.mark.parametrize("policy", ["backup", "recompute"])
def test_retraction_changes_no_token_of_gemma(zoo, make_cache, make_requests, greedy, policy):
    """Memory so small that running requests are taken off; what they left behind is NaN when they come back."""
    plain, model = zoo.sliding("gemma3"), zoo.sliding("gemma3")
    page = 3 * 2 * 2 * 4 * 16 * 4  # layers, k and v, heads, slots, dim, fp32
    options = {"page_size": 4, "max_requests": 4, "max_tokens": 64, "memory": 20 * page}
    engine = Engine(model, make_cache(model, policy=policy, **options), chunk=16)
    requests = make_requests((30, 31, 14), new=28)
    results = serve(engine, requests)
    assert results == {r.id: greedy(plain, r.prompt, r.max_new_tokens) for r in requests}
    stats = engine.stats
    assert stats.retractions > 0
    assert (stats.resumed if policy == "backup" else stats.recomputed) == stats.retractions
    assert "load" not in stats.ops


def test_pages_behind_the_window_are_given_back_while_the_request_runs(zoo, make_cache, make_requests):
    model = zoo.sliding("gemma3")
    cache = make_cache(model, page_size=4, memory="1MiB", max_requests=1)
    engine = Engine(model, cache, chunk=16)
    (request,) = make_requests((3,), new=50)
    engine.submit(request)
    used = {"full": [], "swa": []}
    while engine.busy:
        engine.step()
        for item in cache.stats().manager.ranges:
            used[item.group].append(item.used)
    most = -(-zoo.WINDOW // 4) + 1
    assert max(used["full"]) == -(-(3 + 49) // 4)
    assert max(used["swa"]) == most


def test_the_cache_of_generate_holds_no_windows(zoo):
    with pytest.raises(UnsupportedError) as refusal:
        KVCoreCache.for_model(zoo.sliding("gemma3"), memory="1MiB", max_requests=2, max_tokens=64)
    assert refusal.value.fields["groups"] == ["full", "swa"]
    with pytest.raises(UnsupportedError, match="whole sequence"):
        KVCoreCache.for_model(zoo.sliding("mistral"), memory="1MiB", max_requests=2, max_tokens=64)


# --- a prefill and a decode engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek", "gemma3"])
def test_prefill_here_and_decode_there_give_the_tokens_of_plain_transformers(
    zoo, make_cache, make_requests, greedy, name
):
    """Every component of every group arrives; the decode side's memory is NaN before."""
    left, right = zoo.make(name), zoo.make(name)
    caches = [make_cache(model, page_size=4, memory="1MiB", max_requests=8) for model in (left, right)]
    sender = caches[0].serve()
    prefill = Engine(left, caches[0], chunk=16, sender=sender)
    decode = Engine(right, caches[1], chunk=16, receiver=caches[1].connect(sender.address))
    requests = {request.id: request for request in make_requests((1, 17, 40), new=16)}
    results, arrived = {}, {}
    poison(caches[1])
    for request in requests.values():
        decode.submit(request)
    deadline = time.monotonic() + 20
    while decode.busy or prefill.busy:
        assert time.monotonic() < deadline, "no end"
        decode.step()
        for event in decode.events():
            if isinstance(event, AskedEvent):
                prefill.submit(requests[event.request])
            elif isinstance(event, ReceivedEvent):
                arrived[event.request] = set(event.bytes_by_component)
            elif isinstance(event, DoneEvent | FailedEvent):
                results[event.request] = event.tokens if isinstance(event, DoneEvent) else event.exception()
        prefill.step()
        prefill.events()
    plain = zoo.make(name)
    assert results == {name: greedy(plain, r.prompt, r.max_new_tokens) for name, r in requests.items()}
    components = {name for layout in caches[0].layouts.values() for name in layout.components}
    assert arrived == dict.fromkeys(requests, components)
    assert "attend_prefill" not in decode.stats.ops


# --- latent attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "tokens", "options"), [(1, 1, {}), (3, 33, {}), (2, 19, {"num_beams": 3})])
def test_latents_through_generate_are_bit_identical(zoo, rows, tokens, options):
    """Latent and rotary key have different widths; the model expands what the cache returns."""
    model = zoo.deepseek()
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        poison(cache.kvcache)
        want = generate(model, batch(rows, tokens), DynamicCache(config=model.config), **options)
        got = generate(model, batch(rows, tokens), cache, **options)
        assert torch.equal(want.sequences, got.sequences)
        assert all(torch.equal(a, b) for a, b in zip(want.logits, got.logits, strict=True))
        (layout,) = cache.kvcache.layouts.values()
        assert layout.bytes_per_token() == {"full/kv": 3 * (32 + 16) * 4}
        assert {item.name for item in layout.regions} == {"latent", "rope"}


def test_a_retracted_row_of_latents_comes_back_bit_identical(zoo):
    """The saved bytes are both tensors; its old units are full of NaN when it returns to others."""
    model = zoo.deepseek()
    want = DynamicCache(config=model.config)
    with KVCoreCache.for_model(model, memory="2MiB") as cache, torch.inference_mode():
        for one in (want, cache):
            model(input_ids=batch(1, 37), cache=one, use_cache=True)
        kvcache, (row,) = cache.kvcache, cache._rows
        before = kvcache.units(row, "full", "pages").tolist()
        handle = kvcache.retract(row)
        poison(kvcache)
        kvcache.admit("squatter", 5)
        kvcache.resume(handle)
        assert kvcache.units(row, "full", "pages").tolist() != before
        for seed in range(3):
            logits = [model(input_ids=batch(1, 2, seed), cache=one, use_cache=True).logits for one in (want, cache)]
            assert torch.equal(*logits)
        kvcache.release("squatter")


def test_engine_serves_latents_in_ragged_batches(zoo, make_cache, make_requests, greedy):
    plain, model = zoo.deepseek(), zoo.deepseek()
    requests = make_requests(LENGTHS, new=8)
    results = serve(Engine(model, make_cache(model), chunk=16), requests)
    assert results == {r.id: greedy(plain, r.prompt, r.max_new_tokens) for r in requests}


@pytest.mark.parametrize("policy", ["backup", "recompute"])
def test_retraction_changes_no_token_of_latents(zoo, make_cache, make_requests, greedy, policy):
    plain, model = zoo.deepseek(), zoo.deepseek()
    requests = make_requests((30, 31, 47), new=20)
    memory = 7 * 16 * 3 * (32 + 16) * 4  # six pages and the null unit
    engine = Engine(model, make_cache(model, memory=memory, policy=policy), chunk=16)
    results = serve(engine, requests)
    assert results == {r.id: greedy(plain, r.prompt, r.max_new_tokens) for r in requests}
    assert engine.stats.retractions > 0
    assert (engine.stats.resumed if policy == "backup" else engine.stats.recomputed) == engine.stats.retractions


def test_ragged_rows_of_latents_have_the_logits_of_each_alone(zoo, make_cache, prompt):
    plain, model = zoo.deepseek(), zoo.deepseek()
    model.set_attn_implementation(ATTENTION)
    cache = make_cache(model)
    poison(cache)
    texts = {"a": prompt(21, 1), "b": prompt(5, 2), "c": prompt(17, 3)}
    for name, tokens in texts.items():
        cache.admit(name, len(tokens))
    got = {name: [] for name in texts}
    for cuts in ({"a": 20, "b": 2, "c": 16}, {"b": 3, "a": 1}, {"c": 1}):
        done = {name: cache.length(name) for name in cuts}
        parts = [texts[name][done[name] : done[name] + count] for name, count in cuts.items()]
        positions = [done[name] + n for name, count in cuts.items() for n in range(count)]
        with cache.begin(list(cuts.items())) as step, torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([sum(parts, ())]),
                position_ids=torch.tensor([positions]),
                cache=PagedBatch(step, cache.model),
                use_cache=True,
            ).logits[0]
            step.commit()
        for name, part in zip(cuts, logits.split(list(cuts.values())), strict=True):
            got[name].append(part)
    for name, tokens in texts.items():
        with torch.inference_mode():
            want = plain(input_ids=torch.tensor([tokens]), cache=DynamicCache(config=plain.config)).logits[0]
        torch.testing.assert_close(torch.cat(got[name]), want, atol=2e-5, rtol=1e-4)
