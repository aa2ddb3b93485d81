"""Models with states between a prefill and a decode engine, over shared memory, into poisoned memory."""

from __future__ import annotations

import pytest
import torch

NAMES = ("inkling", "inkling_unlike", "inkling_scaled", "qwen3_next")


@pytest.mark.parametrize("name", NAMES)
def test_prefill_here_and_decode_there_give_the_tokens_of_plain_transformers(
    zoo, hybrid_kit, make_cache, make_requests, name
):
    """The state is sent once, when the prompt is done; every component of every group arrives."""
    models = [zoo.make(name) for _ in range(2)]
    both = hybrid_kit.Both(models, [make_cache(model, **hybrid_kit.OPTIONS) for model in models])
    requests = make_requests((1, 17, 40), new=8)
    results = both.serve(requests)
    assert results == hybrid_kit.plain_tokens(zoo.make(name), requests, results)
    layouts = both.caches[0].layouts
    assert all(
        set(found) == {c for layout in layouts.values() for c in layout.components} for found in both.arrived.values()
    )
    states = {prefix: layout for prefix, layout in layouts.items() if prefix.startswith("state")}
    for found in both.arrived.values():
        for prefix, layout in states.items():
            moved = sum(count for component, count in found.items() if component.startswith(f"{prefix}/"))
            fields = [field for item in layout.regions for field in item.fields]
            assert moved == len(layout.layers) * sum(4 * _elements(field) for field in fields), prefix
    assert "attend_prefill" not in both.decode.stats.ops


def _elements(field):
    return torch.Size(axis.size for axis in field.axes).numel()


@pytest.mark.parametrize(("name", "backend"), [("inkling", "host_pool"), ("qwen3_next", "host_tensor")])
def test_what_was_pulled_is_retracted_and_comes_back(zoo, hybrid_kit, make_cache, make_requests, name, backend):
    models = [zoo.make(name) for _ in range(2)]
    how = {"backend": backend}
    memory = hybrid_kit.memory_for(make_cache, models[1], 14, **how)
    caches = [
        make_cache(models[0], **hybrid_kit.OPTIONS),
        make_cache(models[1], **{**hybrid_kit.OPTIONS, **how, "memory": memory}),
    ]
    both = hybrid_kit.Both(models, caches)
    requests = make_requests((22, 17, 6), new=14)
    results = both.serve(requests)
    assert results == hybrid_kit.plain_tokens(zoo.make(name), requests, results)
    assert both.decode.stats.retractions > 0
    assert both.decode.stats.resumed == both.decode.stats.retractions
