"""KVCoreCache in unmodified transformers: the same numbers as DynamicCache, bit for bit."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from transformers import DynamicCache

from kvcore.errors import CapacityError, KVCoreError, RequestError, StepTooLargeError, UnsupportedError
from kvcore_transformers.modeling.hf_cache import KVCoreCache

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def batch(rows: int, tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 97, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def generate(model, ids, cache, new=18, **options):
    return model.generate(
        ids,
        cache=cache,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )


def check_equal(model, ids, cache, **options):
    want = generate(model, ids, DynamicCache(config=model.config), **options)
    got = generate(model, ids, cache, **options)
    assert torch.equal(want.sequences, got.sequences)
    assert all(torch.equal(a, b) for a, b in zip(want.logits, got.logits, strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (1, 16), (3, 15), (2, 33)])
def test_generate_is_bit_identical_to_dynamic_cache(tiny_model, family, rows, tokens):
    model = tiny_model(family)
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        check_equal(model, batch(rows, tokens), cache)
        assert cache.get_seq_length() == tokens + 17  # the newest token has no keys and values yet
        assert cache.kvcache.store.op_counts["store"] == 3 * 18


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_use_the_format_of_their_dtype(tiny_model, dtype):
    model = tiny_model("llama", dtype)
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        assert cache.kvcache.config.cache.format == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
        check_equal(model, batch(2, 21), cache)


def test_left_padded_batch(tiny_model):
    model = tiny_model("llama")
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[0, :7] = 0
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        check_equal(model, batch(2, 20), cache, attention_mask=mask, pad_token_id=0)


def test_beam_search_reorders_exactly(tiny_model):
    """M4: every component follows the beams and no two beams alias."""
    model = tiny_model("qwen3")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        check_equal(model, batch(2, 19), cache, num_beams=4)
        assert cache.kvcache.store.op_counts["copy_units"] > 0


def test_poisoned_pools_do_not_show(tiny_model):
    """Unwritten slots and foreign pages are never read: memory starts as NaN."""
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        pool = cache.kvcache.store.pools["full"]
        pool.fill(cache.kvcache.manager.free_units("full", "pages"), 0xFF)
        check_equal(model, batch(3, 17), cache)


def forward(model, cache, ids):
    with torch.inference_mode():
        return model(input_ids=ids, cache=cache, use_cache=True).logits


@pytest.mark.parametrize("remove", [0, -1, -3, -5, -16, 2])
@pytest.mark.parametrize("length", [3, 16, 17])
def test_crop_is_that_of_the_installed_dynamic_cache(tiny_model, remove, length):
    """M5: the same result, or the same exception, as the class of the installed version."""
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        both = (DynamicCache(config=model.config), cache)
        for one in both:
            forward(model, one, batch(2, length))
            if remove > 0:
                with pytest.raises(ValueError, match="negative"):
                    one.crop(remove)
            else:
                one.crop(remove)
        want, got = (one.get_seq_length() for one in both)
        assert want == got >= 0
        assert torch.equal(*(forward(model, one, batch(2, 4, seed=1)) for one in both))


@pytest.mark.parametrize("order", [[1, 1], [1, 0], [0, 1], [0, 0]])
def test_reordered_rows_do_not_alias(tiny_model, order):
    """M4: after reorder [1, 1] the rows get different tokens; writing one leaves the other."""
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        both = (DynamicCache(config=model.config), cache)
        for one in both:
            forward(model, one, batch(2, 21))
            one.reorder_cache(torch.tensor(order))
        for seed in (1, 2):
            assert torch.equal(*(forward(model, one, batch(2, 3, seed=seed)) for one in both))
    cache.kvcache.manager.check_integrity()


@pytest.mark.parametrize(
    ("call", "rows"),
    [
        (lambda c: c.batch_repeat_interleave(2), 6),
        (lambda c: c.batch_select_indices(torch.tensor([2, 0])), 2),
        (lambda c: c.batch_select_indices(torch.tensor([False, True, True])), 2),
    ],
)
def test_rows_are_repeated_and_selected(tiny_model, call, rows):
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        both = (DynamicCache(config=model.config), cache)
        for one in both:
            forward(model, one, batch(3, 18))
            call(one)
        assert cache.batch_size == rows
        assert torch.equal(*(forward(model, one, batch(rows, 2, seed=1)) for one in both))


def test_reset_gives_every_unit_back_and_the_cache_serves_again(tiny_model):
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        for rows in (2, 3):  # another batch size after a reset is fine
            check_equal(model, batch(rows, 20), cache)
            cache.reset()
            (pages,) = cache.kvcache.stats().manager.ranges
            assert (pages.free, cache.get_seq_length()) == (pages.capacity, 0)


def test_a_full_pool_is_a_typed_error_and_nothing_is_lost(tiny_model):
    model = tiny_model("llama")
    page_bytes = 3 * 2 * 2 * 16 * 16 * 4
    with KVCoreCache.for_model(model, memory=4 * page_bytes) as cache:  # three usable pages
        with pytest.raises(CapacityError):
            forward(model, cache, batch(4, 3))
        (pages,) = cache.kvcache.stats().manager.ranges
        assert pages.free == pages.capacity == 3
        want = DynamicCache(config=model.config)
        for one in (want, cache):
            forward(model, one, batch(3, 15))
        with pytest.raises(CapacityError):
            forward(model, cache, batch(3, 2, seed=1))
        assert torch.equal(*(forward(model, one, batch(3, 1, seed=2)) for one in (want, cache)))


def test_a_forward_pass_that_ended_midway_is_refused_until_reset(tiny_model):
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        key = torch.zeros(1, 2, 5, 16)
        cache.update(key, key, 0)
        assert (cache.get_seq_length(0), cache.get_seq_length(1)) == (5, 0)
        with pytest.raises(RequestError, match="midway"):
            forward(model, cache, batch(1, 5))
        with pytest.raises(RequestError):
            cache.crop(-1)
        cache.reset()
        check_equal(model, batch(1, 5), cache)


def test_another_batch_size_is_refused(tiny_model):
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        forward(model, cache, batch(2, 5))
        with pytest.raises(RequestError, match="batch"):
            forward(model, cache, batch(3, 1))


def test_two_caches_share_one_pool(tiny_model, make_cache):
    model = tiny_model("llama")
    kvcache = make_cache(model)
    one, other = KVCoreCache(kvcache), KVCoreCache(kvcache)
    want = DynamicCache(config=model.config)
    forward(model, other, batch(2, 9, seed=5))
    for cache in (want, one):
        forward(model, cache, batch(2, 20))
    forward(model, other, batch(2, 9, seed=6))
    assert torch.equal(*(forward(model, cache, batch(2, 4, seed=1)) for cache in (want, one)))
    one.close()
    assert kvcache.stats().manager.requests == 2
    other.close()
    assert kvcache.stats().manager.requests == 0


def test_what_a_layer_cannot_do_alone_is_refused(tiny_model):
    with KVCoreCache.for_model(tiny_model("llama"), memory="2MiB") as cache:
        assert not cache.is_compileable
        layer = cache.layers[1]
        for call in (layer.offload, layer.prefetch, lambda: layer.crop(-1), lambda: layer.reorder_cache(None)):
            with pytest.raises(UnsupportedError):
                call()
        assert layer.get_max_length() == cache.kvcache.token_capacity


# --- copies ---


def used(cache: KVCoreCache) -> int:
    return sum(item.used for item in cache.kvcache.stats().manager.ranges)


def test_a_deep_copy_forks(tiny_model):
    """How a prefix is reused: pages are shared, no byte moves, and each copy goes on as a fresh run would."""
    model = tiny_model("llama")
    prompt = batch(1, 33)
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        forward(model, cache, prompt)
        pages, counts, before = used(cache), dict(cache.kvcache.store.op_counts), cache.get_seq_length()
        copies = [copy.deepcopy(cache) for _ in range(3)]
        assert (used(cache), dict(cache.kvcache.store.op_counts)) == (pages, counts)
        for seed, twin in enumerate(copies):
            ids = torch.cat([prompt, batch(1, 3, seed=seed + 5)], dim=1)
            want = generate(model, ids, DynamicCache(config=model.config))
            got = generate(model, ids, twin)
            assert torch.equal(want.sequences, got.sequences)
        assert cache.get_seq_length() == before
        assert used(cache) < 4 * pages
        want = DynamicCache(config=model.config)
        forward(model, want, prompt)
        assert torch.equal(*(forward(model, one, batch(1, 4, seed=9)) for one in (want, cache)))
        for twin in copies:
            twin.close()
        cache.kvcache.check_integrity()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_copies_are_closed_alone_and_twice(tiny_model, order):
    model = tiny_model("llama")
    cache = KVCoreCache.for_model(model, memory="2MiB")
    forward(model, cache, batch(2, 20))
    held = [cache, copy.deepcopy(cache)]
    held.append(copy.deepcopy(held[1]))
    want = DynamicCache(config=model.config)
    forward(model, want, batch(2, 20))
    for n in order[:2]:
        held[n].close()
        held[n].close()
    last = held[order[2]]
    assert torch.equal(*(forward(model, one, batch(2, 4, seed=1)) for one in (want, last)))
    last.close()
    last.close()
    with pytest.raises(KVCoreError):
        cache.kvcache.admit("late", 1)


def test_a_copy_is_right_after_a_retraction(tiny_model, make_cache):
    model = tiny_model("llama")
    kvcache = make_cache(model)
    cache = KVCoreCache(kvcache)
    want = DynamicCache(config=model.config)
    for one in (cache, want):
        forward(model, one, batch(1, 21))
    twin = copy.deepcopy(cache)
    (row,) = [item.id for item in kvcache.manager.requests][:1]
    handle = kvcache.retract(row)
    kvcache.store.pools["full"].fill(kvcache.manager.free_units("full", "pages"), 0xFF)
    kvcache.resume(handle)
    again = copy.deepcopy(cache)
    for one in (cache, again, twin):
        expected = copy.deepcopy(want)
        assert torch.equal(*(forward(model, it, batch(1, 4, seed=1)) for it in (expected, one)))
    for one in (cache, again, twin):
        one.close()
    assert kvcache.stats().manager.requests == 0


def test_a_copy_that_is_dropped_gives_its_rows_back(tiny_model):
    """Nobody closes a copy of a prefix; a collector may not release in the middle of another call."""
    model = tiny_model("llama")
    page_bytes = 3 * 2 * 2 * 16 * 16 * 4
    with KVCoreCache.for_model(model, memory=10 * page_bytes) as cache:
        forward(model, cache, batch(1, 33))
        for seed in range(8):  # more than fit at once
            forward(model, copy.deepcopy(cache), batch(1, 17, seed=seed))
            gc.collect(1)  # only what is young: a collection of everything takes long
        forward(model, cache, batch(1, 1))
        assert cache.kvcache.stats().manager.requests == 1


def test_a_pass_within_another_is_refused(tiny_model):
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="2MiB") as cache:
        forward(model, cache, batch(1, 8))
        twin = copy.deepcopy(cache)
        key = torch.zeros(1, 2, 1, 16)
        cache.update(key, key, 0)
        with pytest.raises(RequestError, match="a step is open"):
            forward(model, twin, batch(1, 1))
        with pytest.raises(RequestError, match="forward pass"):
            copy.deepcopy(cache)
        cache.reset()
        forward(model, twin, batch(1, 1))
        twin.close()


@pytest.mark.parametrize("way", [copy.copy, pickle.dumps])
def test_other_copies_are_refused(tiny_model, way):
    with KVCoreCache.for_model(tiny_model("llama"), memory="2MiB") as cache, pytest.raises(UnsupportedError):
        way(cache)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_selection_of_nothing_is_that_of_the_installed_dynamic_cache(tiny_model, rows):
    with KVCoreCache.for_model(tiny_model("llama"), memory="2MiB") as cache:
        both = (DynamicCache(config=tiny_model("llama").config), cache)
        for one in both:
            for layer in range(3):
                one.update(*[torch.ones(rows, 2, 5, 16)] * 2, layer)
            one.batch_select_indices(torch.tensor([], dtype=torch.long))
            assert one.get_seq_length() == 0
            with pytest.raises((RuntimeError, RequestError)):
                one.update(*[torch.ones(rows, 2, 3, 16)] * 2, 0)
            assert one.update(*[torch.ones(0, 2, 3, 16)] * 2, 0)[0].shape[0] == 0
            assert one.get_seq_length() == 0
        assert cache.kvcache.stats().manager.requests == 0
        cache.reset()
        check_equal(tiny_model("llama"), batch(rows, 5), cache)


def test_a_prompt_longer_than_a_usual_step(tiny_model):
    """What fits goes through: limits of a step are not the user's to know."""
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="8MiB") as cache:
        want = DynamicCache(config=model.config)
        ids = batch(1, 2100)
        assert torch.equal(*(forward(model, one, ids)[:, -1] for one in (want, cache)))


def test_a_batch_of_more_rows_than_a_usual_step(tiny_model):
    """Beams multiply rows: neither are they the user's to count. What a user did set is held."""
    model = tiny_model("llama")
    with KVCoreCache.for_model(model, memory="8MiB") as cache:
        check_equal(model, batch(20, 3), cache, new=3, num_beams=4)
        assert cache.batch_size == 80
    with KVCoreCache.for_model(model, memory="8MiB", max_rows=2) as cache:
        with pytest.raises(StepTooLargeError):
            forward(model, cache, batch(3, 2))
        assert cache.kvcache.stats().manager.requests == 0
        check_equal(model, batch(2, 2), cache, new=2)
    with KVCoreCache.for_model(model, memory="8MiB", max_tokens=8) as cache:
        with pytest.raises(StepTooLargeError):
            forward(model, cache, batch(1, 9))
        check_equal(model, batch(8, 1), cache, new=2)
