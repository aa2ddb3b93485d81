"""Which rank of a sender a receiver's rank takes each byte from: exactly one for every layer, field and id (no I/O).

Layers and heads are matched by their global ids, never by position, so uneven pipeline stages and any two degrees of
tensor parallelism are the same case. Where several ranks hold the same thing (more ranks than KV heads, latents that
every rank keeps), the receivers spread over them; the ranks that nobody reads from are told nonetheless when a request
is over, since every receiver talks to every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcore.errors import HandshakeError
from kvcore.layout import Field, Int64Array, Layout
from kvcore.layout.moves import Selection
from kvcore.layout.moves.matching import common_ids
from kvcore.transfer.messages.manifest import Manifest

FieldIds = tuple[str, Int64Array] | None
"""Ids of one axis, or None for everything the receiver holds."""

Sources = dict[str, tuple[Selection, ...]]
"""By layer group: what to take from one rank."""


def check_ranks(remotes: Sequence[Manifest]) -> None:
    """Raise HandshakeError unless the manifests are those of every rank of one engine, each once."""
    first = remotes[0]
    for other in remotes[1:]:
        if other.engine != first.engine:
            raise HandshakeError(
                "the senders are ranks of different engines", field="engine", local=first.engine, remote=other.engine,
                remedy="give the addresses of one engine's ranks",
            )  # fmt: skip
    sizes = {item.ranks.size for item in remotes}
    ranks = sorted(item.ranks.rank for item in remotes)
    if sizes != {len(remotes)} or ranks != list(range(len(remotes))):
        raise HandshakeError(
            "the addresses are not those of every rank of the sender, each once", field="ranks", local=ranks,
            remote=sorted(sizes), remedy="give the address of every rank of the sender's engine",
        )  # fmt: skip


def choose_sources(local: Manifest, remotes: Sequence[Manifest]) -> list[Sources]:
    """What ``local``, a receiver, takes from each of ``remotes``, the ranks of one sender, in their order.

    Raises HandshakeError naming group, layer, region, axis and ids for what no rank of the sender holds.
    """
    chosen: list[Sources] = [{} for _ in remotes]
    used: list[int] = []
    for group, layout in local.layouts.items():
        if all(group not in remote.layouts for remote in remotes):
            raise HandshakeError(
                "peers differ in groups", field="groups", group=group, local=sorted(local.layouts),
                remote=sorted({name for remote in remotes for name in remote.layouts}),
                remedy="the ranks of the sender must hold every layer group of the receiver",
            )  # fmt: skip
        parts: list[list[Selection]] = [[] for _ in remotes]
        for holders, layers in _layer_classes(group, layout, remotes):
            taken = _fields_of(group, layout, layers, holders, remotes, used, local.ranks.rank)
            used += [number for number in taken if number not in used]
            for number, fields in taken.items():
                parts[number].append(Selection(layers, fields))
        for number, selections in enumerate(parts):
            if selections:
                chosen[number][group] = tuple(selections)
    return chosen


def _layer_classes(
    group: str, layout: Layout, remotes: Sequence[Manifest]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The receiver's layers by which ranks hold them: ``(numbers of the ranks, layers)``."""
    classes: dict[tuple[int, ...], list[int]] = {}
    for layer in layout.layers:
        holders = tuple(
            number
            for number, remote in enumerate(remotes)
            if group in remote.layouts and layer in remote.layouts[group].layers
        )
        if not holders:
            raise HandshakeError(
                "peers differ in layers", field="layers", group=group, layer=layer, local=layout.layers,
                remote=[r.layouts[group].layers if group in r.layouts else () for r in remotes],
                remedy="the ranks of the sender must hold every layer of the receiver",
            )  # fmt: skip
        classes.setdefault(holders, []).append(layer)
    for holders, layers in classes.items():
        yield holders, tuple(layers)


def _fields_of(
    group: str,
    layout: Layout,
    layers: tuple[int, ...],
    holders: tuple[int, ...],
    remotes: Sequence[Manifest],
    used: Sequence[int],
    turn: int,
) -> dict[int, dict[tuple[str, str], FieldIds]]:
    """By rank: the fields, and of each the ids, to take from it for layers that the same ranks hold."""
    taken: dict[int, dict[tuple[str, str], FieldIds]] = {}
    for region in layout.regions:
        if all(layout.space_of_range(name).kind == "constant" for name in region.ranges):
            continue  # compared at hello, never moved
        for field in region.data_fields:
            theirs = {n: remotes[n].layouts[group].region(region.name).field(field.name) for n in holders}
            facts: dict[str, object] = {"group": group, "layers": layers, "region": region.name, "name": field.name}
            for number, ids in _ids_of(field, theirs, (*used, *taken), turn, facts).items():
                taken.setdefault(number, {})[region.name, field.name] = ids
    return taken


def _ids_of(
    field: Field, theirs: dict[int, Field], used: tuple[int, ...], turn: int, facts: dict[str, object]
) -> dict[int, FieldIds]:
    """By rank: the ids of one field to take from it; ranks that are read from anyway come first."""
    lacking = {
        number: [a.name for a in field.axes if common_ids(f, field, a.name)[0].size < a.size]
        for number, f in theirs.items()
    }
    whole = [number for number, axes in lacking.items() if not axes]
    if whole:
        return {_pick(whole, used, turn): None}
    split = {axes[0] for axes in lacking.values() if len(axes) == 1}
    if len(split) != 1:
        raise HandshakeError(
            "no rank of the sender holds enough of a field", field="ids", lacking=sorted(lacking.items()), **facts,
            remedy="shard one axis of a field, the same one on both sides",
        )  # fmt: skip
    axis = split.pop()
    able = {
        number: set(common_ids(f, field, axis)[0].tolist()) for number, f in theirs.items() if lacking[number] == [axis]
    }
    wanted = np.sort(field.global_ids(axis))
    by_rank: dict[int, list[int]] = {}
    for item in wanted.tolist():
        candidates = [number for number, ids in able.items() if item in ids]
        if not candidates:
            raise HandshakeError(
                f"peers differ in {axis} ids", field=f"{axis} ids", axis=axis, id=item, local=field.axis(axis).ids,
                remote=[f.axis(axis).ids for f in theirs.values()], **facts,
                remedy="the ranks of the sender must hold every id of the receiver",
            )  # fmt: skip
        by_rank.setdefault(_pick(candidates, (*used, *by_rank), turn), []).append(item)
    return {number: (axis, np.array(ids, np.int64)) for number, ids in by_rank.items()}


def _pick(candidates: Sequence[int], used: Sequence[int], turn: int) -> int:
    for number in used:
        if number in candidates:
            return number
    return candidates[turn % len(candidates)]
