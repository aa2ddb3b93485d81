"""Checks of attention over a format: the chosen kernels against a plain sum over decoded rows.

Oracle: the stored rows are read by ``load``, whose values other checks hold to the format's own ``decode``, and attended to
one query, one head at a time in float64. No code is shared with any kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvcore.contract import AttendParams
from kvcore.engine.step import Step
from kvcore.testing.formats.base import FormatBase
from kvcore.testing.harness import View, skip_unsupported
from kvcore.testing.memory import POISON

Array = npt.NDArray[np.float64]

_WINDOW = 5


def attention(
    q: Array, k: Array, v: Array, scale: float, window: int | None, sink: float | None, bias: Array | None
) -> Array:
    """One query ``[Dk]`` at the last position over ``k [S, Dk]``, ``v [S, Dv]``: ``[Dv]``."""
    first = 0 if window is None else max(0, len(k) - window)
    scores = k[first:] @ q * scale
    if bias is not None:
        scores = scores + bias[first : len(k)]
    top = max(float(scores.max()), -np.inf if sink is None else sink)
    weights = np.exp(scores - top)
    total = weights.sum() + (0.0 if sink is None else np.exp(sink - top))
    result: Array = (weights / total) @ v[first:]
    return result


@dataclass
class Scene:
    """Two requests over scattered pages: a few that are whole, one that is partly written, and noise behind its end.

    Attributes:
        lengths: tokens of each request before the step.
    """

    view: View
    lengths: dict[str, int]

    def step(self, counts: dict[str, int]) -> Step:
        """Begin a step and store its rows in every layer."""
        step = self.view.cache.begin(list(counts.items()))
        for layer in self.view.layout.layers:
            step.store(layer, self.view.rows(sum(counts.values()), 40, layer)).wait()
        self.poison_ends(counts)
        return step

    def poison_ends(self, counts: dict[str, int]) -> None:
        """0xFF (NaN, in most formats) into the slots behind the end of every request."""
        view = self.view
        for name, count in counts.items():
            end = self.lengths[name] + count
            (table,) = [view.tables(name)[view.range]]
            for at in range(end, -(-end // view.page_size) * view.page_size):
                unit, slot = table[at // view.page_size], at % view.page_size
                for region in view.token_regions():
                    for field in region.data_fields:
                        for layer in view.layout.layers:
                            view.arena[view.map.element(layer, region.name, field, unit, slot)] = POISON

    def heads(self) -> int:
        """Query heads."""
        return self.view.group.num_query_heads

    def key_dim(self) -> int:
        """Elements of a query."""
        read = [t for t in self.view.group.tensors if t.name in ("k", "latent", "rope")]
        return sum(tensor.head_dim for tensor in read)

    def decoded(self, layer: int, name: str, length: int) -> tuple[Array, Array]:
        """Keys ``[S, H, Dk]`` and values ``[S, H, Dv]`` of a request as stored."""
        rows = self.view.load(layer, self.view.slots(name, 0, length))
        if "latent" in rows:
            k = torch.cat([rows[part] for part in ("latent", "rope") if part in rows], dim=-1)
            return k.double().numpy(), rows["latent"].double().numpy()
        return rows["k"].double().numpy(), rows["v"].double().numpy()

    def check(self, step: Step, counts: dict[str, int], params: AttendParams, limit: float, skip: str = "") -> None:
        """Compare attention of every layer, query by query; rows of ``skip`` need only be finite.

        Where pages of a window are kept, no wider window is asked for.
        """
        kept = dict(self.view.layout.space_of_range(self.view.range).options).get("window")
        if kept is not None:
            params = replace(params, window=min(kept, params.window or kept))
        heads, scale = self.heads(), params.sm_scale
        tokens = sum(counts.values())
        for layer in self.view.layout.layers:
            q = torch.randn(tokens, heads, self.key_dim(), generator=torch.Generator().manual_seed(layer))
            width = next(t.head_dim for t in self.view.group.tensors if t.name in ("v", "latent"))
            out = torch.full((tokens, heads, width), float("nan"))
            step.attend(layer, q, out, params).wait()
            assert bool(out.isfinite().all()), f"attention of layer {layer} gives numbers that are not finite"
            at = 0
            for name, count in counts.items():
                if name == skip:
                    at += count
                    continue
                length = self.lengths[name] + count
                k, v = self.decoded(layer, name, length)
                for token in range(at, at + count):
                    seen = length - count + (token - at) + 1
                    for head in range(heads):
                        mine = head * k.shape[1] // heads
                        want = attention(
                            q[token, head].double().numpy(),
                            k[:seen, mine],
                            v[:seen, mine],
                            scale,
                            params.window,
                            None if params.sinks is None else float(params.sinks[head]),
                            None
                            if params.position_bias is None
                            else params.position_bias[token, head].double().numpy(),
                        )
                        error = np.abs(out[token, head].double().numpy() - want).max() / np.abs(want).max()
                        assert error <= limit, (
                            f"attention differs from exact attention over the decoded rows: {error:.3g} of the largest "
                            f"value, {limit} allowed (layer {layer}, request {name}, position {seen - 1}, head {head})"
                        )
                at += count


class FormatAttention(FormatBase):
    """Both attention ops, as the chosen kernels serve them. Groups that nothing attends over are skipped.

    Attributes:
        attention_error: largest error of attention over decoded rows, relative to the largest value of its output.
    """

    attention_error: ClassVar[float] = 0.02

    @pytest.fixture
    def scene(self, view: View) -> Scene:
        """Requests whose pages are in no order, in memory full of 0xFF."""
        view.needs("store", "load", "attend_decode", "attend_prefill")
        names = {tensor.name for tensor in view.group.tensors}
        skip_unsupported(view.can_attend(), f"attention over {', '.join(sorted(names))}")
        return scattered(view)

    def each_op(self, scene: Scene, params: Callable[[int, int], AttendParams]) -> None:
        """Check a prefill chunk, then a decode step; ``params(tokens, max length)`` makes their parameters."""
        for counts in ({"a": 3, "b": 1}, {"a": 1, "b": 1}):
            step = scene.step(counts)
            longest = max(scene.lengths[name] + count for name, count in counts.items())
            scene.check(step, counts, params(sum(counts.values()), longest), self.attention_error)
            step.abandon()

    def test_attends_over_everything(self, scene: Scene) -> None:
        """Every key up to the query's own position counts, with its value, whatever order the pages lie in."""
        self.each_op(scene, lambda tokens, length: AttendParams(0.2))

    def test_attends_within_a_window(self, scene: Scene) -> None:
        """Keys behind the window do not count."""
        self.each_op(scene, lambda tokens, length: AttendParams(0.2, window=_WINDOW))

    def test_attends_with_sinks(self, scene: Scene) -> None:
        """A sink takes its share of the weights and gives no value."""
        sinks = torch.linspace(-1.0, 3.0, scene.heads())
        self.each_op(scene, lambda tokens, length: AttendParams(0.2, sinks=sinks))

    def test_attends_with_a_position_bias(self, scene: Scene) -> None:
        """A bias a query, head and key is added to the scaled scores."""

        def params(tokens: int, length: int) -> AttendParams:
            bias = torch.randn(tokens, scene.heads(), length, generator=torch.Generator().manual_seed(5)) * 2
            return AttendParams(0.2, position_bias=bias)

        self.each_op(scene, params)

    def test_a_released_row_disturbs_no_other(self, scene: Scene) -> None:
        """A request that is released in the step reads null units: finite, and the other rows are exact."""
        for counts in ({"b": 2, "a": 3}, {"b": 1, "a": 1}):
            step = scene.step(counts)
            scene.view.cache.release("b")
            scene.check(step, counts, AttendParams(0.2), self.attention_error, skip="b")
            step.abandon()
            scene.view.cache.admit("b", 1)
            scene.lengths["b"] = 0


def scattered(view: View) -> Scene:
    """Fill a cache with single pages and give two requests what comes free, in no order; history is stored."""
    cache, page = view.cache, view.page_size
    holes: list[Any] = []
    while cache.can_admit(1):
        holes.append(f"hole{len(holes)}")
        cache.admit(holes[-1], 1)
    order = np.random.default_rng(11).permutation(len(holes))
    free = iter(order.tolist())
    lengths, half = {"a": 0, "b": 0}, max(1, page // 2)
    for turn, (name, count) in enumerate([("a", page), ("b", half), ("a", page), ("b", page), ("a", half)]):
        held = len(view.tables(name)[view.range]) if lengths[name] else 0
        for _ in range(-(-(lengths[name] + count) // page) - held):
            cache.release(holes[next(free)])
        if not lengths[name]:
            cache.admit(name, count)
        view.write(name, count, seed=30 + turn)
        lengths[name] += count
    for _ in range(2 + 3 // page):  # for the step's own tokens
        cache.release(holes[next(free)])
    return Scene(view, lengths)
