"""Model configurations to layer groups, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvcore.config import Config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore_transformers.adapters import LlamaAdapter, MistralAdapter, QwenAdapter, enabled, layer_types
from kvcore_transformers.loading import model_spec


@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "dim"),
    [("llama", 4, 2, 16), ("qwen2", 4, 2, 16), ("qwen3", 4, 2, 16), ("mistral", 4, 2, 16)],
)
def test_every_layer_is_in_the_full_group(tiny_config, family, heads, kv_heads, dim):
    registry = enabled(Config())
    for config in (tiny_config(family), tiny_config(family).to_dict()):
        spec = model_spec(registry, config, torch.bfloat16)
        (group,) = spec.groups
        assert (group.prefix, group.kind, group.layers) == ("full", "attention", (0, 1, 2))
        assert [(t.name, t.num_heads, t.head_dim) for t in group.tensors] == [
            ("k", kv_heads, dim),
            ("v", kv_heads, dim),
        ]
        assert (group.num_query_heads, spec.dtype, spec.max_length) == (heads, "bf16", 4096)


def test_head_dim_is_derived_where_it_is_not_given():
    spec = LlamaAdapter().spec(
        {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "hidden_size": 96}
    )
    assert [(t.num_heads, t.head_dim) for t in spec.groups[0].tensors] == [(8, 12), (8, 12)]


def test_mistral_with_a_window_is_refused_with_what_is_missing():
    with pytest.raises(UnsupportedError) as refusal:
        MistralAdapter().spec(transformers.MistralConfig(sliding_window=128))
    assert refusal.value.fields == {"model": "mistral", "layer": 0, "layer_type": "sliding_attention"}
    assert "window" in refusal.value.remedy


def test_qwen_says_which_layer_slides():
    config = transformers.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=5)
    with pytest.raises(UnsupportedError) as refusal:
        QwenAdapter().spec(config)
    assert refusal.value.fields["layer"] == 5


def test_plain_mapping_of_qwen_with_its_window_switched_off_is_full_attention():
    """A config.json of Qwen 2 carries a window that is not in use."""
    data = {"model_type": "qwen2", "num_hidden_layers": 3, "sliding_window": 64, "max_window_layers": 1}
    assert layer_types({**data, "use_sliding_window": False}) == ("full_attention",) * 3
    on = {**data, "use_sliding_window": True}
    assert layer_types(on) == ("full_attention", "sliding_attention", "sliding_attention")


def test_a_window_no_sequence_can_leave_is_full_attention():
    data = {"num_hidden_layers": 1, "sliding_window": 4096, "max_position_embeddings": 4096}
    assert layer_types(data) == ("full_attention",)
    assert layer_types({**data, "max_position_embeddings": 4097}) == ("sliding_attention",)


def test_unknown_layer_type_is_refused():
    config = {"model_type": "llama", "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]}
    with pytest.raises(UnsupportedError, match="state component"):
        LlamaAdapter().spec(config)


def test_a_configuration_that_lacks_a_number_is_an_error():
    with pytest.raises(ConfigError) as error:
        LlamaAdapter().spec({"model_type": "llama", "num_hidden_layers": 2})
    assert error.value.fields["key"] == "num_attention_heads"


def test_a_model_nobody_knows_is_refused():
    with pytest.raises(UnsupportedError):
        model_spec(enabled(Config()), {"model_type": "telepathy"}, torch.float32)
