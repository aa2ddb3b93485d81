"""One region cut into a ring and compressed rows: two spaces, two null units, one payload each."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.engine.fitting import budgets
from kvcore.engine.sizing import plan_capacity
from kvcore.layout import Axis, Field, Layout, Region, SpaceSpec, UnitRange
from kvcore.layout.moves import Program, run_program
from kvcore.memory.pool import Pool
from kvcore.requests.manager import Manager
from kvcore.requests.spaces import INDEX_SPACES

ROW, RING, RATIO, LAYERS = 16, 6, 4, (0, 1)
SPACES = {space.kind: space() for space in INDEX_SPACES}


def layout(arena: str) -> Layout:
    field = Field("x", "u8", "byte", (Axis("byte", ROW),))
    return Layout(
        "rows", 1, "csa", LAYERS, (Region("latent", "csa/kv", (field,), ROW, ("ring", "rows")),),
        (SpaceSpec("ring", "ring", "row", 0, (("ring", RING),)), SpaceSpec("rows", "compressed", "row", RATIO)),
        (UnitRange("ring", "ring"), UnitRange("rows", "rows")), arena,
    )  # type: ignore[arg-type] # fmt: skip


class Side:
    """A pool and its manager."""

    def __init__(self, arena: str, requests: int, memory: int) -> None:
        self.layout = layout(arena)
        self.plan = plan_capacity({"csa": self.layout}, memory, requests)
        self.manager = Manager(budgets({"csa": self.layout}, self.plan.units), SPACES, max_requests=requests)
        self.pool = Pool(self.layout, self.plan.units["csa"], MemfdPool())
        assert self.pool.arena.tensor().numel() == self.plan.allocated_bytes <= memory
        self.pool.arena.array()[:] = 0xFF

    def rows(self, units: npt.NDArray[np.int64]) -> list[list[bytes]]:
        """Bytes of units by layer, through the raw arena."""
        raw = self.pool.arena.array()
        found = []
        for layer in LAYERS:
            buffer = self.pool.placement.buffer(layer, "latent")
            found.append([raw[at : at + ROW].tobytes() for at in (buffer.base + units * buffer.unit_stride).tolist()])
        return found

    def write(self, units: npt.NDArray[np.int64], value: int) -> None:
        for layer in LAYERS:
            for n, unit in enumerate(units.tolist()):
                self.pool.units(layer, "latent")[unit] = (value + 10 * n + layer) % 251


@pytest.fixture
def sides():
    made = Side("layer_major", 3, 4096), Side("page_major", 2, 2048)
    yield made
    for side in made:
        side.pool.close()


def test_ranges_have_null_units_of_their_own(sides: tuple[Side, Side]) -> None:
    for side in sides:
        first = side.plan.units["csa"]["ring"]
        assert side.pool.first_unit("rows") == first != 0
        side.manager.admit("a", 9)
        side.manager.commit(side.manager.plan_step([("a", 9)]))
        assert side.manager.units("a", "csa", "ring").tolist() == list(range(RING, 2 * RING))
        assert side.manager.units("a", "csa", "rows").tolist() == [first + 1, first + 2]
        assert first not in side.manager.free_units("csa", "rows")
        assert not set(side.manager.free_units("csa", "ring")) & set(range(2 * RING))
        side.manager.release("a")
        side.manager.check_integrity()


def test_both_ranges_arrive_in_other_units_of_another_arena(sides: tuple[Side, Side]) -> None:
    send, receive = sides
    send.manager.admit("other", 20)  # so that the units differ
    send.manager.admit("r", 9)
    for name in ("other", "r"):
        send.manager.commit(send.manager.plan_step([(name, send.manager.get(name).reserved)]))
    for range_name, value in (("ring", 1), ("rows", 101)):
        send.write(send.manager.units("r", "csa", range_name), value)
    receive.manager.admit("r", 9, external=True)
    tables = receive.manager.destinations("r", 9)
    program = Program.build(send.layout, send.pool.placement, receive.layout, receive.pool.placement)
    before = receive.pool.arena.array().copy()
    moved, touched, arriving = 0, set(), dict.fromkeys(("ring", "rows"), 0)
    for payload in send.manager.payloads("r", 0, 9, last=True):
        target = tables["csa", payload.range][payload.first : payload.stop]
        assert (target >= 0).all()
        arriving[payload.range] += payload.num_units
        moved += run_program(program, send.pool.arena.array(), receive.pool.arena.array(), payload.ids, target)
        assert receive.rows(target) == send.rows(payload.ids)
        touched |= set(target.tolist())
    assert arriving == {item: np.count_nonzero(tables["csa", item] >= 0) for item in arriving}
    assert moved == (RING - 1 + 9 // RATIO) * ROW * len(LAYERS)
    changed = np.flatnonzero(receive.pool.arena.array() != before)
    stride = receive.layout.envelope_bytes
    assert set((changed // stride).tolist()) == touched
    receive.manager.set_length("r", 9)
    receive.manager.check_integrity()


def test_what_a_backup_takes_of_both_ranges_comes_back_elsewhere(sides: tuple[Side, Side]) -> None:
    side, _ = sides
    side.manager.admit("a", 9)
    side.manager.commit(side.manager.plan_step([("a", 9)]))
    for range_name, value in (("ring", 7), ("rows", 77)):
        side.write(side.manager.units("a", "csa", range_name), value)
    saved, wanted = [], []
    for payload in side.manager.payloads("a", 0, 9, last=True):
        block = side.pool.block(payload.components, payload.ids)
        saved.append(np.zeros(block.nbytes, np.uint8))
        block.copy_out(saved[-1]).wait()
        wanted.append(side.rows(payload.ids))
    side.manager.release("a")
    side.manager.admit("b", 5)  # takes the old units
    for range_name in ("ring", "rows"):
        side.pool.fill(side.manager.free_units("csa", range_name), 0xFF)
        side.pool.fill(side.manager.units("b", "csa", range_name), 0xEE)
    side.manager.admit("a", 9, external=True)
    for payload, data, rows in zip(side.manager.payloads("a", 0, 9, last=True), saved, wanted, strict=True):
        side.pool.block(payload.components, payload.ids).copy_in(data).wait()
        assert side.rows(payload.ids) == rows
    side.manager.set_length("a", 9)
    for range_name in ("ring", "rows"):
        others = side.rows(side.manager.units("b", "csa", range_name))
        assert {row for layer in others for row in layer} == {b"\xee" * ROW}
