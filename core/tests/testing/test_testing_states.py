"""The suite for state components, tried with mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import msgspec
import pytest

from kvcore.contract import FULL, StateComponent, Support
from kvcore.engine.fitting import Holders
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, Shard, StateSpec
from kvcore.testing import STATE_GROUPS, Case, StateComponentSuite, run

CHECKS = 15


class Recurrent(StateComponent):
    """The states of a group, one slot a request; it declares no checkpoints."""

    name: ClassVar[str] = "recurrent"
    space: ClassVar[SpaceSpec] = SpaceSpec("state", "per_request", "state_slot", 0)

    def applies(self, group: LayerGroup) -> bool:
        return group.kind == "state"

    def ids(self, state: StateSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
        return shard.ids(state)

    def axes(self, state: StateSpec, shard: Shard) -> list[Axis]:
        ids = self.ids(state, shard)
        held = sum(hi - lo for lo, hi in ids)
        return [
            Axis(name, held, ids=ids) if name == state.split and ids else Axis(name, size) for name, size in state.axes
        ]

    def states(self, group: LayerGroup) -> list[StateSpec]:
        return [state for state in group.states if all(size for _, size in state.axes)]

    def layout(self, group: LayerGroup, *, shard: Shard, arena: Any) -> Layout:
        regions = []
        for state in self.states(group):
            axes = self.axes(state, shard)
            field = Field("x", state.dtype, " ".join(axis.name for axis in axes), tuple(axes))
            regions.append(region(state.name, f"{group.prefix}/{state.kind}", [field], ranges=("slots",)))
        return Layout(
            format=self.name,
            revision=1,
            group=group.prefix,
            layers=tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers),
            regions=tuple(regions),
            spaces=(self.space,),
            ranges=(UnitRange("slots", "state"),),
            arena=arena,
        )


class Kept(Recurrent):
    """The same with checkpoints."""

    def checkpoint(self, group: LayerGroup) -> Support:
        return FULL


class OneGroup(StateComponentSuite):
    """A mutant need not be caught with every group."""

    groups: ClassVar = {"recurrent": STATE_GROUPS["recurrent"]}


def red(name: str, make: Callable[[], StateComponent]) -> bool:
    """Whether a check fails in every way it is run."""
    checks = run([Case("state_components", "mutant", OneGroup, {"component": make})], select=name)
    assert {check.check.partition("[")[0] for check in checks} == {name}
    return all(check.outcome == "failed" for check in checks)


def test_a_state_component_passes() -> None:
    """With checkpoints on every group, and without them on one."""
    whole = Case("state_components", "kept", StateComponentSuite, {"component": Kept})
    checks = run([whole, Case("state_components", "recurrent", OneGroup, {"component": Recurrent})])
    assert [check.reason for check in checks if check.outcome != "passed"] == []
    assert len({check.check.partition("[")[0] for check in checks}) == CHECKS
    assert not red("test_declares_when_it_is_final", Kept)


# --- slots -----------------------------------------------------------------------------------------------------------


def test_a_state_that_grows_with_length() -> None:
    class Mutant(Recurrent):
        space = SpaceSpec("state", "per_request", "state_slot", 16)

    assert red("test_lives_in_state_slots", Mutant)


def test_a_state_that_belongs_to_no_request() -> None:
    """A slot in a constant space looks like one a request, and is handed out to nobody."""

    class Mutant(Recurrent):
        space = SpaceSpec("state", "constant", "state_slot", 0)

    assert red("test_is_zero_when_handed_out", Mutant)
    assert red("test_goes_with_its_request", Mutant)


def test_a_state_in_units_that_are_no_slots() -> None:
    """Rows that stand for tokens are handed out too, but nobody can ask for them as slots."""

    class Mutant(Recurrent):
        space = SpaceSpec("state", "sequence", "row", 4)

    assert red("test_is_zero_when_handed_out", Mutant)


def test_a_state_that_takes_the_tokens_too() -> None:
    class Mutant(Recurrent):
        def applies(self, group: LayerGroup) -> bool:
            return True

    assert red("test_leaves_attention_alone", Mutant)


def test_a_state_for_nothing_the_suite_knows() -> None:
    class Mutant(Recurrent):
        def applies(self, group: LayerGroup) -> bool:
            return False

    assert red("test_applies_to_some_group", Mutant)
    checks = run([Case("state_components", "mutant", OneGroup, {"component": Mutant})])
    assert {check.reason for check in checks if check.outcome == "skipped"} == {
        "layer group ['conv', 'recurrent']: the component does not apply to it"
    }


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_a_state_with_overlapping_fields() -> None:
    class Mutant(Recurrent):
        def layout(self, group: LayerGroup, *, shard: Shard, arena: Any) -> Layout:
            made = super().layout(group, shard=shard, arena=arena)
            first = msgspec.structs.replace(made.regions[0])
            again = msgspec.structs.replace(first.fields[0], name="y")
            msgspec.structs.force_setattr(first, "fields", (*first.fields, again))
            other = msgspec.structs.replace(made)
            msgspec.structs.force_setattr(other, "regions", (first, *made.regions[1:]))
            return other

    assert red("test_describes_every_byte_once", Mutant)


def test_a_state_that_is_forgotten() -> None:
    """Lost on retraction it raises nothing and only makes text worse."""

    class Mutant(Recurrent):
        def states(self, group: LayerGroup) -> list[StateSpec]:
            return super().states(group)[:1]

    assert red("test_holds_every_state", Mutant)


def test_j12_an_empty_state_tensor_that_is_registered() -> None:
    """J12 (kvcache-ai/Mooncake#2853): a region of no bytes poisons look-ups; one made a byte long is no better."""

    class Mutant(Recurrent):
        def states(self, group: LayerGroup) -> list[StateSpec]:
            return list(group.states)

        def axes(self, state: StateSpec, shard: Shard) -> list[Axis]:
            axes = super().axes(state, shard)
            return [msgspec.structs.replace(axis, size=max(1, axis.size)) for axis in axes]

    assert red("test_an_empty_tensor_is_nothing", Mutant)

    class Zero(Recurrent):
        def states(self, group: LayerGroup) -> list[StateSpec]:
            return list(group.states)

    assert red("test_an_empty_tensor_is_nothing", Zero)


# --- ranks -----------------------------------------------------------------------------------------------------------


def test_channels_cut_as_if_they_were_one_part() -> None:
    """Half of [queries, keys, values] is half of each: the first half of the axis is all queries and keys."""

    class Mutant(Recurrent):
        def ids(self, state: StateSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
            share = dict(state.axes)[state.split] // shard.tp_size
            return ((shard.tp_rank * share, (shard.tp_rank + 1) * share),)

    assert red("test_ranks_share_every_id", Mutant)


def test_a_stage_that_holds_the_layers_of_all() -> None:
    class Mutant(Recurrent):
        def layout(self, group: LayerGroup, *, shard: Shard, arena: Any) -> Layout:
            return super().layout(group, shard=msgspec.structs.replace(shard, layers=()), arena=arena)

    assert red("test_layers_of_a_stage", Mutant)


def test_ids_that_no_rank_holds() -> None:
    class Mutant(Recurrent):
        def ids(self, state: StateSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
            return super().ids(state, msgspec.structs.replace(shard, tp_rank=0))

    assert red("test_ranks_share_every_id", Mutant)


def test_a_replicated_state_that_is_cut() -> None:
    class Mutant(Recurrent):
        def ids(self, state: StateSpec, shard: Shard) -> tuple[tuple[int, int], ...]:
            return ()

        def axes(self, state: StateSpec, shard: Shard) -> list[Axis]:
            first, *rest = super().axes(state, shard)
            return [msgspec.structs.replace(first, size=first.size // shard.tp_size), *rest]

    assert red("test_ranks_share_every_id", Mutant)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_refused_without_a_reason() -> None:
    class Mutant(Recurrent):
        def checkpoint(self, group: LayerGroup) -> Support:
            return Support(False)

    assert red("test_declares_when_it_is_final", Mutant)


def test_checkpoints_of_a_state_that_the_cache_thinks_it_can_rewind() -> None:
    """A ring of one row: the cache believes that going back needs nothing, and the state stays that of later tokens."""

    class Mutant(Kept):
        space = SpaceSpec("state", "ring", "state_slot", 0, (("ring", 1),))

    assert red("test_goes_back_to_a_checkpoint", Mutant)
    assert red("test_keeps_the_state_after_every_token", Mutant)


def test_a_cache_that_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A component without checkpoints has to be refused: only it knows that its slot is not all of its state."""
    monkeypatch.setattr(Holders, "demand_checkpoints", lambda self: None)
    assert red("test_goes_back_to_a_checkpoint", Recurrent)
    assert red("test_keeps_the_state_after_every_token", Recurrent)
