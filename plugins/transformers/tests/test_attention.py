"""Attention on the pools: a packed ragged batch against one request at a time, and what is refused."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

from kvcore.errors import RequestError, UnsupportedError
from kvcore_transformers.modeling.attention import ATTENTION, PagedBatch, kvcore_paged

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


def packed(model, cache, rows):
    """One step over rows of (request, tokens, start); logits [T, vocabulary]."""
    ids = [token for _, tokens, _ in rows for token in tokens]
    positions = [start + n for _, tokens, start in rows for n in range(len(tokens))]
    with cache.begin([(name, len(tokens)) for name, tokens, _ in rows]) as step, torch.inference_mode():
        logits = model(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor([positions]),
            cache=PagedBatch(step, cache.model),
            use_cache=True,
        ).logits[0]
        step.commit()
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_rows_in_one_pass_equal_each_request_alone(tiny_model, make_cache, prompt, family):
    """Chunks, a whole prompt and single tokens in one batch; pools poisoned before."""
    plain, model = tiny_model(family), tiny_model(family)
    model.set_attn_implementation(ATTENTION)
    cache = make_cache(model)
    cache.store.pools["full"].fill(cache.manager.free_units("full", "pages"), 0xFF)
    texts = {name: prompt(length, length) for name, length in (("a", 40), ("b", 17), ("c", 5), ("d", 33))}
    for name, tokens in texts.items():
        cache.admit(name, len(tokens))
    got = {name: [] for name in texts}
    for cuts in ({"a": 16, "b": 1}, {"a": 24, "c": 5}, {"b": 16, "d": 32}, {"d": 1}):
        done = {name: cache.length(name) for name in texts}
        rows = [(name, texts[name][done[name] : done[name] + count], done[name]) for name, count in cuts.items()]
        logits = packed(model, cache, rows)
        for (name, tokens, _), part in zip(rows, logits.split([len(row[1]) for row in rows]), strict=True):
            assert len(part) == len(tokens)
            got[name].append(part)
    for name, tokens in texts.items():
        with torch.inference_mode():
            want = plain(input_ids=torch.tensor([tokens]), cache=DynamicCache(config=plain.config)).logits[0]
        torch.testing.assert_close(torch.cat(got[name]), want, atol=2e-5, rtol=1e-4)


def test_without_a_paged_batch_it_is_refused(tiny_model, prompt):
    model = tiny_model("llama")
    model.set_attn_implementation(ATTENTION)
    with pytest.raises(UnsupportedError, match="without a paged batch"):
        model(input_ids=torch.tensor([prompt(5, 0)]), use_cache=False)


@pytest.mark.parametrize("argument", ["position_bias", "softcap", "attention_mask"])
def test_arguments_it_does_not_know_are_refused_not_passed_over(tiny_model, make_cache, argument):
    model = tiny_model("llama")
    cache = make_cache(model)
    cache.admit("a", 2)
    states = torch.zeros(1, 2, 2, 16)
    with cache.begin([("a", 2)]) as step:
        kwargs = {}
        PagedBatch(step, cache.model).update(states, states, 0, kwargs=kwargs)
        extra = {"attention_mask": None, argument: torch.ones(1)}
        with pytest.raises(UnsupportedError) as refusal:
            kvcore_paged(model, torch.zeros(1, 4, 2, 16), states, states, **extra, **kwargs)
        assert refusal.value.fields["arguments"] == [argument]


def test_a_model_that_hides_its_arguments_and_an_unpacked_batch_are_refused(tiny_model, make_cache):
    cache = make_cache(tiny_model("llama"))
    cache.admit("a", 2)
    with cache.begin([("a", 2)]) as step:
        with pytest.raises(UnsupportedError):
            PagedBatch(step, cache.model).update(torch.zeros(1, 2, 2, 16), torch.zeros(1, 2, 2, 16), 0)
        with pytest.raises(RequestError, match="packed"):
            PagedBatch(step, cache.model).update(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1, 16), 0, kwargs={})
