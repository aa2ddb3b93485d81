"""Groups of state through the façade: slots a row, zeroed, forked, retracted, sent; poisoned memory, a dict as oracle."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.config import load_config
from kvcore.contract import AttendParams, Fence, StateComponent, UnitBlock
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import ReceiveDone, ReceiveFailed
from kvcore.engine.step import Step
from kvcore.errors import (
    ConfigError,
    LayoutError,
    RequestError,
    StaleHandleError,
    UnsupportedError,
)
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.memory.states import StateSlots
from kvcore.plugins import load_plugins
from kvcore.requests.stepplan import RangePlan
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore.testing.harness import Subject, poison

HEADS, PAGE = 4, 4
KV = (TensorSpec("k", HEADS, 8), TensorSpec("v", HEADS, 8))
FULL = LayerGroup("full", (0, 2), KV, num_query_heads=HEADS)
SSM = LayerGroup("ssm", (1, 3), (TensorSpec("h", HEADS, 6),), kind="state", space="per_request")
# Kept beside the tokens of an attention layer, in slots of its own numbering.
PENDING = LayerGroup("pending", (2,), (), kind="state", space="per_request", role="draft")
MODEL = ModelSpec("hybrid", (SSM, FULL, PENDING), "fp32")


class Recurrent(StateComponent):
    """A recurrent state in fp32 and the last inputs in bf16, by head, in one slot."""

    name = "recurrent"

    def applies(self, group: LayerGroup) -> bool:
        return group.kind == "state" and bool(group.tensors)

    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        heads = Axis("head", shard.num_heads(group.tensors[0]), ids=shard.heads(group.tensors[0]))
        fields = (
            Field("h", "fp32", "head dim", (heads, Axis("dim", 6))),
            Field("conv", "bf16", "tap head", (heads, Axis("tap", 2)), 4 * 6 * heads.size),
        )
        return Layout(
            self.name, 1, group.prefix, group.layers, (region("s", f"{group.prefix}/s", fields, ranges=("states",)),),
            (SpaceSpec("state", "per_request", "state_slot", 0),), (UnitRange("states", "state"),), arena,
        )  # fmt: skip


class Pending(StateComponent):
    """How many tokens wait for something, and which was the last; two ranges of their own."""

    name = "pending"

    def applies(self, group: LayerGroup) -> bool:
        return group.kind == "state" and not group.tensors

    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        one = (Axis("one", 2),)
        regions = tuple(
            region(name, f"{group.prefix}/{name}", [Field("x", dtype, "one", one)], ranges=(name,))
            for name, dtype in (("count", "i64"), ("last", "i32"))
        )
        spaces = tuple(SpaceSpec(name, "per_request", "state_slot", 0) for name in ("count", "last"))
        ranges = tuple(UnitRange(name, name) for name in ("count", "last"))
        return Layout(self.name, 1, group.prefix, group.layers, regions, spaces, ranges, arena)


class Hybrid(Subject):
    """The built-ins, and these components."""

    def __init__(self, *components: StateComponent) -> None:
        super().__init__(load_plugins(()))
        self._components = list(components)

    def state_components(self) -> list[StateComponent]:
        return self._components


def build(
    model: ModelSpec = MODEL, *, shard: Shard | None = None, components: Sequence[StateComponent] = (), **more: object
) -> KVCache:
    base = {"cache.page_size": PAGE, "cache.memory": "64KiB", "cache.max_tokens": 32, "cache.max_requests": 4}
    registry = Hybrid(*(components or (Recurrent(), Pending())))
    cache = KVCache.create(model, load_config(None, {**base, **more}), registry, shard=shard)
    cache.poison_freed = True
    poison(cache)
    return cache


@pytest.fixture(params=["page_major", "layer_major"])
def cache(request: pytest.FixtureRequest) -> Iterator[KVCache]:
    with build(**{"cache.arena": request.param}) as made:
        yield made
        made.check_integrity()


class Oracle:
    """What each request's state should be, in plain numbers."""

    def __init__(self) -> None:
        self.h: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self.count: dict[str, int] = {}

    def step(self, rows: Sequence[tuple[str, int]], value: float) -> None:
        for name, tokens in rows:
            self.h[name] = self.h.get(name, 0.0) / 2 + value * tokens
            self.last[name] = value
            self.count[name] = self.count.get(name, 0) + tokens

    def fork(self, name: str, new: str) -> None:
        for table in (self.h, self.last, self.count):
            table[new] = table[name]  # type: ignore[index, assignment]


