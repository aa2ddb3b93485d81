"""The sequence space against slow loops over tokens."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, RequestError
from kvcore.layout import SpaceSpec
from kvcore.requests.spaces import INDEX_SPACES, SequenceSpace, last_unit_tokens, slots_of

SPACE = SequenceSpace()


def pages(size, **kwargs):
    return SpaceSpec(name="full", kind="sequence", unit="page", tokens_per_unit=size, **kwargs)


def test_registered():
    kinds = ["sequence", "window", "compressed", "ring", "per_request", "constant"]
    assert [space.kind for space in INDEX_SPACES] == kinds


def test_exact_multiples_have_no_empty_last_unit():
    """D3: pages and tokens of the last page."""
    lengths = (0, 1, 3, 4, 5, 8)
    assert [SPACE.num_units(pages(4), n) for n in lengths] == [0, 1, 1, 1, 2, 2]
    assert [last_unit_tokens(4, n) for n in lengths] == [0, 1, 3, 4, 1, 4]


def test_chunks_of_five_of_fifteen_tokens():
    """J8: token ranges [0, 4) [4, 8) [8, 15): each unit once, the partial one only with the last chunk."""
    chunks = [(0, 5, False), (5, 10, False), (10, 15, True)]
    units = [SPACE.final_units(pages(4), start, stop, last=last) for start, stop, last in chunks]
    assert [(lo * 4, min(hi * 4, 15)) for lo, hi in units] == [(0, 4), (4, 8), (8, 15)]
    assert sum(hi - lo for lo, hi in units) == 4


def test_last_with_nothing_new():
    assert SPACE.final_units(pages(4), 15, 15, last=True) == (3, 4)
    assert SPACE.final_units(pages(4), 16, 16, last=True) == (4, 4)
    assert SPACE.final_units(pages(4), 15, 15, last=False) == (3, 3)
    assert SPACE.final_units(pages(4), 0, 0, last=True) == (0, 0)


@given(data=st.data(), size=st.integers(1, 9), prefix=st.integers(0, 30), extra=st.integers(0, 40))
def test_every_unit_is_final_exactly_once_and_never_early(data, size, prefix, extra):
    """Any chunking from any start: the units holding tokens [prefix, end), the prefix's partial unit among them."""
    end = prefix + extra
    cuts = sorted(data.draw(st.lists(st.integers(prefix, end), max_size=5)))
    bounds = [prefix, *cuts, end]
    seen: list[int] = []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        last = n == len(bounds) - 2
        lo, hi = SPACE.final_units(pages(size), start, stop, last=last)
        for unit in range(lo, hi):
            if not last:
                assert all(token < stop for token in range(unit * size, unit * size + size)), "not full yet"
            seen.append(unit)
    # A partial unit of the prefix counts: it is not final until the last chunk or until it is full.
    expected = {token // size for token in range(prefix - prefix % size, end)}
    assert seen == sorted(expected)


@given(size=st.integers(1, 9), length=st.integers(0, 60))
def test_number_of_units_is_the_number_of_distinct_ones(size, length):
    assert SPACE.num_units(pages(size), length) == len({token // size for token in range(length)})
    assert SPACE.first_live(pages(size), length) == 0


def test_slots_are_64_bit_and_follow_the_units():
    """K1: a slot past 2**31 keeps its value."""
    assert slots_of(np.array([7, 3, 9]), 4, 2, 9).tolist() == [30, 31, 12, 13, 14, 15, 36]
    far = slots_of(np.array([2**30]), 16, 0, 1)
    assert far.dtype == np.int64
    assert far.tolist() == [2**34]
    assert slots_of(np.array([5, -1]), 2, 1, 4).tolist() == [11, -1, -1]
    assert slots_of(np.array([5]), 2, 2, 2).tolist() == []


@pytest.mark.parametrize(("start", "stop"), [(0, 5), (-1, 2), (3, 2)])
def test_slots_outside_the_units(start, stop):
    with pytest.raises(RequestError):
        slots_of(np.array([1, 2]), 2, start, stop)


def test_refusals():
    with pytest.raises(ConfigError) as error:
        SPACE.check(pages(4, options=(("window", 8),)))
    assert error.value.fields["options"] == {"window": 8}
    with pytest.raises(ConfigError):
        SPACE.check(SpaceSpec(name="s", kind="sequence", unit="row", tokens_per_unit=0))
    SPACE.check(pages(1))
    with pytest.raises(RequestError):
        SPACE.final_units(pages(4), 5, 4, last=False)
    with pytest.raises(RequestError):
        SPACE.num_units(pages(4), -1)
