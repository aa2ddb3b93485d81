"""Constants through the façade: filled before the first request, read by every step, compared by digests, never moved."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.builtin.pools.memfd import MemfdPool
from kvcore.config import load_config
from kvcore.contract import Format
from kvcore.engine.cache import KVCache
from kvcore.errors import ConfigError, HandshakeError, LayoutError, RequestError
from kvcore.layout import ArenaOrder, Axis, Field, Layout, SpaceSpec, UnitRange, padding, region
from kvcore.memory.constants import ConstantFields
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, Shard, TensorSpec
from kvcore.testing.harness import Subject, pull

HEADS, DIM, PAGE, LAYERS = 4, 8, 4, (0, 3)
GROUP = LayerGroup("full", LAYERS, (TensorSpec("k", HEADS, DIM), TensorSpec("v", HEADS, DIM)), num_query_heads=HEADS)
MODEL = ModelSpec("m", (GROUP,), "fp32")
SHARED, OWN = ("shared", "x"), ("own", "x")


class Calibrated(Format):
    """fp32 values in units of ``shared[part] * own[head, part]``, a part being half of a head."""

    name = "calibrated"

    def __init__(self, declared: float | None = None, order: str = "head part", spare: int = 0) -> None:
        self.declared, self.order, self.spare = declared, order, spare
        self.scales: Mapping[tuple[str, str], torch.Tensor] | None = None

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        heads = Axis("head", shard.num_heads(group.tensors[0]), ids=shard.heads(group.tensors[0]))
        axes = (Axis("slot", page_size), heads, Axis("dim", DIM))
        parts = Axis("part", 2)
        pad = [padding("spare", self.spare, 0)] if self.spare else []
        regions = [
            *(
                region(t.name, f"{group.prefix}/kv", [Field("x", "fp32", "slot head dim", axes)], ranges=("pages",))
                for t in group.tensors
            ),
            region("shared", f"{group.prefix}/shared", [*pad, Field("x", "bf16", "part", (parts,), self.spare)],
                   ranges=("model",)),
            region("own", f"{group.prefix}/own", [Field("x", "fp32", self.order, (heads, parts))], ranges=("model",)),
        ]  # fmt: skip
        return Layout(
            self.name, 1, group.prefix, shard.layers or group.layers, tuple(regions),
            (SpaceSpec("tokens", "sequence", "page", page_size), SpaceSpec("model", "constant", "row", 0)),
            (UnitRange("model", "model"), UnitRange("pages", "tokens")), arena,
        )  # fmt: skip

    def constants(self, layout: Layout) -> Mapping[tuple[str, str], torch.Tensor]:
        if self.declared is None:
            return {SHARED: torch.ones(len(layout.layers), 2, dtype=torch.bfloat16)}  # the other one is left out
        heads = layout.region("own").field("x").axis("head").size
        return scales(len(layout.layers), heads, self.declared)

    def with_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> Format:
        assert set(constants) == {SHARED, OWN}
        bound = Calibrated(self.declared)
        bound.scales = constants
        return bound

    def factor(self) -> torch.Tensor:
        assert self.scales is not None, "encode and decode of a layer need its constants"
        return (self.scales[SHARED].float() * self.scales[OWN]).repeat_interleave(DIM // 2, 1)

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        return {(name, "x"): values.float() / self.factor() for name, values in rows.items()}

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        assert set(elements) == {("k", "x"), ("v", "x")}
        return {name: (values * self.factor()).to(dtype) for (name, _), values in elements.items()}


def scales(layers: int, heads: int, first: float = 1.0, base: int = 0) -> dict[tuple[str, str], torch.Tensor]:
    """Powers of two, different in every place."""
    own = first * 2.0 ** (torch.arange(layers * heads * 2).reshape(layers, heads, 2) % 11 - 5 + base)
    return {SHARED: torch.tensor([[2.0, 0.5]] * layers, dtype=torch.bfloat16), OWN: own}


def build(fmt: Format, *, shard: Shard | None = None, **settings: object) -> KVCache:
    base = {"cache.page_size": PAGE, "cache.memory": "64KiB", "cache.max_tokens": 32}
    config = load_config(None, {**base, **settings})
    return KVCache.create(MODEL, config, Subject(load_plugins(()), format=fmt), shard=shard)


def write(cache: KVCache, name: str, tokens: int, seed: int) -> dict[int, dict[str, torch.Tensor]]:
    heads = cache.layouts["full"].region("k").field("x").axis("head").size
    generator = torch.Generator().manual_seed(seed)
    made = {n: {t: torch.randn(tokens, heads, DIM, generator=generator) for t in ("k", "v")} for n in LAYERS}
    with cache.begin([(name, tokens)]) as step:
        for layer, rows in made.items():
            step.store(layer, rows)
        step.commit()
    return made


def read(cache: KVCache, name: str, layer: int, tokens: int) -> dict[str, torch.Tensor]:
    units = cache.units(name, "full", "pages")
    slots = torch.tensor([int(units[t // PAGE]) * PAGE + t % PAGE for t in range(tokens)])
    out = {t: torch.full((tokens, HEADS, DIM), torch.nan) for t in ("k", "v")}
    cache.store.load(layer, slots, out)
    return out


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_every_layer_reads_its_own(arena: str) -> None:
    """Values come back, and what lies in memory is the value in units of that layer's constants."""
    with build(Calibrated(), **{"cache.arena": arena}) as cache:
        cache.set_constants("full", scales(2, HEADS))
        cache.admit("a", 6)
        made = write(cache, "a", 6, 1)
        unit = int(cache.units("a", "full", "pages")[1])
        for n, layer in enumerate(LAYERS):
            for name, values in read(cache, "a", layer, 6).items():
                torch.testing.assert_close(values, made[layer][name], rtol=0, atol=0)
            buffer = cache.store.pools["full"].placement.buffer(layer, "k")
            token, head, dim = 5, 2, 6
            at = buffer.base + unit * buffer.unit_stride + 4 * ((token % PAGE * HEADS + head) * DIM + dim)
            (stored,) = struct.unpack("<f", cache.store.pools["full"].arena.array()[at : at + 4].tobytes())
            factor = 0.5 * 2.0 ** ((n * HEADS * 2 + head * 2 + 1) % 11 - 5)
            assert stored == float(made[layer]["k"][token, head, dim]) / factor


