"""Windows, rings, compressed rows, states and constants in the hands of a manager."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import CapacityError, ConfigError, PromptTooLongError, RequestError, UnsupportedError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import INDEX_SPACES

SPACES = {space.kind: space() for space in INDEX_SPACES}
SPECS = {
    "full": SpaceSpec("full", "sequence", "page", 4),
    "swa": SpaceSpec("swa", "window", "page", 4, (("window", 6),)),
    "csa": SpaceSpec("csa", "compressed", "row", 3),
    "ring": SpaceSpec("ring", "ring", "row", 0, (("ring", 5), ("window", 4))),
    "state": SpaceSpec("state", "per_request", "state_slot", 0),
    "scale": SpaceSpec("scale", "constant", "state_slot", 0),
}


def make(first: int = 0, **usable: int) -> Manager:
    reserved = {"ring": 5, "scale": 2}
    budgets = [
        RangeBudget(name, "units", SPECS[name], count + reserved.get(name, 1), first, (f"{name}/x",))
        for name, count in usable.items()
    ]
    return Manager(budgets, SPACES)


def run(m: Manager, *rows: tuple[str, int], accepted: list[int] | None = None):
    plan = m.plan_step(rows)
    m.commit(plan, accepted)
    return plan


def table(m: Manager, request: str, group: str) -> list[int]:
    return m.units(request, group, "units").tolist()


def live(m: Manager, request: str, group: str) -> list[int]:
    return [unit for unit in table(m, request, group) if unit]


def free(m: Manager) -> dict[str, int]:
    return {part.group: part.free for part in m.stats().ranges}


# --- windows ---


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(1, 12),
    page=st.integers(1, 5),
    prompt=st.integers(1, 50),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=12),
)
def test_after_every_step_every_position_a_query_may_read_is_live(
    size: int, page: int, prompt: int, steps: list[tuple[int, int]]
) -> None:
    """Whatever the steps, and however many of their tokens are rejected; and no more is held than was promised."""
    spec = SpaceSpec("swa", "window", "page", page, (("window", size),))
    most = -(-size // page) + 1
    m = Manager([RangeBudget("swa", "units", spec, 1 + most + 12, 0, ("swa/x",))], SPACES)
    m.admit("a", prompt)
    assert m.stats().ranges[0].used == min(-(-prompt // page), most)
    length = 0
    for count, kept in steps:
        kept = min(kept, count)
        plan = run(m, ("a", count), accepted=[kept])
        row = plan.of("swa", "units").row(0).tolist()
        for position in range(length, length + count):
            for key in range(max(0, position - size + 1), position + 1):
                assert row[key // page] != 0, "a query of the step reads a unit that is not there"
        length += kept
        held = m.units("a", "swa", "units")
        for key in range(max(0, length - size + 1), length):
            assert held[key // page] != 0, "the next query reads a unit that is not there"
        boundary = length // page * page
        for key in range(max(0, boundary - size), boundary):
            assert held[key // page] != 0, "no whole window at the last page boundary"
        ahead = max(0, len(held) - -(-(length + 1) // page))  # of rejected tokens, or of the prompt
        assert np.count_nonzero(held) <= most + ahead
        m.check_integrity()
    m.release("a")
    assert free(m) == {"swa": most + 12}


def test_a_long_prompt_takes_window_units_as_it_is_computed() -> None:
    m = make(full=30, swa=4)
    m.admit("a", 100)
    assert m.get("a").reserved == 100
    assert (len(live(m, "a", "full")), len(live(m, "a", "swa"))) == (25, 3)
    for _ in range(20):
        run(m, ("a", 5))
        m.check_integrity()
    assert len(live(m, "a", "swa")) <= 3
    with pytest.raises(RequestError, match="no step has reached"):
        make_partial(m).payloads("b", 0, 60, last=False)


def make_partial(m: Manager) -> Manager:
    m.release("a")
    m.admit("b", 60)
    run(m, ("b", 5))
    return m


def test_a_step_longer_than_a_window_can_ever_hold_is_refused_for_good() -> None:
    m = make(swa=4)
    m.admit("a", 100)
    before = m.stats()
    with pytest.raises(PromptTooLongError) as error:
        m.plan_step([("a", 17)])
    assert "fewer tokens a step" in error.value.remedy
    assert m.stats() == before
    run(m, ("a", 16))
    m.release("a")
    m.admit("a", 10)
    m.admit("b", 1)
    with pytest.raises(CapacityError):  # not now: it is the other's unit that is missing
        m.plan_step([("a", 16)])


def test_a_late_release_frees_no_unit_of_somebody_else() -> None:
    """F4: a unit that fell dead for one request belongs to another by the time the first one goes."""
    m = make(full=20, swa=6)
    m.admit("a", 8)
    run(m, ("a", 8))
    m.fork("a", "b", 8)
    old = set(live(m, "a", "swa"))
    for _ in range(16):
        run(m, ("a", 1))
    assert old & set(live(m, "b", "swa")) == old, "still the fork's"
    for _ in range(16):
        run(m, ("b", 1))
    m.admit("r", 4)
    others = {*live(m, "b", "swa"), *live(m, "r", "swa")}
    assert old & others, "nothing was reused: the test shows nothing"
    assert table(m, "a", "swa")[:2] == [0, 0], "what fell dead is forgotten, not remembered by its id"
    m.release("a")
    m.check_integrity()
    assert others == {*live(m, "b", "swa"), *live(m, "r", "swa")}
    m.admit("c", 8)
    assert not others & set(live(m, "c", "swa"))
    assert m.stats().ranges[1].used == len(others) + 2
    for name in "brc":
        m.release(name)
    assert free(m) == {"full": 20, "swa": 6}


def test_a_match_at_the_last_page_finds_its_window() -> None:
    """F2: window 127, page 64, 1023 tokens: all 960 tokens of whole pages are shared."""
    spec = SpaceSpec("swa", "window", "page", 64, (("window", 127),))
    full = SpaceSpec("full", "sequence", "page", 64)
    m = Manager([RangeBudget("full", "u", full, 40, 0, ("f",)), RangeBudget("swa", "u", spec, 20, 0, ("s",))], SPACES)
    m.admit("a", 1023)
    for count in [64] * 15 + [63]:
        run(m, ("a", count))
    assert np.flatnonzero(m.units("a", "swa", "u"))[0] * 64 <= 832
    assert m.joint_prefix("a", 960) == 960
    assert m.joint_prefix("a", 832) == 0
    fork = m.fork("a", "b", 960)
    assert fork.length == 960
    assert np.count_nonzero(m.units("b", "swa", "u")) * 64 >= 127
    for name in "ab":
        run(m, (name, 64))
        m.check_integrity()
        m.release(name)
    assert [part.free for part in m.stats().ranges] == [39, 19]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 40])
def test_only_the_final_window_is_offered(chunk: int) -> None:
    m = make(full=20, swa=14)
    m.admit("a", 39)
    offered: dict[str, dict[int, int]] = {"full": {}, "swa": {}}
    for start in range(0, 39, chunk):
        stop = min(start + chunk, 39)
        run(m, ("a", stop - start))
        for payload in m.payloads("a", start, stop, last=stop == 39, total=39):
            new = dict(zip(range(payload.first, payload.stop), payload.ids.tolist(), strict=True))
            assert not new.keys() & offered[payload.group].keys(), "offered twice"
            offered[payload.group] |= new
    assert offered["full"] == dict(enumerate(table(m, "a", "full")))
    pages = {position // 4 for position in range(39 - 5, 39)}
    assert offered["swa"] == {n: table(m, "a", "swa")[n] for n in pages}
    with pytest.raises(RequestError):
        m.payloads("a", 0, 39, last=True, total=38)


def test_destinations_name_what_arrives_and_nothing_else() -> None:
    m = make(full=20, swa=5, csa=9, ring=10, state=2, scale=0)
    m.admit("a", 14, external=True)
    found = {group: ids.tolist() for (group, _), ids in m.destinations("a", 14).items()}
    assert found["full"] == table(m, "a", "full")
    assert found["swa"] == [-1, -1, *table(m, "a", "swa")[2:]]
    assert found["csa"] == table(m, "a", "csa")
    assert len(found["csa"]) == 4  # 14 tokens, 3 a row
    rows = table(m, "a", "ring")
    assert found["ring"] == [-1, rows[1], rows[2], rows[3], -1]  # tokens 11, 12 and 13, which a query at 14 sees
    assert found["state"] == table(m, "a", "state")
    assert found["scale"] == []
    m.admit("b", 2, external=True)  # two rows of its ring are written, the others are not
    assert m.destinations("b", 2)["ring", "units"].tolist() == [*table(m, "b", "ring")[:2], -1, -1, -1]
    m.set_length("b", 2)
    plan = m.plan_step([("b", 1)])
    assert plan.of("ring", "units").fresh.tolist() == table(m, "b", "ring")[2:]
    assert plan.of("state", "units").fresh.tolist() == []


# --- rings ---


@settings(max_examples=40, deadline=None)
@given(data=st.data(), first=st.sampled_from([0, 7]))
def test_a_ring_is_one_piece_at_a_state_slot(data: st.DataObject, first: int) -> None:
    """``first + state_slot * ring``, slot 0 left out, whatever was admitted, forked, written and released before."""
    m = make(first, ring=20)
    names = iter("abcdefghijklmnopqrstuvwxyz" * 9)
    for _ in range(data.draw(st.integers(1, 14))):
        ids = [request.id for request in m.requests]
        action = data.draw(st.sampled_from(["admit", "fork", "step", "release"]))
        try:
            if action == "admit":
                m.admit(next(names), 3)
            elif ids:
                name = data.draw(st.sampled_from(ids))
                if action == "release":
                    m.release(name)
                elif action == "step":
                    run(m, (name, 2))
                elif m.get(name).length:
                    m.fork(name, next(names), m.get(name).length)
        except CapacityError:
            pass
        m.check_integrity()
        for request in m.requests:
            units = m.units(request.id, "ring", "units")
            if len(units):
                slot, rest = divmod(int(units[0]) - first, 5)
                assert (slot >= 1, rest) == (True, 0)
                assert units.tolist() == [first + slot * 5 + n for n in range(5)]


def test_a_ring_goes_back_over_as_many_tokens_as_it_has_to_spare() -> None:
    """5 rows for a window of 4: two rejected tokens leave all that is seen, three do not."""
    m = make(ring=10)
    m.admit("a", 9)
    run(m, ("a", 9))
    run(m, ("a", 4), accepted=[2])
    plan = m.plan_step([("a", 4)])
    before = m.stats()
    with pytest.raises(UnsupportedError) as error:
        m.commit(plan, [1])
    assert error.value.fields["group"] == "ring"
    assert m.stats() == before
    assert m.get("a").length == 11
    m.commit(plan)
    assert m.joint_prefix("a", 13) == 13
    assert m.joint_prefix("a", 12) == 0


@pytest.mark.parametrize("how", ["rejected", "abandoned", "forked"])
def test_a_ring_remembers_what_was_written_past_its_length(how: str) -> None:
    """5 rows, window 4: tokens 11 and 12, which came to nothing, lie where 6 and 7 did. Going back to 10 needs 7."""
    m = make(ring=10)
    m.admit("a", 11)
    run(m, ("a", 11))
    assert m.joint_prefix("a", 10) == 10
    plan = m.plan_step([("a", 2)])
    if how == "abandoned":
        m.abandon(plan)
    else:
        m.commit(plan, [0])
    name = "a"
    if how == "forked":
        m.fork("a", "b", 11)
        name = "b"
    assert m.joint_prefix(name, 11) == 11
    assert m.get(name).state == "ready"
    before = m.stats()
    with pytest.raises(UnsupportedError):
        m.rollback(name, 1)
    with pytest.raises(UnsupportedError):
        m.fork(name, "c", 10)
    assert m.stats() == before


# --- states ---


def test_a_joint_prefix_is_what_every_range_can_serve() -> None:
    """G4: 64 tokens of attention without a state are no hit at all."""
    m = make(full=40, state=4)
    m.admit("a", 70)
    run(m, ("a", 70))
    assert m.joint_prefix("a", 64) == 0
    assert m.joint_prefix("a", 70) == m.joint_prefix("a", 99) == 70
    before = m.stats()
    with pytest.raises(UnsupportedError) as error:
        m.fork("a", "b", 64)
    assert error.value.fields["group"] == "state"
    assert m.stats() == before
    m.fork("a", "b", 70)
    assert table(m, "a", "state") == table(m, "b", "state")
    m.fork("a", "c", 0)
    assert table(m, "c", "state") == []
    copies = run(m, ("b", 1), ("c", 1)).of("state", "units")
    assert copies.copies_src.tolist() == table(m, "a", "state")
    assert copies.fresh.tolist() == table(m, "c", "state")
    m.check_integrity()


def test_a_checkpoint_does_not_bring_back_a_window() -> None:
    """M1: the state could go back to either checkpoint, full attention too, the window only to where it is whole."""
    m = make(full=40, swa=8, state=6)
    m.admit("a", 4)
    run(m, ("a", 4))
    m.checkpoint("a")
    for count in (8, 8):
        run(m, ("a", count))
    m.checkpoint("a")
    run(m, ("a", 3))
    before = m.stats(), table(m, "a", "full"), table(m, "a", "swa"), table(m, "a", "state")
    with pytest.raises(UnsupportedError) as error:
        m.rollback("a", 19)
    assert error.value.fields["group"] == "swa"
    assert error.value.fields["checkpoints"] == [4, 20]
    assert (m.stats(), table(m, "a", "full"), table(m, "a", "swa"), table(m, "a", "state")) == before
    assert m.rollback("a", 3).length == m.get("a").reserved == 20
    assert [len(table(m, "a", group)) for group in ("full", "swa", "state")] == [5, 5, 1]
    m.check_integrity()
    for position in range(20 - 5, 20):
        assert table(m, "a", "swa")[position // 4] != 0
    run(m, ("a", 5))
    m.check_integrity()


def test_rejected_tokens_are_refused_where_a_state_would_keep_them() -> None:
    """M1: nothing changes its length then."""
    m = make(full=10, state=2)
    m.admit("a", 5)
    run(m, ("a", 3))
    plan = m.plan_step([("a", 2)])
    for accepted in (1, 0):
        with pytest.raises(UnsupportedError):
            m.commit(plan, [accepted])
    assert m.get("a").length == 3
    m.commit(plan, [2])
    assert m.get("a").length == 5


def test_an_abandoned_step_spoils_a_state_it_may_have_written() -> None:
    m = make(full=10, state=3)
    m.admit("a", 4)
    m.abandon(m.plan_step([("a", 4)]))  # from nothing: it is zeroed again
    assert m.plan_step([("a", 4)]).of("state", "units").fresh.tolist() == table(m, "a", "state")
    m.release("a")
    m.admit("b", 4)
    run(m, ("b", 4))
    m.abandon(m.plan_step([("b", 1)]), ran=False)
    run(m, ("b", 1))
    m.abandon(m.plan_step([("b", 1)]))
    assert m.get("b").state == "spoiled"
    for call in (
        lambda: m.plan_step([("b", 1)]),
        lambda: m.fork("b", "c", 5),
        lambda: m.payloads("b", 0, 5, last=True),
        lambda: m.joint_prefix("b", 5),
    ):
        with pytest.raises(RequestError, match="overwritten the state"):
            call()
    m.release("b")
    assert free(m)["state"] == 2  # one is still in the open step of "a"


# --- compressed rows and constants ---


def test_rows_of_whole_ratios_are_allocated_and_written() -> None:
    m = make(full=10, csa=5)
    m.admit("a", 8)
    assert len(table(m, "a", "csa")) == 2
    plan = run(m, ("a", 2)).of("csa", "units")
    assert (plan.units.tolist(), plan.fresh.tolist()) == ([], [])
    plan = run(m, ("a", 5)).of("csa", "units")
    assert plan.fresh.tolist() == plan.units.tolist() == table(m, "a", "csa")
    assert run(m, ("a", 1)).of("csa", "units").fresh.tolist() == []
    assert len(table(m, "a", "csa")) == 2
    run(m, ("a", 1))
    assert len(table(m, "a", "csa")) == 3
    m.check_integrity()


def test_a_constant_is_nobodys() -> None:
    m = make(full=4, scale=0)
    assert free(m) == {"full": 4, "scale": 0}
    assert m.free_units("scale", "units").tolist() == []
    m.admit("a", 5)
    run(m, ("a", 5))
    assert table(m, "a", "scale") == []
    (payload,) = [p for p in m.payloads("a", 0, 5, last=True) if p.group == "scale"]
    assert (payload.components, payload.num_units) == (("scale/x",), 0)
    m.check_integrity()
    m.release("a")
    with pytest.raises(ConfigError) as error:
        Manager([RangeBudget("scale", "units", SPECS["scale"], 1, 0, ("x",))], SPACES)
    assert error.value.fields["expected"] == 2
