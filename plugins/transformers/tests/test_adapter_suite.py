"""The plugin's adapters against the suite for adapters."""

from __future__ import annotations

import pytest

from kvcore.testing import ModelAdapterSuite
from kvcore_transformers.models import adapters, hybrids

PLAIN = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_size": 64,
    "max_position_embeddings": 4096,
}
SLIDING = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
SWITCHED = {**PLAIN, "model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
INKLING = {
    "model_type": "inkling_text",
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid_sliding"],
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_head_dim": 16,
    "sliding_window_size": 64,
    "conv_kernel_size": 4,
}
DELTA_NET = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "dtype": "bfloat16",
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
SUBJECTS = {
    adapters.LlamaAdapter: [{**PLAIN, "model_type": "llama"}],
    adapters.QwenAdapter: [{**PLAIN, "model_type": "qwen2"}, {**PLAIN, "model_type": "qwen3"}, SWITCHED],
    adapters.MistralAdapter: [
        {**PLAIN, "model_type": "mistral"},
        {**PLAIN, "model_type": "mistral", "sliding_window": 64},
    ],
    adapters.GemmaAdapter: [{**PLAIN, **SLIDING, "model_type": "gemma3_text"}],
    adapters.DeepseekAdapter: [{**PLAIN, "model_type": "deepseek_v3", "kv_lora_rank": 32, "qk_rope_head_dim": 16}],
    hybrids.InklingAdapter: [
        {**PLAIN, **INKLING},
        {**PLAIN, **INKLING, "swa_num_key_value_heads": 2},  # one kind of convolution
    ],
    hybrids.QwenNextAdapter: [{**PLAIN, **DELTA_NET}],
}


class TestAdapters(ModelAdapterSuite):
    @pytest.fixture(params=SUBJECTS, ids=lambda kind: kind.name)
    def adapter(self, request):
        return request.param()

    @pytest.fixture
    def configs(self, adapter):
        return SUBJECTS[type(adapter)]


def test_every_adapter_is_a_subject():
    assert set(SUBJECTS) == {*adapters.ADAPTERS, *hybrids.HYBRIDS}
