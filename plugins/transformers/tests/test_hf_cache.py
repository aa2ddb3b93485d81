"""KVCoreCache in unmodified transformers: the same numbers as DynamicCache, bit for bit."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvcore.errors import CapacityError, RequestError, UnsupportedError
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
