"""The suite for index spaces, tried with mutants."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from kvcore.contract import IndexSpace
from kvcore.layout import SpaceSpec
from kvcore.requests.spaces import SequenceSpace, WindowSpace
from kvcore.testing import Case, IndexSpaceSuite, run


def red_space(name: str, make: Callable[[], IndexSpace]) -> bool:
    """Whether a check fails in every way it is run."""
    checks = run([Case("subjects", "mutant", IndexSpaceSuite, {"space": make})], select=name)
    assert {check.check.partition("[")[0] for check in checks} == {name}
    return all(check.outcome == "failed" for check in checks)


def test_spaces_pass() -> None:
    cases = [Case("index_spaces", kind.kind, IndexSpaceSuite, {"space": kind}) for kind in (SequenceSpace, WindowSpace)]
    checks = run(cases)
    assert {check.outcome for check in checks} == {"passed"}
    assert len(checks) == 2 * 8


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


def test_a_needed_unit_that_is_never_final() -> None:
    class Mutant(WindowSpace):
        def needed_units(self, spec: SpaceSpec, length: int) -> Sequence[tuple[int, int]]:
            return ((0, self.num_units(spec, length)),)

    assert red_space("test_what_is_needed_moves", Mutant)


def test_needed_units_that_overlap() -> None:
    class Mutant(SequenceSpace):
        def needed_units(self, spec: SpaceSpec, length: int) -> Sequence[tuple[int, int]]:
            return ((0, self.num_units(spec, length)),) * 2

    assert red_space("test_what_is_needed_moves", Mutant)


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
