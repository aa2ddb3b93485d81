"""Models that keep a state per request: the tokens of plain transformers, and what each state has to do with them."""

from __future__ import annotations

import pytest
import torch

from kvcore.errors import UnsupportedError
from kvcore_transformers.modeling.attention import ATTENTION
from kvcore_transformers.modeling.hf_cache import KVCoreCache
from kvcore_transformers.modeling.state_batch import StateBatch
from kvcore_transformers.serving.engine import Engine

NAMES = ("inkling", "inkling_unlike", "inkling_scaled", "qwen3_next")
KINDS = ("inkling", "qwen3_next")


@pytest.mark.parametrize("name", NAMES)
def test_ragged_prompts_in_chunks_give_the_tokens_of_plain_transformers(
    zoo, hybrid_kit, make_cache, make_requests, name
):
    """Slots and pages hold NaN before they are handed out: nobody starts from a previous tenant's state (G1)."""
    model = zoo.make(name)
    engine = Engine(model, make_cache(model, **hybrid_kit.OPTIONS), chunk=16)
    requests = make_requests((1, 5, 23, 40), new=10)
    results = hybrid_kit.serve(engine, requests)
    assert results == hybrid_kit.plain_tokens(zoo.make(name), requests, results)
    assert {len(tokens) for tokens in results.values()} == {10}
    assert "load" not in engine.stats.ops
    assert engine.stats.ops["attend_decode"] > 0


@pytest.mark.parametrize("name", KINDS)
def test_every_state_matters_to_the_tokens(zoo, hybrid_kit, make_cache, make_requests, monkeypatch, name):
    """Else the tests of this page would show nothing: without one state at a time, other tokens come out."""
    plain, model = zoo.make(name), zoo.make(name)
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    requests = make_requests((23,), new=10)
    write, lost = StateBatch._write, []

    def forget(self, group, layer, name, value):
        if name not in lost:
            write(self, group, layer, name, value)

    monkeypatch.setattr(StateBatch, "_write", forget)
    for state in next(group for group in cache.model.groups if group.kind == "state").states:
        lost[:] = [state.name]
        results = hybrid_kit.serve(Engine(model, cache, chunk=16), requests)
        assert results != hybrid_kit.plain_tokens(plain, requests, results), state.name


@pytest.mark.parametrize("name", KINDS)
def test_a_model_that_changes_its_state_in_place_loses_it(
    zoo, hybrid_kit, make_cache, make_requests, monkeypatch, name
):
    """Known fault of transformers' decode path: with one new token a model writes into the tensor that
    ``get_conv_state`` returned. Of slots that is a copy, so ``is_recording_past`` has to be True."""
    plain, model = zoo.make(name), zoo.make(name)
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    requests = make_requests((23,), new=10)
    right = hybrid_kit.serve(Engine(model, cache, chunk=16), requests)
    assert right == hybrid_kit.plain_tokens(plain, requests, right)
    monkeypatch.setattr(StateBatch, "is_recording_past", lambda self, layer_idx: False)
    wrong = hybrid_kit.serve(Engine(model, cache, chunk=16), requests)
    assert wrong != right
    assert wrong["r0"][:2] == right["r0"][:2], "a prompt's state is not written in place, nor read in the first step"


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_ragged_rows_are_those_of_each_alone(zoo, hybrid_kit, make_cache, prompt, name, record_property):
    """Nothing hides behind an argmax: prompts in chunks, then rows of unlike length together."""
    plain, model = zoo.make(name), zoo.make(name)
    model.set_attn_implementation(ATTENTION)
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    hybrid_kit.poison(cache)
    texts = {"a": prompt(29, 1), "b": prompt(9, 2), "c": prompt(16, 3)}
    got = {row: [] for row in texts}
    for row, chunks in {"a": (16, 9), "b": (5,), "c": (12,)}.items():
        cache.admit(row, sum(chunks))
        for count in chunks:
            got[row] += hybrid_kit.step(model, cache, texts, [(row, count)])
    # Rows of one step must be of one length where attention is scaled by position.
    together = [[("a", 1)], [("b", 1)], [("c", 1)]] if name == "inkling_scaled" else [[("c", 1), ("a", 1), ("b", 1)]]
    for rows in 4 * together:
        for (row, _), part in zip(rows, hybrid_kit.step(model, cache, texts, rows), strict=True):
            got[row].append(part)
    worst = 0.0
    for row, tokens in texts.items():
        with torch.inference_mode():
            want = plain(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        worst = max(worst, (torch.cat(got[row]) - want).abs().max().item())
        torch.testing.assert_close(torch.cat(got[row]), want, atol=2e-5, rtol=1e-4)
    record_property("largest_logit_difference", worst)


@pytest.mark.parametrize("name", KINDS)
def test_without_a_plugin_for_its_states_a_model_is_refused(zoo, make_cache, hybrid_kit, name):
    with pytest.raises(UnsupportedError) as refusal:
        make_cache(zoo.make(name), **{**hybrid_kit.OPTIONS, "plugins": ()})
    assert refusal.value.fields["group"] == "state"
    assert refusal.value.fields["model"] == {"inkling": "inkling_text"}.get(name, name)
    assert "plugin" in refusal.value.remedy


def test_the_cache_of_generate_says_what_serves_states(zoo, hybrid_kit, make_cache):
    with pytest.raises(UnsupportedError) as refusal:
        KVCoreCache(make_cache(zoo.make("inkling"), **hybrid_kit.OPTIONS))
    assert refusal.value.fields["groups"] == ["full", "swa", "state"]
    assert "Engine" in refusal.value.remedy
    assert "state" in refusal.value.remedy
