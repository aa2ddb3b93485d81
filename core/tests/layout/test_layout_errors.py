"""Every way a layout can be wrong is a LayoutError that names the place, what was expected and what was found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from kvcore.errors import LayoutError
from kvcore.layout import Axis, BlockOf, Field, Layout, Region, SpaceSpec, UnitRange, padding, region

SLOT = Axis("slot", 4)


def field(order: str = "slot", axes: Any = (SLOT,), dtype: str = "u8", **more: Any) -> Field:
    return Field(more.pop("name", "x"), dtype, order, axes, **more)


def unit(*fields: Field, size: int = 16, ranges: Any = ("pages",), name: str = "k", component: str = "c") -> Region:
    return Region(name, component, fields or (field(), padding("pad", 12, 4)), size, ranges)


def layout(*regions: Region, **change: Any) -> Layout:
    base: dict[str, Any] = {
        "format": "f", "revision": 1, "group": "g", "layers": (0,), "regions": regions or (unit(),),
        "spaces": (SpaceSpec("s", "sequence", "page", 4),), "ranges": (UnitRange("pages", "s"),),
    }  # fmt: skip
    return Layout(**(base | change))


TWO = (SpaceSpec("s", "sequence", "page", 4), SpaceSpec("t", "ring", "row", 0))
TWO_RANGES = (UnitRange("pages", "s"), UnitRange("rows", "t"))

BAD: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    # axes
    "size 0": (lambda: Axis("a", 0), "at least one element", {"axis": "a", "size": 0}),
    "size float": (lambda: Axis("a", 4.0), "not an integer", {"attribute": "size", "got": 4.0}),  # type: ignore[arg-type]
    "size bool": (lambda: Axis("a", True), "not an integer", {"got": True}),
    "padded less": (lambda: Axis("a", 4, padded=3), "at least one element", {"padded": 3}),
    "padded negative": (lambda: Axis("a", 4, padded=-8), "at least one element", {"padded": -8}),
    "ids too few": (lambda: Axis("head", 4, ids=((0, 3),)), "do not match", {"axis": "head", "expected": 4}),
    "ids empty": (lambda: Axis("head", 4, ids=((0, 4), (6, 6))), "empty or negative", {"axis": "head"}),
    "ids negative": (lambda: Axis("head", 4, ids=((-2, 2),)), "empty or negative", {"axis": "head"}),
    "ids twice": (lambda: Axis("head", 4, ids=((0, 2), (1, 3))), "held twice", {"axis": "head"}),
    "ids no pairs": (lambda: Axis("head", 4, ids=(0, 4)), "not a list of", {"axis": "head"}),  # type: ignore[arg-type]
    "ids float": (lambda: Axis("head", 4, ids=((0, 4.0),)), "not an integer", {"attribute": "ids"}),  # type: ignore[arg-type]
    # blocks
    "tail undeclared": (
        lambda: Axis("block", 3, blocks=BlockOf("dim", 80, 32)),
        "does not divide",
        {"axis": "dim", "extent": 80, "scale_block_size": 32},
    ),
    "number of blocks": (
        lambda: Axis("block", 2, blocks=BlockOf("dim", 80, 32, "padded")),
        "wrong number of blocks",
        {"axis": "block", "expected": 3, "got": 2},
    ),
    "block size 0": (lambda: BlockOf("dim", 64, 0), "at least one", {"axis": "dim", "scale_block_size": 0}),
    "block of nothing": (lambda: BlockOf("dim", 0, 32), "at least one", {"extent": 0}),
    "block float": (lambda: BlockOf("dim", 64, 32.0), "not an integer", {"attribute": "block_size"}),  # type: ignore[arg-type]
    "block tail": (lambda: BlockOf("dim", 64, 32, "short"), "unknown word", {"got": "short"}),  # type: ignore[arg-type]
    # fields
    "dtype": (lambda: field(dtype="e4m3"), "unknown storage dtype", {"dtype": "e4m3"}),
    "kind": (lambda: field(kind="date"), "unknown word", {"attribute": "kind", "got": "date"}),
    "order type": (lambda: field(order=("slot",)), "is a string", {"field": "x"}),  # type: ignore[arg-type]
    "axes type": (lambda: field(axes=("slot",)), "not a list of Axis", {"attribute": "axes"}),
    "unknown axis": (lambda: field("slot head"), "bad term", {"field": "x", "term": "head", "axes": ["slot"]}),
    "bad term": (lambda: field("slot/2"), "bad term", {"term": "slot/2"}),
    "bad modulus": (lambda: field("slot%0"), "bad term", {"term": "slot%0"}),
    "huge divisor": (lambda: field("slot//" + "9" * 5000), "bad term", {"field": "x"}),
    "axis unused": (lambda: field("slot", (SLOT, Axis("one", 1))), "missing from the order", {"axis": "one"}),
    "axis twice": (lambda: field("slot", (SLOT, SLOT)), "declared twice", {"axes": ["slot", "slot"]}),
    "split uneven": (lambda: field("slot//3 slot%3"), "does not divide", {"term": "slot//3", "extent": 4}),
    "split gap": (lambda: field("slot//4 slot%2"), "gap or overlap", {"axis": "slot", "expected": 2, "got": 4}),
    "split overlap": (lambda: field("slot//2 slot%4"), "gap or overlap", {"axis": "slot", "expected": 4, "got": 2}),
    "split twice": (lambda: field("slot slot"), "gap or overlap", {"axis": "slot", "expected": 4, "got": 1}),
    "split short": (lambda: field("slot%2"), "do not cover", {"axis": "slot", "expected": 4, "got": 2}),
    "split long": (lambda: field("slot%8"), "do not cover", {"axis": "slot", "expected": 4, "got": 8}),
    "alignment 24": (lambda: field(alignment=24), "not a power of two", {"field": "x", "alignment": 24}),
    "alignment -4": (lambda: field(alignment=-4), "not a power of two", {"alignment": -4}),
    "offset for dtype": (lambda: field(dtype="fp32", offset=2), "misaligned", {"field": "x", "offset": 2}),
    "offset for alignment": (lambda: field(offset=8, alignment=16), "misaligned", {"expected": "multiple of 16"}),
    "offset negative": (lambda: field(offset=-4), "misaligned", {"offset": -4}),
    "offset float": (lambda: field(offset=0.0), "not an integer", {"attribute": "offset"}),
    # spaces
    "page size 0": (lambda: SpaceSpec("s", "sequence", "page", 0), "page size", {"space": "s", "page_size": 0}),
    "tokens negative": (lambda: SpaceSpec("s", "ring", "row", -1), "page size", {"page_size": -1}),
    "unit": (lambda: SpaceSpec("s", "ring", "slot", 1), "unknown word", {"got": "slot"}),  # type: ignore[arg-type]
    "options": (lambda: SpaceSpec("s", "ring", "row", 1, ("w",)), "not a list of", {"space": "s"}),  # type: ignore[arg-type]
    "option float": (
        lambda: SpaceSpec("s", "ring", "row", 1, (("w", 0.5),)),  # type: ignore[arg-type]
        "not an integer",
        {"attribute": "w"},
    ),
    "option twice": (lambda: SpaceSpec("s", "ring", "row", 1, (("w", 1), ("w", 2))), "set twice", {"space": "s"}),
    # regions
    "hole": (
        lambda: unit(field(), padding("pad", 8, 8)),
        "belong to no field",
        {"region": "k", "field": "pad", "expected": 4, "got": 8},
    ),
    "hole at the start": (lambda: unit(padding("pad", 12, 4), field(offset=16)), "belong to no field", {"got": 4}),
    "overlap": (
        lambda: unit(field(), padding("pad", 14, 2)),
        "fields overlap",
        {"region": "k", "field": "pad", "expected": 4, "got": 2},
    ),
    "unit too long": (lambda: unit(field()), "do not cover", {"region": "k", "expected": 16, "got": 4}),
    "unit too short": (lambda: unit(size=8), "do not cover", {"expected": 8, "got": 16}),
    "field twice": (lambda: unit(field(), field(offset=4), size=8), "declared twice", {"fields": ["x", "x"]}),
    "no data": (lambda: unit(padding("pad", 16, 0)), "carries data", {"region": "k"}),
    "no ranges": (lambda: unit(ranges=()), "distinct unit ranges", {"region": "k"}),
    "range twice": (lambda: unit(ranges=("a", "a")), "distinct unit ranges", {"region": "k"}),
    "ranges a string": (lambda: unit(ranges="pages"), "not a list of str", {"attribute": "ranges", "got": "pages"}),
    "region alignment": (
        lambda: region("k", "c", [field()], ranges=("pages",), alignment=0),
        "not a power of two",
        {"region": "k", "alignment": 0},
    ),
    # layouts
    "no layers": (lambda: layout(layers=()), "distinct layer ids", {"group": "g"}),
    "layer twice": (lambda: layout(layers=(1, 1)), "distinct layer ids", {"layers": (1, 1)}),
    "layer negative": (lambda: layout(layers=(-1,)), "distinct layer ids", {"layers": (-1,)}),
    "layer float": (lambda: layout(layers=(1.0,)), "not an integer", {"attribute": "layers"}),
    "arena": (lambda: layout(arena="page-major"), "unknown word", {"attribute": "arena", "got": "page-major"}),
    "layout alignment": (lambda: layout(alignment=12), "not a power of two", {"group": "g", "alignment": 12}),
    "unit not aligned": (
        lambda: layout(unit(field(), size=4)),
        "not a multiple",
        {"region": "k", "expected": "multiple of 16", "got": 4},
    ),
    "aligned less than a field": (
        lambda: layout(unit(field(alignment=32), padding("pad", 28, 4), size=32)),
        "aligned less",
        {"region": "k", "field": "x", "expected": 32, "got": 16},
    ),
    "aligned less than a dtype": (
        lambda: layout(unit(field(dtype="fp32"), size=16), alignment=2),
        "aligned less",
        {"expected": 4, "got": 2},
    ),
    "no regions": (lambda: layout(regions=()), "regions with distinct names", {"group": "g"}),
    "region twice": (lambda: layout(unit(), unit()), "regions with distinct names", {"names": ["k", "k"]}),
    "region type": (lambda: layout(regions=("k",)), "not a list of Region", {"attribute": "regions"}),
    "space twice": (lambda: layout(spaces=TWO[:1] * 2), "index spaces with distinct", {"names": ["s", "s"]}),
    "range names": (lambda: layout(ranges=TWO_RANGES[:1] * 2), "unit ranges with distinct", {"group": "g"}),
    "range without space": (lambda: layout(ranges=(UnitRange("pages", "r"),)), "no such index space", {"space": "r"}),
    "region without range": (lambda: layout(unit(ranges=("rows",))), "no such unit range", {"range": "rows"}),
    "slots": (
        lambda: layout(spaces=(SpaceSpec("s", "sequence", "page", 8),)),
        "one slot a token",
        {"region": "k", "field": "x", "expected": 8, "got": 4},
    ),
    "no slots": (
        lambda: layout(unit(field("dim", (Axis("dim", 16),)))),
        "one slot a token",
        {"expected": 4, "got": None},
    ),
    "ranges in two orders": (
        lambda: layout(
            unit(ranges=("rows", "pages")),
            unit(ranges=("pages", "rows"), name="v", component="d"),
            spaces=TWO,
            ranges=TWO_RANGES,
        ),
        "different orders",
        {"group": "g", "got": {"k": ("rows", "pages"), "v": ("pages", "rows")}},
    ),
    "constants with others": (
        lambda: layout(
            unit(ranges=("pages", "one")),
            spaces=(*TWO, SpaceSpec("c", "constant", "row", 0)),
            ranges=(*TWO_RANGES, UnitRange("one", "c")),
        ),
        "region of their own",
        {"region": "k", "got": ("pages", "one")},
    ),
    "component, unlike ranges": (
        lambda: layout(unit(), unit(ranges=("rows",), name="v"), spaces=TWO, ranges=TWO_RANGES, arena="layer_major"),
        "share unit ranges",
        {"component": "c"},
    ),
    "blocks of another extent": (
        lambda: layout(
            unit(field("slot dim", (SLOT, Axis("dim", 64))), size=256),
            unit(field("slot block", (SLOT, Axis("block", 4, blocks=BlockOf("dim", 128, 32)))), name="s"),
        ),
        "no field has",
        {"region": "s", "field": "x", "axis": "dim", "expected": [64], "got": 128},
    ),
    # places
    "no count": (lambda: layout().place({}), "no unit count", {"region": "k", "range": "pages"}),
    "count of nothing": (lambda: layout().place({"pages": 2, "rows": 2}), "for no range", {"range": "rows"}),
    "count 0": (lambda: layout().place({"pages": 0}), "null unit", {"range": "pages", "got": 0}),
    "count float": (lambda: layout().place({"pages": 2.0}), "not an integer", {"got": 2.0}),  # type: ignore[dict-item]
    "too large": (lambda: layout().place({"pages": 2**60}), "too large", {"arena_bytes": 2**64}),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_layouts(name: str) -> None:
    build, message, facts = BAD[name]
    with pytest.raises(LayoutError) as caught:
        build()
    assert message in str(caught.value)
    assert {key: caught.value.fields.get(key) for key in facts} == facts
    assert caught.value.as_dict()["code"] == "layout"


def test_the_good_ones_are_good() -> None:
    """What the bad cases are changed from is accepted."""
    assert layout().envelope_bytes == 16
    assert layout(unit(), unit(name="v")).place({"pages": 2**40}).arena_bytes == 2**45
    Axis("block", 3, blocks=BlockOf("dim", 80, 32, "padded"))
    field("slot//2 slot%2")


def test_remedies() -> None:
    for name, words in {
        "tail undeclared": 'BlockOf(tail="padded")',
        "unit not aligned": "declare padding",
        "ranges in two orders": "one order",
        "dtype": "did you mean",
        "arena": "page_major",
        "range without space": "known: s",
    }.items():
        with pytest.raises(LayoutError) as caught:
            BAD[name][0]()
        assert words in caught.value.remedy


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"{}", b"[" * 200_000, "\ud800", b'{"format": 1}', b'"layout"',
    ],
)  # fmt: skip
def test_garbage_is_not_a_layout(data: bytes | str) -> None:
    with pytest.raises(LayoutError, match="not a layout"):
        Layout.from_json(data)


def test_json_is_validated_like_code(cases: ModuleType) -> None:
    text = cases.kv().to_json().decode()
    for old, new, message in [
        ('"unit_bytes":64', '"unit_bytes":80', "do not cover"),
        ('"arena":"page_major"', '"arena":"pages"', "not a layout"),
        ('"revision":1', '"revision":1.0', "not a layout"),
        ('"revision":1', '"revision":1,"colour":"red"', "colour"),
        ('"revision":1,', "", "revision"),
        ('"slot head dim"', '"slot dim"', "missing from the order"),
        ('"layers":[0,1,2]', '"layers":[0,1,1]', "distinct layer ids"),
    ]:
        assert old in text
        with pytest.raises(LayoutError, match=message):
            Layout.from_json(text.replace(old, new))


OPTIMISED = """
import runpy, sys
from kvcore.errors import LayoutError
accepted = []
for name, (build, message, facts) in runpy.run_path(sys.argv[1])["BAD"].items():
    try:
        build()
    except LayoutError as error:
        if message not in str(error):
            accepted.append(name)
    else:
        accepted.append(name)
print(sys.flags.optimize, accepted)
"""


def test_validation_does_not_rest_on_asserts() -> None:
    """Every bad layout is refused under ``python -O`` too."""
    out = subprocess.run([sys.executable, "-O", "-c", OPTIMISED, __file__], capture_output=True, text=True, check=True)
    assert out.stdout == "1 []\n"
