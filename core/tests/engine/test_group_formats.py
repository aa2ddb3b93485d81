"""A format for each layer group, by name in the configuration or as an instance; peers compare them group by group."""

from __future__ import annotations

import pytest
import torch

from kvcore import KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.contract import Format
from kvcore.errors import ConfigError, HandshakeError, PluginError
from kvcore.plugins import resolve_plugins
from kvcore.testing import ThreeComponents
from kvcore.testing.harness import pull

TENSORS = (TensorSpec("k", 2, 16), TensorSpec("v", 2, 16))
MODEL = ModelSpec(
    "two",
    (
        LayerGroup("full", (0,), TENSORS, 2),
        LayerGroup("swa", (1,), TENSORS, 2, space="window", space_options=(("window", 64),)),
    ),
    "fp32",
)


def build(formats: object = None, given: object = None, **settings: object) -> KVCache:
    options = {"cache.memory": "1MiB", "cache.page_size": 4, "cache.max_requests": 4, "cache.max_tokens": 32}
    config = load_config(None, {**options, "cache.formats": formats, **settings})
    return KVCache.create(MODEL, config, load_plugins(config), formats=given)  # type: ignore[arg-type]


def fill(cache: KVCache, tokens: int) -> dict[int, dict[str, torch.Tensor]]:
    cache.admit("r", tokens)
    given = {
        layer: {name: torch.randn(tokens, 2, 16, generator=torch.Generator().manual_seed(layer)) for name in "kv"}
        for layer in (0, 1)
    }
    with cache.begin([("r", tokens)]) as step:
        for layer, rows in given.items():
            step.store(layer, rows)
        step.commit()
    return given


def stored(cache: KVCache, layer: int, group: str, tokens: int) -> dict[str, torch.Tensor]:
    out = {name: torch.full((tokens, 2, 16), torch.nan) for name in "kv"}
    cache.store.load(layer, torch.from_numpy(cache.slots("r", group, 0, tokens)), out)
    return out


def test_each_group_has_its_format_on_both_ends_and_after_a_retraction() -> None:
    with build({"full": "fp16", "swa": "bf16"}) as one, build({"swa": "bf16"}, **{"cache.format": "fp16"}) as other:
        assert {name: layout.format for name, layout in one.layouts.items()} == {"full": "fp16", "swa": "bf16"}
        given = fill(one, 10)
        one.resume(one.retract("r"))
        pull(one, other, "r", 10)
        for layer, group, dtype in ((0, "full", torch.float16), (1, "swa", torch.bfloat16)):
            got = stored(other, layer, group, 10)
            for name, values in given[layer].items():
                assert torch.equal(got[name], values.to(dtype).float()), (group, name)


def test_peers_that_disagree_in_one_group_are_refused_by_its_name() -> None:
    with build({"swa": "bf16"}) as one, build({"swa": "fp16"}) as other:
        side = one.serve()
        with pytest.raises(HandshakeError) as error:
            other.connect(side.address)
        said = str(error.value)
        assert "swa" in said
        assert "bf16" in said
        assert "fp16" in said


def test_a_group_that_the_model_does_not_have() -> None:
    with pytest.raises(ConfigError) as error:
        build({"swaa": "bf16"})
    assert error.value.fields["key"] == "cache.formats.swaa"
    assert error.value.remedy == "did you mean 'swa'?"
    with pytest.raises(ConfigError):
        build(given={"fulll": ThreeComponents()})
    with pytest.raises(ConfigError, match="unknown format"):
        build({"swa": "bf61"})


@pytest.mark.parametrize("given", [ThreeComponents(), {"full": ThreeComponents()}])
def test_an_instance_without_an_entry_point(given: Format | dict[str, Format]) -> None:
    with build(given=given) as one, build(given=given) as other:
        assert one.layouts["full"].format == "three_components"
        assert one.layouts["swa"].format == ("fp32" if isinstance(given, dict) else "three_components")
        rows = fill(one, 10)
        here = stored(one, 0, "full", 10)
        pull(one, other, "r", 10)
        there = stored(other, 0, "full", 10)
        for name, values in rows[0].items():
            assert torch.equal(here[name], there[name])
            assert float((here[name] - values).abs().max()) < 0.05
    with build() as plain:
        side = plain.serve()
        with build(given=given) as odd, pytest.raises(HandshakeError, match="three_components"):
            odd.connect(side.address)


def test_providers_of_every_named_format_are_enabled() -> None:
    config = load_config(None, {"cache.formats": {"swa": "mxfp8"}})
    assert "mxfp8" in resolve_plugins(config)


def test_options_belong_to_the_format_they_are_written_for() -> None:
    """They are those of ``cache.format``; another group's format has none."""
    with pytest.raises((ConfigError, PluginError)):
        build({"swa": "bf16"}, **{"cache.format_options": {"block": 32}})
