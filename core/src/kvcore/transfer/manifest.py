"""Manifests: what a peer is told, what is refused at hello, and the plan made once for a pair of peers (no I/O)."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal, NoReturn

import msgspec
import numpy as np

from kvcore.errors import HandshakeError, LayoutError, ProtocolError
from kvcore.layout import Field, Int64Array, Layout, Placement, Region
from kvcore.moves import Program
from kvcore.spec import Shard
from kvcore.transfer.control import PROTOCOL


def new_instance() -> str:
    """Return an instance id: new at every start, so that a restarted peer is never taken for the one before."""
    return uuid.uuid4().hex


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a process tells its peer about its caches.

    Attributes:
        instance: see :func:`new_instance`.
        role: ``sender`` (serves its memory) or ``receiver`` (pulls).
        model: fingerprint of the model spec.
        layouts: by layer group.
        units: units of every range, null units included, by layer group.
        transport: name of the transport behind ``endpoint``.
        endpoint: opaque record of the transport; empty for a receiver.
        shard: which part of the model this rank holds.
        protocol: version of the control messages.
    """

    instance: str
    role: Literal["sender", "receiver"]
    model: str
    layouts: dict[str, Layout]
    units: dict[str, dict[str, int]]
    transport: str
    endpoint: bytes = b""
    shard: Shard = Shard()
    protocol: tuple[int, int] = PROTOCOL

    def serving(self, endpoint: bytes) -> Manifest:
        """The same manifest with the transport's endpoint record."""
        return msgspec.structs.replace(self, endpoint=endpoint)

    def encode(self) -> bytes:
        """Pack for a hello."""
        return msgspec.msgpack.encode(self)

    def placement(self, group: str) -> Placement:
        """Where everything of a group lies in its arena."""
        return self.layouts[group].place(self.units[group])


def check_protocol(local: tuple[int, int], remote: tuple[int, int]) -> None:
    """Raise HandshakeError for another major version. Comes before anything else of a peer is decoded."""
    if local[0] != remote[0]:
        _refuse(
            "protocol", f"{local[0]}.{local[1]}", f"{remote[0]}.{remote[1]}", "install the same release on both sides"
        )


