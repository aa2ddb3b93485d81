"""For tests: what a call frees is filled with 0xFF, so that a stale read shows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from kvcore.memory.store import Store
from kvcore.requests.manager import Manager


@contextmanager
def poisoning(manager: Manager, store: Store, request_id: str) -> Iterator[None]:
    """Fill what the block frees of a request. UnknownRequestError, before the block, where there is no such request."""
    manager.get(request_id)
    ranges = [(group, item.name) for group, pool in store.pools.items() for item in pool.layout.ranges]
    before = {key: manager.free_units(*key) for key in ranges}
    yield
    for (group, name), units in before.items():
        freed = np.setdiff1d(manager.free_units(group, name), units)
        pool = store.pools[group]
        pool.fill(freed, 0xFF, pool.components_of(name))
