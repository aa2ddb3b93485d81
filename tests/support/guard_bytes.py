"""A request's bytes, read from the pools field by field, where the page size and the window say that they are.

Nothing of what moves units is used: neither payloads, nor plans of reads, nor blocks of a backup.
"""

from __future__ import annotations

from typing import Any

import torch

from kvcore.engine.cache import KVCache

Key = tuple[str, int, str, str, int]
"""Component, layer, region, field, logical unit."""


def live_units(cache: KVCache, group: str, length: int) -> range:
    """Logical units of a group that the next token of a request of ``length`` tokens still reads."""
    spec = cache.model.group(group)
    if spec.kind == "state":
        return range(1)
    page = cache.config.cache.page_size
    seen = dict(spec.space_options).get("window", length + 1)
    return range(max(0, length - seen + 1) // page, -(-length // page))


def read(cache: KVCache, request: str, length: int) -> dict[Key, bytes]:
    """Every byte with meaning of a request of ``length`` tokens."""
    found: dict[Key, bytes] = {}
    for group, layout in cache.layouts.items():
        pool: Any = cache.store.pools[group]
        for region in layout.regions:
            for range_name in region.ranges:
                ids = cache.manager.units(request, group, range_name)
                for layer in layout.layers:
                    for field in region.fields:
                        values = pool.field(layer, region.name, field.name)
                        for unit in live_units(cache, group, length):
                            assert ids[unit] > 0, "a live unit has an id of its own"
                            one = values[int(ids[unit])].contiguous().view(torch.uint8)
                            found[region.component, layer, region.name, field.name, unit] = one.numpy().tobytes()
    return found


def differing(left: dict[Key, bytes], right: dict[Key, bytes]) -> set[Key]:
    """Where two readings differ. They must have read the same things."""
    assert set(left) == set(right)
    return {key for key in left if left[key] != right[key]}
