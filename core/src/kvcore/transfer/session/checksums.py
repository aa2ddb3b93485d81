"""Checksums of what was read, so that a commit also proves the wire (no I/O; the bytes are read from CPU memory).

Both ends bring the same units into one canonical form, the receiver's fields packed without padding in declared axis
order, unit after unit, and take a CRC-32 of each component. Arena order, axis order and padding of either side do not
show; of ids and layers that another rank holds, both see zeros.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np

from kvcore.errors import HandshakeError, LayoutError, ProtocolError, TransferError
from kvcore.layout import Axis, Field, Int64Array, Layout, Placement, Region, padding
from kvcore.layout.moves import Bytes, Program, Selection, run_program
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import Peer
from kvcore.transfer.session.plan import PeerPlan
from kvcore.transfer.session.sources import Sources

_ALIGNMENT = 16

_SCRATCH_BYTES = 8 << 20
"""Most bytes brought into canonical form at a time (one unit at least)."""


def pack_sources(sources: Sources) -> dict[str, tuple[control.TakenPart, ...]]:
    """What a rank of the receiver takes from a rank of the sender, as it travels."""
    return {
        group: tuple(
            control.TakenPart(
                item.layers,
                tuple(
                    control.TakenField(
                        region, name, None if ids is None else control.TakenIds(ids[0], tuple(ids[1].tolist()))
                    )
                    for (region, name), ids in item.fields.items()
                ),
            )
            for item in selections
        )
        for group, selections in sources.items()
    }


def unpack_sources(groups: Mapping[str, Sequence[control.TakenPart]]) -> Sources:
    """Inverse of :func:`pack_sources`."""
    return {
        group: tuple(
            Selection(
                part.layers,
                {
                    (item.region, item.field): None
                    if item.only is None
                    else (item.only.axis, np.array(item.only.ids, np.int64))
                    for item in part.fields
                },
            )
            for part in parts
        )
        for group, parts in groups.items()
    }


@dataclass(frozen=True)
class _Scratch:
    """Memory for some units in canonical form, and how to get there."""

    num_units: int
    unit_bytes: int
    nbytes: int
    programs: tuple[Program, ...]


MAX_CHECKED_BYTES = 1 << 30
"""Longest unit of a layer group that checksums are taken of, in canonical form: it says what the receiver holds."""


class _Digest:
    """CRC-32 of units of one arena, in the canonical form of the receiver's layout."""

    def __init__(self, layouts: Mapping[str, Layout], places: Mapping[str, Placement], plan: PeerPlan) -> None:
        self._plan = plan
        self._layouts = layouts
        self._places = places
        self._canonical = {group: _canonical(plan.local.layouts[group]) for group in plan.layers}
        self._programs: dict[tuple[str, str, tuple[int, ...]], _Scratch] = {}

    def update(
        self, sums: dict[str, int], arena: Bytes, group: str, components: Sequence[str], layers: tuple[int, ...],
        units: Int64Array,
    ) -> None:  # fmt: skip
        """Continue the sums of ``components`` with some units, of some layers (empty: all)."""
        for component in components:
            scratch = self._scratch(group, component, layers)
            for first in range(0, len(units), scratch.num_units):
                part = units[first : first + scratch.num_units]
                packed = np.zeros(scratch.nbytes, np.uint8)
                for program in scratch.programs:
                    run_program(program, arena, packed, part, np.arange(len(part)))
                sums[component] = zlib.crc32(packed[: scratch.unit_bytes * len(part)].data, sums.get(component, 0))

    def _scratch(self, group: str, component: str, layers: tuple[int, ...]) -> _Scratch:
        key = (group, component, layers)
        if key not in self._programs:
            whole = self._canonical[group]
            regions = tuple(item for item in whole.regions if item.component == component)
            size = sum(item.unit_bytes for item in regions) * len(whole.layers)
            count = max(1, _SCRATCH_BYTES // size)
            ranges = tuple(item for item in whole.ranges if item.name in regions[0].ranges)
            spaces = tuple(item for item in whole.spaces if item.name in {r.space for r in ranges})
            target = msgspec.structs.replace(whole, regions=regions, ranges=ranges, spaces=spaces)
            # Ids of the scratch count from 0, whatever range the units come from.
            place = target.place({item.name: count for item in ranges})
            names = {item.name for item in regions}
            chosen = [
                Selection(item.layers, {key: ids for key, ids in item.fields.items() if key[0] in names})
                for item in self._plan.selections(group, layers)
            ]
            programs = tuple(
                Program.build(self._layouts[group], self._places[group], target, place, (component,), only=item)
                for item in chosen
                if item.fields
            )
            self._programs[key] = _Scratch(count, size, place.arena_bytes, programs)
        return self._programs[key]


def _canonical(layout: Layout) -> Layout:
    """The same fields without padding inside them, in declared axis order.

    Every unit ends in padding that no other layout has: units that were copied raw would bring along what lies in the
    padding of one side.
    """
    regions = []
    for region in layout.regions:
        fields: list[Field] = []
        end = 0
        for item in region.data_fields:
            axes = tuple(Axis(a.name, a.size, ids=a.ids, blocks=a.blocks) for a in item.axes)
            field = Field(item.name, item.dtype, " ".join(a.name for a in axes), axes, offset=end)
            rest = -field.nbytes % _ALIGNMENT + _ALIGNMENT
            end += field.nbytes
            fields += [field, padding(f"_{item.name}", rest, end, alignment_only=True)]
            end += rest
        regions.append(Region(region.name, region.component, tuple(fields), end, region.ranges))
    return msgspec.structs.replace(layout, regions=tuple(regions), arena="page_major", alignment=_ALIGNMENT)


def _check_sizes(remote: Manifest, message: control.Taken) -> None:
    for group in message.groups:
        layout = remote.layouts[group]
        size = sum(region.unit_bytes for region in layout.regions) * len(layout.layers)
        if size > MAX_CHECKED_BYTES:
            raise HandshakeError(
                "units are too long for checksums", field="taken", group=group, limit_bytes=MAX_CHECKED_BYTES,
                got_bytes=size, remedy='configure transfer.checksum = "none" on both sides',
            )  # fmt: skip


class Checks(Protocol):
    """Holds what arrived against the checksums of a commit, see :class:`ReceiverChecksums`."""

    def check(self, plan: PeerPlan, landed: Sequence[Payload], checksums: Mapping[str, int], request: str) -> None: ...


class SenderChecksums:
    """Answers a rank of a sender gives to those who ask for checksums.

    Args:
        manifest: of this rank.
        arenas: bytes by layer group, as the CPU sees them.
    """

    def __init__(self, manifest: Manifest, arenas: Mapping[str, Bytes]) -> None:
        self._manifest = manifest
        self._arenas = dict(arenas)
        self._digests: dict[Peer, tuple[PeerPlan, _Digest]] = {}

    def expect(self, peer: Peer, remote: Manifest, message: control.Taken) -> None:
        """Learn what a receiver takes from here. Raises HandshakeError for what cannot be taken."""
        try:
            _check_sizes(remote, message)
            plan = PeerPlan(remote, self._manifest, unpack_sources(message.groups))
            places = {group: self._manifest.placement(group) for group in plan.layers}
            self._digests[peer] = plan, _Digest(self._manifest.layouts, places, plan)
        except (LookupError, LayoutError) as error:
            raise HandshakeError(f"not what can be taken from this rank: {error}", field="taken") from error

    def forget(self, peer: Peer) -> None:
        """The peer is gone."""
        self._digests.pop(peer, None)

    def of(self, peer: Peer, units: Sequence[Payload]) -> dict[str, int]:
        """Checksums of units of this rank that a peer says it has read. Raises ProtocolError for units that are none."""
        if peer not in self._digests:
            raise ProtocolError("checksums are asked for before it was said of what")
        plan, digest = self._digests[peer]
        sums: dict[str, int] = {}
        for item in units:
            taken, _ = plan.split(item.group, item.range, item.components, item.layers)
            plan.check_source(item.group, item.range, taken, item.ids)
            digest.update(sums, self._arenas[item.group], item.group, taken, item.layers, item.ids)
        return sums


class ReceiverChecksums:
    """What a rank of a receiver holds against the checksums of a commit.

    Args:
        manifest: of this rank.
        arenas: bytes by layer group, as the CPU sees them.
    """

    def __init__(self, manifest: Manifest, arenas: Mapping[str, Bytes]) -> None:
        self._manifest = manifest
        self._arenas = dict(arenas)
        self._digests: dict[int, _Digest] = {}

    def check(self, plan: PeerPlan, landed: Sequence[Payload], checksums: Mapping[str, int], request: str) -> None:
        """Raise TransferError unless the units that landed have the sender's checksums."""
        key = id(plan)  # a plan lives as long as its conversation, and this object with it
        if key not in self._digests:
            places = {group: self._manifest.placement(group) for group in plan.layers}
            self._digests[key] = _Digest(self._manifest.layouts, places, plan)
        sums: dict[str, int] = {}
        for item in landed:
            self._digests[key].update(
                sums, self._arenas[item.group], item.group, item.components, item.layers, item.ids
            )
        if sums != dict(checksums):
            bad = sorted(name for name in {*sums, *checksums} if sums.get(name) != checksums.get(name))
            raise TransferError(
                "what arrived is not what was sent", request=request, components=bad,
                expected={name: checksums.get(name) for name in bad}, got={name: sums.get(name) for name in bad},
                remedy="the transport corrupts data: check memory and network; a retry is a new attempt",
            )  # fmt: skip
