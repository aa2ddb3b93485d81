"""The layout language: every byte of a cache described once, and the moves between two layouts (no torch)."""

from __future__ import annotations

from kvcore.layout.layout import (
    ArenaOrder,
    Axis,
    BlockOf,
    Buffer,
    Field,
    Int64Array,
    Layout,
    Placement,
    Region,
    SpaceSpec,
    Term,
    UnitKind,
    UnitRange,
    padding,
    region,
)

__all__ = [
    "ArenaOrder",
    "Axis",
    "BlockOf",
    "Buffer",
    "Field",
    "Int64Array",
    "Layout",
    "Placement",
    "Region",
    "SpaceSpec",
    "Term",
    "UnitKind",
    "UnitRange",
    "padding",
    "region",
]
