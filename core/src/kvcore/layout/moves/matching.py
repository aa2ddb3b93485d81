"""What two layouts have in common, and what of it is selected to be moved (no torch).

Everything that cannot be converted is refused here, with the region, the field and both values.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcore.errors import LayoutError, nearest
from kvcore.layout import Field, Int64Array, Layout, Region
from kvcore.layout.fields import int64

AxisIds = tuple[str, Int64Array]
"""An axis and global ids of it."""


@dataclass(frozen=True, eq=False)
class Selection:
    """What of a conversion to move, so that every id can be taken from exactly one of several sources.

    Attributes:
        layers: storage layer ids, of those both sides hold.
        fields: ``(region, field)`` to what of it moves: None for every id both sides hold, or ``(axis, ids)`` for global
            ids of one axis (int64, ascending), of those both sides hold. A field that is absent is not moved at all;
            fields of components that a program does not carry are passed over.
    """

    layers: tuple[int, ...]
    fields: Mapping[tuple[str, str], tuple[str, Int64Array] | None]


def select_components(dst: Layout, components: Collection[str] | None) -> tuple[str, ...]:
    """The components to move, in the destination's order."""
    if components is None:
        return dst.components
    wanted = {components} if isinstance(components, str) else set(components)
    for name in sorted(wanted - set(dst.components)):
        raise LayoutError("no such component", component=name, remedy=nearest(name, dst.components))
    if not wanted:
        raise LayoutError("no component to move", group=dst.group, known=dst.components)
    return tuple(name for name in dst.components if name in wanted)


def check_layouts(src: Layout, dst: Layout) -> None:
    """Refuse layouts of another format, revision or group."""
    for name in ("format", "revision", "group"):
        _same(f"layouts differ in {name}", getattr(dst, name), getattr(src, name), field=name)


def check_ranges(regions: Sequence[Region]) -> None:
    """Refuse regions that one list of unit ids cannot serve."""
    for region in regions:
        if region.ranges != regions[0].ranges:
            raise LayoutError(
                "components of one program must share their unit ranges",
                region=region.name,
                expected=regions[0].ranges,
                got=region.ranges,
                remedy="build one program for each set of components that moves under one list of unit ids",
            )


def partner(src: Layout, dst: Layout, region: Region) -> Region:
    """Return the source's region of the same name, checked to be convertible into ``region``."""
    if all(item.name != region.name for item in src.regions):
        raise LayoutError(
            "the source lacks a region", region=region.name, expected=region.name, got=[r.name for r in src.regions]
        )
    other = src.region(region.name)
    where = {"region": region.name}
    _same("regions belong to different components", region.component, other.component, **where)
    _same("regions have different unit ranges", region.ranges, other.ranges, **where)
    for name in region.ranges:
        ours, theirs = dst.space_of_range(name), src.space_of_range(name)
        page_sizes = ours.tokens_per_unit, theirs.tokens_per_unit
        _same("page sizes differ", *page_sizes, field="tokens_per_unit", range=name, **where)
        for what in ("kind", "unit", "options"):
            mine, got = getattr(ours, what), getattr(theirs, what)
            _same(f"index spaces differ in {what}", mine, got, field=what, range=name, **where)
    fields, others = ({f.name: f for f in r.data_fields} for r in (region, other))
    _same("regions have different fields", sorted(fields), sorted(others), **where)
    for name, field in fields.items():
        _check_fields(others[name], field, region=region.name, field=name)
    return other


def _check_fields(src: Field, dst: Field, **where: Any) -> None:
    _same("fields differ in dtype", dst.dtype, src.dtype, **where)
    names = sorted(axis.name for axis in dst.axes)
    _same("fields have different axes", names, sorted(axis.name for axis in src.axes), **where)
    for axis in dst.axes:
        other = src.axis(axis.name)
        if not axis.ids and not other.ids:
            _same("unsharded axes differ in size", axis.size, other.size, axis=axis.name, **where)
        blocks, theirs = (a.blocks and (a.blocks.axis, a.blocks.block_size) for a in (axis, other))
        _same("axes count different blocks", blocks, theirs, axis=axis.name, **where)


