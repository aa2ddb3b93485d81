"""The layout language once more, as slow loops over indices.

Nothing here calls a method of kvcore: layouts are read as plain data (names, sizes, orders, ids), so that a mistake in
the library cannot hide in its own test.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

ITEM = {
    "u8": 1, "i8": 1, "u16": 2, "i16": 2, "i32": 4, "i64": 8, "fp16": 2, "bf16": 2, "fp32": 4,
    "e4m3fn": 1, "e4m3fnuz": 1, "e5m2": 1, "e5m2fnuz": 1, "e8m0": 1,
}  # fmt: skip


def extent(axis: Any) -> int:
    return axis.padded if axis.padded else axis.size


def parse(field: Any) -> list[tuple[str, int, int]]:
    """(axis, divisor, modulus) for every word of the order."""
    out = []
    for word in field.order.split(" "):
        if word.startswith("@"):
            continue
        left, _, modulus = word.partition("%")
        name, _, divisor = left.partition("//")
        (axis,) = [a for a in field.axes if a.name == name]
        by = int(divisor) if divisor else 1
        out.append((name, by, int(modulus) if modulus else extent(axis) // by))
    return out


def offset(field: Any, coords: dict[str, int]) -> int:
    """Byte offset inside a unit, one digit after the other, like reading a number; a record's number is worth its bytes."""
    total, number, terms = field.offset, 0, iter(parse(field))
    for word in field.order.split(" "):
        if word.startswith("@"):
            total, number = total + number * int(word[1:]), 0
        else:
            name, divisor, modulus = next(terms)
            number = number * modulus + (coords[name] // divisor) % modulus
    return total + number * ITEM[field.dtype]


def coordinates(field: Any) -> Iterator[dict[str, int]]:
    """Every element with data, by local coordinates."""
    names = [axis.name for axis in field.axes]
    for values in itertools.product(*(range(axis.size) for axis in field.axes)):
        yield dict(zip(names, values, strict=True))


def stored(field: Any) -> int:
    """Bytes a field takes."""
    total = ITEM[field.dtype]
    for axis in field.axes:
        total *= extent(axis)
    return total


def global_ids(axis: Any) -> list[int]:
    if not axis.ids:
        return list(range(axis.size))
    return [i for lo, hi in axis.ids for i in range(lo, hi)]


def runs(offsets: list[int], item: int) -> list[tuple[int, int]]:
    """Contiguous (start, length) runs of elements at ``offsets``."""
    out: list[list[int]] = []
    for at in sorted(offsets):
        if out and out[-1][0] + out[-1][1] == at:
            out[-1][1] += item
        else:
            out.append([at, item])
    return [(start, length) for start, length in out]


def unit_addresses(layout: Any, units: dict[str, int]) -> tuple[dict[tuple[int, str, int], int], int]:
    """``(layer, region, unit) → byte address`` and the size of the arena."""
    count = {r.name: sum(units[name] for name in r.ranges) for r in layout.regions}
    out, at = {}, 0
    if layout.arena == "layer_major":
        for layer in layout.layers:
            for region in layout.regions:
                for unit in range(count[region.name]):
                    out[layer, region.name, unit] = at
                    at += region.unit_bytes
    else:
        for unit in range(count[layout.regions[0].name]):
            for layer in layout.layers:
                for region in layout.regions:
                    out[layer, region.name, unit] = at
                    at += region.unit_bytes
    return out, at


def elements(layout: Any, region: Any) -> dict[tuple[Any, ...], tuple[int, int]]:
    """``(field, (axis, global id)…) → (offset in the unit, bytes)`` for all data of one region."""
    out = {}
    for field in region.fields:
        if field.kind != "data":
            continue
        ids = {axis.name: global_ids(axis) for axis in field.axes}
        for coords in coordinates(field):
            key = (field.name, *sorted((name, ids[name][c]) for name, c in coords.items()))
            out[key] = (offset(field, coords), ITEM[field.dtype])
    return out


def convert(
    src: Any,
    src_counts: dict[str, int],
    dst: Any,
    dst_counts: dict[str, int],
    pairs: list[tuple[int, int]],
    components: tuple[str, ...],
    keep: Callable[[int, str, dict[str, int], str], bool] = lambda layer, region, ids, field: True,
) -> dict[int, int]:
    """``destination byte address → source byte address`` of all data both layouts hold.

    ``keep(layer, region, ids, field)`` may leave out elements; ``ids`` are global, by axis.
    """
    src_at, _ = unit_addresses(src, src_counts)
    dst_at, _ = unit_addresses(dst, dst_counts)
    out = {}
    for region in dst.regions:
        if region.component not in components:
            continue
        (partner,) = [r for r in src.regions if r.name == region.name]
        ours, theirs = elements(dst, region), elements(src, partner)
        for key in set(ours) & set(theirs):
            (to, nbytes), (origin, _) = ours[key], theirs[key]
            for layer in set(src.layers) & set(dst.layers):
                if not keep(layer, region.name, dict(key[1:]), key[0]):
                    continue
                for s, d in pairs:
                    if s < 0 or d < 0:
                        continue
                    for byte in range(nbytes):
                        a = dst_at[layer, region.name, d] + to + byte
                        out[a] = src_at[layer, region.name, s] + origin + byte
    return out
