"""Blocks over plain arrays, a copier that copies when the test says so, and a small cache with exact oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache as memoize
from typing import Any

import numpy as np
import torch

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.config import load_config
from kvcore.contract import DONE, Backup, Fence, UnitBlock
from kvcore.engine.cache import KVCache
from kvcore.plugins import Registry, load_plugins
from kvcore.retraction.retractor import RetractionHandle
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore.transfer.copier import Copier, Task

# --- backends alone ---


class Block(UnitBlock):
    """Units ``[n, bytes]`` of a plain array, copied out in two pieces as a layer-major arena would.

    ``fail`` makes its copies raise; without ``cuttable`` it is copied whole only.
    """

    def __init__(self, name: str, data: np.ndarray, *, cuttable: bool = True) -> None:
        self.group, self.components = "full", (name,)
        self.data, self.cuttable, self.fail = data, cuttable, False
        self.num_units, self.nbytes = len(data), data.nbytes
        self.before_copy: Callable[[], object] = lambda: None

    def _halves(self) -> tuple[np.ndarray, np.ndarray]:
        half = self.data.shape[1] // 3
        return self.data[:, :half], self.data[:, half:]

    def copy_out(self, dst: np.ndarray) -> Fence:
        assert dst.shape == (self.nbytes,)
        self.before_copy()
        if self.fail:
            raise RuntimeError("copy engine is gone")
        left, right = self._halves()
        dst[: left.size] = left.reshape(-1)
        dst[left.size :] = right.reshape(-1)
        return DONE

    def copy_in(self, src: np.ndarray) -> Fence:
        assert src.shape == (self.nbytes,)
        self.before_copy()
        if self.fail:
            raise RuntimeError("copy engine is gone")
        left, right = self._halves()
        left[...] = src[: left.size].reshape(left.shape)
        right[...] = src[left.size :].reshape(right.shape)
        return DONE

    def cut(self, first: int, count: int) -> UnitBlock | None:
        if not self.cuttable:
            return None
        assert 0 <= first < first + count <= self.num_units
        part = Block(self.components[0], self.data[first : first + count])
        part.fail, part.before_copy = self.fail, self.before_copy
        return part


Shapes = Sequence[tuple[int, int]]


def blocks(seed: int, shapes: Shapes = ((3, 16), (2, 8)), *, cuttable: bool = True) -> list[Block]:
    rng = np.random.default_rng(seed)
    return [
        Block(f"c{i}", rng.integers(0, 255, shape, dtype=np.uint8), cuttable=cuttable) for i, shape in enumerate(shapes)
    ]


def poisoned(like: Sequence[Block]) -> list[Block]:
    return [Block(b.components[0], np.full(b.data.shape, 0xFF, np.uint8), cuttable=b.cuttable) for b in like]


class LateCopier(Copier):
    """Copies nothing until it is told to."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def run(self, count: int | None = None) -> None:
        """Run the oldest ``count`` tasks, or all."""
        now, self.tasks = self.tasks[:count], self.tasks[len(self.tasks) if count is None else count :]
        for task in now:
            task.run()

    def close(self) -> None:
        now, self.tasks = self.tasks, []
        for task in now:
            task.cancel()


BACKENDS: dict[str, Callable[[], Backup]] = {
    "host_tensor": HostTensorBackup,
    "host_pool": lambda: HostPoolBackup(size="1MiB"),
    "host_pool inline": lambda: HostPoolBackup(size="1MiB", copier="inline"),
    "host_pool tiny blocks": lambda: fragmented(HostPoolBackup(size=12_000, block_size=20, copier="inline")),
}


def fragmented(pool: HostPoolBackup) -> HostPoolBackup:
    """Take every second block for good, so that no two free ones are neighbours."""
    pool._blocks.release(pool._blocks.allocate(pool._blocks.capacity)[::2])
    return pool


# --- a cache with a backend ---

