"""Asking the registry for things by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.errors import ConfigError, PluginError, UnsupportedError
from kvcore.plugins import load_plugins

Install = Callable[..., object]


def test_an_unknown_option_names_the_nearest(install: Install) -> None:
    install("healthy")
    registry = load_plugins(["healthy"])
    with pytest.raises(ConfigError, match="unknown option") as caught:
        registry.format("fake8", blok=4)
    assert caught.value.fields == {"format": "fake8", "option": "blok", "options": ["block"]}
    assert caught.value.remedy == "did you mean 'block'?"


def test_a_refused_option_value_keeps_its_cause(install: Install) -> None:
    install("healthy")
    with pytest.raises(ConfigError, match="not accepted") as caught:
        load_plugins(["healthy"]).format("fake8", block=0)
    assert caught.value.fields["cause"] == "ValueError: block must be positive"


def test_an_unknown_format_names_the_nearest_and_one_that_is_not_enabled_its_plugin(install: Install) -> None:
    install("healthy")
    registry = load_plugins()
    with pytest.raises(ConfigError, match="unknown format") as caught:
        registry.format("fp23")
    assert caught.value.remedy == "did you mean 'fp32'?"
    with pytest.raises(PluginError, match="not enabled") as late:
        registry.format("fake8")
    assert late.value.fields["plugins"] == ["healthy"]
    with pytest.raises(ConfigError, match="unknown transport"):
        registry.transport("smh")
    with pytest.raises(ConfigError, match="unknown backup"):
        registry.backup("host_tensr")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kind") as caught:
        load_plugins().names("format")
    assert caught.value.remedy == "did you mean 'formats'?"


def test_the_builtins_are_there() -> None:
    registry = load_plugins()
    assert {"bf16", "fp16", "fp32"} <= set(registry.names("formats"))
    assert registry.transport("shm").name == "shm"
    assert registry.backup("host_tensor").name == "host_tensor"
    assert registry.index_spaces()["sequence"].kind == "sequence"
    assert registry.pool_builder("memfd").name == "memfd"
    assert {"plugins", "explain"} <= set(registry.commands())
    ops = {kernel.op for kernel in registry.kernels()}
    assert ops == {"store", "load", "attend_decode", "attend_prefill", "copy_units"}


def test_a_model_has_exactly_one_adapter(install: Install) -> None:
    install("model_a", "model_b")
    registry = load_plugins(["model_a", "model_b"])
    assert registry.model_adapter({"type": "a"}).name == "a"
    assert registry.model_adapter({"type": "b"}).name == "b"
    with pytest.raises(UnsupportedError, match="no enabled plugin knows this model"):
        registry.model_adapter({"type": "c"})
    with pytest.raises(PluginError, match="two model adapters") as both:
        registry.model_adapter({"type": "both"})
    assert both.value.fields["plugins"] == ["model_a", "model_b"]
    with pytest.raises(PluginError, match="model adapter failed") as failed:
        registry.model_adapter({})
    assert isinstance(failed.value.__cause__, KeyError)
