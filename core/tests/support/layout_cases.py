"""Layouts of real formats, small enough for slow loops where a size is free, and strategies for made-up ones."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from kvcore.layout import Axis, BlockOf, Field, Layout, Region, SpaceSpec, UnitRange, padding, region

PAGES = (UnitRange("pages", "full"),)
ORDERS = {"NHD": "slot head {}", "HND": "head slot {}"}
INTERLEAVED = "head slot%32 slot//32 block"
GENERAL = "head slot//128 block//4 slot%32 slot//32%4 block%4"


def paged(page: int, regions: list[Region], **options: Any) -> Layout:
    """A layout of one sequence space."""
    base: dict[str, Any] = {"format": "test", "revision": 1, "group": "full", "layers": (0, 1, 2)}
    spaces = (SpaceSpec("full", "sequence", "page", page),)
    return Layout(regions=tuple(regions), spaces=spaces, ranges=PAGES, **(base | options))


def tensor(
    name: str, page: int, heads: int, dim: int, *, dtype: str = "bf16", order: str = "NHD", ids: Any = ()
) -> Region:
    axes = (Axis("slot", page), Axis("head", heads, ids=ids), Axis("dim", dim))
    return region(name, "full/kv", [Field("x", dtype, ORDERS[order].format("dim"), axes)], ranges=("pages",))


def scales(name: str, page: int, heads: int, dim: int, order: str, *, tail: Any = "exact", ids: Any = ()) -> Region:
    blocks = -(-dim // 32)
    padded = -(-blocks // 4) * 4 if "block//4" in order else 0
    axis = Axis("block", blocks, padded=padded, blocks=BlockOf("dim", dim, 32, tail))
    axes = (Axis("slot", page), Axis("head", heads, ids=ids), axis)
    return region(name, "full/block_scale", [Field("s", "e8m0", order, axes)], ranges=("pages",))


def kv(
    order: str = "NHD", *, page: int = 4, heads: int = 2, k: int = 4, v: int = 4, ids: Any = (), **options: Any
) -> Layout:
    """Plain K and V."""
    pair = [tensor(n, page, heads, d, order=order, ids=ids) for n, d in (("k", k), ("v", v))]
    return paged(page, pair, **options)


def mxfp8(
    scale_order: str,
    *,
    page: int = 4,
    heads: int = 2,
    dim: int = 64,
    tail: Any = "exact",
    ids: Any = (),
    **options: Any,
) -> Layout:
    """K and V in e4m3 with a scale for every 32 elements."""
    regions = [tensor(n, page, heads, dim, dtype="e4m3fn", ids=ids) for n in ("k", "v")]
    regions += [scales(n, page, heads, dim, scale_order, tail=tail, ids=ids) for n in ("k_scale", "v_scale")]
    return paged(page, regions, **options)


def mla(*, page: int = 4, latent: int = 16, rope: int = 8, **options: Any) -> Layout:
    """A latent and a rope part that every rank holds whole: no heads, no ids."""
    regions = []
    for name, dim in (("latent", latent), ("rope", rope)):
        axes = (Axis("slot", page), Axis("dim", dim))
        regions.append(region(name, "full/kv", [Field("x", "bf16", "slot dim", axes)], ranges=("pages",)))
    return paged(page, regions, **options)


def dsv4(**options: Any) -> Layout:
    """Rows of two pools: a window ring, then compressed rows, in one region each."""
    nope = Region(
        "nope",
        "csa/kv",
        (
            Field("x", "e4m3fn", "dim", (Axis("dim", 448),)),
            Field("s", "e8m0", "tile copy", (Axis("tile", 7), Axis("copy", 2)), offset=448),
            padding("unused", 50, 462),
        ),
        512,
        ("ring", "compressed"),
    )
    rope = Region("rope", "csa/kv", (Field("x", "bf16", "dim", (Axis("dim", 64),)),), 128, ("ring", "compressed"))
    base: dict[str, Any] = {"layers": (2, 4), "arena": "layer_major"}
    return Layout(
        "dsv4_fp8",
        1,
        "csa",
        regions=(nope, rope),
        spaces=(SpaceSpec("window", "ring", "row", 0, (("window", 128),)), SpaceSpec("csa", "compressed", "row", 4)),
        ranges=(UnitRange("ring", "window"), UnitRange("compressed", "csa")),
        **(base | options),
    )


def q8_0(*, page: int = 4, heads: int = 2, dim: int = 64, ids: Any = (), **options: Any) -> Layout:
    """K and V in records of 34 bytes: an fp16 scale, then 32 signed bytes."""
    lead = (Axis("slot", page), Axis("head", heads, ids=ids))
    fields = (
        Field("s", "fp16", "slot head block @34", (*lead, Axis("block", dim // 32, blocks=BlockOf("dim", dim, 32)))),
        Field("x", "i8", "slot head dim//32 @34 dim%32", (*lead, Axis("dim", dim)), offset=2),
    )
    return paged(page, [region(n, "full/kv", fields, ranges=("pages",)) for n in ("k", "v")], **options)


def conv(ids: Any, *, taps: int = 4, **options: Any) -> Layout:
    """A short convolution's state; channels are [key, key, value] groups, so a shard holds several id ranges."""
    channels = sum(hi - lo for lo, hi in ids)
    axes = (Axis("channel", channels, ids=ids), Axis("tap", taps))
    base: dict[str, Any] = {"layers": (1, 3)}
    return Layout(
        "conv",
        1,
        "state",
        regions=(region("conv", "state/conv", [Field("x", "bf16", "channel tap", axes)], ranges=("states",)),),
        spaces=(SpaceSpec("state", "per_request", "state_slot", 0),),
        ranges=(UnitRange("states", "state"),),
        **(base | options),
    )