def test_a_cache_whose_constants_were_never_set_does_nothing() -> None:
    cache = build(Calibrated())
    with cache:
        cache.admit("a", 3)
        before = cache.store.pools["full"].arena.array().copy()
        for use in (lambda: cache.begin([("a", 3)]), cache.serve, lambda: cache.connect("tcp://127.0.0.1:1")):
            with pytest.raises(ConfigError, match="never set") as caught:
                use()
            assert caught.value.fields["constants"] == ["own.x"]
            assert "set_constants" in caught.value.remedy
        with pytest.raises(ConfigError, match="never set"):
            cache.store.constants("full")
        np.testing.assert_array_equal(cache.store.pools["full"].arena.array(), before)
        cache.release("a")
        cache.set_constants("full", {OWN: scales(2, HEADS)[OWN]})  # the declared one stays
        cache.admit("a", 3)
        made = write(cache, "a", 3, 2)
        torch.testing.assert_close(read(cache, "a", 3, 3)["v"], made[3]["v"], rtol=0, atol=0)
        cache.check_integrity()


def test_they_do_not_change_under_what_was_stored_with_them() -> None:
    with build(Calibrated(declared=1.0)) as cache:
        told = cache.store.constants("full")
        cache.admit("a", 3)
        write(cache, "a", 3, 3)
        with pytest.raises(RequestError, match="in use") as live:
            cache.set_constants("full", scales(2, HEADS, 3.0))
        assert (live.value.fields["requests"], live.value.fields["retracted"]) == (1, 0)
        handle = cache.retract("a")
        with pytest.raises(RequestError, match="in use") as kept:
            cache.set_constants("full", scales(2, HEADS, 3.0))
        assert (kept.value.fields["requests"], kept.value.fields["retracted"]) == (0, 1)
        cache.drop(handle)
        assert cache.store.constants("full") == told
        cache.set_constants("full", scales(2, HEADS, 3.0))
        assert cache.store.constants("full") != told
        cache.serve()
        with pytest.raises(RequestError, match="in use"):
            cache.set_constants("full", scales(2, HEADS))


def test_values_that_do_not_fit_change_nothing() -> None:
    good = scales(2, HEADS, 3.0)
    wrong: list[tuple[dict[tuple[str, str], torch.Tensor], str]] = [
        ({**good, OWN: good[OWN][:1]}, "do not match"),
        ({**good, OWN: good[OWN].double()}, "wrong dtype"),
        ({**good, ("own", "y"): good[OWN]}, "no such constant"),
        ({**good, ("k", "x"): good[OWN]}, "no such constant"),
    ]
    with build(Calibrated(declared=1.0)) as cache:
        told = cache.store.constants("full")
        for values, message in wrong:
            with pytest.raises(LayoutError, match=message):
                cache.set_constants("full", values)
        with pytest.raises(ConfigError, match="no such layer group"):
            cache.set_constants("ful", good)
        assert cache.store.constants("full") == told


