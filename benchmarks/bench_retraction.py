"""Retract and resume into host memory that was used before, against memcpy of the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.timing import Figure, figure, speed_ratio
from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

PAGE, LAYERS, HEADS, DIM = 16, 8, 2, 128  # 256 KiB a page of the whole group in fp32


def run() -> list[Figure]:
    """Time ``retract`` + ``resume`` of a 64 MiB request with each backend."""
    return [
        figure("retract + resume, host_tensor, recycled buffers", _round_trip_ratio("host_tensor"), at_least=0.5),
        figure("retract + resume, host_pool", _round_trip_ratio("host_pool", size="160MiB"), at_least=0.6),
    ]


def _round_trip_ratio(backend: str, **options: Any) -> float:
    heads = (TensorSpec("k", HEADS, DIM), TensorSpec("v", HEADS, DIM))
    group = LayerGroup(name="full", layers=tuple(range(LAYERS)), tensors=heads, num_query_heads=HEADS)
    model = ModelSpec(name="bench", dtype="fp32", groups=(group,))
    settings = {
        "cache.format": "fp32",
        "cache.page_size": PAGE,
        "cache.memory": "160MiB",
        "retraction.backend": backend,
        "retraction.options": options,
    }
    config = load_config(None, settings)
    with KVCache.create(model, config, load_plugins(config)) as cache:
        tokens = 256 * PAGE
        cache.manager.admit("r", tokens, external=True)
        cache.manager.set_length("r", tokens)
        handle = cache.retract("r")
        nbytes = handle.nbytes
        cache.resume(handle)

        def round_trip() -> None:
            cache.resume(cache.retract("r"))

        src, dst = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

        def memcpy_twice() -> None:
            np.copyto(dst, src)
            np.copyto(src, dst)

        ratio = speed_ratio(round_trip, memcpy_twice)
        cache.release("r")
    return ratio
