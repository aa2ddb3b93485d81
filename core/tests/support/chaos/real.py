"""Real processes with a cache of their own, told what to do over a pipe: they are killed, stopped, continued, restarted.

Both kinds answer every command with one message. What they receive, they check themselves, and say what they found.
"""

from __future__ import annotations

import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, ReceiveSide
from kvcore.errors import KVCoreError
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE, LAYERS = 4, (0, 1)
HEADS = (TensorSpec("k", 2, 16), TensorSpec("v", 2, 8))
MODEL = ModelSpec("toy", (LayerGroup("full", LAYERS, HEADS, num_query_heads=4),), "fp32")
CHUNK = 7
TIMES = {"transfer.heartbeat_s": 0.1, "transfer.peer_timeout_s": 4.0, "transfer.lease_s": 6.0,
         "transfer.ask_timeout_s": 6.0}  # fmt: skip

Prompt = tuple[str, int, int]
"""Request, number, length: every value that is stored names the number and the token."""


def _cache(**options: str) -> KVCache:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this process ends it
    torch.set_num_threads(1)
    config = load_config(None, {"cache.page_size": PAGE, "cache.memory": "256KiB", **TIMES, **options})
    cache = KVCache.create(MODEL, config, load_plugins(config))
    cache.store.pools["full"].arena.array()[:] = 0xFF
    cache.poison_freed = True
    return cache


def _rows(number: int, start: int, stop: int) -> dict[str, torch.Tensor]:
    tokens = torch.arange(start, stop, dtype=torch.float32).reshape(-1, 1, 1)
    return {t.name: (1000 * number + tokens).expand(-1, t.num_heads, t.head_dim).contiguous() for t in HEADS}


def _is_empty(cache: KVCache) -> bool:
    cache.check_integrity()
    return all(part.free == part.capacity for part in cache.stats().manager.ranges)


def prefill(pipe: Connection, address: str = "") -> None:
    """``serve PROMPTS``, ``settle``; the first message is the address, which is ``address`` where that is given."""
    with _cache(**({"transfer.bind": address} if address else {})) as cache:
        side = cache.serve()
        pipe.send(side.address)
        owed: set[str] = set()
        ended: list[str] = []

        def take_events() -> None:
            for event in side.events():
                owed.remove(event.request)
                ended.append(type(event).__name__)

        def chunk(request: str, number: int, start: int, stop: int, *, last: bool) -> None:
            side.chunk_starts(request, last=last)
            with cache.begin([(request, stop - start)]) as step:
                for layer in LAYERS:
                    step.store(layer, _rows(number, start, stop))
                step.commit()
            side.offer(request, start, stop, last=last, engine_data=str(number).encode() if last else b"")

        while True:
            command, *arguments = pipe.recv()
            if command == "serve":
                prompts: list[Prompt] = arguments[0]
                for request, _, length in prompts:
                    cache.admit(request, length)
                    side.begin(request, length)
                    owed.add(request)
                for start in range(0, max(length for *_, length in prompts), CHUNK):
                    for request, number, length in prompts:
                        take_events()
                        if start < length and request in owed:
                            try:
                                chunk(request, number, start, min(start + CHUNK, length), last=start + CHUNK >= length)
                            except KVCoreError as error:  # it has just failed
                                if error.code != "unknown_request":
                                    raise
                    time.sleep(0.002)
                pipe.send("served")
            elif command == "settle":
                deadline = time.monotonic() + 15
                while owed and time.monotonic() < deadline:
                    side.wait_event(0.1)
                    take_events()
                pipe.send((ended, sorted(owed), _is_empty(cache)))
                ended = []
            else:
                pipe.send("bye")
                return


def decode(pipe: Connection) -> None:
    """``connect ADDRESS``, ``ask PROMPTS``, ``settle``."""
    with _cache() as cache:
        side: ReceiveSide | None = None
        owed: dict[str, Prompt] = {}
        while True:
            command, *arguments = pipe.recv()
            if command == "connect":
                if side is not None:
                    side.close()
                side = cache.connect(arguments[0])
                pipe.send("connected")
            elif command == "ask":
                assert side is not None
                for prompt in arguments[0]:
                    try:
                        side.ask(prompt[0], prompt[2])
                    except KVCoreError as error:  # the sender is gone already
                        if error.code != "peer_lost":
                            raise
                    else:
                        owed[prompt[0]] = prompt
                pipe.send("asked")
            elif command == "settle":
                assert side is not None
                pipe.send((*_settle(cache, side, owed), _is_empty(cache)))
            else:
                pipe.send("bye")
                return


def _settle(cache: KVCache, side: ReceiveSide, owed: dict[str, Prompt]) -> tuple[list[str], list[str]]:
    deadline, ended = time.monotonic() + 15, []
    while owed and time.monotonic() < deadline:
        side.wait_event(0.1)
        for event in side.events():
            if isinstance(event, ReceiveDone | ReceiveFailed):
                prompt = owed.pop(event.request)
                ended.append(type(event).__name__)
                if isinstance(event, ReceiveDone):
                    right = _is_right(cache, prompt, event)
                    handle = cache.retract(event.request)
                    if not handle.recompute:
                        cache.resume(handle)
                        right = right and _is_right(cache, prompt, event)
                        ended.append("retracted and resumed")
                    if not right:
                        ended.append("wrong bytes")
                    cache.release(event.request)
    return ended, sorted(owed)


def _is_right(cache: KVCache, prompt: Prompt, event: ReceiveDone) -> bool:
    request, number, length = prompt
    if event.engine_data != str(number).encode() or cache.length(request) != length:
        return False
    tokens = torch.arange(length)
    slots = torch.from_numpy(cache.units(request, "full", "pages"))[tokens // PAGE] * PAGE + tokens % PAGE
    want = _rows(number, 0, length)
    for layer in LAYERS:
        out: dict[str, Any] = {t.name: torch.full((length, t.num_heads, t.head_dim), -1.0) for t in HEADS}
        cache.store.load(layer, slots, out)
        if not all(torch.equal(out[name], want[name]) for name in want):
            return False
    return True