def test_they_belong_to_nobody() -> None:
    """Not freed, poisoned, saved or sent with a request; counted as allocated, not per token."""
    with build(Calibrated(declared=1.0)) as cache:
        cache.poison_freed = True
        assert cache.capacity.bytes_per_token == {
            "full/kv": 2 * 2 * HEADS * DIM * 4, "full/shared": 0, "full/own": 0, "total": 2 * 2 * HEADS * DIM * 4
        }  # fmt: skip
        pages, unit = cache.capacity.units["full"]["pages"], 2 * 2 * HEADS * DIM * 4 * PAGE
        assert cache.capacity.units["full"]["model"] == 2
        assert cache.stats().allocated_bytes["full"] == pages * unit + 2 * 2 * (16 + HEADS * 2 * 4)
        told = cache.store.constants("full")
        cache.admit("a", 6)
        made = write(cache, "a", 6, 4)
        moved = {p.range: p.num_units for p in cache.manager.payloads("a", 0, 6, last=True)}
        assert moved == {"pages": 2, "model": 0}
        cache.fork("a", "b", 5)
        write(cache, "b", 1, 5)  # copies the shared page
        handle = cache.retract("a", b"")
        assert {k: n for k, n in handle.bytes_by_component.items() if n} == {"full/kv": 2 * unit}
        for group in ("full",):
            pool = cache.store.pools[group]
            pool.fill(cache.manager.free_units(group, "pages"), 0xFF, pool.components_of("pages"))
        cache.resume(handle)
        torch.testing.assert_close(read(cache, "a", 0, 6)["k"], made[0]["k"], rtol=0, atol=0)
        cache.release("b")
        cache.release("a")
        assert cache.store.constants("full") == told
        cache.check_integrity()


def test_calibrated_values_travel() -> None:
    """Through prefill → decode and retraction, between arenas: what is read is what was stored, in units of the scales."""
    with build(Calibrated()) as cache, build(Calibrated(), **{"cache.arena": "layer_major"}) as target:
        for one in (cache, target):
            one.set_constants("full", scales(2, HEADS, 3.0))
        cache.admit("a", 10)
        target.admit("tenant", 3)  # so that pages differ
        made = write(cache, "a", 10, 6)
        done = pull(cache, target, "a", 10)
        assert {name: n for name, n in done.bytes_by_component.items() if n} == {
            "full/kv": 3 * PAGE * 2 * 2 * HEADS * DIM * 4
        }
        handle = target.retract("a")
        target.admit("other", 9)
        target.resume(handle)
        for layer in LAYERS:
            for name, values in read(target, "a", layer, 10).items():
                torch.testing.assert_close(values, made[layer][name])  # a factor of 3 rounds
        assert target.store.constants("full") == cache.store.constants("full")


def test_peers_calibrated_differently_are_refused_at_hello() -> None:
    """One number of one head of one layer, and no byte of the receiver changes."""
    with build(Calibrated()) as cache, build(Calibrated()) as target:
        mine, theirs = scales(2, HEADS), scales(2, HEADS)
        theirs[OWN][1, 2, 0] *= 2
        cache.set_constants("full", mine)
        target.set_constants("full", theirs)
        before = target.store.pools["full"].arena.array().copy()
        sender = cache.serve()
        with pytest.raises(HandshakeError, match="constants") as caught:
            target.connect(sender.address)
        assert (caught.value.fields["group"], caught.value.fields["constant"]) == ("full", "3/own/x/head=2")
        np.testing.assert_array_equal(target.store.pools["full"].arena.array(), before)
        target.set_constants("full", mine)  # refused before anything was told: nothing depends on the old ones
        target.connect(sender.address)


# --- digests ---


def expected(values: Mapping[tuple[str, str], torch.Tensor], first_head: int = 0) -> dict[str, str]:
    """Digests from the numbers alone."""
    found: dict[str, str] = {}

    def add(key: str, data: bytes) -> None:
        found[key] = hashlib.sha256(data).hexdigest()

    for n, layer in enumerate(LAYERS):
        shared = b"".join(struct.pack("<f", float(v))[2:] for v in values[SHARED][n])  # bf16: the upper half
        add(f"{layer}/shared/x", shared)
        for head, row in enumerate(values[OWN][n].tolist()):
            add(f"{layer}/own/x/head={first_head + head}", struct.pack("<2f", *row))
    return found


