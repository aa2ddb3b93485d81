"""What the reference kernels cannot place is refused when a cache is configured, with the reason."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from kvcore.builtin.formats import Fp32
from kvcore.builtin.kernels.reference import REFERENCE_KERNELS
from kvcore.builtin.kernels.tuned import TORCH_KERNELS
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import Format
from kvcore.errors import LayoutError, UnsupportedError
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.memory.store import Store
from kvcore.plugins.dispatch import choose_kernels
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec

GROUP = LayerGroup("g", (0,), (TensorSpec("k", 1, 4), TensorSpec("v", 1, 4)), 1)
KERNELS = [kind() for kind in (*REFERENCE_KERNELS, *TORCH_KERNELS)]

PAGES = SpaceSpec("pages", "sequence", "page", 4)
RING = SpaceSpec("ring", "ring", "row", 0, (("ring", 4),))
ROWS = SpaceSpec("rows", "compressed", "row", 4)
TOKENS = SpaceSpec("tokens", "sequence", "row", 1)


class Tiny(Format):
    """fp32 rows, each tensor in the unit ranges it is told."""

    name = "tiny"

    def __init__(self, spaces: tuple[SpaceSpec, ...], **ranges: tuple[str, ...]) -> None:
        self.spaces, self.ranges = spaces, ranges

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        regions = []
        for tensor, ranges in self.ranges.items():
            paged = any(space.unit == "page" for space in self.spaces if space.name in ranges)
            axes = ((Axis("slot", 4),) if paged else ()) + (Axis("head", 1), Axis("dim", 4))
            order = "slot head dim" if paged else "head dim"
            regions.append(region(tensor, f"g/{tensor}", (Field("x", "fp32", order, axes),), ranges=ranges))
        names = tuple(UnitRange(space.name, space.name) for space in self.spaces)
        return Layout(self.name, 1, "g", (0,), tuple(regions), self.spaces, names, arena)

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        return {(item.name, "x"): rows[item.name] for item in layout.moving_regions}

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {name: values.to(dtype) for (name, _), values in elements.items()}


class Indexed(Tiny):
    """One that asks for every tensor by its name."""

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {tensor.name: elements[tensor.name, "x"].to(dtype) for tensor in GROUP.tensors}


def made(fmt: Tiny) -> tuple[Layout, dict[str, int]]:
    return (
        fmt.layout(GROUP, page_size=4, shard=Shard(), arena="page_major"),
        {space.name: 8 for space in fmt.spaces},
    )


def store(fmt: Format, layout: Layout, units: dict[str, int]) -> Store:
    model = ModelSpec("m", (GROUP,), "fp32")
    return Store(model, {"g": layout}, {"g": fmt}, {"g": units}, [MemfdPool()], KERNELS, max_rows=2, max_tokens=8)


@pytest.mark.parametrize(
    ("fmt", "reason"),
    [
        (Tiny((RING,), k=("ring",), v=("ring",)), "space 'ring'"),
        (Tiny((ROWS,), k=("rows",), v=("rows",)), "space 'compressed'"),
        (Tiny((RING, ROWS), k=("ring", "rows"), v=("ring", "rows")), "space 'ring'"),
        (Tiny((PAGES, ROWS), k=("pages",), v=("rows",)), "region 'v' has rows"),
        (Tiny((TOKENS, RING), k=("tokens",), v=("ring",)), "region 'v' has ring"),
    ],
)
def test_ranges_without_a_slot_for_every_token_are_refused_with_the_reason(fmt: Tiny, reason: str) -> None:
    layout, units = made(fmt)
    with pytest.raises(UnsupportedError, match="no kernel for store") as caught:
        store(fmt, layout, units)
    (refused,) = (text for text in caught.value.fields["refused"] if text.startswith("reference_store"))
    assert reason in refused
    for op in ("load", "attend_decode", "attend_prefill"):
        (kernel,) = (k for k in KERNELS if k.name == f"reference_{op}")
        assert reason in kernel.supports("cpu", layout, GROUP).reason
    (copy,) = (k for k in KERNELS if k.name == "reference_copy_units")
    assert copy.supports("cpu", layout, GROUP)


@pytest.mark.parametrize(
    "fmt", [Tiny((PAGES,), k=("pages",), v=("pages",)), Tiny((TOKENS,), k=("tokens",), v=("tokens",))]
)
def test_pages_and_rows_of_one_token_are_served(fmt: Tiny) -> None:
    layout, units = made(fmt)
    choose_kernels(KERNELS, "cpu", layout, GROUP)
    store(fmt, layout, units).close()


@pytest.mark.parametrize("kind", [Tiny, Indexed])
def test_a_layout_without_a_stored_tensor_is_refused(kind: type[Tiny]) -> None:
    fmt = kind((PAGES,), k=("pages",))
    layout, units = made(fmt)
    with pytest.raises(LayoutError, match="does not hold every tensor") as caught:
        store(fmt, layout, units)
    assert (caught.value.fields["expected"], caught.value.fields["got"]) == (["k", "v"], ["k.x"])


def test_torch_kernels_need_a_region_for_every_tensor() -> None:
    fmt = Fp32()
    half = LayerGroup("g", (0,), (TensorSpec("k", 1, 4),), 1)
    layout = fmt.layout(half, page_size=4, shard=Shard(), arena="page_major")
    with pytest.raises(LayoutError, match="does not hold every tensor"):
        store(fmt, layout, {"pages": 4})
