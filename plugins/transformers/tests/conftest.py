"""Tiny models with random weights, and the caches and requests the tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from by_path import load

from kvcore.config import Config
from kvcore.engine.cache import KVCache
from kvcore_transformers.models.loading import cache_for
from kvcore_transformers.serving.requests import GenerationRequest

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)

VOCAB = 97
FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, {"head_dim": 16}),
    "qwen2": (transformers.Qwen2Config, {"hidden_size": 64}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "mistral": (transformers.MistralConfig, {"head_dim": 16, "sliding_window": None}),
}


def _tiny_config(family: str, **changes: Any) -> Any:
    cls, special = _CONFIGS[family]
    common = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return cls(**{**common, **special, **changes})


def _load(name: str) -> ModuleType:
    return load(Path(__file__).parent / "support" / f"{name}.py")


@pytest.fixture(scope="session")
def run_kit() -> ModuleType:
    """``kvcore run`` in a process of its own, prompt files, and what is left of processes."""
    return _load("run_kit")


@pytest.fixture(scope="session")
def zoo() -> ModuleType:
    """Tiny models with windows, with latents and with states."""
    return _load("zoo")


@pytest.fixture(scope="session")
def hybrid_kit() -> ModuleType:
    """Poisoned memory, little memory, and engines run to the end, for models with states."""
    return _load("hybrid_kit")


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """``tiny_config(family, **changes)``: a configuration of three small layers."""
    return _tiny_config


@pytest.fixture(scope="session")
def tiny_model() -> Callable[..., Any]:
    """``tiny_model(family, dtype)``: a new model with weights that depend on nothing but the family."""

    def make(family: str = "llama", dtype: torch.dtype = torch.float32) -> Any:
        torch.manual_seed(FAMILIES.index(family))
        model = transformers.AutoModelForCausalLM.from_config(_tiny_config(family))
        # Larger weights than the default make the tokens depend on what was attended to.
        for parameter in model.parameters():
            parameter.data.mul_(3.0)
        return model.to(dtype).eval().requires_grad_(False)

    return make


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[..., Any]) -> Path:
    """A saved Llama without a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    tiny_model("llama").save_pretrained(directory)
    return directory


@pytest.fixture
def make_cache() -> Iterator[Callable[..., KVCache]]:
    """``make_cache(model, memory=…, policy=…, backend=…, plugins=…, **cache options)``; closed, and found whole, when the
    test ends."""
    made: list[KVCache] = []

    def make(
        model: Any,
        memory: int | str = "4MiB",
        policy: str = "backup",
        backend: str = "host_tensor",
        plugins: tuple[str, ...] = (),
        **options: Any,
    ) -> KVCache:
        sizes = {"options": {"size": "8MiB"}} if backend == "host_pool" else {}
        retraction = {"policy": policy, "backend": backend, **sizes}
        data = {"plugins": list(plugins), "cache": {"memory": memory, **options}, "retraction": retraction}
        made.append(cache_for(model, Config.from_mapping(data)))
        return made[-1]

    yield make
    for cache in made:
        cache.check_integrity()
        cache.close()


@pytest.fixture
def prompt() -> Callable[[int, int], tuple[int, ...]]:
    """``prompt(tokens, seed)``: random token ids."""

    def make(tokens: int, seed: int = 0) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(1000 * seed + tokens)
        return tuple(torch.randint(0, VOCAB, (tokens,), generator=generator).tolist())

    return make


@pytest.fixture
def make_requests(prompt: Callable[..., tuple[int, ...]]) -> Callable[..., list[GenerationRequest]]:
    """``make_requests(lengths, new)``: one request a length, ids ``r0``, ``r1``, …"""

    def make(lengths: tuple[int, ...], new: int = 12) -> list[GenerationRequest]:
        return [GenerationRequest(f"r{n}", prompt(length, n), new) for n, length in enumerate(lengths)]

    return make


def greedy(model: Any, tokens: tuple[int, ...], new: int) -> tuple[int, ...]:
    """The oracle: greedy decoding with transformers' own cache and attention, one request at a time."""
    ids, cache, out = torch.tensor([tokens]), transformers.DynamicCache(config=model.config), []
    with torch.inference_mode():
        for _ in range(new):
            logits = model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1]
            out.append(int(logits.argmax()))
            ids = torch.tensor([[out[-1]]])
    return tuple(out)


@pytest.fixture(scope="session", name="greedy")
def greedy_fixture() -> Callable[..., tuple[int, ...]]:
    """``greedy(model, tokens, new)``: see :func:`greedy`; the model must not have been given to an engine."""
    return greedy
