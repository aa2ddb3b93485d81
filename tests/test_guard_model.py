"""The guard model as it is shipped: the task's rules, the weights, and what plain transformers makes of them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from by_path import load

from kvcore_transformers.guard import task
from kvcore_transformers.guard.model import LAYERS, WINDOW, make_config, weights_directory
from kvcore_transformers.models.loading import load_model

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "plugins" / "transformers" / "scripts" / "train_guard.py"
FRESH = 20260  # a seed that training did not see


def read(tokens: list[int]) -> tuple[dict[tuple[int, ...], tuple[int, ...]], list[tuple[int, ...]], tuple[int, ...]]:
    """A prompt taken apart as the task's text says it is put together: ledger, queries, and a key begun."""
    assert tokens[0] == 39
    ledger = {}
    for at in range(1, 73, 6):
        key, value = tuple(tokens[at : at + 3]), tuple(tokens[at + 3 : at + 6])
        assert all(4 * part <= symbol < 4 * part + 4 for part, symbol in enumerate(key))
        assert all(12 + 8 * part <= symbol < 20 + 8 * part for part, symbol in enumerate(value))
        ledger[key] = value
    assert tokens[73] == 40
    queries = []
    for at in range(74, 98, 6):
        queries.append(tuple(tokens[at : at + 3]))
        assert tokens[at + 3 : at + 6] == [36, 37, 38]
    return ledger, queries, tuple(tokens[98:])


def test_a_sequence_is_what_the_task_says():
    batch = task.sequences(20, seed=7)
    assert batch.prompts.shape == (20, 100)
    assert batch.answers.shape == (20, 22)
    for prompt, answer in zip(batch.prompts.tolist(), batch.answers.tolist(), strict=True):
        ledger, queries, begun = read(prompt)
        assert len(ledger) == 12, "keys of a ledger are distinct"
        assert len(set(queries)) == 4
        assert begun == queries[0][:2]
        want = [symbol for key in queries for symbol in (*key, *ledger[key])]
        assert answer == want[2:]


def test_each_key_is_copied_from_within_the_window():
    batch = task.sequences(3, seed=1)
    tokens = np.concatenate(batch, axis=1)
    for at in (98, 98 + 6, 98 + 12, 98 + 18):  # the keys of the answers
        assert (tokens[:, at : at + 3] == tokens[:, at - 24 : at - 21]).all()
    assert WINDOW > 24


def test_sequences_follow_from_their_seed_alone():
    few, many, other = task.sequences(3, seed=5), task.sequences(6, seed=5), task.sequences(3, seed=6)
    assert (few.prompts == many.prompts[:3]).all()
    assert (few.answers == many.answers[:3]).all()
    assert (few.prompts != other.prompts).any()
    assert len({tuple(row) for row in many.prompts.tolist()}) == 6
    assert task.sequences(0).prompts.shape == (0, 100)


def test_the_weights_are_small_and_of_this_model():
    files = {path.name: path.stat().st_size for path in weights_directory().iterdir()}
    assert {"config.json", "model.safetensors"} <= set(files)
    assert sum(files.values()) < 1_000_000
    shipped = transformers.AutoConfig.from_pretrained(weights_directory())
    assert tuple(shipped.layer_types) == LAYERS
    ours = make_config().to_dict()
    for key in ("vocab_size", "hidden_size", "sliding_window_size", "rel_extent", "conv_kernel_size", "head_dim"):
        assert getattr(shipped, key) == ours[key]


def test_plain_transformers_answers_fresh_sequences():
    """The oracle of everything else: no kvcore in it, 32 sequences of a seed that training did not see."""
    model = load_model(weights_directory())
    batch = task.sequences(32, seed=FRESH)
    prompts = torch.from_numpy(batch.prompts)
    with torch.inference_mode():
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=22, do_sample=False, pad_token_id=0
        )
    right = (out[:, 100:] == torch.from_numpy(batch.answers)).all(1)
    assert int(right.sum()) == 32


@pytest.mark.model  # some seconds for each step of training, of a whole model
def test_training_repeats_itself_and_the_loss_falls():
    def losses(steps: int, seed: int) -> list[float]:
        command = [sys.executable, str(SCRIPT), "--steps", str(steps), "--seed", str(seed)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=True)
        return [float(found) for found in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]

    long, short, other = losses(40, 0), losses(3, 0), losses(3, 1)
    assert long[:3] == short != other
    assert sum(long[-5:]) / 5 < sum(long[:5]) / 5 - 1.0


def test_the_training_script_refuses_what_it_cannot_do(capsys):
    """Neither an output nor a number of steps, or both, is no request."""
    module = load(SCRIPT)
    for arguments in ([], ["--out", "x", "--steps", "1"]):
        with pytest.raises(SystemExit):
            module.main(arguments)
        assert "exactly one of --out and --steps" in capsys.readouterr().err
