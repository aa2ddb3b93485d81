"""``kvcore accuracy``: the figures against plain transformers with rounded keys and values, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from kvcore.cli.main import main
from kvcore_transformers.commands.accuracy_report import compare, read_texts, shipped_texts
from kvcore_transformers.models.loading import load_tokenizer
from kvcore_transformers.models.weights import ensure_model

TOKENS = 53


@pytest.fixture(scope="module")
def directory(tmp_path_factory, zoo, tiny_model) -> Path:
    """A model with a tokenizer: the word ``w7`` is token 7."""
    return zoo.save(tiny_model("llama"), tmp_path_factory.mktemp("reader"))


@pytest.fixture
def text(tmp_path, prompt):
    """``text(tokens, seed)``: a file of so many words."""

    def make(tokens: int = TOKENS, seed: int = 0, name: str = "a.txt") -> str:
        path = tmp_path / name
        path.write_text(" ".join(f"w{token}" for token in prompt(tokens, seed)))
        return str(path)

    return make


@pytest.fixture
def accuracy(directory, capsys):
    """``accuracy(*options)``: the JSON."""

    def run(*options: str):
        assert main(["accuracy", "--model", str(directory), "--memory", "1MiB", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    return run


class Rounded(transformers.DynamicCache):
    """Keys and values as a plain format of two bytes keeps them."""

    def update(self, keys, values, layer, *args, **kwargs):
        return super().update(keys.bfloat16().float(), values.bfloat16().float(), layer, *args, **kwargs)


def softmax(logits):
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def oracle(model, tokens):
    """KL, agreement and both perplexities of fp32 against bf16, in one pass of plain transformers and in numpy."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        exact, rounded = (
            softmax(model(input_ids=ids, cache=cache, use_cache=True).logits[0, :-1].double().numpy())
            for cache in (transformers.DynamicCache(config=model.config), Rounded(config=model.config))
        )
    kl = np.mean(
        [sum(p * math.log(p / q) for p, q in zip(*row, strict=True)) for row in zip(rounded, exact, strict=True)]
    )
    agreement = np.mean([a.argmax() == b.argmax() for a, b in zip(exact, rounded, strict=True)])
    ppl = [
        math.exp(-sum(math.log(row[token]) for row, token in zip(rows, tokens[1:], strict=True)) / (len(tokens) - 1))
        for rows in (exact, rounded)
    ]
    return kl, agreement, *ppl


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_figures_are_those_of_plain_transformers(accuracy, text, tiny_model, prompt, chunk):
    """Whatever the chunk: decoding and prefill read the same bytes."""
    said = accuracy("--format", "fp32", "--text", text(), "--chunk", str(chunk))
    kl, agreement, perplexity, baseline = oracle(tiny_model("llama"), prompt(TOKENS))
    found = said["overall"]
    assert found["predictions"] == TOKENS - 1
    assert kl > 1e-6
    assert found["kl"] == pytest.approx(kl, rel=1e-2)
    assert found["top1_agreement"] == agreement
    assert found["perplexity"] == pytest.approx(perplexity, rel=1e-4)
    assert found["baseline_perplexity"] == pytest.approx(baseline, rel=1e-4)
    assert (said["format"], said["baseline"], said["chunk"]) == ("fp32", "bf16", chunk)


def test_texts_count_by_their_tokens(accuracy, text):
    """Overall figures are of all predictions, not means of means; each text is read on its own."""
    files = ["--text", text(10, 1, "one.txt"), "--text", text(41, 2, "two.txt")]
    said = accuracy("--format", "fp32", *files)
    one, two, overall = said["texts"]["one.txt"], said["texts"]["two.txt"], said["overall"]
    assert (one["predictions"], two["predictions"], overall["predictions"]) == (9, 40, 49)
    assert overall["kl"] == pytest.approx((9 * one["kl"] + 40 * two["kl"]) / 49)
    assert math.log(overall["perplexity"]) == pytest.approx(
        (9 * math.log(one["perplexity"]) + 40 * math.log(two["perplexity"])) / 49
    )
    alone = accuracy("--format", "fp32", *files[2:])
    assert alone["overall"] == two


def test_a_format_agrees_with_itself(accuracy, text):
    found = accuracy("--format", "bf16", "--text", text())["overall"]
    assert (found["kl"], found["top1_agreement"]) == (0.0, 1.0)
    assert found["perplexity"] == found["baseline_perplexity"]


def test_less_of_a_text(accuracy, text):
    assert accuracy("--text", text(), "--max-tokens", "20")["overall"]["predictions"] == 19


