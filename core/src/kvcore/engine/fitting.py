"""What a model's layer groups come to on one rank: who holds each, in which layout, in which units (no torch).

Everything here is decided before memory is touched; what cannot work is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from kvcore.config import CacheConfig
from kvcore.contract import Format, IndexSpace, PoolBuilder, StateComponent
from kvcore.errors import ConfigError, UnsupportedError, nearest
from kvcore.layout import ArenaOrder, Layout, SpaceSpec
from kvcore.plugins.registry import Registry
from kvcore.requests.manager import RangeBudget
from kvcore.spec import ModelSpec, Shard


class Holders:
    """What holds each layer group of a model: the format, or a group's state component.

    Args:
        model: its groups; only those of this rank's layers are used.
        formats: of the groups of attention, by prefix: see :func:`formats_of`.
        registry: where state components come from.
        shard: the heads and layers of this rank.

    Attributes:
        model: the model without the groups of which this pipeline stage holds no layer.
        formats: the format of each group of attention, by prefix.
        components: the state component of each group of state, by prefix.

    Raises ConfigError where no layer is on this rank, UnsupportedError for a group of state without exactly one component.
    """

    def __init__(self, model: ModelSpec, formats: Mapping[str, Format], registry: Registry, shard: Shard) -> None:
        self.model = _on_rank(model, shard)
        self.formats = {group.prefix: formats[group.prefix] for group in self.model.groups if group.kind == "attention"}
        self._shard = shard
        self.components: dict[str, StateComponent] = {
            group.prefix: registry.state_component(group, model=model.name)
            for group in self.model.groups
            if group.kind == "state"
        }

    def layouts(self, *, page_size: int, arena: ArenaOrder) -> dict[str, Layout]:
        """Layouts by group prefix. UnsupportedError for a group of attention that the format cannot hold."""
        layouts = {}
        for group in self.model.groups:
            component = self.components.get(group.prefix)
            if component is not None:
                layouts[group.prefix] = component.layout(group, shard=self._shard, arena=arena)
                continue
            kv_format = self.formats[group.prefix]
            kv_format.supports(group).require(
                "format cannot hold this layer group",
                format=kv_format.name,
                group=group.prefix,
                remedy="choose another format, for this group alone with cache.formats",
            )
            layouts[group.prefix] = kv_format.layout(group, page_size=page_size, shard=self._shard, arena=arena)
        return layouts

    def check(self, layouts: Mapping[str, Layout], spaces: Mapping[str, IndexSpace]) -> None:
        """Raise unless the index spaces of the layouts exist, accept their options, and list states when they are final.

        UnsupportedError or ConfigError.
        """
        for group, layout in layouts.items():
            for spec in layout.spaces:
                if spec.kind not in spaces:
                    raise UnsupportedError(
                        "no installed plugin provides this index space", kind=spec.kind, known=sorted(spaces)
                    )
                spaces[spec.kind].check(spec)
                if group in self.components and spec.unit == "state_slot":  # rows and pages are final with their tokens
                    _check_final(self.components[group], group, spaces[spec.kind], spec)

    def demand_checkpoints(self) -> None:
        """Raise UnsupportedError, with the reason, unless the state of every group can be kept and had back."""
        for name, component in self.components.items():
            component.checkpoint(self.model.group(name)).require(
                "the state of this model cannot be checkpointed", group=name, component=component.name
            )


def formats_of(
    model: ModelSpec,
    config: CacheConfig,
    registry: Registry,
    given: Format | Mapping[str, Format] | None = None,
) -> dict[str, Format]:
    """The format of each group of attention, by prefix.

    Args:
        model: the whole model.
        config: names one format, and others for single groups.
        registry: where formats come from; groups of one name and options share an instance.
        given: an instance for every group, or for those it names, instead of what ``config`` says.

    ConfigError for a group that the model does not have, PluginError for an unknown format.
    """
    prefixes = [group.prefix for group in model.groups if group.kind == "attention"]
    if isinstance(given, Format):
        return dict.fromkeys(prefixes, given)
    own = dict(given or {})
    for name in (*config.formats, *own):
        if name not in prefixes:
            raise ConfigError(
                "a format is named for a layer group that the model does not have",
                key=f"cache.formats.{name}",
                model=model.name,
                groups=prefixes,
                remedy=nearest(name, prefixes),
            )
    names = {prefix: config.formats.get(prefix, config.format) for prefix in prefixes if prefix not in own}
    made = {
        name: registry.format(name, **(config.format_options if name == config.format else {}))
        for name in dict.fromkeys(names.values())
    }
    return {prefix: own[prefix] if prefix in own else made[names[prefix]] for prefix in prefixes}


def _on_rank(model: ModelSpec, shard: Shard) -> ModelSpec:
    if not shard.layers:
        return model
    held = tuple(group for group in model.groups if set(group.layers) & set(shard.layers))
    if not held:
        raise ConfigError("no layer of the model is on this rank", model=model.name, layers=shard.layers)
    return msgspec.structs.replace(model, groups=held)


def _check_final(component: StateComponent, group: str, space: IndexSpace, spec: SpaceSpec) -> None:
    """Were a state sent before it is final, the receiver would go on from an old one; after that, from none."""
    page = max(1, spec.tokens_per_unit)
    stops = (1, page, 2 * page, 64 * page)
    early, late = (any(_lists(space, spec, stop, last=last) for stop in stops) for last in (False, True))
    if not early and not late:  # no request holds a unit of it
        return
    listed = "each_chunk" if early else "prompt_done"
    if component.final != listed:
        raise UnsupportedError(
            "a state component and its index space disagree on when the state is final",
            group=group,
            component=component.name,
            final=component.final,
            space=spec.name,
            kind=spec.kind,
            expected=listed,
            remedy="declare what the space does, or choose another space",
        )


def _lists(space: IndexSpace, spec: SpaceSpec, stop: int, *, last: bool) -> bool:
    lo, hi = space.final_units(spec, 0, stop, last=last)
    return hi > lo


def check_memory(builders: Iterable[PoolBuilder], device: str, nbytes: int) -> None:
    """Refuse more than a device could hold were it empty, before anything is sized for it.

    Args:
        builders: those of all pools; who does not serve the device knows no size of it.
        device: ``cpu``, ``cuda:0``, …
        nbytes: bytes of all arenas.

    Raises:
        ConfigError: with the bytes there are.
    """
    known = [total for total in (builder.total_bytes(device) for builder in builders) if total is not None]
    if known and nbytes > max(known):
        raise ConfigError(
            "the device has less memory than the cache asks for",
            key="cache.memory",
            device=device,
            nbytes=nbytes,
            total_bytes=max(known),
        )


def budgets(layouts: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> list[RangeBudget]:
    """One budget per unit range, as a manager takes them. ``units``: by group and range, null units included."""
    found = []
    for name, layout in layouts.items():
        placement = layout.place(units[name])
        for unit_range in layout.ranges:
            holders = [region for region in layout.regions if unit_range.name in region.ranges]
            components = tuple(dict.fromkeys(region.component for region in holders))
            ((first, count),) = {
                (first, count)
                for region in holders
                for part, first, count in placement.ranges[region.name]
                if part == unit_range.name
            }
            found.append(RangeBudget(name, unit_range.name, layout.space(unit_range.space), count, first, components))
    return found
