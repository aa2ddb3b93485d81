"""Whole paths in one process: prefill to decode over shared memory, retraction, forks, tensor scales. Bytes are read by
addresses and decoded by libraries that kvcore does not use."""

from __future__ import annotations

import time
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.errors import ConfigError, HandshakeError
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec
from kvcore.testing.harness import pull
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2

HOST_POOL = {"retraction.backend": "host_pool", "retraction.options": {"size": "8MiB"}}


def live(item: LayerGroup, tokens: int) -> range:
    """Tokens that a query after the last one still reads."""
    window = dict(item.space_options).get("window", tokens + 1)
    return range(max(0, tokens - window + 1), tokens)


def everything(
    rig: ModuleType, cache: KVCache, groups: tuple[LayerGroup, ...], name: str, tokens: int
) -> dict[Any, Any]:
    """Elements and scales of every live token: uint8 by layer and region."""
    return {
        (layer, region): rig.raw(cache, layer, item.prefix, region, name, live(item, tokens))
        for item in groups
        for layer in item.layers
        for region in ("k", "v", "k_block_scale", "v_block_scale")
    }


def same(got: dict[Any, Any], want: dict[Any, Any]) -> None:
    for key, values in want.items():
        np.testing.assert_array_equal(got[key], values, str(key))


# --- prefill to decode ---


