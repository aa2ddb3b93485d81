"""Capacity plans of real shapes, against numbers worked out by hand, and against what pools really allocate."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.builtin.formats import Bf16, Fp32
from kvcore.config import load_config
from kvcore.contract import Format
from kvcore.engine.cache import KVCache
from kvcore.engine.sizing import plan_capacity
from kvcore.errors import ConfigError
from kvcore.layout import Axis, Field, Layout, Region, SpaceSpec, UnitRange, padding
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec

GIB = 1024**3


def attention(layers: int, heads: int = 8, dim: int = 128, **more: object) -> LayerGroup:
    tensors = (TensorSpec("k", heads, dim), TensorSpec("v", heads, dim))
    return LayerGroup("full", tuple(range(layers)), tensors, heads, **more)  # type: ignore[arg-type]


def sliding(first: int, layers: int, size: int, role: str = "target", dim: int = 128) -> LayerGroup:
    tensors = (TensorSpec("k", 8, dim), TensorSpec("v", 8, dim))
    return LayerGroup(
        "swa", tuple(range(first, first + layers)), tensors, 8, space="window", space_options=(("window", size),),
        role=role,  # type: ignore[arg-type]
    )  # fmt: skip


def layouts(
    *groups: LayerGroup, fmt: Format | None = None, page: int = 16, shard: Shard | None = None
) -> dict[str, Layout]:
    chosen = fmt or Bf16()
    return {
        group.prefix: chosen.layout(group, page_size=page, shard=shard or Shard(), arena="page_major")
        for group in groups
    }


def by_hand(found: Mapping[str, Layout], units: Mapping[str, Mapping[str, int]]) -> int:
    return sum(
        item.unit_bytes * len(layout.layers) * units[group][name]
        for group, layout in found.items()
        for item in layout.regions
        for name in item.ranges
    )


def test_an_80_layer_llama() -> None:
    """80 layers × (K + V) × 8 heads × 128 × 2 bytes = 327680 bytes a token; four ranks hold a quarter each."""
    plan = plan_capacity(layouts(attention(80)), 40 * GIB)
    assert plan.bytes_per_token == {"full/kv": 327_680, "total": 327_680}
    assert (plan.padding, plan.per_request_bytes, plan.request_capacity) == (0, 0, None)
    pages = 40 * GIB // (327_680 * 16)
    assert plan.token_capacity == (pages - 1) * 16
    assert plan.allocated_bytes == pages * 16 * 327_680
    four = plan_capacity(layouts(attention(80), shard=Shard(tp_rank=3, tp_size=4)), 40 * GIB)
    assert four.bytes_per_token["total"] == 327_680 // 4


def test_ranks_size_what_they_hold() -> None:
    """C2: heads per rank 8, 2, 1 and never 0; four ranks hold four times the tokens, sixteen as many as eight."""
    capacity, heads = {}, {}
    for size in (1, 4, 8, 16):
        found = layouts(attention(2), shard=Shard(tp_rank=size - 1, tp_size=size))
        heads[size] = found["full"].region("k").field("x").axis("head").size
        plan = plan_capacity(found, 16 * 1024**2 + 8192 * 16)  # one page more than a power of two: the null page
        capacity[size] = plan
    assert heads == {1: 8, 4: 2, 8: 1, 16: 1}
    tokens = {size: plan.token_capacity for size, plan in capacity.items()}
    assert tokens[1] == 2048
    assert tokens[16] == tokens[8]
    # Null pages are smaller too, so each rank count is exact: everything but one page of its own.
    for size, plan in capacity.items():
        page = 16 * 8192 // min(size, 8)
        assert tokens[size] == ((16 * 1024**2 + 8192 * 16) // page - 1) * 16
        assert plan.bytes_per_token["total"] == 8192 // min(size, 8)
    roomy = {n: plan_capacity(layouts(attention(2), shard=Shard(tp_size=n)), 64 * GIB).token_capacity for n in (1, 4)}
    assert roomy[1] is not None
    assert roomy[4] is not None
    assert roomy[4] // 4 == pytest.approx(roomy[1], rel=1e-5)


def test_layers_that_share_storage_are_counted_once() -> None:
    shared = attention(4, shares=tuple((layer, layer - 4) for layer in range(4, 8)))
    assert plan_capacity(layouts(shared), GIB) == plan_capacity(layouts(attention(4)), GIB)


def test_windows_bound_requests_and_the_rest_goes_to_tokens() -> None:
    """32 requests × (1024 / 16 + 1) pages, and what one step of 2048 tokens of up to 32 rows may add."""
    found = layouts(attention(8), sliding(8, 40, 1024), sliding(100, 2, 1024, role="draft"))
    plan = plan_capacity(found, 40 * GIB, 32, step_tokens=2048, step_rows=64)
    token, window_page = 8 * 4096, 40 * 4096 * 16
    put_aside = 1 + 32 * 65 + 32 + (2048 - 64) // 16
    assert plan.units["swa"] == plan.units["draft/swa"] == {"pages": put_aside}
    assert plan.bytes_per_token == {"full/kv": token, "swa/kv": 0, "draft/swa/kv": 0, "total": token}
    assert plan.per_request_bytes == 65 * 42 * 4096 * 16
    assert plan.request_capacity == 32
    rest = 40 * GIB - put_aside * (window_page + 2 * 4096 * 16)
    assert plan.units["full"] == {"pages": rest // (token * 16)}
    assert plan.token_capacity == (rest // (token * 16) - 1) * 16


def test_a_small_cache_puts_no_more_aside_than_its_tokens_can_fill() -> None:
    found = layouts(attention(1), sliding(1, 5, 1024))
    page = 16 * 4096
    plan = plan_capacity(found, 101 * 6 * page, 64, step_tokens=2048)
    assert plan.units == {"full": {"pages": 101}, "swa": {"pages": 101}}
    # The same without a bound on requests; windows alone need one.
    assert plan_capacity(found, 101 * 6 * page).units == plan.units
    with pytest.raises(ConfigError, match="say for how many"):
        plan_capacity(layouts(sliding(0, 5, 1024)), GIB)
    alone = plan_capacity(layouts(sliding(0, 5, 1024)), GIB, 4)
    assert alone.units == {"swa": {"pages": 1 + 4 * 65}}
    assert (alone.token_capacity, alone.request_capacity) == (None, 4)
    with pytest.raises(ConfigError) as error:
        plan_capacity(layouts(sliding(0, 5, 1024)), 100 * 5 * page, 4)
    assert error.value.fields["needed"] == 261 * 5 * page
    assert "cache.max_requests" in error.value.remedy


@settings(deadline=None, max_examples=60)
@given(
    window=st.integers(1, 40),
    page=st.integers(1, 8),
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    offset=st.integers(0, 40),
)
def test_a_step_never_needs_more_than_is_put_aside(window: int, page: int, counts: list[int], offset: int) -> None:
    """Rows of one step against units counted position by position, from every offset inside a page."""
    found = layouts(sliding(0, 1, window), page=page)
    plan = plan_capacity(found, GIB, len(counts), step_tokens=sum(counts), step_rows=len(counts))
    needed = 0
    for n, count in enumerate(counts):
        start = 10 * window * page + (offset + n) % page
        boundary = start // page * page  # a whole window before it is kept, and every new token needs its place
        needed += len({p // page for p in range(boundary - window, start + count)})
    assert needed <= plan.units["swa"]["pages"] - 1


# --- the two-range region of a compressed latent: a ring, then rows at a ratio ---


def compressed(layers: int, ratio: int, row: int, index: int, ring: int) -> Layout:
    """``row`` bytes a row in a region of two ranges, ``index`` bytes more a compressed row."""
    space = (SpaceSpec("ring", "ring", "row", 0, (("ring", ring),)), SpaceSpec("rows", "compressed", "row", ratio))
    ranges = (UnitRange("ring", "ring"), UnitRange("rows", "rows"))
    latent = Region("latent", f"r{ratio}/kv", (Field("x", "u8", "byte", (Axis("byte", row),)),), row, ("ring", "rows"))
    regions = [latent]
    if index:
        rest = -index % 16
        fields = (Field("x", "u8", "byte", (Axis("byte", index),)), padding("p", rest, index, alignment_only=True))
        regions.append(Region("index", f"r{ratio}/index_key", fields, index + rest, ("rows",)))
    return Layout("f", 1, f"r{ratio}", tuple(range(layers)), tuple(regions), space, ranges, "layer_major")


@pytest.mark.parametrize(("row", "total"), [(1024, 8918), (640, 5945)])
def test_compressed_rows_cost_a_fraction_of_a_row_per_token(row: int, total: int) -> None:
    """30 layers at ratio 4 with index keys of 132 bytes, 31 at ratio 128: 30/4·(row + 132) + 31/128·row."""
    found = {"r4": compressed(30, 4, row, 132, 128), "r128": compressed(31, 128, row, 0, 128)}
    plan = plan_capacity(found, 4 * GIB, 16)
    assert plan.bytes_per_token["total"] == total
    assert plan.bytes_per_token["r128/kv"] == 31 * row / 128
    assert plan.padding == 30 * 12 / 4  # index keys are padded from 132 to 144 bytes
    assert plan.per_request_bytes == 61 * 128 * row
    assert plan.request_capacity == 16
    # A ring a request, and the one of state slot 0 that stays empty.
    assert plan.units["r4"]["ring"] == plan.units["r128"]["ring"] == 17 * 128
    assert plan.allocated_bytes == by_hand(found, plan.units) <= 4 * GIB
    assert plan.token_capacity is not None
    assert (plan.units["r4"]["rows"] - 1) * 4 >= plan.token_capacity
    assert (plan.units["r128"]["rows"] - 1) * 128 >= plan.token_capacity


def test_a_constant_costs_two_units_and_bounds_nothing() -> None:
    field = Field("x", "fp32", "one", (Axis("one", 4),))
    scale = Layout(
        "f", 1, "scale", (0, 1), (Region("s", "scale/s", (field,), 16, ("one",)),),
        (SpaceSpec("one", "constant", "state_slot", 0),), (UnitRange("one", "one"),),
    )  # fmt: skip
    found = {**layouts(attention(1)), "scale": scale}
    plan = plan_capacity(found, 10 * 65536 + 64)
    assert plan.units == {"full": {"pages": 10}, "scale": {"one": 2}}
    assert (plan.request_capacity, plan.per_request_bytes) == (None, 0)
    assert plan.bytes_per_token == {"full/kv": 4096, "scale/s": 0, "total": 4096}


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
@pytest.mark.parametrize("memory", ["100KiB", "777777", "2MiB"])
def test_what_is_planned_is_what_pools_allocate(arena: str, memory: str) -> None:
    model = ModelSpec("m", (attention(1, dim=5), sliding(1, 3, 9, dim=5), sliding(9, 1, 9, "draft", dim=5)), "fp32")
    settings_ = {"cache.memory": memory, "cache.arena": arena, "cache.page_size": 3, "cache.max_requests": 5}
    config = load_config(None, settings_)
    found = {
        group.prefix: Fp32().layout(group, page_size=3, shard=Shard(), arena=config.cache.arena)
        for group in model.groups
    }
    plan = plan_capacity(
        found, config.cache.memory, 5, step_tokens=config.cache.max_tokens, step_rows=config.cache.max_rows
    )
    with KVCache.create(model, config, load_plugins(())) as cache:
        arenas = cache.store.arenas()
        assert plan.allocated_bytes == sum(arena_.tensor().numel() for arena_ in arenas.values())
        assert plan.allocated_bytes == by_hand(found, plan.units) <= config.cache.memory
        assert cache.capacity == plan
        assert cache.token_capacity == plan.token_capacity
        assert cache.request_capacity == plan.request_capacity == 5
        capacity = {part.group: part.capacity for part in cache.stats().manager.ranges}
        assert capacity == {group: plan.units[group]["pages"] - 1 for group in found}
