"""The guard model through a prefill cache and a decode cache in one process, with retraction, and with faults on purpose.

The engines, the caches, the transfer and the backup are the ones that serve; only the memory they start from and, where
a fault is asked for, the units they copy are tampered with.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache as once
from typing import Any

from kvcore.config import Config
from kvcore.engine.cache import KVCache
from kvcore.testing.harness import poison
from kvcore_transformers.guard import task
from kvcore_transformers.guard.model import weights_directory
from kvcore_transformers.models.loading import cache_for, load_model
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import AskedEvent, DoneEvent, FailedEvent, GenerationRequest, ReceivedEvent

PAGE = 8
CHUNK = 64
ROWS = 14  # most requests at once
PREFILL_MEMORY = "1MiB"
DECODE_MEMORY = "500KiB"
"""So little that requests outgrow it: a prompt takes 13 pages and its answer three more."""

AFTER_A_KEY = 7
"""Tokens of an answer up to the end of the second key; its last one is not in the cache yet when they are there."""

COMPONENTS = ("full/kv", "full/block_scale", "swa/kv", "swa/block_scale", "state/conv")
POISON = 0xFF  # NaN, as fp32, as e4m3 and as a scale


@once
def model(number: int) -> Any:
    """One model per engine; an engine changes a model's attention for good."""
    return load_model(weights_directory())


def settings(memory: str | int, backend: str = "host_tensor") -> Config:
    """The configuration of either side."""
    options = {"size": "4MiB"} if backend == "host_pool" else {}
    return Config.from_mapping(
        {
            "plugins": ["mamba_backup", "transformers"],
            "cache": {
                "format": "mxfp8",
                "page_size": PAGE,
                "memory": memory,
                "max_requests": ROWS,
                "max_rows": ROWS,
                "max_tokens": CHUNK,
            },
            "retraction": {"policy": "backup", "backend": backend, "options": options},
        }
    )


def wipe(cache: KVCache, byte: int) -> None:
    """Fill every unit that nobody holds, those included that are being copied out: it waits for the copies."""
    deadline = time.monotonic() + 10
    while cache.stats().retraction.copies_under_way:
        assert time.monotonic() < deadline, "a copy does not end"
        time.sleep(0.001)
        cache.can_admit(1)  # sees to copies that have ended
    poison(cache, byte)


@dataclass
class Ledgers:
    """Requests of the task and the answers to them."""

    requests: list[GenerationRequest]
    answers: dict[str, tuple[int, ...]]

    @classmethod
    def draw(cls, count: int, seed: int = 31) -> Ledgers:
        batch = task.sequences(count, seed)
        answers = {f"r{n}": tuple(row) for n, row in enumerate(batch.answers.tolist())}
        prompts = [tuple(row) for row in batch.prompts.tolist()]
        return cls(
            [GenerationRequest(f"r{n}", prompt, len(answers[f"r{n}"])) for n, prompt in enumerate(prompts)], answers
        )


@dataclass
class Outcome:
    """What a run came to.

    Attributes:
        right: requests whose every token is right.
        asked: all requests.
        retracted: requests that were taken off the device at least once.
        retractions, restored, recomputed: counts.
        moved, saved: bytes by component.
    """

    right: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    retracted: set[str] = field(default_factory=set)
    retractions: int = 0
    restored: int = 0
    recomputed: int = 0
    moved: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)

    def exact(self, among: Iterable[str] | None = None) -> float:
        """Share of requests answered right."""
        judged = self.asked if among is None else set(among)
        return len(judged & self.right) / len(judged)


class Rig:
    """Two engines that are stepped in turn; a context manager."""

    def __init__(
        self,
        *,
        backend: str = "host_tensor",
        decode_memory: str | int = DECODE_MEMORY,
        poisoned: bool = True,
    ) -> None:
        """Memory is NaN before it is used, and again whenever it is given up; or zeros, with ``poisoned=False``."""
        self._stack = ExitStack()
        self.sending = self._stack.enter_context(cache_for(model(0), settings(PREFILL_MEMORY)))
        self.decoding = self._stack.enter_context(cache_for(model(1), settings(decode_memory, backend)))
        self._byte = POISON if poisoned else 0
        for cache in (self.sending, self.decoding):
            cache.poison_freed = poisoned
            wipe(cache, self._byte)
        sender = self.sending.serve()
        self.prefill = Engine(model(0), self.sending, chunk=CHUNK, sender=sender)
        self.receiver = self.decoding.connect(sender.address)
        self.decode = Engine(model(1), self.decoding, chunk=CHUNK, receiver=self.receiver)

    def run(self, ledgers: Ledgers, *, retract_after: int | None = None, seconds: float = 240.0) -> Outcome:
        """Serve all requests, decode asking and prefill computing, until every one has ended well.

        With ``retract_after`` each is taken off the device once when it has generated so many tokens, besides those that
        must give way.
        """
        outcome = Outcome(asked=set(ledgers.answers))
        requests = {request.id: request for request in ledgers.requests}
        for request in ledgers.requests:
            self.decode.submit(request)
        deadline = time.monotonic() + seconds
        with noting_retractions(self.decoding, outcome, self._byte):
            while self.decode.busy or self.prefill.busy:
                assert time.monotonic() < deadline, "no end"
                self.decode.step()
                for event in self.decode.events():
                    match event:
                        case AskedEvent():
                            self.prefill.submit(requests[event.request])
                        case ReceivedEvent():
                            outcome.moved.update(event.bytes_by_component)
                        case DoneEvent():
                            if event.tokens == ledgers.answers[event.request]:
                                outcome.right.add(event.request)
                        case FailedEvent():
                            raise event.exception()
                self._take_off(retract_after)
                # Prompts arrive faster than answers are finished, so that many requests grow at the same time.
                for _ in range(2 * ROWS):
                    self.prefill.step()
                for event in self.prefill.events():
                    if isinstance(event, FailedEvent):
                        raise event.exception()
        stats = self.decode.stats
        outcome.retractions, outcome.restored = stats.retractions, stats.resumed
        outcome.recomputed, outcome.saved = stats.recomputed, Counter(stats.bytes_saved)
        for cache in (self.sending, self.decoding):
            cache.check_integrity()
        return outcome

    def _take_off(self, after: int | None) -> None:
        scheduler = self.decode._scheduler
        for sequence in list(scheduler.running):
            if len(sequence.generated) == after and not sequence.retractions:
                scheduler.retract(sequence)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()


@contextmanager
def noting_retractions(cache: KVCache, outcome: Outcome, byte: int) -> Iterator[None]:
    """Note which requests are retracted; what they leave is wiped, so that none finds its own bytes where they were."""
    retract = cache.retract

    def noted(request_id: str, *arguments: Any, **named: Any) -> Any:
        outcome.retracted.add(request_id)
        handle = retract(request_id, *arguments, **named)
        wipe(cache, byte)
        return handle

    cache.retract = noted  # type: ignore[method-assign]
    try:
        yield
    finally:
        cache.retract = retract  # type: ignore[method-assign]
