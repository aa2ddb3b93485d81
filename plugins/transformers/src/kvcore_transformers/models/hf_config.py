"""Reading Hugging Face configurations, as mappings (``config.json``) or as objects of transformers (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcore.errors import ConfigError, UnsupportedError
from kvcore.spec import MAX_LAYERS

_MOST = 2**31 - 1

_DTYPES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
_NAMES = {name: text for text, name in _DTYPES.items()}


def get(config: Any, key: str) -> Any:
    """The value of a key; None where the configuration does not say."""
    return config.get(key) if isinstance(config, Mapping) else getattr(config, key, None)


def require(config: Any, key: str, most: int = _MOST) -> int:
    """A number from 1 to ``most``. Raises ConfigError where there is none."""
    value = get(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError("the model's configuration lacks a number", key=key, got=value)
    return _at_most(key, value, most)


def _at_most(key: str, value: int, most: int) -> int:
    if value > most:
        raise ConfigError("the model's configuration has a number that no model has", key=key, got=value, most=most)
    return value


def check_layers(config: Any) -> int:
    """The layers a configuration names, 0 for none. Raises ConfigError for more than a model can have."""
    value = get(config, "num_hidden_layers")
    return _at_most("num_hidden_layers", value, MAX_LAYERS) if isinstance(value, int) else 0


def optional(config: Any, key: str) -> int:
    """A number of at least 0; 0 where the configuration does not say. Raises ConfigError where it says something else."""
    value = get(config, key)
    if value is None:
        return 0
    if not isinstance(value, int) or value < 0:
        raise ConfigError("the model's configuration has no number where one belongs", key=key, got=value)
    return value


def layer_types(config: Any) -> tuple[str, ...]:
    """Type of each layer, in the words of Hugging Face; models that do not say are judged by their window."""
    layers = require(config, "num_hidden_layers", MAX_LAYERS)
    named = get(config, "layer_types")
    if named:
        kinds = tuple(str(kind) for kind in named)[:layers]
        if len(kinds) != layers:
            raise ConfigError("layer_types does not name every layer", expected=layers, got=len(kinds))
        return kinds
    window = get(config, "sliding_window")
    # Qwen 2 writes a window down even where it is switched off.
    switched_on = get(config, "use_sliding_window")
    longest = optional(config, "max_position_embeddings")
    if window is None or switched_on is False or 0 < longest <= require(config, "sliding_window"):
        return ("full_attention",) * layers
    if switched_on:
        first = optional(config, "max_window_layers")
        return tuple("sliding_attention" if layer >= first else "full_attention" for layer in range(layers))
    return ("sliding_attention",) * layers


def compute_dtype(config: Any) -> str:
    """Name of the dtype a configuration says the model computes in; fp32 where it says nothing."""
    value = get(config, "dtype")
    if value is None and isinstance(config, Mapping):
        value = config.get("torch_dtype")  # the key older config.json files use; objects always have ``dtype``
    text = str(value or "float32").removeprefix("torch.")
    if text not in _DTYPES:
        raise UnsupportedError("the model computes in a dtype that is not known", dtype=text, known=sorted(_DTYPES))
    return _DTYPES[text]


class _Computed:
    """A configuration object that says another dtype; everything else is answered by the object."""

    def __init__(self, config: Any, dtype: str) -> None:
        self._config = config
        self.dtype = dtype

    def __getattr__(self, key: str) -> Any:
        return getattr(self._config, key)


def computed_in(config: Any, dtype: str) -> Any:
    """The configuration, saying that the model computes in ``dtype`` (``fp32``, ``bf16``, ``fp16``).

    A model that was loaded in another dtype than its file says keeps the states it computes in that dtype too.
    """
    name = _NAMES[dtype]
    if isinstance(config, Mapping):
        return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": name}
    return _Computed(config, name)
