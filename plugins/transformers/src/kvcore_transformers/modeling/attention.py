"""Attention that reads kvcore's pools, under the name ``kvcore_paged``, without touching a model's code.

A Hugging Face attention layer hands its ``kwargs`` to ``cache.update`` and passes the same dict on to the attention
function. :class:`PagedBatch` stores the layer's new keys and values and leaves a :class:`LayerContext` in that dict; the
registered function finds it and attends on the pools. So one forward pass serves a ragged batch: the new tokens of all
rows are packed into one sequence ``[1, T]`` and the step's plan says where each row begins. Models with a state per
request need their rows apart: see :mod:`kvcore_transformers.modeling.state_batch`.

Latent attention (DeepSeek) expands what is stored to keys and values inside the model, out of a cache's reach. There
``update`` returns the stored latents of all rows, one row after the other, and the attention function attends row by row
over what the model made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate, pairwise
from typing import Any, ClassVar, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from kvcore.contract import AttendParams, Fence
from kvcore.engine.step import Step
from kvcore.errors import RequestError, UnsupportedError
from kvcore.spec import LayerGroup, ModelSpec

ATTENTION = "kvcore_paged"
"""Name of the attention implementation, for ``model.set_attn_implementation``."""

_CONTEXT = "kvcore"
# Arguments that change what attention computes; one that is not understood must not be passed over.
_REFUSED = ("position_bias", "softcap", "logits_soft_cap", "block_mask")

BiasRows = Callable[[torch.Tensor], torch.Tensor]
"""From a model's position bias ``[R, Hq, T, K]`` to the step's: ``[R * T, Hq, max length]`` by absolute key position."""


class Span(NamedTuple):
    """Where a row is among the packed queries, and among the keys of all rows."""

    queries: slice
    keys: slice


class LayerContext:
    """What the attention function needs to know: the step under way and the layer.

    With ``spans`` the keys and values it is given are those of all rows, expanded by the model, and it reads no pool.
    Without ``bias_rows`` a position bias is refused: its geometry is not known.
    """

    __slots__ = ("bias_rows", "layer", "spans", "step")

    def __init__(
        self, step: Step, layer: int, spans: tuple[Span, ...] | None = None, bias_rows: BiasRows | None = None
    ) -> None:
        self.step = step
        self.layer = layer
        self.spans = spans
        self.bias_rows = bias_rows


class PagedBatch(Cache):  # type: ignore[misc]  # transformers is not typed
    """The cache of one forward pass over packed rows: ``input_ids [1, T]``, ``position_ids [1, T]``.

    It holds no tensors; ``step`` does. The model must use the attention implementation ``kvcore_paged``.

    Args:
        step: the step under way; its rows are packed in batch order.
        model: the layer groups that the step's cache was made for.
        on_layer: called with each layer, in the model's order, and the fence of the store of its keys and values.

    Raises UnsupportedError for a model with states, which need rows apart.
    """

    packs_rows: ClassVar[bool] = True

    def __init__(self, step: Step, model: ModelSpec, on_layer: Callable[[int, Fence], None] | None = None) -> None:
        super().__init__(layers=[])
        states = [group.prefix for group in model.groups if group.kind == "state"]
        if states and self.packs_rows:
            raise UnsupportedError(
                "a model with states cannot have its rows packed: a state would run from one into the next",
                model=model.name,
                groups=states,
                remedy="use kvcore_transformers.modeling.state_batch.batch_of",
            )
        self._step = step
        self._on_layer = on_layer
        attention = (group for group in model.groups if group.kind == "attention")
        self._groups = {layer: group for group in attention for layer in group.layers}
        self._rows_of: dict[str, tuple[torch.Tensor, tuple[Span, ...]]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store ``[1, H, T, D]`` keys and values of a layer; hand the step to the attention function.

        Returns what it was given; of latent attention, the latents and rotary keys of all rows ``[1, 1, sum L, D]``.
        """
        if kwargs is None:
            raise UnsupportedError(
                "the model does not pass its arguments to the cache, so attention cannot be told where to read",
                layer=layer_idx,
                remedy="use KVCoreCache with the model's own attention",
            )
        self._begin_layer(layer_idx, key_states)
        group = self._groups[layer_idx]
        names = [item.name for item in group.tensors]
        given = {n: packed(x) for n, x in zip(names, (key_states, value_states), strict=True)}
        self._stored_layer(layer_idx, self._step.store(layer_idx, given))
        if "latent" not in given:
            kwargs[_CONTEXT] = LayerContext(self._step, layer_idx, bias_rows=self._bias_rows(layer_idx))
            return key_states, value_states
        slots, spans = self._everything(group)
        every = {n: rows.new_empty(len(slots), *rows.shape[1:]) for n, rows in given.items()}
        self._step.load(layer_idx, slots, every)
        kwargs[_CONTEXT] = LayerContext(self._step, layer_idx, spans)
        latent, rope = (every[name].transpose(0, 1)[None] for name in names)
        return latent, rope

    def finish(self) -> None:
        """The forward pass is through: tell of the last layer, where that was not done before."""

    def _begin_layer(self, layer: int, states: torch.Tensor) -> None:
        if states.shape[0] != 1:
            raise RequestError("a paged batch is packed into one sequence", expected=1, got=states.shape[0])

    def _stored_layer(self, layer: int, fence: Fence) -> None:
        if self._on_layer is not None:
            self._on_layer(layer, fence)

    def _bias_rows(self, layer: int) -> BiasRows | None:
        return None

    def _everything(self, group: LayerGroup) -> tuple[torch.Tensor, tuple[Span, ...]]:
        """Slots of every token of every row, and where each row is among them; the same for all layers of a group."""
        if group.prefix not in self._rows_of:
            plan = self._step.batch(group.prefix)
            where = [torch.arange(length, device=plan.page_table.device) for length in plan.host_lengths]
            slots = [
                plan.page_table[row, at // plan.page_size] * plan.page_size + at % plan.page_size
                for row, at in enumerate(where)
            ]
            bounds = [0, *accumulate(plan.host_lengths)]
            spans = tuple(
                Span(slice(*query), slice(*key))
                for query, key in zip(pairwise(plan.host_query_indptr), pairwise(bounds), strict=True)
            )
            self._rows_of[group.prefix] = torch.cat(slots), spans
        return self._rows_of[group.prefix]

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


def packed(states: torch.Tensor) -> torch.Tensor:
    """``[R, H, T, D]``, rows apart, to the step's tokens ``[R * T, H, D]`` in batch order."""
    return states.transpose(1, 2).flatten(0, 1)


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
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The registered attention function: ``query [R, Hq, T, D]`` on the pools, result ``[R, T, Hq, Dv]``.

    R is 1 where rows are packed into one sequence.
    """
    context = kwargs.get(_CONTEXT)
    if not isinstance(context, LayerContext):
        raise UnsupportedError(
            "attention 'kvcore_paged' was called without a paged batch",
            module=type(module).__name__,
            remedy="pass cache=PagedBatch(step, model), or choose another attention implementation",
        )
    bias = None
    if position_bias is not None:
        if context.bias_rows is None:
            kwargs["position_bias"] = position_bias
        else:
            bias = context.bias_rows(position_bias)
    _refuse_unknown(module, attention_mask, dropout, kwargs)
    queries = packed(query)
    out = torch.empty(*queries.shape[:2], value.shape[-1], dtype=query.dtype, device=query.device)
    result = out.view(query.shape[0], query.shape[2], *out.shape[1:])
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context.spans is not None:
        if sliding_window or s_aux is not None:
            raise UnsupportedError(
                "latent attention with a window or sinks is not known",
                module=type(module).__name__,
                layer=context.layer,
            )
        _attend_rows(context.spans, query, key, value, out, scale)
        return result, None
    params = AttendParams(sm_scale=scale, window=sliding_window or None, sinks=s_aux, position_bias=bias)
    context.step.attend(context.layer, queries, out, params)
    return result, None


def _attend_rows(
    spans: tuple[Span, ...],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    scale: float,
) -> None:
    """Causal attention of each row over its own keys: ``query [1, H, T, D]``, ``key``, ``value [1, H, sum L, D]``."""
    for span in spans:
        rows, keys = span.queries.stop - span.queries.start, span.keys.stop - span.keys.start
        # The row's last query sees every key.
        at = torch.arange(keys, device=query.device)
        mask = at <= at[keys - rows :, None] if rows > 1 else None
        attended = scaled_dot_product_attention(
            query[:, :, span.queries], key[:, :, span.keys], value[:, :, span.keys], attn_mask=mask, scale=scale
        )
        out[span.queries] = attended[0].transpose(0, 1)


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
