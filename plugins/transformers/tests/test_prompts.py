"""Prompt files: what is read, what is refused, and with which line number."""

from __future__ import annotations

import json

import pytest

from kvcore.errors import ConfigError
from kvcore_transformers.commands.prompts import Prompt, read_prompts, shipped_prompts, tokenize
from kvcore_transformers.serving.engine import DEFAULT_CHUNK


class Words:
    """A tokenizer of one token a word."""

    chat_template = "x"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*([0] if add_special_tokens else []), *(len(word) for word in text.split())]}

    def apply_chat_template(self, messages, add_generation_prompt, return_dict):
        return {"input_ids": [90, *self(messages[0]["content"], False)["input_ids"], 91]}


def test_the_shipped_file():
    """16 prompts: one token, page borders, exactly four chunks."""
    prompts = read_prompts(shipped_prompts())
    assert len(prompts) == len({prompt.id for prompt in prompts}) == 16
    exact = {prompt.tokens for prompt in prompts}
    assert {1, 15, 16, 17, 32, 33, 4 * DEFAULT_CHUNK} <= exact
    assert sum(prompt.text is not None for prompt in prompts) >= 5


def test_kinds_of_prompts_become_tokens():
    words = Words()
    assert tokenize(Prompt("a", text="why not"), words, 100) == (90, 3, 3, 91)
    assert tokenize(Prompt("a", raw="why not"), words, 100) == (3, 3)
    assert tokenize(Prompt("a", raw="why not now", tokens=2), words, 100) == (3, 3)
    assert tokenize(Prompt("a", raw=""), words, 100) == ()
    assert tokenize(Prompt("a", token_ids=(5, 6)), None, 100) == (5, 6)
    words.chat_template = None
    assert tokenize(Prompt("a", text="why not"), words, 100) == (0, 3, 3)


def test_a_prompt_may_say_what_a_right_answer_is(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "token_ids": [1], "answer": [2, 3]}\n{"id": "b", "token_ids": [1], "answer": []}\n')
    with pytest.raises(ConfigError, match="line") as error:
        read_prompts(path)
    assert (error.value.fields["line"], "answer is empty" in error.value.fields["cause"]) == (2, True)
    path.write_text(path.read_text().splitlines()[0])
    (prompt,) = read_prompts(path)
    assert prompt.answer == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "tokenizer", "what"),
    [
        (Prompt("a", raw="one two", tokens=3), Words(), "fewer tokens"),
        (Prompt("a", token_ids=(100,)), None, "vocabulary"),
        (Prompt("a", token_ids=(-1,)), None, "vocabulary"),
        (Prompt("a", text="hello"), None, "no tokenizer"),
    ],
)
def test_prompts_that_cannot_become_tokens(prompt, tokenizer, what):
    with pytest.raises(ConfigError, match=what) as error:
        tokenize(prompt, tokenizer, 100)
    assert error.value.fields["request"] == "a"


def test_comments_and_empty_lines_are_skipped_and_lines_counted(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('# prompts\n\n{"id": "a", "raw": "x\u2028y"}\n')
    assert [prompt.raw for prompt in read_prompts(path)] == ["x\u2028y"]


@pytest.mark.parametrize(
    "line",
    [
        "{",
        "[]",
        '{"raw": "x"}',
        '{"id": "b"}',
        '{"id": "", "raw": "x"}',
        '{"id": "b", "raw": "x", "text": "y"}',
        '{"id": "b", "raw": "x", "tokens": -1}',
        '{"id": "b", "raw": "x", "tokens": "3"}',
        '{"id": "b", "raw": "x", "max_new_tokens": 0}',
        '{"id": "b", "rav": "x"}',
        '{"id": 5, "raw": "x"}',
    ],
)
def test_a_wrong_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text('{"id": "a", "raw": "x"}\n\n' + line + "\n")
    with pytest.raises(ConfigError) as error:
        read_prompts(path)
    assert error.value.fields["line"] == 3
    assert error.value.fields["path"] == str(path)


def test_a_file_that_is_missing_empty_or_not_text(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none")
    (tmp_path / "empty").write_text("\n# nothing\n")
    with pytest.raises(ConfigError, match="no prompt"):
        read_prompts(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "binary")


def test_prompts_survive_json(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"r{n}", "token_ids": [n], "max_new_tokens": 3}) + "\n" for n in range(3))
    )
    assert [(p.id, p.token_ids, p.max_new_tokens) for p in read_prompts(path)] == [(f"r{n}", (n,), 3) for n in range(3)]
