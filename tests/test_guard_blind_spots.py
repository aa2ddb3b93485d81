"""What the guard model does not notice, or not surely, seen in the bytes.

Full attention finds a record by its content, so the order of its pages hardly matters to the answer; the last page alone
and a single one of four convolutions cost it little, and so may the window layer's scales, with other weights. Each of
these is broken on purpose, on the way from prefill to decode and on the way to the backup and back, and a comparison of
every component's bytes with those of the cache they come from must name exactly what was broken.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from kvcore.engine.peers import ReceiveDone, ReceiveFailed
from kvcore_transformers.serving.requests import GenerationRequest, PrefilledEvent

pytestmark = pytest.mark.slow

TOKENS, PAGES = 100, 13
CONVOLUTIONS = ("conv_k", "conv_v", "conv_attn", "conv_mlp")


def fault_of(faults, spot):
    """The fault that goes with a blind spot's name; None for none."""
    if spot == "nothing":
        return None
    if spot in CONVOLUTIONS:
        return faults.state_lost(spot)
    return {
        "page order": faults.PAGES_REVERSED,
        "window scales": faults.WINDOW_SCALES_LEFT,
        "last page": faults.last_page_lost(PAGES),
    }[spot]


def check(spot, wrong):
    """Exactly what was broken differs."""
    components = {key[0] for key in wrong}
    if spot == "nothing":
        assert wrong == set()
    elif spot in CONVOLUTIONS:
        assert {key[:3] for key in wrong} == {("state/conv", layer, spot) for layer in range(3)}
    elif spot == "page order":
        assert components == {"full/kv", "full/block_scale"}
    elif spot == "window scales":
        assert components == {"swa/block_scale"}
        assert {key[-1] for key in wrong} == set(range(8, PAGES)), "every page of the window"
    else:
        assert components == {"full/kv", "full/block_scale"}
        assert {key[-1] for key in wrong} == {PAGES - 1}


def breaking(faults, spot, way, sending, decoding):
    fault = fault_of(faults, spot)
    return faults.broken(fault, [way], sending=sending, decoding=decoding) if fault else nullcontext()


@pytest.fixture
def request_(guard_rig):
    (request,) = guard_rig.Ledgers.draw(1).requests
    return request


SPOTS = ("nothing", "page order", "window scales", "last page", *CONVOLUTIONS)


def transferred(rig, request: GenerationRequest, read):
    """Bytes of a request where it was computed, and where it was pulled to, before anything is decoded."""
    rig.receiver.ask(request.id, TOKENS)
    rig.prefill.submit(request)
    sent = None
    while sent is None:
        rig.prefill.step()
        if any(isinstance(event, PrefilledEvent) for event in rig.prefill.events()):
            sent = read(rig.sending, request.id, TOKENS)
    events = []
    while not any(isinstance(event, ReceiveDone) for event in events):
        assert rig.receiver.wait_event(5.0), events
        events += rig.receiver.events()
        assert not any(isinstance(event, ReceiveFailed) for event in events), events
    return sent, read(rig.decoding, request.id, TOKENS)


@pytest.mark.parametrize("spot", SPOTS)
def test_what_arrives_is_what_was_computed(guard_rig, guard_faults, guard_bytes, request_, spot):
    """G6, H6: all five components, byte for byte, and not one byte of what a fault left out."""
    with guard_rig.Rig() as rig, breaking(guard_faults, spot, "transfer", rig.sending, rig.decoding):
        sent, arrived = transferred(rig, request_, guard_bytes.read)
    assert {key[0] for key in sent} == set(guard_rig.COMPONENTS)
    check(spot, guard_bytes.differing(sent, arrived))


@pytest.mark.parametrize("backend", ["host_tensor", "host_pool"])
@pytest.mark.parametrize("spot", SPOTS)
def test_what_comes_back_is_what_was_saved(guard_rig, guard_faults, guard_bytes, request_, spot, backend):
    """G1, H1: a retracted request has the bytes back that it had, in other units, whatever is in them by then."""
    with guard_rig.Rig(backend=backend) as rig:
        cache = rig.decoding
        transferred(rig, request_, guard_bytes.read)
        before = guard_bytes.read(cache, request_.id, TOKENS)
        with breaking(guard_faults, spot, "retraction", rig.sending, cache):
            handle = cache.retract(request_.id)
            guard_rig.wipe(cache, guard_rig.POISON)
            # Another request takes the units first, so that the same ones cannot serve again.
            cache.admit("other", TOKENS)
            cache.resume(handle)
        check(spot, guard_bytes.differing(before, guard_bytes.read(cache, request_.id, TOKENS)))
