"""The same numbers for a token, whoever shares its forward pass.

A matrix product of one row, or of a few, is computed in another order of additions than one of many rows, so that a
token's keys and values differ in the last bit with the company it is computed in. A KV format that rounds coarsely makes
a visible difference of that now and then, and two runs of the same prompts that are batched unlike would not agree.

Elementwise functions are the second cause: torch computes what is left over of a tensor behind its last whole vectors with
other code than the vectors, and an exponential differs in the last bit. Which elements those are depends on the size of the
whole tensor. Rows of a multiple of :data:`LANES` elements never meet it; the norms of heads, whose rows are short, are given
rows enough. Gates of a recurrence (one number a head) are computed inside of models' functions and are not covered: they are
the same as long as a step has fewer than :data:`LANES` of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import gcd
from typing import Any

import torch
from torch.nn.functional import pad

LEAST_ROWS = 4
"""From so many rows on, torch's CPU products of fp32 give each row the same sum (found by trying, and held by a test)."""

LANES = 32
"""Elements that torch's elementwise loops on the CPU take at once: two vectors of 16 fp32 (AVX-512); narrower ones divide it."""

_MARK = "kvcore_steady"


def steady_rows(model: Any) -> None:
    """Have the linear layers of a model on the CPU work on :data:`LEAST_ROWS` rows at least, and norms with a gate on whole
    vectors. Idempotent.

    Their results are those of before, up to rounding. Models on other devices are left as they are.
    """
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if hasattr(module, _MARK):
            continue
        if isinstance(module, torch.nn.Linear):
            setattr(module, _MARK, True)
            module.forward = partial(_padded, module.forward)  # type: ignore[method-assign]
        elif type(module).__name__.endswith("RMSNormGated"):  # each family of models has a class of its own
            setattr(module, _MARK, True)
            module.forward = partial(_whole_vectors, module.forward)


def _padded(forward: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """``[…, K]`` to ``[…, N]``, with rows of zeros where there are few."""
    flat = rows.reshape(-1, rows.shape[-1])
    count = len(flat)
    if not 0 < count < LEAST_ROWS:
        return forward(rows)
    return forward(pad(flat, (0, 0, 0, LEAST_ROWS - count)))[:count].reshape(*rows.shape[:-1], -1)


def _whole_vectors(
    forward: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, gate: torch.Tensor
) -> torch.Tensor:
    """A norm of ``rows [N, D]`` times a function of ``gate [N, D]``, with rows of zeros up to a multiple of LANES elements."""
    count, width = rows.shape
    missing = -count % (LANES // gcd(LANES, width))
    if not missing:
        return forward(rows, gate)
    return forward(pad(rows, (0, 0, 0, missing)), pad(gate, (0, 0, 0, missing)))[:count]