@pytest.mark.parametrize("fmt", [Mxfp8, Mxfp8E5m2])
@pytest.mark.parametrize(
    ("page", "source", "target"),
    [
        (16, {}, {"order": "token_major"}),
        (32, {}, {}),
        (32, {"scale_layout": "interleaved"}, {}),
        (64, {"scale_layout": "interleaved"}, {"scale_layout": "interleaved"}),
        (64, {"order": "token_major"}, {"scale_layout": "interleaved"}),
        (128, {"scale_layout": "interleaved", "scale_rule": "floor"}, {"scale_rule": "rceil"}),
        (128, {}, {"scale_layout": "interleaved"}),
    ],
)
def test_prefill_to_decode(rig: ModuleType, fmt: type[Mxfp8], page: int, source: Any, target: Any) -> None:
    """A1: full and windowed layers with the scales of their own; what is decoded there is what is decoded here, bit for
    bit, and what both hold is exactly what encode says."""
    groups = (rig.group((80, 64)), rig.group((64, 32), window=page + 9, layers=(1,)))
    tokens = 2 * page + 11
    big = {"cache.memory": "4MiB"}
    with (
        rig.cache(fmt(**source), *groups, page=page, **big) as one,
        rig.cache(fmt(**target), *groups, page=page, **big) as other,
    ):
        other.admit("tenant", page + 1)  # so that units differ
        one.admit("r", tokens)
        stored = rig.write(one, "r", tokens, 3)
        want = everything(rig, one, groups, "r", tokens)
        for payload in one.manager.payloads("r", 0, tokens, last=True):
            assert payload.components == (f"{payload.group}/kv", f"{payload.group}/block_scale")
        done = pull(one, other, "r", tokens)
        moved = {name: count for name, count in done.bytes_by_component.items() if count}
        assert set(moved) == {"full/kv", "full/block_scale", "swa/kv", "swa/block_scale"}
        pages = -(-tokens // page)
        kept = pages - live(groups[1], tokens).start // page
        for item, units in ((groups[0], pages), (groups[1], kept)):
            dims = [t.head_dim for t in item.tensors]
            a_page = page * 2 * len(item.layers)
            assert moved[f"{item.prefix}/kv"] == units * a_page * sum(dims)
            assert moved[f"{item.prefix}/block_scale"] >= units * a_page * sum(-(-dim // 32) for dim in dims)
        same(everything(rig, other, groups, "r", tokens), want)
        for item in groups:
            for layer in item.layers:
                encoded = fmt(**source).encode(one.layouts[item.prefix], stored[layer])
                for name in ("k", "v"):
                    told = encoded[name, "x"].view(torch.uint8)[live(item, tokens).start :].numpy()
                    np.testing.assert_array_equal(want[layer, name], told)
        other.check_integrity()


def test_elements_of_another_kind_are_refused_at_hello(rig: ModuleType) -> None:
    item = rig.group()
    with rig.cache(Mxfp8(), item) as one, rig.cache(Mxfp8E5m2(), item) as other:
        with pytest.raises(HandshakeError) as caught:
            other.connect(one.serve().address)
        assert {"mxfp8", "mxfp8_e5m2"} <= set(map(str, caught.value.fields.values()))


# --- retraction ---


@pytest.mark.parametrize("backend", [{}, HOST_POOL], ids=["host_tensor", "host_pool"])
@pytest.mark.parametrize("options", [{}, {"scale_layout": "interleaved"}, {"tensor_scale": 0.6}], ids=str)
def test_retraction_saves_four_tensors_a_layer_in_both_halves(rig: ModuleType, backend: Any, options: Any) -> None:
    """H2: full and window, the window shorter than the request: elements and scales of keys and values come back bit for
    bit, and the window's half is trimmed in all four."""
    page, window, tokens = 32, 40, 150
    groups = (rig.group((80, 64)), rig.group((64, 64), window=window, layers=(1, 2)))
    with rig.cache(Mxfp8(**options), *groups, page=page, **{"cache.memory": "4MiB", **backend}) as cache:
        cache.admit("r", tokens)
        for count in (70, 79, 1):
            rig.write(cache, "r", count, count)
        before = everything(rig, cache, groups, "r", tokens)
        units = {item.prefix: cache.units("r", item.prefix, "pages") for item in groups}
        handle = cache.retract("r", b"engine data")
        assert not handle.recompute
        saved = {name: count for name, count in handle.bytes_by_component.items() if count}
        pages = {"full": -(-tokens // page), "swa": -(-tokens // page) - live(groups[1], tokens).start // page}
        assert pages["swa"] < pages["full"]
        blocks = {
            "full": 4 + 4 if "scale_layout" in options else 3 + 2,
            "swa": 4 + 4 if "scale_layout" in options else 2 + 2,
        }
        for item in groups:
            count = pages[item.prefix] * page * 2 * len(item.layers)
            assert saved[f"{item.prefix}/kv"] == count * sum(t.head_dim for t in item.tensors)
            assert saved[f"{item.prefix}/block_scale"] in (
                count * blocks[item.prefix], count * sum(-(-t.head_dim // 32) for t in item.tensors)
            )  # fmt: skip
        end = time.monotonic() + 20
        while any(part.quarantined for part in cache.stats().manager.ranges):  # host_pool copies meanwhile
            assert time.monotonic() < end
            cache.can_admit(1)
        for item in groups:
            rig.poison(cache, item.prefix)
        cache.admit("tenant", tokens)
        rig.write(cache, "tenant", tokens, 99)  # in the units that were freed
        cache.resume(handle)
        assert cache.length("r") == tokens
        assert not set(cache.units("r", "full", "pages").tolist()) & set(units["full"].tolist())
        same(everything(rig, cache, groups, "r", tokens), before)
        cache.check_integrity()


def test_a_fork_copies_scales_with_their_payload(rig: ModuleType) -> None:
    """Copy-on-write: what the fork writes into the shared page changes neither half of the other."""
    for options in ({}, {"scale_layout": "interleaved"}):
        item = rig.group()
        with rig.cache(Mxfp8(**options), item) as cache:
            cache.admit("a", 40)
            rig.write(cache, "a", 40, 1)
            before = everything(rig, cache, (item,), "a", 40)
            cache.fork("a", "b", 37)
            written = rig.write(cache, "b", 4, 2)
            same(everything(rig, cache, (item,), "a", 40), before)
            assert cache.store.op_counts["copy_units"] == 1
            for layer in item.layers:
                for name in ("k", "v", "k_block_scale", "v_block_scale"):
                    got = rig.raw(cache, layer, "full", name, "b", range(41))
                    np.testing.assert_array_equal(got[:37], before[layer, name][:37])
                told = Mxfp8(**options).encode(cache.layouts["full"], written[layer])
                np.testing.assert_array_equal(
                    rig.raw(cache, layer, "full", "v", "b", range(37, 41)), told["v", "x"].view(torch.uint8).numpy()
                )


# --- calibrated tensor scales ---


def calibrate(cache: KVCache, k: float, v: float) -> None:
    layers = len(cache.layouts["full"].layers)
    cache.set_constants(
        "full", {("tensor_scale", "k"): torch.full((layers,), k), ("tensor_scale", "v"): torch.full((layers,), v)}
    )


@pytest.mark.parametrize("tuned", [True, False])
def test_calibrated_scales_reach_the_bytes(rig: ModuleType, tuned: bool) -> None:
    """A3: with scales of 0.5 and 2.0, ones are stored as 2.0 and 0.5, and read as ones."""
    item = rig.group((64, 64))
    with rig.cache(Mxfp8(tensor_scale="calibrated"), item, tuned=tuned) as cache:
        cache.admit("a", 3)
        with pytest.raises(ConfigError, match="never set"):
            cache.begin([("a", 3)])
        cache.release("a")
        calibrate(cache, 0.5, 2.0)
        cache.admit("a", 3)
        ones = {name: torch.ones(3, 2, 64) for name in ("k", "v")}
        with cache.begin([("a", 3)]) as step:
            for layer in item.layers:
                step.store(layer, ones)
            step.commit()
        for layer in item.layers:
            assert (rig.read(cache, layer, "full", "k", "a", range(3)) == 2.0).all()
            assert (rig.read(cache, layer, "full", "v", "a", range(3)) == 0.5).all()
            for values in rig.load(cache, layer, item, rig.slots(cache, "a", "full", range(3))).values():
                assert values.eq(1.0).all()


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf"), 1e-40])
def test_a_scale_that_is_none_is_refused_and_nothing_written(rig: ModuleType, bad: float) -> None:
    item = rig.group((64, 64))
    with rig.cache(Mxfp8(tensor_scale="calibrated"), item) as cache:
        with pytest.raises(ConfigError, match="tensor scale") as caught:
            calibrate(cache, 0.5, bad)
        assert (caught.value.fields["tensor"], caught.value.fields["layer"]) == ("v", item.layers[0])
        cache.admit("a", 3)
        with pytest.raises(ConfigError, match="never set"):
            cache.begin([("a", 3)])


def test_every_layer_has_its_own_and_they_travel(rig: ModuleType) -> None:
    item = rig.group((64, 64))
    scales = {("tensor_scale", "k"): torch.tensor([0.37, 5.0]), ("tensor_scale", "v"): torch.tensor([1.9, 0.011])}
    fmt = Mxfp8(tensor_scale="calibrated")
    with rig.cache(fmt, item) as one, rig.cache(fmt, item) as other, rig.cache(fmt, item) as third:
        for cache in (one, other):
            cache.set_constants("full", scales)
        calibrate(third, 0.37, 1.9)
        one.admit("r", 50)
        stored = rig.write(one, "r", 50, 4)
        pull(one, other, "r", 50)
        other.admit("tenant", 40)
        handle = other.retract("r")
        rig.write(other, "tenant", 40, 5)
        other.resume(handle)
        at = rig.slots(other, "r", "full", range(50))
        for n, layer in enumerate(item.layers):
            got = rig.load(other, layer, item, at)
            for name in ("k", "v"):
                scale = float(scales["tensor_scale", name][n])
                raw = rig.read(other, layer, "full", name, "r", range(50))
                np.testing.assert_array_equal(got[name].numpy(), (raw * np.float32(scale)).astype(np.float32))
                error = np.abs(raw * scale - stored[layer][name].double().numpy()).reshape(50, 2, 2, 32).max(-1)
                amax = stored[layer][name].abs().reshape(50, 2, 2, 32).amax(-1).numpy()
                assert (error <= amax / 15).all()
        with pytest.raises(HandshakeError, match="constant") as caught:
            third.connect(one.serve().address)
        assert "tensor_scale" in str(caught.value)


def test_the_configuration_names_it_and_nothing_else(rig: ModuleType) -> None:
    """``cache.format`` enables the plugin; its options are those of the format."""
    options = {"scale_layout": "interleaved", "scale_rule": "floor", "tensor_scale": 2.0}
    settings = {"cache.format": "mxfp8_e5m2", "cache.format_options": options, "cache.page_size": 32}
    config = load_config(None, {**settings, "cache.memory": "2MiB"})
    registry = load_plugins(config.plugins or ("mxfp8",))
    item = rig.group(layers=(0,))
    with KVCache.create(ModelSpec("m", (item,), "fp32"), config, registry) as cache:
        assert cache.layouts["full"].format == "mxfp8_e5m2"
        assert set(cache.layouts["full"].components) == {"full/kv", "full/block_scale", "full/tensor_scale"}
    with pytest.raises(ConfigError, match="scale_rul") as caught:
        registry.format("mxfp8", scale_rul="floor")
    assert "scale_rule" in str(caught.value)
