"""The suite for model adapters, tried with mutants."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.contract import ModelAdapter
from kvcore.errors import ConfigError
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec
from kvcore.testing import Case, ModelAdapterSuite, run

CONFIG = {"model_type": "toy", "layers": 2}


def said(config: Any, key: str) -> Any:
    return config.get(key) if isinstance(config, dict) else getattr(config, key, None)


class Toy(ModelAdapter):
    name = "toy"

    def matches(self, config: Any) -> bool:
        return bool(said(config, "model_type") == "toy")

    def spec(self, config: Any) -> ModelSpec:
        count = said(config, "layers")
        if not isinstance(count, int) or count < 1:
            raise ConfigError("no number of layers", got=count)
        return self.model(tuple(range(count)))

    def model(self, layers: tuple[int, ...]) -> ModelSpec:
        tensors = (TensorSpec("k", 2, 16), TensorSpec("v", 2, 16))
        return ModelSpec("toy", (LayerGroup("full", layers, tensors, num_query_heads=2),), "fp32")


class Greedy(Toy):
    def matches(self, config: Any) -> bool:
        return True


class MappingsOnly(Toy):
    def spec(self, config: Any) -> ModelSpec:
        if isinstance(config, SimpleNamespace):
            return self.model((0,))
        return super().spec(config)


class Scribbles(Toy):
    def spec(self, config: Any) -> ModelSpec:
        if isinstance(config, dict):
            config["seen"] = True
        return super().spec(config)


class Gap(Toy):
    def model(self, layers: tuple[int, ...]) -> ModelSpec:
        return super().model((*layers, len(layers) + 1))


class Raw(Toy):
    def spec(self, config: Any) -> ModelSpec:
        return self.model(tuple(range(dict(config)["layers"]) if isinstance(config, dict) else range(2)))


def failed(kind: type[ModelAdapter]) -> set[str]:
    subject = {"adapter": kind, "configs": lambda: [dict(CONFIG)]}
    checks = run([Case("model_adapters", "toy", ModelAdapterSuite, subject)])
    assert len(checks) == 4
    return {check.check for check in checks if check.outcome != "passed"}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Toy, set()),
        (Greedy, {"test_knows_its_own_and_no_others"}),
        (MappingsOnly, {"test_one_configuration_is_one_model"}),
        (Scribbles, {"test_one_configuration_is_one_model"}),
        (Gap, {"test_layers_are_counted_from_zero_without_a_gap"}),
        (Raw, {"test_what_cannot_be_read_is_a_typed_error"}),
    ],
)
def test_each_fault_is_found(kind: type[ModelAdapter], found: set[str]) -> None:
    assert failed(kind) == found
