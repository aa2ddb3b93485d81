"""Sizing: what is promised is allocated to the byte, and nothing more would fit."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvcore.engine.sizing import allocated_bytes, token_capacity, units_for_memory
from kvcore.errors import ConfigError
from kvcore.layout import Axis, Field, Layout, Region, SpaceSpec, UnitRange, region


def paged(name: str, layers: int, page: int, dims: tuple[int, ...], arena: str) -> Layout:
    regions = tuple(
        region(
            f"r{n}",
            f"{name}/kv",
            [Field("x", "bf16", "slot dim", (Axis("slot", page), Axis("dim", dim)))],
            ranges=("pages",),
        )
        for n, dim in enumerate(dims)
    )
    space = SpaceSpec("all", "sequence", "page", page)
    ranges = (UnitRange("pages", "all"),)
    return Layout("f", 1, name, tuple(range(layers)), regions, (space,), ranges, arena)  # type: ignore[arg-type]


def state(name: str, layers: int, nbytes: int) -> Layout:
    field = Field("x", "u8", "byte", (Axis("byte", nbytes),))
    space = SpaceSpec("per_request", "per_request", "state_slot", 0)
    regions = (Region("s", f"{name}/state", (field,), nbytes, ("slots",)),)
    return Layout("f", 1, name, tuple(range(layers)), regions, (space,), (UnitRange("slots", "per_request"),))


def by_hand(layout: Layout, units: dict[str, int]) -> int:
    """Bytes of every unit of every region of every layer, one at a time."""
    return sum(
        item.unit_bytes
        for _ in layout.layers
        for item in layout.regions
        for name in item.ranges
        for _ in range(units[name])
    )


shapes = st.tuples(
    st.integers(1, 3), st.sampled_from([1, 2, 3, 16]), st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple)
)


@settings(deadline=None)
@given(
    shape=st.lists(shapes, min_size=1, max_size=3),
    arena=st.sampled_from(["page_major", "layer_major"]),
    memory=st.integers(1, 60_000),
)
def test_all_that_fits_and_not_a_byte_more(
    shape: list[tuple[int, int, tuple[int, ...]]], arena: str, memory: int
) -> None:
    layouts = {f"g{n}": paged(f"g{n}", *one, arena) for n, one in enumerate(shape)}
    try:
        units = units_for_memory(layouts, memory)
    except ConfigError as error:
        needed = error.fields["needed"]
        assert needed > memory
        assert needed == sum(by_hand(layout, {"pages": 2}) for layout in layouts.values())
        assert all(counts == {"pages": 2} for counts in units_for_memory(layouts, needed).values())
        return
    total = sum(by_hand(layout, units[group]) for group, layout in layouts.items())
    assert total == allocated_bytes(layouts, units) <= memory
    # One more token in every group would not fit.
    capacity = token_capacity(layouts, units)
    assert capacity is not None
    pages = {group: layout.spaces[0].tokens_per_unit for group, layout in layouts.items()}
    assert capacity == min((units[group]["pages"] - 1) * page for group, page in pages.items())
    more = {group: {"pages": 1 + -(-(capacity + 1) // page)} for group, page in pages.items()}
    assert sum(by_hand(layout, more[group]) for group, layout in layouts.items()) > memory


@settings(deadline=None)
@given(memory=st.integers(1, 10**6), requests=st.integers(1, 5))
def test_state_slots_are_reserved_before_tokens(memory: int, requests: int) -> None:
    layouts = {"full": paged("full", 2, 4, (8, 8), "page_major"), "state": state("state", 3, 64)}
    reserved = (requests + 1) * 3 * 64
    assume(memory >= reserved + 2 * by_hand(layouts["full"], {"pages": 1}))
    units = units_for_memory(layouts, memory, max_requests=requests)
    assert units["state"] == {"slots": requests + 1}
    assert units["full"] == units_for_memory({"full": layouts["full"]}, memory - reserved)["full"]


def test_a_worked_example() -> None:
    # 2 layers × (K + V) × 16 tokens × 8 dims × 2 bytes = 1024 bytes a page; the null page counts.
    layout = paged("full", 2, 16, (8, 8), "page_major")
    assert units_for_memory({"full": layout}, 10 * 1024 + 1023) == {"full": {"pages": 10}}
    assert token_capacity({"full": layout}, {"full": {"pages": 10}}) == 9 * 16
    with pytest.raises(ConfigError, match="no usable unit") as caught:
        units_for_memory({"full": layout}, 2 * 1024 - 1)
    assert caught.value.fields == {"memory": 2047, "needed": 2048}
    assert "2048 bytes" in caught.value.remedy


def test_a_model_of_states_alone_bounds_no_tokens() -> None:
    layouts = {"state": state("state", 1, 64)}
    units = units_for_memory(layouts, 10**6, max_requests=4)
    assert units == {"state": {"slots": 5}}
    assert token_capacity(layouts, units) is None
    with pytest.raises(ConfigError, match="say for how many") as caught:
        units_for_memory(layouts, 10**6)
    assert "cache.max_requests" in caught.value.remedy


def test_a_space_that_nobody_provides_is_refused() -> None:
    field = Field("x", "u8", "byte", (Axis("byte", 16),))
    layout = Layout(
        "f", 1, "spiral", (0,), (Region("r", "spiral/kv", (field,), 16, ("rows",)),),
        (SpaceSpec("spiral", "rng", "row", 0),), (UnitRange("rows", "spiral"),),
    )  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        units_for_memory({"spiral": layout}, 10**6, max_requests=1)
    assert caught.value.fields["kind"] == "rng"
    assert "ring" in caught.value.remedy
