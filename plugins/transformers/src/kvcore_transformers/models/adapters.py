"""Hugging Face configurations to layer groups (no torch at import)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from kvcore.config import Config
from kvcore.contract import ModelAdapter
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore_transformers import PLUGIN
from kvcore_transformers.models.hf_config import compute_dtype, get, layer_types, optional, require

FULL_GROUP = "full"
"""Prefix of the group of layers that attend to the whole sequence."""

WINDOW_GROUP = "swa"
"""Prefix of the group of layers that attend to a sliding window."""

_MISSING = {
    "chunked_attention": "an index space of kind 'chunked'",
    "linear_attention": "a state component for the recurrent state",
    "conv": "a state component for the convolution state",
    "hybrid": "a state component for the convolution state",
    "hybrid_sliding": "a state component for the convolution state",
    "mamba": "a state component for the recurrent state",
}
# What configurations call the size of a state that is kept per request, in models that do not name their layers.
_STATE_KEYS = (
    "state_size",
    "ssm_state_size",
    "mamba_d_state",
    "mamba_d_ssm",
    "linear_conv_kernel_dim",
    "conv_kernel_size",
    "conv_L_cache",
    "lru_width",
)


def layers_of(types: Sequence[str], kind: str) -> tuple[int, ...]:
    """The layers of one type."""
    return tuple(layer for layer, found in enumerate(types) if found == kind)


def full_group(layers: tuple[int, ...], tensors: tuple[TensorSpec, ...], query_heads: int) -> LayerGroup:
    """Layers that attend to the whole sequence."""
    return LayerGroup(FULL_GROUP, layers, tensors, num_query_heads=query_heads)


def window_group(layers: tuple[int, ...], tensors: tuple[TensorSpec, ...], query_heads: int, window: int) -> LayerGroup:
    """Layers that attend to the last ``window`` tokens, the newest included."""
    options = (("window", window),)
    return LayerGroup(WINDOW_GROUP, layers, tensors, num_query_heads=query_heads, space="window", space_options=options)


def keys_and_values(heads: int, head_dim: int) -> tuple[TensorSpec, ...]:
    """A key and a value a head."""
    return tuple(TensorSpec(name, num_heads=heads, head_dim=head_dim) for name in ("k", "v"))


class AttentionAdapter(ModelAdapter):
    """Decoders whose layers attend to the whole sequence or to a sliding window of it, and store a key and a value a head.

    A subclass names the ``model_type`` values it covers; everything else is read from the configuration.
    """

    model_types: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    """What a ``config.json`` must say for it to be read as it is; the defaults for the rest are in this module."""
    kinds: ClassVar[tuple[str, ...]] = ("full_attention", "sliding_attention")
    """Layer types it knows, in the words of Hugging Face."""

    def matches(self, config: Any) -> bool:
        """Whether ``config`` (a mapping or a ``PreTrainedConfig``) is of a covered type."""
        return get(config, "model_type") in self.model_types

    def spec(self, config: Any) -> ModelSpec:
        """Return the groups ``full`` and ``swa``, as far as the model has such layers, and what else :meth:`groups` adds.

        Raises:
            UnsupportedError: a layer is of another type; names model, layer, layer type and what is missing.
            ConfigError: a number the groups need is absent.
        """
        self.check(config)
        if "layer_types" in self.states and not get(config, "layer_types"):
            raise ConfigError(
                "the model's configuration does not name its layers, which are of several types",
                model=str(get(config, "model_type")),
                key="layer_types",
                remedy="load it with transformers, which fills in what a config.json leaves out, or name them",
            )
        types = layer_types(config)
        for layer, kind in enumerate(types):
            if kind not in self.kinds:
                raise _unknown_layer(config, layer, kind)
        return ModelSpec(
            name=str(get(config, "_name_or_path") or get(config, "model_type")),
            groups=self.groups(config, {kind: layers_of(types, kind) for kind in self.kinds}),
            dtype=compute_dtype(config),
            max_length=optional(config, "max_position_embeddings"),
        )

    def groups(self, config: Any, layers: Mapping[str, tuple[int, ...]]) -> tuple[LayerGroup, ...]:
        """The layer groups; ``layers`` has the layers of each of :attr:`kinds`."""
        tensors, query_heads = self.tensors(config), require(config, "num_attention_heads")
        groups = []
        if layers["full_attention"]:
            groups.append(full_group(layers["full_attention"], tensors, query_heads))
        if layers["sliding_attention"]:
            window = require(config, "sliding_window")
            groups.append(window_group(layers["sliding_attention"], tensors, query_heads, window))
        return tuple(groups)

    def check(self, config: Any) -> None:
        """Raise UnsupportedError for a setting that changes what a layer keeps or reads."""

    def tensors(self, config: Any) -> tuple[TensorSpec, ...]:
        """What each layer stores of a token."""
        query_heads = require(config, "num_attention_heads")
        kv_heads = get(config, "num_key_value_heads") or query_heads
        head_dim = get(config, "head_dim") or require(config, "hidden_size") // query_heads
        return keys_and_values(kv_heads, head_dim)


class LlamaAdapter(AttentionAdapter):
    """Llama and its relatives: SmolLM and SmolLM2 are published as Llama."""

    name = "llama"
    model_types = ("llama",)


class QwenAdapter(AttentionAdapter):
    """Qwen 2 and Qwen 3, dense."""

    name = "qwen"
    model_types = ("qwen2", "qwen3")
    states = (*AttentionAdapter.states, "num_key_value_heads", "head_dim", "use_sliding_window")


class MistralAdapter(AttentionAdapter):
    """Mistral, with or without a sliding window."""

    name = "mistral"
    model_types = ("mistral",)
    states = (*AttentionAdapter.states, "num_key_value_heads", "sliding_window", "max_position_embeddings")


class GemmaAdapter(AttentionAdapter):
    """Gemma 3, its language part: most layers slide, every sixth attends to the whole sequence."""

    name = "gemma3"
    model_types = ("gemma3_text",)
    states = (*AttentionAdapter.states, "num_key_value_heads", "head_dim", "sliding_window", "layer_types")

    def check(self, config: Any) -> None:
        """Refuse an encoder: its early tokens change when later ones come."""
        if get(config, "use_bidirectional_attention"):
            raise UnsupportedError(
                "the model attends to later tokens too, so nothing it computes can be kept",
                model=str(get(config, "model_type")),
                setting="use_bidirectional_attention",
            )


class DeepseekAdapter(AttentionAdapter):
    """DeepSeek-V3: a latent and a rotary key that all heads share, so every rank of tensor parallelism keeps both."""

    name = "deepseek"
    model_types = ("deepseek_v3",)
    states = (*AttentionAdapter.states, "kv_lora_rank", "qk_rope_head_dim")

    def tensors(self, config: Any) -> tuple[TensorSpec, ...]:
        """``latent`` and ``rope``, of different widths."""
        return (
            TensorSpec("latent", 1, require(config, "kv_lora_rank"), sharded=False),
            TensorSpec("rope", 1, require(config, "qk_rope_head_dim"), sharded=False),
        )


ADAPTERS: tuple[type[ModelAdapter], ...] = (LlamaAdapter, QwenAdapter, MistralAdapter, GemmaAdapter, DeepseekAdapter)


def enabled(config: Config) -> Registry:
    """Load the plugins a configuration names or needs, and this one."""
    if PLUGIN.name not in config.plugins:
        config = msgspec.structs.replace(config, plugins=(*config.plugins, PLUGIN.name))
    return load_plugins(config)


def adapter_for(registry: Registry, config: Any) -> ModelAdapter:
    """Return the adapter of a model.

    Raises:
        UnsupportedError: none knows it. Where it keeps a recurrent state, that says which kind of plugin is missing.
    """
    try:
        return registry.model_adapter(config)
    except UnsupportedError as error:
        state = _state_of(config)
        if state is None:
            error.fields["model"] = str(get(config, "model_type"))
            raise
        raise UnsupportedError(
            "this model keeps a state per request that no enabled plugin can hold",
            model=str(get(config, "model_type")),
            **state,
            remedy="enable a plugin with a model adapter and "
            f"{_MISSING.get(state.get('layer_type', ''), _MISSING['linear_attention'])}",
        ) from error


def _state_of(config: Any) -> dict[str, Any] | None:
    """Where a configuration speaks of a recurrent or convolution state; None if nowhere."""
    kinds = get(config, "layer_types") or ()
    for layer, kind in enumerate(kinds):
        if "state component" in _MISSING.get(str(kind), ""):
            return {"layer": layer, "layer_type": str(kind)}
    found = next((key for key in _STATE_KEYS if get(config, key)), None)
    return None if found is None else {"setting": found}


def _unknown_layer(config: Any, layer: int, kind: str) -> UnsupportedError:
    return UnsupportedError(
        "this model has a layer that no enabled plugin can hold",
        model=str(get(config, "model_type")),
        layer=layer,
        layer_type=kind,
        remedy=f"enable a plugin that provides {_MISSING.get(kind, 'this kind of layer')}",
    )
