"""Any shapes of states, any degrees and stages on both sides, through the transfer's planner: element by element."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.contract import StateComponent
from kvcore.layout.moves import run_program
from kvcore.spec import LayerGroup, Ranks, Shard, StatePart, StateSpec
from kvcore.testing.memory import POISON, Map, element_bytes
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.plan import plan_peers
from kvcore_mamba_backup.components import RecurrentState, ShortConv

UNITS = 4
LAYERS = (0, 1, 4)
ITEM = {"fp32": 4, "bf16": 2, "fp16": 2}
COUNT = st.sampled_from([1, 2, 4, 8])
DEGREE = st.sampled_from([1, 2, 4, 8])


@st.composite
def specs(draw: st.DrawFn, name: str) -> StateSpec:
    """A state: its axes in any order, cut along one of them in one to three parts, or not at all."""
    kind = draw(st.sampled_from(["conv", "recurrent"]))
    split, other = ("channel", "tap") if kind == "conv" else ("head", "dim")
    sizes = [(other, draw(st.integers(1, 4)))]
    if kind == "recurrent" and draw(st.booleans()):
        sizes.append(("state", draw(st.integers(1, 3))))
    parts = tuple(StatePart(draw(COUNT), draw(st.integers(0, 3))) for _ in range(draw(st.integers(1, 3))))
    whole = sum(part.num_heads * part.width for part in parts)
    if draw(st.integers(0, 3)) == 0:
        parts, whole = (), draw(st.integers(0, 5))
    sizes.insert(draw(st.integers(0, len(sizes))), (split, whole))
    return StateSpec(name, kind, draw(st.sampled_from(sorted(ITEM))), tuple(sizes), split if parts else "", parts)


@st.composite
def groups(draw: st.DrawFn) -> LayerGroup:
    """Up to three states, of which one at least has an element."""
    states = tuple(draw(specs(f"s{n}")) for n in range(draw(st.integers(1, 3))))
    if not any(math.prod(size for _, size in state.axes) for state in states):
        states = (*states, StateSpec("last", "conv", "fp32", (("channel", 2), ("tap", 2))))
    return LayerGroup("state", LAYERS, (), kind="state", space="per_request", states=states)


@dataclass
class Side:
    """One rank: its manifest and its arena."""

    shard: Shard
    manifest: Manifest
    places: Map
    arena: np.ndarray


def side(
    group: LayerGroup, role: Literal["sender", "receiver"], degree: int, stages: list[tuple[int, ...]], arena: Any
) -> list[Side]:
    """All ranks of an engine, their memory poisoned."""
    recurrent = any(state.kind == "recurrent" for state in group.states)
    component: StateComponent = RecurrentState() if recurrent else ShortConv()
    made = []
    cuts = [Shard(rank, degree, layers) for layers in stages for rank in range(degree)]
    for number, shard in enumerate(cuts):
        layout = component.layout(group, shard=shard, arena=arena)
        places = Map(layout, {"slots": UNITS})
        manifest = Manifest(
            instance=f"{role}{number}",
            role=role,
            model="m" * 64,
            layouts={"state": layout},
            units={"state": {"slots": UNITS}},
            transport="shm",
            shard=shard,
            ranks=Ranks(role, number, len(cuts)),
        )
        made.append(Side(shard, manifest, places, np.full(places.arena_bytes, POISON, np.uint8)))
    return made


def cells(hybrid: ModuleType, item: Side, layer: int, state: StateSpec, unit: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses ``[elements, item]`` of a state on a rank, and the bytes there, by global ids alone."""
    region = item.manifest.layouts["state"].region(state.name)
    (field,) = region.data_fields
    coords = [
        np.array(hybrid.held(state, item.shard.tp_rank, item.shard.tp_size)) if name == state.split else np.arange(size)
        for name, size in state.axes
    ]
    grid = np.meshgrid(*coords, indexing="ij")
    index = np.zeros(grid[0].shape, np.int64)
    for (_, size), part in zip(state.axes, grid, strict=True):
        index = index * size + part
    number = (index * 7919 + layer * 104_729 + sum(map(ord, state.name)) * 31) % 65_534 + 1  # never 0 nor 0xFFFF
    width = ITEM[state.dtype]
    content = np.stack([number >> 8 * (n % 2) & 0xFF for n in range(width)], axis=-1).astype(np.uint8)
    where = item.places.element(layer, state.name, field, unit, None)
    assert where.shape == content.shape, "the rank holds other elements than its heads say"
    return where.reshape(-1), content.reshape(-1)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    group=groups(),
    left=DEGREE,
    right=DEGREE,
    arenas=st.tuples(*[st.sampled_from(["page_major", "layer_major"])] * 2),
    stages=st.tuples(*[st.sampled_from([[LAYERS], [(0,), (1, 4)], [(0, 4), (1,)]])] * 2),
)
def test_every_element_comes_from_one_rank(
    hybrid: ModuleType, group: LayerGroup, left: int, right: int, arenas: tuple[str, str], stages: Any
) -> None:
    """Every rank of the receiver gets each element of its slot exactly once, and no other byte of its memory changes."""
    senders = side(group, "sender", left, stages[0], arenas[0])
    receivers = side(group, "receiver", right, stages[1], arenas[1])
    held = [state for state in group.states if math.prod(size for _, size in state.axes)]
    for item in senders:
        for layer in item.manifest.layouts["state"].layers:
            for state in held:
                where, content = cells(hybrid, item, layer, state, 1)
                item.arena[where] = content
    for item in receivers:
        want, moved, wanted = item.arena.copy(), 0, 0
        for layer in item.manifest.layouts["state"].layers:
            for state in held:
                where, content = cells(hybrid, item, layer, state, 3)
                want[where] = content
                wanted += len(where)
        remotes = [sender.manifest for sender in senders]
        for sender, plan in zip(senders, plan_peers(item.manifest, remotes), strict=True):
            components = sender.manifest.layouts["state"].components
            for program in plan.split("state", "slots", components)[1]:
                moved += run_program(program, sender.arena, item.arena, [1], [3])
        assert moved == wanted
        padding = padding_of(item, 3)  # may be copied along, and has no meaning
        np.testing.assert_array_equal(np.delete(item.arena, padding), np.delete(want, padding))


def padding_of(item: Side, unit: int) -> np.ndarray:
    """Addresses of a slot that carry no data."""
    found = [np.zeros(0, np.int64)]
    for layer in item.manifest.layouts["state"].layers:
        for region in item.manifest.layouts["state"].regions:
            span = item.places.unit(layer, region.name, unit)
            data = np.concatenate([element_bytes(field).reshape(-1) for field in region.data_fields])
            found.append(np.setdiff1d(np.arange(region.unit_bytes), data) + span.start)
    return np.concatenate(found)