@pytest.mark.parametrize("order", ["head part", "part head"])
@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
@pytest.mark.parametrize("spare", [0, 32])
def test_digests_are_of_the_numbers(order: str, arena: str, spare: int) -> None:
    """Whatever the order of axes and arena, and whatever lies in padding."""
    with build(Calibrated(order=order, spare=spare), **{"cache.arena": arena}) as cache:
        cache.store.pools["full"].arena.array()[:] = 0xFF
        values = scales(2, HEADS, 3.0)
        cache.set_constants("full", values)
        assert cache.store.constants("full") == expected(values)
        pool = cache.store.pools["full"]
        for layer in LAYERS:
            shared = pool.units(layer, "shared")
            assert (shared[0] == 0xFF).all(), "the null unit was written"
            assert (shared[1, :spare] == 0xFF).all()
            assert (pool.units(layer, "own")[0] == 0xFF).all()


def test_several_sharded_axes_are_cut_by_the_ids_of_each() -> None:
    """In any order of declaration, with ids that are not ascending, and a field of one number."""
    axes = (Axis("row", 3, ids=((6, 8), (2, 3))), Axis("part", 2), Axis("head", 2, ids=((4, 6),)))
    fields = [Field("x", "i32", "head row part", axes), Field("one", "fp32", "", (), 48)]
    made = Layout(
        "f", 1, "g", (7,), (region("c", "g/c", fields, ranges=("model",)),),
        (SpaceSpec("model", "constant", "row", 0),), (UnitRange("model", "model"),),
    )  # fmt: skip
    pool = Pool(made, {"model": 2}, MemfdPool())
    found = ConstantFields(pool)
    assert found.unset == (("c", "x"), ("c", "one"))
    values = torch.arange(12, dtype=torch.int32).reshape(1, 3, 2, 2)
    found.write({("c", "x"): values, ("c", "one"): torch.tensor([0.5])})
    want = {"7/c/one": hashlib.sha256(struct.pack("<f", 0.5)).hexdigest()}
    for at, row in enumerate((6, 7, 2)):
        for col, head in enumerate((4, 5)):
            data = struct.pack("<2i", 4 * at + col, 4 * at + 2 + col)
            want[f"7/c/x/row={row}/head={head}"] = hashlib.sha256(data).hexdigest()
    assert found.digests() == want
    assert torch.equal(found.read(7)["c", "x"], values[0])
    pool.close()


def test_ranks_of_unlike_degrees_compare_what_both_hold() -> None:
    """Equal on every key that two ranks have exactly where the numbers are equal."""
    whole = scales(2, HEADS)

    def told(rank: int, size: int, values: Mapping[tuple[str, str], torch.Tensor]) -> dict[str, str]:
        count = HEADS // size
        mine = {SHARED: values[SHARED], OWN: values[OWN][:, rank * count : (rank + 1) * count].clone()}
        with build(Calibrated(), shard=Shard(rank, size)) as cache:
            cache.set_constants("full", mine)
            return cache.store.constants("full")

    def clash(one: Mapping[str, str], other: Mapping[str, str]) -> set[str]:
        common = one.keys() & other.keys()
        assert {"0/shared/x", "3/shared/x"} <= common
        return {key for key in common if one[key] != other[key]}

    every = told(0, 1, whole)
    halves, quarters = [told(n, 2, whole) for n in range(2)], [told(n, 4, whole) for n in range(4)]
    assert set().union(*halves) == set(every) == set().union(*quarters)
    for part in (*halves, *quarters):
        assert not clash(every, part)
    assert not clash(halves[1], quarters[3])
    assert set(halves[0]) & set(quarters[3]) == {"0/shared/x", "3/shared/x"}
    other: Any = {**whole, OWN: whole[OWN].clone()}
    other[OWN][1, 2, 1] *= 2
    assert clash(every, told(1, 2, other)) == {"3/own/x/head=2"}
    assert not clash(every, told(0, 2, other))


def test_a_plain_format_has_none() -> None:
    config = load_config(None, {"cache.memory": "64KiB", "cache.page_size": PAGE})
    with KVCache.create(MODEL, config, load_plugins(())) as cache:
        assert cache.store.constants("full") == {}
        cache.store.require_constants()
