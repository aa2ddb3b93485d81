"""The task of the guard model: look four keys up in a ledger (no torch).

A sequence is 122 tokens of a vocabulary of 41::

    BOS | 12 records: key key key value value value | SEP | 4 queries: key key key FILL FILL FILL | the answers

Keys and values are three tokens each, of eight (keys: four) symbols per position; no two records of a ledger have the
same key. The answers are the queries in order, with values in place of the fillers: ``key key key value value value``.
The first two tokens are the end of the prompt; the other 22 are what the model is to say, greedily.

Why it guards:

* Each value comes from one record, anywhere in the ledger: full attention over the first 73 tokens.
* Each next key is copied from the query list, always 24 tokens back: within the window.
* A key is three tokens. What is looked up is put together by the short convolutions from the last tokens, and the
  prompt ends within a key: whoever computed it says the key's last token, and whoever takes over there needs the
  convolutions' state to look the key up.
* A wrong token counts: an answer is right where all 22 tokens are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

RECORDS = 12
"""Records of a ledger."""

QUERIES = 4
"""Keys asked for."""

PART = 3
"""Tokens of a key, and of a value."""

BOS, SEP = 39, 40
FILL = (36, 37, 38)
VOCABULARY = 41

_KEY_SYMBOLS = 4  # a position of a key
_VALUE_SYMBOLS = 8  # a position of a value
_KEYS = _KEY_SYMBOLS**PART
_FIRST_KEY = tuple(_KEY_SYMBOLS * part for part in range(PART))
_FIRST_VALUE = tuple(_KEY_SYMBOLS * PART + _VALUE_SYMBOLS * part for part in range(PART))

_GIVEN = PART - 1  # tokens of the first key

PROMPT_TOKENS = 1 + 2 * PART * RECORDS + 1 + 2 * PART * QUERIES + _GIVEN
"""Length of a prompt: all but the last token of the first key are its end."""

ANSWER_TOKENS = 2 * PART * QUERIES - _GIVEN
"""Length of an answer."""


class Batch(NamedTuple):
    """Sequences of the task.

    Attributes:
        prompts: ``[B, PROMPT_TOKENS]`` int64.
        answers: ``[B, ANSWER_TOKENS]`` int64.
    """

    prompts: NDArray[np.int64]
    answers: NDArray[np.int64]


def make_batch(count: int, generator: np.random.Generator) -> Batch:
    """Draw ``count`` sequences. Equal generators draw equal sequences."""
    keys = generator.random((count, _KEYS)).argsort(axis=1)[:, :RECORDS]
    symbols = [keys // _KEY_SYMBOLS ** (PART - 1 - part) % _KEY_SYMBOLS + _FIRST_KEY[part] for part in range(PART)]
    drawn = (generator.random((count, RECORDS, PART)) * _VALUE_SYMBOLS).astype(np.int64)
    ledger = np.concatenate([np.stack(symbols, axis=-1), drawn + np.array(_FIRST_VALUE)], axis=-1)
    asked = generator.random((count, RECORDS)).argsort(axis=1)[:, :QUERIES]
    answers = np.take_along_axis(ledger, asked[:, :, None], axis=1)
    queries = answers.copy()
    queries[:, :, PART:] = FILL
    flat = answers.reshape(count, -1)
    one = np.ones((count, 1), dtype=np.int64)
    prompts = np.concatenate(
        [BOS * one, ledger.reshape(count, -1), SEP * one, queries.reshape(count, -1), flat[:, :_GIVEN]], axis=1
    )
    return Batch(prompts, flat[:, _GIVEN:])


def sequences(count: int, seed: int = 0) -> Batch:
    """The first ``count`` sequences of a seed: a longer list begins with a shorter one."""
    singles = [make_batch(1, np.random.default_rng((seed, number))) for number in range(count)]
    prompts = [item.prompts for item in singles] or [np.empty((0, PROMPT_TOKENS), np.int64)]
    answers = [item.answers for item in singles] or [np.empty((0, ANSWER_TOKENS), np.int64)]
    return Batch(np.concatenate(prompts), np.concatenate(answers))
