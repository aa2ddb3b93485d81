"""The suite for formats, tried with mutants: each breaks one promise, and the check of that promise turns red."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import pytest
import torch

import kvcore.memory.pool
from kvcore.builtin.kernels.reference import ReferenceCopyUnits, ReferenceLoad
from kvcore.contract import DONE, FULL, Fence, Format, Kernel, unsupported
from kvcore.layout import Field, Layout, Region
from kvcore.layout.moves import Program
from kvcore.plugins import load_plugins
from kvcore.requests.manager import Manager
from kvcore.testing import GROUPS, Case, Check, FormatSuite, ThreeComponents, run
from kvcore.testing.harness import Subject


class Small(FormatSuite):
    """One group of three components and small pages: a mutant costs a second."""

    groups: ClassVar = {"indexed": GROUPS["indexed"]}
    page_size = 4


def checked(make: Callable[[], Format], kernels: Sequence[Kernel] = (), select: str = "") -> list[Check]:
    class WithKernels(Subject):
        def kernels(self) -> list[Kernel]:
            return [*load_plugins(()).kernels(), *kernels]

    fixtures = {"kv_format": make, "registry": lambda: WithKernels(load_plugins(()))}
    return run([Case("formats", "mutant", Small, fixtures)], select=select)


def red(*names: str, make: Callable[[], Format] = ThreeComponents, kernels: Sequence[Kernel] = ()) -> set[str]:
    """Which of the named checks failed in every way they were run."""
    results = checked(make, kernels, " or ".join(names))
    passed = {check.check.partition("[")[0] for check in results if check.outcome != "failed"}
    failed = {check.check.partition("[")[0] for check in results}
    assert failed == set(names)
    return failed - passed


def change(item: Any, **values: Any) -> Any:
    """A copy of a frozen struct with values that its own checks would refuse."""
    other = msgspec.structs.replace(item)
    for name, value in values.items():
        msgspec.structs.force_setattr(other, name, value)
    return other


def edit(layout: Layout, name: str, make: Callable[[Region], Region | None]) -> Layout:
    """The layout with one region replaced or dropped."""
    regions = [make(r) if r.name == name else r for r in layout.regions]
    return change(layout, regions=tuple(r for r in regions if r is not None))


def test_three_components_pass() -> None:
    results = checked(ThreeComponents)
    assert {check.outcome for check in results} == {"passed", "skipped"}
    skipped = {check.check.partition("[")[0] for check in results if check.outcome == "skipped"}
    assert skipped == {"test_own_kernels_serve"}
    assert len(results) > 40


def test_kernels_that_never_serve() -> None:
    class Shy(ReferenceLoad):
        name = "shy_load"
        formats = ("three_components",)
        priority = 100

        def supports(self, device: str, layout: Layout, group: Any) -> Any:
            return unsupported("never")

    results = checked(ThreeComponents, [Shy()], select="own_kernels")
    assert [(check.outcome, "shy_load" in check.reason) for check in results] == [("failed", True)]

    class Bold(Shy):
        def supports(self, device: str, layout: Layout, group: Any) -> Any:
            return FULL

    assert [check.outcome for check in checked(ThreeComponents, [Bold()], select="own_kernels")] == ["passed"]


# --- layouts ---------------------------------------------------------------------------------------------------------


def test_a_dropped_region() -> None:
    class Mutant(ThreeComponents):
        def layout(self, *args: Any, **options: Any) -> Layout:
            return edit(super().layout(*args, **options), "v_scale", lambda r: None)

    assert red("test_encodes_every_field", make=Mutant)


def test_a_dropped_region_that_its_format_does_not_miss() -> None:
    class Mutant(ThreeComponents):
        def layout(self, *args: Any, **options: Any) -> Layout:
            return edit(super().layout(*args, **options), "index_key", lambda r: None)

        def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
            return super().encode(layout, {n: v for n, v in rows.items() if n != "index_key"})

    assert red("test_decodes_what_it_encodes", make=Mutant)


def test_overlapping_fields() -> None:
    def overlap(region: Region) -> Region:
        field = region.fields[0]
        half = change(region.fields[0], name="y", offset=field.nbytes // 2)
        return change(region, fields=(field, half, *region.fields[1:]))

    class Mutant(ThreeComponents):
        def layout(self, *args: Any, **options: Any) -> Layout:
            return edit(super().layout(*args, **options), "k", overlap)

    assert red("test_describes_every_byte_once", make=Mutant)


def test_heads_without_ids() -> None:
    """C2: two ranks whose layouts cannot be told apart would overwrite one another's heads."""

    class Mutant(ThreeComponents):
        def layout(self, group: Any, *, shard: Any, **options: Any) -> Layout:
            made = super().layout(group, shard=shard, **options)
            regions = []
            for region in made.regions:
                fields = [change(f, axes=tuple(change(a, ids=()) for a in f.axes)) for f in region.fields]
                regions.append(change(region, fields=tuple(fields)))
            return change(made, regions=tuple(regions))

    assert len(red("test_heads_of_a_rank", "test_ranks_add_up", make=Mutant)) == 2


