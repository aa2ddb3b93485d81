"""Engines on models with states: poisoned memory, memory that holds few pages, two engines in one process."""

from __future__ import annotations

import time

import torch

from kvcore.testing.harness import poison
from kvcore_transformers.modeling.state_batch import StateBatch
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import AskedEvent, DoneEvent, FailedEvent, ReceivedEvent

PLUGINS = ("mamba_backup",)
"""What holds the states."""

OPTIONS = {"plugins": PLUGINS, "page_size": 4, "max_requests": 4, "max_tokens": 64, "memory": "1MiB"}
MEMORY = 1 << 20


def memory_for(make_cache, model, pages, **options):
    """Bytes in which exactly so many pages of whole-sequence layers are left beside windows and states."""
    probe = make_cache(model, **{**OPTIONS, **options})
    held, size = probe.token_capacity // 4, 4 * probe.capacity.bytes_per_token["total"]
    assert held > pages
    return MEMORY - (held - pages) * size


def plain_tokens(plain, requests, results):
    """What plain transformers says at every generated position, given the tokens before it: no cache, no chunks.

    Equal to the results exactly where greedy decoding with plain transformers gives them.
    """
    said = {}
    for request in requests:
        text = torch.tensor([[*request.prompt, *results[request.id]]])
        with torch.inference_mode():
            logits = plain(input_ids=text[:, :-1], use_cache=False).logits[0]
        said[request.id] = tuple(logits[len(request.prompt) - 1 :].argmax(-1).tolist())
    return said


def serve(engine, requests):
    """Run to the end, free units poisoned before each step; results by id."""
    cache, results, steps = engine._cache, {}, 0
    for request in requests:
        engine.submit(request)
    while engine.busy:
        poison(cache)
        engine.step()
        cache.check_integrity()
        steps += 1
        assert steps < 5000, "no progress"
        _collect(engine.events(), results)
    assert all(item.free == item.capacity for item in cache.stats().manager.ranges), "units did not come back"
    return results


def step(model, cache, texts, rows):
    """Teacher-forced: the logits ``[R, T, V]`` of ``(row, tokens)`` rows, from where each row stands."""
    starts = [cache.length(row) for row, _ in rows]
    ids = [texts[row][start : start + count] for (row, count), start in zip(rows, starts, strict=True)]
    where = [list(range(start, start + count)) for (_, count), start in zip(rows, starts, strict=True)]
    with cache.begin(rows) as step, torch.inference_mode():
        batch = StateBatch(step, cache, model.config)
        result = model(input_ids=torch.tensor(ids), position_ids=torch.tensor(where), cache=batch, use_cache=True)
        step.commit()
    return result.logits


def _collect(events, results):
    for event in events:
        if isinstance(event, DoneEvent):
            results[event.request] = event.tokens
        elif isinstance(event, FailedEvent):
            results[event.request] = event.exception()


class Both:
    """A prefill and a decode engine with a cache each, stepped in turn by one thread, free memory poisoned."""

    def __init__(self, models, caches, chunk=16, **prefill_options):
        self.caches = caches
        self.sender = caches[0].serve()
        self.prefill = Engine(models[0], caches[0], chunk=chunk, sender=self.sender, **prefill_options)
        self.decode = Engine(models[1], caches[1], chunk=chunk, receiver=caches[1].connect(self.sender.address))
        self.arrived = {}

    def serve(self, requests, seconds=60.0):
        """Results by id; what arrived of each request stays in ``arrived``."""
        asked, results = {request.id: request for request in requests}, {}
        for request in requests:
            self.decode.submit(request)
        deadline = time.monotonic() + seconds
        while self.decode.busy or self.prefill.busy:
            assert time.monotonic() < deadline, "no end"
            for cache in self.caches:
                poison(cache)
            self.decode.step()
            events = self.decode.events()
            for event in events:
                if isinstance(event, AskedEvent):
                    self.prefill.submit(asked[event.request])
                elif isinstance(event, ReceivedEvent):
                    self.arrived[event.request] = event.bytes_by_component
            _collect(events, results)
            self.prefill.step()
            self.prefill.events()
            for cache in self.caches:
                cache.check_integrity()
        return results
