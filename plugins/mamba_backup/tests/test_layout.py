"""The bytes of a slot, written out by hand; what is refused, with names."""

from __future__ import annotations

import struct

import pytest
import torch

from kvcore.config import load_config
from kvcore.contract import StateComponent
from kvcore.engine.cache import KVCache
from kvcore.errors import ConfigError, KVCoreError, LayoutError, UnsupportedError
from kvcore.layout import Layout
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard, StatePart, StateSpec, TensorSpec
from kvcore_mamba_backup.components import RecurrentState, ShortConv

# Queries and keys of two heads of 4 channels, four value heads of 2: [key, key, value]. 3 taps are kept.
KKV = StateSpec(
    "conv",
    "conv",
    "bf16",
    (("channel", 24), ("tap", 3)),
    "channel",
    (StatePart(2, 4), StatePart(2, 4), StatePart(4, 2)),
)
DELTA = StateSpec("recurrent", "recurrent", "fp32", (("head", 4), ("dim", 2), ("state", 3)), "head", (StatePart(4),))
WHOLE = StateSpec("conv_out", "conv", "fp32", (("channel", 5), ("tap", 3)))
NONE = StateSpec("conv_none", "conv", "fp32", (("channel", 0), ("tap", 3)), "channel", (StatePart(0, 4),))


def group(*states: StateSpec, name: str = "state", layers: tuple[int, ...] = (0, 2), **more: object) -> LayerGroup:
    return LayerGroup(name, layers, (), kind="state", space="per_request", states=states, **more)  # type: ignore[arg-type]


def layout(component: StateComponent, *states: StateSpec, shard: Shard | None = None, **more: object) -> Layout:
    return component.layout(group(*states, **more), shard=shard or Shard(), arena="page_major")


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


def fp32(value: float) -> bytes:
    return struct.pack("<f", value)


def number(channel: int, tap: int) -> float:
    """Exact in bf16."""
    return channel * 4 + tap + 1


def write(cache: KVCache, slot: int, channels: list[int], heads: list[int]) -> None:
    """What a rank would write that has these channels and heads, in this order."""
    view = cache.state("state")
    for layer in (0, 2):
        rows = [[number(channel, tap) + layer for tap in range(3)] for channel in channels]
        view.field(layer, "conv", "x")[slot] = torch.tensor(rows).to(torch.bfloat16)
        for local, head in enumerate(heads):
            cells = torch.arange(6.0).reshape(2, 3) + head * 10 + layer * 100
            view.field(layer, "recurrent", "x")[slot, local] = cells


def slot_bytes(layer: int, channels: list[int], heads: list[int]) -> tuple[bytes, bytes]:
    """conv: channel by channel, three taps each, padded to 16; recurrent: head by head, 2 × 3 numbers each."""
    conv = b"".join(bf16(number(channel, tap) + layer) for channel in channels for tap in range(3))
    delta = b"".join(fp32(cell + head * 10 + layer * 100) for head in heads for cell in range(6))
    return conv + bytes(-len(conv) % 16), delta + bytes(-len(delta) % 16)


def build(shard: Shard, arena: str) -> KVCache:
    config = load_config(
        None, {"plugins": ["mamba_backup"], "cache.memory": "8KiB", "cache.max_requests": 3, "cache.arena": arena}
    )
    model = ModelSpec("golden", (group(KKV, DELTA),), "bf16")
    return KVCache.create(model, config, load_plugins(config), shard=shard)


# Which channels and heads a rank has, counted out: queries 0–7 and keys 8–15 by heads of 4, values 16–23 by heads of 2.
RANKS = [
    (Shard(), [*range(24)], [0, 1, 2, 3], 144, 96),
    (Shard(0, 2), [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19], [0, 1], 80, 48),
    (Shard(1, 2), [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23], [2, 3], 80, 48),
    # More ranks than key heads: two neighbours have the same query and key head, and one value head each.
    (Shard(1, 4), [0, 1, 2, 3, 8, 9, 10, 11, 18, 19], [1], 64, 32),
    (Shard(2, 4), [4, 5, 6, 7, 12, 13, 14, 15, 20, 21], [2], 64, 32),
    (Shard(3, 4), [4, 5, 6, 7, 12, 13, 14, 15, 22, 23], [3], 64, 32),
]


