"""Serve several prompts of different length on one small cache, with retraction, without a second process."""

import torch
import transformers

from kvcore_transformers.models.loading import build_cache
from kvcore_transformers.serving.engine import Engine
from kvcore_transformers.serving.requests import GenerationRequest

torch.manual_seed(0)
config = transformers.LlamaConfig(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
)  # fmt: skip
model = transformers.LlamaForCausalLM(config).eval()

with build_cache(model, memory="120KiB") as cache:
    engine = Engine(model, cache, chunk=16)
    prompts = [torch.randint(1, 128, (length,)).tolist() for length in (3, 16, 40, 25)]
    requests = [GenerationRequest(f"r{n}", tuple(prompt), max_new_tokens=32) for n, prompt in enumerate(prompts)]
    for name, tokens in engine.run(requests).items():
        print(name, tokens)
    stats = engine.stats
    assert stats.retractions == stats.resumed > 0, "the cache is too small for all four at once"
    print(
        f"{cache.token_capacity} tokens of room; {stats.retractions} retractions, {stats.resumed} resumed; {stats.ops}"
    )
    assert "load" not in stats.ops, "decoding attends on the pools"
