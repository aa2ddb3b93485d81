"""Faults that real engines had with recurrent state, each on a whole cache: full attention, a window and states."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import kvcore.memory.pool
from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.config import load_config
from kvcore.contract import FULL, Fence, Support, UnitBlock, unsupported
from kvcore.engine.cache import KVCache
from kvcore.errors import BackupError, CapacityError, UnsupportedError
from kvcore.layout import Layout
from kvcore.plugins import load_plugins

BACKENDS = {
    "host_tensor": {},
    "host_pool": {"retraction.backend": "host_pool", "retraction.options": {"size": "64KiB"}},
    "host_pool, inline": {
        "retraction.backend": "host_pool",
        "retraction.options": {"size": "64KiB", "block_size": 100, "copier": "inline"},
    },
}


@pytest.fixture(params=["conv", "delta"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which model."""
    return str(request.param)


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of a retraction backend."""
    return dict(request.param)


@pytest.fixture(params=["page_major", "layer_major"])
def engine(hybrid: ModuleType, kind: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with its cache poisoned."""
    with hybrid.Engine(kind, **{"cache.arena": request.param}) as made:
        yield made
        made.cache.check_integrity()


def test_a_slot_is_zero_when_it_is_handed_out(hybrid: ModuleType, engine: Any) -> None:
    """G1: a new request must not start from the state of a previous tenant, whether that one ended, failed, or was
    retracted, nor from what the memory held at first. Every part of the slot counts, not only the last state."""
    used = set()
    for turn, end in enumerate(("release", "retract", "abandon", "release")):
        name = f"tenant{turn}"
        engine.admit(name, hybrid.prompt(turn, 2))  # of 0xFF memory at first; fewer tokens than a convolution keeps
        engine.check(name)
        used.add(engine.slot(name))
        if end == "retract":
            engine.cache.drop(engine.cache.retract(name))
        elif end == "abandon":
            with engine.cache.begin([(name, 1)]) as step:
                engine.compute(step, [(name, [7])])
            engine.cache.release(name)
        else:
            engine.cache.release(name)
    assert len(used) < 4, "a slot was used again"
    # A request that has been admitted but not stepped owns a slot that a step zeroes before anybody reads it.
    engine.cache.admit("late", 6)
    engine.admit("other", hybrid.prompt(8, 3))
    engine.tokens["late"] = []
    engine.step(("other", [3]), ("late", [1, 2]))
    engine.check("late", "other")
    engine.step(("late", [5, 6, 7]))
    engine.check("late", "other")


def test_slots_are_zeroed_and_nothing_else_is(hybrid: ModuleType, engine: Any) -> None:
    """G1, byte by byte: the step that hands a slot out zeroes exactly it."""
    engine.cache.admit("a", 3)
    arena = engine.cache.store.pools["state"].arena.array()
    before = arena.copy()
    with engine.cache.begin([("a", 3)]):
        slot, pool = engine.slot("a"), engine.cache.store.pools["state"]
        for layer in pool.layout.layers:
            for region in pool.layout.regions:
                units = pool.units(layer, region.name)
                assert not units[slot].any()
                units[slot] = 0xFF
        assert (arena == before).all()


def test_a_hit_in_attention_alone_is_no_hit(hybrid: ModuleType, engine: Any) -> None:
    """G4: a length that only attention can serve must not make the recurrent part believe that it has a state."""
    engine.admit("a", hybrid.prompt(1, 10))
    manager = engine.cache.manager
    for length in range(10):
        assert manager.joint_prefix("a", length) == 0, "pages of these tokens are there, their state is not"
        if length:
            with pytest.raises(UnsupportedError, match="only at the length"):
                engine.cache.fork("a", "b", length)
    for length in (10, 64):
        assert manager.joint_prefix("a", length) == 10
    engine.cache.fork("a", "b", 10)
    engine.tokens["b"] = list(engine.tokens["a"])
    engine.step(("b", [9]), ("a", [4, 5]))
    engine.check("a", "b")


