"""Layouts of real formats: sizes by hand, places by loops, JSON and fingerprints."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, padding, region

NAMES = [
    "kv_nhd", "kv_hnd", "kv_widths", "mxfp8_flat", "mxfp8_flat_tail", "mxfp8_interleaved", "mxfp8_general_tail", "mla",
    "dsv4", "q8_0", "conv_tp2",
]  # fmt: skip

BYTES_PER_TOKEN = {  # by hand: layers × heads × bytes
    "kv_nhd": {"full/kv": 3 * 2 * (4 + 4) * 2},
    "kv_hnd": {"full/kv": 3 * 2 * (4 + 4) * 2},
    "kv_widths": {"full/kv": 3 * 3 * (6 + 4) * 2},
    "mxfp8_flat": {"full/kv": 3 * 2 * 2 * 64, "full/block_scale": 3 * 2 * 2 * 2},
    "mxfp8_flat_tail": {"full/kv": 3 * 2 * 2 * 80, "full/block_scale": 3 * 2 * 2 * 3},
    "mxfp8_interleaved": {"full/kv": 2 * 1 * 2 * 128, "full/block_scale": 2 * 1 * 2 * 4},
    "mxfp8_general_tail": {"full/kv": 2 * 1 * 2 * 80, "full/block_scale": 2 * 1 * 2 * 4},  # the chunk holds 4 blocks
    "mla": {"full/kv": 3 * (16 + 8) * 2},
    "dsv4": {"csa/kv": Fraction(2 * 640, 4)},  # a compressed row every 4 tokens; the ring does not grow
    "q8_0": {"full/kv": 3 * 2 * 2 * 2 * 34},
    "conv_tp2": {"state/conv": 0},
}

UNIT_BYTES = {  # region → unit bytes
    "kv_nhd": {"k": 64, "v": 64},
    "kv_hnd": {"k": 64, "v": 64},
    "kv_widths": {"k": 144, "v": 96},
    "mxfp8_flat": {"k": 512, "v": 512, "k_scale": 16, "v_scale": 16},
    "mxfp8_flat_tail": {"k": 640, "v": 640, "k_scale": 32, "v_scale": 32},  # 24 scale bytes, 8 for alignment
    "mxfp8_interleaved": {"k": 16384, "v": 16384, "k_scale": 512, "v_scale": 512},
    "mxfp8_general_tail": {"k": 10240, "v": 10240, "k_scale": 512, "v_scale": 512},
    "mla": {"latent": 128, "rope": 64},
    "dsv4": {"nope": 512, "rope": 128},
    "q8_0": {"k": 544, "v": 544},
    "conv_tp2": {"conv": 64},
}

FINGERPRINTS: dict[str, str] = json.loads(
    (Path(__file__).parents[1] / "golden" / "layout_fingerprints.json").read_text()
)


@pytest.mark.parametrize("name", NAMES)
def test_sizes(cases: ModuleType, loop: ModuleType, name: str) -> None:
    layout = cases.everything()[name]
    assert {r.name: r.unit_bytes for r in layout.regions} == UNIT_BYTES[name]
    assert layout.envelope_bytes == sum(UNIT_BYTES[name].values()) * len(layout.layers)
    assert layout.bytes_per_token() == BYTES_PER_TOKEN[name]
    for item in layout.regions:
        data = sum(n for _, n in loop.elements(layout, item).values())
        aligned = sum(loop.stored(f) for f in item.fields if f.kind == "alignment")
        assert (item.logical_bytes, item.alignment_bytes) == (data, aligned)
        assert layout.regions_of(item.component).count(item) == 1


def test_alignment_padding_is_its_own_entry(cases: ModuleType) -> None:
    layout = cases.everything()["mxfp8_flat_tail"]
    assert layout.alignment_bytes_per_token() == Fraction(2 * 8 * 3, 4)
    total = sum(layout.bytes_per_token().values()) + layout.alignment_bytes_per_token()
    assert total == Fraction(layout.envelope_bytes, 4)


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
@pytest.mark.parametrize("name", NAMES)
def test_place(cases: ModuleType, loop: ModuleType, name: str, arena: Any) -> None:
    """Every unit of every buffer lies where a loop puts it, without overlaps or hidden gaps."""
    layout = msgspec.structs.replace(cases.everything()[name], arena=arena)
    counts = {r.name: np.int32(3 + n) for n, r in enumerate(layout.ranges)}
    place = layout.place(counts)
    want, nbytes = loop.unit_addresses(layout, counts)
    assert place.arena_bytes == nbytes
    got = {}
    for buffer in place.buffers:
        assert buffer.unit_bytes == UNIT_BYTES[name][buffer.region]
        assert place.buffer(buffer.layer, buffer.region) == buffer
        for unit, at in enumerate(buffer.offsets(np.arange(buffer.num_units)).tolist()):
            got[buffer.layer, buffer.region, unit] = at
            assert at % layout.alignment == 0
    assert got == want
    spans = sorted((at, at + UNIT_BYTES[name][key[1]]) for key, at in got.items())
    assert spans[0][0] == 0
    assert spans[-1][1] == nbytes
    assert all(a[1] == b[0] for a, b in itertools.pairwise(spans))
    for buffer in place.buffers:
        assert type(buffer.base) is type(buffer.num_units) is type(buffer.unit_stride) is int


def test_ranges_follow_one_another(cases: ModuleType) -> None:
    place = cases.dsv4().place({"ring": 5, "compressed": 3})
    assert place.ranges == dict.fromkeys(("nope", "rope"), (("ring", 0, 5), ("compressed", 5, 3)))
    assert {b.num_units for b in place.buffers} == {8}
    with pytest.raises(LayoutError, match="no such buffer"):
        place.buffer(3, "nope")


def test_a_pipeline_stage_is_contiguous(cases: ModuleType) -> None:
    """Page-major: the layers of a stage lie side by side inside the envelope."""
    place = cases.kv(layers=range(6)).place({"pages": 2})
    bases = [b.base for b in place.buffers if b.layer in (2, 3, 4)]
    assert [b - a for a, b in itertools.pairwise(bases)] == [64] * 5


def test_names_are_looked_up_with_a_remedy(cases: ModuleType) -> None:
    layout = cases.everything()["mxfp8_flat"]
    assert layout.components == ("full/kv", "full/block_scale")
    assert layout.region("k").field("x").axis("head").size == 2
    assert layout.space_of_range("pages") == layout.space("full")
    calls = [
        (lambda: layout.region("k_scal"), "'k_scale'"),
        (lambda: layout.space("ful"), "'full'"),
        (lambda: layout.space_of_range("page"), "'pages'"),
        (lambda: layout.region("k").field("y"), "known: x"),
        (lambda: layout.region("k").field("x").axis("heads"), "'head'"),
        (lambda: layout.place({"pages": 2, "pags": 1}), "'pages'"),
    ]
    for call, remedy in calls:
        with pytest.raises(LayoutError) as caught:
            call()
        assert remedy in caught.value.remedy


# --- identity --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_json_round_trip(cases: ModuleType, name: str) -> None:
    layout = cases.everything()[name]
    again = Layout.from_json(layout.to_json())
    assert again == layout
    assert hash(again) == hash(layout)
    assert again.fingerprint() == layout.fingerprint()
    assert Layout.from_json(layout.to_json().decode()) == layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=Layout) == layout


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_json_round_trip_of_made_up_layouts(data: st.DataObject, cases: ModuleType) -> None:
    one, other = data.draw(cases.pairs())
    assert Layout.from_json(one.to_json()) == one
    assert (one.fingerprint() == other.fingerprint()) == (one == other)


def test_fingerprints_are_golden(cases: ModuleType) -> None:
    """Peers of different releases compare fingerprints: a change here is a change of the wire."""
    assert {name: layout.fingerprint() for name, layout in cases.everything().items()} == FINGERPRINTS
    assert len(set(FINGERPRINTS.values())) == len(NAMES)


PRINT = """
import json, runpy, sys
cases = runpy.run_path(sys.argv[1])
print(json.dumps({name: layout.fingerprint() for name, layout in cases["everything"]().items()}))
"""


def _pythons() -> list[str]:
    """This interpreter, and others on the machine that can import what layouts need."""
    found = [sys.executable]
    for minor in (12, 13, 14):
        other = shutil.which(f"python3.{minor}")
        imports = "import msgspec, numpy, hypothesis, kvcore.layout"
        if other and subprocess.run([other, "-c", imports], capture_output=True, check=False).returncode == 0:
            found.append(other)
    return found


@pytest.mark.parametrize("flags", [[], ["-O"]])
@pytest.mark.parametrize("seed", ["0", "4242"])
def test_fingerprints_are_equal_in_every_process(seed: str, flags: list[str]) -> None:
    script = Path(__file__).parents[1] / "support" / "layout_cases.py"
    for python in _pythons():
        command = [python, *flags, "-c", PRINT, str(script)]
        out = subprocess.run(command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True)
        assert json.loads(out.stdout) == FINGERPRINTS


def test_one_layout_has_one_fingerprint() -> None:
    """Numpy integers, lists, spaces, and a padding equal to the size say the same and hash the same."""

    def build(integer: Any, many: Any, order: str, padded: int, options: Any) -> Layout:
        axes = many(
            [
                Axis("slot", integer(4), padded=padded),
                Axis("head", integer(2), ids=many([many([integer(0), integer(2)])])),
            ]
        )
        item = region("k", "c", many([Field("x", "fp32", order, axes)]), ranges=many(["pages"]))
        space = SpaceSpec("s", "window", "page", integer(4), many(options))
        return Layout(
            "f", integer(1), "g", many([integer(0)]), many([item]), many([space]), many([UnitRange("pages", "s")])
        )

    plain = build(int, tuple, "slot head", 0, [("window", 4), ("draft", 1)])
    other = build(np.int64, list, "  slot\thead ", 4, [("draft", 1), ("window", 4)])
    assert plain == other
    assert hash(plain) == hash(other)
    assert plain.to_json() == other.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"}, {"revision": 2}, {"group": "swa"}, {"layers": (0, 2, 1)}, {"arena": "layer_major"},
        {"alignment": 8},
    ],
)  # fmt: skip
def test_every_attribute_is_in_the_fingerprint(cases: ModuleType, change: dict[str, Any]) -> None:
    layout = cases.kv()
    assert msgspec.structs.replace(layout, **change).fingerprint() != layout.fingerprint()


def test_layouts_are_frozen_and_hashable(cases: ModuleType) -> None:
    layout = cases.kv()
    with pytest.raises(AttributeError):
        layout.group = "other"
    assert {layout: 1}[cases.kv()] == 1


def test_packed_fields_at_offsets() -> None:
    """Two dtypes in one row, as DSV4 packs them: values, scales in pairs, padding."""
    item = region(
        "nope",
        "c",
        [
            Field("x", "e4m3fn", "dim", (Axis("dim", 448),)),
            Field("s", "e8m0", "tile copy", (Axis("tile", 7), Axis("copy", 2)), offset=448),
            padding("unused", 50, 462),
        ],
        ranges=("rows",),
    )
    assert (item.unit_bytes, item.logical_bytes, item.alignment_bytes) == (512, 462, 0)
    scale = item.field("s")
    for j in range(14):  # byte 448 + j scales elements 32 j to 32 j + 31
        assert int(scale.offsets(tile=j // 2, copy=j % 2)) == 448 + j
