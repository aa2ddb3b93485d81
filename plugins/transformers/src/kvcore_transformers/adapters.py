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
"""Prefix of the layer group that every model here stores its layers in."""

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_MISSING = {
    "sliding_attention": "a format and an index space of kind 'window'",
    "chunked_attention": "an index space of kind 'chunked'",
    "linear_attention": "a state component for the recurrent state",
    "conv": "a state component for the convolution state",
    "hybrid": "a state component for the convolution state",
    "hybrid_sliding": "a state component and an index space of kind 'window'",
}


class FullAttentionAdapter(ModelAdapter):
    """Decoders whose layers all attend to the whole sequence and store a key and a value per head.

    A subclass names the ``model_type`` values it covers; everything else is read from the configuration.
    """

    model_types: ClassVar[tuple[str, ...]]

    def matches(self, config: Any) -> bool:
        """Whether ``config`` (a mapping or a ``PreTrainedConfig``) is of a covered type."""
        return _get(config, "model_type") in self.model_types

    def spec(self, config: Any) -> ModelSpec:
        """Return one group, ``full``, with tensors ``k`` and ``v``.

        Raises:
            UnsupportedError: a layer is not full attention; names model, layer, layer type and what is missing.
            ConfigError: a number the group needs is absent.
        """
        layers = _require(config, "num_hidden_layers")
        for layer, kind in enumerate(layer_types(config)):
            if kind != "full_attention":
                raise UnsupportedError(
                    "this model has a layer that no enabled plugin can hold",
                    model=str(_get(config, "model_type")),
                    layer=layer,
                    layer_type=kind,
                    remedy=f"enable a plugin that provides {_MISSING.get(kind, 'this kind of layer')}",
                )
        query_heads = _require(config, "num_attention_heads")
        kv_heads = _get(config, "num_key_value_heads") or query_heads
        head_dim = _get(config, "head_dim") or _require(config, "hidden_size") // query_heads
        tensors = tuple(TensorSpec(name, num_heads=kv_heads, head_dim=head_dim) for name in ("k", "v"))
        group = LayerGroup(
            FULL_GROUP, layers=tuple(range(layers)), tensors=tensors, num_query_heads=query_heads, kind="attention"
        )
        return ModelSpec(
            name=str(_get(config, "_name_or_path") or _get(config, "model_type")),
            groups=(group,),
            dtype=_dtype(config),
            max_length=_get(config, "max_position_embeddings") or 0,
        )


class LlamaAdapter(FullAttentionAdapter):
    """Llama and its relatives: SmolLM and SmolLM2 are published as Llama."""

    name = "llama"
    model_types = ("llama",)


class QwenAdapter(FullAttentionAdapter):
    """Qwen 2 and Qwen 3, dense."""

    name = "qwen"
    model_types = ("qwen2", "qwen3")


class MistralAdapter(FullAttentionAdapter):
    """Mistral without a sliding window."""

    name = "mistral"
    model_types = ("mistral",)


ADAPTERS: tuple[type[ModelAdapter], ...] = (LlamaAdapter, QwenAdapter, MistralAdapter)


def enabled(config: Config) -> Registry:
    """Load the plugins a configuration names or needs, and this one."""
    if PLUGIN.name not in config.plugins:
        config = msgspec.structs.replace(config, plugins=(*config.plugins, PLUGIN.name))
    return load_plugins(resolve_plugins(config))


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


def _dtype(config: Any) -> str:
    value = _get(config, "dtype")
    if value is None and isinstance(config, Mapping):
        value = config.get("torch_dtype")  # the key older config.json files use; objects always have ``dtype``
    text = str(value or "float32").removeprefix("torch.")
    if text not in _DTYPES:
        raise UnsupportedError("the model computes in a dtype that is not known", dtype=text, known=sorted(_DTYPES))
    return _DTYPES[text]
