"""Several guessed tokens in one forward pass, of which some are accepted: the states after any number of them."""

from __future__ import annotations

import pytest
import torch

from kvcore.errors import UnsupportedError
from kvcore_transformers.modeling.attention import ATTENTION
from kvcore_transformers.modeling.state_batch import StateBatch


@pytest.fixture
def cache_of(zoo, hybrid_kit, make_cache):
    """``cache_of(name)``: a model and a cache with state slots for speculation, all free memory NaN."""

    def make(name):
        model = zoo.make(name)
        model.set_attn_implementation(ATTENTION)
        cache = make_cache(model, **hybrid_kit.OPTIONS, checkpoints=6)
        hybrid_kit.poison(cache)
        return model, cache

    return make


def guess(model, cache, texts, rows, accepted):
    """One speculative step of the next tokens of each row; keeps the first ``accepted`` of each."""
    starts = [cache.length(row) for row, _ in rows]
    ids = [texts[row][start : start + count] for (row, count), start in zip(rows, starts, strict=True)]
    where = [list(range(start, start + len(row))) for start, row in zip(starts, ids, strict=True)]
    with cache.begin(rows, speculative=True) as step, torch.inference_mode():
        batch = StateBatch(step, cache, model.config)
        result = model(input_ids=torch.tensor(ids), position_ids=torch.tensor(where), cache=batch, use_cache=True)
        step.commit(accepted)
    return result.logits


@pytest.mark.parametrize("accepted", [(0, 4), (1, 3), (2, 2), (3, 0), (4, 1)])
def test_what_was_accepted_goes_on_as_if_it_had_been_decoded(cache_of, hybrid_kit, prompt, accepted):
    """Guesses after the accepted ones are other tokens than the text goes on with: M1, nothing of them may be left, in a
    convolution least of all. Rows of unlike length, so the position bias is of both."""
    model, cache = cache_of("inkling")
    texts = {"a": prompt(19, 1), "b": prompt(12, 2)}
    starts = {"a": 11, "b": 4}
    for row, start in starts.items():
        cache.admit(row, start)
        hybrid_kit.step(model, cache, texts, [(row, start)])
    guesses = {
        row: texts[row][: starts[row] + count] + tuple((token + 1) % 97 for token in texts[row][starts[row] + count :])
        for (row, count) in zip("ab", accepted, strict=True)
    }
    hybrid_kit.poison(cache)
    logits = guess(model, cache, guesses, [("a", 4), ("b", 4)], accepted)
    assert [cache.length(row) for row in "ab"] == [11 + accepted[0], 4 + accepted[1]]
    cache.check_integrity()
    hybrid_kit.poison(cache)
    got = {row: [logits[n][: accepted[n]]] for n, row in enumerate("ab")}
    for _ in range(3):
        for row, part in zip("ab", hybrid_kit.step(model, cache, texts, [("a", 1), ("b", 1)]), strict=True):
            got[row].append(part)
    plain_model, plain = cache_of("inkling")
    for n, row in enumerate("ab"):
        plain.admit(row, starts[row])
        hybrid_kit.step(plain_model, plain, texts, [(row, starts[row])])
        want = [hybrid_kit.step(plain_model, plain, texts, [(row, 1)])[0] for _ in range(accepted[n] + 3)]
        torch.testing.assert_close(torch.cat(got[row]), torch.cat(want), atol=2e-5, rtol=1e-4)
        for layer in range(3):
            for state in plain.model.group("state").states:
                here, there = (
                    c.state("state").field(layer, state.name, "x")[int(c.units(row, "state", "slots")[0])]
                    for c in (cache, plain)
                )
                torch.testing.assert_close(here, there, atol=1e-5, rtol=1e-4)


def test_a_first_step_may_be_speculative(cache_of, hybrid_kit, prompt):
    """Before the beginning there are zeros, for every token of the trail."""
    model, cache = cache_of("inkling")
    texts = {"a": prompt(9, 3)}
    cache.admit("a", 5)
    got = [guess(model, cache, texts, [("a", 5)], [2])[0, :2]]
    got += [hybrid_kit.step(model, cache, texts, [("a", 1)])[0] for _ in range(3)]
    plain_model, plain = cache_of("inkling")
    plain.admit("a", 5)
    want = hybrid_kit.step(plain_model, plain, texts, [("a", 5)])[0]
    torch.testing.assert_close(torch.cat(got), want, atol=2e-5, rtol=1e-4)


def test_a_recurrent_state_is_known_after_the_last_token_only(cache_of, hybrid_kit, prompt):
    """Refused before anything is computed: the states after earlier tokens would be missing. One token is no trouble."""
    model, cache = cache_of("qwen3_next")
    texts = {"a": prompt(9, 3)}
    cache.admit("a", 4)
    hybrid_kit.step(model, cache, texts, [("a", 4)])
    with pytest.raises(UnsupportedError) as refusal:
        guess(model, cache, texts, [("a", 2)], [1])
    assert (refusal.value.fields["state"], refusal.value.fields["tokens"]) == ("recurrent", 2)
    assert cache.length("a") == 4
    guess(model, cache, texts, [("a", 1)], [0])
    logits = hybrid_kit.step(model, cache, texts, [("a", 1)])
    plain_model, plain = cache_of("qwen3_next")
    plain.admit("a", 4)
    hybrid_kit.step(plain_model, plain, texts, [("a", 4)])
    assert torch.equal(logits, hybrid_kit.step(plain_model, plain, texts, [("a", 1)]))