@pytest.mark.parametrize(("shard", "channels", "heads", "conv", "delta"), RANKS)
def test_slots_side_by_side(shard: Shard, channels: list[int], heads: list[int], conv: int, delta: int) -> None:
    """Page-major: a slot is one piece, layer 0 (conv, recurrent), then layer 2."""
    with build(shard, "page_major") as cache:
        write(cache, 2, channels, heads)
        arena = bytes(cache.store.pools["state"].arena.array())
        assert len(arena) == 4 * 2 * (conv + delta)  # three requests and the null slot, two layers
        want = b"".join(part for layer in (0, 2) for part in slot_bytes(layer, channels, heads))
        assert len(want) == 2 * (conv + delta)
        assert arena == bytes(2 * len(want)) + want + bytes(len(want))


@pytest.mark.parametrize(("shard", "channels", "heads", "conv", "delta"), RANKS)
def test_an_array_a_layer_and_state(shard: Shard, channels: list[int], heads: list[int], conv: int, delta: int) -> None:
    """Layer-major: all slots of layer 0's conv, of its recurrent state, then layer 2's."""
    with build(shard, "layer_major") as cache:
        write(cache, 3, channels, heads)
        parts = [part for layer in (0, 2) for part in slot_bytes(layer, channels, heads)]
        assert [len(part) for part in parts] == [conv, delta] * 2
        want = b"".join(bytes(3 * len(part)) + part for part in parts)
        assert bytes(cache.store.pools["state"].arena.array()) == want


def test_the_layout_is_the_same_text_in_every_release() -> None:
    """Peers compare it: what changes here changes the protocol between them, and needs another revision."""
    two = StateSpec("conv", "conv", "bf16", (("channel", 8), ("tap", 3)), "channel", (StatePart(2, 2), StatePart(2, 2)))
    made = RecurrentState().layout(
        LayerGroup("state", (1,), (), kind="state", space="per_request", role="draft", states=(two, DELTA)),
        shard=Shard(1, 2),
        arena="page_major",
    )
    assert made.to_json().decode() == (
        '{"format":"recurrent_state","revision":1,"group":"draft/state","layers":[1],"regions":['
        '{"name":"conv","component":"draft/state/conv","fields":[{"name":"x","dtype":"bf16","order":"channel tap","axes":['
        '{"name":"channel","size":4,"padded":0,"ids":[[2,4],[6,8]],"blocks":null},'
        '{"name":"tap","size":3,"padded":0,"ids":[],"blocks":null}],"offset":0,"kind":"data","alignment":0},'
        '{"name":"_alignment","dtype":"u8","order":"byte","axes":['
        '{"name":"byte","size":8,"padded":0,"ids":[],"blocks":null}],"offset":24,"kind":"alignment","alignment":0}],'
        '"unit_bytes":32,"ranges":["slots"]},'
        '{"name":"recurrent","component":"draft/state/recurrent","fields":[{"name":"x","dtype":"fp32",'
        '"order":"head dim state","axes":[{"name":"head","size":2,"padded":0,"ids":[[2,4]],"blocks":null},'
        '{"name":"dim","size":2,"padded":0,"ids":[],"blocks":null},'
        '{"name":"state","size":3,"padded":0,"ids":[],"blocks":null}],"offset":0,"kind":"data","alignment":0}],'
        '"unit_bytes":48,"ranges":["slots"]}],'
        '"spaces":[{"name":"state","kind":"per_request","unit":"state_slot","tokens_per_unit":0,"options":[]}],'
        '"ranges":[{"name":"slots","space":"state"}],"arena":"page_major","alignment":16}'
    )
    assert ShortConv().layout(group(WHOLE), shard=Shard(), arena="page_major").format == "short_conv"


def test_what_is_not_split_is_whole_on_every_rank() -> None:
    (field,) = layout(ShortConv(), WHOLE, KKV, shard=Shard(1, 2)).region("conv_out").data_fields
    assert (field.logical_shape, field.axis("channel").ids) == ((5, 3), ())


def test_a_stage_holds_its_layers() -> None:
    made = layout(ShortConv(), WHOLE, layers=(0, 2, 5), shard=Shard(layers=(2, 3, 5)))
    assert made.layers == (2, 5)
    with pytest.raises(ConfigError, match="no layer of the group"):
        layout(ShortConv(), WHOLE, shard=Shard(layers=(1,)))


