"""A format with ops of its own over a ring and compressed rows, and none of the standard ones but ``copy_units``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kvcore import KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.contract import DONE, FULL, BatchPlan, Fence, Format, Kernel, PoolView, Support
from kvcore.errors import PluginError, StaleHandleError, UnsupportedError
from kvcore.layout import ArenaOrder, Axis, Field, Layout, Region, SpaceSpec, UnitRange
from kvcore.plugins.registry import KINDS, LoadedPlugin, collect
from kvcore.spec import Shard
from kvcore.testing.harness import Subject

RING, RATIO, DIM = 4, 2, 4
GROUP = LayerGroup("csa", (0, 3), (TensorSpec("latent", 1, DIM, sharded=False),), 2)
MODEL = ModelSpec("tiny", (GROUP,), "fp32")


class TwoPools(Format):
    """The newest rows in a ring; the mean of every two tokens in a row for good."""

    name = "two_pools"
    ops = ("copy_units", "ring_scatter", "read_means")

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        field = Field("x", "fp32", "dim", (Axis("dim", DIM),))
        return Layout(
            self.name, 1, group.prefix, group.layers,
            (Region("latent", f"{group.prefix}/kv", (field,), 4 * DIM, ("ring", "rows")),),
            (SpaceSpec("ring", "ring", "row", 0, (("ring", RING),)), SpaceSpec("rows", "compressed", "row", RATIO)),
            (UnitRange("ring", "ring"), UnitRange("rows", "rows")), arena,
        )  # fmt: skip

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        return {("latent", "x"): rows["latent"][:, 0]}

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {"latent": elements["latent", "x"][:, None].to(dtype)}


class RingScatter(Kernel):
    """Newest rows into the ring, and means of whole pairs into their rows."""

    op = "ring_scatter"
    name = "tiny_ring_scatter"
    formats = ("two_pools",)

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        return FULL

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        def scatter(layer: int, plan: BatchPlan, buffers: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            data, ring, rows = pool.field(layer, "latent", "x"), plan.ranges["ring"], plan.ranges["rows"]
            assert rows.ranges["ring"] is ring
            kept = ring.slots >= 0
            data[ring.slots[kept]] = buffers["latent"][kept]
            ends = (rows.slots >= 0) & (rows.positions % RATIO == RATIO - 1)
            for token in ends.nonzero()[:, 0].tolist():
                pair = buffers["latent"][token - 1 : token + 1]
                data[rows.slots[token] // RATIO] = pair.mean(0)
            return DONE

        return scatter


class ReadMeans(RingScatter):
    """The compressed rows of every request, by its page table."""

    op = "read_means"
    name = "tiny_read_means"

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        def read(layer: int, plan: BatchPlan, buffers: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            rows = plan.ranges["rows"]
            buffers["out"].copy_(pool.field(layer, "latent", "x")[rows.page_table])
            return DONE

        return read


class Tiny(Subject):
    own: tuple[type[Kernel], ...] = (RingScatter, ReadMeans)

    def kernels(self) -> list[Kernel]:
        return [*self._base.kernels(), *(kernel() for kernel in self.own)]


def build(fmt: Format, *own: type[Kernel]) -> KVCache:
    registry = Tiny(load_plugins(()), format=fmt)
    registry.own = own or Tiny.own
    settings = {"cache.memory": "8KiB", "cache.max_requests": 4, "retraction.policy": "backup"}
    return KVCache.create(MODEL, load_config(None, settings), registry)


@pytest.fixture
def cache() -> Iterator[KVCache]:
    with build(TwoPools()) as made:
        made.poison_freed = True
        yield made


def values(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


def test_ops_of_its_own_over_every_range(cache: KVCache) -> None:
    """Through two chunks, and after a retraction: what the pool holds is a plain simulation's."""
    given = {"a": values(6, 1), "b": values(5, 2)}
    for name in given:
        cache.admit(name, 6)
    for start, stop in ((0, 4), (4, 5)):
        with cache.begin([(name, stop - start) for name in given]) as step:
            for layer in GROUP.layers:
                step.run("ring_scatter", layer, {"latent": torch.cat([x[start:stop] for x in given.values()]) + layer})
            step.commit()
    handle = cache.retract("a")
    cache.resume(handle)
    with cache.begin([("a", 1)]) as step:
        for layer in GROUP.layers:
            step.run("ring_scatter", layer, {"latent": given["a"][5:6] + layer})
        assert set(step.batch("csa").ranges) == {"ring", "rows"}
        assert step.batch("csa", "rows") is step.batch("csa").ranges["rows"]
        step.abandon()
    with cache.begin([("a", 1), ("b", 1)]) as step:
        for layer in GROUP.layers:
            out = torch.full((2, 3, DIM), torch.nan)
            wide = step.batch("csa", "rows").page_table.shape[1]
            step.run("read_means", layer, {"out": out[:, :wide]})
            for row, name in enumerate(given):
                want = given[name][:4].view(2, 2, DIM).mean(1) + layer
                torch.testing.assert_close(out[row, :2], want)
            ring = cache.units("b", "csa", "ring")
            data = cache.store.pools["csa"].field(layer, "latent", "x")
            for position in range(1, 5):
                torch.testing.assert_close(data[ring[position % RING]], given["b"][position] + layer)
        step.abandon()
    assert cache.store.op_counts["ring_scatter"] == 6
    cache.check_integrity()


