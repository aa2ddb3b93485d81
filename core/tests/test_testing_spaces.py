"""The suites for index spaces and state components, tried with mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from kvcore.contract import FULL, IndexSpace, StateComponent, Support
from kvcore.index_spaces import SequenceSpace, WindowSpace
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.testing import Case, IndexSpaceSuite, StateComponentSuite, run


def red(suite: type, fixture: str, name: str, make: Callable[[], Any]) -> bool:
    """Whether a check fails in every way it is run."""
    checks = run([Case("subjects", "mutant", suite, {fixture: make})], select=name)
    assert {check.check.partition("[")[0] for check in checks} == {name}
    return all(check.outcome == "failed" for check in checks)


def red_space(name: str, make: Callable[[], IndexSpace]) -> bool:
    return red(IndexSpaceSuite, "space", name, make)


# --- index spaces ----------------------------------------------------------------------------------------------------


def test_spaces_pass() -> None:
    cases = [Case("index_spaces", kind.kind, IndexSpaceSuite, {"space": kind}) for kind in (SequenceSpace, WindowSpace)]
    checks = run(cases)
    assert {check.outcome for check in checks} == {"passed"}
    assert len(checks) == 2 * 7


def test_a_partial_unit_that_is_never_final() -> None:
    class Mutant(SequenceSpace):
        def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
            return super().final_units(spec, start, stop, last=False)

    assert red_space("test_every_live_unit_is_final_once", Mutant)


def test_units_that_are_final_twice() -> None:
    class Mutant(SequenceSpace):
        def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
            lo, hi = super().final_units(spec, start, stop, last=last)
            return max(0, lo - 1), hi

    assert red_space("test_every_live_unit_is_final_once", Mutant)


def test_a_unit_between_two_chunks() -> None:
    """The start of a chunk inside a unit: counted from the next whole one, it is lost."""

    class Mutant(SequenceSpace):
        def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
            lo, hi = super().final_units(spec, start, stop, last=last)
            return lo + bool(start % spec.tokens_per_unit), hi

    assert red_space("test_every_live_unit_is_final_once", Mutant)


def test_an_empty_unit_after_whole_pages() -> None:
    """Off by one: a unit for the token after the last one."""

    class Mutant(SequenceSpace):
        def num_units(self, spec: SpaceSpec, length: int) -> int:
            return length // spec.tokens_per_unit + 1

    assert red_space("test_units_grow_with_length", Mutant)


def test_dead_units_that_come_back() -> None:
    class Mutant(WindowSpace):
        def first_live(self, spec: SpaceSpec, length: int) -> int:
            return super().first_live(spec, length) if length != 60 else 0

    assert red_space("test_live_units", Mutant)


def test_a_bound_that_does_not_hold() -> None:
    class Mutant(WindowSpace):
        def units_per_request(self, spec: SpaceSpec) -> int:
            return super().units_per_request(spec) - 1

    assert red_space("test_live_units", Mutant)


def test_options_without_effect() -> None:
    class Mutant(SequenceSpace):
        def check(self, spec: SpaceSpec) -> None:
            return

    assert red_space("test_refuses_unknown_options", Mutant)


def test_a_space_that_accepts_nothing_the_suite_knows() -> None:
    class Mutant(SequenceSpace):
        def check(self, spec: SpaceSpec) -> None:
            super().check(msgspec.structs.replace(spec, tokens_per_unit=0))

    assert red_space("test_live_units", Mutant)


# --- state components ------------------------------------------------------------------------------------------------


class Recurrent(StateComponent):
    """The state tensors of a group, one slot a request."""

    name: ClassVar[str] = "recurrent"
    tokens = 0

    def applies(self, group: Any) -> bool:
        return bool(group.kind == "state")

    def layout(self, group: Any, *, shard: Any, arena: Any) -> Layout:
        regions = [
            region(
                tensor.name,
                f"{group.prefix}/{tensor.name}",
                [Field("x", "fp32", "head dim", (Axis("head", tensor.num_heads), Axis("dim", tensor.head_dim)))],
                ranges=("slots",),
            )
            for tensor in group.tensors
        ]
        return Layout(
            format=self.name,
            revision=1,
            group=group.prefix,
            layers=group.layers,
            regions=tuple(regions),
            spaces=(SpaceSpec("state", group.space, "state_slot", self.tokens),),
            ranges=(UnitRange("slots", "state"),),
            arena=arena,
        )


def red_state(name: str, make: Callable[[], StateComponent]) -> bool:
    return red(StateComponentSuite, "component", name, make)


def test_a_state_component_passes() -> None:
    checks = run([Case("state_components", "recurrent", StateComponentSuite, {"component": Recurrent})])
    assert {check.outcome for check in checks} == {"passed"}
    assert len(checks) == 15


def test_a_state_that_grows_with_length() -> None:
    class Mutant(Recurrent):
        tokens = 16

    assert red_state("test_lives_in_state_slots", Mutant)


def test_a_state_that_belongs_to_no_request() -> None:
    """A slot in a constant space looks like one a request, and is handed out to nobody."""

    class Mutant(Recurrent):
        def layout(self, group: Any, *, shard: Any, arena: Any) -> Layout:
            spaces = (SpaceSpec("state", "constant", "state_slot", 0),)
            return msgspec.structs.replace(super().layout(group, shard=shard, arena=arena), spaces=spaces)

    assert red_state("test_is_zero_when_handed_out", Mutant)
    assert red_state("test_goes_with_its_request", Mutant)


def test_a_state_in_units_that_are_no_slots() -> None:
    """Rows that stand for tokens are handed out too, but nobody can ask for them as slots."""

    class Mutant(Recurrent):
        def layout(self, group: Any, *, shard: Any, arena: Any) -> Layout:
            made = super().layout(group, shard=shard, arena=arena)
            return msgspec.structs.replace(made, spaces=(SpaceSpec("state", "sequence", "row", 4),))

    assert red_state("test_is_zero_when_handed_out", Mutant)


def test_a_state_that_takes_the_tokens_too() -> None:
    class Mutant(Recurrent):
        def applies(self, group: Any) -> bool:
            return True

    assert red_state("test_leaves_attention_alone", Mutant)


def test_a_state_for_nothing_the_suite_knows() -> None:
    class Mutant(Recurrent):
        def applies(self, group: Any) -> bool:
            return False

    assert red_state("test_applies_to_some_group", Mutant)
    checks = run([Case("state_components", "mutant", StateComponentSuite, {"component": Mutant})])
    assert {check.reason for check in checks if check.outcome == "skipped"} == {
        "layer group ['conv', 'ssm']: the component does not apply to it"
    }


def test_a_state_with_overlapping_fields() -> None:
    class Mutant(Recurrent):
        def layout(self, group: Any, *, shard: Any, arena: Any) -> Layout:
            made = super().layout(group, shard=shard, arena=arena)
            first = msgspec.structs.replace(made.regions[0])
            again = msgspec.structs.replace(first.fields[0], name="y")
            msgspec.structs.force_setattr(first, "fields", (*first.fields, again))
            other = msgspec.structs.replace(made)
            msgspec.structs.force_setattr(other, "regions", (first, *made.regions[1:]))
            return other

    assert red_state("test_describes_every_byte_once", Mutant)


def test_checkpoints_refused_without_a_reason() -> None:
    class Mutant(Recurrent):
        def checkpoint(self, group: Any) -> Support:
            return Support(False)

    class Good(Recurrent):
        def checkpoint(self, group: Any) -> Support:
            return FULL

    assert red_state("test_declares_when_it_is_final", Mutant)
    assert not red_state("test_declares_when_it_is_final", Good)
