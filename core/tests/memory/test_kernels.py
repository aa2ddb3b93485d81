"""Kernels against plain loops over bytes and a dense softmax; memory is poisoned first."""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.contract import AttendParams, BatchPlan
from kvcore.errors import LayoutError
from kvcore.memory import paged_attention

TOLERANCE = {"fp32": 2e-5, "fp16": 4e-3, "bf16": 3e-2}


@st.composite
def geometries(draw: st.DrawFn, **fixed: Any) -> dict[str, Any]:
    same = draw(st.booleans())
    dim = draw(st.sampled_from([1, 3, 8, 16]))
    return {
        "format": draw(st.sampled_from(["fp32", "fp32", "fp16", "bf16"])),
        "order": draw(st.sampled_from(["head_major", "token_major"])),
        "arena": draw(st.sampled_from(["page_major", "layer_major"])),
        "layers": draw(st.sampled_from([(0,), (3, 7), (0, 1, 2)])),
        "heads": draw(st.sampled_from([1, 2, 3])),
        "dim_k": dim,
        "dim_v": dim if same else draw(st.sampled_from([2, 5, 12])),
        "page_size": draw(st.sampled_from([1, 2, 4, 5])),
        "group": draw(st.sampled_from([1, 2, 3])),
        "units": 40,
    } | fixed


def rows_of(geometry: Any, tokens: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        name: torch.randn((tokens, heads, dim), generator=generator) for name, (heads, dim) in geometry.tensors.items()
    }


def run_steps(
    rig: ModuleType, geometry: Any, store: Any, steps: list[list[tuple[str, int]]], params: dict[str, Any], seed: int
) -> float:
    """Store and attend every layer of every step; return the largest deviation from the dense oracle."""
    generator = torch.Generator().manual_seed(seed)
    order = list(range(1, geometry.units))
    random.Random(seed).shuffle(order)
    book, worst = rig.Book(order, geometry.page_size), 0.0
    history: dict[tuple[int, str, str], list[np.ndarray]] = {}
    geometry.poison(store)
    for step in steps:
        starts = {name: book.lengths.get(name, 0) for name, _ in step}
        store.begin(book.plan(step))
        tokens = sum(count for _, count in step)
        longest = max(book.lengths[name] for name, _ in step)
        for layer in geometry.layers:
            rows = rows_of(geometry, tokens, generator)
            store.store(layer, rows)
            q = torch.randn((tokens, geometry.query_heads, geometry.dim_k), generator=generator)
            bias = torch.randn((tokens, geometry.query_heads, longest), generator=generator) if params["bias"] else None
            sinks = torch.randn(geometry.query_heads, generator=generator) if params["sinks"] else None
            args = AttendParams(0.3, params["window"], sinks, bias)
            out = torch.full((tokens, geometry.query_heads, geometry.dim_v), torch.nan)
            store.attend(layer, q, out, args)
            at = 0
            for name, count in step:
                for tensor in ("k", "v"):
                    kept = geometry.rounded(rows[tensor][at : at + count])
                    history.setdefault((layer, name, tensor), []).extend(kept)
                keys, values = (np.stack(history[layer, name, tensor]) for tensor in ("k", "v"))
                for n in range(count):
                    one = None if bias is None else bias[at + n].numpy().astype(np.float64)
                    want = rig.dense(q[at + n].numpy().astype(np.float64), keys, values, starts[name] + n, args, one)
                    got = out[at + n].numpy()
                    assert np.isfinite(got).all()
                    worst = max(worst, float(np.abs(got - want).max()))
                at += count
    return worst


STEPS = [
    [("a", 1)],
    [("a", 3), ("b", 9), ("c", 1)],
    [("c", 1), ("a", 1), ("b", 1)],
    [("b", 1), ("d", 14)],
    [("a", 1), ("b", 1), ("c", 1), ("d", 1)],
]


