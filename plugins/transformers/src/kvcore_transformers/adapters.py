"""Hugging Face configurations to layer groups (no torch at import)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from kvcore.config import Config
from kvcore.contract import ModelAdapter
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.plugins import load_plugins, resolve_plugins
from kvcore.registry import Registry
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore_transformers import PLUGIN

FULL_GROUP = "full"
"""Prefix of the group of layers that attend to the whole sequence."""

WINDOW_GROUP = "swa"
"""Prefix of the group of layers that attend to a sliding window."""

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
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


class AttentionAdapter(ModelAdapter):
    """Decoders whose layers attend to the whole sequence or to a sliding window of it, and store a key and a value a head.

    A subclass names the ``model_type`` values it covers; everything else is read from the configuration.
    """

    model_types: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]] = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    """What a ``config.json`` must say for it to be read as it is; the defaults for the rest are in this module."""

    def matches(self, config: Any) -> bool:
        """Whether ``config`` (a mapping or a ``PreTrainedConfig``) is of a covered type."""
        return _get(config, "model_type") in self.model_types

    def spec(self, config: Any) -> ModelSpec:
        """Return the groups ``full`` and ``swa``, as far as the model has such layers.

        Raises:
            UnsupportedError: a layer is of another type; names model, layer, layer type and what is missing.
            ConfigError: a number the groups need is absent.
        """
        self.check(config)
        kinds = layer_types(config)
        for layer, kind in enumerate(kinds):
            if kind not in ("full_attention", "sliding_attention"):
                raise _unknown_layer(config, layer, kind)
        full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
        sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
        tensors, query_heads = self.tensors(config), _require(config, "num_attention_heads")
        groups = []
        if full:
            groups.append(LayerGroup(FULL_GROUP, full, tensors, num_query_heads=query_heads))
        if sliding:
            options = (("window", _require(config, "sliding_window")),)
            groups.append(
                LayerGroup(
                    WINDOW_GROUP,
                    sliding,
                    tensors,
                    num_query_heads=query_heads,
                    space="window",
                    space_options=options,
                )
            )
        return ModelSpec(
            name=str(_get(config, "_name_or_path") or _get(config, "model_type")),
            groups=tuple(groups),
            dtype=compute_dtype(config),
            max_length=_get(config, "max_position_embeddings") or 0,
        )

    def check(self, config: Any) -> None:
        """Raise UnsupportedError for a setting that changes what a layer keeps or reads."""

    def tensors(self, config: Any) -> tuple[TensorSpec, ...]:
        """What each layer stores of a token."""
        query_heads = _require(config, "num_attention_heads")
        kv_heads = _get(config, "num_key_value_heads") or query_heads
        head_dim = _get(config, "head_dim") or _require(config, "hidden_size") // query_heads
        return tuple(TensorSpec(name, num_heads=kv_heads, head_dim=head_dim) for name in ("k", "v"))


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
        if _get(config, "use_bidirectional_attention"):
            raise UnsupportedError(
                "the model attends to later tokens too, so nothing it computes can be kept",
                model=str(_get(config, "model_type")),
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
            TensorSpec("latent", 1, _require(config, "kv_lora_rank"), sharded=False),
            TensorSpec("rope", 1, _require(config, "qk_rope_head_dim"), sharded=False),
        )


ADAPTERS: tuple[type[ModelAdapter], ...] = (LlamaAdapter, QwenAdapter, MistralAdapter, GemmaAdapter, DeepseekAdapter)


def enabled(config: Config) -> Registry:
    """Load the plugins a configuration names or needs, and this one."""
    if PLUGIN.name not in config.plugins:
        config = msgspec.structs.replace(config, plugins=(*config.plugins, PLUGIN.name))
    return load_plugins(resolve_plugins(config))


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
            error.fields["model"] = str(_get(config, "model_type"))
            raise
        raise UnsupportedError(
            "this model keeps a state per request that no enabled plugin can hold",
            model=str(_get(config, "model_type")),
            **state,
            remedy="enable a plugin with a model adapter and "
            f"{_MISSING.get(state.get('layer_type', ''), _MISSING['linear_attention'])}",
        ) from error


def _state_of(config: Any) -> dict[str, Any] | None:
    """Where a configuration speaks of a recurrent or convolution state; None if nowhere."""
    kinds = _get(config, "layer_types") or ()
    for layer, kind in enumerate(kinds):
        if "state component" in _MISSING.get(str(kind), ""):
            return {"layer": layer, "layer_type": str(kind)}
    found = next((key for key in _STATE_KEYS if _get(config, key)), None)
    return None if found is None else {"setting": found}


def _unknown_layer(config: Any, layer: int, kind: str) -> UnsupportedError:
    return UnsupportedError(
        "this model has a layer that no enabled plugin can hold",
        model=str(_get(config, "model_type")),
        layer=layer,
        layer_type=kind,
        remedy=f"enable a plugin that provides {_MISSING.get(kind, 'this kind of layer')}",
    )


def layer_types(config: Any) -> tuple[str, ...]:
    """Type of each layer, in the words of Hugging Face; models that do not say are judged by their window."""
    layers = _require(config, "num_hidden_layers")
    named = _get(config, "layer_types")
    if named:
        kinds = tuple(str(kind) for kind in named)[:layers]
        if len(kinds) != layers:
            raise ConfigError("layer_types does not name every layer", expected=layers, got=len(kinds))
        return kinds
    window = _get(config, "sliding_window")
    # Qwen 2 writes a window down even where it is switched off.
    switched_on = _get(config, "use_sliding_window")
    longest = _get(config, "max_position_embeddings") or 0
    if window is None or switched_on is False or 0 < longest <= window:
        return ("full_attention",) * layers
    if switched_on:
        first = _get(config, "max_window_layers") or 0
        return tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    return ("sliding_attention",) * layers


def _get(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def _require(config: Any, key: str) -> int:
    value = _get(config, key)
    if not isinstance(value, int) or value < 1:
        raise ConfigError("the model's configuration lacks a number", key=key, got=value)
    return value


def compute_dtype(config: Any) -> str:
    """Name of the dtype a configuration says the model computes in; fp32 where it says nothing."""
    value = _get(config, "dtype")
    if value is None and isinstance(config, Mapping):
        value = config.get("torch_dtype")  # the key older config.json files use; objects always have ``dtype``
    text = str(value or "float32").removeprefix("torch.")
    if text not in _DTYPES:
        raise UnsupportedError("the model computes in a dtype that is not known", dtype=text, known=sorted(_DTYPES))
    return _DTYPES[text]