class Counted:
    """Counts copies of unit blocks through a pool, and may make those into a group raise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.out: list[tuple[tuple[str, ...], int]] = []
        self.into: list[tuple[tuple[str, ...], int]] = []
        self.broken: str = ""
        block = kvcore.memory.pool._PoolBlock
        for way, seen in (("copy_out", self.out), ("copy_in", self.into)):
            monkeypatch.setattr(block, way, self._wrapped(getattr(block, way), seen))

    def _wrapped(self, real: Callable[..., Fence], seen: list[tuple[tuple[str, ...], int]]) -> Callable[..., Fence]:
        def copy(block: UnitBlock, host: Any) -> Fence:
            if seen is self.into and block.group == self.broken:
                raise RuntimeError("copy engine is gone")
            seen.append((block.components, block.nbytes))
            return real(block, host)

        return copy


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Copies between pools and the host."""
    return Counted(monkeypatch)


def test_a_restore_that_fails_in_the_state(
    hybrid: ModuleType, kind: str, backend: dict[str, Any], counted: Counted
) -> None:
    """G6: the copy of the state part raises: the request holds no state index, slot and pages are back, a retry works."""
    with hybrid.Engine(kind, **backend) as engine:
        engine.admit("a", hybrid.prompt(1, 11))
        free = engine.free()
        handle = engine.cache.retract("a")
        gone = {name: handle.bytes_by_component[name] for name in hybrid.STATE_BYTES[kind]}
        assert gone == hybrid.STATE_BYTES[kind]
        counted.broken = "state"
        for _ in range(2):
            with pytest.raises(BackupError, match="copy engine is gone"):
                engine.cache.resume(handle)
            assert "a" not in engine.cache.manager.requests
            assert all(count >= free[name] + 1 for name, count in engine.free().items())
            engine.cache.check_integrity()
        assert engine.cache.stats().retraction.failed_restores == 2
        counted.broken = ""
        for name in ("b", "c", "d"):  # take the slot that the failed restore had
            engine.admit(name, hybrid.prompt(4, 5))
        engine.cache.resume(handle)
        engine.check("a", "b", "c", "d")
        engine.step(("a", [6]), ("b", [3]))
        engine.check("a", "b")


def test_a_retracted_hybrid_goes_on_where_it_was(
    hybrid: ModuleType, kind: str, backend: dict[str, Any], counted: Counted
) -> None:
    """H1: full, window and state are saved, others write all slots, everything comes back into other units bit for bit;
    the state is copied once in each direction and comes back first."""
    with hybrid.Engine(kind, **backend) as engine:
        engine.admit("a", hybrid.prompt(1, 17))
        engine.step(("a", [3]))
        slot = engine.slot("a")
        handle = engine.cache.retract("a")
        components = {"full/kv", "swa/kv", *hybrid.STATE_BYTES[kind]}
        assert set(handle.bytes_by_component) == components
        for name, nbytes in hybrid.STATE_BYTES[kind].items():
            assert handle.bytes_by_component[name] == nbytes
        for n in range(4):  # every slot has another tenant
            engine.admit(f"tenant{n}", hybrid.prompt(50 + n, 6))
        assert slot in {engine.slot(f"tenant{n}") for n in range(4)}
        with pytest.raises(CapacityError):
            engine.cache.resume(handle)
        engine.cache.release("tenant3" if engine.slot("tenant3") != slot else "tenant2")
        engine.cache.resume(handle)
        assert engine.slot("a") != slot
        engine.check("a", "tenant0", "tenant1")
        engine.step(("tenant0", [8]), ("a", [5]))
        engine.check("a", "tenant0", "tenant1")
        for copies in (counted.out, counted.into):
            states = [name for names, _ in copies for name in names if name.startswith("state/")]
            assert sorted(states) == sorted(hybrid.STATE_BYTES[kind]), "every component of the state once"
        assert all(name.startswith("state/") for name in counted.into[0][0]), "before keys and values"
        stats = engine.cache.stats().retraction
        assert stats.bytes_saved == stats.bytes_restored == handle.nbytes
        assert (stats.bytes_held, stats.recompute_fallbacks) == (0, 0)


class NoStates(HostTensorBackup):
    """A backend of tokens only."""

    name = "tokens_only"
    refused = "state/conv"

    def carries(self, layout: Layout, component: str) -> Support:
        return unsupported("it copies pages of tokens") if component == self.refused else FULL


