"""Deadlines against a plain scan of all of them; and how much is looked at for it."""

from __future__ import annotations

import weakref

from hypothesis import given
from hypothesis import strategies as st

from kvcore.transfer.session.deadlines import Deadlines

KEYS = st.integers(0, 5)
TIMES = st.integers(0, 20).map(float)
CALLS = st.one_of(
    st.tuples(st.just("set"), KEYS, TIMES), st.tuples(st.just("drop"), KEYS), st.tuples(st.just("due"), TIMES)
)


@given(st.lists(CALLS, max_size=200))
def test_what_is_due_is_what_a_scan_finds(calls: list[tuple]) -> None:
    deadlines: Deadlines[int] = Deadlines()
    plain: dict[int, float] = {}
    for call, *arguments in calls:
        if call == "set":
            deadlines.set(*arguments)
            plain[arguments[0]] = arguments[1]
        elif call == "drop":
            deadlines.drop(*arguments)
            plain.pop(arguments[0], None)
        else:
            (now,) = arguments
            due = deadlines.due(now)
            assert sorted(due) == sorted(key for key, when in plain.items() if when <= now)
            assert [plain[key] for key in due] == sorted(plain[key] for key in due)
            for key in due:
                del plain[key]
        assert len(deadlines) == len(plain)
        assert all((key in deadlines) == (key in plain) for key in range(6))


def test_renewing_and_looking_costs_nothing_until_something_comes_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(4000):
        deadlines.set(key, 30.0)
    for now in range(29):
        for key in range(0, 4000, 10):
            deadlines.set(key, now + 30.0)
        assert deadlines.due(float(now)) == []
    assert deadlines.visits == 0
    assert len(deadlines.due(30.0)) == 3600
    assert deadlines.visits == 4000


@given(st.integers(1, 3000))
def test_what_was_dropped_does_not_pile_up(count: int) -> None:
    deadlines: Deadlines[int] = Deadlines()
    for key in range(count):
        deadlines.set(key, 1e9)
        deadlines.drop(key)
    deadlines.set(-1, 1.0)
    deadlines.due(1.0)
    assert len(deadlines._heap) <= 67


def test_nothing_is_kept_of_what_was_dropped() -> None:
    class Key:
        pass

    deadlines: Deadlines[Key] = Deadlines()
    key = Key()
    gone = weakref.ref(key)
    deadlines.set(key, 5.0)
    deadlines.drop(key)
    del key
    assert gone() is None


def test_moved_to_and_fro_does_not_pile_up() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for when in range(5000, 0, -1):
        deadlines.set(0, float(when))
    assert len(deadlines._heap) <= 67
    assert deadlines.due(1.0) == [0]
    assert deadlines.due(1e9) == []
