"""One rank of an engine as a process of its own, the other half of :mod:`kvcore.testing.ranks`.

It obeys JSON lines on its stdin, one command each, and answers each with one line. In its cache every unit is poisoned
with 0xFF before it is handed out and when it is given back.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, SendDone, SendFailed
from kvcore.engine.step import Step
from kvcore.errors import KVCoreError
from kvcore.plugins import load_plugins
from kvcore.spec import ModelSpec, Ranks, Shard, TensorSpec
from kvcore.testing.ranks import Answer


class Rank(ABC):
    """One rank: a cache for its part of a model. Every public method that returns an answer is a command.

    Attributes:
        plugins: plugins to enable.
        settings: configuration; an engine's own goes before it.
        options: what the engine gave its ranks besides.
    """

    plugins: ClassVar[tuple[str, ...]] = ()
    settings: ClassVar[Mapping[str, object]] = {}

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.options: Mapping[str, Any] = setup["options"]
        config = load_config(None, {"plugins": list(self.plugins), **self.settings, **setup["config"]})
        self.shard = Shard(setup["tp_rank"], setup["tp_size"], tuple(setup["layers"]))
        ranks = Ranks(setup["engine"], setup["rank"], setup["ranks"])
        registry = load_plugins(config)
        self.cache = KVCache.create(self.model(), config, registry, shard=self.shard, ranks=ranks)
        for pool in self.cache.store.pools.values():
            for item in pool.layout.ranges:
                units = range(pool.first_unit(item.name) + 1, pool.end_unit(item.name))
                pool.fill(units, 0xFF, pool.components_of(item.name))
        self.cache.poison_freed = True
        self.side: Any = None
        self.retracted: Any = None

    @abstractmethod
    def model(self) -> ModelSpec:
        """The whole model."""

    @abstractmethod
    def compute(self, step: Step, request: str, tag: int, start: int, stop: int) -> None:
        """What a forward pass of tokens ``[start, stop)`` of prompt ``tag`` writes on this rank."""

    @abstractmethod
    def check(self, request: str, tag: int, tokens: int) -> Answer:
        """Compare everything the next token needs: ``{"compared": elements}``, or ``{"wrong": where}``."""

    # --- commands ---

    def serve(self) -> Answer:
        """Offer requests to other engines."""
        self.side = self.cache.serve()
        return {"address": self.side.address}

    def connect(self, addresses: list[str]) -> Answer:
        """Pull requests from the ranks of another engine."""
        self.side = self.cache.connect(addresses)
        return {}

    def prefill(self, request: str, tag: int, tokens: int, start: int, stop: int, last: bool) -> Answer:
        """One chunk of a prompt: computed, committed and offered."""
        if start == 0:
            self.cache.admit(request, tokens)
            self.side.begin(request, tokens)
        self.side.chunk_starts(request, last=last)
        self.step(request, tag, start, stop)
        self.side.offer(request, start, stop, last=last, engine_data=b"first" if last else b"")
        return {}

    def ask(self, request: str, tokens: int) -> Answer:
        """Ask for a prompt."""
        self.side.ask(request, tokens)
        return {}

    def events(self, wait: float) -> Answer:
        """Final events within ``wait`` seconds: ``[type, request, error code or bytes by component]``."""
        deadline, found = time.monotonic() + wait, list[list[Any]]()
        while time.monotonic() < deadline and not found:
            self.side.wait_event(0.1)
            for event in self.side.events():
                if isinstance(event, ReceiveDone | SendDone):
                    found.append([type(event).__name__, event.request, dict(event.bytes_by_component)])
                elif isinstance(event, ReceiveFailed | SendFailed):
                    found.append([type(event).__name__, event.request, event.error.code])
        return {"events": found}

    def step(self, request: str, tag: int, start: int, stop: int) -> Answer:
        """Go on with a prompt, in one step."""
        with self.cache.begin([(request, stop - start)]) as step:
            self.compute(step, request, tag, start, stop)
            step.commit()
        return {"length": self.cache.length(request)}

    def retract(self, request: str) -> Answer:
        """Take a request off the device."""
        self.retracted = self.cache.retract(request)
        return {"recompute": self.retracted.recompute, "bytes": self.retracted.nbytes}

    def resume(self) -> Answer:
        """Bring it back."""
        self.cache.resume(self.retracted)
        return {}

    def scribble(self, tokens: int) -> Answer:
        """Another request comes, writes, and goes."""
        self.cache.admit("scribble", tokens)
        self.step("scribble", 99, 0, tokens)
        self.cache.release("scribble")
        return {}

    def release(self, request: str) -> Answer:
        """End a request."""
        self.cache.release(request)
        return {}

    def stats(self) -> Answer:
        """Bytes read, units held by the transfer, live requests, and free units of each group's first range."""
        self.side.events()
        self.cache.check_integrity()
        side, free = self.side.stats(), self.cache.manager.free_units
        return {
            "read": side.bytes_read,
            "held": side.held_units,
            "requests": len(self.cache.manager.requests),
            "free": {name: len(free(name, layout.ranges[0].name)) for name, layout in self.cache.layouts.items()},
        }


