"""The manager knows no space by name: a window and a per-request state, made up here, work through the same calls."""

from __future__ import annotations

import pytest

from kvcore.contract import IndexSpace
from kvcore.errors import PromptTooLongError, UnsupportedError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import SequenceSpace


class Window(IndexSpace):
    kind = "window"

    def num_units(self, spec, length):
        return -(-length // spec.tokens_per_unit)

    def first_live(self, spec, length):
        return max(0, length - spec.option("window") + 1) // spec.tokens_per_unit

    def final_units(self, spec, start, stop, *, last):
        return start // spec.tokens_per_unit, self.num_units(spec, stop) if last else stop // spec.tokens_per_unit


class State(IndexSpace):
    kind = "state"

    def num_units(self, spec, length):
        return 1

    def first_live(self, spec, length):
        return 0

    def final_units(self, spec, start, stop, *, last):
        return 0, int(last)


SPACES = {space.kind: space for space in (SequenceSpace(), Window(), State())}
WINDOW = SpaceSpec("swa", "window", "page", 4, (("window", 6),))
STATE = SpaceSpec("state", "state", "state_slot", 0)


def make(**capacity):
    specs = {"full": SpaceSpec("full", "sequence", "page", 4), "swa": WINDOW, "state": STATE}
    return Manager([RangeBudget(n, "units", specs[n], c + 1, 0, (f"{n}/x",)) for n, c in capacity.items()], SPACES)


def run(m, request, count):
    plan = m.plan_step([(request, count)])
    m.commit(plan)
    return plan


def live(m, request, group):
    return [unit for unit in m.units(request, group, "units").tolist() if unit]


def test_units_behind_the_window_are_released_and_read_as_null():
    m = make(full=10, swa=10)
    m.admit("a", 4)
    run(m, "a", 4)
    for length in range(5, 30):
        plan = run(m, "a", 1)
        # A query at `length` sees positions (length - 6, length]: compare with the pages of exactly those that exist.
        pages = {position // 4 for position in range(max(0, length - 5), length)}
        table = m.units("a", "swa", "units").tolist()
        assert {n for n, unit in enumerate(table) if unit} == pages
        assert len(live(m, "a", "full")) == -(-length // 4)
        assert plan.of("swa", "units").row(0).tolist()[:1] in ([0], [1])
        m.check_integrity()
    assert m.stats().ranges[1].used == len(pages)
    m.release("a")
    assert [r.free for r in m.stats().ranges] == [10, 10]


def test_units_a_step_reads_stay_until_it_is_committed():
    m = make(swa=6)
    m.admit("a", 24)
    plan = m.plan_step([("a", 20)])
    assert 0 not in plan.of("swa", "units").row(0).tolist()
    m.commit(plan)
    assert len(live(m, "a", "swa")) == 3  # positions 15..19, and the unit reserved for 20..23
    m.check_integrity()


def test_admission_counts_what_must_be_held_at_once():
    m = make(swa=3)
    with pytest.raises(PromptTooLongError):
        m.admit("a", 13)
    m.admit("a", 13, external=True)  # a transfer fills the final window only
    m.set_length("a", 13)
    assert m.units("a", "swa", "units").tolist()[:2] == [0, 0]
    assert m.stats().ranges[0].used == 2
    (payload,) = m.payloads("a", 0, 13, last=True)
    assert (payload.first, payload.ids.tolist()) == (2, live(m, "a", "swa"))
    for _ in range(20):
        run(m, "a", 1)
    m.check_integrity()


def test_no_going_back_behind_the_window():
    m = make(full=10, swa=10)
    m.admit("a", 20)
    run(m, "a", 20)
    before = m.stats()
    for call in (lambda: m.truncate("a", 12), lambda: m.fork("a", "b", 12)):
        with pytest.raises(UnsupportedError) as error:
            call()
        assert error.value.fields["group"] == "swa"
        assert m.stats() == before
    m.fork("a", "b", 18)
    m.truncate("a", 17)
    run(m, "b", 9)
    m.check_integrity()


def test_a_state_is_one_unit_copied_on_write_and_valid_at_its_length_only():
    m = make(full=10, state=3)
    m.admit("a", 6)
    assert run(m, "a", 6).of("state", "units").fresh.tolist() == live(m, "a", "state")
    assert run(m, "a", 1).of("state", "units").fresh.tolist() == []
    for call in (lambda: m.truncate("a", 6), lambda: m.fork("a", "b", 6)):
        with pytest.raises(UnsupportedError) as error:
            call()
        assert error.value.fields["group"] == "state"
    m.fork("a", "b", 7)
    assert live(m, "a", "state") == live(m, "b", "state")
    copies = run(m, "b", 1).of("state", "units")
    assert copies.copies_src.tolist() == live(m, "a", "state")
    assert copies.copies_dst.tolist() == live(m, "b", "state")
    assert m.max_request_tokens == 40  # per-request units bound requests, not tokens
    assert m.can_admit(4)
    m.admit("c", 4)
    assert not m.can_admit(4)
    m.check_integrity()


@pytest.mark.parametrize("back", ["rollback", "truncate", "fork"])
def test_no_tokens_have_no_state_though_the_space_holds_a_unit_for_them(back):
    """G1: this space has its unit from the start. What earlier tokens left in it is not the state of none."""
    m = make(full=10, state=3)
    m.admit("a", 6)
    run(m, "a", 6)
    m.checkpoint("a")
    old = live(m, "a", "state")
    name = "a"
    if back == "rollback":
        m.rollback("a", 6)
    elif back == "truncate":
        m.truncate("a", 0)
    else:
        m.fork("a", name := "b", 0)
    m.check_integrity()
    plan = m.plan_step([(name, 2)]).of("state", "units")
    assert plan.fresh.tolist() == live(m, name, "state")
    assert (plan.copies_src.tolist(), len(plan.fresh)) == ([], 1)
    assert back != "fork" or not set(old) & set(live(m, "b", "state"))
    m.check_integrity()


def test_state_is_final_once_at_the_end():
    m = make(state=3)
    m.admit("a", 9)
    run(m, "a", 9)
    assert [p.num_units for p in m.payloads("a", 0, 5, last=False)] == [0]
    assert [p.num_units for p in m.payloads("a", 5, 9, last=True)] == [1]
