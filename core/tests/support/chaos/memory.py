"""Arenas whose every byte says who wrote it: one process's cache memory, addressed by arithmetic of its own.

A token's entry names the writer (a number that is never used twice), the token, the layer, the tensor and the head. So
bytes of another request, of an earlier holder of the same id, of another layer, head or slot are all different, and
poison is none of them. Addresses are worked out here from the geometry alone: nothing is asked of a layout's placement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from kvcore.layout import Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.stepplan import StepPlan

PAGE = 4
WINDOW = 6
LAYERS = {"full": (0, 2), "local": (1,)}
"""Every other layer sees a window only, so that units fall dead while a prompt is computed."""
ALL_LAYERS = tuple(sorted(layer for layers in LAYERS.values() for layer in layers))
TENSORS = ("k", "v", "s")
"""Two tensors of eight bytes an entry, and a one-byte scale that is another component."""
HEADS = 2
POISON = 0xFF

Ids = np.ndarray[Any, np.dtype[np.int64]]


class Violation(AssertionError):  # noqa: N818 -- it is no error of the program that runs it
    """What must never happen, has.

    Attributes:
        kind: ``wrong bytes``, ``lost units`` or ``broken rule``.
    """

    def __init__(self, kind: str, what: str, **facts: Any) -> None:
        self.kind = kind
        super().__init__(f"{kind}: {what} {facts}")


@dataclass(frozen=True)
class Shape:
    """How one process lays its memory out.

    Attributes:
        units: of the full group; the window group has fewer.
        token_major: order of a page's axes.
        arena: ``page_major`` or ``layer_major``.
        heads: global ids of the heads that this rank holds.
    """

    units: int = 28
    token_major: bool = False
    arena: Any = "page_major"
    heads: tuple[int, ...] = tuple(range(HEADS))

    def count(self, group: str) -> int:
        return self.units if group == "full" else self.units * 3 // 4

    def layout(self, group: str) -> Layout:
        return _layout(self, group)

    def layouts(self) -> dict[str, Layout]:
        return {group: self.layout(group) for group in LAYERS}

    def units_by_range(self) -> dict[str, dict[str, int]]:
        return {group: {"pages": self.count(group)} for group in LAYERS}

    def budgets(self) -> list[RangeBudget]:
        return [
            RangeBudget(g, "pages", self.layout(g).spaces[0], self.count(g), 0, (f"{g}/kv", f"{g}/scale"))
            for g in LAYERS
        ]


@cache
def _layout(shape: Shape, group: str) -> Layout:
    axes = (
        Axis("slot", PAGE),
        Axis("head", len(shape.heads), ids=((shape.heads[0], shape.heads[-1] + 1),)),
        Axis("dim", 2),
    )
    order = "slot head dim" if shape.token_major else "head slot dim"
    regions = [region(n, f"{group}/kv", [Field("x", "fp32", order, axes)], ranges=("pages",)) for n in ("k", "v")]
    scale = Field("s", "u8", order.removesuffix(" dim"), axes[:2])
    regions.append(region("s", f"{group}/scale", [scale], ranges=("pages",)))
    space = (
        SpaceSpec("full", "sequence", "page", PAGE)
        if group == "full"
        else SpaceSpec("local", "window", "page", PAGE, (("window", WINDOW),))
    )
    return Layout(
        layers=LAYERS[group], regions=tuple(regions), spaces=(space,), ranges=(UnitRange("pages", group),),
        arena=shape.arena, format="chaos", revision=1, group=group,
    )  # fmt: skip


class Memory:
    """The arenas of one rank, poisoned."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.arenas: dict[str, Any] = {}
        self._views: dict[tuple[str, str], Any] = {}
        heads = len(shape.heads)
        for group, layers in LAYERS.items():
            units = shape.count(group)
            used = {"k": PAGE * heads * 8, "v": PAGE * heads * 8, "s": PAGE * heads}
            size = {name: -(-nbytes // 16) * 16 for name, nbytes in used.items()}
            layer_bytes = sum(size.values())
            arena = self.arenas[group] = np.full(units * layer_bytes * len(layers), POISON, np.uint8)
            before = 0
            for name in TENSORS:
                item = 1 if name == "s" else 8
                if shape.arena == "page_major":
                    start, per_unit, per_layer = before, layer_bytes * len(layers), layer_bytes
                else:
                    start, per_unit, per_layer = before * units, size[name], layer_bytes * units
                slot, head = (heads * item, item) if shape.token_major else (item, PAGE * item)
                self._views[group, name] = np.ndarray(
                    (units, len(layers), PAGE, heads), np.uint8 if item == 1 else np.uint64, arena, start,
                    (per_unit, per_layer, slot, head),
                )  # fmt: skip
                before += size[name]

    def _entries(self, group: str, name: str, writers: Ids, tokens: Ids) -> Any:
        """What ``writers`` write for ``tokens``: ``[N, layers, heads]``."""
        layers = np.array(LAYERS[group])[None, :, None]
        heads = np.array(self.shape.heads)[None, None, :]
        writer, token = writers[:, None, None], tokens[:, None, None]
        if name == "s":
            return ((writer * 29 + token * 7 + layers * 83 + heads * 41) % 251).astype(np.uint8)
        return ((writer << 40) | (token << 24) | (layers << 16) | (heads << 8) | TENSORS.index(name)).astype(np.uint64)

    def write(self, group: str, units: Ids, tokens: Ids, writers: Ids, layers: Sequence[int]) -> None:
        """Write one entry a token, of some layers, into the unit that holds it."""
        rows = np.array([number for number, layer in enumerate(LAYERS[group]) if layer in layers], np.int64)
        at = units[:, None], rows[None, :], (tokens % PAGE)[:, None]
        for name in TENSORS if len(rows) else ():
            self._views[group, name][at] = self._entries(group, name, writers, tokens)[:, rows]

    def check(self, group: str, units: Ids, tokens: Ids, writers: Ids, **facts: Any) -> None:
        """Raise unless every entry is exactly its writer's."""
        for name in TENSORS:
            got = self._views[group, name][units, :, tokens % PAGE]
            wrong = np.argwhere(got != self._entries(group, name, writers, tokens))
            if len(wrong):
                row = int(wrong[0][0])
                value = int(got[tuple(wrong[0])])
                raise Violation(
                    "wrong bytes", "an entry is not its writer's", group=group, tensor=name, token=int(tokens[row]),
                    unit=int(units[row]), writer=int(writers[row]), got_writer=value >> 40, got=hex(value), **facts,
                )  # fmt: skip

    def fill(self, group: str, units: Ids, byte: int) -> None:
        for name in TENSORS:
            view = self._views[group, name]
            view[units] = byte if name == "s" else byte * 0x0101010101010101

    def is_poison(self, group: str, units: Ids) -> bool:
        return all(
            bool((self._views[group, name][units] == np.iinfo(self._views[group, name].dtype).max).all())
            for name in TENSORS
        )

    def copy(self, group: str, src: Ids, dst: Ids) -> None:
        for name in TENSORS:
            self._views[group, name][dst] = self._views[group, name][src]

    def take(self, group: str, units: Ids) -> dict[str, Any]:
        return {name: self._views[group, name][units].copy() for name in TENSORS}

    def put(self, group: str, units: Ids, saved: dict[str, Any]) -> None:
        for name in TENSORS:
            self._views[group, name][units] = saved[name]


class Cache:
    """A manager and the memory of one rank; freed units are poisoned at once."""

    def __init__(self, shape: Shape, spaces: Any) -> None:
        self.manager = Manager(shape.budgets(), spaces)
        self.memory = Memory(shape)
        self._poisoned = {group: set(self.manager.free_units(group, "pages").tolist()) for group in LAYERS}

    def begin(self, plan: StepPlan) -> None:
        """What a store does first in a step: copies, then zeroing."""
        for part in plan.ranges:
            self._poisoned[part.group].difference_update(part.units.tolist())
            if len(part.copies_src):
                self.memory.copy(part.group, part.copies_src, part.copies_dst)
            if len(part.fresh):
                self.memory.fill(part.group, part.fresh, 0)

    def write(self, plan: StepPlan, writers: dict[str, int], layers: Sequence[int] = ALL_LAYERS) -> None:
        """What its kernels do then, layer by layer: the rows' entries."""
        for part in plan.ranges:
            for number, row in enumerate(plan.rows):
                tokens = np.arange(row.start, row.stop)
                units = part.row(number)[tokens // PAGE]
                self.memory.write(part.group, units, tokens, np.full(len(tokens), writers[row.request]), layers)

    def check(self, request: str, writers: Sequence[int], **facts: Any) -> None:
        """Raise unless a request holds each token that its next query reads."""
        length = len(writers)
        for group in LAYERS:
            first = 0 if group == "full" else max(0, length - WINDOW + 1)
            tokens = np.arange(first, length)
            units = self.manager.units(request, group, "pages")[tokens // PAGE]
            self.memory.check(group, units, tokens, np.array(writers[first:], np.int64), request=request, **facts)

    def poison(self) -> None:
        """Fill what has become free since the last call, as a store with ``poison_freed`` does."""
        for group in LAYERS:
            free = set(self.manager.free_units(group, "pages").tolist())
            new = free - self._poisoned[group]
            if new:
                self.memory.fill(group, np.array(sorted(new), np.int64), POISON)
            self._poisoned[group] = free

    def inspect(self) -> None:
        """Raise unless every unit is accounted for and nothing has been written into a free one."""
        self.manager.check_integrity()
        for group in LAYERS:
            if not self.memory.is_poison(group, self.manager.free_units(group, "pages")):
                raise Violation("wrong bytes", "a free unit was written", group=group)

    def demand_empty(self, who: str) -> None:
        """Raise unless every unit is free again."""
        self.inspect()
        for part in self.manager.stats().ranges:
            if part.free != part.capacity or part.used or part.quarantined:
                raise Violation("lost units", "not every unit came back", process=who, range=part)