class RowsRank(Rank):
    """A rank of a model that stores tokens in pages: values that name their ids are stored, loaded and compared."""

    @abstractmethod
    def rows(self, tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
        """Values ``[T, H, D]`` of tokens ``[start, stop)`` by global ids alone, such as the format keeps exactly."""

    def mine(self, tag: int, layer: int, tensor: TensorSpec, start: int, stop: int) -> torch.Tensor:
        """The rows of this rank's heads."""
        return self.rows(tag, layer, tensor, self.heads(tensor), start, stop)

    def heads(self, tensor: TensorSpec) -> range:
        """Global heads on this rank."""
        ids = self.shard.heads(tensor)
        return range(*ids[0]) if ids else range(tensor.num_heads)

    def tensors(self) -> list[tuple[int, tuple[TensorSpec, ...]]]:
        """Layers of this rank, with what they store."""
        found = [(layer, name) for name, layout in self.cache.layouts.items() for layer in layout.layers]
        return [(layer, self.cache.model.group(name).tensors) for layer, name in sorted(found)]

    def empty(self, group: str, count: int) -> dict[str, torch.Tensor]:
        """Rows to load into, full of NaN."""
        tensors = self.cache.model.group(group).tensors
        return {t.name: torch.full((count, len(self.heads(t)), t.head_dim), torch.nan) for t in tensors}

    def compute(self, step: Step, request: str, tag: int, start: int, stop: int) -> None:
        """Store the rows of every layer."""
        for layer, tensors in self.tensors():
            step.store(layer, {tensor.name: self.mine(tag, layer, tensor, start, stop) for tensor in tensors})

    def check(self, request: str, tag: int, tokens: int) -> Answer:
        """The rows that the next token may attend to, of every layer and head of this rank."""
        compared, page = 0, self.cache.config.cache.page_size
        for name, layout in self.cache.layouts.items():
            (item,) = layout.ranges
            first = max(0, tokens + 1 - layout.space_of_range(item.name).option("window", tokens + 1))
            units = self.cache.units(request, name, item.name)
            at = torch.tensor([int(units[t // page]) * page + t % page for t in range(first, tokens)])
            for layer in layout.layers:
                out = self.empty(name, len(at))
                self.cache.store.load(layer, at, out)
                for tensor in self.cache.model.group(name).tensors:
                    want = self.mine(tag, layer, tensor, first, tokens)
                    if not torch.equal(out[tensor.name], want):
                        return {"wrong": [name, layer, tensor.name]}
                    compared += want.numel()
        return {"compared": compared}


def main(kind: type[Rank]) -> None:
    """Obey the commands on stdin until it ends: ``build`` and ``drop`` make and close a rank, the others are its methods."""
    torch.set_num_threads(1)
    rank: Rank | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            if do in ("build", "drop"):
                if rank is not None:
                    rank.cache.close()
                rank, answer = kind(command) if do == "build" else None, {}
            else:
                answer = getattr(rank, do)(**command)
        except KVCoreError as error:
            answer = {"error": error.code, "message": str(error)}
        print(json.dumps(answer), flush=True)
    if rank is not None:
        rank.cache.close()
