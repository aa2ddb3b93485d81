"""Kernel choice: by support and priority, never by order, with every refusal's reason."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from kvcore.builtin.formats import Bf16
from kvcore.builtin.kernels.reference import REFERENCE_KERNELS
from kvcore.builtin.kernels.tuned import TORCH_KERNELS
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import FULL, OPS, Format, Kernel, PoolView, Support, unsupported
from kvcore.errors import PluginError, UnsupportedError
from kvcore.layout import Layout
from kvcore.memory.pool import Pool
from kvcore.plugins.dispatch import choose_kernels, resolve_kernels
from kvcore.spec import LayerGroup, Shard, TensorSpec

GROUP = LayerGroup("full", (0,), (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8)), 4)
LATENT = LayerGroup("full", (0,), (TensorSpec("latent", 1, 8), TensorSpec("rope", 1, 4)), 4)
REFERENCE = [kernel() for kernel in REFERENCE_KERNELS]
TUNED = [kernel() for kernel in TORCH_KERNELS]


def layout(group: LayerGroup = GROUP) -> Layout:
    return Bf16().layout(group, page_size=4, shard=Shard(), arena="page_major")


def made(label: str, *, rank: int = 0, known: tuple[str, ...] = ("*",), answer: Support = FULL) -> Kernel:
    """A kernel for ``load``."""

    class Made(Kernel):
        op = "load"
        name = label
        formats = known
        priority = rank

        def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
            return answer

        def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
            return lambda *args: label

    return Made()


def test_the_highest_supported_priority_wins_in_any_order() -> None:
    extra = [
        made("fast", rank=20, answer=unsupported("needs a page of 128")),
        made("other", rank=30, known=("mxfp8", "dsv4_fp8")),
        made("good", rank=15),
    ]
    base = [kernel for kernel in REFERENCE if kernel.op != "load"]
    pool = Pool(layout(), {"pages": 4}, MemfdPool())
    for order in permutations([*extra, *(k for k in REFERENCE if k.op == "load")]):
        table = resolve_kernels([*order, *base], pool, GROUP, Bf16())
        assert table.load(0, None, None) == "good"
        (choice,) = [c for c in table.choices if c.op == "load"]
        assert choice.chosen == "good"
        assert dict(choice.refused) == {
            "fast": "needs a page of 128",
            "other": "knows the formats mxfp8, dsv4_fp8, not bf16",
            "reference_load": "priority 0 is below 15 of good",
        }
    pool.close()


def test_a_tie_is_an_error_naming_both() -> None:
    with pytest.raises(PluginError, match="several kernels of one priority") as error:
        choose_kernels([*REFERENCE, made("mine", rank=0)], "cpu", layout(), GROUP)
    assert error.value.fields["kernels"] == ["mine", "reference_load"]
    # A tie below the winner, or of a kernel that cannot serve the pool, decides nothing.
    extra = [made("winner", rank=1), made("mine", rank=0), made("no", rank=1, answer=unsupported("no"))]
    assert choose_kernels([*REFERENCE, *extra], "cpu", layout(), GROUP).kernels["load"].name == "winner"


def test_an_op_without_a_kernel_is_refused_with_every_reason() -> None:
    kernels = [
        *(kernel for kernel in REFERENCE if kernel.op != "load"),
        made("a", answer=unsupported("needs a GPU")),
        made("b", known=("fp16",)),
        made("c", answer=unsupported("")),
    ]
    with pytest.raises(UnsupportedError, match="no kernel for load") as error:
        choose_kernels(kernels, "cpu", layout(), GROUP)
    assert error.value.fields["refused"] == [
        "a: needs a GPU",
        "b: knows the formats fp16, not bf16",
        "c: gave no reason",
    ]


def test_the_tuned_kernels_serve_plain_pools() -> None:
    chosen = choose_kernels([*REFERENCE, *TUNED], "cpu", layout(), GROUP)
    assert [choice.op for choice in chosen.choices] == list(OPS)
    assert [choice.chosen for choice in chosen.choices] == [f"torch_{op}" for op in OPS]


def test_other_groups_and_devices_are_served_by_the_reference() -> None:
    chosen = choose_kernels([*REFERENCE, *TUNED], "cpu", layout(LATENT), LATENT)
    assert chosen.kernels["store"].name == "torch_store"
    assert chosen.kernels["attend_decode"].name == "reference_attend_decode"
    (choice,) = [c for c in chosen.choices if c.op == "attend_prefill"]
    assert choice.refused == (("torch_attend_prefill", "attends over k and v, not over latent, rope"),)
    chosen = choose_kernels([*REFERENCE, *TUNED], "cuda:0", layout(), GROUP)
    assert {kernel.name for kernel in chosen.kernels.values()} == {f"reference_{op}" for op in OPS}


def test_groups_of_unknown_tensors_cannot_be_attended() -> None:
    group = LayerGroup("full", (0,), (TensorSpec("k", 2, 8), TensorSpec("w", 2, 8)), 4)
    with pytest.raises(UnsupportedError, match="no kernel for attend_decode") as error:
        choose_kernels([*REFERENCE, *TUNED], "cpu", layout(group), group)
    assert len(error.value.fields["refused"]) == 2
    assert all("not over k, w" in text for text in error.value.fields["refused"])
