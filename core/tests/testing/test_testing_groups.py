"""Formats of other tensors and other units than the kit's own groups have: what they are tried with, and that they pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from kvcore.contract import FULL, Format, PluginInfo, Support, unsupported
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import LoadedPlugin, Registry
from kvcore.requests.manager import Manager
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore.testing import GROUPS, Case, Check, FormatSuite, cases_of, groups_of, run

KV = (TensorSpec("k", 2, 4), TensorSpec("v", 2, 8))
NAMED = LayerGroup("full", (0, 3), (TensorSpec("gate", 2, 4), TensorSpec("note", 1, 6, sharded=False)))


class Plain(Format):
    """fp32 rows, in pages of the cache's size."""

    name: ClassVar[str] = "plain"
    sampled: ClassVar[Sequence[LayerGroup]] = (LayerGroup("full", (1, 2), KV, num_query_heads=4), NAMED)

    def supports(self, group: LayerGroup) -> Support:
        return FULL if group.kind == "attention" else unsupported("holds tokens only")

    def sample_groups(self) -> Sequence[LayerGroup]:
        return self.sampled

    def space(self, group: LayerGroup, page_size: int) -> tuple[SpaceSpec, ...]:
        return (SpaceSpec("own", group.space, "page", page_size, group.space_options),)

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        spaces = self.space(group, page_size)
        ranges = tuple(UnitRange(f"units_{space.name}", space.name) for space in spaces)
        regions = []
        for tensor in group.tensors:
            axes = [Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)), Axis("dim", tensor.head_dim)]
            if spaces[0].unit == "page":
                axes.insert(0, Axis("slot", spaces[0].tokens_per_unit))
            field = Field("x", "fp32", " ".join(axis.name for axis in axes), tuple(axes))
            names = tuple(item.name for item in ranges)
            regions.append(region(tensor.name, f"{group.prefix}/{tensor.name}", (field,), ranges=names))
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        return Layout(self.name, self.revision, group.prefix, layers, tuple(regions), spaces, ranges, arena)

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        return {(name, "x"): values.float() for name, values in rows.items()}

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {name: values.to(dtype) for (name, _), values in elements.items()}


class Windowed(Plain):
    name = "windowed"
    sampled = (LayerGroup("swa", (0,), KV, 4, space="window", space_options=(("window", 6),)),)


class OneTokenUnits(Plain):
    """A unit a token, whatever the page size of the cache."""

    name = "one_token_units"

    def space(self, group: LayerGroup, page_size: int) -> tuple[SpaceSpec, ...]:
        return (SpaceSpec("own", "sequence", "row", 1),)


class WidePages(Plain):
    """Pages of 24 tokens, whatever the page size of the cache."""

    name = "wide_pages"
    sampled = (LayerGroup("full", (0,), KV, num_query_heads=2),)

    def space(self, group: LayerGroup, page_size: int) -> tuple[SpaceSpec, ...]:
        return (SpaceSpec("own", "sequence", "page", 24),)


class RingAndRows(Plain):
    """The newest rows in a ring, every third for good; what writes them is not the kit's business."""

    name = "ring_and_rows"
    ops = ("copy_units",)
    sampled = (NAMED,)

    def space(self, group: LayerGroup, page_size: int) -> tuple[SpaceSpec, ...]:
        return (SpaceSpec("ring", "ring", "row", 0, (("ring", 5),)), SpaceSpec("rows", "compressed", "row", 3))


class OneState(RingAndRows):
    """Nothing that grows, so that only requests bound the cache."""

    name = "one_state"

    def space(self, group: LayerGroup, page_size: int) -> tuple[SpaceSpec, ...]:
        return (SpaceSpec("own", "per_request", "state_slot", 0),)


def checks(kind: type[Format], select: str = "", **attributes: Any) -> dict[str, set[str]]:
    """Outcome → names of checks."""
    given = {"page_size": 4, "groups": groups_of(kind()), **attributes}
    fixtures = {"kv_format": kind, "registry": lambda: load_plugins(())}
    found: dict[str, set[str]] = {"passed": set(), "failed": set(), "skipped": set()}
    for check in run([Case("formats", kind.name, FormatSuite, fixtures, given)], select=select):
        found[check.outcome].add(check.check.partition("[")[0])
        assert check.outcome != "failed" or check.reason
    return found


@pytest.mark.parametrize("kind", [Plain, Windowed, OneTokenUnits, WidePages, RingAndRows, OneState])
def test_other_tensors_and_other_units_pass(kind: type[Format]) -> None:
    found = checks(kind, "" if kind is RingAndRows else "not layer_major")  # where ranges are unlike, both arena orders
    assert not found["failed"]
    moves = {"test_comes_back_from_retraction_bit_for_bit", "test_arrives_at_another_cache", "test_ranks_add_up"}
    assert moves <= found["passed"] - found["skipped"]
    single = {"test_stores_the_bytes_it_declares", "test_loads_what_it_stored", "test_attends_over_everything"}
    assert single <= found["passed" if "store" in kind.ops else "skipped"]


def test_moves_are_checked_where_nothing_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two components in two ranges: one is forgotten."""
    import msgspec

    true = Manager.payloads

    def lacking(self: Manager, *args: Any, **options: Any) -> tuple[Any, ...]:
        return tuple(msgspec.structs.replace(p, components=p.components[:-1]) for p in true(self, *args, **options))

    monkeypatch.setattr(Manager, "payloads", lacking)
    found = checks(RingAndRows, "payloads or retraction or arrives")
    assert len(found["failed"]) == 3


def check_command(kind: type[Format]) -> list[Check]:
    """What ``kvcore check`` runs of a plugin with this format."""
    mine = LoadedPlugin(PluginInfo("mine", (1, 0)), "", "", {}, {"formats": {kind.name: kind}})
    return run(
        cases_of(Registry([*load_plugins(())._plugins, mine]), "mine"), select="holds_some_group or survives_json"
    )


def test_the_command_tries_the_formats_own_groups() -> None:
    names = {check.check for check in check_command(Plain) if check.outcome == "passed"}
    assert {"test_survives_json[0_k_v-page_major]", "test_survives_json[1_gate_note-page_major]"} <= names
    assert len(names) == 5


class Refuses(Plain):
    def supports(self, group: LayerGroup) -> Support:
        return unsupported("odd layers") if group is NAMED else super().supports(group)


class Raises(Plain):
    def sample_groups(self) -> Sequence[LayerGroup]:
        raise RuntimeError("no samples today")


@pytest.mark.parametrize(("kind", "reason"), [(Refuses, "odd layers"), (Raises, "no samples today")])
def test_wrong_sample_groups_are_a_failure(kind: type[Format], reason: str) -> None:
    (failed,) = [check for check in check_command(kind) if check.outcome == "failed"]
    assert failed.check == "test_holds_some_group"
    assert reason in failed.reason


def test_a_suite_that_leaves_them_out_says_how_to_try_them() -> None:
    assert checks(Plain, "holds_some_group", groups=GROUPS)["failed"] == {"test_holds_some_group"}
    assert checks(Plain, "holds_some_group", groups={"one": NAMED})["passed"] == {"test_holds_some_group"}


@pytest.mark.parametrize("make", [lambda: type("None_", (Plain,), {"sampled": ()})()])
def test_without_any_they_are_the_kits(make: Callable[[], Format]) -> None:
    assert groups_of(make()) == GROUPS
