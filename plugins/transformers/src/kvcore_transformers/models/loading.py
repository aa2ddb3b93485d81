"""From a local model directory to a model, its tokenizer and a cache made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors import SafetensorError

from kvcore.config import CacheConfig, Config, parse_bytes
from kvcore.engine.cache import KVCache
from kvcore.engine.fitting import Holders, formats_of
from kvcore.engine.sizing import plan_capacity
from kvcore.errors import ConfigError, UnsupportedError
from kvcore.layout import Layout
from kvcore.plugins.registry import Registry
from kvcore.spec import ModelSpec, Shard
from kvcore_transformers.models.adapters import adapter_for, enabled
from kvcore_transformers.models.hf_config import computed_in

DTYPES: dict[torch.dtype, str] = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Compute dtypes that have a plain format, by name."""

MOST_ROWS = 256
"""Rows that :func:`build_cache` makes room for: page tables have a line for each, as wide as the longest request."""


def load_model(directory: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """Load a causal language model for inference, computing in ``dtype``. Never asks a network.

    Raises ConfigError where the directory does not hold such a model.
    """
    transformers.logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError("the model cannot be loaded", model=str(directory), cause=str(error)) from error
    return model.eval().requires_grad_(False)


def load_config(directory: Path) -> Any:
    """Read the configuration of a model. Raises ConfigError where there is none that transformers knows."""
    try:
        return transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("the model's configuration cannot be read", model=str(directory), cause=str(error)) from error


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a model, or None where the directory has none."""
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json", "vocab.json")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError("the tokenizer cannot be loaded", model=str(directory), cause=str(error)) from error


def end_tokens(directory: Path, config: Any) -> tuple[int, ...]:
    """Token ids that end a text: what the model's generation settings say, else its configuration."""
    found = getattr(config, "eos_token_id", None)
    if (directory / "generation_config.json").is_file():
        settings = transformers.GenerationConfig.from_pretrained(directory, local_files_only=True)
        found = found if settings.eos_token_id is None else settings.eos_token_id
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)


def model_spec(registry: Registry, config: Any, dtype: torch.dtype) -> ModelSpec:
    """Layer groups of a model that computes in ``dtype``. Raises UnsupportedError for what no plugin can hold."""
    if dtype not in DTYPES:
        raise UnsupportedError("the model computes in a dtype that has no plain format", dtype=str(dtype))
    # A state may be kept in the dtype the model computes in, so the adapter has to know it.
    spec = adapter_for(registry, config).spec(computed_in(config, DTYPES[dtype]))
    return msgspec.structs.replace(spec, dtype=DTYPES[dtype])


def describe(config: Config, hf_config: Any, dtype: torch.dtype = torch.float32) -> tuple[Registry, dict[str, Layout]]:
    """What a configuration comes to for a model, without allocating: the plugins and the layouts by group.

    Raises UnsupportedError, ConfigError, LayoutError or PluginError for what cannot work.
    """
    registry = enabled(config)
    spec = model_spec(registry, hf_config, dtype)
    holders = Holders(spec, formats_of(spec, config.cache, registry), registry, Shard())
    return registry, holders.layouts(page_size=config.cache.page_size, arena=config.cache.arena)


def cache_for(model: Any, config: Config) -> KVCache:
    """Build the cache that ``config`` describes for a loaded model."""
    registry = enabled(config)
    return KVCache.create(model_spec(registry, model.config, model.dtype), config, registry)


def build_cache(model: Any, *, memory: int | str, **cache_options: Any) -> KVCache:
    """Build a cache for a model from a few options, see :class:`kvcore.config.CacheConfig`.

    ``max_tokens`` and ``max_rows`` are by default what the memory holds, where that is more than the usual step; rows up to
    :data:`MOST_ROWS`.
    """
    if model.dtype in DTYPES:
        cache_options.setdefault("format", DTYPES[model.dtype])
    options = {**msgspec.structs.asdict(CacheConfig()), **cache_options, "memory": parse_bytes(memory)}
    config = Config.from_mapping({"cache": options})
    if not {"max_tokens", "max_rows"} <= cache_options.keys():
        registry, layouts = describe(config, model.config, model.dtype)
        planned = plan_capacity(
            layouts, config.cache.memory, config.cache.max_requests, spaces=registry.index_spaces(), step_tokens=1
        )
        tokens = planned.token_capacity or 0
        rows = min(tokens // config.cache.page_size, MOST_ROWS)  # each holds a page at least
        fits = {"max_tokens": max(config.cache.max_tokens, tokens), "max_rows": max(config.cache.max_rows, rows)}
        own = {key: value for key, value in fits.items() if key not in cache_options}
        config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, **own))
    return cache_for(model, config)