@pytest.mark.parametrize("refused", ["state/conv", "state/recurrent"])
def test_a_backend_that_cannot_carry_a_state(hybrid: ModuleType, refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H6: refused at configuration, with backend, component and format, not at the first retraction. With the policy to
    recompute, retraction works, and starts from a fresh state."""
    monkeypatch.setattr(NoStates, "refused", refused)
    with pytest.raises(UnsupportedError, match="cannot carry a component") as caught:
        hybrid.Engine("delta", backend=NoStates)
    assert caught.value.fields["backend"] == "tokens_only"
    assert caught.value.fields["component"] == refused
    assert caught.value.fields["format"] == "recurrent_state"
    assert "recompute" in str(caught.value)
    with hybrid.Engine("delta", backend=NoStates, **{"retraction.policy": "recompute"}) as engine:
        for n, name in enumerate(("a", "b")):
            engine.admit(name, hybrid.prompt(n, 9))
        handle = engine.cache.retract("a")
        assert handle.recompute
        engine.step(("b", [3]))
        tokens = engine.tokens.pop("a")
        engine.admit("a", tokens)
        engine.step(("a", [2]), ("b", [3]))
        engine.check("a", "b")


def test_a_hybrid_model_without_the_plugin(hybrid: ModuleType, kind: str) -> None:
    """Refused at start with the names of model, group and states, and of the plugin that is installed and left out; never
    run with its states somewhere outside of the cache."""
    with pytest.raises(UnsupportedError, match="mamba_backup") as caught:
        KVCache.create(hybrid.MODELS[kind], load_config(None, hybrid.SETTINGS), load_plugins(()))
    assert caught.value.fields["model"] == hybrid.MODELS[kind].name
    assert caught.value.fields["group"] == "state"
    assert caught.value.fields["states"] == [state.name for state in hybrid.MODELS[kind].group("state").states]


def test_an_empty_state_tensor_is_nowhere(hybrid: ModuleType) -> None:
    """J12: a model with a state tensor of no elements: no region, no buffer is registered, and what is saved, restored and
    transferred is complete without it."""
    with hybrid.Engine("conv") as engine:
        layout = engine.cache.layouts["state"]
        assert [region.name for region in layout.regions] == ["conv_k", "conv_mlp"]
        infos = engine.cache.store.pools["state"].buffer_infos()
        assert sorted({info.region for info in infos}) == ["conv_k", "conv_mlp"]
        assert all(info.unit_bytes > 0 for info in infos)
        engine.admit("a", hybrid.prompt(1, 7))
        engine.cache.resume(engine.cache.retract("a"))
        engine.check("a")


def test_a_request_is_recomputed_where_the_backend_is_full(hybrid: ModuleType, kind: str) -> None:
    """Recompute starts from a fresh state: nothing of the first run is left in the slot."""
    small = {"retraction.backend": "host_pool", "retraction.options": {"size": "8KiB", "block_size": 64}}
    with hybrid.Engine(kind, **small) as engine:
        for n, name in enumerate(("a", "b")):
            engine.admit(name, hybrid.prompt(n, 16))
        saved, lost = engine.cache.retract("a"), engine.cache.retract("b")
        assert not saved.recompute
        assert lost.recompute
        tokens = engine.tokens.pop("b")
        engine.admit("b", tokens)
        engine.cache.resume(saved)
        engine.step(("a", [1]), ("b", [1]))
        engine.check("a", "b")


def test_every_group_of_states_goes_along(hybrid: ModuleType, backend: dict[str, Any]) -> None:
    """H1 with three groups of state, one of them a draft model's: each has a slot of its own numbering, and none is left
    behind or taken for another's."""
    with hybrid.Engine(hybrid.MANY, **backend) as engine:
        for n, name in enumerate(("a", "b", "c")):
            engine.admit(name, hybrid.prompt(n, 3 + 4 * n))
        handle = engine.cache.retract("b")
        states = {name: n for name, n in handle.bytes_by_component.items() if "state" in name}
        assert states == {
            "state_full/conv": 2 * (16 + 5) * 3 * 4,
            "state_swa/conv": 2 * (32 + 5) * 3 * 4,
            "draft/state/conv": 24 * 3 * 2,
            "draft/state/recurrent": 4 * 2 * 3 * 4,
        }
        engine.cache.fork("a", "d", 3)
        engine.tokens["d"] = list(engine.tokens["a"])
        engine.step(("d", [1]), ("a", [2]), ("c", [3]))
        engine.cache.release("c")
        engine.cache.resume(handle)
        engine.step(("b", [4]), ("a", [5]))
        engine.check("a", "b", "d")
