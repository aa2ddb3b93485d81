"""Model configurations to layer groups, and what is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from kvcore.config import Config
from kvcore.errors import ConfigError, UnsupportedError
from kvcore_transformers.models.adapters import (
    GemmaAdapter,
    LlamaAdapter,
    MistralAdapter,
    QwenAdapter,
    enabled,
    layer_types,
)
from kvcore_transformers.models.loading import model_spec


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


def test_every_layer_of_mistral_slides_where_it_has_a_window():
    spec = MistralAdapter().spec(transformers.MistralConfig(sliding_window=128))
    (group,) = spec.groups
    assert (group.prefix, group.space, group.space_options) == ("swa", "window", (("window", 128),))
    assert group.layers == tuple(range(32))


def test_qwen_says_which_layers_slide():
    config = transformers.Qwen2Config(use_sliding_window=True, sliding_window=64, max_window_layers=5)
    full, swa = QwenAdapter().spec(config).groups
    assert (full.prefix, full.space, full.space_options, full.layers) == ("full", "sequence", (), tuple(range(5)))
    assert (swa.prefix, swa.space_options, swa.layers) == ("swa", (("window", 64),), tuple(range(5, 32)))


def test_gemma_has_a_full_and_a_window_group():
    config = transformers.Gemma3TextConfig(num_hidden_layers=8, sliding_window=512)
    for given in (config, config.to_dict()):
        full, swa = model_spec(enabled(Config()), given, torch.bfloat16).groups
        assert (full.prefix, full.layers, full.space) == ("full", (5,), "sequence")
        assert (swa.prefix, swa.layers, swa.space) == ("swa", (0, 1, 2, 3, 4, 6, 7), "window")
        assert swa.space_options == (("window", 512),)
        for group in (full, swa):
            assert group.num_query_heads == 8
            assert [(t.name, t.num_heads, t.head_dim, t.sharded) for t in group.tensors] == [
                ("k", 4, 256, True),
                ("v", 4, 256, True),
            ]


def test_gemma_that_sees_later_tokens_is_refused():
    config = transformers.Gemma3TextConfig(use_bidirectional_attention=True)
    with pytest.raises(UnsupportedError) as refusal:
        GemmaAdapter().spec(config)
    assert refusal.value.fields["setting"] == "use_bidirectional_attention"


def test_a_window_layer_without_a_window_is_an_error():
    data = {"model_type": "gemma3_text", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8}
    with pytest.raises(ConfigError) as error:
        GemmaAdapter().spec({**data, "layer_types": ["sliding_attention"]})
    assert error.value.fields["key"] == "sliding_window"


def test_deepseek_keeps_a_latent_and_a_rotary_key_on_every_rank():
    """head_dim of its configuration is not the width of anything that is stored per head."""
    spec = model_spec(enabled(Config()), transformers.DeepseekV3Config(), torch.bfloat16)
    (group,) = spec.groups
    assert (group.prefix, len(group.layers), group.num_query_heads) == ("full", 61, 128)
    assert [(t.name, t.num_heads, t.head_dim, t.sharded) for t in group.tensors] == [
        ("latent", 1, 512, False),
        ("rope", 1, 64, False),
    ]


@pytest.mark.parametrize(
    ("config", "where", "missing"),
    [
        (transformers.Qwen3_5TextConfig(), {"layer": 0, "layer_type": "linear_attention"}, "recurrent state"),
        (
            transformers.Lfm2Config(num_hidden_layers=1, layer_types=["conv"]),
            {"layer": 0, "layer_type": "conv"},
            "convolution state",
        ),
        (transformers.MambaConfig(), {"setting": "state_size"}, "recurrent state"),
        (transformers.JambaConfig(), {"setting": "mamba_d_state"}, "recurrent state"),
    ],
    ids=["qwen3_5", "lfm2", "mamba", "jamba"],
)
def test_recurrent_state_is_refused_with_the_kind_of_plugin_that_is_missing(config, where, missing):
    for given in (config.to_dict(), config):
        with pytest.raises(UnsupportedError) as refusal:
            model_spec(enabled(Config()), given, torch.float32)
        assert refusal.value.fields["model"] == config.model_type
        assert "model adapter" in refusal.value.remedy
        assert f"state component for the {missing}" in refusal.value.remedy
        if isinstance(given, dict):  # the objects of Mamba and Jamba name layers too
            assert refusal.value.fields.items() >= where.items()


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
    with pytest.raises(UnsupportedError) as refusal:
        model_spec(enabled(Config()), {"model_type": "telepathy"}, torch.float32)
    assert refusal.value.fields["model"] == "telepathy"
