"""Manifests: what a peer is told, and what is refused at hello (no I/O)."""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal, NoReturn

import msgspec

from kvcore.errors import HandshakeError, ProtocolError
from kvcore.layout import Field, Layout, Placement, Region
from kvcore.spec import Ranks, Shard
from kvcore.transfer.messages.control import PROTOCOL

Checksum = Literal["none", "crc32"]

MAX_MANIFEST_BYTES = 4 * 1024 * 1024
"""Longest manifest, packed."""

MAX_GROUPS = 64
"""Most layer groups of a manifest, and most index spaces and unit ranges of a group."""

MAX_LAYERS = 4096
"""Most layers of a group."""

MAX_REGIONS = 256
"""Most regions of a group."""

MAX_BUFFERS = 1 << 15
"""Most buffers of a manifest: layers times regions, over its groups."""

MAX_AXES = 2048
"""Most axes of a manifest, over all its fields."""

MAX_ID_RANGES = 4096
"""Most ranges of global ids of a manifest, over all its axes."""


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
        ranks: its place among the ranks of its engine.
        constants: by layer group, digests of the values that belong to the model instead of a request (per-tensor
            scales); what two ranks both hold must be equal, since it gives the moved bytes their meaning.
        checksum: how commits prove the bytes that were read, ``none`` or ``crc32``.
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
    ranks: Ranks = Ranks()
    constants: dict[str, dict[str, str]] = {}
    checksum: Checksum = "none"
    protocol: tuple[int, int] = PROTOCOL

    def serving(self, endpoint: bytes) -> Manifest:
        """The same manifest with the transport's endpoint record."""
        return msgspec.structs.replace(self, endpoint=endpoint)

    def encode(self) -> bytes:
        """Pack for a hello."""
        return msgspec.msgpack.encode(self)

    @property
    def engine(self) -> str:
        """Id of the engine this process is a rank of; an engine of one rank is its instance."""
        return self.ranks.engine or self.instance

    def placement(self, group: str) -> Placement:
        """Where everything of a group lies in its arena."""
        return self.layouts[group].place(self.units[group])


def check_protocol(local: tuple[int, int], remote: tuple[int, int]) -> None:
    """Raise HandshakeError for another major version. Comes before anything else of a peer is decoded."""
    if local[0] != remote[0]:
        _refuse(
            "protocol", f"{local[0]}.{local[1]}", f"{remote[0]}.{remote[1]}", "install the same release on both sides"
        )


class _AxisOutline(msgspec.Struct):
    ids: tuple[msgspec.Raw, ...] = ()


class _FieldOutline(msgspec.Struct):
    axes: tuple[_AxisOutline, ...]


class _RegionOutline(msgspec.Struct):
    fields: tuple[_FieldOutline, ...]
    ranges: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class _LayoutOutline(msgspec.Struct):
    format: str
    revision: int
    layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_LAYERS)]
    regions: Annotated[tuple[_RegionOutline, ...], msgspec.Meta(max_length=MAX_REGIONS)]
    spaces: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    ranges: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_GROUPS)]


class Outline(msgspec.Struct, kw_only=True):
    """What of a manifest is read first: who it is of, and how much there is of the rest."""

    instance: str
    role: str
    model: str
    transport: str
    layouts: Annotated[dict[str, _LayoutOutline], msgspec.Meta(max_length=MAX_GROUPS)]
    checksum: str = "none"
    protocol: tuple[int, int] = PROTOCOL


