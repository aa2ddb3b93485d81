"""One rank of an engine, a process of its own: ``python rank_child.py``. It obeys JSON lines on its stdin.

Every rank builds a :class:`KVCache` for its part of the model, and answers each command with one JSON line:

- ``{"do": "build", …}``: as which rank of which engine; an earlier cache is closed. ``{"do": "drop"}`` only closes it.
- ``{"do": "serve"}`` → ``{"address": …}``; ``{"do": "connect", "addresses": […]}``
- ``{"do": "prefill", "request", "tag", "tokens", "start", "stop", "last"}``: store rows that name their ids, offer them.
- ``{"do": "ask", "request", "tokens"}``; ``{"do": "events", "wait"}``: events as ``[type, error code]``.
- ``{"do": "check", "request", "tag", "tokens"}``: load every row and compare it with what its ids say.
- ``{"do": "stats"}``: bytes read, units in use.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from kvcore.cache import KVCache
from kvcore.config import load_config
from kvcore.errors import KVCoreError
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Ranks, Shard, TensorSpec

TENSORS = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
LATENT = (TensorSpec("latent", 1, 8, sharded=False), TensorSpec("rope", 1, 4, sharded=False))
MODEL = ModelSpec(
    "ranks",
    (
        LayerGroup("full", (0, 3), TENSORS, num_query_heads=8),
        LayerGroup("swa", (1, 4), TENSORS, num_query_heads=8, space="window", space_options=(("window", 8),)),
        LayerGroup("mla", (2,), LATENT, num_query_heads=8),
    ),
    "fp32",
)


def rows(tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
    """Values by global ids alone."""
    token = torch.arange(start, stop).reshape(-1, 1, 1)
    head = torch.tensor(list(heads)).reshape(1, -1, 1)
    dim = torch.arange(tensor.head_dim).reshape(1, 1, -1)
    kind = ["k", "v", "latent", "rope"].index(tensor.name)
    return (1 + tag * 1000 + layer * 100 + kind * 50 + token * 7 + head * 11 + dim * 3).float()


class RankProcess:
    def __init__(self, setup: dict[str, Any]) -> None:
        config = load_config(
            None, {"cache.page_size": 4, "cache.memory": "256KiB", "cache.max_requests": 4, **setup["config"]}
        )
        self.shard = Shard(setup["tp_rank"], setup["tp_size"], tuple(setup["layers"]))
        ranks = Ranks(setup["engine"], setup["rank"], setup["ranks"])
        self.cache = KVCache.create(MODEL, config, load_plugins(config.plugins), shard=self.shard, ranks=ranks)
        for pool in self.cache.store.pools.values():
            for item in pool.layout.ranges:
                pool.fill(range(pool.first_unit(item.name) + 1, pool.end_unit(item.name)), 0xFF)
        self.cache.poison_freed = True
        self.side: Any = None

    def heads(self, tensor: TensorSpec) -> range:
        ids = self.shard.heads(tensor)
        return range(*ids[0]) if ids else range(tensor.num_heads)

    def tensors(self) -> list[tuple[int, tuple[TensorSpec, ...]]]:
        """Layers of this rank, with what they store."""
        found = [(layer, name) for name, layout in self.cache.layouts.items() for layer in layout.layers]
        return [(layer, MODEL.group(name).tensors) for layer, name in sorted(found)]

    def serve(self) -> dict[str, Any]:
        self.side = self.cache.serve()
        return {"address": self.side.address}

    def connect(self, addresses: list[str]) -> dict[str, Any]:
        self.side = self.cache.connect(addresses)
        return {}

    def prefill(self, request: str, tag: int, tokens: int, start: int, stop: int, last: bool) -> dict[str, Any]:
        if start == 0:
            self.cache.admit(request, tokens)
            self.side.begin(request, tokens)
        self.side.chunk_starts(request, last=last)
        with self.cache.begin([(request, stop - start)]) as step:
            for layer, tensors in self.tensors():
                step.store(layer, {t.name: rows(tag, layer, t, self.heads(t), start, stop) for t in tensors})
            step.commit()
        self.side.offer(request, start, stop, last=last, engine_data=b"first" if last else b"")
        return {}

    def ask(self, request: str, tokens: int) -> dict[str, Any]:
        self.side.ask(request, tokens)
        return {}

    def events(self, wait: float) -> dict[str, Any]:
        deadline, found = time.monotonic() + wait, []
        while time.monotonic() < deadline and not found:
            self.side.wait_event(0.1)
            for event in self.side.events():
                if type(event).__name__ in ("ReceiveDone", "ReceiveFailed", "SendDone", "SendFailed"):
                    nbytes = sum(getattr(event, "bytes_by_component", {}).values())
                    error = getattr(event, "error", None)
                    found.append([type(event).__name__, event.request, error.code if error else nbytes])
        return {"events": found}

    def check(self, request: str, tag: int, tokens: int) -> dict[str, Any]:
        """The rows that the next token may attend to, of every layer and head of this rank."""
        compared = 0
        for name, layout in self.cache.layouts.items():
            (item,) = layout.ranges
            first = max(0, tokens + 1 - layout.space_of_range(item.name).option("window", tokens + 1))
            units = self.cache.units(request, name, item.name)
            at = torch.tensor([int(units[t // 4]) * 4 + t % 4 for t in range(first, tokens)])
            tensors = MODEL.group(name).tensors
            for layer in layout.layers:
                out = {t.name: torch.empty(len(at), len(self.heads(t)), t.head_dim) for t in tensors}
                self.cache.store.load(layer, at, out)
                for tensor in tensors:
                    want = rows(tag, layer, tensor, self.heads(tensor), first, tokens)
                    if not torch.equal(out[tensor.name], want):
                        return {"wrong": [name, layer, tensor.name]}
                    compared += want.numel()
        return {"compared": compared}

    def release(self, request: str) -> dict[str, Any]:
        self.cache.release(request)
        return {}

    def stats(self) -> dict[str, Any]:
        self.side.events()
        self.cache.check_integrity()
        side = self.side.stats()
        return {
            "read": side.bytes_read,
            "held": side.held_units,
            "requests": len(self.cache.manager.requests),
            "free": {f"{group}": len(self.cache.manager.free_units(group, "pages")) for group in self.cache.layouts},
        }


def main() -> None:
    torch.set_num_threads(1)
    rank: RankProcess | None = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            if do in ("build", "drop"):
                if rank is not None:
                    rank.cache.close()
                rank, answer = RankProcess(command) if do == "build" else None, {}
            else:
                answer = getattr(rank, do)(**command)
        except KVCoreError as error:
            answer = {"error": error.code, "message": str(error)}
        print(json.dumps(answer), flush=True)
    if rank is not None:
        rank.cache.close()


if __name__ == "__main__":
    main()
