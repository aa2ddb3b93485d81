"""The request life cycle: what each call does, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest

from kvcore.errors import (
    CapacityError,
    ConfigError,
    DuplicateRequestError,
    EmptyPromptError,
    IntegrityError,
    PromptTooLongError,
    RequestError,
    StaleHandleError,
    UnknownRequestError,
)
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import SequenceSpace
from kvcore.requests.stepplan import StepPlan

SPACES = {"sequence": SequenceSpace()}


def budget(capacity, page=4, group="full", first=0, **kwargs):
    space = SpaceSpec(name=group, kind="sequence", unit="page", tokens_per_unit=page)
    return RangeBudget(group, "pages", space, capacity + 1, first, (f"{group}/kv",), **kwargs)


def manager(capacity=8, page=4, **kwargs):
    return Manager([budget(capacity, page)], SPACES, **kwargs)


def snapshot(m):
    return (
        m.stats(),
        [(r.id, r.generation, r.length, r.reserved, r.state) for r in m.requests],
        [m.units(r.id, "full", "pages").tolist() for r in m.requests],
        m.free_units("full", "pages").tolist(),
    )


def run(m, request, count):
    plan = m.plan_step([(request, count)])
    assert m.commit(plan) == ()
    return plan


def test_life_of_a_request():
    m = manager()
    r = m.admit("a", 6)
    assert (r.length, r.reserved, r.state) == (0, 6, "ready")
    assert m.units("a", "full", "pages").tolist() == [1, 2]
    plan = m.plan_step([("a", 5)])
    assert r.state == "in_step"
    pages = plan.of("full", "pages")
    assert pages.row(0).tolist() == [1, 2]
    assert pages.fresh.tolist() == [1, 2]
    m.commit(plan)
    assert (r.length, r.reserved, r.state) == (5, 6, "ready")
    plan = m.plan_step([("a", 4)])  # past what was reserved, into a third page
    pages = plan.of("full", "pages")
    assert pages.row(0).tolist() == [1, 2, 3]
    assert pages.fresh.tolist() == [3]  # the page that holds token 4 keeps it
    m.commit(plan)
    assert (r.length, r.reserved) == (9, 9)
    m.release("a")
    assert r.state == "released"
    assert m.stats().ranges[0].free == 8
    assert "a" not in m
    m.check_integrity()


def test_views_follow_their_request_and_outlive_it():
    m = manager()
    first = m.admit("a", 4)
    m.release("a")
    second = m.admit("a", 4)
    assert first.state == "released"
    assert second.state == "ready"
    assert second.generation > first.generation
    assert m.get("a") is second
    with pytest.raises(StaleHandleError):
        m.get("a", generation=first.generation)


def test_region_unit_ids_are_global_in_the_region():
    m = Manager([budget(3, group="a"), budget(3, group="b", first=50)], SPACES)
    m.admit("x", 5)
    assert m.units("x", "a", "pages").tolist() == [1, 2]
    assert m.units("x", "b", "pages").tolist() == [51, 52]
    plan = m.plan_step([("x", 5)])
    assert plan.of("b", "pages").fresh.tolist() == [51, 52]
    m.check_integrity()


def test_page_table_lists_only_what_the_step_needs():
    m = manager()
    m.admit("a", 16)
    assert m.plan_step([("a", 5)]).of("full", "pages").row(0).tolist() == [1, 2]


# --- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_id", "tokens", "error"),
    [
        ("b", 0, EmptyPromptError),
        ("b", -3, EmptyPromptError),
        ("b", 33, PromptTooLongError),
        ("a", 33, PromptTooLongError),
        ("a", 1, DuplicateRequestError),
        ("b", 25, CapacityError),  # would fit an empty cache
    ],
)
def test_refused_admission_changes_nothing(request_id, tokens, error):
    m = manager(8)
    m.admit("a", 8)
    before = snapshot(m)
    with pytest.raises(error) as raised:
        m.admit(request_id, tokens)
    assert type(raised.value) is error
    assert raised.value.fields["request"] == request_id
    assert raised.value.remedy
    assert snapshot(m) == before
    m.check_integrity()


def test_too_long_says_how_long_it_may_be():
    m = Manager([budget(8, page=4, group="a"), budget(3, page=8, group="b")], SPACES)
    assert m.max_request_tokens == 24
    m.admit("x", 24)
    m.release("x")
    with pytest.raises(PromptTooLongError) as error:
        m.admit("x", 25)
    assert error.value.fields["max_tokens"] == 24
    assert error.value.fields["group"] == "b"


def test_shortage_in_one_range_takes_nothing_in_another():
    m = Manager([budget(8, page=4, group="a"), budget(3, page=8, group="b")], SPACES)
    m.admit("x", 16)
    before = m.stats()
    with pytest.raises(CapacityError) as error:
        m.admit("y", 9)
    assert (error.value.fields["group"], error.value.fields["needed"], error.value.fields["free"]) == ("b", 2, 1)
    assert m.stats() == before
    assert not m.can_admit(9)
    assert m.can_admit(8)


def test_headroom_is_kept_in_whole_units():
    m = manager(4)
    assert m.can_admit(12, headroom_tokens=4)
    assert m.can_admit(13)
    assert not m.can_admit(13, headroom_tokens=1)  # raw counting: 14 of 16 tokens
    assert not m.can_admit(0)
    assert not m.can_admit(1, headroom_tokens=-1)
    assert m.can_admit(16, headroom_tokens=0)


def test_max_requests_bounds_admission_and_forks():
    m = manager(8, max_requests=2)
    m.admit("a", 1)
    run(m, "a", 1)
    m.admit("b", 1)
    assert not m.can_admit(1)
    before = snapshot(m)
    with pytest.raises(CapacityError) as error:
        m.admit("c", 1)
    assert error.value.fields["max_requests"] == 2
    with pytest.raises(CapacityError):
        m.fork("a", "c", 1)
    assert snapshot(m) == before
    m.release("b")
    m.fork("a", "c", 1)
    with pytest.raises(ConfigError):
        manager(8, max_requests=0)


# --- external requests -----------------------------------------------------------------------------------------------


def test_external_units_are_not_zeroed_until_the_filler_is_done():
    m = manager()
    r = m.admit("a", 11, external=True)
    assert r.state == "filling"
    with pytest.raises(RequestError, match="still being filled"):
        m.plan_step([("a", 1)])
    m.set_length("a", 4)
    m.set_length("a", 6)
    assert r.length == 6
    plan = m.plan_step([("a", 5)])
    # Page 2 was never filled, though held: whatever it contains is somebody else's.
    assert plan.of("full", "pages").fresh.tolist() == [3]
    m.commit(plan)
    assert r.state == "ready"
    with pytest.raises(RequestError, match="external"):
        m.set_length("a", 11)


def test_units_reserved_while_filling_are_filled_too():
    m = manager()
    m.admit("a", 4, external=True)
    m.reserve("a", 8)
    m.set_length("a", 6)
    assert run(m, "a", 1).of("full", "pages").fresh.tolist() == []  # the page holds tokens 4 and 5


@pytest.mark.parametrize("end", [lambda m: m.fork("a", "b", 2), lambda m: m.truncate("a", 5)])
def test_fork_and_truncation_end_the_filling(end):
    """A transfer that went on would write pages that another request may own by then."""
    m = manager()
    m.admit("a", 12, external=True)
    with pytest.raises(RequestError, match="still being filled"):
        end(m)
    m.set_length("a", 5)
    end(m)
    with pytest.raises(RequestError, match="external"):
        m.set_length("a", 6)
    assert run(m, "a", 4).of("full", "pages").fresh.tolist() == [3]
    m.check_integrity()


@pytest.mark.parametrize("length", [-1, 3, 12])
def test_set_length_outside_what_is_held(length):
    m = manager()
    m.admit("a", 11, external=True)
    m.set_length("a", 4)
    with pytest.raises(RequestError):
        m.set_length("a", length)
    assert m.get("a").length == 4


def test_set_length_never_shows_unwritten_units():
    m = manager()
    m.admit("a", 8)
    with pytest.raises(RequestError):
        m.set_length("a", 8)


# --- reserve, truncate -----------------------------------------------------------------------------------------------


def test_reserve_takes_whole_units_or_nothing():
    m = manager(4)
    m.admit("a", 3)
    run(m, "a", 3)
    assert m.reserve("a", 1).reserved == 4
    assert m.stats().ranges[0].used == 1
    assert m.reserve("a", 2).reserved == 5
    assert m.stats().ranges[0].used == 2
    assert m.reserve("a", 0).reserved == 5
    m.admit("b", 5)
    before = snapshot(m)
    with pytest.raises(CapacityError):
        m.reserve("a", 6)
    with pytest.raises(PromptTooLongError):  # no retraction of others would ever help
        m.reserve("a", 14)
    with pytest.raises(RequestError):
        m.reserve("a", -1)
    assert snapshot(m) == before
    m.check_integrity()


def test_truncate_keeps_the_unit_the_length_falls_into():
    m = manager()
    m.admit("a", 16)
    run(m, "a", 11)
    assert m.truncate("a", 6).length == 6
    assert m.get("a").reserved == 6
    assert m.units("a", "full", "pages").tolist() == [1, 2]
    for length in (7, -1):
        with pytest.raises(RequestError):
            m.truncate("a", length)
    m.truncate("a", 0)
    assert m.stats().ranges[0].free == 8
    run(m, "a", 1)
    m.check_integrity()


# --- steps -----------------------------------------------------------------------------------------------------------


def test_step_is_all_or_nothing_over_rows_and_ranges():
    m = Manager([budget(8, page=4, group="a"), budget(3, page=8, group="b")], SPACES)
    m.admit("x", 8)
    m.admit("y", 8)
    m.commit(m.plan_step([("x", 8), ("y", 8)]))
    before = m.stats()
    with pytest.raises(CapacityError) as error:
        m.plan_step([("x", 1), ("y", 1)])  # one unit of b left, two needed
    assert (error.value.fields["group"], error.value.fields["needed"], error.value.fields["free"]) == ("b", 2, 1)
    assert m.stats() == before
    assert m.get("x").state == "ready"
    m.commit(m.plan_step([("x", 1)]))
    with pytest.raises(PromptTooLongError):
        m.plan_step([("x", 17)])
    m.check_integrity()


@pytest.mark.parametrize("rows", [[("a", 0)], [("a", -1)], [("a", 1), ("a", 1)], [("a", 1), ("zz", 1)]])
def test_refused_step_changes_nothing(rows):
    m = manager()
    m.admit("a", 4)
    m.fork("a", "b", 0)
    before = snapshot(m)
    with pytest.raises(RequestError):
        m.plan_step(rows)
    assert snapshot(m) == before


def test_step_without_rows_is_legal():
    m = manager()
    plan = m.plan_step([])
    assert plan.of("full", "pages").indptr.tolist() == [0]
    assert m.commit(plan) == ()


def test_requests_are_in_one_open_step_at_most_and_steps_may_overlap():
    m = manager()
    for request in "ab":
        m.admit(request, 4)
    first = m.plan_step([("a", 2)])
    second = m.plan_step([("b", 3)])
    assert second.step > first.step
    assert m.stats().open_steps == 2
    before = snapshot(m)
    for call in (
        lambda: m.plan_step([("a", 1)]),
        lambda: m.reserve("a", 1),
        lambda: m.truncate("a", 0),
        lambda: m.fork("a", "c", 0),
        lambda: m.set_length("a", 0),
    ):
        with pytest.raises(RequestError) as error:
            call()
        assert error.value.fields["step"] == first.step
    assert snapshot(m) == before
    m.check_integrity()
    m.commit(second)
    m.commit(first)
    assert [r.length for r in m.requests] == [2, 3]


def test_copies_count_as_needed_units():
    m = manager(3)
    m.admit("a", 6)
    run(m, "a", 6)
    m.fork("a", "b", 6)
    before = snapshot(m)
    with pytest.raises(CapacityError) as error:
        m.plan_step([("a", 1), ("b", 1)])
    assert (error.value.fields["needed"], error.value.fields["free"]) == (2, 1)
    assert snapshot(m) == before
    run(m, "b", 1)  # alone it gets the copy, and then "a" writes in place
    run(m, "a", 1)
    m.check_integrity()


def test_accepted_is_per_row():
    m = manager(9)
    for request in "abc":
        m.admit(request, 9)
    plan = m.plan_step([(request, 9) for request in "cab"])
    for wrong in ([1, 2], [1, 2, 10], [-1, 2, 3]):
        with pytest.raises(RequestError):
            m.commit(plan, wrong)
    m.commit(plan, [0, 4, 9])
    assert {r.id: r.length for r in m.requests} == {"c": 0, "a": 4, "b": 9}
    assert all(r.reserved == 9 for r in m.requests)


def test_units_of_rejected_tokens_alone_are_fresh_again():
    m = manager()
    m.admit("a", 12)
    assert run(m, "a", 2).of("full", "pages").fresh.tolist() == [1]
    plan = m.plan_step([("a", 10)])
    assert plan.of("full", "pages").fresh.tolist() == [2, 3]
    m.commit(plan, [3])
    assert m.plan_step([("a", 7)]).of("full", "pages").fresh.tolist() == [3]


def test_abandoned_step_leaves_lengths_and_freshness():
    m = manager()
    m.admit("a", 5)
    plan = m.plan_step([("a", 5)])
    assert m.abandon(plan) == ()
    assert (m.get("a").length, m.get("a").state) == (0, "ready")
    m.check_integrity()
    again = m.plan_step([("a", 3)])
    assert again.of("full", "pages").fresh.tolist() == [1]
    m.commit(again)
    assert m.plan_step([("a", 2)]).of("full", "pages").fresh.tolist() == [2]


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_a_step_ends_once(end):
    m = manager()
    m.admit("a", 5)
    plan = m.plan_step([("a", 2)])
    getattr(m, end)(plan)
    for call in (m.commit, m.abandon):
        with pytest.raises(StaleHandleError):
            call(plan)
    assert m.get("a").length == (2 if end == "commit" else 0)


def test_a_foreign_plan_is_stale():
    m, other = manager(), manager()
    for x in (m, other):
        x.admit("a", 5)
    foreign = other.plan_step([("a", 3)])
    mine = m.plan_step([("a", 2)])
    assert foreign.step == mine.step
    with pytest.raises(StaleHandleError):
        m.commit(foreign)
    assert m.commit(StepPlan.decode(mine.encode())) == ()
    assert m.get("a").length == 2


# --- release, hold ---------------------------------------------------------------------------------------------------


def test_second_release_is_a_typed_error_and_frees_nothing():
    m = manager()
    old = m.admit("a", 4)
    m.release("a")
    with pytest.raises(UnknownRequestError):
        m.release("a")
    m.admit("a", 4)
    with pytest.raises(StaleHandleError):
        m.release("a", generation=old.generation)
    assert m.stats().ranges[0].used == 1
    m.release("a", generation=m.get("a").generation)
    assert m.stats().ranges[0].free == 8


@pytest.mark.parametrize("call", ["release", "hold", "truncate", "fork", "reserve", "set_length", "units", "get"])
def test_unknown_requests(call):
    m = manager()
    m.admit("request-1", 1)
    more = {"truncate": (0,), "fork": ("b", 0), "reserve": (1,), "set_length": (1,), "units": ("full", "pages")}
    with pytest.raises(UnknownRequestError) as error:
        getattr(m, call)("request-2", *more.get(call, ()))
    assert "request-1" in error.value.remedy


def test_held_units_are_not_allocatable_until_the_copy_is_over():
    m = manager(4)
    m.admit("a", 8)
    hold = m.hold("a")
    m.release("a")
    assert (m.stats().ranges[0].free, m.stats().ranges[0].quarantined) == (2, 2)
    assert not m.can_admit(9)
    m.check_integrity()
    assert m.admit("b", 8).reserved == 8
    assert not set(m.units("b", "full", "pages")) & {1, 2}
    hold.release()
    hold.release()
    assert m.stats().ranges[0].free == 2
    with m.hold("b"):
        m.release("b")
        assert m.stats().ranges[0].quarantined == 2
    assert m.stats().ranges[0].free == 4
    m.check_integrity()


def test_hold_while_the_owner_lives_on():
    m = manager(4)
    m.admit("a", 8)
    with m.hold("a"):
        run(m, "a", 5)
        m.truncate("a", 2)
        assert m.stats().ranges[0].quarantined == 1
    assert m.stats().ranges[0].free == 3
    m.check_integrity()


# --- payloads --------------------------------------------------------------------------------------------------------


def test_payloads_of_chunks_list_each_unit_once():
    """J8: 15 tokens in chunks of 5, page 4."""
    m = manager()
    m.admit("a", 15)
    seen = []
    for start, stop in ((0, 5), (5, 10), (10, 15)):
        run(m, "a", stop - start)
        (payload,) = m.payloads("a", start, stop, last=stop == 15)
        assert payload.components == ("full/kv",)
        assert payload.first == len(seen)
        seen += payload.ids.tolist()
    assert seen == m.units("a", "full", "pages").tolist()
    assert len(seen) == 4


def test_payloads_cover_every_range_also_without_units():
    m = Manager([budget(8, page=4, group="a"), budget(3, page=8, group="b", first=20)], SPACES)
    m.admit("x", 7)
    run(m, "x", 7)
    first, second = m.payloads("x", 0, 7, last=False)
    assert (first.group, first.ids.tolist()) == ("a", [1])
    assert (second.group, second.ids.tolist()) == ("b", [])
    whole = m.payloads("x", 0, 7, last=True)
    assert [p.ids.tolist() for p in whole] == [[1, 2], [21]]
    for start, stop in ((0, 8), (-1, 2), (3, 2)):
        with pytest.raises(RequestError):
            m.payloads("x", start, stop, last=True)


# --- construction, integrity -----------------------------------------------------------------------------------------


def test_bad_budgets():
    with pytest.raises(ConfigError):
        Manager([], SPACES)
    with pytest.raises(ConfigError):
        Manager([budget(3), budget(3)], SPACES)
    with pytest.raises(ConfigError) as error:
        Manager([budget(0)], SPACES)
    assert error.value.fields["num_units"] == 1
    wrong = SpaceSpec(name="full", kind="sequense", unit="page", tokens_per_unit=4)
    with pytest.raises(ConfigError, match="sequence"):
        Manager([RangeBudget("full", "pages", wrong, 9, 0, ())], SPACES)
    optional = SpaceSpec(name="full", kind="sequence", unit="page", tokens_per_unit=4, options=(("window", 3),))
    with pytest.raises(ConfigError):
        Manager([RangeBudget("full", "pages", optional, 9, 0, ())], SPACES)
    with pytest.raises(ConfigError, match="full/pages"):
        manager().free_units("full", "page")


def _lose_a_reference(m):
    m.get("a")._tables["full", "pages"] = m.get("a")._tables["full", "pages"][:1]
    m.get("a")._reserved = 4


def _share_without_counting(m):
    m.get("b")._tables["full", "pages"][0] = m.get("a")._tables["full", "pages"][0]


def _table_too_short(m):
    m.get("a")._reserved = 40


def _forget_a_hold(m):
    m._holds.clear()


@pytest.mark.parametrize("harm", [_lose_a_reference, _share_without_counting, _table_too_short, _forget_a_hold])
def test_check_integrity_sees_damage(harm):
    m = manager()
    m.admit("a", 8)
    m.admit("b", 8)
    _hold = m.hold("a")
    m.check_integrity()
    harm(m)
    with pytest.raises(IntegrityError):
        m.check_integrity()


def test_units_is_a_copy():
    m = manager()
    m.admit("a", 8)
    m.units("a", "full", "pages")[:] = 7
    assert m.units("a", "full", "pages").tolist() == [1, 2]
    assert m.units("a", "full", "pages").dtype == np.int64
