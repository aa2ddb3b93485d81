"""One rank of an engine with full, windowed and latent layers: ``python rank_child.py``."""

from __future__ import annotations

import torch

from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore.testing.ranks.child import RowsRank, main

TENSORS = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
LATENT = (TensorSpec("latent", 1, 8, sharded=False), TensorSpec("rope", 1, 4, sharded=False))
MODEL = ModelSpec(
    "ranks",
    (
        LayerGroup("full", (0, 3), TENSORS, num_query_heads=8),
        LayerGroup("swa", (1, 4), TENSORS, num_query_heads=8, space="window", space_options=(("window", 8),)),
        LayerGroup("mla", (2,), LATENT, num_query_heads=8),
    ),
    "fp32",
)


class PlainRank(RowsRank):
    settings = {"cache.page_size": 4, "cache.memory": "256KiB", "cache.max_requests": 4}  # noqa: RUF012

    def model(self) -> ModelSpec:
        return MODEL

    def rows(self, tag: int, layer: int, tensor: TensorSpec, heads: range, start: int, stop: int) -> torch.Tensor:
        token = torch.arange(start, stop).reshape(-1, 1, 1)
        head = torch.tensor(list(heads)).reshape(1, -1, 1)
        dim = torch.arange(tensor.head_dim).reshape(1, 1, -1)
        kind = ["k", "v", "latent", "rope"].index(tensor.name)
        return (1 + tag * 1000 + layer * 100 + kind * 50 + token * 7 + head * 11 + dim * 3).float()


if __name__ == "__main__":
    main(PlainRank)