def decode_outline(data: bytes) -> Outline:
    """Read what a manifest says of itself. Raises ProtocolError for one that is none, or over the limits."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ProtocolError("manifest too long", limit_bytes=MAX_MANIFEST_BYTES, got_bytes=len(data))
    try:
        outline = msgspec.msgpack.decode(data, type=Outline)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a manifest: {error}", got_bytes=len(data)) from error
    layouts = outline.layouts.values()
    axes = [axis for item in layouts for part in item.regions for field in part.fields for axis in field.axes]
    for what, limit, got in (
        ("buffers", MAX_BUFFERS, sum(len(item.layers) * len(item.regions) for item in layouts)),
        ("axes", MAX_AXES, len(axes)),
        ("id ranges", MAX_ID_RANGES, sum(len(axis.ids) for axis in axes)),
    ):
        if got > limit:
            raise ProtocolError(f"manifest of too many {what}", limit=limit, got=got)
    return outline


def decode_manifest(data: bytes) -> Manifest:
    """Unpack a manifest. Raises ProtocolError for anything else, and for one that is over the limits."""
    decode_outline(data)
    try:
        manifest = msgspec.msgpack.decode(data, type=Manifest)
        for group, layout in manifest.layouts.items():
            layout.place(manifest.units[group])
    except (msgspec.MsgspecError, LookupError, ValueError, OverflowError, RecursionError) as error:
        raise ProtocolError(f"not a manifest: {error}", got_bytes=len(data)) from error
    return manifest


def check_outline(local: Manifest, remote: Manifest | Outline) -> None:
    """The part of :func:`check_peers` that costs nothing: a stranger is refused before its layouts are built."""
    check_protocol(local.protocol, remote.protocol)
    if local.role == remote.role:
        _refuse("role", local.role, remote.role, "connect a receiver to a sender")
    if local.instance == remote.instance:
        _refuse("instance", local.instance, remote.instance, "every process needs an instance id of its own")
    if local.transport != remote.transport:
        _refuse("transport", local.transport, remote.transport, "configure the same transport on both sides")
    if local.checksum != remote.checksum:
        _refuse("checksum", local.checksum, remote.checksum, "configure the same transfer.checksum on both sides")
    if local.model != remote.model:
        _refuse("model", local.model, remote.model, "both sides must serve the same model")
    for group, layout in local.layouts.items():
        if group in remote.layouts:
            _check_format(group, layout, remote.layouts[group])


def check_peers(local: Manifest, remote: Manifest) -> None:
    """Raise HandshakeError, naming the field and both values, for what cannot be converted.

    What only one of the two holds (groups, layers, heads) is no reason to refuse: another rank may hold it. Whether the
    ranks of a sender hold all that a receiver needs is :func:`kvcore.transfer.session.sources.plan_sources`'s question.

    Args:
        local: manifest of the process that checks.
        remote: its peer's; one of the two is the sender and the other the receiver.
    """
    check_outline(local, remote)
    for group, layout in local.layouts.items():
        if group in remote.layouts:
            _check_layouts(group, layout, remote.layouts[group])
            _check_constants(group, local.constants.get(group, {}), remote.constants.get(group, {}))


def _refuse(field: str, local: Any, remote: Any, remedy: str = "", **where: Any) -> NoReturn:
    raise HandshakeError(f"peers differ in {field}", remedy=remedy, field=field, local=local, remote=remote, **where)


def _check_constants(group: str, local: dict[str, str], remote: dict[str, str]) -> None:
    for name in sorted(local.keys() & remote.keys()):
        if local[name] != remote[name]:
            _refuse(
                "constants", local[name], remote[name], "give both sides the same calibrated scales", group=group,
                constant=name,
            )  # fmt: skip


def _check_format(group: str, local: Layout, remote: Layout | _LayoutOutline) -> None:
    if local.format != remote.format:
        _refuse("format", local.format, remote.format, "configure the same format on both sides", group=group)
    if local.revision != remote.revision:
        _refuse(
            "format revision", local.revision, remote.revision, "install the same release of the format", group=group
        )


def _check_layouts(group: str, local: Layout, remote: Layout) -> None:
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
    mine_regions, their_regions = ({r.name: r for r in layout.regions} for layout in (local, remote))
    if set(mine_regions) != set(their_regions):
        _refuse("regions", sorted(mine_regions), sorted(their_regions), group=group)
    for name, region in mine_regions.items():
        _check_regions(group, region, their_regions[name])


def _check_regions(group: str, local: Region, remote: Region) -> None:
    where = {"group": group, "region": local.name}
    if local.component != remote.component:
        _refuse("component", local.component, remote.component, **where)
    if set(local.ranges) != set(remote.ranges):
        _refuse("unit ranges", local.ranges, remote.ranges, **where)
    mine, theirs = ({f.name: f for f in region.data_fields} for region in (local, remote))
    if set(mine) != set(theirs):
        _refuse("fields", sorted(mine), sorted(theirs), **where)
    for name, field in mine.items():
        _check_fields(field, theirs[name], {**where, "name": name})


def _check_fields(local: Field, remote: Field, where: dict[str, str]) -> None:
    if local.dtype != remote.dtype:
        _refuse("dtype", local.dtype, remote.dtype, **where)
    axes = ({axis.name for axis in local.axes}, {axis.name for axis in remote.axes})
    if axes[0] != axes[1]:
        _refuse("axes", sorted(axes[0]), sorted(axes[1]), **where)
    for axis in local.axes:
        other = remote.axis(axis.name)
        if axis.blocks != other.blocks:
            _refuse("scale blocks", str(axis.blocks), str(other.blocks), **where, axis=axis.name)
        if not axis.ids and not other.ids and axis.size != other.size:
            _refuse(f"{axis.name} size", axis.size, other.size, **where, axis=axis.name)
