"""How a receiver pulls from one rank of a sender: made once, at hello, and only looked up afterwards (no I/O)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kvcore.errors import HandshakeError, LayoutError, ProtocolError
from kvcore.layout import Int64Array, Layout, Placement
from kvcore.layout.moves import Program, Selection
from kvcore.transfer.messages.manifest import Manifest, check_peers
from kvcore.transfer.session.sources import Sources, check_ranks, choose_sources

_MAX_PROGRAMS = 4096
"""Most sets of layers that programs are kept for: a sender chooses which layers it offers together."""


class PeerPlan:
    """Programs for everything that one rank of a receiver takes from one rank of a sender.

    Attributes:
        local, remote: the manifests.
        layers: by group, the layers taken from this rank, in storage order of the receiver.
        programs: by group and components, the programs that move these components together.
    """

    def __init__(self, local: Manifest, remote: Manifest, sources: Sources) -> None:
        """Plan; raise HandshakeError for what cannot be converted. Touches no buffer."""
        self.local = local
        self.remote = remote
        self.layers: dict[str, tuple[int, ...]] = {}
        self.programs: dict[str, dict[tuple[str, ...], tuple[Program, ...]]] = {}
        self._sources = sources
        self._by_layer: dict[tuple[str, tuple[str, ...], tuple[int, ...]], tuple[Program, ...]] = {}
        self._ranges: dict[tuple[str, str], tuple[str, ...]] = {}
        self._offered = {
            (group, item.name): _components(layout, item.name)
            for group, layout in remote.layouts.items()
            for item in layout.ranges
        }
        self._bounds: dict[tuple[str, str], dict[str, tuple[tuple[int, int], tuple[int, int]]]] = {}
        self._places = {group: (local.placement(group), remote.placement(group)) for group in sources}
        for group in sources:
            self._add(group, local.layouts[group])

    def _add(self, group: str, layout: Layout) -> None:
        here, there = self._places[group]
        taken = {layer for item in self._sources[group] for layer in item.layers}
        self.layers[group] = tuple(layer for layer in layout.layers if layer in taken)
        fields = {region for item in self._sources[group] for region, _ in item.fields}
        programs = self.programs[group] = {}
        for item in layout.ranges:
            if layout.space_of_range(item.name).kind == "constant":
                continue  # compared at hello, never moved
            holders = [region for region in layout.regions if item.name in region.ranges and region.name in fields]
            whole = tuple(dict.fromkeys(region.component for region in holders))
            if not whole:
                continue
            self._ranges[group, item.name] = whole
            self._bounds[group, item.name] = {
                region.component: (_bounds(there, region.name, item.name), _bounds(here, region.name, item.name))
                for region in holders
            }
            together = [whole] if len({region.ranges for region in holders}) == 1 else []
            for components in (*together, *((component,) for component in whole)):
                if components not in programs:
                    programs[components] = self._build(group, components, self._sources[group])

    def _build(self, group: str, components: tuple[str, ...], selections: Sequence[Selection]) -> tuple[Program, ...]:
        here, there = self._places[group]
        mine, theirs = self.local.layouts[group], self.remote.layouts[group]
        try:
            built = [Program.build(theirs, there, mine, here, components, only=item) for item in selections]
        except LayoutError as error:
            facts = {key: value for key, value in error.fields.items() if key != "group"}
            raise HandshakeError(error.message, remedy=error.remedy, group=group, **facts) from error
        return tuple(program for program in built if program.moves)

    def ranges(self) -> Iterator[tuple[tuple[str, str], tuple[str, ...]]]:
        """Every ``(group, range)`` with the components of it that are taken from this rank."""
        yield from self._ranges.items()

    def split(
        self, group: str, range_name: str, components: tuple[str, ...], layers: tuple[int, ...] = ()
    ) -> tuple[tuple[str, ...], tuple[Program, ...]]:
        """What to move where the sender names ``components`` of a range, of some layers or (empty) of all of its own.

        Returns the components that are taken from this rank, and their programs. Raises ProtocolError for names and
        layers that were not in the sender's manifest, or named twice.
        """
        offered = self._offered.get((group, range_name))
        if offered is None or not set(components) <= set(offered) or len(set(components)) != len(components):
            raise ProtocolError(
                "components are not in the manifest",
                group=group,
                range=range_name,
                components=components,
                known=offered,
            )
        held = self.remote.layouts[group].layers
        if not set(layers) <= set(held) or len(set(layers)) != len(layers):
            raise ProtocolError("layers are not in the manifest", group=group, layers=layers, known=held)
        taken = tuple(name for name in self._ranges.get((group, range_name), ()) if name in components)
        if not taken:
            return (), ()
        key = (group, taken, layers)
        if key not in self._by_layer:
            if len(self._by_layer) >= _MAX_PROGRAMS:
                self._by_layer.clear()
            self._by_layer[key] = self._programs(group, taken, layers)
        return taken, self._by_layer[key]

    def _programs(self, group: str, components: tuple[str, ...], layers: tuple[int, ...]) -> tuple[Program, ...]:
        if not layers:
            programs = self.programs[group]
            if components in programs:
                return programs[components]
            return tuple(program for component in components for program in programs[component,])
        cut = self.selections(group, layers)
        regions = [r for r in self.local.layouts[group].regions if r.component in components]
        if len({region.ranges for region in regions}) == 1:
            return self._build(group, components, cut)
        return tuple(program for component in components for program in self._build(group, (component,), cut))

    def selections(self, group: str, layers: tuple[int, ...] = ()) -> tuple[Selection, ...]:
        """What is taken of a group from this rank, of some layers or (empty) of all of them."""
        if not layers:
            return self._sources[group]
        wanted = set(layers)
        return tuple(
            Selection(tuple(layer for layer in item.layers if layer in wanted), item.fields)
            for item in self._sources[group]
            if wanted & set(item.layers)
        )

    def layer_run_bytes(self) -> int:
        """The shortest run that an offer of a single layer is made of; 0 where nothing is taken from this rank."""
        runs = [
            move.run_bytes
            for (group, range_name), components in self._ranges.items()
            for layer in self.layers[group][:1]
            for program in self.split(group, range_name, components, (layer,))[1]
            for move in program.moves
        ]
        return min(runs, default=0)

    @property
    def sources(self) -> Sources:
        """What is taken from this rank."""
        return self._sources

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


def _components(layout: Layout, range_name: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(region.component for region in layout.regions if range_name in region.ranges))


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


def plan_peers(local: Manifest, remotes: Sequence[Manifest]) -> list[PeerPlan]:
    """Plan how ``local``, a receiver, pulls from every rank of a sender: one plan a rank, in the order given.

    Raises HandshakeError, before any buffer is touched, for what cannot be converted and for what no rank holds.
    """
    for remote in remotes:
        check_peers(local, remote)
    check_ranks(remotes)
    return [
        PeerPlan(local, remote, sources)
        for remote, sources in zip(remotes, choose_sources(local, remotes), strict=True)
    ]


def plan_peer(local: Manifest, remote: Manifest) -> PeerPlan:
    """:func:`plan_peers` for a sender of one rank."""
    return plan_peers(local, [remote])[0]
