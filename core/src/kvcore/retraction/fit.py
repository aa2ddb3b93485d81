"""Whether a backup backend fits a cache: asked when the cache is built, not by the first retraction (no torch)."""

from __future__ import annotations

from collections.abc import Mapping

from kvcore.contract import Backup, IndexSpace
from kvcore.errors import ConfigError
from kvcore.layout import Layout
from kvcore.log import get_logger
from kvcore.requests.ranges import moving_parts

log = get_logger("kvcore.retraction")


def check_backup(backup: Backup, layouts: Mapping[str, Layout]) -> None:
    """Refuse, at configuration, a backend that cannot carry a component."""
    for layout in layouts.values():
        for component in dict.fromkeys(region.component for region in layout.moving_regions):
            backup.carries(layout, component).require(
                "retraction backend cannot carry a component",
                backend=backup.name,
                component=component,
                format=layout.format,
                remedy='choose another retraction.backend or policy = "recompute"',
            )


def saved_bytes(layouts: Mapping[str, Layout], spaces: Mapping[str, IndexSpace], num_tokens: int) -> int:
    """Bytes a backend keeps for a request of ``num_tokens`` tokens, padding of units included."""
    total = 0
    for layout in layouts.values():
        placement = layout.place({item.name: 1 for item in layout.ranges})
        for item in layout.ranges:
            spec = layout.space(item.space)
            moving = sum(hi - lo for lo, hi in moving_parts(spaces[spec.kind], spec, num_tokens))
            holders = {region.name for region in layout.regions if item.name in region.ranges}
            total += moving * sum(buffer.unit_bytes for buffer in placement.buffers if buffer.region in holders)
    return total


def check_backup_size(
    backup: Backup, layouts: Mapping[str, Layout], spaces: Mapping[str, IndexSpace], max_tokens: int | None
) -> None:
    """Compare a bounded backend with the requests of a cache, at configuration.

    ConfigError where not even a request of one token fits. Where the longest request does not, a warning says which
    length does: shorter ones are saved, longer ones recomputed.
    """
    limit = backup.max_bytes
    if limit is None:
        return
    least = saved_bytes(layouts, spaces, 1)
    if least > limit:
        raise ConfigError(
            "retraction backend holds no request at all",
            backend=backup.name,
            needed=least,
            max_bytes=limit,
            remedy='give it more memory or choose retraction.policy = "recompute"',
        )
    if max_tokens is None or saved_bytes(layouts, spaces, max_tokens) <= limit:
        return
    lo, hi = 1, max_tokens  # lo fits, hi does not
    while hi - lo > 1:
        middle = (lo + hi) // 2
        lo, hi = (middle, hi) if saved_bytes(layouts, spaces, middle) <= limit else (lo, middle)
    log.warning(
        "retraction backend is smaller than the longest request; longer ones than it holds will be recomputed",
        backend=backup.name,
        max_bytes=limit,
        needed=saved_bytes(layouts, spaces, max_tokens),
        longest_request=max_tokens,
        longest_saved=lo,
    )
