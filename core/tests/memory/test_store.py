"""One rank's store: obeys step plans in order, refuses stale ones, and never writes what is no longer a request's."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvcore.builtin.formats import Fp32
from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.contract import AttendParams, Fence
from kvcore.errors import (
    CapacityError,
    ConfigError,
    IntegrityError,
    LayoutError,
    PluginError,
    StaleHandleError,
    UnsupportedError,
)
from kvcore.memory.store import Store
from kvcore.requests.stepplan import StepPlan
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec


def rows(tokens: int, value: float, heads: int = 2, dim: int = 8) -> dict[str, torch.Tensor]:
    return {name: torch.full((tokens, heads, dim), value) for name in ("k", "v")}


def attend(store: Store, geometry: Any, layer: int, tokens: int) -> torch.Tensor:
    out = torch.full((tokens, geometry.query_heads, 8), torch.nan)
    store.attend(layer, torch.ones(tokens, geometry.query_heads, 8), out, AttendParams(1.0))
    return out


@pytest.fixture(params=["reference", "torch"])
def kernels(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_fresh_units_decode_to_zero_whatever_memory_held(rig: ModuleType, kernels: str) -> None:
    """The first store into a unit zeroes the rest of it: no byte of a previous tenant is left."""
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    geometry.poison(store)
    store.begin(rig.Book([3, 7], 4).plan([("a", 5)]))
    for layer in geometry.layers:
        store.store(layer, rows(5, 2.0))
    units = store.pools["full"].envelopes()
    assert units[3].view(torch.float32).eq(2.0).all()
    out = {name: torch.full((8, 2, 8), torch.nan) for name in ("k", "v")}
    store.load(1, torch.arange(28, 32).repeat(2), out)
    for values in out.values():
        assert (values[[0, 4]] == 2.0).all()
        assert (values[[1, 2, 3, 5, 6, 7]] == 0.0).all()
    assert (units[[1, 2, 4, 5, 6, 8, 9, 10, 11]] == 0xFF).all()
    store.close()


def test_the_null_unit_stays_zero(rig: ModuleType, kernels: str) -> None:
    """E1: nothing of a step reaches unit 0, nor the last slot through −1."""
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    geometry.poison(store)
    store.begin(rig.Book([3], 4).plan([("a", 4)]))
    nan = {name: values / 0 * 0 for name, values in rows(4, 1.0).items()}
    store.store(0, nan, valid=torch.zeros(4, dtype=torch.bool))
    units = store.pools["full"].envelopes()
    assert not units[0].any()
    assert not units[3].any()
    assert (units[[1, 2, *range(4, 12)]] == 0xFF).all()
    store.store(0, rows(4, 3.0), valid=torch.tensor([True, False, True, False]))
    out = {name: torch.full((4, 2, 8), torch.nan) for name in ("k", "v")}
    store.load(0, torch.arange(12, 16), out)
    assert [row[0, 0].item() for row in out["k"]] == [3.0, 0.0, 3.0, 0.0]
    store.close()


def test_a_released_request_can_neither_write_nor_read(rig: ModuleType, kernels: str) -> None:
    """E3: A is freed in mid-step and its pages go to B; writing through A's row leaves B's bytes as they are."""
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    geometry.poison(store)
    book = rig.Book([3, 5], 4)
    store.begin(book.plan([("a", 3), ("c", 3)]))
    store.store(0, rows(6, 1.0))
    attend(store, geometry, 0, 6)
    plan = book.plan([("a", 1), ("c", 1)])
    store.begin(plan)
    store.store(0, rows(2, 1.0))
    attend(store, geometry, 0, 2)
    held = store.plan("full")
    store.invalidate("a")
    store.invalidate("nobody")
    # B's bytes arrive by transfer in what was A's page.
    envelopes = store.pools["full"].envelopes()
    envelopes[3] = 0xFF
    for layer in (0, 1):
        store.store(layer, rows(2, 5.0))
    out = attend(store, geometry, 0, 2)
    assert (envelopes[3] == 0xFF).all()
    assert (out[0] == 0).all()
    assert out[1].isfinite().all()
    assert (store.pools["full"].field(0, "k", "x")[5, :, 3] == 5.0).all()
    # The plan A's engine kept, and the whole step again: refused or dropped.
    store.tables["full"].store(0, rows(2, 9.0), held, None)
    assert (envelopes[3] == 0xFF).all()
    with pytest.raises(StaleHandleError):
        store.begin(plan)
    assert (envelopes[3] == 0xFF).all()
    store.close()


def test_stale_and_foreign_plans_are_refused_before_anything_changes(rig: ModuleType) -> None:
    geometry = rig.Geometry()
    store = geometry.store()
    geometry.poison(store)
    book = rig.Book([1, 2, 3], 4)
    with pytest.raises(StaleHandleError, match="no step has begun"):
        store.store(0, rows(1, 1.0))
    with pytest.raises(StaleHandleError, match="no step has begun"):
        store.plan("full")
    old, new = book.plan([("a", 1)]), book.plan([("a", 1)])
    store.begin(new)
    with pytest.raises(StaleHandleError) as error:
        store.begin(old)
    assert (error.value.fields["step"], error.value.fields["last"]) == (1, 2)
    assert store.plan("full").step == 2
    with pytest.raises(StaleHandleError):
        store.begin(new)
    raw = store.pools["full"].arena.array()
    before = raw.copy()
    part = old.ranges[0]
    for change in (
        {"units": np.array([12])},
        {"units": np.array([-1])},
        {"fresh": np.array([0])},
        {"fresh": np.array([12])},
        {"copies_src": np.array([1]), "copies_dst": np.array([0])},
        {"copies_src": np.array([40]), "copies_dst": np.array([2])},
    ):
        bad = StepPlan(9, old.rows, (msgspec.structs.replace(part, **{"fresh": np.array([2]), **change}),))
        with pytest.raises(IntegrityError):
            store.begin(bad)
        assert (raw == before).all()
    with pytest.raises(IntegrityError, match="no such unit range"):
        store.begin(StepPlan(9, (), ()))
    with pytest.raises(StaleHandleError, match="no step has begun"):
        store.store(0, rows(1, 1.0))
    # The step number was not used up.
    store.begin(StepPlan(9, old.rows, (part,)))
    store.close()


def test_copies_come_before_zeroing(rig: ModuleType, kernels: str) -> None:
    """Copy-on-write reads a unit's bytes before any unit of the step is zeroed, in all layers."""
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    book = rig.Book([1, 2, 3], 4)
    store.begin(book.plan([("a", 2)]))
    for layer in geometry.layers:
        store.store(layer, rows(2, layer + 1.0))
    # Unit 1 is copied to 2; the old holder's unit is handed out again in the same step.
    book.tables["b"], book.lengths["b"] = [2], 2
    plan = book.plan([("b", 1)], copies=[(1, 2)])
    part = msgspec.structs.replace(plan.ranges[0], fresh=np.array([1]))
    store.begin(StepPlan(plan.step, plan.rows, (part,)))
    for layer in geometry.layers:
        store.store(layer, rows(1, 10.0 + layer))
        k = store.pools["full"].field(layer, "k", "x")
        assert k[2, 0, :, 0].tolist() == [layer + 1.0, layer + 1.0, 10.0 + layer, 0.0]
        assert not k[1].any()
    assert store.op_counts["copy_units"] == 1
    store.close()