def everything() -> dict[str, Layout]:
    """One layout of every kind, small."""
    return {
        "kv_nhd": kv("NHD"),
        "kv_hnd": kv("HND", arena="layer_major"),
        "kv_widths": kv("HND", k=6, v=4, heads=3),
        "mxfp8_flat": mxfp8("slot head block"),
        "mxfp8_flat_tail": mxfp8("slot head block", dim=80, tail="padded"),
        "mxfp8_interleaved": mxfp8(INTERLEAVED, page=128, heads=1, dim=128, layers=(0, 1)),
        "mxfp8_general_tail": mxfp8(
            GENERAL, page=128, heads=1, dim=80, tail="padded", layers=(0, 1), arena="layer_major"
        ),
        "mla": mla(),
        "dsv4": dsv4(),
        "q8_0": q8_0(),
        "conv_tp2": conv(((0, 2), (4, 6), (8, 12))),
    }


# --- made-up fields --------------------------------------------------------------------------------------------------


@st.composite
def splits(draw: st.DrawFn, name: str, extent: int) -> list[str]:
    """Terms that tile an axis: a random factorisation, written in every form the grammar has."""
    digits, left = [], extent
    while left > 1:
        digits.append(draw(st.sampled_from([d for d in range(2, left + 1) if left % d == 0])))
        left //= digits[-1]
    terms, divisor = [], 1
    for size in digits or [1]:
        whole, last = size == extent, divisor * size == extent
        forms = [f"{name}//{divisor}%{size}"]
        forms += [f"{name}//{divisor}"] if last else []
        forms += [f"{name}%{size}"] if divisor == 1 else []
        forms += [name] if whole else []
        terms.append(draw(st.sampled_from(forms)))
        divisor *= size
    return terms


@st.composite
def orders(draw: st.DrawFn, axes: tuple[Axis, ...]) -> str:
    """An order of the axes, each of them split at random."""
    terms = [t for a in axes for t in draw(splits(a.name, a.padded or a.size))]
    return " ".join(draw(st.permutations(terms)))


@st.composite
def id_sets(draw: st.DrawFn, total: int) -> tuple[tuple[int, int], ...]:
    """Distinct ids below ``total`` as ranges, not always ascending."""
    chosen = draw(st.lists(st.integers(0, total - 1), min_size=1, max_size=total, unique=True))
    ranges: list[list[int]] = []
    for i in chosen:
        if ranges and ranges[-1][1] == i:
            ranges[-1][1] += 1
        else:
            ranges.append([i, i + 1])
    return tuple((lo, hi) for lo, hi in ranges)


@st.composite
def fields(draw: st.DrawFn, axes: tuple[Axis, ...] | None = None, dtype: str | None = None) -> Field:
    """A field of one to three axes with any splits, padding and shard."""
    if axes is None:
        names = draw(st.lists(st.sampled_from(["slot", "head", "dim", "block"]), min_size=1, max_size=3, unique=True))
        axes = tuple(draw(axis(name, draw(st.integers(1, 8)))) for name in names)
    dtype = dtype or draw(st.sampled_from(["u8", "i8", "i16", "u16", "bf16", "fp32", "e8m0"]))
    return Field("x", dtype, draw(orders(axes)), axes, offset=16 * draw(st.integers(0, 2)))


@st.composite
def axis(draw: st.DrawFn, name: str, size: int, ids: tuple[tuple[int, int], ...] = ()) -> Axis:
    """An axis, sometimes stored with padding."""
    return Axis(name, size, padded=draw(st.sampled_from([0, 0, size, size + 1, -(-size // 4) * 4])), ids=ids)


@st.composite
def sides(draw: st.DrawFn, number: int) -> list[Layout]:
    """Layouts of the same data that differ in axis order, padding, arena order, shard and layers."""
    page, dim, total = draw(st.sampled_from([1, 2, 4, 6])), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    sharded, dtype = draw(st.booleans()), draw(st.sampled_from(["u8", "i8", "u16", "bf16", "fp32"]))
    layouts = []
    for _ in range(number):
        ids = draw(id_sets(total)) if sharded else ()
        heads = sum(hi - lo for lo, hi in ids) or total
        regions = []
        for name, component in (("k", "full/kv"), ("s", "full/block_scale")):
            axes = (
                draw(axis("slot", page)),
                draw(axis("head", heads, ids)),
                draw(axis("dim" if name == "k" else "part", dim)),
            )
            first = draw(fields(draw(st.permutations(axes)), dtype))
            lead = [padding("lead", first.offset, 0)] if first.offset else []
            end = first.offset + first.nbytes
            gap = -end % 4
            more = [padding("gap", gap, end)] if gap else []
            second = Field("y", dtype, draw(orders(axes)), axes, offset=end + gap)
            regions.append(region(name, component, [*lead, first, *more, second], ranges=("pages",)))
        layers = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)))
        arena = draw(st.sampled_from(["layer_major", "page_major"]))
        layouts.append(paged(page, regions, layers=layers, arena=arena))
    return layouts


def pairs() -> st.SearchStrategy[tuple[Layout, Layout]]:
    """Two layouts of the same data."""
    return sides(2).map(lambda both: (both[0], both[1]))