def compute(cache: KVCache, step: Step, rows: Sequence[tuple[str, int]], value: float) -> None:
    """What a model would do: read each row's states, and write them."""
    slots, view = step.state_slots("ssm"), cache.state("ssm")
    heads = torch.arange(1, HEADS + 1)[:, None]
    tokens = torch.tensor([count for _, count in rows])
    for layer in SSM.layers:
        h, conv = view.field(layer, "s", "h"), view.field(layer, "s", "conv")
        h[slots] = h[slots] / 2 + value * tokens[:, None, None] * heads * layer
        conv[slots] = torch.full((len(rows), 2, HEADS), value + layer).to(torch.bfloat16)
    view = cache.state("draft/pending")
    counts, lasts = step.state_slots("draft/pending"), step.state_slots("draft/pending", "last")
    view.field(2, "count", "x")[counts] += tokens[:, None]
    view.field(2, "last", "x")[lasts] = int(value)


def run(cache: KVCache, oracle: Oracle, rows: Sequence[tuple[str, int]], value: float) -> None:
    with cache.begin(rows) as step:
        compute(cache, step, rows, value)
        total = sum(count for _, count in rows)
        for layer in FULL.layers:
            step.store(layer, {name: torch.full((total, HEADS, 8), value) for name in ("k", "v")})
        out = torch.full((total, HEADS, 8), torch.nan)
        step.attend(2, torch.ones(total, HEADS, 8), out, AttendParams(1.0))
        assert not out.isnan().any()
        step.commit()
    oracle.step(rows, value)


def check(cache: KVCache, oracle: Oracle, *names: str) -> None:
    for name in names:
        (slot,) = cache.units(name, "ssm", "states")
        for layer in SSM.layers:
            h = cache.state("ssm").field(layer, "s", "h")[slot]
            want = torch.arange(1.0, HEADS + 1)[:, None].expand(HEADS, 6) * layer * oracle.h[name]
            torch.testing.assert_close(h, want, rtol=0, atol=0)
            conv = cache.state("ssm").field(layer, "s", "conv")[slot]
            assert conv.unique().tolist() == [oracle.last[name] + layer]
        (slot,) = cache.units(name, "draft/pending", "count")
        assert cache.state("draft/pending").field(2, "count", "x")[slot].tolist() == [oracle.count[name]] * 2
        (slot,) = cache.units(name, "draft/pending", "last")
        assert cache.state("draft/pending").field(2, "last", "x")[slot].tolist() == [int(oracle.last[name])] * 2


def test_states_follow_their_requests(cache: KVCache) -> None:
    """Rows in any order; a slot is zero when it is handed out, whatever it held; null slots stay zero."""
    oracle = Oracle()
    for name, tokens in (("a", 5), ("b", 3), ("c", 9)):
        cache.admit(name, tokens)
    run(cache, oracle, [("b", 3), ("a", 4)], 1.0)
    run(cache, oracle, [("c", 8), ("a", 1), ("b", 1)], 2.0)
    run(cache, oracle, [("a", 1), ("c", 1), ("b", 1)], 3.0)
    check(cache, oracle, "a", "b", "c")
    for group, layout in cache.layouts.items():
        for item in layout.regions:
            for layer in layout.layers:
                assert not cache.store.pools[group].units(layer, item.name)[0].any()
    (slot,) = cache.units("b", "ssm", "states")
    cache.release("b")
    assert (cache.store.pools["ssm"].units(1, "s")[slot] == 0xFF).all(), "poisoned when it was freed"
    cache.admit("d", 2)
    oracle.h.pop("b")
    run(cache, oracle, [("d", 2)], 4.0)
    assert oracle.h["d"] == 8.0
    check(cache, oracle, "a", "c", "d")


def test_slots_are_a_tensor_of_one_address(cache: KVCache) -> None:
    """One slot a row, int64, at a fixed address; past the rows −1, and −1 for a row whose request went away."""
    for name in ("a", "b", "c"):
        cache.admit(name, 2)
    seen = set()
    for rows in ([("a", 1), ("b", 1), ("c", 1)], [("c", 1)]):
        with cache.begin(rows) as step:
            slots = step.state_slots("ssm")
            assert slots.dtype == torch.int64
            assert slots.tolist() == [int(cache.units(name, "ssm", "states")[0]) for name, _ in rows]
            assert step.batch("ssm").page_table[:, 0].tolist() == slots.tolist()
            assert step.batch("draft/pending", "last").page_table.shape == (len(rows), 1)
            whole = slots.as_strided((64,), (1,))
            assert set(whole[len(rows) :].tolist()) == {-1}
            seen.add(slots.data_ptr())
            step.commit()
    assert len(seen) == 1
    with cache.begin([("a", 1), ("b", 1)]) as step:
        cache.release("a")
        mine = int(cache.units("b", "ssm", "states")[0])
        assert step.state_slots("ssm").tolist() == [-1, mine]
        assert step.state_slots("draft/pending", "last").tolist()[0] == -1
        step.commit()


def test_a_row_without_a_unit_has_no_slot() -> None:
    """A plan made elsewhere may name no unit, or the null unit: neither is a state that a kernel may write."""
    slots = StateSlots(5, 8, null_unit=3, device="cpu")
    none = np.zeros(0, np.int64)
    slots.build(RangePlan("g", "r", np.array([0, 1, 1, 2, 4]), np.array([5, 3, 4, 6]), none, none, none), [2, 1, 1, 1])
    assert slots.slots.tolist() == [5, -1, -1, 4]
    assert slots.trail.tolist() == [-1, 5, -1, -1, 4]
    slots.build(RangePlan("g", "r", np.array([0]), none, none, none, none), [])
    assert slots.slots.tolist() == slots.trail.tolist() == []


def test_a_fork_has_its_own_state_from_its_first_step(cache: KVCache) -> None:
    """Shared at the exact length, copied before either of the two writes; other lengths are refused."""
    oracle = Oracle()
    cache.admit("a", 6)
    run(cache, oracle, [("a", 6)], 1.0)
    for length in (5, 4):
        assert cache.manager.joint_prefix("a", length) == 0
        with pytest.raises(UnsupportedError, match="only at the length"):
            cache.fork("a", "b", length)
    cache.fork("a", "b", 6)
    oracle.fork("a", "b")
    assert cache.units("a", "ssm", "states") == cache.units("b", "ssm", "states")
    check(cache, oracle, "a", "b")
    run(cache, oracle, [("b", 1)], 2.0)
    assert cache.units("a", "ssm", "states") != cache.units("b", "ssm", "states")
    check(cache, oracle, "a", "b")
    run(cache, oracle, [("a", 2)], 5.0)
    check(cache, oracle, "a", "b")
    assert cache.store.op_counts["copy_units"] == 4  # three state ranges and the shared page


def test_a_state_survives_retraction_in_another_slot(cache: KVCache) -> None:
    oracle = Oracle()
    for name in ("a", "b"):
        cache.admit(name, 5)
    run(cache, oracle, [("a", 5), ("b", 5)], 1.0)
    run(cache, oracle, [("a", 1)], 3.0)
    old = cache.units("a", "ssm", "states").tolist()
    handle = cache.retract("a", b"token")
    assert handle.bytes_by_component["ssm/s"] == 2 * (HEADS * 6 * 4 + HEADS * 2 * 2)
    assert handle.bytes_by_component["draft/pending/count"] == 16
    poison(cache)
    cache.admit("tenant", 3)  # takes the slot
    run(cache, oracle, [("tenant", 3), ("b", 1)], 7.0)
    cache.resume(handle)
    assert cache.units("a", "ssm", "states").tolist() != old
    check(cache, oracle, "a", "b", "tenant")
    run(cache, oracle, [("b", 1), ("a", 1)], 2.0)
    check(cache, oracle, "a", "b", "tenant")


def test_states_are_restored_before_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    restored: list[str] = []
    real = HostTensorBackup.restore

    def restore(self: HostTensorBackup, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        restored.extend(block.group for block in blocks if block.num_units)
        return real(self, key, blocks)

    monkeypatch.setattr(HostTensorBackup, "restore", restore)
    first = ModelSpec("tokens first", (FULL, SSM, PENDING), "fp32")
    with build(first, **{"retraction.backend": "host_tensor"}) as cache:
        oracle = Oracle()
        cache.admit("a", 5)
        run(cache, oracle, [("a", 5)], 2.0)
        cache.resume(cache.retract("a"))
        assert restored == ["ssm", "draft/pending", "draft/pending", "full"]
        check(cache, oracle, "a")


def test_a_step_that_failed_leaves_no_state_to_go_on_with(cache: KVCache) -> None:
    oracle = Oracle()
    cache.admit("a", 3)
    run(cache, oracle, [("a", 3)], 1.0)
    with cache.begin([("a", 1)]) as step:
        compute(cache, step, [("a", 1)], 9.0)
    assert cache.manager.get("a").state == "spoiled"
    with pytest.raises(RequestError, match="overwritten the state"):
        cache.begin([("a", 1)])
    cache.release("a")
    with cache.begin([]) as step:
        assert step.state_slots("ssm").tolist() == []


def test_a_state_is_listed_once_with_the_last_chunk(cache: KVCache) -> None:
    oracle = Oracle()
    cache.admit("a", 10)
    listed = []
    for start, stop in ((0, 4), (4, 9), (9, 10)):
        run(cache, oracle, [("a", stop - start)], 1.0)
        for payload in cache.manager.payloads("a", start, stop, last=stop == 10):
            listed += [(stop, payload.group, payload.range)] * payload.num_units
    states = [("ssm", "states"), ("draft/pending", "count"), ("draft/pending", "last")]
    assert [item for item in listed if item[1] != "full"] == [(10, *state) for state in states]


def test_a_rank_holds_the_states_of_its_heads() -> None:
    with build(shard=Shard(1, 2)) as cache:
        cache.admit("a", 1)
        with cache.begin([("a", 1)]) as step:
            slots = step.state_slots("ssm")
            h = cache.state("ssm").field(3, "s", "h")
            assert h[slots].shape == (1, HEADS // 2, 6)
            assert not h[slots].any()
            step.commit()


def test_a_model_of_states_alone() -> None:
    """Nothing grows: requests are bounded by slots, and any length fits."""
    with build(ModelSpec("states", (SSM,), "fp32")) as cache:
        assert (cache.token_capacity, cache.request_capacity) == (None, 4)
        assert cache.explain() == {}
        for n in range(4):
            cache.admit(f"r{n}", 1_000_000)
        assert not cache.can_admit(1)
        with cache.begin([("r2", 2), ("r0", 30)]) as step:
            assert len(set(step.state_slots("ssm").tolist())) == 2
            step.commit()


def test_what_is_not_a_state_is_refused(cache: KVCache) -> None:
    with pytest.raises(StaleHandleError, match="no step"):
        cache.store.state_slots("ssm")
    with pytest.raises(UnsupportedError, match="stores tokens"):
        cache.state("full")
    with pytest.raises(ConfigError, match="no such layer group"):
        cache.state("sssm")
    cache.admit("a", 1)
    with cache.begin([("a", 1)]) as step:
        with pytest.raises(UnsupportedError, match="stores tokens"):
            step.state_slots("full")
        with pytest.raises(LayoutError, match="no such unit range"):
            step.state_slots("ssm", "state")
        with pytest.raises(ConfigError, match="no such layer stores tokens"):
            step.store(1, {name: torch.ones(1, HEADS, 8) for name in ("k", "v")})


def test_every_state_has_exactly_one_component() -> None:
    for components in ([Pending()], [Recurrent(), Recurrent(), Pending()]):
        with pytest.raises(UnsupportedError, match="exactly one state component") as caught:
            build(components=components)
        assert caught.value.fields["group"] == "ssm"


def test_states_arrive_at_another_cache(cache: KVCache) -> None:
    """Offered chunk by chunk; the state comes once, with the last, into a slot of another arena order."""
    oracle = Oracle()
    other = "layer_major" if cache.config.cache.arena == "page_major" else "page_major"
    with build(**{"cache.arena": other}) as target:
        sender = cache.serve()
        receiver = target.connect(sender.address)
        cache.admit("a", 9)
        target.admit("tenant", 3)  # so that slots differ
        run(target, Oracle(), [("tenant", 3)], 8.0)
        sender.begin("a", 9)
        receiver.ask("a", 9)
        for start, stop in ((0, 4), (4, 8), (8, 9)):
            run(cache, oracle, [("a", stop - start)], float(stop))
            sender.offer("a", start, stop, last=stop == 9)
        done, end = None, time.monotonic() + 10
        while done is None and time.monotonic() < end:
            receiver.wait_event(0.05)
            sender.events()
            for event in receiver.events():
                assert not isinstance(event, ReceiveFailed), event
                done = event if isinstance(event, ReceiveDone) else done
        assert done is not None
        states = {name: n for name, n in done.bytes_by_component.items() if not name.startswith("full/")}
        assert states == {
            "ssm/s": 2 * (HEADS * 6 * 4 + HEADS * 2 * 2), "draft/pending/count": 16, "draft/pending/last": 8
        }  # fmt: skip
        check(target, oracle, "a")
        run(target, oracle, [("a", 1)], 1.0)
        check(target, oracle, "a")
        np.testing.assert_array_equal(target.units("tenant", "ssm", "states"), [1])
        receiver.close()
        sender.close()
        target.check_integrity()