def test_decode_and_prefill_are_chosen_by_the_step(rig: ModuleType) -> None:
    geometry = rig.Geometry()
    store = geometry.store()
    book = rig.Book(list(range(1, 12)), 4)
    for step, op in (
        ([("a", 1)], "attend_decode"),
        ([("b", 2)], "attend_prefill"),
        ([("a", 1), ("b", 1)], "attend_decode"),
        ([("a", 1), ("b", 0)], "attend_prefill"),
        ([("a", 1), ("b", 3)], "attend_prefill"),
    ):
        before = store.op_counts[op]
        store.begin(book.plan(step))
        tokens = sum(count for _, count in step)
        store.store(0, rows(tokens, 1.0))
        torch.testing.assert_close(attend(store, geometry, 0, tokens), torch.ones(tokens, geometry.query_heads, 8))
        assert store.op_counts[op] == before + 1
    store.begin(book.plan([]))
    store.store(0, rows(0, 1.0))
    assert attend(store, geometry, 0, 0).shape == (0, geometry.query_heads, 8)
    assert store.op_counts["load"] == 0
    store.close()


def test_ops_wait_for_their_fence(rig: ModuleType, kernels: str) -> None:
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    waited = []

    class Recording(Fence):
        def done(self) -> bool:
            return False

        def wait(self) -> None:
            waited.append(bool(store.pools["full"].arena.array().any()))

    store.begin(rig.Book([1], 4).plan([("a", 1)]))
    fences = [store.store(0, rows(1, 1.0), after=Recording())]
    out = torch.empty(1, geometry.query_heads, 8)
    fences.append(store.attend(0, torch.ones_like(out), out, AttendParams(1.0), after=Recording()))
    fences.append(store.load(0, torch.tensor([4]), rows(1, 0.0), after=Recording()))
    assert waited == [False, True, True]
    assert all(fence.done() for fence in fences)
    store.close()


