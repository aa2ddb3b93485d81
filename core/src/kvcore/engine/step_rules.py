"""What a step of a cache must keep to before anything is planned: each rule raises, and changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.config import CacheConfig
from kvcore.engine.step import Step
from kvcore.errors import RequestError, StepTooLargeError
from kvcore.requests.manager import Manager

Rows = Sequence[tuple[str, int]]
"""``(request id, new tokens)``."""


def demand_no_step(step: Step | None) -> None:
    """RequestError while a step is open."""
    if step is not None:
        raise RequestError(
            "a step is open, and a cache has one at a time",
            step=step.plan.step,
            rows=[row.request for row in step.plan.rows],
            remedy="commit or abandon it first (KVCache.open_step); put requests that run together into one step",
        )


def demand_size(rows: Rows, config: CacheConfig) -> None:
    """StepTooLargeError for more rows or tokens than the cache was created for."""
    sizes = {"max_rows": len(rows), "max_tokens": sum([count for _, count in rows])}
    for key, size in sizes.items():
        limit = getattr(config, key)
        if size > limit:
            raise StepTooLargeError(
                "the step is larger than any step of this cache",
                key=f"cache.{key}",
                expected=f"at most {limit}",
                got=size,
                rows=len(rows),
                remedy="split it into several steps, or create the cache with a larger limit",
            )


def demand_length(rows: Rows, manager: Manager, longest: int) -> None:
    """RequestError for a row that is as long as the model accepts already; ``longest`` 0 is no limit."""
    for request_id, count in rows if longest else ():
        length = manager.get(request_id).length
        if count > 0 and length >= longest:
            raise RequestError(
                "the request is as long as the model accepts",
                request=request_id,
                length=length,
                max_length=longest,
                remedy="end it; a step may reach beyond that length, by its drafts, but not begin there",
            )