def test_a_released_row_is_cut_off_in_every_range(cache: KVCache) -> None:
    for name in "ab":
        cache.admit(name, 4)
    with cache.begin([("a", 4), ("b", 4)]) as step:
        cache.release("a")
        before = {layer: cache.store.pools["csa"].field(layer, "latent", "x").clone() for layer in GROUP.layers}
        plan = step.batch("csa")
        for name, part in plan.ranges.items():
            assert part.ranges is plan.ranges, name
            assert part.slots[:4].tolist() == [-1] * 4, name
        step.run("ring_scatter", 0, {"latent": values(8, 3)})
        mine = [*cache.units("b", "csa", "ring").tolist(), *cache.units("b", "csa", "rows").tolist()]
        after = cache.store.pools["csa"].field(0, "latent", "x")
        others = [unit for unit in range(len(after)) if unit not in mine]
        assert torch.equal(after[others].view(torch.int32), before[0][others].view(torch.int32))
        step.commit()


def test_explain_shows_the_ops_that_there_are(cache: KVCache) -> None:
    choices = {choice.op: choice.chosen for choice in cache.explain()["csa"]}
    assert choices == {
        "copy_units": "torch_copy_units",
        "ring_scatter": "tiny_ring_scatter",
        "read_means": "tiny_read_means",
    }


def test_ops_that_there_are_not(cache: KVCache) -> None:
    cache.admit("a", 1)
    step = cache.begin([("a", 1)])
    with pytest.raises(UnsupportedError, match="no such op of its own") as error:
        step.run("ring_scater", 0, {})
    assert error.value.remedy == "did you mean 'ring_scatter'?"
    with pytest.raises(UnsupportedError, match="no such op") as error:
        step.run("store", 0, {})
    assert "Step.store" in error.value.remedy
    with pytest.raises(UnsupportedError, match="the format has no such op"):
        step.store(0, {"latent": torch.zeros(1, 1, DIM)})
    step.abandon()
    with pytest.raises(StaleHandleError):
        step.run("ring_scatter", 0, {"latent": values(1, 1)})


def test_a_declared_op_without_a_kernel_is_refused_at_configuration() -> None:
    with pytest.raises(UnsupportedError, match="no kernel for read_means"):
        build(TwoPools(), RingScatter)


def test_an_op_that_the_format_does_not_declare_is_refused() -> None:
    """A misspelt one would wait for ever for somebody to call it."""

    class Misspelt(RingScatter):
        op = "ring_scater"
        name = "misspelt"

    with pytest.raises(PluginError, match="does not declare") as error:
        build(TwoPools(), RingScatter, ReadMeans, Misspelt)
    assert "did you mean 'ring_scatter'?" in error.value.remedy


@pytest.mark.parametrize("ops", [("copy_units", "ring scatter"), ("copy_units", "")])
def test_an_op_is_an_identifier(ops: tuple[str, ...]) -> None:
    fmt = TwoPools()
    fmt.ops = ops
    with pytest.raises(PluginError, match="identifier"):
        build(fmt)


@pytest.mark.parametrize(
    ("op", "formats", "reason"),
    [("stroe", ("*",), "'store'"), ("a b", ("two_pools",), "identifier"), (3, ("two_pools",), "identifier")],
)
def test_a_kernel_of_no_possible_op_is_not_registered(op: Any, formats: tuple[str, ...], reason: str) -> None:
    made = type("Made", (RingScatter,), {"op": op, "formats": formats})
    plugin = LoadedPlugin(None, "", "", {"kvcore_register_kernels": lambda: [made]}, {})  # type: ignore[arg-type]
    object.__setattr__(plugin, "info", type("Info", (), {"name": "tiny"})())
    with pytest.raises(PluginError) as error:
        collect(plugin, KINDS["kernels"])
    assert reason in error.value.fields["reason"]
