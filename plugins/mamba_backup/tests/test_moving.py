"""States on the move: copies out that end late, and transfers to another process's cache over shared memory."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.engine.peers import ReceiveDone, ReceiveFailed, SendDone
from kvcore.errors import BackupError, CapacityError, HandshakeError, KVCoreError
from kvcore.spec import ModelSpec
from kvcore.transfer.copier import Copier, Task
from kvcore_mamba_backup.components import RecurrentState


@pytest.fixture(params=["conv", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which model."""
    return str(request.param)


class LateCopier(Copier):
    """Copies nothing until it is told to, or somebody waits for a copy."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []

    def submit(self, task: Task) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        now, self.tasks = self.tasks, []
        for task in now:
            task.run()

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()


def late(hybrid: ModuleType, kind: str, **settings: Any) -> tuple[Any, LateCopier]:
    copier = LateCopier()
    engine = hybrid.Engine(kind, backend=lambda: HostPoolBackup(size="64KiB", copier=copier), **settings)
    return engine, copier


# --- retraction is asynchronous -----------------------------------------------------------------------------------------


def test_a_slot_that_is_being_copied_is_not_handed_out(hybrid: ModuleType, kind: str) -> None:
    """A new tenant would zero the slot under the copy: the request would come back with nothing, or with another's state."""
    engine, copier = late(hybrid, kind, **{"cache.max_requests": 2})
    with engine:
        for n, name in enumerate(("a", "b")):
            engine.admit(name, hybrid.prompt(n, 6))
        slot = engine.slot("a")
        handle = engine.cache.retract("a")
        assert not handle.recompute
        assert engine.free()["state"] == 0
        engine.step(("b", [4]))  # polls; the copy has not ended
        assert not engine.cache.can_admit(3)
        with pytest.raises(CapacityError) as caught:
            engine.cache.admit("c", 3)
        assert caught.value.fields["group"] == "state"
        (part,) = [item for item in engine.cache.stats().manager.ranges if item.group == "state"]
        assert (part.capacity, part.free, part.quarantined) == (2, 0, 1)
        copier.run()
        engine.admit("c", hybrid.prompt(7, 3))
        assert engine.slot("c") == slot
        with pytest.raises(CapacityError):
            engine.cache.resume(handle)
        engine.cache.release("b")
        engine.cache.resume(handle)
        engine.check("a", "c")
        engine.step(("c", [1]), ("a", [2]))
        engine.check("a", "c")
        engine.cache.check_integrity()


def test_a_copy_of_a_shared_state_ends_before_its_other_owner_writes(hybrid: ModuleType, kind: str) -> None:
    """A fork owns the slot alone as soon as the other is retracted, and would write into it in place."""
    engine, copier = late(hybrid, kind)
    with engine:
        engine.admit("a", hybrid.prompt(1, 9))
        engine.cache.fork("a", "b", 9)
        engine.tokens["b"] = list(engine.tokens["a"])
        assert engine.slot("a") == engine.slot("b")
        handle = engine.cache.retract("a")
        engine.step(("b", [7, 8]))
        copier.run()
        engine.cache.resume(handle)
        engine.step(("a", [3]))
        engine.check("a", "b")


