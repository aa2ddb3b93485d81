"""One forward pass of a model that keeps states per request: convolutions, recurrences.

A convolution or a recurrence runs along the sequence, so rows cannot be packed into one: they stand in the batch axis,
``input_ids [R, T]``, with equally many new tokens each. The model is given the states of the rows' slots and gives back
what it made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from kvcore.contract import Fence
from kvcore.engine.cache import KVCache
from kvcore.engine.step import Step
from kvcore.errors import LayoutError, RequestError, UnsupportedError
from kvcore.spec import LayerGroup
from kvcore_transformers.modeling.attention import BiasRows, PagedBatch
from kvcore_transformers.modeling.bias_rows import BiasGeometry
from kvcore_transformers.models.hf_config import get
from kvcore_transformers.models.hybrids import bias_extents


def batch_of(
    step: Step, cache: KVCache, config: Any, on_layer: Callable[[int, Fence], None] | None = None
) -> PagedBatch:
    """The batch that a model of this configuration needs: rows apart where it keeps states, else packed."""
    if keeps_states(cache):
        return StateBatch(step, cache, config, on_layer)
    return PagedBatch(step, cache.model, on_layer)


def keeps_states(cache: KVCache) -> bool:
    """Whether a cache is of a model that needs a :class:`StateBatch`."""
    return any(group.kind == "state" for group in cache.model.groups)


def scales_by_position(config: Any) -> bool:
    """Whether a model's attention depends on positions themselves, so that rows of a step must be of one length."""
    return get(config, "log_scaling_n_floor") is not None


