"""``model.generate`` with its cache in kvcore's pools: the model's code does not know.

    python generate.py [MODEL_DIRECTORY]

Without a directory a tiny model with random weights is used, so that this runs anywhere in a moment.
"""

import sys
from pathlib import Path

import torch
import transformers

from kvcore_transformers.modeling.hf_cache import KVCoreCache
from kvcore_transformers.models.loading import load_model


def random_model():
    """Three small layers."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


model = load_model(Path(sys.argv[1])) if len(sys.argv) > 1 else random_model()
ids = torch.randint(1, 128, (2, 21))  # two rows; 21 tokens are two pages, the second one partly filled

with KVCoreCache.for_model(model, memory="32MiB") as cache:
    ours = model.generate(ids, cache=cache, max_new_tokens=16, do_sample=False)
    print(f"{cache.get_seq_length()} tokens a row in {cache.kvcache.stats().manager.ranges[0].used} pages")

theirs = model.generate(ids, max_new_tokens=16, do_sample=False)
print("the same tokens as with transformers' own cache:", torch.equal(ours, theirs))
assert torch.equal(ours, theirs)
