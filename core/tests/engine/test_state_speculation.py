"""Speculative steps of models with a state: what is kept of each row, byte by byte, in poisoned memory."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
from msgspec.structs import replace

from kvcore.engine.cache import KVCache
from kvcore.errors import CapacityError, UnsupportedError

ROOMY = {"cache.checkpoints": 3}


@pytest.fixture(params=["page_major", "layer_major"])
def cache(request: pytest.FixtureRequest, chain: ModuleType) -> Iterator[KVCache]:
    with chain.build(**ROOMY, **{"cache.arena": request.param}) as made:
        yield made
        chain.finish(made)


def test_each_row_keeps_the_state_after_its_last_accepted_token(cache: KVCache, chain: ModuleType) -> None:
    """All, some and none of a row, and of a row's first tokens; what is not kept is free again."""
    chain.begin(cache, "a", [1, 2])
    chain.begin(cache, "b", [3])
    chain.begin(cache, "c", [4, 4, 4])
    cache.admit("d", 4)
    used = {part.group: part.used for part in cache.stats().manager.ranges}
    rows = [("a", [5, 6, 7]), ("b", [8, 9]), ("c", [10, 11, 12]), ("d", [13, 14, 15])]
    chain.run(cache, *rows, accepted=[3, 1, 0, 2], speculative=True)
    want = {"a": [1, 2, 5, 6, 7], "b": [3, 8], "c": [4, 4, 4], "d": [13, 14]}
    for name, tokens in want.items():
        chain.check(cache, name, tokens)
    now = {part.group: part.used for part in cache.stats().manager.ranges}
    assert (now["chain"], now["draft/count"]) == (used["chain"], used["draft/count"])
    cache.check_integrity()
    chain.run(cache, *((name, [20, 21]) for name in want), accepted=[0, 1, 2, 0], speculative=True)
    for name, more in zip(want, (0, 1, 2, 0), strict=True):
        chain.check(cache, name, want[name] + [20, 21][:more])


def test_a_first_step_of_which_nothing_is_accepted(cache: KVCache, chain: ModuleType) -> None:
    """Its slot was written; the next step finds it zero."""
    cache.admit("a", 3)
    chain.run(cache, ("a", [1, 2, 3]), accepted=[0], speculative=True)
    assert cache.length("a") == 0
    chain.run(cache, ("a", [7, 8]))
    chain.check(cache, "a", [7, 8])


def test_trails_are_tensors_of_one_address(cache: KVCache, chain: ModuleType) -> None:
    """Distinct zeroed slots for earlier tokens, the row's own for its last; −1 for what is not kept, and past the end."""
    chain.begin(cache, "a", [1, 2])
    chain.begin(cache, "b", [3])
    old = {name: int(cache.units(name, "chain", "slots")[0]) for name in "ab"}
    with cache.begin([("b", 2), ("a", 3)], speculative=True) as step:
        slots, trail = step.state_slots("chain"), step.state_trail("chain")
        address = trail.data_ptr()
        assert len(set(trail.tolist())) == 5
        assert [trail.tolist()[1], trail.tolist()[4]] == slots.tolist()
        assert not set(trail.tolist()) & set(old.values()), "the state before the step is not written"
        for layer in (1, 3):
            h = cache.state("chain").field(layer, "h", "x")
            assert h[slots, 0].tolist() == [chain.fold([3], layer), chain.fold([1, 2], layer)], "a copy, to go on from"
            assert not h[trail[[0, 2, 3]]].any()
        cache.release("b")
        assert step.state_trail("chain").tolist()[:2] == [-1, -1]
        assert -1 not in step.state_trail("chain").tolist()[2:]
        step.abandon()
    with cache.begin([("a", 3)]) as step:
        trail, slots = step.state_trail("chain"), step.state_slots("chain")
        assert trail.data_ptr() == address
        assert trail.tolist() == [-1, -1, *slots.tolist()]
        assert set(trail.as_strided((64,), (1,)).tolist()[3:]) == {-1}
        chain.compute(cache, step, [[4, 5, 6]])
        step.commit()
    chain.check(cache, "a", [1, 2, 4, 5, 6])


def test_tokens_are_rejected_of_speculative_steps_only(cache: KVCache, chain: ModuleType) -> None:
    chain.begin(cache, "a", [1, 2])
    with cache.begin([("a", 2)]) as step:
        chain.compute(cache, step, [[3, 4]])
        for accepted in (0, 1):
            with pytest.raises(UnsupportedError, match="only at the length") as error:
                step.commit([accepted])
            assert "speculatively" in error.value.remedy
        step.commit()
    chain.check(cache, "a", [1, 2, 3, 4])


def test_a_row_released_during_a_speculative_step_leaks_nothing(cache: KVCache, chain: ModuleType) -> None:
    for accepted in ([2, 2], [1, 1], [0, 0], None):
        chain.begin(cache, "a", [1, 2])
        chain.begin(cache, "b", [3])
        with cache.begin([("a", 2), ("b", 2)], speculative=True) as step:
            cache.release("a")
            cache.check_integrity()
            chain.compute(cache, step, [[4, 5], [6, 7]])
            if accepted is None:
                step.abandon()
            else:
                assert [row.request for row in step.commit(accepted)] == ["a"]
        chain.poison(cache)
        cache.check_integrity()
        chain.check(cache, "b", [3, *[6, 7][: accepted[1] if accepted else 0]])
        cache.release("b")
        assert all(part.free == part.capacity for part in cache.stats().manager.ranges)


def test_a_range_whose_trail_nobody_would_write_is_refused(cache: KVCache, chain: ModuleType) -> None:
    """Its state would be the zeroed one of a slot that no kernel knows of, and nothing would say so."""
    chain.begin(cache, "a", [1, 2])
    plan = cache.manager.plan_step([("a", 2)], speculative=True)
    pages = replace(plan.of("full", "pages"), trail=[plan.of("full", "pages").units[0]] * 2)
    with pytest.raises(UnsupportedError, match="after each token") as error:
        cache.store.begin(replace(plan, ranges=(*(part for part in plan.ranges if part.group != "full"), pages)))
    assert (error.value.fields["group"], error.value.fields["range"]) == ("full", "pages")
    cache.manager.abandon(plan, ran=False)
    chain.check(cache, "a", [1, 2])


def test_where_slots_are_short_nothing_is_taken(chain: ModuleType) -> None:
    """4 slots: two requests of 2 tokens need two copies and two trails; there are two."""
    with chain.build() as cache:
        chain.begin(cache, "a", [1])
        chain.begin(cache, "b", [2])
        before = cache.stats().manager
        with pytest.raises(CapacityError) as error:
            cache.begin([("a", 2), ("b", 2)], speculative=True)
        fields = error.value.fields
        assert (fields["needed"], fields["free"], fields["capacity"]) == (4, 2, 4)
        assert "cache.checkpoints" in error.value.remedy
        assert cache.stats().manager == before
        assert cache.manager.get("a").state == "ready"
        chain.run(cache, ("a", [3, 4]), accepted=[1], speculative=True)
        chain.check(cache, "a", [1, 3])
        for name in "ab":
            cache.checkpoint(name)
        cache.admit("c", 1)
        cache.admit("d", 1)
        with pytest.raises(CapacityError) as error:
            cache.begin([("a", 1)])
        assert "checkpoints" in error.value.remedy
        cache.drop_checkpoints("a")
        chain.run(cache, ("a", [5]))
        chain.check(cache, "a", [1, 3, 5])
        cache.check_integrity()
