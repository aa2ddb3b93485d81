"""One rank of an engine, a process of its own: ``python rank_child.py``. It obeys JSON lines on its stdin.

Every rank builds a :class:`KVCache` for its part of a model, and answers each command with one JSON line:

- ``{"do": "build", …}``: as which rank of which engine; an earlier cache is closed. ``{"do": "drop"}`` only closes it.
- ``{"do": "serve"}`` → ``{"address": …}``; ``{"do": "connect", "addresses": […]}``
- ``{"do": "prefill", "request", "tag", "tokens", "start", "stop", "last"}``: store rows that name their ids, offer them.
- ``{"do": "ask", "request", "tokens"}``; ``{"do": "events", "wait"}``: events as ``[type, error code or bytes]``.
- ``{"do": "speculate", "request", "tag", "drafted", "accepted"}``: store drafted tokens of which only the first ones are
  valid, and commit those.
- ``{"do": "retract", "request"}``, ``{"do": "resume"}``; ``{"do": "scribble", "tokens"}``: another request comes and goes.
- ``{"do": "check", "request", "tag", "tokens"}``: load every row and compare it with what its ids say.
- ``{"do": "stats"}``: units in use.

Values are chosen so that both formats keep them exactly: what comes back is compared bit by bit, and nothing here knows
how the formats round.
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

BLOCK = 32


def model(window: int) -> ModelSpec:
    """Full and windowed layers, heads of unlike widths, one of which 32 does not divide."""
    full = (TensorSpec("k", 2, 80), TensorSpec("v", 2, 64))
    swa = (TensorSpec("k", 2, 64), TensorSpec("v", 2, 32))
    return ModelSpec(
        "ranks",
        (
            LayerGroup("full", (0, 3), full, num_query_heads=8),
            LayerGroup("swa", (1, 2), swa, num_query_heads=8, space="window", space_options=(("window", window),)),
        ),
        "fp32",
    )


def rows(bits: int, tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
    """Values ``[T, H, D]`` by global ids alone: ± 1.mantissa × 2 ** exponent, the exponent another one in every block.

    Args:
        bits: bits of the mantissa.
    """
    token = torch.arange(start, stop).reshape(-1, 1, 1)
    head = torch.tensor(list(heads)).reshape(1, -1, 1)
    dim = torch.arange(tensor.head_dim).reshape(1, 1, -1)
    kind = ["k", "v"].index(tensor.name)
    of_row = tag * 131 + layer * 29 + kind * 17 + token * 7 + head * 11
    exponent = (of_row * 5 + dim // BLOCK * 3) % 13 - 6 - dim % 3
    step = 1 << bits
    mantissa = 1 + (of_row + dim * 5) % step / step
    sign = 1 - 2 * ((of_row + dim) % 2)
    return (sign * mantissa * 2.0**exponent).float()


class RankProcess:
    def __init__(self, setup: dict[str, Any]) -> None:
        config = load_config(
            None, {"plugins": ["mxfp8"], "cache.memory": "1MiB", "cache.max_requests": 4, **setup["config"]}
        )
        self.bits = 2 if config.cache.format.endswith("e5m2") else 3
        self.model = model(setup["window"])
        self.page = config.cache.page_size
        self.shard = Shard(setup["tp_rank"], setup["tp_size"], tuple(setup["layers"]))
        ranks = Ranks(setup["engine"], setup["rank"], setup["ranks"])
        self.cache = KVCache.create(self.model, config, load_plugins(config.plugins), shard=self.shard, ranks=ranks)
        for pool in self.cache.store.pools.values():
            for item in pool.layout.ranges:
                pool.fill(range(pool.first_unit(item.name) + 1, pool.end_unit(item.name)), 0xFF)
        self.cache.poison_freed = True
        self.side: Any = None
        self.retracted: Any = None

    def heads(self, tensor: TensorSpec) -> range:
        ids = self.shard.heads(tensor)
        return range(*ids[0]) if ids else range(tensor.num_heads)

    def rows(self, tag: int, layer: int, tensor: TensorSpec, start: int, stop: int) -> torch.Tensor:
        return rows(self.bits, tag, layer, tensor, self.heads(tensor), start, stop)

    def tensors(self) -> list[tuple[int, tuple[TensorSpec, ...]]]:
        """Layers of this rank, with what they store."""
        found = [(layer, name) for name, layout in self.cache.layouts.items() for layer in layout.layers]
        return [(layer, self.model.group(name).tensors) for layer, name in sorted(found)]

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
                step.store(layer, {t.name: self.rows(tag, layer, t, start, stop) for t in tensors})
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
                    error = getattr(event, "error", None)
                    what = error.code if error else dict(event.bytes_by_component)
                    found.append([type(event).__name__, event.request, what])
        return {"events": found}

    def speculate(self, request: str, tag: int, drafted: int, accepted: int) -> dict[str, Any]:
        """Rejected rows hold other values: they must not reach a byte. Their fresh slots still read as 0."""
        start = self.cache.length(request)
        valid = torch.arange(drafted) < accepted
        leaked = []
        with self.cache.begin([(request, drafted)]) as step:
            for layer, tensors in self.tensors():
                drafts = {}
                for tensor in tensors:
                    right = self.rows(tag, layer, tensor, start, start + drafted)
                    drafts[tensor.name] = torch.where(valid[:, None, None], right, right * -64)
                step.store(layer, drafts, valid=valid)
            for name, layout in self.cache.layouts.items():
                slots = step.batch(name).slots[accepted:drafted]
                for layer in layout.layers:
                    out = self.empty(name, len(slots))
                    step.load(layer, slots, out)
                    leaked += [[name, layer, tensor] for tensor, values in out.items() if bool(values.any())]
            step.commit(accepted=[accepted])
        return {"leaked": leaked, "length": self.cache.length(request)}

    def retract(self, request: str) -> dict[str, Any]:
        self.retracted = self.cache.retract(request)
        return {"recompute": self.retracted.recompute, "bytes": self.retracted.nbytes}

    def resume(self) -> dict[str, Any]:
        self.cache.resume(self.retracted)
        return {}

    def scribble(self, tokens: int) -> dict[str, Any]:
        self.cache.admit("scribble", tokens)
        with self.cache.begin([("scribble", tokens)]) as step:
            for layer, tensors in self.tensors():
                step.store(layer, {t.name: self.rows(99, layer, t, 0, tokens) for t in tensors})
            step.commit()
        self.cache.release("scribble")
        return {}

    def empty(self, group: str, count: int) -> dict[str, torch.Tensor]:
        tensors = self.model.group(group).tensors
        return {t.name: torch.full((count, len(self.heads(t)), t.head_dim), torch.nan) for t in tensors}

    def check(self, request: str, tag: int, tokens: int) -> dict[str, Any]:
        """The rows that the next token may attend to, of every layer and head of this rank."""
        compared = 0
        for name, layout in self.cache.layouts.items():
            (item,) = layout.ranges
            first = max(0, tokens + 1 - layout.space_of_range(item.name).option("window", tokens + 1))
            units = self.cache.units(request, name, item.name)
            at = torch.tensor([int(units[t // self.page]) * self.page + t % self.page for t in range(first, tokens)])
            for layer in layout.layers:
                out = self.empty(name, len(at))
                self.cache.store.load(layer, at, out)
                for tensor in self.model.group(name).tensors:
                    want = self.rows(tag, layer, tensor, first, tokens)
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
        return {
            "requests": len(self.cache.manager.requests),
            "free": {group: len(self.cache.manager.free_units(group, "pages")) for group in self.cache.layouts},
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
