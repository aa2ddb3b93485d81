"""What a model says of its states, and which part of them each rank holds."""

from __future__ import annotations

import pytest

from kvcore.errors import ConfigError
from kvcore.spec import Shard, StatePart, StateSpec

QKV = StateSpec(
    "conv",
    "conv",
    "bf16",
    (("channel", 64), ("tap", 3)),
    "channel",
    (StatePart(2, 8), StatePart(2, 8), StatePart(4, 8)),
)
"""Two key heads of 8 channels for queries, two for keys, and four value heads."""


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [((0, 64),)]),
        (2, [((0, 8), (16, 24), (32, 48)), ((8, 16), (24, 32), (48, 64))]),
        # More ranks than key heads: neighbours hold the same one.
        (4, [((0, 8), (16, 24), (32, 40)), ((0, 8), (16, 24), (40, 48)),
             ((8, 16), (24, 32), (48, 56)), ((8, 16), (24, 32), (56, 64))]),
    ],
)  # fmt: skip
def test_every_part_is_cut_by_its_own_heads(size: int, expected: list[tuple[tuple[int, int], ...]]) -> None:
    assert [Shard(rank, size).ids(QKV) for rank in range(size)] == expected


def test_every_channel_is_somewhere() -> None:
    for size in (1, 2, 4, 8):
        held = {c for rank in range(size) for lo, hi in Shard(rank, size).ids(QKV) for c in range(lo, hi)}
        assert held == set(range(64))


@pytest.mark.parametrize("empty", [StatePart(0, 8), StatePart(4, 0)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_empty_part_is_on_no_rank(empty: StatePart, at: int) -> None:
    parts = [StatePart(2, 8), StatePart(2, 8)]
    parts.insert(at, empty)
    state = StateSpec("conv", "conv", "fp32", (("channel", 32), ("tap", 3)), "channel", tuple(parts))
    assert [Shard(rank, 2).ids(state) for rank in range(2)] == [((0, 8), (16, 24)), ((8, 16), (24, 32))]
    assert Shard(1, 4).ids(StateSpec("none", "conv", "fp32", (("channel", 0),), "channel", (empty,))) == ()


def test_what_is_not_split_is_everywhere() -> None:
    assert Shard(1, 2).ids(StateSpec("conv", "conv", "fp32", (("channel", 6), ("tap", 3)))) == ()


def test_heads_and_ranks_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match="do not divide") as caught:
        Shard(0, 3).ids(QKV)
    assert caught.value.fields["tensor"] == "conv"


@pytest.mark.parametrize(
    "wrong",
    [
        {"axes": ()},
        {"axes": (("channel", 4), ("channel", 4))},
        {"axes": (("channel", -1),)},
        {"split": "channel"},
        {"split": "lane", "parts": (StatePart(4),)},
        {"split": "channel", "parts": (StatePart(2, 8),)},
        {"parts": (StatePart(0),)},
    ],
)
def test_a_state_that_does_not_add_up(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        StateSpec(**{"name": "conv", "kind": "conv", "dtype": "fp32", "axes": (("channel", 4),), **wrong})  # type: ignore[arg-type]
    assert caught.value.fields["state"] == "conv"