PAGE = 4
MODEL = ModelSpec(
    name="two groups",
    dtype="fp32",
    groups=(
        LayerGroup("full", (0, 2), (TensorSpec("k", 2, 8), TensorSpec("v", 2, 4)), num_query_heads=4),
        LayerGroup("other", (1,), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), num_query_heads=2),
    ),
)
TENSORS = {layer: {t.name: t for t in group.tensors} for group in MODEL.groups for layer in group.layers}
PAGE_BYTES = PAGE * (2 * 2 * (8 + 4) + 1 * (8 + 8)) * 4
"""Data of one page in both groups: tokens · values · bytes."""

Rows = dict[tuple[int, str], torch.Tensor]


@memoize
def registry() -> Registry:
    """The built-in plugins, loaded once."""
    return load_plugins(())


class WithBackend:
    """The loaded registry with one backend replaced."""

    def __init__(self, backend: Backup) -> None:
        self._registry = registry()
        self._backend = backend

    def backup(self, name: str, /, **options: object) -> Backup:
        return self._backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


def build(backend: Backup | None = None, **overrides: object) -> KVCache:
    """A cache whose arenas are poisoned, with the configured backend or the one given."""
    config = load_config(None, {"cache.page_size": PAGE, "cache.memory": "32KiB", **overrides})
    plugins: Any = registry() if backend is None else WithBackend(backend)
    built = KVCache.create(MODEL, config, plugins)
    for pool in built.store.pools.values():
        pool.arena.array()[:] = 0xFF
    built.poison_freed = True
    return built


def write(cache: KVCache, request: str, count: int, seed: int) -> Rows:
    """Store ``count`` random tokens in every layer; returns what was stored."""
    generator = torch.Generator().manual_seed(seed)
    stored = {}
    with cache.begin([(request, count)]) as step:
        for layer, tensors in TENSORS.items():
            rows = {
                name: torch.randn(count, t.num_heads, t.head_dim, generator=generator) for name, t in tensors.items()
            }
            step.store(layer, rows)
            stored |= {(layer, name): rows[name] for name in rows}
        step.commit()
    return stored


def read(cache: KVCache, request: str) -> Rows:
    """All tokens of a request, gathered by its unit tables."""
    found = {}
    for group in MODEL.groups:
        units = torch.from_numpy(cache.units(request, group.prefix, "pages"))
        position = torch.arange(cache.length(request))
        slots = units[position // PAGE] * PAGE + position % PAGE
        for layer in group.layers:
            out = {name: torch.full((len(slots), t.num_heads, t.head_dim), 9.0) for name, t in TENSORS[layer].items()}
            cache.store.load(layer, slots, out)
            found |= {(layer, name): out[name] for name in out}
    return found


def same(found: Rows, stored: Rows) -> bool:
    return found.keys() == stored.keys() and all(torch.equal(found[key], stored[key]) for key in stored)


def raw(cache: KVCache, request: str) -> dict[str, np.ndarray]:
    """Every byte of a request's units, by group, read from the arena by arithmetic of its own."""
    found = {}
    for name, pool in cache.store.pools.items():
        arena = pool.arena.array()
        rows = [
            arena[b.base + u * b.unit_stride :][: b.unit_bytes]
            for u in cache.units(request, name, "pages").tolist()
            for b in pool.placement.buffers
        ]
        found[name] = np.concatenate(rows).copy()
    return found


def retract_one(cache: KVCache, length: int = 5) -> tuple[Rows, RetractionHandle]:
    cache.admit("r", length)
    stored = write(cache, "r", length, 1)
    return stored, cache.retract("r")


def free(cache: KVCache) -> list[int]:
    return [part.free for part in cache.stats().manager.ranges]


def quarantined(cache: KVCache) -> list[int]:
    return [part.quarantined for part in cache.stats().manager.ranges]


def assert_empty(cache: KVCache) -> None:
    cache.check_integrity()
    stats = cache.stats()
    assert free(cache) == [part.capacity for part in stats.manager.ranges]
    assert stats.backup_bytes == 0
    assert stats.retraction.copies_under_way == 0
