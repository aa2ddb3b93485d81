"""Train the guard model and write its weights: some minutes on one core.

    python plugins/transformers/scripts/train_guard.py --out DIR --seed 0

The same seed gives the same weights on the same machine. It trains at a constant rate until the answers of held-out
sequences are right, then on with a falling rate, and says at the end how many of a fresh set are. ``--steps N`` trains
that many steps and writes nothing, to see that the loss falls.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from kvcore_transformers.guard.model import make_model
from kvcore_transformers.guard.task import ANSWER_TOKENS, Batch, make_batch

TAUGHT = ANSWER_TOKENS - 1  # the first token of an answer ends a key, as others do later: it comes with them
RATE = 3e-3
FLOOR = 0.02  # of the rate, at the end of its fall
WARM_UP = 100
SEQUENCES = 32  # a step
LOOK = 50  # steps between two looks at the held-out set
ENOUGH = 0.99
LONGEST = 3000  # steps at the constant rate
TAIL = 0.6  # steps at a falling rate, as a part of those before


def main(arguments: list[str] | None = None) -> int:
    """Entry point; 1 where the answers are not right in the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="directory to write config.json and model.safetensors to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="train so many steps, print the loss, write nothing")
    options = parser.parse_args(arguments)
    if (options.out is None) == (options.steps is None):
        parser.error("exactly one of --out and --steps is needed")
    torch.set_num_threads(1)
    training = Training(options.seed)
    if options.steps is not None:
        for step in range(1, options.steps + 1):
            print(f"step {step} loss {training.step(_warm(step)):.4f}", flush=True)
        return 0
    training.run()
    share = exact(training.model, make_batch(1024, np.random.default_rng((options.seed, 3))))
    training.model.save_pretrained(options.out)
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{training.done} steps, {training.seconds:.0f} s, {share:.4f} of 1024 fresh answers right, {size} bytes")
    return 0 if share >= ENOUGH else 1


class Training:
    """A model, its optimiser and its stream of sequences.

    Attributes:
        model: the model.
        done: steps done.
    """

    def __init__(self, seed: int) -> None:
        self.model = make_model(seed).train()
        self.done = 0
        self._began = time.monotonic()
        self._stream = _batches(np.random.default_rng((seed, 1)))
        self._held_out = make_batch(256, np.random.default_rng((seed, 2)))
        plain = {
            name
            for name, weight in self.model.named_parameters()
            if weight.ndim < 2 or "sconv" in name or "embed" in name
        }
        named = list(self.model.named_parameters())
        self._optimiser = torch.optim.AdamW(
            [
                {"params": [weight for name, weight in named if name not in plain], "weight_decay": 0.05},
                {"params": [weight for name, weight in named if name in plain], "weight_decay": 0.0},
            ],
            lr=RATE,
            betas=(0.9, 0.98),
        )

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._began

    def run(self) -> None:
        """Train to the end."""
        share = 0.0
        while share < ENOUGH and self.done < LONGEST:
            share = self._some(LOOK, lambda step: _warm(step))
        begin, length = self.done, int(TAIL * self.done)
        while self.done < begin + length:
            self._some(min(LOOK, begin + length - self.done), lambda step: _falling((step - begin) / length))

    def step(self, rate: float) -> float:
        """One step at a share of the full rate; return the loss."""
        for group in self._optimiser.param_groups:
            group["lr"] = RATE * rate
        batch = next(self._stream)
        tokens = torch.from_numpy(np.concatenate(batch, axis=1))
        logits = self.model(tokens[:, :-1], use_cache=False, logits_to_keep=TAUGHT).logits
        loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, -TAUGHT:].reshape(-1))
        self._optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimiser.step()
        self.done += 1
        return float(loss.detach())

    def _some(self, steps: int, rate: Any) -> float:
        loss = 0.0
        for _ in range(steps):
            loss = self.step(rate(self.done + 1))
        share = exact(self.model, self._held_out)
        print(f"step {self.done} {self.seconds:4.0f} s loss {loss:.4f} right {share:.4f}", flush=True)
        return share


def exact(model: Any, batch: Batch) -> float:
    """Share of sequences that the model answers right: with the right answer so far, each next token is the likeliest."""
    model.eval()
    tokens = torch.from_numpy(np.concatenate(batch, axis=1))
    with torch.inference_mode():
        logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=TAUGHT).logits
    model.train()
    # Greedy decoding follows the right answer for as long as it is right, so that the first wrong token decides here too.
    right: torch.Tensor = (logits.argmax(-1) == tokens[:, -TAUGHT:]).all(-1)
    return float(right.float().mean())


def _batches(generator: np.random.Generator) -> Iterator[Batch]:
    while True:
        yield make_batch(SEQUENCES, generator)


def _warm(step: int) -> float:
    return min(1.0, step / WARM_UP)


def _falling(share: float) -> float:
    return FLOOR + (1.0 - FLOOR) * 0.5 * (1.0 + math.cos(math.pi * share))


if __name__ == "__main__":
    sys.exit(main())