def decode_manifest(data: bytes) -> Manifest:
    """Unpack a manifest. Raises ProtocolError for anything else."""
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        for group, layout in manifest.layouts.items():
            layout.place(manifest.units[group])
    except (msgspec.MsgspecError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a manifest: {error}", got_bytes=len(data)) from error
    return manifest


def check_peers(local: Manifest, remote: Manifest) -> None:
    """Raise HandshakeError, naming the field and both values, for what cannot be converted.

    Args:
        local: manifest of the process that checks.
        remote: its peer's; one of the two is the sender and the other the receiver.
    """
    check_protocol(local.protocol, remote.protocol)
    if local.role == remote.role:
        _refuse("role", local.role, remote.role, "connect a receiver to a sender")
    if local.instance == remote.instance:
        _refuse("instance", local.instance, remote.instance, "every process needs an instance id of its own")
    if local.transport != remote.transport:
        _refuse("transport", local.transport, remote.transport, "configure the same transport on both sides")
    if local.model != remote.model:
        _refuse("model", local.model, remote.model, "both sides must serve the same model")
    if set(local.layouts) != set(remote.layouts):
        _refuse("groups", sorted(local.layouts), sorted(remote.layouts))
    for group, layout in local.layouts.items():
        _check_layouts(group, layout, remote.layouts[group], receiver_is_local=local.role == "receiver")


def _refuse(field: str, local: Any, remote: Any, remedy: str = "", **where: Any) -> NoReturn:
    raise HandshakeError(f"peers differ in {field}", remedy=remedy, field=field, local=local, remote=remote, **where)


def _check_layouts(group: str, local: Layout, remote: Layout, *, receiver_is_local: bool) -> None:
    if local.format != remote.format:
        _refuse("format", local.format, remote.format, "configure the same format on both sides", group=group)
    if local.revision != remote.revision:
        _refuse(
            "format revision", local.revision, remote.revision, "install the same release of the format", group=group
        )
    names = ({item.name for item in local.ranges}, {item.name for item in remote.ranges})
    if names[0] != names[1]:
        _refuse("unit ranges", sorted(names[0]), sorted(names[1]), group=group)
    for item in local.ranges:
        mine, theirs = local.space_of_range(item.name), remote.space_of_range(item.name)
        if mine.tokens_per_unit != theirs.tokens_per_unit:
            _refuse(
                "page size", mine.tokens_per_unit, theirs.tokens_per_unit, "configure the same page size on both sides",
                group=group, range=item.name,
            )  # fmt: skip
        if (mine.kind, mine.unit, mine.options) != (theirs.kind, theirs.unit, theirs.options):
            _refuse("index space", str(mine), str(theirs), group=group, range=item.name)
    source, destination = (remote, local) if receiver_is_local else (local, remote)
    if not set(destination.layers) <= set(source.layers):
        _refuse("layers", local.layers, remote.layers, "the sender must hold every layer of the receiver", group=group)
    mine_regions, their_regions = ({r.name: r for r in layout.regions} for layout in (local, remote))
    if set(mine_regions) != set(their_regions):
        _refuse("regions", sorted(mine_regions), sorted(their_regions), group=group)
    for name, region in mine_regions.items():
        _check_regions(group, region, their_regions[name], receiver_is_local=receiver_is_local)


def _check_regions(group: str, local: Region, remote: Region, *, receiver_is_local: bool) -> None:
    where = {"group": group, "region": local.name}
    if local.component != remote.component:
        _refuse("component", local.component, remote.component, **where)
    if set(local.ranges) != set(remote.ranges):
        _refuse("unit ranges", local.ranges, remote.ranges, **where)
    mine, theirs = ({f.name: f for f in region.data_fields} for region in (local, remote))
    if set(mine) != set(theirs):
        _refuse("fields", sorted(mine), sorted(theirs), **where)
    for name, field in mine.items():
        _check_fields(field, theirs[name], {**where, "name": name}, receiver_is_local=receiver_is_local)


def _check_fields(local: Field, remote: Field, where: dict[str, str], *, receiver_is_local: bool) -> None:
    if local.dtype != remote.dtype:
        _refuse("dtype", local.dtype, remote.dtype, **where)
    axes = ({axis.name for axis in local.axes}, {axis.name for axis in remote.axes})
    if axes[0] != axes[1]:
        _refuse("axes", sorted(axes[0]), sorted(axes[1]), **where)
    for axis in local.axes:
        other = remote.axis(axis.name)
        if axis.blocks != other.blocks:
            _refuse("scale blocks", str(axis.blocks), str(other.blocks), **where, axis=axis.name)
        if not axis.ids and not other.ids:
            if axis.size != other.size:
                _refuse(f"{axis.name} size", axis.size, other.size, **where, axis=axis.name)
            continue
        mine, theirs = local.global_ids(axis.name), remote.global_ids(axis.name)
        source, destination = (theirs, mine) if receiver_is_local else (mine, theirs)
        if not np.isin(destination, source).all():
            _refuse(
                f"{axis.name} ids", axis.ids or axis.size, other.ids or other.size,
                "the sender must hold every id of the receiver", **where, axis=axis.name,
            )  # fmt: skip


class PeerPlan:
    """How a receiver pulls from one sender: made once, at hello, and only looked up afterwards."""

    def __init__(self, local: Manifest, remote: Manifest) -> None:
        """Check and plan; raise HandshakeError for what cannot be converted. Touches no buffer."""
        check_peers(local, remote)
        self.local = local
        self.remote = remote
        self.programs: dict[str, dict[tuple[str, ...], Program]] = {}
        self._ranges: dict[tuple[str, str], tuple[str, ...]] = {}
        self._bounds: dict[tuple[str, str], dict[str, tuple[tuple[int, int], tuple[int, int]]]] = {}
        for group, layout in local.layouts.items():
            self.programs[group] = self._build(group, layout)

    def _build(self, group: str, layout: Layout) -> dict[tuple[str, ...], Program]:
        theirs, here, there = self.remote.layouts[group], self.local.placement(group), self.remote.placement(group)
        programs: dict[tuple[str, ...], Program] = {}
        for item in layout.ranges:
            holders = [region for region in layout.regions if item.name in region.ranges]
            whole = tuple(dict.fromkeys(region.component for region in holders))
            self._ranges[group, item.name] = whole
            self._bounds[group, item.name] = {
                region.component: (_bounds(there, region.name, item.name), _bounds(here, region.name, item.name))
                for region in holders
            }
            together = [whole] if len({region.ranges for region in holders}) == 1 else []
            for components in (*together, *((component,) for component in whole)):
                if components not in programs:
                    try:
                        programs[components] = Program.build(theirs, there, layout, here, components)
                    except LayoutError as error:
                        facts = {key: value for key, value in error.fields.items() if key != "group"}
                        raise HandshakeError(error.message, remedy=error.remedy, group=group, **facts) from error
        return programs

    def ranges(self) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
        """Every ``(group, range)`` with the components that live in it."""
        yield from self._ranges.items()

    def split(self, group: str, range_name: str, components: tuple[str, ...]) -> list[tuple[tuple[str, ...], Program]]:
        """Programs that move ``components`` of a range: one where they are all of it, else one each.

        Raises ProtocolError for names that were not in the manifests, or named twice.
        """
        known = self._ranges.get((group, range_name))
        if known is None or not set(components) <= set(known) or len(set(components)) != len(components):
            raise ProtocolError(
                "components are not in the manifest", group=group, range=range_name, components=components, known=known
            )
        programs = self.programs[group]
        ordered = tuple(component for component in known if component in components)
        if ordered in programs:
            return [(ordered, programs[ordered])]
        return [((component,), programs[component,]) for component in ordered]

    def check_source(self, group: str, range_name: str, components: tuple[str, ...], ids: Int64Array) -> None:
        """Raise ProtocolError for ids that are no usable units of the sender (its null units are none)."""
        for component in components:
            source, _ = self._bounds[group, range_name][component]
            _check_ids(ids, source, group, range_name, ProtocolError)

    def check_destination(self, group: str, range_name: str, ids: Int64Array) -> None:
        """Raise LayoutError for ids that are neither −1 nor usable units here, or that are named twice."""
        wanted = ids[ids != -1]
        for _, destination in self._bounds[group, range_name].values():
            _check_ids(wanted, destination, group, range_name, LayoutError)
        if np.unique(wanted).size != wanted.size:
            raise LayoutError("a destination unit is named twice", group=group, range=range_name)


def _bounds(placement: Placement, region: str, range_name: str) -> tuple[int, int]:
    for name, first, count in placement.ranges[region]:
        if name == range_name:
            return first + 1, first + count
    raise LayoutError("no such unit range", region=region, range=range_name)


def _check_ids(
    ids: Int64Array, bounds: tuple[int, int], group: str, range_name: str, error: type[ProtocolError | LayoutError]
) -> None:
    if ids.size and (int(ids.min()) < bounds[0] or int(ids.max()) >= bounds[1]):
        bad = ids[(ids < bounds[0]) | (ids >= bounds[1])]
        raise error(
            "unit ids out of range",
            group=group,
            range=range_name,
            expected=f"[{bounds[0]}, {bounds[1]})",
            got=int(bad[0]),
        )


def plan_peer(local: Manifest, remote: Manifest) -> PeerPlan:
    """Plan how ``local`` (a receiver) pulls from ``remote`` (a sender). Raises HandshakeError."""
    return PeerPlan(local, remote)
