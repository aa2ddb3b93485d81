"""Prompt files: JSON lines (no torch).

Each line is an object with a unique ``id`` and one of

- ``text``: a question, put through the model's chat template where it has one;
- ``raw``: text that is tokenised as it stands;
- ``token_ids``: the tokens themselves.

``tokens`` cuts the prompt to exactly that many tokens; ``max_new_tokens`` overrides the number of tokens to generate;
``answer`` is what a right answer begins with, token ids, for those who count right answers.
Empty lines and lines that begin with ``#`` are skipped.
"""

from __future__ import annotations

import importlib.resources
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import ConfigError


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a prompt file; see the module's text."""

    id: str
    text: str | None = None
    raw: str | None = None
    token_ids: tuple[int, ...] | None = None
    tokens: int | None = None
    max_new_tokens: int | None = None
    answer: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given = [name for name in ("text", "raw", "token_ids") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of text, raw and token_ids is needed, got {given or 'none'}")
        if not self.id:
            raise ValueError("id is empty")
        if self.tokens is not None and self.tokens < 0:
            raise ValueError("tokens is negative")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ValueError("max_new_tokens is less than 1")
        if self.answer is not None and not self.answer:
            raise ValueError("answer is empty")

    @property
    def shown(self) -> str:
        """The prompt for a person."""
        if self.token_ids is not None:
            return f"{len(self.token_ids)} token ids"
        return (self.text if self.text is not None else self.raw) or ""


def shipped_prompts() -> Path:
    """The file of prompts that comes with this package."""
    return Path(str(importlib.resources.files("kvcore_transformers") / "data" / "prompts.jsonl"))


def read_prompts(path: Path) -> list[Prompt]:
    """Read a prompt file.

    Raises ConfigError naming the file and the line of whatever is wrong with it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("the prompt file cannot be read", path=str(path), cause=str(error)) from error
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            prompts.append(msgspec.json.decode(line, type=Prompt))
        except msgspec.MsgspecError as error:
            raise ConfigError(
                "a line of the prompt file is wrong",
                path=str(path),
                line=number,
                cause=str(error),
                remedy='write one object a line, such as {"id": "q1", "text": "Why is the sky blue?"}',
            ) from error
    if not prompts:
        raise ConfigError("the prompt file holds no prompt", path=str(path))
    return prompts


def tokenize(prompt: Prompt, tokenizer: Any, vocab_size: int) -> tuple[int, ...]:
    """Return the token ids of a prompt, possibly none.

    Args:
        prompt: the prompt.
        tokenizer: of the model; None where it has none (then only ``token_ids`` work).
        vocab_size: token ids must be below it.

    Raises ConfigError (no tokenizer, an id outside the vocabulary, fewer tokens than ``tokens`` asks for).
    """
    ids = _ids(prompt, tokenizer)
    if any(not 0 <= token < vocab_size for token in ids):
        raise ConfigError("a token id is outside the vocabulary", request=prompt.id, vocab_size=vocab_size)
    if prompt.tokens is None:
        return ids
    if len(ids) < prompt.tokens:
        raise ConfigError(
            "the prompt has fewer tokens than its line asks for",
            request=prompt.id,
            expected=prompt.tokens,
            got=len(ids),
        )
    return ids[: prompt.tokens]


def _ids(prompt: Prompt, tokenizer: Any) -> tuple[int, ...]:
    if prompt.token_ids is not None:
        return prompt.token_ids
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer, so prompts cannot be text",
            request=prompt.id,
            remedy="give token_ids, or a model directory with tokenizer files",
        )
    if prompt.raw is not None:
        return tuple(tokenizer(prompt.raw, add_special_tokens=False)["input_ids"])
    if not tokenizer.chat_template:
        return tuple(tokenizer(prompt.text)["input_ids"])
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt.text}], add_generation_prompt=True, return_dict=True
    )
    return tuple(chat["input_ids"])