def test_pools_stay_out_of_autograd_and_inference_mode(rig: ModuleType, kernels: str) -> None:
    """Rows, queries and sinks may carry gradients, and steps may alternate between modes of torch."""
    geometry = rig.Geometry()
    with torch.inference_mode():
        store = geometry.store(kernels)
    book = rig.Book(list(range(1, 12)), 4)
    outs = []
    for mode in (torch.inference_mode(), torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with mode:
            store.begin(book.plan([("a", 2), ("b", 1)]))
            store.store(0, {name: values.requires_grad_() for name, values in rows(3, 1.0).items()})
            q = torch.ones(3, geometry.query_heads, 8, requires_grad=True)
            sinks = torch.nn.Parameter(torch.full((geometry.query_heads,), -60.0))
            out = torch.zeros(3, geometry.query_heads, 8)
            store.attend(0, q, out, AttendParams(0.1, sinks=sinks))
            store.load(0, torch.tensor([4]), rows(1, 0.0))
            store.begin(book.plan([("a", 1), ("b", 1)]))
            store.attend(0, q[:2], out[:2], AttendParams(0.1))
            outs.append((out.requires_grad, bool(out.isfinite().all())))
    assert outs == [(False, True)] * 4
    pool = store.pools["full"]
    assert not pool.field(0, "k", "x").requires_grad
    assert not pool.field(0, "k", "x").is_inference()
    store.close()


# --- what is refused ---


def shared_model(**changes: Any) -> ModelSpec:
    tensors = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
    group = LayerGroup("full", (0, 1), tensors, 4, **changes)
    return ModelSpec("shared", (group,), "fp32")


def build(rig: ModuleType, model: ModelSpec, *, shard: Shard | None = None, pages: int = 6, **changes: Any) -> Store:
    fmt, shard = Fp32(), shard or Shard()
    layouts = {group.prefix: fmt.layout(group, page_size=4, shard=shard, arena="page_major") for group in model.groups}
    arguments: dict[str, Any] = {
        "layouts": layouts,
        "formats": dict.fromkeys(layouts, fmt),
        "units": {name: {"pages": pages} for name in layouts},
        "pool_builders": [MemfdPool()],
        "kernels": rig.KERNELS["both"],
        "max_rows": 4,
        "max_tokens": 32,
        "shard": shard,
    } | changes
    return Store(model, **arguments)


def test_layers_that_share_storage_read_it(rig: ModuleType) -> None:
    store = build(rig, shared_model(shares=((5, 1),)))
    store.begin(rig.Book([2], 4).plan([("a", 2)]))
    store.store(1, rows(2, 4.0))
    out = torch.full((2, 4, 8), torch.nan)
    store.attend(5, torch.ones(2, 4, 8), out, AttendParams(1.0))
    torch.testing.assert_close(out, torch.full_like(out, 4.0))
    loaded = rows(1, 0.0)
    store.load(5, torch.tensor([8]), loaded)
    assert (loaded["v"] == 4.0).all()
    with pytest.raises(UnsupportedError, match="reads another layer's storage"):
        store.store(5, rows(2, 1.0))
    with pytest.raises(ConfigError, match="no such layer"):
        store.store(6, rows(2, 1.0))
    store.close()


def test_a_rank_holds_its_heads_and_layers_only(rig: ModuleType) -> None:
    store = build(rig, shared_model(shares=((5, 1), (6, 0))), shard=Shard(1, 2, layers=(1,)))
    store.begin(rig.Book([2], 4).plan([("a", 1)]))
    store.store(1, rows(1, 4.0, heads=1))
    with pytest.raises(LayoutError, match="rows do not match"):
        store.store(1, rows(1, 4.0, heads=2))
    for layer in (0, 6):
        with pytest.raises(ConfigError, match="no such layer"):
            store.store(layer, rows(1, 1.0, heads=1))
    store.close()


def test_arguments_that_do_not_match_the_step(rig: ModuleType) -> None:
    store = build(rig, shared_model())
    store.begin(rig.Book([2], 4).plan([("a", 2)]))
    good = rows(2, 1.0)
    for bad in (rows(1, 1.0), {"k": good["k"]}, good | {"w": good["k"]}, good | {"v": good["v"][..., :4]}):
        with pytest.raises(LayoutError):
            store.store(0, bad)
    for valid in (torch.ones(3, dtype=torch.bool), torch.ones(2)):
        with pytest.raises(LayoutError, match="valid"):
            store.store(0, good, valid=valid)
    q = torch.ones(2, 4, 8)
    with pytest.raises(LayoutError, match="queries do not match"):
        store.attend(0, q[:1], q[:1].clone(), AttendParams(1.0))
    with pytest.raises(LayoutError, match="queries do not match"):
        store.attend(0, q, q[:, :2].clone(), AttendParams(1.0))
    with pytest.raises(LayoutError, match="sinks"):
        store.attend(0, q, q.clone(), AttendParams(1.0, sinks=torch.ones(2)))
    with pytest.raises(LayoutError, match="position bias"):
        store.attend(0, q, q.clone(), AttendParams(1.0, position_bias=torch.ones(2, 4, 3)))
    with pytest.raises(ConfigError, match="window"):
        store.attend(0, q, q.clone(), AttendParams(1.0, window=0))
    with pytest.raises(LayoutError, match="multiple of key heads"):
        store.attend(0, q[:, :3], q[:, :3].clone(), AttendParams(1.0))
    for slots in ([24], [-2], [[0]]):
        with pytest.raises(IntegrityError, match="slot is outside"):
            store.load(0, torch.tensor(slots), rows(1, 0.0))
    with pytest.raises(LayoutError, match="output"):
        store.load(0, torch.tensor([1, 2]), rows(1, 0.0))
    with pytest.raises(ConfigError, match="did you mean 'full'"):
        store.plan("fulll")
    with pytest.raises(LayoutError, match="no such unit range"):
        store.plan("full", "ring")
    store.close()


def test_models_that_do_not_fit_are_refused_before_memory_is_touched(rig: ModuleType) -> None:
    class Never(MemfdPool):
        def allocate(self, nbytes: int, device: str) -> Any:
            raise AssertionError("allocated")

    class Second(MemfdPool):
        name = "second"

    model, never = shared_model(), [Never()]
    draft = msgspec.structs.replace(model.groups[0], role="draft")
    both = ModelSpec("both", (*model.groups, draft), "fp32")
    with pytest.raises(ConfigError, match="a layer is in two groups"):
        build(rig, both, pool_builders=never)
    with pytest.raises(ConfigError, match="has no format"):
        build(rig, model, pool_builders=never, formats={})
    bf16 = rig.FORMATS["bf16"]()
    with pytest.raises(LayoutError, match="another format"):
        build(rig, model, pool_builders=never, formats={"full": bf16})
    with pytest.raises(UnsupportedError, match="no pool builder"):
        build(rig, model, pool_builders=never, device="cuda:0")
    with pytest.raises(PluginError, match="several pool builders"):
        build(rig, model, pool_builders=[Never(), Second()])
    with pytest.raises(UnsupportedError, match="no kernel for store"):
        build(rig, model, pool_builders=never, kernels=[])


def test_a_store_that_cannot_be_built_keeps_nothing(rig: ModuleType) -> None:
    tensors = (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8))
    groups = (LayerGroup("full", (0,), tensors, 4), LayerGroup("swa", (1,), tensors, 4))
    model = ModelSpec("two", groups, "fp32")
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(CapacityError):
        build(rig, model, units={"full": {"pages": 4}, "swa": {"pages": 1 << 40}})
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    store = build(rig, model)
    assert set(store.pools) == set(store.tables) == set(store.arenas()) == set(store.explain()) == {"full", "swa"}
    store.close()
    store.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_latent_attention_reads_the_latent_twice(rig: ModuleType) -> None:
    """Keys are latent and rotary parts side by side, values the latent; the reference serves it."""
    tensors = (TensorSpec("latent", 1, 6, sharded=False), TensorSpec("rope", 1, 2, sharded=False))
    store = build(rig, ModelSpec("mla", (LayerGroup("full", (0,), tensors, 4),), "fp32"))
    store.begin(rig.Book([5, 1], 4).plan([("a", 6)]))
    generator = torch.Generator().manual_seed(0)
    latent, rope = torch.randn((6, 1, 6), generator=generator), torch.randn((6, 1, 2), generator=generator)
    store.store(0, {"latent": latent, "rope": rope})
    q, out = torch.randn((6, 4, 8), generator=generator), torch.full((6, 4, 6), torch.nan)
    store.attend(0, q, out, AttendParams(0.5, window=4))
    keys = np.concatenate([latent.numpy(), rope.numpy()], axis=-1)
    for n in range(6):
        want = rig.dense(q[n].numpy(), keys, latent.numpy(), n, AttendParams(0.5, window=4), None)
        np.testing.assert_allclose(out[n].numpy(), want, atol=1e-6)
    store.close()
