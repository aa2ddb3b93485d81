"""Where tokens are, by position, and how wide the tables of a step are."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.errors import ConfigError, PromptTooLongError, RequestError
from kvcore.layout import SpaceSpec
from kvcore.plugins import load_plugins
from kvcore.requests.spaces import slots_held
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

TENSORS = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
MODEL = ModelSpec(
    "hybrid",
    (
        LayerGroup("full", (0,), TENSORS, 4),
        LayerGroup("swa", (1,), TENSORS, 4, space="window", space_options=(("window", 6),)),
    ),
    "fp32",
)


def build(max_length: int = 0, *, max_tokens: int = 8) -> KVCache:
    settings = {
        "cache.page_size": 4,
        "cache.memory": "192KiB",
        "cache.max_requests": 4,
        "cache.max_tokens": max_tokens,
    }
    config = load_config(None, settings)
    model = msgspec.structs.replace(MODEL, max_length=max_length)
    return KVCache.create(model, config, load_plugins(config))


def fill(cache: KVCache, request_id: str, tokens: int) -> None:
    """Position ``p`` of layer ``l`` holds ``100 * l + p``."""
    for start in range(cache.length(request_id), tokens, 4):
        count = min(4, tokens - start)
        with cache.begin([(request_id, count)]) as step:
            for layer in (0, 1):
                values = (torch.arange(start, start + count) + 100.0 * layer).view(-1, 1, 1).expand(-1, 2, 8)
                step.store(layer, {"k": values.contiguous(), "v": values.contiguous()})
            step.commit()


def test_slots_name_the_bytes_of_each_position() -> None:
    with build() as cache:
        cache.admit("other", 3)
        cache.admit("a", 4)
        fill(cache, "a", 27)
        for layer, group, dead in ((0, "full", 0), (1, "swa", 16)):
            slots = cache.slots("a", group, 0, 27)
            assert slots.dtype == np.int64
            assert slots.shape == (27,)
            assert (slots[:dead] == -1).all()
            assert (slots[dead:] >= 0).all()
            assert cache.slots("a", group, 17, 21).tolist() == slots[17:21].tolist()
            out = {name: torch.full((27 - dead, 2, 8), torch.nan) for name in ("k", "v")}
            cache.store.load(layer, torch.from_numpy(slots[dead:]), out)
            assert out["k"][:, 0, 0].tolist() == [100.0 * layer + p for p in range(dead, 27)]


def test_slots_refuse_what_is_not_there() -> None:
    with build() as cache:
        cache.admit("a", 4)
        fill(cache, "a", 4)
        with pytest.raises(RequestError, match="outside the request"):
            cache.slots("a", "full", 0, 5)
        with pytest.raises(ConfigError, match="full"):
            cache.slots("a", "ful", 0, 1)


def test_a_joint_prefix_is_told_before_a_fork() -> None:
    with build() as cache:
        cache.admit("a", 4)
        fill(cache, "a", 27)
        assert cache.joint_prefix("a", 24) == 24
        assert cache.joint_prefix("a", 9) == 0
        cache.fork("a", "b", 24)


@pytest.mark.parametrize(
    ("spec", "units", "length", "expected"),
    [
        (SpaceSpec("c", "compressed", "row", 3), [5, 9], 8, [15, 16, 17, 27, 28, 29, -1, -1]),
        (SpaceSpec("c", "compressed", "row", 4), [], 3, [-1, -1, -1]),
        (SpaceSpec("r", "ring", "row", 0, (("ring", 3),)), [6, 7, 8], 2, [6, 7]),
        (SpaceSpec("r", "ring", "row", 0, (("ring", 3),)), [6, 7, 8], 5, [-1, -1, 8, 6, 7]),
        (SpaceSpec("s", "per_request", "state_slot", 0), [4], 3, [-1, -1, 4]),
        (SpaceSpec("k", "constant", "row", 0), [], 2, [-1, -1]),
        (SpaceSpec("w", "window", "page", 2, (("window", 2),)), [1, 1, 7], 5, [-1, -1, -1, -1, 14]),
    ],
)
def test_slots_of_every_kind_of_space(spec: SpaceSpec, units: list[int], length: int, expected: list[int]) -> None:
    table = np.array(units, np.int64)
    assert slots_held(table, 1, spec, length, 0, length).tolist() == expected
    for start in range(length + 1):
        for stop in range(start, length + 1):
            assert slots_held(table, 1, spec, length, start, stop).tolist() == expected[start:stop]


def columns(cache: KVCache, group: str) -> int:
    """Of the whole buffer behind the page table of the last step."""
    if "probe" not in cache.manager:
        cache.admit("probe", 1)
        fill(cache, "probe", 1)
    table = cache.store.plan(group).page_table
    return int(table.untyped_storage().nbytes() // 8 // cache.config.cache.max_rows)


def test_tables_are_as_wide_as_the_longest_request() -> None:
    with build(max_length=32) as cache:
        assert cache.capacity.units["full"]["pages"] > 11
        assert columns(cache, "full") == 10  # 32 tokens, and a step of 8 that begins at the last of them
        assert columns(cache, "swa") == 10


def test_tables_without_a_length_are_bounded_by_units() -> None:
    with build() as cache:
        assert columns(cache, "full") == cache.capacity.units["full"]["pages"]


def test_a_known_length_is_held() -> None:
    with build(max_length=10) as cache:
        assert not cache.can_admit(11)
        with pytest.raises(PromptTooLongError, match="longer than the model accepts"):
            cache.admit("a", 11)
        cache.admit("a", 9)
        fill(cache, "a", 9)
        with cache.begin([("a", 8)]) as step:  # drafts reach beyond
            step.commit([1])
        with pytest.raises(RequestError, match="as long as the model accepts"):
            cache.begin([("a", 1)])
        assert cache.length("a") == 10
