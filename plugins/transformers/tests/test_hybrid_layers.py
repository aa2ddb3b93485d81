"""Layers of a model with states, told of and offered while later ones are computed: complete, or not at all."""

from __future__ import annotations

import time

import pytest
import torch

from kvcore.contract import DONE
from kvcore_transformers.modeling.state_batch import StateBatch
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import GenerationRequest

NAMES = ("inkling", "inkling_unlike", "qwen3_next")


def kept_by(cache, request, start, stop):
    """By layer, all bytes of a request that the chunk ``[start, stop)`` of it writes: pages and slots."""
    found = {}
    for group in cache.model.groups:
        for layer in group.layers:
            pool = cache.store.pools[group.prefix]
            ids = cache.units(request, group.prefix, pool.layout.token_range)
            if group.kind == "attention":  # the last page is of this chunk alone, or holds the end of an earlier one
                ids = ids[start // 4 : -(-stop // 4)]
            for item in pool.layout.regions:
                found.setdefault(layer, []).append(pool.units(layer, item.name)[torch.from_numpy(ids.copy())].flatten())
    return {layer: torch.cat(parts) for layer, parts in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_each_layer_of_the_last_chunk_is_told_when_all_its_states_are_there(zoo, hybrid_kit, make_cache, prompt, name):
    """What a layer has in the pools at that moment is what it has at the end, its convolutions after attention and MLP
    included; layers without keys and values are told of too; later layers have what they had before the step."""
    model = zoo.make(name)
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    told, at_once, before = [], {}, {}
    layers = sorted({layer for group in cache.model.groups for layer in group.layers})

    def on_layer(request, start, stop, layer, fence):
        assert fence is DONE, "on the CPU what was written is there"
        told.append((request, start, stop, layer))
        now = kept_by(cache, request, start, stop)
        at_once[request, layer] = now[layer]
        for other in layers:
            if other > layer:
                assert torch.equal(now[other], before[request][other]), "a later layer is there already"

    engine = Engine(model, cache, chunk=16, on_layer=on_layer)
    lengths = {"a": 33, "b": 5, "c": 16}
    for request, length in lengths.items():
        engine.submit(GenerationRequest(request, prompt(length, 1), 1))
    begin, final = cache.begin, {}

    def begin_and_look(rows):
        step = begin(rows)
        for request, count in rows:
            start = cache.length(request)
            before[request] = kept_by(cache, request, start, start + count)
        return step

    cache.begin = begin_and_look
    while engine.busy:
        hybrid_kit.poison(cache)
        step, seen = engine._forward, len(told)

        def forward(opened, rows, hook, step=step, seen=seen):
            tokens = step(opened, rows, hook)
            for request, start, stop, layer in told[seen:]:
                final[request, layer] = kept_by(cache, request, start, stop)[layer]
            return tokens

        engine._forward = forward
        engine.step()
        engine._forward = step
    for request, (start, stop) in {"a": (32, 33), "b": (0, 5), "c": (0, 16)}.items():
        assert [entry for entry in told if entry[0] == request] == [(request, start, stop, layer) for layer in layers]
    assert set(final) == set(at_once)
    assert all(torch.equal(final[key], at_once[key]) for key in final)
    assert not all(torch.equal(before["a"][layer], final["a", layer]) for layer in layers)


@pytest.mark.parametrize("name", ["inkling", "qwen3_next"])
def test_the_fence_of_a_layer_covers_its_states(zoo, hybrid_kit, make_cache, prompt, monkeypatch, name):
    """States are written without a fence of their own: a layer goes with the mark of everything up to its last one."""
    model = zoo.make(name)
    cache = make_cache(model, **hybrid_kit.OPTIONS)
    marks, written, told = [], {}, {}
    write, mark = StateBatch._scatter, cache.store.mark

    def count(self, group, layer, *args):
        write(self, group, layer, *args)
        written[layer] = len(marks)

    def numbered():
        marks.append(mark())
        return len(marks)

    monkeypatch.setattr(StateBatch, "_scatter", count)
    monkeypatch.setattr(cache.store, "mark", numbered)
    engine = Engine(model, cache, chunk=16, on_layer=lambda *facts: told.update([facts[3:]]))
    engine.run([GenerationRequest("r", prompt(9, 0), 1)])
    assert set(told) == {layer for group in cache.model.groups for layer in group.layers}
    assert all(told[layer] > marked for layer, marked in written.items()), "the mark was taken before the last write"
    assert [told[layer] for layer in sorted(told)] == list(range(1, len(told) + 1)), "one for each layer"


def offered(both, requests):
    """Serve with pauses, so that asks arrive before last chunks; the layers that were offered one by one."""
    calls, offer_layers, step = [], both.sender.offer_layers, both.prefill.step

    def spy(request, start, stop, layers, **options):
        calls.append((request, *layers))
        offer_layers(request, start, stop, layers, **options)

    def slow():
        time.sleep(0.05)
        return step()

    both.sender.offer_layers, both.prefill.step = spy, slow
    return both.serve(requests), calls


@pytest.mark.parametrize("name", ["inkling", "qwen3_next"])
def test_layers_that_are_offered_early_arrive_with_their_states(zoo, hybrid_kit, make_cache, prompt, name):
    models = [zoo.make(name) for _ in range(2)]
    both = hybrid_kit.Both(models, [make_cache(model, **hybrid_kit.OPTIONS) for model in models])
    requests = [GenerationRequest("r", prompt(40, 0), 6)]
    results, calls = offered(both, requests)
    assert results == hybrid_kit.plain_tokens(zoo.make(name), requests, results)
    last = max(layer for group in both.caches[0].model.groups for layer in group.layers)
    assert calls == [("r", layer) for layer in range(last)], "the last layer goes with the offer of the chunk"


@pytest.mark.parametrize("name", ["inkling", "qwen3_next"])
def test_a_layer_that_is_offered_before_its_states_are_written_shows(
    zoo, hybrid_kit, make_cache, prompt, monkeypatch, name
):
    """On purpose: each layer offered when the model comes to it. Its states are those of the chunk before."""
    monkeypatch.setattr(StateBatch, "_reach", lambda self, layer: _too_early(self, layer))
    models = [zoo.make(name) for _ in range(2)]
    both = hybrid_kit.Both(models, [make_cache(model, **hybrid_kit.OPTIONS) for model in models])
    requests = [GenerationRequest("r", prompt(40, 0), 6)]
    results, calls = offered(both, requests)
    assert calls
    assert results != hybrid_kit.plain_tokens(zoo.make(name), requests, results)


def _too_early(batch, layer):
    if layer != batch._layer:
        batch._layer = layer
        batch._complete()
        time.sleep(0.05)  # for the receiver to pull it
