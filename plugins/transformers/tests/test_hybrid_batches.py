"""Which rows of a model with states share a forward pass, and who makes its batches."""

from __future__ import annotations

from itertools import pairwise

import pytest

from kvcore.errors import UnsupportedError
from kvcore_transformers.commands.accuracy_report import compare
from kvcore_transformers.modeling.attention import PagedBatch
from kvcore_transformers.serving.engine import Engine


def test_who_shares_a_forward_pass(zoo, hybrid_kit, make_cache, make_requests, monkeypatch):
    """One chunk of one prompt; where attention is scaled by position, decode rows of one length, and nobody starves."""
    model = zoo.make("inkling_scaled")
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    engine, begin, passes = Engine(model, cache, chunk=16), cache.begin, []
    prompts = make_requests((5, 19, 7, 12), new=12)

    def watch(rows):
        passes.append([(row, count, cache.length(row)) for row, count in rows])
        return begin(rows)

    monkeypatch.setattr(cache, "begin", watch)
    results = hybrid_kit.serve(engine, prompts)
    assert {len(tokens) for tokens in results.values()} == {12}
    lengths = {request.id: len(request.prompt) for request in prompts}
    decodes = [rows for rows in passes if rows[0][2] >= lengths[rows[0][0]]]
    assert all(len(rows) == 1 for rows in passes if rows not in decodes)
    assert all(len({length for _, _, length in rows}) == 1 for rows in decodes)
    assert any(len(rows) > 1 for rows in decodes), "the first has seven tokens when the third begins with seven"
    for request in lengths:
        turns = [n for n, rows in enumerate(decodes) if request in [row for row, _, _ in rows]]
        assert len(turns) == 11
        assert all(later - earlier <= len(prompts) for earlier, later in pairwise(turns)), "one had to wait"


def test_packing_the_rows_of_a_model_with_states_is_refused(zoo, hybrid_kit, make_cache):
    """A convolution would run from one row into the next."""
    cache = make_cache(zoo.make("inkling"), **hybrid_kit.OPTIONS)
    cache.admit("a", 2)
    with cache.begin([("a", 2)]) as step, pytest.raises(UnsupportedError) as refusal:
        PagedBatch(step, cache.model)
    assert refusal.value.fields["groups"] == ["state"]


def test_the_accuracy_of_a_format_can_be_measured_on_a_model_with_states(zoo, hybrid_kit, make_cache, prompt):
    model = zoo.make("inkling")
    caches = [make_cache(model, format=name, **hybrid_kit.OPTIONS) for name in ("fp32", "bf16", "fp32")]
    text = prompt(40, 5)
    rounded = compare(model, caches[0], caches[1], text, chunk=16).accuracy()
    same = compare(model, caches[0], caches[2], text, chunk=16).accuracy()
    assert 0 < rounded.kl < 0.01
    assert same.kl == 0
