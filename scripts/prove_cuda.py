"""Prove CUDA pools where there is a GPU: ``python scripts/prove_cuda.py [--device cuda:0] [--quick]``.

Every check prints a line; the exit code is 1 when any failed. ``--device cpu`` runs the same checks on CPU pools, so that
the script itself is tested where there is no GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kvcore.config import load_config
from kvcore.contract import AttendParams
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, SendDone, SendFailed
from kvcore.errors import UnsupportedError
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

FORMATS = ("fp32", "bf16", "fp16")
ARENAS = ("page_major", "layer_major")
DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEADS, DIM, QUERY_HEADS = 2, 64, 4
TOLERANCE = 2e-3
WAIT_S = 60.0


@dataclass(frozen=True)
class Setting:
    """How large the checks are, and where."""

    device: str
    layers: int
    tokens: int
    page_size: int = 16
    quick: bool = False

    @property
    def gpu(self) -> bool:
        """Whether the device is not the CPU."""
        return self.device != "cpu"

    @property
    def group(self) -> LayerGroup:
        """Grouped-query attention."""
        tensors = (TensorSpec("k", HEADS, DIM), TensorSpec("v", HEADS, DIM))
        return LayerGroup("full", tuple(range(self.layers)), tensors, num_query_heads=QUERY_HEADS)

    def sync(self) -> None:
        """Wait for the device."""
        if self.gpu:
            torch.cuda.synchronize(self.device)

    @contextmanager
    def cache(
        self, kv_format: str = "bf16", arena: str = "page_major", overrides: Mapping[str, object] | None = None
    ) -> Iterator[KVCache]:
        """A cache for three requests of ``tokens`` tokens."""
        row = self.layers * 2 * HEADS * DIM * DTYPE[kv_format].itemsize
        pages = 3 * -(-self.tokens // self.page_size) + 2
        config = load_config(
            None,
            {
                "cache.format": kv_format,
                "cache.arena": arena,
                "cache.device": self.device,
                "cache.page_size": self.page_size,
                "cache.memory": pages * self.page_size * row,
                "cache.max_tokens": self.tokens,
                **(overrides or {}),
            },
        )
        model = ModelSpec("prove", (self.group,), kv_format)
        with KVCache.create(model, config, load_plugins(config)) as cache:
            yield cache


def rows_of(
    setting: Setting, seed: int, layer: int, start: int, stop: int, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Rows of a request, the same in every process: made on the CPU, then moved."""
    made = {}
    for n, name in enumerate(("k", "v")):
        generator = torch.Generator().manual_seed(seed * 1000 + layer * 10 + n)
        values = torch.randn(setting.tokens, HEADS, DIM, generator=generator).to(dtype)
        made[name] = values[start:stop].to(setting.device)
    return made


def write(setting: Setting, cache: KVCache, request: str, seed: int, start: int, stop: int, dtype: torch.dtype) -> None:
    """Store tokens of a request in every layer. Nothing waits for the device."""
    with cache.begin([(request, stop - start)]) as step:
        for layer in range(setting.layers):
            step.store(layer, rows_of(setting, seed, layer, start, stop, dtype))
        step.commit()


