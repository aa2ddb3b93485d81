"""The state components (no torch): which groups they hold, and the bytes of a request's slot."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from kvcore.contract import FULL, StateComponent, Support, unsupported
from kvcore.errors import ConfigError, UnsupportedError, nearest
from kvcore.layout import ArenaOrder, Axis, Field, Layout, Region, SpaceSpec, UnitRange, region
from kvcore.spec import LayerGroup, Shard, StateSpec

SLOTS = "slots"
"""The one unit range of a group: the slot of a request holds all its states, of every layer."""

FIELD = "x"
"""The one data field of every region."""

CONV, RECURRENT = "conv", "recurrent"

DTYPES = ("fp32", "bf16", "fp16")
"""Dtypes that models compute these states in; a slot keeps the bits."""


class _Slots(StateComponent):
    """One region per state, named like it, with one field ``x``; regions of one kind move as ``<prefix>/<kind>``.

    A state is a sum over, or the last of, all tokens so far: it is final when the prompt is done, and a copy of a slot is
    a checkpoint of exactly the length it was copied at.
    """

    final: ClassVar[Literal["each_chunk", "prompt_done"]] = "prompt_done"
    revision: ClassVar[int] = 1
    """Changes whenever the meaning of the bytes does; peers must agree."""

    @abstractmethod
    def holds(self, kinds: frozenset[str]) -> bool:
        """Whether a group with states of these kinds belongs to this component."""

    def applies(self, group: LayerGroup) -> bool:
        """Groups of states alone, by their kinds. A group with a kind unknown here is left to another component."""
        kinds = frozenset(state.kind for state in group.states)
        return group.kind == "state" and not group.tensors and bool(kinds) and self.holds(kinds)

    def checkpoint(self, group: LayerGroup) -> Support:
        """Every group it applies to: all of a state lies in its slot."""
        return FULL if self.applies(group) else unsupported(f"{self.name} does not hold {group.prefix!r}")

    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes of one request's slot on one rank: its layers, and its part of every split axis.

        A state without elements takes no bytes and has no region.

        Raises:
            UnsupportedError: a group it does not apply to (a kind of state it does not know is named), a dtype that is not
                in :data:`DTYPES`, a group whose states are all empty.
            ConfigError: a shard with none of the layers, heads and ranks that do not divide one another, two states of
                one name.
        """
        self._demand(group)
        layers = tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers)
        if not layers:
            raise ConfigError(
                "no layer of the group is on this rank", group=group.prefix, layers=group.layers, shard=shard.layers
            )
        regions = tuple(_region(group, state, shard) for state in group.states if _elements(state))
        if not regions:
            raise UnsupportedError(
                "no state of the group has an element",
                component=self.name,
                group=group.prefix,
                states=[state.name for state in group.states],
                remedy="leave the group out of the model",
            )
        return Layout(
            format=self.name,
            revision=self.revision,
            group=group.prefix,
            layers=layers,
            regions=regions,
            spaces=(SpaceSpec(group.name, group.space, "state_slot", 0, group.space_options),),
            ranges=(UnitRange(SLOTS, group.name),),
            arena=arena,
        )

    def _demand(self, group: LayerGroup) -> None:
        if not self.applies(group):
            unknown = [f"{state.name}: {state.kind}" for state in group.states if state.kind not in (CONV, RECURRENT)]
            raise UnsupportedError(
                "the component does not hold the layer group",
                component=self.name,
                group=group.prefix,
                kind=group.kind,
                states=[f"{state.name}: {state.kind}" for state in group.states],
                **({"unknown": unknown} if unknown else {}),
                remedy=f"states of kind {CONV} or {RECURRENT} are held here; another kind needs a component of its own",
            )
        names = [state.name for state in group.states]
        if len(set(names)) != len(names):
            raise ConfigError("two states of a group have one name", group=group.prefix, states=names)
        for state in group.states:
            if state.dtype not in DTYPES:
                raise UnsupportedError(
                    "states are not held in this dtype",
                    component=self.name,
                    group=group.prefix,
                    state=state.name,
                    dtype=state.dtype,
                    expected=DTYPES,
                    remedy=nearest(state.dtype, DTYPES),
                )


class ShortConv(_Slots):
    """Groups whose states are all the last inputs of short convolutions (kind ``conv``).

    A convolution of K taps keeps the last K − 1 inputs of every channel, oldest first; zeros stand before the beginning.
    """

    name = "short_conv"

    def holds(self, kinds: frozenset[str]) -> bool:
        """Nothing but convolutions."""
        return kinds == {CONV}


class RecurrentState(_Slots):
    """Groups with a state that sums up all tokens (kind ``recurrent``: SSM, delta rule), with or without convolutions."""

    name = "recurrent_state"

    def holds(self, kinds: frozenset[str]) -> bool:
        """A recurrent state, and nothing but convolutions beside it."""
        return RECURRENT in kinds and kinds <= {CONV, RECURRENT}


def _elements(state: StateSpec) -> int:
    return min(size for _, size in state.axes)


def _region(group: LayerGroup, state: StateSpec, shard: Shard) -> Region:
    ids = shard.ids(state)
    axes = tuple(
        Axis(name, sum(hi - lo for lo, hi in ids), ids=ids) if name == state.split else Axis(name, size)
        for name, size in state.axes
    )
    field = Field(FIELD, state.dtype, " ".join(name for name, _ in state.axes), axes)
    return region(state.name, f"{group.prefix}/{state.kind}", (field,), ranges=(SLOTS,))
