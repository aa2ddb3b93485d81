"""What the checks of formats share: the subject, and what it is tried with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar, get_args

import pytest

from kvcore.contract import Format
from kvcore.layout import ArenaOrder, Layout
from kvcore.plugins import load_plugins, provider_of
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, Shard
from kvcore.testing.harness import Subject, View, open_cache, skip_unsupported
from kvcore.testing.sample import GROUPS


class FormatBase:
    """Fixtures. Subclasses of the suite provide ``kv_format``.

    Attributes:
        groups: layer groups to try; those the format declares that it cannot hold are skipped.
        page_size: tokens a page.
        max_error: largest error of a value, relative to the largest value of its tensor.
    """

    groups: ClassVar[Mapping[str, LayerGroup]] = GROUPS
    page_size: ClassVar[int] = 16
    max_error: ClassVar[float] = 0.25

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
    def view(self, subject: Registry, held: LayerGroup, arena: ArenaOrder) -> Iterator[View]:
        """A poisoned cache of the format."""
        with open_cache(subject, held, page_size=self.page_size, arena=arena) as cache:
            yield View(cache, held, subject.index_spaces())