def test_what_a_format_destroys_is_seen(make_cache, tiny_model, prompt, monkeypatch):
    """The gate can fail: values that come back with the wrong sign."""
    model, tokens = tiny_model("llama"), prompt(TOKENS)
    baseline, tested = make_cache(model), make_cache(model)
    assert compare(model, baseline, tested, tokens, chunk=16).accuracy().kl == 0.0
    store = tested.store.store

    def damaged(layer, rows, *args, **kwargs):
        return store(layer, {**rows, "v": -rows["v"]}, *args, **kwargs)

    monkeypatch.setattr(tested.store, "store", damaged)
    found = compare(model, baseline, tested, tokens, chunk=16).accuracy()
    assert found.kl > 0.5
    assert found.top1_agreement < 0.5


def test_a_failure_gives_the_units_back(make_cache, tiny_model, prompt, monkeypatch):
    model, tokens = tiny_model("llama"), prompt(TOKENS)
    baseline, tested = make_cache(model), make_cache(model)

    def fails(*args, **kwargs):
        raise RuntimeError("in the test")

    monkeypatch.setattr(tested.store, "attend", fails)
    with pytest.raises(RuntimeError, match="in the test"):
        compare(model, baseline, tested, tokens, chunk=16)
    assert [len(cache.manager.requests) for cache in (baseline, tested)] == [0, 0]


def test_people_see_a_table(directory, text, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    assert main(["accuracy", "--model", str(directory), "--memory", "1MiB", "--text", text(), "--format", "fp32"]) == 0
    said = capsys.readouterr()
    assert "fp32 against bf16, 64 tokens a pass" in said.out
    assert [line.split()[1] for line in said.out.splitlines() if line.startswith("│")] == ["a.txt", "all"]
    assert f"reading a.txt, {TOKENS} tokens" in said.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--text", "/nowhere.txt"], ["/nowhere.txt", "cannot be read"]),
        (["--text", "{empty}"], ["empty.txt", "nothing to predict"]),
        (["--text", "{text}", "--baseline", "bf61"], ["did you mean 'bf16'?"]),
        (["--text", "{text}", "--format", "fp33"], ["fp32"]),
        (["--text", "{text}", "--set", "cache.format_options.ordre=token_major"], ["ordre", "order"]),
        (["--text", "{text}", "--chunk", "100000"], ["chunk", "max_tokens"]),
        (["--text", "{text}", "--memory", "40KiB"], ["does not fit", "capacity=32", "--max-tokens"]),
        (["--text", "{long}", "--memory", "16MiB"], ["longest sequence", "--max-tokens 4096"]),
        (["--model", "/nowhere"], ["does not exist"]),
        (["--model", "{mute}", "--text", "{text}"], ["no tokenizer"]),
    ],
)
def test_what_cannot_work_is_one_message(directory, tiny_directory, text, tmp_path, capsys, options, words):
    (tmp_path / "empty.txt").write_text("w1")
    names = {
        "empty": str(tmp_path / "empty.txt"),
        "text": text(),
        "long": text(5000, name="long.txt"),
        "mute": str(tiny_directory),
    }
    base = [] if "--model" in options else ["--model", str(directory)]
    assert main(["accuracy", *base, *(option.format(**names) for option in options)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    assert all(word in said.err for word in words), said.err


def test_files_of_one_name_are_told_apart(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.txt").write_text(folder)
    found = read_texts([tmp_path / "x" / "a.txt", tmp_path / "y" / "a.txt"])
    assert found == {str(tmp_path / folder / "a.txt"): folder for folder in ("x", "y")}


@pytest.mark.model
def test_the_shipped_texts_are_long_enough():
    """Two of them, of 384 tokens at least each."""
    pytest.importorskip("gguf")
    tokenizer = load_tokenizer(ensure_model(None))
    lengths = {name: len(tokenizer(text)["input_ids"]) for name, text in read_texts(shipped_texts()).items()}
    assert len(lengths) == 2
    assert min(lengths.values()) >= 384


@pytest.mark.model
@pytest.mark.timeout(900)
def test_bf16_is_nearly_fp32_on_the_real_model(capsys):
    """The harness on real text: the perplexity is that of a model that can read, and two bytes are enough."""
    pytest.importorskip("gguf")
    assert main(["accuracy", "--format", "fp32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["overall"]
    assert found["predictions"] >= 768
    assert found["kl"] < 1e-4
    assert found["top1_agreement"] > 0.99
    assert 2 < found["perplexity"] < 40
    assert found["perplexity"] == pytest.approx(found["baseline_perplexity"], rel=1e-3)
