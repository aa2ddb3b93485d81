"""Everything a cache consists of, resolved first and allocated last."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvcore.config import Config
from kvcore.contract import Backup, Format
from kvcore.engine.fitting import Holders, budgets, check_memory, formats_of
from kvcore.engine.links import check_transfer
from kvcore.engine.sizing import CapacityPlan, plan_capacity
from kvcore.layout import Layout
from kvcore.memory.store import Store
from kvcore.plugins import Registry
from kvcore.requests.manager import Manager
from kvcore.retraction.fit import check_backup, check_backup_size
from kvcore.retraction.retractor import Retractor
from kvcore.spec import ModelSpec, Shard


@dataclass(frozen=True)
class Parts:
    """What :func:`assemble` has built; fields as of :class:`kvcore.engine.cache.KVCache`."""

    layouts: dict[str, Layout]
    capacity: CapacityPlan
    holders: Holders
    manager: Manager
    store: Store
    retractor: Retractor


def assemble(
    model: ModelSpec,
    config: Config,
    registry: Registry,
    shard: Shard,
    formats: Format | Mapping[str, Format] | None,
) -> Parts:
    """Resolve everything, refuse what cannot work, then allocate. Errors as of :meth:`kvcore.engine.cache.KVCache.create`."""
    holders = Holders(model, formats_of(model, config.cache, registry, formats), registry, shard)
    layouts = holders.layouts(page_size=config.cache.page_size, arena=config.cache.arena)
    spaces = registry.index_spaces()
    holders.check(layouts, spaces)
    check_transfer(config, registry, layouts)
    capacity = plan_capacity(
        layouts,
        config.cache.memory,
        config.cache.max_requests,
        spaces=spaces,
        step_tokens=config.cache.max_tokens,
        step_rows=config.cache.max_rows,
        checkpoints=config.cache.checkpoints,
    )
    builders = registry.pool_builders()
    check_memory(builders, config.cache.device, capacity.allocated_bytes)
    backup: Backup | None = None
    if config.retraction.policy == "backup":
        backup = registry.backup(config.retraction.backend, **config.retraction.options)
        check_backup(backup, layouts)
    manager = Manager(budgets(layouts, capacity.units), spaces, max_requests=capacity.request_capacity)
    if backup is not None:
        check_backup_size(backup, layouts, spaces, manager.max_request_tokens)
    store = Store(
        holders.model,
        layouts,
        holders.formats,
        capacity.units,
        builders,
        registry.kernels(),
        device=config.cache.device,
        max_rows=config.cache.max_rows,
        max_tokens=config.cache.max_tokens,
        shard=shard,
        spaces=spaces,
    )
    try:
        retractor = Retractor(manager, store, backup, layouts, frozenset(holders.components))
    except BaseException:
        store.close()
        raise
    return Parts(layouts, capacity, holders, manager, store, retractor)
