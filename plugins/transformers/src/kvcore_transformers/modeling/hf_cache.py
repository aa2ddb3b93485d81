"""``KVCoreCache``: a Hugging Face cache whose storage is a kvcore pool.

It goes into an unmodified ``model.generate(ids, cache=KVCoreCache(...))``. The layers hold no tensors of their own:
``update`` stores into the pools and returns what is stored, gathered densely, for the model's own attention. That reads
every stored token each step; the engine's decode path attends on the pools instead (:mod:`kvcore_transformers.modeling.attention`).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvcore.engine.cache import KVCache
from kvcore.engine.step import Step
from kvcore.errors import RequestError, UnsupportedError
from kvcore.spec import LayerGroup
from kvcore_transformers.modeling.shared_pools import SharedPools
from kvcore_transformers.models.loading import build_cache

_names = itertools.count()


class KVCoreLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is not typed
    """One layer as transformers sees it; everything is answered by the cache it belongs to."""

    is_compileable = False
    is_croppable = True
    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: KVCoreCache, layer: int) -> None:
        super().__init__()
        self._owner = owner
        self.layer = layer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the pools exist."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[B, H, T, D]`` and return all stored keys and values ``[B, H, L, D]``."""
        self.is_initialized = True
        return self._owner.update(key_states, value_states, self.layer)

    def get_seq_length(self) -> int:
        """Tokens this layer holds."""
        return self._owner.get_seq_length(self.layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what the next ``update`` returns."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Tokens a row can hold when it has the pool to itself."""
        capacity = self._owner.kvcache.token_capacity
        return -1 if capacity is None else capacity

    def reset(self) -> None:
        """Forget all tokens, of every layer: they share their units."""
        self._owner.reset()

    def _refuse(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{what} of a single layer is not possible: layers share their units",
            layer=self.layer,
            remedy=f"call {what} on the cache",
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: crop the cache."""
        raise self._refuse("crop")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Refused: reorder the cache."""
        raise self._refuse("reorder_cache")

    def offload(self) -> None:
        """Refused: kvcore owns the memory."""
        raise self._refuse("offload")

    def prefetch(self) -> None:
        """Refused: kvcore owns the memory."""
        raise self._refuse("prefetch")


class KVCoreCache(Cache):  # type: ignore[misc]  # transformers is not typed
    """A cache for ``generate`` over a batch of rows of equal length (padding included, as transformers does it).

    Rows are requests of ``kvcache``, so several caches, and an engine, may share one. ``crop``, ``reorder_cache``,
    ``batch_repeat_interleave`` and ``batch_select_indices`` are exact: rows fork, units are shared until written.

    ``copy.deepcopy`` forks too: the copy shares every page, however long the prefix, and is closed on its own; pools that
    :meth:`for_model` made are closed with the last of the copies. One that is dropped instead of closed gives its rows back at
    the next forward pass over the same pools. ``copy.copy`` and ``pickle`` are refused. One forward pass runs at a time over
    the same pools: a second one that begins within it is refused (RequestError).

    Args:
        kvcache: where rows are stored; it must have been made for the model's configuration.
        owned: close ``kvcache`` with this object.
    """

    def __init__(self, kvcache: KVCache, *, owned: bool = False) -> None:
        group, *others = kvcache.model.groups
        if others or group.kind != "attention" or group.space != "sequence" or len(group.tensors) != 2:
            raise UnsupportedError(
                "KVCoreCache holds models with one group of attention layers that keep the whole sequence",
                groups=[item.prefix for item in kvcache.model.groups],
                remedy="use kvcore_transformers.serving.engine.Engine, which serves windows and states too",
            )
        self._join(SharedPools(kvcache, owned=owned), group)
        super().__init__(layers=[KVCoreLayer(self, layer) for layer in group.layers])

    def _join(self, pools: SharedPools, group: LayerGroup) -> None:
        """Begin with no rows."""
        self.kvcache = pools.kvcache
        self._pools = pools
        pools.enter()
        # What transformers calls keys and values: for latent attention the latent and its rotary part.
        self._tensors = tuple(item.name for item in group.tensors)
        self._group: LayerGroup = group
        self._closed = False
        self._name = f"hf{next(_names)}"
        self._serial = itertools.count()
        self._rows: list[str] = []  # one list for good: it is what becomes an orphan
        weakref.finalize(self, pools.orphans.extend, self._rows).atexit = False
        self._selected_none = False
        self._length = 0
        self._pending = 0  # tokens of the step under way
        self._step: Step | None = None
        self._slots: torch.Tensor | None = None
        self._seen: set[int] = set()

    @classmethod
    def for_model(cls, model: Any, *, memory: int | str = "64MiB", **cache_options: Any) -> KVCoreCache:
        """Build a cache for a model, with pools of its own.

        Args:
            model: a Hugging Face model (its ``config`` and ``dtype`` are read).
            memory: bytes for the pools.
            cache_options: fields of :class:`kvcore.config.CacheConfig`; ``format`` defaults to the model's dtype, ``max_tokens``
                and ``max_rows`` (to 256) to what the pools hold, so that a batch that fits goes through in one pass.
        """
        return cls(build_cache(model, memory=memory, **cache_options), owned=True)

    # --- copies ---

    def __deepcopy__(self, memo: dict[int, Any]) -> KVCoreCache:
        """Fork every row. CapacityError where the pools count no more requests; RequestError within a forward pass."""
        self._require_no_step("copying")
        twin = type(self).__new__(type(self))
        twin._join(self._pools, self._group)
        Cache.__init__(twin, layers=[KVCoreLayer(twin, layer.layer) for layer in self.layers])
        try:
            twin._rows[:] = self._forked(range(len(self._rows)), twin)
        except BaseException:
            twin.close()
            raise
        twin._length, twin._selected_none = self._length, self._selected_none
        for mine, theirs in zip(self.layers, twin.layers, strict=True):
            theirs.is_initialized = mine.is_initialized
        memo[id(self)] = twin
        return twin

    def __copy__(self) -> NoReturn:
        raise UnsupportedError("a shallow copy would share its rows", kind="KVCoreCache", remedy="use copy.deepcopy")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UnsupportedError(
            "the bytes of a KVCoreCache are in its pools",
            kind="KVCoreCache",
            remedy="use copy.deepcopy in this process",
        )

    # --- what a forward pass calls ---

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[B, H, T, D]`` of a layer and return all of its keys and values ``[B, H, L + T, D]``.

        For latent attention these are latents and rotary keys, of different widths; the model expands what is returned.

        Raises CapacityError where the pool is full (the cache is as it was before the forward pass).
        """
        batch, _, tokens, _ = key_states.shape
        if self._selected_none and not batch:
            return key_states, value_states
        step = self._step_for(layer_idx, batch, tokens)
        rows = zip(self._tensors, (_tokens(key_states), _tokens(value_states)), strict=True)
        step.store(layer_idx, dict(rows))
        result = self._gather(step, layer_idx, key_states, value_states)
        self._seen.add(layer_idx)
        if len(self._seen) == len(self._group.layers):
            step.commit()
            self._length += self._pending
            self._close_step()
        return result

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens a layer holds; during a forward pass that is more for the layers already passed."""
        return self._length + (self._pending if layer_idx in self._seen else 0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of what the next ``update`` returns."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def _step_for(self, layer: int, batch: int, tokens: int) -> Step:
        if self._step is not None and layer in self._seen:
            raise RequestError(
                "a forward pass ended midway and left the cache without its last layers",
                layer=layer,
                seen=len(self._seen),
                expected=len(self._group.layers),
                remedy="call reset() and start again",
            )
        if self._step is None:
            self._open_step(batch, tokens)
        assert self._step is not None
        if (batch, tokens) != (len(self._rows), self._pending):
            raise RequestError(
                "layers of one forward pass differ in shape",
                expected=(len(self._rows), self._pending),
                got=(batch, tokens),
            )
        return self._step

    def _open_step(self, batch: int, tokens: int) -> None:
        self._pools.sweep()
        if batch != len(self._rows) and (self._rows or self._selected_none):
            raise RequestError("the batch has another size than the cache", expected=len(self._rows), got=batch)
        fresh = not self._rows
        if fresh:
            self._admit(batch, tokens)
        try:
            step = self.kvcache.begin([(row, tokens) for row in self._rows])
        except BaseException:
            if fresh:
                self._release_all()
            raise
        self._step, self._pending, self._seen = step, tokens, set()
        plan = step.batch(self._group.prefix)
        where = torch.arange(self._length + tokens, device=plan.page_table.device)
        units = plan.page_table[: len(self._rows), where // plan.page_size]
        self._slots = (units * plan.page_size + where % plan.page_size).reshape(-1)

    def _admit(self, batch: int, tokens: int) -> None:
        rows: list[str] = []
        try:
            for _ in range(batch):
                row = self._new_name()
                self.kvcache.admit(row, tokens)
                rows.append(row)
        except BaseException:
            self._release(rows)
            raise
        self._rows[:] = rows

    def _gather(
        self, step: Step, layer: int, key_states: torch.Tensor, value_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._slots is not None
        out = {}
        for name, like in zip(self._tensors, (key_states, value_states), strict=True):
            out[name] = torch.empty(
                len(self._slots), like.shape[1], like.shape[3], dtype=like.dtype, device=like.device
            )
        step.load(layer, self._slots, out)
        batch = len(self._rows)
        keys, values = (rows.view(batch, -1, *rows.shape[1:]).transpose(1, 2) for rows in out.values())
        return keys, values

    def _close_step(self) -> None:
        self._step, self._slots, self._pending, self._seen = None, None, 0, set()

    def _abandon_step(self) -> None:
        if self._step is not None:
            self._step.abandon()
            self._close_step()

    # --- what generate and its callers do to whole rows ---

    def reset(self) -> None:
        """Forget all tokens and give their units back."""
        self._abandon_step()
        self._length, self._selected_none = 0, False
        self._release_all()
        for layer in self.layers:
            layer.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens of every row; 0 is a no-op, more than there are empties the cache.

        Raises ValueError for a positive number, as transformers does.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes a negative number of tokens to remove, got {tokens_to_remove}")
        self._require_no_step("crop")
        if tokens_to_remove == 0 or not self._rows:
            return
        length = max(0, self._length + tokens_to_remove)
        if length == 0:
            self.reset()
            return
        for row in self._rows:
            self.kvcache.manager.truncate(row, length)
        self._length = length

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Row b becomes a copy of row ``beam_idx[b]`` (units are shared until one of them is written)."""
        self._select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times."""
        self._select([row for row in range(len(self._rows)) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows ``indices``, in that order; a boolean mask keeps the rows where it is True."""
        chosen = torch.arange(len(self._rows))[indices.to("cpu")] if self._rows else torch.tensor([], dtype=torch.long)
        self._select(chosen.tolist())

    def _select(self, indices: Sequence[int]) -> None:
        self._require_no_step("reordering rows")
        if not self._rows or list(indices) == list(range(len(self._rows))):
            return
        rows = self._forked(indices, self)
        old, self._rows[:] = list(self._rows), rows
        self._release(old)
        if not rows:  # transformers then has tensors of no rows: no tokens, and nothing but passes of no rows
            self._length, self._selected_none = 0, True

    def _forked(self, indices: Sequence[int], owner: KVCoreCache) -> list[str]:
        """Forks of rows, under names of ``owner``; all or none."""
        self._pools.sweep()
        rows: list[str] = []
        try:
            for index in indices:
                row = owner._new_name()
                self.kvcache.fork(self._rows[index], row, self._length)
                rows.append(row)
        except BaseException:
            self._release(rows)
            raise
        return rows

    def _require_no_step(self, what: str) -> None:
        if self._step is not None:
            raise RequestError(f"{what} is not possible within a forward pass", remedy="call reset() to abandon it")

    def _new_name(self) -> str:
        return f"{self._name}/{next(self._serial)}"

    def _release_all(self) -> None:
        rows, self._rows[:] = list(self._rows), []
        self._release(rows)

    def _release(self, rows: Sequence[str]) -> None:
        for row in rows:
            self.kvcache.release(row)

    @property
    def batch_size(self) -> int:
        """Rows held, −1 before the first forward pass."""
        return len(self._rows) or -1

    # --- end ---

    def close(self) -> None:
        """Give all rows back, and with the last copy the pools that :meth:`for_model` made. Idempotent."""
        if self._closed:
            return
        self.reset()
        self._closed = True
        self._pools.leave()

    def __enter__(self) -> KVCoreCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _tokens(states: torch.Tensor) -> torch.Tensor:
    """``[B, H, T, D]`` to the step's packed rows ``[B * T, H, D]``."""
    return states.transpose(1, 2).flatten(0, 1)