class StateBatch(PagedBatch):
    """The cache of one forward pass with rows apart: ``input_ids [R, T]``, ``position_ids [R, T]``.

    Args:
        step: the step under way; every row has T new tokens.
        cache: whose step it is.
        config: the model's configuration.
        on_layer: called with each layer, in the model's order, once the model has gone on to a later one, and with the
            fence of all its keys, values and states. The last layer is told of by :meth:`finish`.

    In a speculative step the states of convolutions are kept after every token, so that any number of them can be
    accepted.

    Raises:
        RequestError: rows with unlike numbers of new tokens; rows of unlike length where the model scales attention by
            position.
        UnsupportedError: a speculative step of several tokens with a recurrent state, which a model gives after the
            last token only.
    """

    packs_rows = False

    def __init__(
        self, step: Step, cache: KVCache, config: Any, on_layer: Callable[[int, Fence], None] | None = None
    ) -> None:
        super().__init__(step, cache.model, on_layer)
        rows = step.plan.rows
        counts = {row.count for row in rows}
        if len(counts) != 1:
            raise RequestError(
                "rows of a model with states need equally many new tokens",
                counts=sorted(counts),
                remedy="put a prompt's chunk into a step of its own, and single tokens into another",
            )
        self._cache = cache
        self._num_rows = len(rows)
        # Rows without a past are told apart from rows with a state of zeros: models choose their arithmetic by it.
        self._past = any(row.start for row in rows)
        self._extents = bias_extents(config)
        self._tokens = counts.pop()
        self._geometry = BiasGeometry([row.start for row in rows], self._tokens, absolute=scales_by_position(config))
        states = [group for group in cache.model.groups if group.kind == "state"]
        # The state after every token is asked for, not only the one after the last.
        self._trail = any(len(part.trail) for part in step.plan.ranges)
        if self._trail and self._tokens > 1:
            _refuse_recurrent(states, self._tokens)
        self._state_groups: dict[int, LayerGroup] = {layer: group for group in states for layer in group.layers}
        self._read: dict[tuple[int, str], torch.Tensor] = {}
        self._layer: int | None = None

    # --- states ---

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """The last inputs of a convolution ``[R, C, K - 1]``, a copy; None where no row has a past."""
        return self._state(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """A recurrent state ``[R, *axes]``, a copy; None where no row has a past."""
        return self._state(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keep the last inputs of ``[R, C, T]``; return them with what came before, ``[R, C, K - 1 + T]``.

        Without a past, the inputs alone are returned: a model pads its convolution itself.
        """
        group, name = self._named(layer_idx, "conv", state_idx)
        taps = dict(next(item for item in group.states if item.name == name).axes)["tap"]
        if conv_kernel_size is not None and conv_kernel_size != taps + 1:
            raise LayoutError(
                "the convolution is not as long as the cache was made for",
                layer=layer_idx,
                state=name,
                expected=taps + 1,
                got=conv_kernel_size,
            )
        if not taps:  # nothing to look back to: the state is empty and has no bytes
            return conv_states
        past = self._state(layer_idx, "conv", state_idx)
        whole = conv_states if past is None else torch.cat([past, conv_states], dim=-1)
        missing = taps + self._tokens - whole.shape[-1]
        padded = pad(whole, (missing, 0)) if missing > 0 else whole
        if self._trail:
            self._write_trail(group, layer_idx, name, padded.unfold(-1, taps, 1)[:, :, 1:].transpose(1, 2))
        else:
            self._write(group, layer_idx, name, padded[..., -taps:])
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Keep a recurrent state ``[R, *axes]``."""
        group, name = self._named(layer_idx, "recurrent", state_idx)
        self._write(group, layer_idx, name, recurrent_states)
        return recurrent_states

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether any row has a past."""
        return self._past

    def is_recording_past(self, layer_idx: int) -> bool:
        """True: so a model hands every input to :meth:`update_conv_state`.

        Otherwise it would change the tensor that :meth:`get_conv_state` returned, in place, when a step has one token a
        row. That tensor is a copy of the slots, and what was written to it would be lost without a sound.
        """
        return True

    def _named(self, layer: int, kind: str, index: int) -> tuple[LayerGroup, str]:
        """The state that the model calls the ``index``-th of a kind, and its group."""
        self._reach(layer)
        group = self._state_groups.get(layer)
        names = [] if group is None else [item.name for item in group.states if item.kind == kind]
        if group is None or index >= len(names):
            raise UnsupportedError(
                "the model keeps a state that the cache was not made for",
                layer=layer,
                kind=kind,
                index=index,
                known=names,
                remedy="make the cache with the adapter of this model",
            )
        return group, names[index]

    def _state(self, layer: int, kind: str, index: int) -> torch.Tensor | None:
        group, name = self._named(layer, kind, index)
        if not self._past:
            return None
        if (layer, name) not in self._read:
            field = self._field(group, layer, name)
            # A row that was cut off from its slot has the null slot's zeros.
            slots = self._step.state_slots(group.prefix).clamp(min=0)
            self._read[layer, name] = field[slots]
        return self._read[layer, name]

    def _write(self, group: LayerGroup, layer: int, name: str, value: torch.Tensor) -> None:
        self._scatter(group, layer, name, value, self._step.state_slots(group.prefix))

    def _write_trail(self, group: LayerGroup, layer: int, name: str, values: torch.Tensor) -> None:
        """Keep the state after each token, ``[R, T, *axes]``, where that is asked for."""
        trail = self._step.state_trail(group.prefix).view(self._num_rows, self._tokens)
        self._scatter(group, layer, name, values, trail)

    def _scatter(self, group: LayerGroup, layer: int, name: str, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Write ``[*slots.shape, *axes]``; −1 drops: a released request's slot may be another's."""
        field = self._field(group, layer, name)
        expected = (*slots.shape, *field.shape[1:])
        if values.dtype != field.dtype or values.shape != expected:
            raise LayoutError(
                "the state is not what the cache was made for",
                layer=layer,
                state=name,
                expected=f"{field.dtype} {list(expected)}",
                got=f"{values.dtype} {list(values.shape)}",
            )
        self._read.pop((layer, name), None)
        kept = slots >= 0
        field[slots[kept]] = values[kept]

    def _field(self, group: LayerGroup, layer: int, name: str) -> torch.Tensor:
        return self._cache.state(group.prefix).field(layer, name, "x")

    # --- attention ---

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Key positions that a position bias is computed for; masks are never made."""
        extent = self._extents.get(layer_idx)
        return (query_length, 0) if extent is None else (self._geometry.key_length(extent), 0)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Position of the first query that a position bias is computed for."""
        extent = self._extents.get(layer_idx)
        return 0 if extent is None else self._geometry.query_offset(extent)

    def _bias_rows(self, layer: int) -> BiasRows | None:
        extent = self._extents.get(layer)
        return None if extent is None else lambda bias: self._geometry.rows(bias, extent)

    def _begin_layer(self, layer: int, states: torch.Tensor) -> None:
        if states.shape[0] != self._num_rows:
            raise RequestError("the batch is not the rows of the step", expected=self._num_rows, got=states.shape[0])
        self._reach(layer)

    # --- which layers are complete ---

    def _stored_layer(self, layer: int, fence: Fence) -> None:
        """Nothing: states of the layer come after its keys and values."""

    def _reach(self, layer: int) -> None:
        """The model is at a layer: those before it are complete."""
        if layer == self._layer:
            return
        if self._layer is not None and layer < self._layer:
            raise UnsupportedError(
                "the model went back to an earlier layer, which was told of as complete", layer=layer, after=self._layer
            )
        self._complete()
        self._layer = layer

    def _complete(self) -> None:
        if self._layer is not None and self._on_layer is not None:
            # States are written without a fence of their own; the mark covers them, the keys and the values.
            self._on_layer(self._layer, self._cache.store.mark())

    def finish(self) -> None:
        """Tell of the last layer."""
        self._complete()
        self._layer = None


def _refuse_recurrent(groups: Sequence[LayerGroup], tokens: int) -> None:
    """Raise UnsupportedError where a state is known after the last of several tokens only."""
    for group in groups:
        for state in group.states:
            if state.kind != "conv":
                raise UnsupportedError(
                    "a model gives this state after the last token only, and a speculative step keeps it after each",
                    group=group.prefix,
                    state=state.name,
                    kind=state.kind,
                    tokens=tokens,
                    remedy="speculate one token at a time, or take a checkpoint and roll back to it",
                )
