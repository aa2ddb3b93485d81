"""The guard model's shape, and where its weights are (no torch until a model is made)."""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

from kvcore_transformers.guard.task import VOCABULARY

NAME = "guard"
"""Name of the model on the command line."""

WINDOW = 32
"""Tokens the window layer sees."""

LAYERS = ("hybrid", "hybrid", "hybrid_sliding")


def weights_directory() -> Path:
    """The directory with the trained weights that comes with this package."""
    return Path(str(importlib.resources.files("kvcore_transformers") / "guard" / "weights"))


def make_config() -> Any:
    """Configuration of the model: 163 thousand parameters."""
    from transformers import InklingTextConfig

    return InklingTextConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        mlp_layer_types=["dense"] * len(LAYERS),
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=32,
        sliding_window_size=WINDOW,
        d_rel=8,
        # Full attention has no notion of distance beyond the token itself: what it finds, it finds by content.
        rel_extent=1,
        logits_mup_width_multiplier=1.0,
        initializer_range=0.06,
        max_position_embeddings=1024,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def make_model(seed: int) -> Any:
    """An untrained model. Large short-convolution and query/key norm weights are what makes it train in minutes."""
    import torch
    from transformers import InklingForCausalLM

    torch.manual_seed(seed)
    config = make_config()
    config._attn_implementation = "eager"
    model = InklingForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sconv" in name:
                parameter.normal_(0.0, 0.4)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.fill_(3.0)
    return model
