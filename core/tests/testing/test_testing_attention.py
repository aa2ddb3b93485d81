"""The checks of attention and precision, tried with mutants: each is wrong in one way, and the check of that turns red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvcore.builtin.kernels.reference import ReferenceDecode, ReferenceLoad, ReferencePrefill
from kvcore.contract import DONE, AttendParams, BatchPlan, Fence, Format, Kernel
from kvcore.plugins import load_plugins
from kvcore.testing import GROUPS, Case, Check, FormatSuite, ThreeComponents, run
from kvcore.testing.formats.attention import attention
from kvcore.testing.harness import Subject

Attend = Callable[..., Fence]
EVERY = {
    "test_attends_over_everything",
    "test_attends_within_a_window",
    "test_attends_with_sinks",
    "test_attends_with_a_position_bias",
    "test_a_released_row_disturbs_no_other",
}
WHOLE = [("ignores_the_window", ("attend_decode",)), ("null_units_are_nan", ("attend_prefill",))]
ONLY_ONE = [
    ("ignores_the_window", {"test_attends_within_a_window"}),
    ("window_is_one_longer", {"test_attends_within_a_window"}),
    ("ignores_sinks", {"test_attends_with_sinks"}),
    ("sinks_of_other_heads", {"test_attends_with_sinks"}),
    ("ignores_the_bias", {"test_attends_with_a_position_bias"}),
    ("null_units_are_nan", {"test_a_released_row_disturbs_no_other"}),
]
# One arena order is enough to see a kernel that is wrong.
ATTENTION = "(attends or disturbs) and page_major"
ALL = ["writes_zeros", "halves_v", "halves_k", "raises", "sorts_the_pages", "reads_past_the_end", "other_heads"]


class Small(FormatSuite):
    groups: ClassVar = {"grouped": GROUPS["grouped"]}
    page_size = 4


def mutate(kind: str, attend: Attend, load: Attend) -> Attend:
    """An attention op that is wrong in one way."""

    def op(layer: int, q: torch.Tensor, out: torch.Tensor, plan: BatchPlan, params: AttendParams, after: Any) -> Fence:
        change: dict[str, Any] = {}
        if kind == "raises":
            raise RuntimeError("no such instruction")
        if kind == "halves_k":
            q = q / 2
        if kind == "ignores_the_window":
            change["window"] = None
        if kind == "window_is_one_longer" and params.window:
            change["window"] = params.window + 1
        if kind == "ignores_sinks":
            change["sinks"] = None
        if kind == "sinks_of_other_heads" and params.sinks is not None:
            change["sinks"] = params.sinks.flip(0)
        if kind == "ignores_the_bias":
            change["position_bias"] = None
        if kind == "sorts_the_pages":
            plan = dataclasses.replace(plan, page_table=plan.page_table.sort(dim=1, descending=True).values)
        if kind == "other_heads":
            q = q.flip(1)
        fence = attend(layer, q, out, plan, dataclasses.replace(params, **change), after)
        if kind == "writes_zeros":
            out.zero_()
        if kind == "halves_v":
            out /= 2
        for row, length in enumerate(plan.host_lengths):
            span = slice(plan.host_query_indptr[row], plan.host_query_indptr[row + 1])
            if kind == "null_units_are_nan" and int(plan.slots[span][0]) == -1:
                out[span] = torch.nan
            if kind == "reads_past_the_end" and length % plan.page_size:
                slot = plan.page_table[row, length // plan.page_size] * plan.page_size + length % plan.page_size
                behind = {name: torch.zeros(1, 2, 32) for name in ("k", "v")}
                load(layer, slot[None], behind, DONE)
                out[span] += 0 * behind["v"].repeat_interleave(2, 1)  # weight 0, as a kernel without a mask on V has it
        return fence

    return op


def kernels(kind: str, ops: Sequence[str]) -> list[Kernel]:
    made: list[Kernel] = []
    for base in (ReferenceDecode, ReferencePrefill):
        if base.op not in ops:
            continue

        class Mutant(base):  # type: ignore[misc, valid-type]
            name = f"mutant_{base.op}"
            priority = 1000

            def bind(self, pool: Any, group: Any, format: Any) -> Attend:
                return mutate(kind, super().bind(pool, group, format), ReferenceLoad().bind(pool, group, format))

        made.append(Mutant())
    return made


def checked(make: Callable[[], Format], added: Sequence[Kernel] = (), select: str = "") -> list[Check]:
    class WithKernels(Subject):
        def kernels(self) -> list[Kernel]:
            return [*load_plugins(()).kernels(), *added]

    fixtures = {"kv_format": make, "registry": lambda: WithKernels(load_plugins(()))}
    return run([Case("formats", "mutant", Small, fixtures)], select=select)


def failed(results: Sequence[Check]) -> dict[str, str]:
    return {item.check.partition("[")[0]: item.reason for item in results if item.outcome == "failed"}


@pytest.mark.parametrize("ops", [("attend_decode",), ("attend_prefill",)])
@pytest.mark.parametrize(("kind", "want"), ONLY_ONE)
def test_one_check_sees_it(kind: str, want: set[str], ops: tuple[str, ...]) -> None:
    """In either op alone; nothing else of the whole suite does, tried with two of them."""
    select = "" if (kind, ops) in WHOLE else ATTENTION
    assert failed(checked(ThreeComponents, kernels(kind, ops), select=select)).keys() == want


@pytest.mark.parametrize("ops", [("attend_decode",), ("attend_prefill",)])
@pytest.mark.parametrize("kind", ALL)
def test_every_check_of_attention_sees_it(kind: str, ops: tuple[str, ...]) -> None:
    found = failed(checked(ThreeComponents, kernels(kind, ops), select=ATTENTION))
    assert found.keys() == EVERY
    for reason in found.values():
        assert "\n" not in reason.split("assert")[0].strip(), "one clear line"
        assert "attention" in reason or "no such instruction" in reason


def test_the_reference_is_green() -> None:
    results = checked(ThreeComponents, select="attends or disturbs or its_precision")  # in either arena order
    assert {item.outcome for item in results} == {"passed"}
    assert {item.check.partition("[")[0] for item in results} == {*EVERY, "test_keeps_its_precision"}


class Coarse(ThreeComponents):
    """Ten times wrong below 0.008."""

    def decode(
        self, layout: Any, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        rows = super().decode(layout, elements, dtype)
        return {name: torch.where(x.abs() < 0.008, x * 10, x) for name, x in rows.items()}


class OneHead(ThreeComponents):
    """One token's head is coarser than the others; the largest value of the tensor is not in it."""

    def encode(self, layout: Any, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        out = super().encode(layout, rows)
        for name in rows:
            out[name, "x"][3:, 1:] &= 0x80
        return out


class Infinite(ThreeComponents):
    """Small values become infinite; it does not claim to keep them, and that is no excuse."""

    def decode(
        self, layout: Any, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        rows = super().decode(layout, elements, dtype)
        return {n: torch.where((x != 0) & (x.abs().amax() < 1e-4), torch.inf, x) for n, x in rows.items()}


def test_a_format_that_is_wrong_for_small_values() -> None:
    found = failed(checked(Coarse))
    assert found.keys() == {"test_keeps_its_precision"}
    assert "is wrong by" in found["test_keeps_its_precision"]


@pytest.mark.parametrize("make", [OneHead, Infinite])
def test_precision_is_that_of_every_token_and_head(make: Callable[[], Format]) -> None:
    assert "test_keeps_its_precision" in failed(checked(make, select="precision"))


def test_the_oracle_against_a_sum_by_hand() -> None:
    """Two keys, a sink, a bias: weights are e^1 and e^0 of e^1 + e^0 + e^2."""
    q, k = np.array([1.0, 0.0]), np.array([[9.0, 9.0], [2.0, 5.0], [0.0, 3.0]])
    v = np.array([[100.0], [1.0], [10.0]])
    got = attention(q, k, v, 0.5, 2, 2.0, np.array([7.0, 0.0, 0.0]))
    np.testing.assert_allclose(got, [(np.e * 1 + 10) / (np.e + 1 + np.e**2)])
