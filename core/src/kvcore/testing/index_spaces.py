"""The suite for index spaces: which logical units there are, which are live, and when each becomes final."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import ClassVar

import pytest

from kvcore.contract import IndexSpace
from kvcore.errors import ConfigError, KVCoreError
from kvcore.layout import SpaceSpec, UnitKind

Shape = tuple[UnitKind, int, tuple[tuple[str, int], ...]]

_UNITS: tuple[tuple[UnitKind, int], ...] = (
    ("page", 1),
    ("page", 4),
    ("page", 16),
    ("row", 4),
    ("row", 0),
    ("state_slot", 0),
)
_OPTIONS: tuple[tuple[tuple[str, int], ...], ...] = (
    (),
    (("window", 1),),
    (("window", 6),),
    (("window", 16),),
    (("ring", 6),),
    (("ring", 8), ("window", 6)),
    (("ratio", 4),),
)
SHAPES: tuple[Shape, ...] = tuple((unit, tokens, options) for unit, tokens in _UNITS for options in _OPTIONS)
"""Units, tokens a unit and options that a space is tried with: all of them that its ``check`` accepts."""

LENGTHS = 70


class IndexSpaceSuite:
    """What an index space promises. Override the fixture ``space``, and ``shapes`` where its options are others.

    Attributes:
        shapes: ``(unit, tokens a unit, options)`` to try.
    """

    shapes: ClassVar[Sequence[Shape]] = SHAPES

    @pytest.fixture
    def specs(self, space: IndexSpace) -> list[SpaceSpec]:
        """Every spec that the space accepts."""
        tried = [SpaceSpec("tried", space.kind, *shape) for shape in self.shapes]
        found = [spec for spec in tried if _accepts(space, spec)]
        assert found, "the space refuses every spec: give the suite shapes that it accepts"
        return found

    def test_refuses_unknown_options(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """A misspelt option is an error at configuration, not an option without effect."""
        for spec in specs:
            options = (*spec.options, ("no_such_option", 1))
            with pytest.raises(ConfigError):
                space.check(SpaceSpec(spec.name, spec.kind, spec.unit, spec.tokens_per_unit, options))

    def test_units_grow_with_length(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """More tokens never need fewer units; where units stand for tokens, a token needs at most one new unit."""
        for spec in specs:
            counts = [space.num_units(spec, length) for length in range(LENGTHS)]
            assert counts[0] == 0, f"{spec}: units without tokens"
            most = 1 if spec.tokens_per_unit else max(counts)
            assert all(0 <= b - a <= most for a, b in pairwise(counts)), f"{spec}: {counts}"

    def test_live_units(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """What has fallen dead stays dead, what is live exists, and a bound on units holds."""
        for spec in specs:
            firsts = [space.first_live(spec, length) for length in range(LENGTHS)]
            assert firsts[0] == 0
            assert all(a <= b for a, b in pairwise(firsts)), f"{spec}: {firsts}"
            bound = space.units_per_request(spec)
            for length, first in enumerate(firsts):
                live = space.num_units(spec, length) - first
                assert live >= 0, f"{spec}: at {length} tokens"
                assert bound is None or live <= bound, f"{spec}: {live} units at {length} tokens"
            assert space.reserved_units(spec) >= 1, "the null unit is never allocated"

    def test_every_live_unit_is_final_once(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """However a prompt is cut into chunks, each unit that is live at the end, and written, is listed exactly once."""
        generator = random.Random(1)
        for spec in specs:
            for length in (1, 2, 3, 4, 5, 15, 16, 17, 33, LENGTHS):
                end = space.num_units(spec, length)
                # No more units than tokens can have been written: the rest of a ring may be left out.
                live = set(range(space.first_live(spec, length), min(end, length)))
                for cuts in _chunkings(length, generator):
                    listed = list(_final(space, spec, cuts))
                    assert len(listed) == len(set(listed)), f"{spec}: a unit is final twice: {cuts}, {listed}"
                    assert live <= set(listed), f"{spec}: a live unit is never final: {cuts}, {live - set(listed)}"
                    assert max(listed, default=-1) < end, f"{spec}: a unit that does not exist: {cuts}, {listed}"

    def test_what_is_needed_moves(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """What a query reads, of what was written, is final with the last chunk; a request that arrived stays as it is."""
        for spec in specs:
            for length in range(1, LENGTHS):
                needed = space.needed_units(spec, length)
                bounds = [bound for part in needed for bound in part]
                assert bounds == sorted(bounds), f"{spec}: {needed}"
                assert not bounds or 0 <= bounds[0] <= bounds[-1] <= space.num_units(spec, length), f"{spec}: {needed}"
                written = {n for lo, hi in needed for n in range(lo, min(hi, length))}
                final = range(*space.final_units(spec, 0, length, last=True))
                assert written <= set(final), f"{spec}: {written - set(final)} at {length} tokens do not move"
                reach = space.arrived_reach(spec, length)
                assert reach >= length
                assert space.can_rewind(spec, reach, length) or reach == length, f"{spec}: at {length} tokens"

    def test_an_empty_chunk(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """A chunk of no tokens makes nothing final."""
        for spec in specs:
            for at in (0, 16, 17):
                lo, hi = space.final_units(spec, at, at, last=False)
                assert hi <= lo, f"{spec}: at {at} tokens"

    def test_rewinding(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """A request can always stay as long as it is, or become empty."""
        for spec in specs:
            assert all(space.can_rewind(spec, n, n) and space.can_rewind(spec, n, 0) for n in range(LENGTHS)), spec

    def test_refuses_nonsense(self, space: IndexSpace, specs: list[SpaceSpec]) -> None:
        """Negative lengths, and chunks that run backwards."""
        for spec in specs:
            with pytest.raises(KVCoreError):
                space.num_units(spec, -1)
            with pytest.raises(KVCoreError):
                space.final_units(spec, 5, 4, last=False)


def _accepts(space: IndexSpace, spec: SpaceSpec) -> bool:
    try:
        space.check(spec)
    except ConfigError:
        return False
    return True


def _chunkings(length: int, generator: random.Random) -> Iterator[list[int]]:
    """All at once, token by token, in threes, and at random."""
    yield [0, length]
    yield list(range(length + 1))
    yield sorted({*range(0, length, 3), length})
    for _ in range(6):
        yield sorted({0, length, *(generator.randrange(length + 1) for _ in range(5))})


def _final(space: IndexSpace, spec: SpaceSpec, cuts: list[int]) -> Iterator[int]:
    for start, stop in pairwise(cuts):
        yield from range(*space.final_units(spec, start, stop, last=stop == cuts[-1]))
