"""Going back: checkpoints at exact lengths, rollback in every component or in none, and speculation row by row."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import CapacityError, RequestError, UnsupportedError

MORE = {"cache.checkpoints": 2}


@pytest.fixture(params=["conv", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which model."""
    return str(request.param)


def everything(engine: Any) -> dict[str, np.ndarray]:
    """Every byte of a cache, and what its requests hold."""
    found = {name: arena.array().copy() for name, arena in engine.cache.store.arenas().items()}
    for name in engine.tokens:
        found[f"{name} length"] = np.array(engine.cache.length(name))
        for group, layout in engine.cache.layouts.items():
            found[f"{name} {group}"] = engine.cache.units(name, group, layout.ranges[0].name)
    return found


def assert_same(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name], values, name)


def back(engine: Any, name: str, count: int) -> None:
    engine.cache.rollback(name, count)
    del engine.tokens[name][len(engine.tokens[name]) - count :]


def test_a_rollback_without_a_checkpoint_changes_nothing(hybrid: ModuleType, kind: str) -> None:
    """M1: full attention could drop two of five tokens, the recurrent state cannot: the call raises and no component
    changes its length or a byte. With a checkpoint the state is the one after three tokens, and goes on from there."""
    with hybrid.Engine(kind, **MORE) as engine:
        engine.admit("a", hybrid.prompt(1, 3))
        engine.step(("a", [8, 9]))
        before = everything(engine)
        with pytest.raises(UnsupportedError) as caught:
            engine.cache.rollback("a", 2)
        assert caught.value.fields["group"] == "state"
        assert caught.value.fields["checkpoints"] == []
        assert_same(before, everything(engine))
        engine.check("a")
        engine.step(("a", [4]))
        engine.check("a")

        engine.admit("b", hybrid.prompt(2, 3))
        engine.cache.checkpoint("b")
        engine.step(("b", [8]))
        engine.step(("b", [9]))
        back(engine, "b", 2)
        assert engine.cache.length("b") == 3
        engine.check("a", "b")
        engine.step(("b", [5, 6, 7]), ("a", [1]))
        engine.check("a", "b")
        engine.cache.check_integrity()


def test_a_checkpoint_serves_its_exact_length(hybrid: ModuleType, kind: str) -> None:
    with hybrid.Engine(kind, **MORE) as engine:
        engine.admit("a", hybrid.prompt(1, 3))
        engine.cache.checkpoint("a")
        engine.step(("a", [8, 9]))
        engine.cache.checkpoint("a")
        engine.step(("a", [2]))
        for count in (2, 4, 5):
            before = everything(engine)
            with pytest.raises(UnsupportedError) as caught:
                engine.cache.rollback("a", count)
            assert caught.value.fields["checkpoints"] == [3, 5]
            assert_same(before, everything(engine))
        with pytest.raises(RequestError):
            engine.cache.rollback("a", 7)
        back(engine, "a", 1)
        engine.check("a")
        engine.step(("a", [7, 7]))
        back(engine, "a", 4)  # an older one is still there, a newer one is of no use any more
        engine.check("a")
        engine.step(("a", [6, 4]))
        with pytest.raises(UnsupportedError):
            engine.cache.rollback("a", 1)
        back(engine, "a", 2)
        engine.step(("a", [5]))
        engine.check("a")


def test_a_checkpoint_is_shared_until_somebody_writes(hybrid: ModuleType, kind: str) -> None:
    """Copy-on-write: taking one moves no byte and takes no slot; the next step writes into another slot, and what the
    checkpoint keeps never changes, however often the request comes back to it."""
    with hybrid.Engine(kind, **MORE) as engine:
        engine.admit("a", hybrid.prompt(1, 6))
        slot, free = engine.slot("a"), engine.free()
        before = everything(engine)
        engine.cache.checkpoint("a")
        assert_same(before, everything(engine))
        assert engine.free() == free
        for turn in range(3):
            engine.step(("a", [turn + 1, 9]))
            assert engine.slot("a") != slot
            assert engine.free()["state"] == free["state"] - 1
            back(engine, "a", 2)
            assert engine.slot("a") == slot
            engine.check("a")
        engine.cache.release("a")
        engine.cache.check_integrity()
        assert engine.free()["state"] == free["state"] + 1


def test_a_window_that_has_moved_on_refuses_for_all(hybrid: ModuleType, kind: str) -> None:
    """The state has a checkpoint, full attention has every page, but the window's pages of that length are gone."""
    with hybrid.Engine(kind, **MORE) as engine:
        engine.admit("a", hybrid.prompt(1, 12))
        engine.cache.checkpoint("a")
        for token in range(1, 15):
            engine.step(("a", [token]))
        before = everything(engine)
        with pytest.raises(UnsupportedError) as caught:
            engine.cache.rollback("a", 14)
        assert caught.value.fields["group"] == "swa"
        assert_same(before, everything(engine))
        engine.check("a")


