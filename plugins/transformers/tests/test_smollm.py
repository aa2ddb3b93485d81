"""The real model: SmolLM2-135M-Instruct through ``kvcore run`` and through ``generate``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvcore_transformers.commands.prompts import read_prompts, shipped_prompts, tokenize
from kvcore_transformers.modeling.hf_cache import KVCoreCache
from kvcore_transformers.models.loading import load_model, load_tokenizer
from kvcore_transformers.models.weights import ensure_model

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def directory() -> Path:
    pytest.importorskip("gguf")
    return ensure_model(None)


def test_shipped_prompts_have_the_lengths_they_promise(directory):
    tokenizer = load_tokenizer(directory)
    lengths = {p.id: len(tokenize(p, tokenizer, 49152)) for p in read_prompts(shipped_prompts())}
    assert len(lengths) == 16
    assert {1, 15, 16, 17, 32, 33, 64, 65, 256} <= set(lengths.values())
    assert max(lengths.values()) == 256


def test_generate_answers_as_with_its_own_cache(directory):
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with KVCoreCache.for_model(model, memory="16MiB") as cache, torch.inference_mode():
        got = model.generate(**chat, cache=cache, max_new_tokens=12, do_sample=False)
        want = model.generate(**chat, cache=DynamicCache(config=model.config), max_new_tokens=12, do_sample=False)
    assert torch.equal(got, want)
    assert "Paris" in tokenizer.decode(got[0])


@pytest.mark.parametrize("options", [(), ("--memory", "18MiB"), ("--memory", "18MiB", "--retraction", "recompute")])
def test_run_agrees_with_ordinary_runs(directory, options):
    code = "import sys; from kvcore.cli.main import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, "run", "--json", *options], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["requests"], report["failed"]) == (16, 0)
    assert (report["agreement"], report["agreement_plain"]) == (1.0, 1.0)
    assert report["ops"]["load"] == 0
    four = next(item for item in report["results"] if item["id"] == "four-chunks")
    assert four["pulled_early"] >= 0.5
    if options:
        assert report["retractions"] > 0
        assert report["resumed"] + report["recomputed"] == report["retractions"]
