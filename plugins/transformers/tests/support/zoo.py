"""Tiny models beyond plain full attention, with random weights, and a tokenizer for them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers

VOCAB = 97
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
# Every width is another, so that no tensor can pass for another one.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 24,
    "v_head_dim": 20,
    "first_k_dense_replace": 1,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
WINDOW = 20
SLIDING = {
    "gemma3": (
        transformers.Gemma3TextConfig,
        {
            **GROUPED,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            # Tied embeddings of random weights repeat the last token for ever, whatever attention says.
            "tie_word_embeddings": False,
        },
    ),
    "mistral": (transformers.MistralConfig, GROUPED),
    "qwen2": (transformers.Qwen2Config, {"num_key_value_heads": 2, "use_sliding_window": True, "max_window_layers": 1}),
}


# Three convolution taps, a window that prompts leave, biases that end within a prompt.
INKLING = {
    **GROUPED,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 16,
    "sliding_window_size": 8,
    "rel_extent": 12,
    "d_rel": 4,
    "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
    "mlp_layer_types": ["dense", "dense", "sparse"],
    "conv_kernel_size": 4,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "logits_mup_width_multiplier": 1.0,
}
UNLIKE_HEADS = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 8}
LOG_SCALING = {"log_scaling_n_floor": 6, "log_scaling_alpha": 0.5}
QWEN3_NEXT = {
    **GROUPED,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": [0, 1, 2],
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
HYBRIDS = {
    "inkling": (transformers.InklingTextConfig, INKLING),
    "inkling_unlike": (transformers.InklingTextConfig, {**INKLING, **UNLIKE_HEADS}),
    "inkling_scaled": (transformers.InklingTextConfig, {**INKLING, **LOG_SCALING}),
    "qwen3_next": (transformers.Qwen3NextConfig, QWEN3_NEXT),
}


def build(config):
    """A model whose weights are large enough for its tokens to depend on what was attended to."""
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    return model.eval().requires_grad_(False)


def deepseek():
    return build(transformers.DeepseekV3Config(**COMMON, **DEEPSEEK))


def sliding(family, window=WINDOW):
    cls, special = SLIDING[family]
    return build(cls(**COMMON, **special, sliding_window=window))


def hybrid(name, **changes):
    """A model of :data:`HYBRIDS`: attention, and states that remember enough to matter to every token."""
    cls, special = HYBRIDS[name]
    model = build(cls(**{**COMMON, **special, **changes}))
    for parameter, values in model.named_parameters():
        if "conv" in parameter:
            values.normal_(std=0.5)
        elif parameter.endswith("A_log"):
            values.uniform_(-5.0, -2.0)  # logarithm of what a recurrent state forgets a token
        elif parameter.endswith("dt_bias"):
            values.zero_()
    return model


def make(name):
    """``deepseek``, a family of :data:`SLIDING`, or one of :data:`HYBRIDS`."""
    if name in HYBRIDS:
        return hybrid(name)
    return deepseek() if name == "deepseek" else sliding(name)


def save(model, directory: Path) -> Path:
    """Write a model with a tokenizer of the words ``w0``, ``w1``, …, each of them one token of that number."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory
