"""Formats that encode whole units, such as one with a scale of a channel over several tokens: what the kit finds in them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import pytest
import torch

from kvcore.builtin.kernels.reference import ReferenceLoad, ReferenceStore
from kvcore.contract import DONE, FULL, BatchPlan, Fence, Format, Kernel, PluginInfo, PoolView, Support, unsupported
from kvcore.errors import UnsupportedError
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import LoadedPlugin, Registry
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore.testing import Case, FormatSuite, groups_of, run

SPAN, RING = 4, 12
GROUP = LayerGroup("full", (0, 2), (TensorSpec("k", 2, 4), TensorSpec("v", 2, 8)), num_query_heads=4)


class Channels(Format):
    """8 bits a value, a scale for every channel over four tokens, which are a unit; fp32 rows in a ring before that."""

    name: ClassVar[str] = "channels"
    ops = ("copy_units",)
    encodes = "units"
    max_error = 0.01

    def supports(self, group: LayerGroup) -> Support:
        return FULL if group.kind == "attention" else unsupported("holds tokens only")

    def sample_groups(self) -> tuple[LayerGroup, ...]:
        return (GROUP,)

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        regions = []
        for tensor in group.tensors:
            head, dim = Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)), Axis("dim", tensor.head_dim)
            for name, where, dtype, axes in (
                ("", "units", "i8", (Axis("token", SPAN), head, dim)),
                ("_scale", "units", "fp32", (head, dim)),
                ("_new", "recent", "fp32", (head, dim)),
            ):
                field = Field("x", dtype, " ".join(axis.name for axis in axes), axes)
                regions.append(region(tensor.name + name, f"{group.prefix}/{where}", (field,), ranges=(where,)))
        return Layout(
            self.name,
            self.revision,
            group.prefix,
            tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers),
            tuple(regions),
            (
                SpaceSpec("ring", "ring", "row", 0, (("ring", RING), ("window", SPAN))),
                SpaceSpec("spans", "compressed", "row", SPAN),
            ),
            (UnitRange("recent", "ring"), UnitRange("units", "spans")),
            arena,
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        out = {}
        for name, values in rows.items():
            spans = values.float().reshape(-1, SPAN, *values.shape[1:])
            scale = self.largest(spans) / 127
            codes = (spans / scale.where(scale > 0, 1.0)[:, None]).round()
            out[name, "x"], out[f"{name}_scale", "x"] = codes.to(torch.int8), scale
        return out

    def largest(self, spans: torch.Tensor) -> torch.Tensor:
        return spans.abs().amax(1)

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {
            name: (elements[name, "x"].float() * elements[f"{name}_scale", "x"][:, None]).flatten(0, 1).to(dtype)
            for name in ("k", "v")
        }


class AcrossUnits(Channels):
    """A scale of a channel over all that is encoded at once."""

    def largest(self, spans: torch.Tensor) -> torch.Tensor:
        whole = spans.abs().amax((0, 1)) if len(spans) else spans.new_zeros(spans.shape[2:])
        return whole.expand(len(spans), *spans.shape[2:]).contiguous()


class TokensOnly(Channels):
    """Says that it encodes tokens, and does not."""

    encodes = "tokens"


class Coarse(Channels):
    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        found = super().encode(layout, rows)
        return {key: value // 16 * 16 if value.dtype == torch.int8 else value for key, value in found.items()}


class Careless(Channels):
    max_error = 0.9


class Stored(Channels):
    name = "channels_stored"
    ops = ("store", "copy_units")


class Store(Kernel):
    """Rows into the ring, whole spans out of it."""

    op, name, formats = "store", "channels_store", (Stored.name,)
    forgets: ClassVar[bool] = False

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        return FULL

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None = None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            length, end = plan.host_lengths[0], plan.num_tokens
            spans = plan.ranges["units"]
            for first in range((length - end) // SPAN * SPAN, length - SPAN + 1, SPAN):
                whole = {}
                for name, values in rows.items():
                    ring = pool.field(layer, f"{name}_new", "x")
                    places = [plan.page_table[0][at % RING] for at in range(first, min(first + SPAN, length - end))]
                    old = [ring[int(unit)] if not self.forgets else ring[int(unit)] * 0 for unit in places]
                    new = values[max(0, first - (length - end)) : first + SPAN - (length - end)]
                    whole[name] = torch.stack([*old, *new])
                if spans.slots[first + SPAN - 1 - (length - end)] >= 0:
                    for (name, field), values in format.encode(pool.layout, whole).items():
                        pool.field(layer, name, field)[int(spans.page_table[0, first // SPAN])] = values[0]
            keep = plan.slots[:end] >= 0
            for name, values in rows.items():
                pool.field(layer, f"{name}_new", "x")[plan.slots[:end][keep]] = values[keep]
            return DONE

        return store


class Forgets(Store):
    """Of a span that an earlier step began, the tokens of that step are lost."""

    name = "channels_store_forgets"
    forgets = True


def checks(kind: type[Format], *kernels: type[Kernel], select: str = "not layer_major") -> dict[str, set[str]]:
    """Outcome → names of checks; one arena order is enough to see a fault."""
    plugin = LoadedPlugin(PluginInfo("mine", (1, 0)), "", "", {}, {"kernels": {item.name: item for item in kernels}})
    registry = Registry([*load_plugins(())._plugins, plugin])
    found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    fixtures = {"kv_format": kind, "registry": lambda: registry}
    for check in run([Case("formats", kind.name, FormatSuite, fixtures, {"groups": groups_of(kind())})], select=select):
        found[check.outcome].add(check.check.partition("[")[0])
    return found


CODEC = {
    "test_encodes_every_field",
    "test_decodes_what_it_encodes",
    "test_tokens_are_encoded_apart",
    "test_low_precision_rows",
    "test_zero_bytes_are_zero",
    "test_keeps_its_precision",
}
MOVES = {"test_ranks_add_up", "test_arrives_at_another_cache", "test_comes_back_from_retraction_bit_for_bit"}
STORE = {"test_stores_the_bytes_it_declares", "test_touches_nothing_else", "test_released_rows"}


def test_a_format_of_whole_units_without_store_and_load_passes() -> None:
    found = checks(Channels, select="")
    assert not found["failed"]
    assert found["passed"] - found["skipped"] >= CODEC | MOVES
    assert found["skipped"] >= STORE


def test_a_store_of_its_own_is_held_to_its_encode() -> None:
    found = checks(Stored, Store)
    assert not found["failed"]
    assert found["passed"] - found["skipped"] >= CODEC | MOVES | STORE


@pytest.mark.parametrize(
    ("kind", "kernels", "failed"),
    [
        (AcrossUnits, (), {"test_tokens_are_encoded_apart"}),
        (Coarse, (), {"test_decodes_what_it_encodes", "test_keeps_its_precision"}),
        (Careless, (), {"test_keeps_its_precision"}),
        (TokensOnly, (), CODEC | {"test_ranks_add_up"}),
        (Stored, (Forgets,), {"test_stores_the_bytes_it_declares"}),
    ],
)
def test_each_fault_is_found(kind: type[Format], kernels: tuple[type[Kernel], ...], failed: set[str]) -> None:
    assert checks(kind, *kernels)["failed"] == failed


def test_no_reference_kernel_is_derived() -> None:
    """Not even where every token has a slot, as of a format that stores differences between tokens of a page."""
    registry = load_plugins(())

    class Paged(Channels):
        def layout(self, group: LayerGroup, **given: Any) -> Layout:
            return registry.format("bf16").layout(group, **given)

    layout = Paged().layout(GROUP, page_size=4, shard=Shard(), arena="page_major")
    pool = Pool(layout, {item.name: 3 for item in layout.ranges}, registry.pool_builders()[0], "cpu")
    try:
        for kernel in (ReferenceStore(), ReferenceLoad()):
            with pytest.raises(UnsupportedError) as refusal:
                kernel.bind(pool, GROUP, Paged())
            assert refusal.value.fields["encodes"] == "units"
            assert "Format.ops" in refusal.value.remedy
    finally:
        pool.close()
