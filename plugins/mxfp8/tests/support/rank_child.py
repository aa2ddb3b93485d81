"""One rank of an engine with block scales: ``python rank_child.py``. Beside the commands of the kit's rig it knows

- ``{"do": "speculate", "request", "tag", "drafted", "accepted"}``: store drafted tokens of which only the first ones are
  valid, and commit those.

Values are chosen so that both formats keep them exactly: what comes back is compared bit by bit, and nothing here knows
how the formats round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore.testing.ranks.child import Answer, RowsRank, main

BLOCK = 32


def model(window: int) -> ModelSpec:
    """Full and windowed layers, heads of unlike widths, one of which 32 does not divide."""
    full = (TensorSpec("k", 2, 80), TensorSpec("v", 2, 64))
    swa = (TensorSpec("k", 2, 64), TensorSpec("v", 2, 32))
    return ModelSpec(
        "ranks",
        (
            LayerGroup("full", (0, 3), full, num_query_heads=8),
            LayerGroup("swa", (1, 2), swa, num_query_heads=8, space="window", space_options=(("window", window),)),
        ),
        "fp32",
    )


def rows(bits: int, tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
    """Values ``[T, H, D]`` by global ids alone: ± 1.mantissa × 2 ** exponent, the exponent another one in every block.

    Args:
        bits: bits of the mantissa.
    """
    token = torch.arange(start, stop).reshape(-1, 1, 1)
    head = torch.tensor(list(heads)).reshape(1, -1, 1)
    dim = torch.arange(tensor.head_dim).reshape(1, 1, -1)
    kind = ["k", "v"].index(tensor.name)
    of_row = tag * 131 + layer * 29 + kind * 17 + token * 7 + head * 11
    exponent = (of_row * 5 + dim // BLOCK * 3) % 13 - 6 - dim % 3
    step = 1 << bits
    mantissa = 1 + (of_row + dim * 5) % step / step
    sign = 1 - 2 * ((of_row + dim) % 2)
    return (sign * mantissa * 2.0**exponent).float()


class ScaledRank(RowsRank):
    plugins = ("mxfp8",)
    settings = {"cache.memory": "1MiB", "cache.max_requests": 4}  # noqa: RUF012

    def __init__(self, setup: Mapping[str, Any]) -> None:
        super().__init__(setup)
        self.bits = 2 if self.cache.config.cache.format.endswith("e5m2") else 3

    def model(self) -> ModelSpec:
        return model(self.options["window"])

    def rows(self, tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
        return rows(self.bits, tag, layer, tensor, heads, start, stop)

    def speculate(self, request: str, tag: int, drafted: int, accepted: int) -> Answer:
        """Rejected rows hold other values: they must not reach a byte. Their fresh slots still read as 0."""
        start = self.cache.length(request)
        valid = torch.arange(drafted) < accepted
        leaked = []
        with self.cache.begin([(request, drafted)]) as step:
            for layer, tensors in self.tensors():
                drafts = {}
                for tensor in tensors:
                    right = self.mine(tag, layer, tensor, start, start + drafted)
                    drafts[tensor.name] = torch.where(valid[:, None, None], right, right * -64)
                step.store(layer, drafts, valid=valid)
            for name, layout in self.cache.layouts.items():
                slots = step.batch(name).slots[accepted:drafted]
                for layer in layout.layers:
                    out = self.empty(name, len(slots))
                    step.load(layer, slots, out)
                    leaked += [[name, layer, tensor] for tensor, values in out.items() if bool(values.any())]
            step.commit(accepted=[accepted])
        return {"leaked": leaked, "length": self.cache.length(request)}


if __name__ == "__main__":
    main(ScaledRank)