def compare(setting: Setting, cache: KVCache, request: str, seed: int, dtype: torch.dtype) -> None:
    """Load every token of a request and compare it with what was made, bit for bit."""
    units = cache.units(request, "full", "pages")
    slots = torch.tensor(
        [int(units[t // setting.page_size]) * setting.page_size + t % setting.page_size for t in range(setting.tokens)]
    )
    for layer in range(setting.layers):
        want = rows_of(setting, seed, layer, 0, setting.tokens, dtype)
        out = {name: torch.full_like(values, float("nan")) for name, values in want.items()}
        cache.store.load(layer, slots, out).wait()
        for name, values in want.items():
            if not torch.equal(out[name], values):
                raise AssertionError(f"layer {layer}, {name}: not the values stored")


@contextmanager
def load(setting: Setting) -> Iterator[None]:
    """Keep the device busy, so that what is not ordered shows."""
    if setting.gpu:
        side = torch.randn(4096, 4096, device=setting.device)
        for _ in range(20):
            side = (side @ side).clamp(-1, 1)
    yield
    setting.sync()


# --- checks: each returns what to print, and raises where something is wrong ---


def pools(setting: Setting) -> str:
    """Zeroed, filled and zeroed again; the CPU is kept out where it cannot address them."""
    for kv_format in FORMATS:
        for arena in ARENAS:
            with setting.cache(kv_format, arena) as cache:
                pool = cache.store.pools["full"]
                raw = pool.arena.tensor()
                if raw.any():
                    raise AssertionError("an arena is not zeroed")
                pool.fill([1, 3], 0xFF)
                pool.zero([3])
                for layer in range(setting.layers):
                    for region in ("k", "v"):
                        units = pool.units(layer, region)
                        sums = units[:4].to(torch.int64).sum(1).tolist()
                        if sums != [0, 255 * units.shape[1], 0, 0]:
                            raise AssertionError(f"{kv_format} {arena}: units are {sums}")
                if setting.gpu:
                    try:
                        pool.arena.array()
                    except UnsupportedError:
                        continue
                    raise AssertionError("the CPU was given an address on the device")
    return f"{len(FORMATS) * len(ARENAS)} arenas"


def kernels(setting: Setting) -> str:
    """Store and load exactly; prefill and decode attention against a dense fp64 oracle."""
    worst = 0.0
    for kv_format in FORMATS:
        for arena in ARENAS:
            with setting.cache(kv_format, arena) as cache:
                worst = max(worst, _attend(setting, cache, DTYPE[kv_format]))
                compare(setting, cache, "r", 1, DTYPE[kv_format])
    return f"largest error of attention {worst:.1e}"


def _attend(setting: Setting, cache: KVCache, dtype: torch.dtype) -> float:
    cache.admit("r", setting.tokens)
    params = AttendParams(sm_scale=DIM**-0.5)
    worst = 0.0
    for start, stop in ((0, setting.tokens - 1), (setting.tokens - 1, setting.tokens)):
        with cache.begin([("r", stop - start)]) as step:
            for layer in range(setting.layers):
                step.store(layer, rows_of(setting, 1, layer, start, stop, dtype))
                generator = torch.Generator().manual_seed(layer)
                q = torch.randn(stop - start, QUERY_HEADS, DIM, generator=generator).to(setting.device, dtype)
                out = torch.full_like(q, float("nan"))
                step.attend(layer, q, out, params).wait()
                want = _dense(q, rows_of(setting, 1, layer, 0, stop, dtype), start)
                scale = float(want.abs().max())
                worst = max(worst, float((out.double().cpu() - want).abs().max()) / scale)
            step.commit()
    limit = max(TOLERANCE, 4 * torch.finfo(dtype).eps)
    if not worst <= limit:
        raise AssertionError(f"attention is off by {worst:.1e}, more than {limit:.1e}")
    return worst


def _dense(q: torch.Tensor, rows: dict[str, torch.Tensor], start: int) -> torch.Tensor:
    k, v = (rows[name].double().cpu().repeat_interleave(QUERY_HEADS // HEADS, 1) for name in ("k", "v"))
    scores = torch.einsum("nhd,lhd->hnl", q.double().cpu(), k) * DIM**-0.5
    visible = torch.arange(k.shape[0]) <= torch.arange(start, start + q.shape[0])[:, None]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), v)


def order(setting: Setting) -> str:
    """A copy out holds what was written before it was asked for, though the device is far behind."""
    with setting.cache("fp32") as cache:
        pool = cache.store.pools["full"]
        units = list(range(1, 1 + setting.tokens // setting.page_size))
        block = pool.block(pool.layout.components, units)
        host = np.zeros(block.nbytes, np.uint8)
        for n in range(1, 9):
            with load(setting):
                pool.fill(units, n)
                fence = pool.block(pool.layout.components, units).copy_out(host)
                fence.wait()
                if not (host == n).all():
                    raise AssertionError("a copy out overtook the writes before it")
                pool.block(pool.layout.components, units).copy_in(np.full(block.nbytes, 100 + n, np.uint8)).wait()
                if not (pool.units(0, "k")[units] == 100 + n).all():
                    raise AssertionError("a copy in had not landed when its fence was done")
    return f"8 rounds of {block.nbytes >> 10} KiB"


def retraction(setting: Setting) -> str:
    """Out and in again by both backends, other requests being written meanwhile, bit for bit."""
    for backend, options in (("host_tensor", {}), ("host_pool", {"size": 256 << 20})):
        for arena in ARENAS:
            overrides: dict[str, object] = {"retraction.backend": backend, "retraction.options": options}
            with setting.cache("bf16", arena, overrides) as cache:
                cache.admit("a", setting.tokens)
                write(setting, cache, "a", 1, 0, setting.tokens, torch.bfloat16)
                for n in range(3):
                    handle = cache.retract("a")
                    with load(setting):
                        cache.admit("b", setting.tokens)
                        write(setting, cache, "b", 10 + n, 0, setting.tokens, torch.bfloat16)
                        cache.resume(handle)
                    compare(setting, cache, "a", 1, torch.bfloat16)
                    compare(setting, cache, "b", 10 + n, torch.bfloat16)
                    cache.release("b")
                cache.check_integrity()
    return "2 backends, 2 arena orders, 3 rounds each"


def transfer(setting: Setting) -> str:
    """Prefill in another process, decode in this one, over ``shm``; equal and other arena orders."""
    moved, seconds = 0, 0.0
    for arena in ARENAS[1:] if setting.quick else ARENAS:
        command = [sys.executable, __file__, "--device", setting.device, "--serve"]
        command += ["--layers", str(setting.layers), "--tokens", str(setting.tokens)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            try:
                assert child.stdout is not None
                address = child.stdout.readline().strip()
                with setting.cache("bf16", arena) as cache:
                    began = time.perf_counter()
                    done = _pull(setting, cache, address)
                    seconds += time.perf_counter() - began
                    moved += sum(done.bytes_by_component.values())
                    compare(setting, cache, "r", 5, torch.bfloat16)
                if child.stdout.readline().strip() != "done":
                    raise AssertionError("the sender did not learn that its request arrived")
            finally:
                child.kill()
    return f"{moved >> 10} KiB in {seconds:.2f} s"


def _pull(setting: Setting, cache: KVCache, address: str) -> ReceiveDone:
    receiver = cache.connect(address)
    try:
        receiver.ask("r", setting.tokens)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            receiver.wait_event(0.1)
            for event in receiver.events():
                if isinstance(event, ReceiveFailed):
                    raise event.error
                if isinstance(event, ReceiveDone):
                    return event
    finally:
        receiver.close()
    raise AssertionError(f"no transfer within {WAIT_S} s")


def serve(setting: Setting) -> None:
    """The prefill process: compute in chunks, offer each as soon as its work is issued, say when all is pulled."""
    with setting.cache("bf16") as cache:
        sender = cache.serve()
        print(sender.address, flush=True)
        cache.admit("r", setting.tokens)
        sender.begin("r", setting.tokens)
        chunk = max(setting.page_size, setting.tokens // 4)
        for start in range(0, setting.tokens, chunk):
            stop = min(start + chunk, setting.tokens)
            with load(setting):
                write(setting, cache, "r", 5, start, stop, torch.bfloat16)
                sender.offer("r", start, stop, last=stop == setting.tokens)
        end = time.monotonic() + WAIT_S
        while time.monotonic() < end:
            sender.wait_event(0.1)
            for event in sender.events():
                if isinstance(event, SendFailed):
                    raise event.error
                if isinstance(event, SendDone):
                    print("done", flush=True)
                    sys.stdin.readline()  # until the other process has compared
                    return


def figures(setting: Setting) -> str:
    """Not checked: how fast units leave and return."""
    with setting.cache("bf16") as cache:
        pool = cache.store.pools["full"]
        units = np.random.default_rng(0).permutation(np.arange(1, pool.end_unit("pages")))
        block = pool.block(pool.layout.components, units)
        host = np.zeros(block.nbytes, np.uint8)
        unpin = pool.queue.pin(host) if pool.queue is not None else None
        rates = []
        for copy in (block.copy_out, block.copy_in):
            copy(host).wait()
            began = time.perf_counter()
            for _ in range(5):
                copy(host).wait()
            rates.append(5 * block.nbytes / (time.perf_counter() - began) / 1e9)
        began = time.perf_counter()
        for _ in range(100):
            pool.mark()
        mark = (time.perf_counter() - began) * 1e4
        if unpin is not None:
            unpin()
    return f"{block.nbytes >> 10} KiB shuffled: out {rates[0]:.1f}, in {rates[1]:.1f} GB/s; a mark {mark:.1f} µs"


CHECKS: tuple[Callable[[Setting], str], ...] = (pools, kernels, order, retraction, transfer, figures)


def main() -> int:
    """Run the checks and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--quick", action="store_true", help="2 layers, 64 tokens")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    layers, tokens = (2, 64) if given.quick else (given.layers, given.tokens)
    setting = Setting(given.device, layers, tokens, quick=given.quick)
    if given.serve:
        serve(setting)
        return 0
    name = torch.cuda.get_device_name(given.device) if setting.gpu and torch.cuda.is_available() else given.device
    print(f"torch {torch.__version__}, {name}, {setting.layers} layers, {setting.tokens} tokens", flush=True)
    failed = 0
    for check in CHECKS:
        began = time.perf_counter()
        try:
            line = f"ok    {check(setting)}"
        except Exception:  # noqa: BLE001 -- printed, and the exit code says so; the other checks still run
            failed += 1
            line = "WRONG " + traceback.format_exc().strip()
        print(f"{check.__name__:<12} {time.perf_counter() - began:6.1f} s  {line}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
