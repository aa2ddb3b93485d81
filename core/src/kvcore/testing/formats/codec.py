"""Checks of a format's precision: how far a token's values are from what was stored, at every size of them."""

from __future__ import annotations

import pytest
import torch

from kvcore.contract import Format
from kvcore.layout import Layout
from kvcore.spec import LayerGroup
from kvcore.testing.formats.base import FormatBase, encoded_together
from kvcore.testing.harness import make_rows

MAGNITUDES = tuple(10.0**power for power in range(-6, 4))
"""Sizes of the largest value of a token's head that are tried: 1e-6 … 1e3."""


class FormatCodec(FormatBase):
    """Precision, token by token."""

    @pytest.mark.parametrize("magnitude", MAGNITUDES, ids=lambda value: f"{value:g}")
    def test_keeps_its_precision(self, layout: Layout, held: LayerGroup, kv_format: Format, magnitude: float) -> None:
        """Within :attr:`kvcore.contract.Format.max_error` of the largest value of the same token and head, at sizes from
        1e-6 to 1e3 that the format says it keeps (:attr:`kvcore.contract.Format.magnitudes`)."""
        low, high = kv_format.magnitudes
        assert low > 0, "the smallest size is positive"
        assert high >= 1000 * low, "a format keeps its precision over three decades at least"
        assert 0 < kv_format.max_error <= 0.5, "what is wrong by half is not kept"
        together = encoded_together(kv_format, layout)
        rows = make_rows(held, -(-5 // together) * together, torch.Generator().manual_seed(13))
        rows = {name: x / x.abs().amax(-1, keepdim=True) * magnitude for name, x in rows.items()}
        back = kv_format.decode(layout, kv_format.encode(layout, rows), torch.float32)
        for name, values in rows.items():
            got = back[name]
            assert bool(got.isfinite().all()), f"{name} of size {magnitude:g} is not finite"
            if not low <= magnitude <= high:
                continue
            errors = (got - values).abs().amax(-1) / magnitude
            token, head = divmod(int(errors.argmax()), errors.shape[1])
            worst = float(errors.max())
            assert worst <= kv_format.max_error, (
                f"{name} of size {magnitude:g} is wrong by {worst:.3g} of it, {kv_format.max_error} allowed "
                f"(token {token}, head {head})"
            )
