"""The same numbers for a token, whoever shares its forward pass.

A matrix product of one row, or of a few, is computed in another order of additions than one of many rows, so that a
token's keys and values differ in the last bit with the company it is computed in. A KV format that rounds coarsely makes
a visible difference of that now and then, and two runs of the same prompts that are batched unlike would not agree.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

LEAST_ROWS = 4
"""From so many rows on, torch's CPU products of fp32 give each row the same sum (found by trying, and held by a test)."""

_MARK = "kvcore_steady"


def steady_rows(model: Any) -> None:
    """Have the linear layers of a model on the CPU work on :data:`LEAST_ROWS` rows at least. Idempotent.

    Their results are those of before, up to rounding. Models on other devices are left as they are.
    """
    if model.device.type != "cpu":
        return
    for module in model.modules():
        if isinstance(module, torch.nn.Linear) and not hasattr(module, _MARK):
            setattr(module, _MARK, True)
            module.forward = partial(_padded, module.forward)  # type: ignore[method-assign]


def _padded(forward: Callable[[torch.Tensor], torch.Tensor], rows: torch.Tensor) -> torch.Tensor:
    """``[…, K]`` to ``[…, N]``, with rows of zeros where there are few."""
    flat = rows.reshape(-1, rows.shape[-1])
    count = len(flat)
    if not 0 < count < LEAST_ROWS:
        return forward(rows)
    return forward(pad(flat, (0, 0, 0, LEAST_ROWS - count)))[:count].reshape(*rows.shape[:-1], -1)
