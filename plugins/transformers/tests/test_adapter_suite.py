"""The plugin's adapters against the suite for adapters."""

from __future__ import annotations

import pytest

from kvcore.testing.models import ModelAdapterSuite
from kvcore_transformers.models import adapters

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
SUBJECTS = {
    adapters.LlamaAdapter: [{**PLAIN, "model_type": "llama"}],
    adapters.QwenAdapter: [{**PLAIN, "model_type": "qwen2"}, {**PLAIN, "model_type": "qwen3"}, SWITCHED],
    adapters.MistralAdapter: [
        {**PLAIN, "model_type": "mistral"},
        {**PLAIN, "model_type": "mistral", "sliding_window": 64},
    ],
    adapters.GemmaAdapter: [{**PLAIN, **SLIDING, "model_type": "gemma3_text"}],
}


class TestAdapters(ModelAdapterSuite):
    @pytest.fixture(params=SUBJECTS, ids=lambda kind: kind.name)
    def adapter(self, request):
        return request.param()

    @pytest.fixture
    def configs(self, adapter):
        return SUBJECTS[type(adapter)]
