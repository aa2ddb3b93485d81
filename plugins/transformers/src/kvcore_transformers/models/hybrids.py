"""Models that keep a state per request beside keys and values: short convolutions, gated delta nets (no torch).

What a layer keeps is described as transformers computes it; a plugin with a state component holds it. The layers for
multi-token prediction that checkpoints of these models carry are left out: transformers does not run them in the causal
language model, so nothing of them is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.spec import LayerGroup, StatePart, StateSpec
from kvcore_transformers.models.adapters import (
    FULL_GROUP,
    WINDOW_GROUP,
    AttentionAdapter,
    full_group,
    keys_and_values,
    window_group,
)
from kvcore_transformers.models.hf_config import compute_dtype, get, require

STATE_GROUP = "state"
"""Name of the group of what is kept per request; several unlike ones are called ``state_full``, ``state_swa``."""


class InklingAdapter(AttentionAdapter):
    """Inkling: full and sliding layers with head counts of their own, and four short convolutions in each layer.

    The convolutions run over the keys, the values, the result of attention and that of the MLP, in this order; all of
    them compute in fp32, whatever the model computes in.
    """

    name = "inkling"
    model_types = ("inkling_text",)
    states = (
        *AttentionAdapter.states,
        "num_key_value_heads",
        "head_dim",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "swa_head_dim",
        "sliding_window_size",
        "layer_types",
        "conv_kernel_size",
        "max_position_embeddings",
    )
    kinds = ("hybrid", "hybrid_sliding")

    def groups(self, config: Any, layers: Mapping[str, tuple[int, ...]]) -> tuple[LayerGroup, ...]:
        """``full``, ``swa``, and ``state``, or ``state_full`` and ``state_swa`` where their convolutions differ."""
        groups = []
        states: list[tuple[str, tuple[int, ...], tuple[StateSpec, ...]]] = []
        if found := layers["hybrid"]:
            heads, width = require(config, "num_key_value_heads"), require(config, "head_dim")
            groups.append(full_group(found, keys_and_values(heads, width), require(config, "num_attention_heads")))
            states.append((FULL_GROUP, found, self.convolutions(config, heads, width)))
        if found := layers["hybrid_sliding"]:
            heads, width = require(config, "swa_num_key_value_heads"), require(config, "swa_head_dim")
            query_heads, window = require(config, "swa_num_attention_heads"), require(config, "sliding_window_size")
            groups.append(window_group(found, keys_and_values(heads, width), query_heads, window))
            states.append((WINDOW_GROUP, found, self.convolutions(config, heads, width)))
        if len({kept for _, _, kept in states}) == 1:
            every = tuple(sorted(layer for _, found, _ in states for layer in found))
            return (*groups, _state_group(STATE_GROUP, every, states[0][2]))
        return (*groups, *(_state_group(f"{STATE_GROUP}_{name}", found, kept) for name, found, kept in states))

    def convolutions(self, config: Any, heads: int, width: int) -> tuple[StateSpec, ...]:
        """The states of a layer with ``heads`` KV heads of ``width``, in the order in which the model numbers them."""
        taps, hidden = _taps(config, "conv_kernel_size"), require(config, "hidden_size")
        part = (StatePart(heads, width),)
        return (
            StateSpec("conv_k", "conv", "fp32", (("channel", heads * width), ("tap", taps)), "channel", part),
            StateSpec("conv_v", "conv", "fp32", (("channel", heads * width), ("tap", taps)), "channel", part),
            StateSpec("conv_attn", "conv", "fp32", (("channel", hidden), ("tap", taps))),
            StateSpec("conv_mlp", "conv", "fp32", (("channel", hidden), ("tap", taps))),
        )


class QwenNextAdapter(AttentionAdapter):
    """Qwen3-Next: gated delta nets, each with a convolution over queries, keys and values, and full attention between.

    The recurrent state is a matrix of key by value dimension a head, in fp32; the convolution keeps what it is given, in
    the dtype the model computes in.
    """

    name = "qwen3_next"
    model_types = ("qwen3_next",)
    states = (
        *AttentionAdapter.states,
        "num_key_value_heads",
        "head_dim",
        "layer_types",
        "linear_conv_kernel_dim",
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "max_position_embeddings",
    )
    kinds = ("full_attention", "linear_attention")

    def groups(self, config: Any, layers: Mapping[str, tuple[int, ...]]) -> tuple[LayerGroup, ...]:
        """``full`` and ``state``, as far as the model has such layers."""
        groups = []
        if found := layers["full_attention"]:
            groups.append(full_group(found, self.tensors(config), require(config, "num_attention_heads")))
        if found := layers["linear_attention"]:
            groups.append(_state_group(STATE_GROUP, found, self.delta_net(config)))
        return tuple(groups)

    def delta_net(self, config: Any) -> tuple[StateSpec, ...]:
        """The states of a linear layer. Keys are repeated for the value heads that share them, so states are by value head."""
        keys, key_dim = require(config, "linear_num_key_heads"), require(config, "linear_key_head_dim")
        values, value_dim = require(config, "linear_num_value_heads"), require(config, "linear_value_head_dim")
        channels = 2 * keys * key_dim + values * value_dim
        return (
            StateSpec(
                "conv",
                "conv",
                compute_dtype(config),
                (("channel", channels), ("tap", _taps(config, "linear_conv_kernel_dim"))),
                "channel",
                (StatePart(keys, key_dim), StatePart(keys, key_dim), StatePart(values, value_dim)),
            ),
            StateSpec(
                "recurrent",
                "recurrent",
                "fp32",
                (("head", values), ("dim", key_dim), ("state", value_dim)),
                "head",
                (StatePart(values),),
            ),
        )


HYBRIDS: tuple[type[AttentionAdapter], ...] = (InklingAdapter, QwenNextAdapter)


def _taps(config: Any, key: str) -> int:
    """Inputs a convolution looks back to. Raises UnsupportedError where that is none: there is no state to be held."""
    taps = require(config, key) - 1
    if not taps:
        raise UnsupportedError(
            "a convolution of one tap looks back to nothing, so the model has no such state",
            model=str(get(config, "model_type")),
            setting=key,
        )
    return taps


def _state_group(name: str, layers: tuple[int, ...], states: tuple[StateSpec, ...]) -> LayerGroup:
    return LayerGroup(name, layers, (), kind="state", space="per_request", states=states)


def bias_extents(config: Any) -> dict[int, int]:
    """By layer, the distance from which on a model's relative position bias is zero; empty for models without one.

    Raises ConfigError where the model has such a bias and does not say how far it reaches.
    """
    if get(config, "model_type") not in InklingAdapter.model_types:
        return {}
    extents = {"hybrid": require(config, "rel_extent"), "hybrid_sliding": require(config, "sliding_window_size")}
    kinds = get(config, "layer_types")
    if not kinds:
        raise ConfigError("the model's configuration does not name its layers", key="layer_types", got=kinds)
    return {layer: extents[kind] for layer, kind in enumerate(kinds)}