def test_back_to_nothing_is_a_fresh_state(hybrid: ModuleType, kind: str) -> None:
    """G1 again: no checkpoint is needed for no tokens, and the next step starts from zeros."""
    with hybrid.Engine(kind) as engine:
        engine.admit("a", hybrid.prompt(1, 6))
        back(engine, "a", 6)
        engine.step(("a", [3, 2, 1]))
        engine.check("a")


def test_only_accepted_tokens_reach_a_state(hybrid: ModuleType, kind: str) -> None:
    """A commit after speculation is per row: each request has the state after its own last accepted token."""
    with hybrid.Engine(kind, **{"cache.checkpoints": 5, "cache.max_requests": 3}) as engine:
        for n, name in enumerate(("a", "b", "c")):
            engine.admit(name, hybrid.prompt(n, 5 + n))
        free = engine.free()["state"]
        drafts = [("a", [11, 12, 13, 14]), ("b", [21, 22, 23]), ("c", [31])]
        for accepted in ([2, 0, 1], [4, 3, 0], [0, 1, 1], [1, 2, 0]):
            engine.step(*drafts, accepted=accepted)
            assert engine.free()["state"] == free, "what was rejected holds no slot"
            engine.check("a", "b", "c")
        engine.step(("b", [7]), ("c", [8, 9]), ("a", [5]))
        engine.check("a", "b", "c")
        engine.cache.check_integrity()


def test_a_step_that_did_not_speculate_takes_nothing_back(hybrid: ModuleType, kind: str) -> None:
    """Its state is the one after all its tokens: a commit of fewer would keep a state of rejected ones."""
    with hybrid.Engine(kind) as engine:
        engine.admit("a", hybrid.prompt(1, 5))
        with engine.cache.begin([("a", 3)]) as step:
            engine.compute(step, [("a", [1, 2, 3])])
            with pytest.raises(UnsupportedError):
                step.commit(accepted=[2])
            step.commit(accepted=[3])
        engine.tokens["a"] += [1, 2, 3]
        engine.check("a")


def test_a_speculative_step_that_failed_never_happened(hybrid: ModuleType, kind: str) -> None:
    with hybrid.Engine(kind, **MORE) as engine:
        engine.admit("a", hybrid.prompt(1, 5))
        with engine.cache.begin([("a", 2)], speculative=True) as step:
            engine.compute(step, [("a", [8, 9])])
        engine.check("a")
        engine.step(("a", [3]))
        engine.check("a")
        engine.cache.check_integrity()


def test_no_slot_for_what_speculation_keeps(hybrid: ModuleType, kind: str) -> None:
    """Refused as a whole, with the range that has none; the request goes on without."""
    with hybrid.Engine(kind, **{"cache.max_requests": 2}) as engine:
        for n, name in enumerate(("a", "b")):
            engine.admit(name, hybrid.prompt(n, 5))
        before = everything(engine)
        with pytest.raises(CapacityError) as caught:
            engine.cache.begin([("a", 1), ("b", 3)], speculative=True)
        assert caught.value.fields["group"] == "state"
        assert_same(before, everything(engine))
        engine.step(("a", [1]), ("b", [2, 3]))
        engine.check("a", "b")


def test_accepted_states_are_retracted_and_checkpoints_are_not(hybrid: ModuleType, kind: str) -> None:
    with hybrid.Engine(kind, **{"cache.checkpoints": 3}) as engine:
        engine.admit("a", hybrid.prompt(1, 6))
        engine.step(("a", [1, 2, 3]), accepted=[2])
        engine.cache.checkpoint("a")
        engine.step(("a", [4, 5]))
        free = engine.free()["state"]
        handle = engine.cache.retract("a")
        assert engine.free()["state"] == free + 2, "the slot of the request, and of its checkpoint"
        assert {n: handle.bytes_by_component[n] for n in hybrid.STATE_BYTES[kind]} == hybrid.STATE_BYTES[kind]
        engine.admit("tenant", hybrid.prompt(2, 5))
        engine.cache.resume(handle)
        engine.check("a", "tenant")
        with pytest.raises(UnsupportedError):
            engine.cache.rollback("a", 2)
        engine.step(("a", [6]))
        engine.check("a")


def test_a_spoiled_state_goes_back_to_a_checkpoint(hybrid: ModuleType, kind: str) -> None:
    """A step that ran and was abandoned has overwritten the state. With a checkpoint the request goes on from it, without
    one it can only be computed again: never from what the failed step left."""
    with hybrid.Engine(kind, **MORE) as engine:
        for n, name in enumerate(("a", "b")):
            engine.admit(name, hybrid.prompt(n, 5))
        engine.cache.checkpoint("a")
        with engine.cache.begin([("a", 1), ("b", 1)]) as step:
            engine.compute(step, [("a", [30]), ("b", [31])])
        with pytest.raises(RequestError, match="overwritten the state"):
            engine.cache.begin([("b", 1)])
        with pytest.raises(UnsupportedError):
            engine.cache.rollback("b", 0)
        engine.cache.rollback("a", 0)
        engine.check("a")
        back(engine, "b", 5)
        engine.step(("a", [6]), ("b", [7, 8]))
        engine.check("a", "b")
