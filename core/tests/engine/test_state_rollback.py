"""Checkpoints and rollback of models with a state: real bytes, poisoned memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import ModuleType

import pytest

from kvcore.contract import StateComponent
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed
from kvcore.errors import RequestError, UnsupportedError
from kvcore.spec import ModelSpec

ROOMY = {"cache.checkpoints": 3}


@pytest.fixture(params=["page_major", "layer_major"])
def cache(request: pytest.FixtureRequest, chain: ModuleType) -> Iterator[KVCache]:
    with chain.build(**ROOMY, **{"cache.arena": request.param}) as made:
        yield made
        chain.finish(made)


def lengths(cache: KVCache, name: str) -> dict[tuple[str, str], int]:
    """Units of a request by range: what a component that changed its length would change."""
    return {
        (group, item.name): len(cache.units(name, group, item.name))
        for group, layout in cache.layouts.items()
        for item in layout.ranges
    }


# --- rollback --------------------------------------------------------------------------------------------------------


def test_m1_rollback_without_a_checkpoint_changes_nothing(cache: KVCache, chain: ModuleType) -> None:
    """M1 (ml-explore/mlx-lm#1109): trimming is a no-op where it cannot be done, and the components part company."""
    chain.begin(cache, "a", [1, 2, 3, 4, 5])
    before, stats, state = lengths(cache, "a"), cache.stats().manager, chain.states(cache, "a")
    with pytest.raises(UnsupportedError) as error:
        cache.rollback("a", 2)
    assert error.value.fields["group"] in ("chain", "draft/count")
    assert (error.value.fields["to"], error.value.fields["checkpoints"]) == (3, [])
    assert error.value.remedy
    assert (lengths(cache, "a"), cache.stats().manager, chain.states(cache, "a")) == (before, stats, state)
    chain.check(cache, "a", [1, 2, 3, 4, 5])


def test_m1_rollback_to_a_checkpoint_is_the_state_after_those_tokens(cache: KVCache, chain: ModuleType) -> None:
    """M1, the other half: 5 tokens, a checkpoint at 3, two taken back: state and keys of three tokens, to go on from."""
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    chain.run(cache, ("a", [4, 5]))
    chain.check(cache, "a", [1, 2, 3, 4, 5])
    with pytest.raises(UnsupportedError) as error:
        cache.rollback("a", 1)
    assert error.value.fields["checkpoints"] == [3]
    assert cache.rollback("a", 2).length == 3
    chain.poison(cache)
    chain.check(cache, "a", [1, 2, 3])
    chain.run(cache, ("a", [9, 8]))
    chain.check(cache, "a", [1, 2, 3, 9, 8])
    cache.rollback("a", 2)  # the checkpoint is still there
    chain.check(cache, "a", [1, 2, 3])


def test_a_checkpoint_is_not_written_by_later_steps(cache: KVCache, chain: ModuleType) -> None:
    """The slot is shared, so the step after it writes into a copy: an in-place step would move the checkpoint on."""
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    (kept,) = cache.units("a", "chain", "slots")
    copies = cache.store.op_counts["copy_units"]
    for token in (4, 5, 6, 7):
        chain.run(cache, ("a", [token]))
    assert cache.store.op_counts["copy_units"] == copies + 2, "one copy a state range, before the first of the steps"
    assert kept != cache.units("a", "chain", "slots")[0]
    for layer in (1, 3):
        assert int(cache.state("chain").field(layer, "h", "x")[kept]) == chain.fold([1, 2, 3], layer)


def test_several_checkpoints_and_the_one_that_is_gone_back_below(cache: KVCache, chain: ModuleType) -> None:
    chain.begin(cache, "a", [1])
    cache.checkpoint("a")
    for token in (2, 3):
        chain.run(cache, ("a", [token]))
        cache.checkpoint("a")
        cache.checkpoint("a")  # twice at one length is once
    chain.run(cache, ("a", [4, 5]))
    assert cache.manager.get("a").checkpoints == (1, 2, 3)
    cache.rollback("a", 3)
    assert cache.manager.get("a").checkpoints == (1, 2)
    chain.run(cache, ("a", [7, 8, 9]))
    with pytest.raises(UnsupportedError):
        cache.rollback("a", 2)  # a checkpoint at 3 there was, of other tokens
    chain.check(cache, "a", [1, 2, 7, 8, 9])
    cache.drop_checkpoints("a", below=2)
    assert cache.manager.get("a").checkpoints == (2,)
    with pytest.raises(UnsupportedError):
        cache.rollback("a", 4)
    cache.drop_checkpoints("a")
    assert cache.manager.get("a").checkpoints == ()
    cache.check_integrity()


def test_g1_rollback_to_nothing_begins_with_a_fresh_state(cache: KVCache, chain: ModuleType) -> None:
    """G1 (vllm-project/vllm#56524): what the request's own first life left in its slot is an earlier tenant's state."""
    chain.begin(cache, "a", [1, 2, 3, 4, 5])
    cache.checkpoint("a")
    cache.rollback("a", 5)
    assert (cache.length("a"), cache.manager.get("a").checkpoints) == (0, ())
    chain.poison(cache)
    with cache.begin([("a", 2)]) as step:
        for group in ("chain", "draft/count"):
            (slot,) = step.state_slots(group).tolist()
            for layer in cache.layouts[group].layers:
                assert not cache.state(group).field(layer, "h", "x")[slot].any()
        chain.compute(cache, step, [[6, 7]])
        step.commit()
    chain.check(cache, "a", [6, 7])


def test_truncation_below_a_checkpoint_drops_it(cache: KVCache, chain: ModuleType) -> None:
    """The tokens that come in their place have a state of their own at that length."""
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    cache.manager.truncate("a", 3)
    assert cache.manager.get("a").checkpoints == (3,)
    cache.manager.truncate("a", 0)
    assert cache.manager.get("a").checkpoints == ()
    chain.run(cache, ("a", [4, 5, 6, 7]))
    with pytest.raises(UnsupportedError):
        cache.rollback("a", 1)
    chain.check(cache, "a", [4, 5, 6, 7])


def test_what_rollback_refuses(cache: KVCache, chain: ModuleType) -> None:
    chain.begin(cache, "a", [1, 2, 3])
    before = cache.stats().manager
    for tokens in (4, -1):
        with pytest.raises(RequestError, match="give up"):
            cache.rollback("a", tokens)
    assert cache.rollback("a", 0).length == 3
    with cache.begin([("a", 1)]) as step:
        for call in (lambda: cache.rollback("a", 0), lambda: cache.checkpoint("a"), lambda: cache.retract("a")):
            with pytest.raises(RequestError, match="open step"):
                call()
        chain.compute(cache, step, [[4]])
        step.commit()
    chain.check(cache, "a", [1, 2, 3, 4])
    assert cache.stats().manager == before


def test_a_component_without_checkpoints_is_refused_with_its_reason(chain: ModuleType) -> None:
    class Stubborn(chain.Numbers):  # type: ignore[name-defined, misc]
        name = "stubborn"
        checkpoint = StateComponent.checkpoint

    with chain.build(chain.MODEL, Stubborn()) as cache:
        chain.begin(cache, "a", [1, 2])
        before = cache.stats().manager
        for call in (lambda: cache.checkpoint("a"), lambda: cache.begin([("a", 1)], speculative=True)):
            with pytest.raises(UnsupportedError, match="stubborn declares no checkpoints") as error:
                call()
            assert error.value.fields["group"] == "chain"
        assert cache.stats().manager == before
        assert cache.manager.get("a").checkpoints == ()
        chain.run(cache, ("a", [3]))
        chain.check(cache, "a", [1, 2, 3])


def test_forks_retraction_and_release_leave_no_checkpoint(cache: KVCache, chain: ModuleType) -> None:
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    cache.fork("a", "b", 3)
    assert cache.manager.get("b").checkpoints == ()
    chain.run(cache, ("a", [4]), ("b", [5]))
    with pytest.raises(UnsupportedError):
        cache.rollback("b", 1)
    cache.rollback("a", 1)
    chain.check(cache, "a", [1, 2, 3])
    chain.check(cache, "b", [1, 2, 3, 5])
    chain.run(cache, ("a", [6]))
    handle = cache.retract("a")
    chain.poison(cache)
    cache.resume(handle)
    assert cache.manager.get("a").checkpoints == ()
    chain.check(cache, "a", [1, 2, 3, 6])
    cache.checkpoint("a")
    cache.release("a")
    cache.check_integrity()
    chain.check(cache, "b", [1, 2, 3, 5])


def test_a_model_without_a_state_needs_no_checkpoint(chain: ModuleType) -> None:
    with chain.build(ModelSpec("tokens", (chain.TOKENS,), "fp32")) as cache:
        chain.begin(cache, "a", [1, 2, 3, 4, 5, 6])
        cache.checkpoint("a")
        assert cache.rollback("a", 3).length == 3
        assert len(cache.units("a", "full", "pages")) == 1
        with cache.begin([("a", 4)], speculative=True) as step:
            chain.compute(cache, step, [[7, 8, 9, 10]])
            step.commit([1])
        assert cache.length("a") == 4
        cache.check_integrity()


def test_what_was_offered_is_not_taken_back(cache: KVCache, chain: ModuleType) -> None:
    """Else the receiver keeps units that are computed again differently. A failed chunk goes back to its checkpoint."""
    want = list(range(1, 9))
    chain.begin(cache, "a", want[:4])
    cache.checkpoint("a")
    chain.run(cache, ("a", want[4:5]))
    cache.checkpoint("a")
    cache.admit("other", 1)
    with chain.build() as target:
        sender = cache.serve()
        receiver = target.connect(sender.address)
        sender.begin("a", 8)
        receiver.ask("a", 8)
        sender.offer("a", 0, 5)
        before = cache.stats().manager
        with pytest.raises(RequestError, match="in a transfer"):
            cache.rollback("a", 1)
        assert cache.stats().manager == before
        chain.run(cache, ("a", want[5:6]))
        cache.checkpoint("a")
        sender.offer("a", 5, 6)
        cache.drop_checkpoints("a", below=6)
        chain.run(cache, ("other", [1]))
        with cache.begin([("a", 2)]) as step:
            chain.compute(cache, step, [[0, 0]])
        assert cache.rollback("a", 0).state == "ready"
        chain.run(cache, ("a", want[6:]))
        sender.offer("a", 6, 8, last=True)
        done, end = None, time.monotonic() + 10
        while done is None and time.monotonic() < end:
            receiver.wait_event(0.05)
            sender.events()
            for event in receiver.events():
                assert not isinstance(event, ReceiveFailed), event
                done = event if isinstance(event, ReceiveDone) else done
        assert done is not None
        chain.check(target, "a", want)
        chain.run(target, ("a", [10]))
        chain.check(target, "a", [*want, 10])
        sender.events()  # ends the transfer, and the request with it
        receiver.close()
        sender.close()


# --- steps that come to nothing --------------------------------------------------------------------------------------


def test_an_abandoned_step_that_wrote_into_copies_spoils_nothing(cache: KVCache, chain: ModuleType) -> None:
    """After a checkpoint, as the first step of a fork, and speculatively: the state before it is where it was."""
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    cache.fork("a", "b", 3)
    for name, speculative in (("a", False), ("b", False), ("a", True)):
        with cache.begin([(name, 2)], speculative=speculative) as step:
            chain.compute(cache, step, [[7, 7]])
        chain.poison(cache)
        assert cache.manager.get(name).state == "ready"
        chain.check(cache, name, [1, 2, 3])
    cache.drop_checkpoints("a")
    cache.release("b")
    with cache.begin([("a", 2)], speculative=True) as step:
        chain.compute(cache, step, [[7, 7]], writes=3)
    assert cache.manager.get("a").state == "ready"
    chain.run(cache, ("a", [4]))
    chain.check(cache, "a", [1, 2, 3, 4])


def test_a_spoiled_request_goes_back_to_its_checkpoint(cache: KVCache, chain: ModuleType) -> None:
    """The first step after a checkpoint writes a copy, the second one in place: that one cannot be undone."""
    chain.begin(cache, "a", [1, 2, 3])
    cache.checkpoint("a")
    chain.run(cache, ("a", [4]))
    with cache.begin([("a", 1)]) as step:
        chain.compute(cache, step, [[9]])
    assert cache.manager.get("a").state == "spoiled"
    for tokens in (0, 2):
        with pytest.raises(UnsupportedError) as error:
            cache.rollback("a", tokens)
        assert error.value.fields["checkpoints"] == [3]
    with pytest.raises(RequestError, match="overwritten the state") as refused:
        cache.begin([("a", 1)])
    assert refused.value.fields["checkpoints"] == [3]
    cache.rollback("a", 1)
    assert cache.manager.get("a").state == "ready"
    chain.check(cache, "a", [1, 2, 3])
    chain.run(cache, ("a", [4, 5]))
    chain.check(cache, "a", [1, 2, 3, 4, 5])


def test_a_spoiled_request_without_a_checkpoint_can_begin_again(cache: KVCache, chain: ModuleType) -> None:
    chain.begin(cache, "a", [1, 2, 3])
    with cache.begin([("a", 1)]) as step:
        chain.compute(cache, step, [[9]])
    assert cache.manager.get("a").state == "spoiled"
    cache.rollback("a", 3)
    chain.poison(cache)
    chain.run(cache, ("a", [5, 6]))
    chain.check(cache, "a", [5, 6])