def test_a_layout_that_differs_every_time() -> None:
    class Mutant(ThreeComponents):
        count = 0

        def layout(self, *args: Any, **options: Any) -> Layout:
            Mutant.count += 1
            made = super().layout(*args, **options)
            return change(made, layers=tuple(layer + Mutant.count for layer in made.layers))

    assert len(red("test_is_the_same_every_time", "test_says_whose_bytes_they_are", make=Mutant)) == 2


def test_sizes_that_are_not_real(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Layout.bytes_per_token
    monkeypatch.setattr(
        Layout, "bytes_per_token", lambda self: {n: v - (n == "full/index_key") for n, v in true(self).items()}
    )
    assert red("test_sizes_are_real")


# --- values and bytes ------------------------------------------------------------------------------------------------


def test_a_wrong_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores and loads agree with one another and not with the layout: only the bytes show it."""
    true = kvcore.memory.pool.field_view

    def wrong(arena: torch.Tensor, buffer: Any, field: Field) -> torch.Tensor:
        view = true(arena, buffer, field)
        if field.order != "head slot dim":
            return view
        heads, _, dim = view.shape[1:]
        return view.as_strided(view.shape, (view.stride(0), dim, heads * dim, 1), view.storage_offset())

    monkeypatch.setattr(kvcore.memory.pool, "field_view", wrong)
    names = "test_stores_the_bytes_it_declares", "test_loads_what_it_stored"
    assert red(*names) == {names[0]}


def test_zero_bytes_that_are_not_zero() -> None:
    class Mutant(ThreeComponents):
        def decode(self, *args: Any) -> dict[str, torch.Tensor]:
            return {name: values + (1e-30 if name == "v" else 0) for name, values in super().decode(*args).items()}

    assert len(red("test_zero_bytes_are_zero", "test_unwritten_slots_are_zero", make=Mutant)) == 2


def test_a_scale_of_the_whole_batch() -> None:
    class Mutant(ThreeComponents):
        def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
            out = super().encode(layout, rows)
            if rows["k"].numel():
                out["k_scale", "scale"] = (
                    out["k_scale", "scale"].amax(0, keepdim=True).expand_as(out["k_scale", "scale"])
                )
            return out

    assert red("test_tokens_are_encoded_apart", make=Mutant)


def test_fresh_units_that_are_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvcore.memory.pool.Pool, "zero", lambda *args: None)
    assert red("test_unwritten_slots_are_zero")


def test_minus_one_that_wraps() -> None:
    class Wrapping(ReferenceLoad):
        name = "wrapping"
        priority = 10_000

        def bind(self, pool: Any, group: Any, format: Any) -> Callable[..., Fence]:
            load = super().bind(pool, group, format)
            return lambda layer, slots, out, after=DONE: load(layer, slots % 16, out, after)

    assert red("test_dropped_rows", kernels=[Wrapping()])


def test_copies_that_forget_a_layer() -> None:
    class Forgetful(ReferenceCopyUnits):
        name = "forgetful"
        priority = 10_000

        def bind(self, pool: Any, group: Any, format: Any) -> Callable[..., Fence]:
            def copy_units(range_name: str, src: torch.Tensor, dst: torch.Tensor, after: Fence = DONE) -> Fence:
                for region in pool.layout.regions:
                    pool.units(pool.layout.layers[0], region.name)[dst] = pool.units(
                        pool.layout.layers[0], region.name
                    )[src]
                return DONE

            return copy_units

    assert red("test_copies_whole_units", kernels=[Forgetful()])


# --- what moves ------------------------------------------------------------------------------------------------------


def test_a_third_component_left_out_of_a_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Manager.payloads

    def lacking(self: Manager, *args: Any, **options: Any) -> tuple[Any, ...]:
        found = true(self, *args, **options)
        return tuple(msgspec.structs.replace(p, components=p.components[:-1]) for p in found)

    monkeypatch.setattr(Manager, "payloads", lacking)
    assert (
        len(
            red(
                "test_payloads_list_every_component_once",
                "test_comes_back_from_retraction_bit_for_bit",
                "test_arrives_at_another_cache",
            )
        )
        == 3
    )


def test_a_component_that_moves_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Manager.payloads

    def doubled(self: Manager, *args: Any, **options: Any) -> tuple[Any, ...]:
        found = true(self, *args, **options)
        return tuple(msgspec.structs.replace(p, components=(*p.components, p.components[1])) for p in found)

    monkeypatch.setattr(Manager, "payloads", doubled)
    assert red("test_payloads_list_every_component_once")


def test_a_component_that_is_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    true = Program.build

    def doubled(*args: Any) -> Program:
        program = true(*args)
        sizes = {name: size * (1 + name.endswith("block_scale")) for name, size in program.unit_bytes.items()}
        return dataclasses.replace(program, unit_bytes=sizes)

    monkeypatch.setattr(Program, "build", staticmethod(doubled))
    assert red("test_arrives_at_another_cache")


def test_a_program_without_a_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent as whole, accounted as whole, and one region of it was never read."""
    true = Program.build

    def lacking(*args: Any) -> Program:
        program = true(*args)
        kept = [move for move in program.moves if move.components != ("full/index_key",)]
        shorter = list(program.moves[:-1]) if len(kept) == len(program.moves) else kept
        return dataclasses.replace(program, moves=tuple(shorter))

    monkeypatch.setattr(Program, "build", staticmethod(lacking))
    assert len(red("test_arrives_at_another_cache", "test_ranks_add_up")) == 2
