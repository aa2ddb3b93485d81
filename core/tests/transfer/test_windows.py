"""Staging: programs over copies of what they read give the same bytes as over the arena itself."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.layout import Layout
from kvcore.layout.moves import Program, run_program
from kvcore.transfer.shm.windows import Windows, windows_of

POISON = 0xFF
SRC, DST = 6, 7


def stage(windows: Windows, source: Any, units: list[int]) -> Any:
    """Copies of units, byte by byte."""
    out = [
        source[piece.base + unit * piece.unit_stride + byte]
        for unit in units
        for piece in windows.pieces
        for byte in range(piece.nbytes)
    ]
    return np.array(out, np.uint8)


def check(loop: ModuleType, src: Layout, dst: Layout, pairs: list[tuple[int, int]]) -> Windows:
    """Compare every byte of the destination with the loop over elements."""
    a, b = src.place({"pages": SRC}), dst.place({"pages": DST})
    windows = windows_of(Program.build(src, a, dst, b))
    source = np.random.default_rng(0).integers(0, POISON, a.arena_bytes, dtype=np.uint8)
    want = loop.convert(src, {"pages": SRC}, dst, {"pages": DST}, pairs, dst.components)
    s, d = ([pair[n] for pair in pairs] for n in (0, 1))
    got = np.full(b.arena_bytes, POISON, np.uint8)
    run_program(windows.program(len(s)), stage(windows, source, s), got, np.arange(len(s)), d)
    for to, at in want.items():
        assert got[to] == source[at]
    direct = np.full(b.arena_bytes, POISON, np.uint8)
    run_program(Program.build(src, a, dst, b), source, direct, s, d)
    assert set(np.flatnonzero(got != POISON)) <= set(np.flatnonzero(direct != POISON)), "other bytes were written"
    return windows


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_any_pair_of_layouts(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """Axis orders, splits, padding, arena orders, shards and layers, all at once."""
    src, dst = data.draw(cases.pairs())
    size = data.draw(st.integers(1, 3))
    s = data.draw(st.lists(st.integers(0, SRC - 1), min_size=size, max_size=size, unique=True))
    d = data.draw(st.lists(st.integers(0, DST - 1), min_size=size, max_size=size, unique=True))
    windows = check(loop, src, dst, list(zip(s, d, strict=True)))
    assert windows.unit_bytes == sum(piece.nbytes for piece in windows.pieces)
    assert all(piece.nbytes <= piece.unit_stride for piece in windows.pieces)


def test_equal_page_major_layouts_stage_envelopes(kit: ModuleType) -> None:
    """One piece, nothing read over: a copy without gaps on either side."""
    layout = kit.layout()
    place = layout.place({"pages": SRC})
    windows = windows_of(Program.build(layout, place, layout, place))
    assert [(piece.base, piece.nbytes) for piece in windows.pieces] == [(0, layout.envelope_bytes)]
    assert windows.read_over == 0
    assert len(windows.program(3).moves) == 1
    assert windows.program(3).src_bytes == 3 * layout.envelope_bytes


def test_layers_of_a_layer_major_arena_are_pieces_of_their_own(kit: ModuleType) -> None:
    layout = kit.layout(arena="layer_major", layers=(0, 1, 2))
    place = layout.place({"pages": SRC})
    windows = windows_of(Program.build(layout, place, layout, place))
    assert len(windows.pieces) == 9
    assert windows.unit_bytes == sum(region.unit_bytes for region in layout.regions) * 3


@pytest.mark.parametrize(("order", "dim", "over"), [("head slot dim", 512, 0.0), ("slot head dim", 8, 1.0)])
def test_a_ranks_heads_stage_little_more_than_they_are(kit: ModuleType, order: str, dim: int, over: float) -> None:
    """Heads that lie together stage no other byte; heads of every token stage what is between them too, and say so."""
    options: dict[str, Any] = {"dim": dim, "scales": False}
    whole, half = kit.layout(order, heads=4, **options), kit.layout(order, heads=2, ids=((2, 4),), **options)
    windows = windows_of(
        Program.build(whole, whole.place({"pages": SRC}), half, half.place({"pages": DST}), ("full/kv",))
    )
    data = sum(region.unit_bytes for region in half.regions) * len(half.layers)
    assert windows.unit_bytes == data + windows.read_over
    assert windows.read_over <= over * data
    assert (windows.read_over == 0) == (over == 0)
