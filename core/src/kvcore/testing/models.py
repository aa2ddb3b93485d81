"""The suite for model adapters: what a configuration comes to, and that what cannot be read is refused with words."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from kvcore.contract import ModelAdapter
from kvcore.errors import KVCoreError
from kvcore.spec import ModelSpec

STRANGERS: tuple[Mapping[str, Any], ...] = (
    {},
    {"model_type": None},
    {"model_type": "no such model"},
    {"model_type": 7},
)
"""Configurations that no adapter knows."""

UNUSABLE: tuple[Any, ...] = (-1, 0, "many", 1.5, [], {}, None)
"""Values that are put where a configuration has a number."""


class ModelAdapterSuite:
    """What an adapter promises. Override the fixtures ``adapter`` and ``configs``.

    ``configs`` are mappings as in a model's ``config.json``, one or more of every kind that the adapter knows.
    """

    def test_knows_its_own_and_no_others(self, adapter: ModelAdapter, configs: Sequence[Mapping[str, Any]]) -> None:
        """Adapters are asked in turn about every model: one that says yes to a stranger takes it from the right one."""
        assert adapter.name
        assert configs, "give the suite configurations that the adapter knows"
        for config in configs:
            assert adapter.matches(config) is True
        for stranger in STRANGERS:
            for given in (stranger, SimpleNamespace(**stranger)):
                assert adapter.matches(given) is False, stranger

    def test_one_configuration_is_one_model(self, adapter: ModelAdapter, configs: Sequence[Mapping[str, Any]]) -> None:
        """Twice the same, as a mapping or as an object, and nothing is written into it: peers compare what comes of it."""
        for config in configs:
            before = copy.deepcopy(config)
            spec = adapter.spec(config)
            assert isinstance(spec, ModelSpec)
            assert spec == adapter.spec(copy.deepcopy(config))
            assert config == before
            as_object = SimpleNamespace(**copy.deepcopy(dict(config)))
            assert adapter.matches(as_object) is True
            assert adapter.spec(as_object) == spec

    def test_layers_are_counted_from_zero_without_a_gap(
        self, adapter: ModelAdapter, configs: Sequence[Mapping[str, Any]]
    ) -> None:
        """A layer may be in several groups (keys in one, a state in another), and one in none would be forgotten."""
        for config in configs:
            groups = adapter.spec(config).groups
            assert len({group.prefix for group in groups}) == len(groups)
            held = sorted({layer for group in groups for layer in group.layers})
            assert held == list(range(len(held))), held

    def test_what_cannot_be_read_is_a_typed_error(
        self, adapter: ModelAdapter, configs: Sequence[Mapping[str, Any]]
    ) -> None:
        """Every key left out, and every number replaced, is a model or a KVCoreError: never what Python happens to raise."""
        for config in configs:
            for key, value in config.items():
                self._try(adapter, {name: kept for name, kept in config.items() if name != key}, f"without {key}")
                if isinstance(value, int) and not isinstance(value, bool):
                    for other in UNUSABLE:
                        self._try(adapter, {**config, key: other}, f"{key} = {other!r}")

    def _try(self, adapter: ModelAdapter, config: Mapping[str, Any], change: str) -> None:
        try:
            if adapter.matches(config):
                assert isinstance(adapter.spec(config), ModelSpec)
        except KVCoreError:
            return  # refused with words
        except Exception as error:
            error.add_note(f"the configuration was changed: {change}")
            raise