def _same(message: str, expected: Any, got: Any, **where: Any) -> None:
    if expected != got:
        raise LayoutError(message, **where, expected=expected, got=got)


# --- what is selected ------------------------------------------------------------------------------------------------


def common_layers(src: Layout, dst: Layout, only: Selection | None) -> list[int]:
    """Layers to move, in the destination's order."""
    theirs = set(src.layers)
    common = [layer for layer in dst.layers if layer in theirs]
    if only is None:
        return common
    for layer in only.layers:
        if layer not in common:
            raise LayoutError("a layer is selected that not both sides hold", layer=layer, known=common)
    return [layer for layer in common if layer in only.layers]


def check_names(dst: Layout, only: Selection) -> None:
    """Refuse a selection of fields that there are not."""
    known = [(item.name, field.name) for item in dst.regions for field in item.data_fields]
    for region, field in only.fields:
        if (region, field) not in known:
            raise LayoutError("a field is selected that the layouts lack", region=region, field=field, known=known)


def is_chosen(region: Region, field: Field, only: Selection | None) -> bool:
    """Whether anything of a field is to be moved."""
    return only is None or (region.name, field.name) in only.fields


def chosen_ids(src: Region, dst: Region, field: Field, only: Selection | None) -> AxisIds | None:
    """The axis and ids that a selection names for a field; None where they are all that both sides hold."""
    entry = None if only is None else only.fields[dst.name, field.name]
    if entry is None:
        return None
    name, where = entry[0], {"region": dst.name, "field": field.name}
    if not field.has_axis(name):
        axes = [axis.name for axis in field.axes]
        raise LayoutError("ids are selected of an axis the field lacks", **where, axis=name, known=axes)
    ids = int64(entry[1], "ids")
    if ids.ndim != 1 or bool((np.diff(ids) <= 0).any()):
        raise LayoutError("selected ids are not ascending", **where, axis=name, got=ids.tolist())
    held, _, _ = common_ids(src.field(field.name), field, name)
    missing = ids[~np.isin(ids, held)]
    if missing.size:
        got = int(missing[0])
        raise LayoutError(
            "an id is selected that not both sides hold", **where, axis=name, expected=held.tolist(), got=got
        )
    return None if ids.size == held.size else (name, ids)


def common_ids(src: Field, dst: Field, name: str) -> tuple[Int64Array, Int64Array, Int64Array]:
    """The global ids both fields hold of an axis, ascending, and where either side has them.

    No id is written out that only one of them holds: a peer may say that it holds any number of them.
    """
    left, right = _spans(src, name), _spans(dst, name)
    parts: list[tuple[int, int, int, int]] = []
    i = j = 0
    while i < len(left) and j < len(right):
        (lo, hi, at), (low, high, there) = left[i], right[j]
        first, last = max(lo, low), min(hi, high)
        if first < last:
            parts.append((first, last, at + first - lo, there + first - low))
        i, j = (i + 1, j) if hi <= high else (i, j + 1)
    if not parts:
        none = np.zeros(0, np.int64)
        return none, none, none
    common = np.concatenate([np.arange(first, last) for first, last, _, _ in parts])
    here = np.concatenate([np.arange(at, at + last - first) for first, last, at, _ in parts])
    beyond = np.concatenate([np.arange(at, at + last - first) for first, last, _, at in parts])
    return common, here, beyond


def _spans(field: Field, name: str) -> list[tuple[int, int, int]]:
    """``(first id, end, local position)`` of the ids of an axis, ascending."""
    axis = field.axis(name)
    spans, at = [], 0
    for lo, hi in axis.ids or ((0, axis.size),):
        spans.append((lo, hi, at))
        at += hi - lo
    return sorted(spans)
