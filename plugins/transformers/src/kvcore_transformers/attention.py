"""Attention that reads kvcore's pools, under the name ``kvcore_paged``, without touching a model's code.

A Hugging Face attention layer hands its ``kwargs`` to ``cache.update`` and passes the same dict on to the attention
function. :class:`PagedBatch` stores the layer's new keys and values and leaves a :class:`LayerContext` in that dict; the
registered function finds it and attends on the pools. So one forward pass serves a ragged batch: the new tokens of all
rows are packed into one sequence ``[1, T]`` and the step's plan says where each row begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvcore.cache import Step
from kvcore.contract import AttendParams
from kvcore.errors import RequestError, UnsupportedError

ATTENTION = "kvcore_paged"
"""Name of the attention implementation, for ``model.set_attn_implementation``."""

_CONTEXT = "kvcore"
# Arguments that change what attention computes; one that is not understood must not be passed over.
_REFUSED = ("position_bias", "softcap", "logits_soft_cap", "block_mask")


class LayerContext:
    """What the attention function needs to know: the step under way and the layer."""

    __slots__ = ("layer", "step")

    def __init__(self, step: Step, layer: int) -> None:
        self.step = step
        self.layer = layer


class PagedBatch(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one forward pass over packed rows: ``input_ids [1, T]``, ``position_ids [1, T]``.

    It holds no tensors; ``step`` does. The model must use the attention implementation ``kvcore_paged``.

    Args:
        step: the step under way; its rows are packed in batch order.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(layers=[])
        self._step = step

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, H, T, D]`` keys and values of a layer; hand the step to the attention function."""
        if kwargs is None:
            raise UnsupportedError(
                "the model does not pass its arguments to the cache, so attention cannot be told where to read",
                layer=layer_idx,
                remedy="use KVCoreCache with the model's own attention",
            )
        if key_states.shape[0] != 1:
            raise RequestError("a paged batch is packed into one sequence", expected=1, got=key_states.shape[0])
        rows = {"k": key_states[0].transpose(0, 1), "v": value_states[0].transpose(0, 1)}
        self._step.store(layer_idx, rows)
        kwargs[_CONTEXT] = LayerContext(self._step, layer_idx)
        return key_states, value_states

    # Positions are always given and masks are never made, so lengths are not read; the batch has no single one anyway.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """0: a ragged batch has no common length."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The packed tokens alone."""
        return query_length, 0

    @property
    def is_compileable(self) -> bool:
        """False."""
        return False


def kvcore_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: ``query [1, Hq, T, D]`` on the pools, result ``[1, T, Hq, Dv]``."""
    context = kwargs.get(_CONTEXT)
    if not isinstance(context, LayerContext):
        raise UnsupportedError(
            "attention 'kvcore_paged' was called without a paged batch",
            module=type(module).__name__,
            remedy="pass cache=PagedBatch(step), or choose another attention implementation",
        )
    _refuse_unknown(module, attention_mask, dropout, kwargs)
    queries = query[0].transpose(0, 1)
    out = torch.empty(*queries.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    context.step.attend(
        context.layer, queries, out, AttendParams(sm_scale=scale, window=sliding_window or None, sinks=s_aux)
    )
    return out[None], None


def _refuse_unknown(
    module: torch.nn.Module, mask: torch.Tensor | None, dropout: float, kwargs: Mapping[str, Any]
) -> None:
    given = [name for name in _REFUSED if kwargs.get(name) is not None]
    if mask is not None:
        given.append("attention_mask")
    if dropout:
        given.append("dropout")
    if given:
        raise UnsupportedError(
            "attention 'kvcore_paged' does not know these arguments", module=type(module).__name__, arguments=given
        )


def register() -> None:
    """Make ``kvcore_paged`` known to transformers. Idempotent."""
    AttentionInterface.register(ATTENTION, kvcore_paged)


register()
