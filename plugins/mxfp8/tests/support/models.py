"""Tiny models with random weights, their prompts, and what is said on the command line."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from kvcore.cli.main import main

VOCAB = 97
LAYERS, KV_HEADS, DIM = 3, 2, 64


def tiny_model(head_dim: int = DIM) -> Any:
    """A Llama whose weights are large enough for its tokens to depend on what was attended to."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=KV_HEADS,
        head_dim=head_dim,
        max_position_embeddings=4096,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.mul_(3.0)
    return model.eval().requires_grad_(False)


def save(model: Any, directory: Path) -> Path:
    """Write a model with a tokenizer of the words ``w0``, ``w1``, …, each of them one token of that number."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(directory)
    model.save_pretrained(directory)
    return directory


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(1000 * seed + tokens)
    return torch.randint(0, VOCAB, (tokens,), generator=generator).tolist()


def said(*arguments: str) -> dict[str, Any]:
    """What a ``kvcore`` command says with ``--json``, in this process."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main([*arguments, "--json"]) == 0
    return json.loads(out.getvalue())


def run(*options: str) -> dict[str, Any]:
    """The report of a ``kvcore run`` that ended well, in processes of its own."""
    code = "import sys; from kvcore.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
