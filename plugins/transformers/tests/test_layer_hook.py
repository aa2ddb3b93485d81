"""The engine tells of each layer of a prompt's last chunk as soon as it is stored, and of nothing else."""

from __future__ import annotations

import pytest
import torch

from kvcore.contract import DONE
from kvcore.testing.harness import poison
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import GenerationRequest


@pytest.mark.parametrize("name", ["gemma3", "deepseek"])
def test_each_layer_of_the_last_chunk_is_told_when_its_bytes_are_there(zoo, make_cache, prompt, name):
    """What lies in the pool at that moment is what lies there at the end; later layers are still NaN."""
    model = zoo.make(name)
    cache = make_cache(model, page_size=4, memory="1MiB", max_requests=8)
    lengths = {"a": 33, "b": 5, "c": 16}
    told, at_once = [], {}

    def rows(request, group, layer, start, stop):
        spec = cache.model.group(group)
        pages = torch.tensor([int(unit) for unit in cache.units(request, group, "pages")])
        at = torch.arange(start, stop)
        slots = pages[at // 4] * 4 + at % 4
        out = {item.name: torch.empty(len(at), item.num_heads, item.head_dim) for item in spec.tensors}
        cache.store.load(layer, slots, out)
        return torch.cat([value.flatten() for value in out.values()])

    def on_layer(request, start, stop, layer, fence):
        assert fence is DONE, "on the CPU a store is over when it returns"
        told.append((request, start, stop, layer))
        for group in cache.model.groups:
            for other in group.layers:
                found = rows(request, group.prefix, other, start, stop)
                if other <= layer:
                    assert found.isfinite().all()
                else:
                    assert found.isnan().any(), "a later layer is there already"
                if other == layer:
                    at_once[request, layer] = found

    engine = Engine(model, cache, chunk=16, on_layer=on_layer)
    for request, length in lengths.items():
        engine.submit(GenerationRequest(request, prompt(length, 1), 2))
    final = {}
    while engine.busy:
        poison(cache)
        before = len(told)
        begin = cache.store.begin

        def poisoned(plan, begin=begin):
            """Units handed out are zeroed when a step begins; what its layers have not stored yet must show."""
            begin(plan)
            for part in plan.ranges:
                cache.store.pools[part.group].fill(part.fresh, 0xFF)

        cache.store.begin = poisoned
        engine.step()
        cache.store.begin = begin
        for request, start, stop, layer in told[before:]:
            group = next(item.prefix for item in cache.model.groups if layer in item.layers)
            final[request, layer] = rows(request, group, layer, start, stop)
    order = sorted(layer for group in cache.model.groups for layer in group.layers)
    for request, (start, stop) in {"a": (32, 33), "b": (0, 5), "c": (0, 16)}.items():
        assert [entry for entry in told if entry[0] == request] == [(request, start, stop, layer) for layer in order]
    assert set(final) == set(at_once)
    assert all(torch.equal(final[key], at_once[key]) for key in final)


def test_nothing_is_told_of_decode_steps(tiny_model, make_cache, prompt):
    model = tiny_model("llama")
    told = []
    engine = Engine(model, make_cache(model), chunk=16, on_layer=lambda *facts: told.append(facts[:4]))
    engine.run([GenerationRequest("r", prompt(20, 0), 10)])
    assert told == [("r", 16, 20, layer) for layer in range(3)]
