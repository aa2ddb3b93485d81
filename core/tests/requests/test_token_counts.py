"""Numbers of tokens come from schedulers and tensors: what is not a whole number is refused, and what is one is an int."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcore.errors import RequestError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import SequenceSpace

PAGES = SpaceSpec(name="full", kind="sequence", unit="page", tokens_per_unit=4)

CALLS: dict[str, Callable[[Manager, Any], Any]] = {
    "admit": lambda m, n: m.admit("new", n),
    "fork": lambda m, n: m.fork("a", "new", n),
    "reserve": lambda m, n: m.reserve("a", n),
    "set_length": lambda m, n: m.set_length("x", n),
    "truncate": lambda m, n: m.truncate("a", n),
    "rollback": lambda m, n: m.rollback("a", n),
    "plan_step": lambda m, n: m.plan_step([("b", 1), ("a", n)]),
    "decode": lambda m, n: m.plan_step([*((f"d{i}", 1) for i in range(15)), ("a", n)]),
}


def make() -> Manager:
    m = Manager([RangeBudget("full", "pages", PAGES, 64, 0, ("full/kv",))], {"sequence": SequenceSpace()})
    for name in ("a", "b", *(f"d{i}" for i in range(15))):
        m.admit(name, 6)
        m.commit(m.plan_step([(name, 6)]))
    m.admit("x", 6, external=True)
    return m


def seen(m: Manager) -> object:
    return m.stats(), [
        (r.id, r.state, r.length, r.reserved, m.units(r.id, "full", "pages").tolist()) for r in m.requests
    ]


@pytest.mark.parametrize("count", [1.0, 1.5, np.float64(1), float("nan"), "1", None])
@pytest.mark.parametrize("call", CALLS)
def test_what_is_no_whole_number_is_refused(call: str, count: object) -> None:
    m = make()
    before = seen(m)
    with pytest.raises(RequestError, match="whole number") as error:
        CALLS[call](m, count)
    assert error.value.fields["got"] is count
    assert seen(m) == before
    m.check_integrity()


@pytest.mark.parametrize("call", CALLS)
def test_whole_numbers_of_other_kinds_are_kept_as_int(call: str) -> None:
    """They go on the wire and into handles, whose encoders know no numpy."""
    m = make()
    CALLS[call](m, np.int64(1))
    for request in m.requests:
        assert (type(request.length), type(request.reserved)) == (int, int)


@pytest.mark.parametrize("accepted", [[1.0, 2], [1, "2"], [None, 1], [float("nan"), 1]])
def test_what_is_accepted_is_whole_and_else_the_step_stays_open(accepted: list[Any]) -> None:
    m = make()
    plan = m.plan_step([("a", 2), ("b", 2)])
    before = seen(m)
    with pytest.raises(RequestError, match="whole number"):
        m.commit(plan, accepted)
    assert seen(m) == before
    m.check_integrity()
    m.commit(plan, np.array([1, 2]))
    assert (m.get("a").length, m.get("b").length) == (7, 8)
    assert {type(m.get(name).length) for name in "ab"} == {int}
    m.check_integrity()