@given(
    shape=geometries(),
    window=st.sampled_from([None, 1, 2, 7, 100]),
    sinks=st.booleans(),
    bias=st.booleans(),
    kernels=st.sampled_from(["reference", "torch", "torch"]),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_attention_through_pages_equals_dense_softmax(
    rig: ModuleType, shape: dict[str, Any], window: int | None, sinks: bool, bias: bool, kernels: str, seed: int
) -> None:
    geometry = rig.Geometry(**shape)
    store = geometry.store(kernels)
    params = {"window": window, "sinks": sinks, "bias": bias}
    assert run_steps(rig, geometry, store, STEPS, params, seed) < TOLERANCE[geometry.format]
    store.close()


@pytest.mark.parametrize("window", [None, 3])
def test_reference_attends_where_k_and_v_differ_in_heads(rig: ModuleType, window: int | None) -> None:
    geometry = rig.Geometry(heads=2, heads_v=3, dim_v=5)
    store = geometry.store("both")
    choices = {choice.op: choice for choice in store.explain()["full"]}
    assert choices["attend_decode"].chosen == "reference_attend_decode"
    assert ("torch_attend_decode", "needs as many heads in v as in k") in choices["attend_decode"].refused
    params = {"window": window, "sinks": True, "bias": True}
    assert run_steps(rig, geometry, store, STEPS, params, 5) < 2e-5
    store.close()


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("extras", [False, True])
def test_long_prompts_are_attended_in_blocks(rig: ModuleType, window: int | None, extras: bool) -> None:
    """Tuned against reference: blocks of queries, a second chunk, and rows of very different length in a decode step."""
    geometry = rig.Geometry(layers=(0,), page_size=16, units=120, dim_k=16, dim_v=16)
    generator = torch.Generator().manual_seed(1)
    results: dict[str, list[torch.Tensor]] = {}
    steps = [[("a", 700), ("b", 1)], [("a", 600), ("b", 5)], [("a", 1), ("b", 1)]]
    inputs = [
        (
            rows_of(geometry, sum(n for _, n in step), generator),
            torch.randn((sum(n for _, n in step), geometry.query_heads, 16), generator=generator),
        )
        for step in steps
    ]
    for kernels in ("reference", "torch"):
        store = geometry.store(kernels, max_tokens=1024)
        geometry.poison(store)
        book = rig.Book(list(range(119, 0, -1)), 16)
        for (rows, q), step in zip(inputs, steps, strict=True):
            store.begin(book.plan(step))
            store.store(0, rows)
            longest = max(book.lengths.values())
            bias = torch.linspace(-1, 1, longest).expand(len(q), geometry.query_heads, -1) if extras else None
            sinks = torch.linspace(-1, 1, geometry.query_heads) if extras else None
            out = torch.full_like(q, torch.nan)
            store.attend(0, q, out, AttendParams(0.25, window, sinks, bias))
            results.setdefault(kernels, []).append(out)
        store.close()
    for got, want in zip(results["torch"], results["reference"], strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


@given(shape=geometries(), kernels=st.sampled_from(["reference", "torch"]), seed=st.integers(0, 2**16))
@settings(max_examples=40, deadline=None)
def test_stored_bytes_are_where_the_layout_says(
    rig: ModuleType, shape: dict[str, Any], kernels: str, seed: int
) -> None:
    """Every byte of the arena: rows where they belong, zeros in fresh units, poison everywhere else."""
    geometry = rig.Geometry(**shape)
    generator = torch.Generator().manual_seed(seed)
    store = geometry.store(kernels)
    geometry.poison(store)
    before = store.pools["full"].arena.array().copy()
    order = list(range(1, geometry.units))
    random.Random(seed).shuffle(order)
    book = rig.Book(order, geometry.page_size)
    step = [("a", 6), ("b", 1), ("c", 3)]
    store.begin(book.plan(step))
    rows = {layer: rows_of(geometry, 10, generator) for layer in geometry.layers}
    for layer in geometry.layers:
        store.store(layer, rows[layer])
    raw, used = store.pools["full"].arena.array(), np.zeros(before.size, bool)
    for layer in geometry.layers:
        for name, (heads, dim) in geometry.tensors.items():
            kept, at = geometry.rounded(rows[layer][name]), 0
            for request, count in step:
                for unit in book.tables[request]:
                    start = geometry.address(layer, name, unit)
                    used[start : start + geometry.unit_bytes(name)] = True
                for n in range(len(book.tables[request]) * geometry.page_size):
                    unit, slot = book.tables[request][n // geometry.page_size], n % geometry.page_size
                    for head in range(heads):
                        for d in range(dim):
                            want = kept[at + n, head, d] if n < count else 0.0
                            assert geometry.value(raw, layer, name, unit, slot, head, d) == want
                at += count
    assert (raw[~used] == before[~used]).all()
    store.close()


@given(shape=geometries(), kernels=st.sampled_from(["reference", "torch"]), seed=st.integers(0, 2**16))
@settings(max_examples=25, deadline=None)
def test_load_decodes_slots_in_any_order(rig: ModuleType, shape: dict[str, Any], kernels: str, seed: int) -> None:
    geometry = rig.Geometry(**shape)
    store = geometry.store(kernels)
    geometry.poison(store)
    book = rig.Book([5, 9, 2, 7, 30, 31, 32, 33, 34, 35], geometry.page_size)
    store.begin(book.plan([("a", 9)]))
    rows = rows_of(geometry, 9, torch.Generator().manual_seed(seed))
    layer = geometry.layers[-1]
    store.store(layer, rows)
    wanted = [0, 8, -1, 3, 3, -1]
    units = book.tables["a"]
    p = geometry.page_size
    slots = torch.tensor([-1 if n < 0 else units[n // p] * p + n % p for n in wanted], dtype=torch.int32)
    out = {name: torch.full((6, *shape), torch.nan) for name, shape in geometry.tensors.items()}
    store.load(layer, slots, out)
    for name, values in out.items():
        kept = geometry.rounded(rows[name])
        want = np.stack([np.zeros(kept.shape[1:]) if n < 0 else kept[n] for n in wanted])
        np.testing.assert_array_equal(values.numpy(), want)
    store.close()


@pytest.mark.parametrize("kernels", ["reference", "torch"])
@pytest.mark.parametrize("order", ["head_major", "token_major"])
def test_offsets_are_64_bit(rig: ModuleType, kernels: str, order: str) -> None:
    """K1: int32 slots in a pool past 2³¹ bytes. A row of k and v is 576 B; the pages around keep their zeros."""
    geometry = rig.Geometry(
        format="fp32", order=order, layers=(0,), heads=2, dim_k=36, dim_v=36, page_size=1, units=4_000_002
    )
    assert sum(geometry.unit_bytes(name) for name in ("k", "v")) == 576
    store = geometry.store(kernels, builder=rig.LazyPool())
    assert store.pools["full"].arena.nbytes > 2**31
    slots = torch.tensor([3_728_270, 3_728_271, 4_000_000], dtype=torch.int32)
    rows = rows_of(geometry, 3, torch.Generator().manual_seed(0))
    plan = BatchPlan(
        step=1,
        page_size=1,
        lengths=torch.tensor([3]),
        query_indptr=torch.tensor([0, 3]),
        positions=torch.arange(3),
        slots=slots,
        page_table=slots.to(torch.int64)[None],
        host_lengths=(3,),
        host_query_indptr=(0, 3),
    )
    store.tables["full"].store(0, rows, plan, None)
    out = {name: torch.full_like(values, torch.nan) for name, values in rows.items()}
    store.load(0, slots, out)
    raw = store.pools["full"].arena.array()
    for name in ("k", "v"):
        torch.testing.assert_close(out[name], rows[name], rtol=0, atol=0)
        assert geometry.address(0, name, 4_000_000) >= 2_304_000_000
        assert geometry.value(raw, 0, name, 4_000_000, 0, 1, 35) == rows[name][2, 1, 35].item()
        for neighbour in (3_728_269, 3_728_272, 3_999_999, 4_000_001, 0):
            start = geometry.address(0, name, neighbour)
            assert not raw[start : start + 288].any()
    q = torch.randn(3, geometry.query_heads, 36)
    got, want = torch.empty_like(q), np.empty(q.shape)
    store.tables["full"].attend_prefill(0, q, got, plan, AttendParams(0.2))
    for n in range(3):
        want[n] = rig.dense(q[n].numpy(), rows["k"].numpy(), rows["v"].numpy(), n, AttendParams(0.2), None)
    np.testing.assert_allclose(got.numpy(), want, atol=1e-5)
    store.close()


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_dropped_rows_leave_null_and_last_slots_alone(rig: ModuleType, kernels: str) -> None:
    """E1: NaN rows of a dummy batch with slots [-1, -1]; a table padded by the null unit then reads real tokens only."""
    geometry = rig.Geometry(units=6)
    store = geometry.store(kernels)
    geometry.poison(store, 0x11)
    book = rig.Book([2, 4], geometry.page_size)
    store.begin(book.plan([("a", 6)]))
    rows = rows_of(geometry, 6, torch.Generator().manual_seed(3))
    store.store(0, rows)
    raw = store.pools["full"].arena.array()
    before = raw.copy()
    dummy = BatchPlan(
        step=2,
        page_size=4,
        lengths=torch.tensor([1, 1]),
        query_indptr=torch.tensor([0, 1, 2]),
        positions=torch.tensor([0, 0]),
        slots=torch.tensor([-1, -1]),
        page_table=torch.zeros((2, 1), dtype=torch.int64),
        host_lengths=(1, 1),
        host_query_indptr=(0, 1, 2),
    )
    table = store.tables["full"]
    bad = {name: torch.full((2, *shape), torch.nan) for name, shape in geometry.tensors.items()}
    table.store(0, bad, dummy, None)
    assert (raw == before).all()
    out = torch.full((2, geometry.query_heads, geometry.dim_v), torch.nan)
    table.attend_decode(0, torch.ones(2, geometry.query_heads, geometry.dim_k), out, dummy, AttendParams(1.0))
    assert (out == 0).all()
    # The same dummy row beside a real one, whose table is padded with the null unit.
    mixed = BatchPlan(
        step=3,
        page_size=4,
        lengths=torch.tensor([6, 1]),
        query_indptr=torch.tensor([0, 1, 2]),
        positions=torch.tensor([5, 0]),
        slots=torch.tensor([-1, -1]),
        page_table=torch.tensor([[2, 4, 0], [0, 0, 0]]),
        host_lengths=(6, 1),
        host_query_indptr=(0, 1, 2),
    )
    q = torch.randn(2, geometry.query_heads, geometry.dim_k)
    table.attend_decode(0, q, out, mixed, AttendParams(1.0))
    want = rig.dense(q[0].numpy(), rows["k"].numpy(), rows["v"].numpy(), 5, AttendParams(1.0), None)
    np.testing.assert_allclose(out[0].numpy(), want, atol=1e-5)
    assert (out[1] == 0).all()
    store.close()


@pytest.mark.parametrize("kernels", ["reference", "torch"])
@pytest.mark.parametrize("shared", [1, 2])
def test_garbage_past_the_end_of_a_row_is_not_read(rig: ModuleType, kernels: str, shared: int) -> None:
    """Slots past a row's length may hold NaN (a truncated request, memory that nobody zeroed): 0 × NaN is NaN."""
    geometry = rig.Geometry(units=30)
    store = geometry.store(kernels)
    book = rig.Book(list(range(1, 30)), geometry.page_size)
    step = [("a", 5), ("b", 13)][:shared]
    tokens = sum(count for _, count in step)
    store.begin(book.plan(step))
    rows = rows_of(geometry, tokens, torch.Generator().manual_seed(4))
    store.store(0, rows)
    raw = store.pools["full"].arena.array()
    for name, count in step:
        for n in range(count, len(book.tables[name]) * 4):
            for tensor in ("k", "v"):
                for head in range(2):
                    at = geometry.address(0, tensor, book.tables[name][n // 4], n % 4, head)
                    raw[at : at + 32] = 0xFF
    q = torch.randn(tokens, geometry.query_heads, geometry.dim_k)
    out = torch.full((tokens, geometry.query_heads, geometry.dim_v), torch.nan)
    store.attend(0, q, out, AttendParams(1.0))
    assert out.isfinite().all()
    for count in (None, 3):
        ends = torch.tensor([n for _, n in step]).cumsum(0) - 1
        decode = BatchPlan(
            step=2,
            page_size=4,
            lengths=torch.tensor([n for _, n in step]),
            query_indptr=torch.arange(shared + 1),
            positions=torch.tensor([n - 1 for _, n in step]),
            slots=torch.full((shared,), -1),
            page_table=torch.tensor([(book.tables[name] + [0] * 4)[:4] for name, _ in step]),
            host_lengths=tuple(n for _, n in step),
            host_query_indptr=tuple(range(shared + 1)),
        )
        params = AttendParams(1.0, window=count)
        got, want = torch.full_like(out[ends], torch.nan), torch.full_like(out, torch.nan)
        store.tables["full"].attend_decode(0, q[ends], got, decode, params)
        store.attend(0, q, want, params)
        torch.testing.assert_close(got, want[ends], rtol=0, atol=1e-5)
    store.close()


def test_a_row_does_not_depend_on_its_neighbours(rig: ModuleType) -> None:
    """The same request alone and in a ragged batch: equal but for rounding."""
    geometry = rig.Geometry(layers=(0,), units=60, dim_k=16, dim_v=16)
    outs = []
    for others in ([], [("b", 37), ("c", 2), ("d", 90)]):
        store = geometry.store("torch")
        geometry.poison(store)
        book = rig.Book(list(range(1, 60)), 4)
        step = [("a", 30), *others]
        tokens = sum(n for _, n in step)
        store.begin(book.plan(step))
        generator = torch.Generator().manual_seed(9)
        first, rest = rows_of(geometry, 31, generator), rows_of(geometry, tokens - 30, generator)
        store.store(0, {n: torch.cat([first[n][:30], rest[n]]) for n in ("k", "v")})
        step = [(name, 1) for name, _ in step]
        store.begin(book.plan(step))
        store.store(0, {n: torch.cat([first[n][30:], rest[n][: len(step) - 1]]) for n in ("k", "v")})
        q = torch.ones(len(step), geometry.query_heads, 16)
        out = torch.empty_like(q)
        store.attend(0, q, out, AttendParams(0.3))
        outs.append(out[0])
        store.close()
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kernels", ["reference", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16"])
def test_models_of_another_dtype_than_the_pool(rig: ModuleType, kernels: str, dtype: torch.dtype, format: str) -> None:
    geometry = rig.Geometry(format=format)
    store = geometry.store(kernels)
    geometry.poison(store)
    book = rig.Book(list(range(1, 12)), 4)
    store.begin(book.plan([("a", 9)]))
    rows = {name: values.to(dtype) for name, values in rows_of(geometry, 9, torch.Generator().manual_seed(2)).items()}
    store.store(1, rows)
    q = torch.randn((9, geometry.query_heads, 8)).to(dtype)
    out = torch.full_like(q, torch.nan)
    store.attend(1, q, out, AttendParams(0.3))
    kept = {name: geometry.rounded(values) for name, values in rows.items()}
    for n in range(9):
        want = rig.dense(q[n].float().numpy(), kept["k"], kept["v"], n, AttendParams(0.3), None)
        np.testing.assert_allclose(out[n].float().numpy(), want, atol=3e-2)
    store.close()


@pytest.mark.parametrize("kernels", ["reference", "torch"])
def test_one_head_is_not_broadcast_to_all(rig: ModuleType, kernels: str) -> None:
    geometry = rig.Geometry()
    store = geometry.store(kernels)
    book = rig.Book([1, 2], 4)
    plan = book.plan([("a", 2)])
    store.begin(plan)
    batch = store.plan("full")
    rows = {name: torch.ones(2, 1, 8) for name in ("k", "v")}
    with pytest.raises(LayoutError):
        store.tables["full"].store(0, rows, batch, None)
    with pytest.raises(LayoutError):
        store.store(0, rows)
    assert not store.pools["full"].arena.array().any()
    store.close()


@given(
    shape=geometries(format="fp32"),
    kernels=st.sampled_from(["reference", "torch"]),
    pairs=st.lists(st.integers(1, 39), min_size=2, max_size=12, unique=True),
)
@settings(max_examples=25, deadline=None)
def test_copy_units_copies_whole_units_and_nothing_else(
    rig: ModuleType, shape: dict[str, Any], kernels: str, pairs: list[int]
) -> None:
    geometry = rig.Geometry(**shape)
    store = geometry.store(kernels)
    raw = store.pools["full"].arena.array()
    raw[:] = np.random.default_rng(len(pairs)).integers(0, 256, raw.size, np.uint8)
    want, half = raw.copy(), len(pairs) // 2
    src, dst = pairs[:half], pairs[half : 2 * half]
    for layer in geometry.layers:
        for name in ("k", "v"):
            size = geometry.unit_bytes(name)
            for a, b in zip(src, dst, strict=True):
                to, frm = geometry.address(layer, name, b), geometry.address(layer, name, a)
                want[to : to + size] = raw[frm : frm + size]
    store.tables["full"].copy_units("pages", torch.tensor(src), torch.tensor(dst))
    assert (raw == want).all()
    store.close()


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 20]),
)
@settings(max_examples=50, deadline=None)
def test_decode_gathers_at_most_twice_what_rows_hold(lengths: list[int], page_size: int, window: int | None) -> None:
    """A short row beside a long one is not padded to its length; every live token is gathered once."""
    seen = []
    for bucket in paged_attention._buckets(tuple(lengths), page_size, window):
        rows = range(len(lengths)) if bucket.rows is None else bucket.rows.tolist()
        seen += rows
        for n, row in enumerate(rows):
            first = 0 if window is None else max(0, lengths[row] - window)
            live = -(-lengths[row] // page_size) - first // page_size
            assert live <= bucket.columns.shape[1] <= 2 * live
            shown = bucket.keys[n][~bucket.hidden[n]].tolist()
            assert shown == list(range(first, lengths[row]))
    assert sorted(seen) == list(range(len(lengths)))
