"""Small caches of the formats over poison, with the plugin's kernels or without, and values read out of raw bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ml_dtypes
import numpy as np
import torch

from kvcore.config import load_config
from kvcore.contract import Format, Kernel
from kvcore.engine.cache import KVCache
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore.testing.harness import Subject
from kvcore.testing.memory import Map

NUMPY = {"e4m3fn": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e8m0": ml_dtypes.float8_e8m0fnu}


class Without(Subject):
    """No kernels but those that serve any format."""

    def kernels(self) -> list[Kernel]:
        return [item for item in super().kernels() if item.formats == ("*",)]


def group(
    dims: tuple[int, int] = (80, 64), *, window: int = 0, heads: int = 2, layers: Sequence[int] = (0, 3)
) -> LayerGroup:
    tensors = (TensorSpec("k", heads, dims[0]), TensorSpec("v", heads, dims[1]))
    if window:
        return LayerGroup("swa", tuple(layers), tensors, 2 * heads, space="window", space_options=(("window", window),))
    return LayerGroup("full", tuple(layers), tensors, 2 * heads)


@contextmanager
def cache(
    fmt: Format, *groups: LayerGroup, page: int = 32, tuned: bool = True, shard: Shard | None = None, **settings: object
) -> Iterator[KVCache]:
    """A cache in which everything but null units and constants is 0xFF, and what is freed becomes it again."""
    base = load_plugins(("mxfp8",))
    registry = Subject(base, format=fmt) if tuned else Without(base, format=fmt)
    basic = {"cache.page_size": page, "cache.memory": "2MiB", "cache.max_tokens": 512, "cache.max_requests": 4}
    config = load_config(None, {**basic, **settings})
    with KVCache.create(ModelSpec("small", groups, "fp32"), config, registry, shard=shard) as made:
        made.poison_freed = True
        for item in groups:
            poison(made, item.prefix)
        yield made


def poison(made: KVCache, prefix: str) -> None:
    """Fill every unit that nobody owns."""
    pool = made.store.pools[prefix]
    pool.fill(made.manager.free_units(prefix, "pages"), 0xFF, pool.components_of("pages"))


def rows(
    item: LayerGroup, count: int, seed: int, *, heads: slice = slice(None), dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Random rows whose sizes differ by thousands from block to block."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for tensor in item.tensors:
        size = 2.0 ** torch.randint(-6, 7, (count, tensor.num_heads, tensor.head_dim // 16), generator=generator)
        values = torch.randn((count, tensor.num_heads, tensor.head_dim), generator=generator)
        made[tensor.name] = (values * size.repeat_interleave(16, -1))[:, heads].to(dtype)
    return made


def write(made: KVCache, name: str, count: int, seed: int, **options: Any) -> dict[int, dict[str, torch.Tensor]]:
    """One step of one request; returns what was stored, by layer."""
    stored = {}
    with made.begin([(name, count)]) as step:
        for item in made.model.groups:
            for layer in made.layouts[item.prefix].layers:
                stored[layer] = rows(item, count, seed * 100 + layer)
                step.store(layer, stored[layer], **options)
        step.commit()
    return stored


def slots(made: KVCache, name: str, prefix: str, tokens: Sequence[int]) -> torch.Tensor:
    units = made.units(name, prefix, "pages")
    page = made.config.cache.page_size
    return torch.tensor([int(units[t // page]) * page + t % page for t in tokens], dtype=torch.int64)


def load(
    made: KVCache, layer: int, item: LayerGroup, at: torch.Tensor, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Decoded rows, over NaN."""
    out = {t.name: torch.full((len(at), t.num_heads, t.head_dim), torch.nan, dtype=dtype) for t in item.tensors}
    made.store.load(layer, at, out).wait()
    return out


def raw(made: KVCache, layer: int, prefix: str, region: str, name: str, tokens: Sequence[int]) -> np.ndarray:
    """Stored bytes ``uint8 [tokens, heads, dim or blocks]``, by addresses worked out apart from kvcore's."""
    layout, pool = made.layouts[prefix], made.store.pools[prefix]
    places = Map(layout, {key: n for spans in pool.placement.ranges.values() for key, _, n in spans})
    (field,) = layout.region(region).data_fields
    units, page = made.units(name, prefix, "pages"), made.config.cache.page_size
    arena = pool.arena.array()
    parts = [arena[places.element(layer, region, field, int(units[t // page]), t % page)[..., 0]] for t in tokens]
    return np.stack(parts)


def read(made: KVCache, layer: int, prefix: str, tensor: str, name: str, tokens: Sequence[int]) -> np.ndarray:
    """fp64 ``[tokens, heads, dim]`` from raw bytes by ml_dtypes, without tensor scales."""
    (field,) = made.layouts[prefix].region(tensor).data_fields
    values = raw(made, layer, prefix, tensor, name, tokens).view(NUMPY[field.dtype]).astype(np.float64)
    scales = raw(made, layer, prefix, f"{tensor}_block_scale", name, tokens).view(NUMPY["e8m0"]).astype(np.float64)
    return values * np.repeat(scales, 32, axis=-1)[..., : values.shape[-1]]
