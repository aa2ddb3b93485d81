"""What a part of a request that is lost or misplaced does to the text, with a model whose text is right or wrong.

The guard model is served by a prefill and a decode cache: full attention, a window, MXFP8 with its scales, and the state
of twelve convolutions, in memory so small that requests are retracted, out of memory that is NaN before it is used. Its
answers are right as long as all of a request arrives. Then one thing at a time is broken on purpose, where units are
copied, and the answers must show it: a test of answers that cannot fail would prove nothing.
"""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow

ALL = [pytest.mark.model, pytest.mark.timeout(600)]  # 128 sequences take a minute or so
WHOLE = pytest.param(128, marks=ALL)
RIGHT, WRONG = 0.98, 0.35
# Without its state a request is right now and then: it takes more of them to tell.
FEW = {"STATE_LOST": 24, "STATE_OF_ANOTHER": 24, "WINDOW_SHIFTED": 10, "SCALES_LEFT": 10, "PAGES_LOST": 10}
CASES = [*FEW.items(), *(pytest.param(fault, 128, marks=ALL) for fault in FEW)]


@pytest.mark.parametrize("count", [32, WHOLE])
@pytest.mark.parametrize("backend", ["host_tensor", "host_pool"])
def test_answers_are_right_through_transfer_and_retraction(guard_rig, backend, count):
    """G1, G4, H1: keys, values, scales, windows and states all survive, in poisoned memory, from either backend."""
    with guard_rig.Rig(backend=backend) as rig:
        outcome = rig.run(guard_rig.Ledgers.draw(count))
    assert outcome.exact() >= RIGHT
    assert outcome.retractions > 0
    assert (outcome.restored, outcome.recomputed) == (outcome.retractions, 0)
    assert outcome.exact(outcome.retracted) >= RIGHT
    assert set(outcome.moved) == set(outcome.saved) == set(guard_rig.COMPONENTS)
    assert all(outcome.moved.values())
    assert all(outcome.saved.values())
    # Five pages of a window of 32 are live when the prompt of 100 is done, and one slot holds twelve states of 64 x 3.
    assert outcome.moved["swa/kv"] == count * 5 * 8 * (2 * 2 * 32)
    assert outcome.moved["full/kv"] == 2 * count * 13 * 8 * (2 * 2 * 32)
    assert outcome.moved["swa/block_scale"] * 32 == outcome.moved["swa/kv"]
    assert outcome.moved["state/conv"] == count * 12 * 64 * 3 * 4


@pytest.mark.parametrize("count", [24, WHOLE])
def test_taking_every_request_off_does_no_harm(guard_rig, count):
    """What the faults below are compared with: the same, unbroken, in memory that holds what others left there."""
    with guard_rig.Rig(poisoned=False) as rig:
        outcome = rig.run(guard_rig.Ledgers.draw(count), retract_after=guard_rig.AFTER_A_KEY)
    assert outcome.retracted == outcome.asked
    assert outcome.exact() >= RIGHT


@pytest.mark.parametrize("way", ["transfer", "retraction"])
@pytest.mark.parametrize(("fault", "count"), CASES)
def test_a_fault_shows(guard_rig, guard_faults, fault, way, count):
    """G1, G6, H1: one thing broken on the way from prefill to decode, or to the backup and back; nothing else notices.

    The memory is not poisoned: what is not copied finds zeros, or what an earlier request left.
    """
    with guard_rig.Rig(poisoned=False) as rig:
        with guard_faults.broken(getattr(guard_faults, fault), [way], sending=rig.sending, decoding=rig.decoding):
            outcome = rig.run(
                guard_rig.Ledgers.draw(count),
                retract_after=guard_rig.AFTER_A_KEY if way == "retraction" else None,
            )
    assert outcome.exact() <= WRONG
    if way == "retraction":
        assert outcome.retracted == outcome.asked
        assert outcome.restored == outcome.retractions
