"""Windows, rings, compressed rows, states and constants against slow loops over positions."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.contract import IndexSpace
from kvcore.errors import ConfigError, RequestError
from kvcore.layout import SpaceSpec
from kvcore.requests.spaces import CompressedSpace, ConstantSpace, PerRequestSpace, RingSpace, WindowSpace

WINDOW, COMPRESSED, RING, STATE, CONSTANT = (
    WindowSpace(), CompressedSpace(), RingSpace(), PerRequestSpace(), ConstantSpace(),
)  # fmt: skip


def window(size: int, page: int) -> SpaceSpec:
    return SpaceSpec("swa", "window", "page", page, (("window", size),))


def ring(rows: int, seen: int | None = None) -> SpaceSpec:
    options = (("ring", rows),) if seen is None else (("ring", rows), ("window", seen))
    return SpaceSpec("ring", "ring", "row", 0, options)


def rows(ratio: int) -> SpaceSpec:
    return SpaceSpec("csa", "compressed", "row", ratio)


ONE = {kind: SpaceSpec("s", kind, "state_slot", 0) for kind in ("per_request", "constant")}
SPECS: list[tuple[IndexSpace, SpaceSpec]] = [
    (WINDOW, window(6, 4)), (COMPRESSED, rows(4)), (RING, ring(6)), (RING, ring(8, 6)),
    (STATE, ONE["per_request"]), (CONSTANT, ONE["constant"]),
]  # fmt: skip


def seen_by(position: int, size: int) -> set[int]:
    """Positions before it that a query sees."""
    return {p for p in range(position) if p > position - size}


# --- window ---


@given(size=st.integers(1, 40), page=st.integers(1, 9), length=st.integers(0, 150))
def test_the_first_live_unit_is_the_first_that_is_read(size: int, page: int, length: int) -> None:
    read = {p // page for p in seen_by(length, size)}
    first = WINDOW.first_live(window(size, page), length)
    if read:
        assert first == min(read)
    assert first <= length // page
    assert WINDOW.evict_before(window(size, page), length) <= first


@given(size=st.integers(1, 40), page=st.integers(1, 9), length=st.integers(0, 150))
def test_a_window_holds_what_it_promises_and_no_more(size: int, page: int, length: int) -> None:
    """While one more token is written, and with a whole window kept before the last page boundary."""
    spec = window(size, page)
    frontier = WINDOW.evict_before(spec, length) * page
    boundary = length // page * page
    assert frontier <= max(0, boundary - size)
    assert frontier > boundary - size - page
    held = WINDOW.num_units(spec, length + 1) - WINDOW.evict_before(spec, length)
    assert held <= WINDOW.units_per_request(spec) == -(-size // page) + 1


def test_the_tail_of_a_window_is_whole_at_the_last_page_boundary() -> None:
    """F2: window 127, page 64, 1023 tokens: 960 can be matched, so all but 832 stay (896 would leave 64)."""
    spec = window(127, 64)
    frontier = WINDOW.evict_before(spec, 1023) * 64
    assert frontier <= 832
    assert 960 - frontier >= 127
    assert WINDOW.first_live(spec, 960) * 64 >= frontier


@given(data=st.data(), size=st.integers(1, 20), page=st.integers(1, 5), length=st.integers(0, 60))
def test_over_any_chunks_a_window_lists_what_is_live_at_the_end_once(
    data: st.DataObject, size: int, page: int, length: int
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, length), max_size=5)))
    bounds = [0, *cuts, length]
    spec, listed = window(size, page), []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        last = n == len(bounds) - 2
        lo, hi = WINDOW.final_units(spec, start, stop, last=last)
        read_later = {p // page for p in seen_by(stop, size)}
        for unit in range(lo, hi):
            assert last or (unit + 1) * page <= stop, "not full yet"
            assert unit in read_later or unit == stop // page, "dead already"
            listed.append(unit)
    assert len(listed) == len(set(listed))
    assert {p // page for p in seen_by(length, size)} <= set(listed)
    # What was live when its chunk ended is all there is, and it is in order.
    assert listed == sorted(listed)


# --- compressed rows ---


@given(ratio=st.integers(1, 9), start=st.integers(0, 60), more=st.integers(0, 60), last=st.booleans())
def test_a_row_is_there_when_its_last_token_is(ratio: int, start: int, more: int, last: bool) -> None:
    stop = start + more
    completed = [t // ratio for t in range(start, stop) if t % ratio == ratio - 1]
    assert list(range(*COMPRESSED.final_units(rows(ratio), start, stop, last=last))) == completed
    assert COMPRESSED.num_units(rows(ratio), stop) == len({t // ratio for t in range(stop) if t % ratio == ratio - 1})
    assert COMPRESSED.units_per_request(rows(ratio)) is None


# --- ring ---


@given(size=st.integers(1, 9), length=st.integers(0, 40))
def test_a_ring_is_whole_from_the_first_token_on(size: int, length: int) -> None:
    spec = ring(size)
    assert RING.num_units(spec, length) == (size if length else 0)
    assert RING.final_units(spec, 0, length, last=False) == (0, 0)
    written = {t % size for t in range(length)}
    assert list(range(*RING.final_units(spec, 0, length, last=True))) == sorted(written)
    assert RING.units_per_request(spec) == RING.reserved_units(spec) == size


@given(seen=st.integers(1, 6), spare=st.integers(0, 4), length=st.integers(0, 40), back=st.integers(0, 12))
def test_a_ring_goes_back_as_far_as_nothing_seen_is_overwritten(seen: int, spare: int, length: int, back: int) -> None:
    spec, to = ring(seen + spare, seen), max(0, length - back)
    kept: dict[int, int] = {}
    for token in range(length):
        kept[token % (seen + spare)] = token
    readable = all(kept[p % (seen + spare)] == p for p in seen_by(to, seen))
    assert RING.can_rewind(spec, length, to) == readable


# --- one unit ---


@pytest.mark.parametrize("length", [1, 2, 100])
def test_a_state_is_final_at_the_end_and_serves_its_own_length(length: int) -> None:
    spec = ONE["per_request"]
    assert STATE.num_units(spec, length) == 1
    assert STATE.final_units(spec, 0, length, last=False) == (0, 0)
    assert STATE.final_units(spec, length, length, last=True) == (0, 1)
    assert STATE.can_rewind(spec, length, length)
    assert STATE.can_rewind(spec, length, 0)
    assert not STATE.can_rewind(spec, length + 1, length)
    assert STATE.units_per_request(spec) == 1


def test_no_tokens_have_no_state() -> None:
    assert STATE.num_units(ONE["per_request"], 0) == 0
    assert STATE.final_units(ONE["per_request"], 0, 0, last=True) == (0, 0)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_requests_hold_nothing_of_a_constant(length: int) -> None:
    spec = ONE["constant"]
    assert CONSTANT.num_units(spec, length) == CONSTANT.first_live(spec, length) == 0
    assert CONSTANT.final_units(spec, 0, length, last=True) == (0, 0)
    assert CONSTANT.units_per_request(spec) == 0
    assert CONSTANT.reserved_units(spec) == 2


# --- refusals ---


@pytest.mark.parametrize(("space", "spec"), SPECS)
def test_every_space_accepts_its_spec_and_refuses_nonsense(space: IndexSpace, spec: SpaceSpec) -> None:
    space.check(spec)
    for options in (*[((name, 0),) for name, _ in spec.options], (*spec.options, ("windwo", 3))):
        with pytest.raises(ConfigError):
            space.check(SpaceSpec(spec.name, spec.kind, spec.unit, spec.tokens_per_unit, options))
    if spec.options:
        with pytest.raises(ConfigError):
            space.check(SpaceSpec(spec.name, spec.kind, spec.unit, spec.tokens_per_unit))
    other = 0 if spec.tokens_per_unit else 4
    with pytest.raises(ConfigError) as error:
        space.check(SpaceSpec(spec.name, spec.kind, "row", other, spec.options))
    assert error.value.fields["space"] == spec.name
    with pytest.raises(RequestError):
        space.num_units(spec, -1)
    with pytest.raises(RequestError):
        space.final_units(spec, 5, 4, last=False)


def test_a_ring_smaller_than_its_window_is_refused() -> None:
    with pytest.raises(ConfigError, match="whole window"):
        RING.check(ring(4, 5))
    RING.check(ring(5, 5))


def test_compressed_units_are_rows() -> None:
    with pytest.raises(ConfigError) as error:
        COMPRESSED.check(SpaceSpec("csa", "compressed", "page", 4))
    assert error.value.fields["got"] == "page"
