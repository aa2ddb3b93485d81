"""What the checks of formats share: the subject, and what it is tried with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import ClassVar, NamedTuple, get_args

import pytest

from kvcore.contract import Format
from kvcore.layout import ArenaOrder, Field, Layout, Region
from kvcore.plugins import load_plugins, provider_of
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, Shard
from kvcore.testing.harness import Subject, View, open_cache, skip_unsupported
from kvcore.testing.sample import GROUPS


class Encoded(NamedTuple):
    """A field that ``encode`` gives elements of, and how many tokens one stands for; its range, where it is a unit."""

    region: Region
    field: Field
    tokens: int
    range: str = ""

    @property
    def shape(self) -> list[int]:
        """Shape of an element."""
        return [axis.size for axis in self.field.axes if self.range or axis.name != "slot"]


def encoded_fields(kv_format: Format, layout: Layout) -> list[Encoded]:
    """Every field that ``encode`` has to give."""
    every = [(region, field) for region in layout.moving_regions for field in region.data_fields]
    if kv_format.encodes == "tokens":
        return [Encoded(region, field, 1) for region, field in every]
    sizes = {item.name: layout.space(item.space).tokens_per_unit for item in layout.ranges}
    ranges = {region.name: next((name for name in region.ranges if sizes[name]), "") for region, _ in every}
    return [
        Encoded(region, field, sizes[ranges[region.name]], ranges[region.name])
        for region, field in every
        if ranges[region.name]
    ]


def encoded_together(kv_format: Format, layout: Layout) -> int:
    """How many tokens ``encode`` takes, or a multiple: one, or units of every range."""
    return math.lcm(*(item.tokens for item in encoded_fields(kv_format, layout)))


class FormatBase:
    """Fixtures. Subclasses of the suite provide ``kv_format``.

    Attributes:
        groups: layer groups to try; those the format declares that it cannot hold are skipped.
        page_size: tokens a page.
    """

    groups: ClassVar[Mapping[str, LayerGroup]] = GROUPS
    page_size: ClassVar[int] = 16

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a check once for every group and arena order it asks for."""
        if "group" in metafunc.fixturenames:
            metafunc.parametrize("group", list(self.groups.values()), ids=list(self.groups))
        if "arena" in metafunc.fixturenames:
            metafunc.parametrize("arena", get_args(ArenaOrder))

    @pytest.fixture
    def registry(self, kv_format: Format) -> Registry:
        """Where kernels, pools, backups and transports come from: the plugin that provides the format, where it is
        installed, and the built-in ones."""
        provider = provider_of("formats", kv_format.name)
        return load_plugins(() if provider is None else (provider,))

    @pytest.fixture
    def held(self, group: LayerGroup, kv_format: Format) -> LayerGroup:
        """The group, if the format can hold it."""
        skip_unsupported(kv_format.supports(group), f"layer group {[t.name for t in group.tensors]}")
        return group

    @pytest.fixture
    def layout(self, held: LayerGroup, kv_format: Format, arena: ArenaOrder) -> Layout:
        """The layout of an unsharded group."""
        return kv_format.layout(held, page_size=self.page_size, shard=Shard(), arena=arena)

    @pytest.fixture
    def subject(self, registry: Registry, kv_format: Format) -> Registry:
        """A registry whose format is the one under test."""
        return Subject(registry, format=kv_format)

    @pytest.fixture
    def view(self, subject: Registry, held: LayerGroup, arena: ArenaOrder, kv_format: Format) -> Iterator[View]:
        """A poisoned cache of the format."""
        with open_cache(subject, held, page_size=self.page_size, arena=arena) as cache:
            yield View(cache, held, subject.index_spaces(), kv_format)