def test_an_empty_state_takes_no_bytes() -> None:
    """J12: a state tensor without elements is skipped; the others are where they would be without it."""
    for shard in (Shard(), Shard(1, 2)):
        assert layout(ShortConv(), NONE, WHOLE, shard=shard) == layout(ShortConv(), WHOLE, shard=shard)
    with pytest.raises(UnsupportedError, match="no state of the group has an element") as caught:
        layout(ShortConv(), NONE)
    assert caught.value.fields["states"] == ["conv_none"]
    assert "leave the group out" in str(caught.value)


@pytest.mark.parametrize(
    ("states", "holder"),
    [
        ((WHOLE,), "short_conv"),
        ((WHOLE, KKV), "short_conv"),
        ((DELTA,), "recurrent_state"),
        ((KKV, DELTA), "recurrent_state"),
        ((), ""),
        ((StateSpec("pending", "pending", "fp32", (("dim", 4),)),), ""),
        ((DELTA, StateSpec("pending", "pending", "fp32", (("dim", 4),))), ""),
    ],
)
def test_every_group_has_one_holder_or_none(states: tuple[StateSpec, ...], holder: str) -> None:
    components = [ShortConv(), RecurrentState()]
    assert [item.name for item in components if item.applies(group(*states))] == ([holder] if holder else [])
    for item in components:
        assert item.checkpoint(group(*states)).ok == (item.name == holder)
        assert item.final == "prompt_done"


def test_groups_that_store_tokens_are_the_formats() -> None:
    attention = LayerGroup("full", (0,), (TensorSpec("k", 2, 8),), num_query_heads=2, states=(WHOLE,))
    mixed = LayerGroup("state", (0,), (TensorSpec("h", 2, 8),), kind="state", space="per_request", states=(WHOLE,))
    for item in (ShortConv(), RecurrentState()):
        assert not item.applies(attention)
        assert not item.applies(mixed)


def test_an_unknown_kind_is_refused_with_its_name() -> None:
    pending = StateSpec("pending_kv", "pending", "fp32", (("dim", 4),))
    with pytest.raises(UnsupportedError) as caught:
        layout(RecurrentState(), DELTA, pending)
    assert caught.value.fields["unknown"] == ["pending_kv: pending"]
    assert caught.value.fields["group"] == "state"
    with pytest.raises(UnsupportedError) as caught:
        layout(ShortConv(), DELTA)
    assert caught.value.fields["states"] == ["recurrent: recurrent"]
    assert "unknown" not in caught.value.fields


@pytest.mark.parametrize("dtype", ["float32", "e4m3fn", "bf61"])
def test_an_unknown_dtype_is_refused_with_its_name(dtype: str) -> None:
    with pytest.raises(UnsupportedError, match="not held in this dtype") as caught:
        layout(ShortConv(), WHOLE, StateSpec("conv_k", "conv", dtype, (("channel", 4), ("tap", 3))))
    assert (caught.value.fields["state"], caught.value.fields["dtype"]) == ("conv_k", dtype)


@pytest.mark.parametrize(
    ("states", "shard", "error", "match"),
    [
        ((WHOLE, WHOLE), Shard(), ConfigError, "one name"),
        ((KKV,), Shard(0, 3), ConfigError, "do not divide"),
        ((StateSpec("conv", "conv", "fp32", (("Channel", 4),)),), Shard(), LayoutError, "bad term"),
    ],
)
def test_what_cannot_be_laid_out(
    states: tuple[StateSpec, ...], shard: Shard, error: type[KVCoreError], match: str
) -> None:
    with pytest.raises(error, match=match):
        layout(ShortConv(), *states, shard=shard)


def test_a_space_of_tokens_is_refused() -> None:
    """A state has one slot a request: the default space of a group stands for pages of tokens."""
    config = load_config(None, {"plugins": ["mamba_backup"], "cache.memory": "8KiB", "cache.max_requests": 2})
    wrong = LayerGroup("state", (0,), (), kind="state", states=(WHOLE,))
    with pytest.raises(ConfigError) as caught:
        KVCache.create(ModelSpec("wrong", (wrong,), "fp32"), config, load_plugins(config))
    assert "state" in str(caught.value)