def test_a_save_that_fails_late_costs_the_bytes_only(
    hybrid: ModuleType, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request is computed again from a fresh state; its slot is back though the copy failed."""
    engine, copier = late(hybrid, kind, **{"cache.max_requests": 1})
    with engine:
        engine.admit("a", hybrid.prompt(1, 6))
        handle = engine.cache.retract("a")
        block = type(engine.cache.store.pools["state"].block(["state/conv"], [1]))

        def fail(*arguments: object) -> None:
            raise RuntimeError("copy engine is gone")

        with monkeypatch.context() as patch:
            patch.setattr(block, "copy_out", fail)
            copier.run()
        with pytest.raises(BackupError, match="save of this request failed"):
            engine.cache.resume(handle)
        engine.cache.drop(handle)
        engine.admit("a", engine.tokens.pop("a"))
        engine.step(("a", [5]))
        engine.check("a")


# --- prefill to decode --------------------------------------------------------------------------------------------------


class Pair:
    """Two engines that are connected."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self.prefill, self.decode = prefill, decode
        self.sender = prefill.cache.serve()
        self.receiver = decode.cache.connect(self.sender.address)
        self.sent: Counter[str] = Counter()

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()

    def begin(self, name: str, length: int) -> None:
        self.prefill.cache.admit(name, length)
        self.prefill.tokens[name] = []
        self.sender.begin(name, length)
        self.receiver.ask(name, length)

    def chunk(self, name: str, tokens: list[int], *, last: bool = False) -> None:
        start = len(self.prefill.tokens[name])
        self.prefill.step((name, tokens))
        self.sender.offer(name, start, start + len(tokens), last=last)

    def until_read(self, nbytes: int) -> None:
        """Wait until so many bytes have arrived."""
        end = time.monotonic() + 20
        while self.receiver.stats().bytes_read < nbytes and time.monotonic() < end:
            time.sleep(0.005)
        assert self.receiver.stats().bytes_read == nbytes

    def until_over(self) -> Any:
        """The final event of the receiver; the sender's is seen to as well."""
        found, end = None, time.monotonic() + 20
        while (found is None or not self.sent) and time.monotonic() < end:
            self.receiver.wait_event(0.02)
            for event in self.sender.events():
                if isinstance(event, SendDone):
                    self.sent.update(event.bytes_by_component)
            for event in self.receiver.events():
                if isinstance(event, ReceiveFailed):
                    return event
                found = event if isinstance(event, ReceiveDone) else found
        assert found is not None
        return found

    def transfer(self, name: str, tokens: list[int]) -> Any:
        self.begin(name, len(tokens))
        self.chunk(name, tokens[:6])
        self.chunk(name, tokens[6:], last=True)
        done = self.until_over()
        assert isinstance(done, ReceiveDone), done
        self.decode.tokens[name] = list(tokens)
        return done


@pytest.fixture
def pair(hybrid: ModuleType) -> Iterator[Any]:
    """Connects two engines, and closes them."""
    made: list[Any] = []

    def start(prefill: Any, decode: Any) -> Pair:
        made.extend((prefill, decode))
        both = Pair(prefill, decode)
        made.insert(0, both)
        return both

    yield start
    for item in made:
        getattr(item, "cache", item).close()


def test_a_state_is_sent_once_with_the_last_chunk(hybrid: ModuleType, pair: Any, kind: str) -> None:
    """What lies in the slot between chunks is not final: a receiver that read it early would hold half a state, and one
    that read it every time would move it as often as there are chunks."""
    both = pair(hybrid.Engine(kind), hybrid.Engine(kind))
    prefill, decode = both.prefill, both.decode
    decode.admit("tenant", hybrid.prompt(9, 5))  # so that slots differ
    tokens = hybrid.prompt(1, 14)
    both.begin("a", 14)
    slot, layout = decode.slot("a"), decode.cache.layouts["state"]
    assert slot != prefill.slot("a")
    pool = decode.cache.store.pools["state"]
    page = 4 * 2 * (8 + 4) * 4  # tokens · heads · dims of K and V · bytes, of one layer
    both.chunk("a", tokens[:4])
    both.until_read(4 * page - 2 * page)  # one page of two full layers; the window's is dead when the prompt ends
    both.chunk("a", tokens[4:9])
    both.until_read(4 * page + 2 * page)
    for layer in layout.layers:
        for region in layout.regions:
            assert (pool.units(layer, region.name)[slot] == 0xFF).all(), "no state before the prompt is done"
    both.chunk("a", tokens[9:], last=True)
    done = both.until_over()
    assert isinstance(done, ReceiveDone), done
    states = {name: n for name, n in done.bytes_by_component.items() if name.startswith("state/")}
    assert states == hybrid.STATE_BYTES[kind]
    assert both.sent == Counter(done.bytes_by_component)
    decode.tokens["a"] = tokens
    decode.check("a", "tenant")
    decode.step(("tenant", [3]), ("a", [8]))
    decode.check("a", "tenant")
    assert "a" not in prefill.cache.manager.requests
    prefill.cache.check_integrity()
    decode.cache.check_integrity()


@pytest.mark.parametrize("early", [[0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]])
def test_layers_offered_before_the_chunk_is_committed(
    hybrid: ModuleType, pair: Any, kind: str, early: list[int]
) -> None:
    """The state of a layer goes with that layer's pages while the layers above are computed, each layer once."""
    both = pair(hybrid.Engine(kind), hybrid.Engine(kind, **{"cache.arena": "layer_major"}))
    prefill, decode = both.prefill, both.decode
    tokens = hybrid.prompt(3, 13)
    both.begin("a", 13)
    both.chunk("a", tokens[:6])
    mine = [layer for layer in early if any(layer in layout.layers for layout in prefill.cache.layouts.values())]
    with prefill.cache.begin([("a", 7)]) as step:
        prefill.compute(step, [("a", tokens[6:])])
        both.sender.offer_layers("a", 6, 13, mine, last=True)
        step.commit()
    both.sender.offer("a", 6, 13, last=True)
    done = both.until_over()
    assert isinstance(done, ReceiveDone), done
    states = {name: n for name, n in done.bytes_by_component.items() if name.startswith("state/")}
    assert states == hybrid.STATE_BYTES[kind]
    decode.tokens["a"] = tokens
    decode.check("a")
    decode.step(("a", [8]))
    decode.check("a")


BACKENDS = [
    pytest.param({}, id="host_tensor"),
    pytest.param({"retraction.backend": "host_pool", "retraction.options": {"size": "64KiB"}}, id="host_pool"),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_pulled_is_retracted_and_goes_on(
    hybrid: ModuleType, pair: Any, kind: str, backend: dict[str, Any]
) -> None:
    """Prefill, transfer, decode, retraction, others in its slots, decode: as if nothing had happened."""
    layer_major = {"cache.arena": "layer_major"}
    both = pair(hybrid.Engine(kind, **layer_major), hybrid.Engine(kind, **backend))
    decode = both.decode
    for n in range(3):
        both.transfer(f"r{n}", hybrid.prompt(n, 11 + n))
        decode.step((f"r{n}", [n + 1]))
    handle = decode.cache.retract("r0")
    both.transfer("r3", hybrid.prompt(5, 10))
    end = time.monotonic() + 10
    while not decode.cache.can_admit(9) and time.monotonic() < end:  # a copy out holds the last slot until it has ended
        time.sleep(0.005)
    both.transfer("r4", hybrid.prompt(6, 9))
    decode.step(*((f"r{n}", [n]) for n in (1, 2, 3, 4)))
    decode.cache.release("r2")
    decode.cache.resume(handle)
    decode.step(*((f"r{n}", [n + 2]) for n in (4, 3, 1, 0)))
    decode.check("r0", "r1", "r3", "r4")
    decode.cache.check_integrity()


def test_a_slot_is_there_for_a_prompt_once_its_copy_has_ended(hybrid: ModuleType, pair: Any, kind: str) -> None:
    """A decode process that only retracts and asks must not be told that there is no slot when there is one."""
    decode, copier = late(hybrid, kind, **{"cache.max_requests": 1})
    both = pair(hybrid.Engine(kind), decode)
    decode.admit("a", hybrid.prompt(1, 6))
    handle = decode.cache.retract("a")
    with pytest.raises(CapacityError):
        both.receiver.ask("b", 9)
    copier.run()
    both.transfer("b", hybrid.prompt(2, 9))
    decode.check("b")
    decode.cache.release("b")
    decode.cache.resume(handle)
    decode.check("a")


def test_a_transfer_that_ends_before_the_state_came_leaves_nothing(hybrid: ModuleType, pair: Any, kind: str) -> None:
    """The slot is back in the pool and the next request in it starts from zeros."""
    both = pair(hybrid.Engine(kind), hybrid.Engine(kind))
    free = both.decode.free()
    both.begin("a", 14)
    both.chunk("a", hybrid.prompt(1, 6))
    both.sender.abort("a", "the client went away")
    assert isinstance(both.until_over(), ReceiveFailed)
    assert both.decode.free() == free
    both.decode.admit("a", hybrid.prompt(2, 5))
    both.decode.check("a")


def replace(state: Any, **changes: Any) -> Any:
    fields = {name: getattr(state, name) for name in state.__struct_fields__}
    return type(state)(**{**fields, **changes})


def refused(hybrid: ModuleType, other: Any) -> KVCoreError:
    """How a peer with another engine is refused."""
    with hybrid.Engine("delta") as prefill, other as decode:
        sender = prefill.cache.serve()
        try:
            with pytest.raises(HandshakeError) as caught:
                decode.cache.connect(sender.address)
            return caught.value
        finally:
            sender.close()


def test_peers_that_keep_other_states_are_refused(hybrid: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another dtype is another model: never converted without a word, since a sum over all tokens would drift."""
    bf16 = hybrid.states("state", (2, 5), hybrid.KKV, replace(hybrid.DELTA, dtype="bf16"))
    none = hybrid.states("state", (2, 5), hybrid.KKV)
    for group in (bf16, none):
        model = ModelSpec("other", (hybrid.FULL, hybrid.SWA, group), "fp32")
        error = refused(hybrid, hybrid.Engine(model))
        assert "model" in str(error)
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentState, "revision", 2)
        other = hybrid.Engine("delta")
    error = refused(hybrid, other)
    assert "revision" in str(error)
