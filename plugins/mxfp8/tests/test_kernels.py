"""The kernels for the CPU, of torch and of Numba, against the reference: bytes bit for bit, attention by its values, over poisoned memory."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.contract import AttendParams
from kvcore.errors import LayoutError
from kvcore.spec import LayerGroup
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2

FORMATS = [
    pytest.param(Mxfp8(), id="flat"),
    pytest.param(Mxfp8(order="token_major", scale_rule="floor"), id="flat-token-floor"),
    pytest.param(Mxfp8(scale_layout="interleaved", scale_rule="floor"), id="interleaved-floor"),
    pytest.param(Mxfp8E5m2(scale_layout="interleaved", order="token_major"), id="e5m2-interleaved-token"),
    pytest.param(Mxfp8E5m2(tensor_scale=0.3), id="e5m2-scaled"),
    pytest.param(Mxfp8(tensor_scale=0.7, scale_layout="interleaved"), id="scaled-interleaved"),
]
FORMAT = pytest.mark.parametrize("fmt", FORMATS)
STEPS = [
    [("a", 37), ("b", 1)],
    [("a", 1), ("b", 70)],
    [("b", 1), ("a", 1)],
    [("c", 3), ("a", 40)],
    [("a", 1), ("c", 1)],
]


TUNED = pytest.mark.usefixtures("tuned")


def test_they_are_chosen(rig: ModuleType, tuned: str) -> None:
    with rig.cache(Mxfp8(), rig.group()) as cache:
        choices = {choice.op: choice for choice in cache.explain()["full"]}
    assert {op: choice.chosen for op, choice in choices.items()} == {
        "store": f"mxfp8_{tuned}_store",
        "load": f"mxfp8_{tuned}_load",
        "attend_decode": f"mxfp8_{tuned}_attend_decode",
        "attend_prefill": f"mxfp8_{tuned}_attend_prefill",
        "copy_units": "torch_copy_units",
    }
    other = {"torch": "numba", "numba": "torch"}[tuned]
    assert f"mxfp8_{other}_store" in dict(choices["store"].refused)
    with rig.cache(Mxfp8(), rig.group(), tuned=False) as cache:
        assert all("mxfp8" not in choice.chosen for choice in cache.explain()["full"])


def steps(
    rig: ModuleType, cache: Any, item: LayerGroup, window: int | None, extras: bool, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Prompts and decoded tokens of three requests; the answers of every layer and step."""
    answers = []
    for name, tokens in (("a", 37), ("b", 1), ("c", 3)):
        cache.admit(name, tokens)
    for n, batch in enumerate(STEPS):
        count = sum(tokens for _, tokens in batch)
        generator = torch.Generator().manual_seed(n)
        with cache.begin(batch) as step:
            for layer in item.layers:
                step.store(layer, rig.rows(item, count, 10 * n + layer, dtype=dtype))
                q = torch.randn((count, item.num_query_heads, item.tensors[0].head_dim), generator=generator).to(dtype)
                longest = step.batch(item.prefix).max_length
                bias = torch.randn((count, item.num_query_heads, longest), generator=generator) if extras else None
                sinks = torch.randn(item.num_query_heads, generator=generator) if extras else None
                out = torch.full((count, item.num_query_heads, item.tensors[1].head_dim), torch.nan, dtype=dtype)
                step.attend(layer, q, out, AttendParams(0.01, window, sinks, bias))
                answers.append(out)
            step.commit()
    return answers


@dataclass(frozen=True)
class Done:
    """What the kernels of any format made of the steps: answers, units of each request, every byte of the pool."""

    answers: list[torch.Tensor]
    units: dict[str, np.ndarray]
    arena: np.ndarray


DONE: dict[object, Done] = {}
"""The reference is slow, and is asked once for each kind of kernels."""


def reference(
    rig: ModuleType,
    fmt: Mxfp8,
    item: LayerGroup,
    window: int | None,
    extras: bool,
    dtype: torch.dtype,
    settings: dict[str, object],
) -> Done:
    key = (id(fmt), item, extras, dtype, tuple(settings.items()))
    if key not in DONE:
        with rig.cache(fmt, item, tuned=False, **settings) as cache:
            answers = steps(rig, cache, item, window, extras, dtype)
            units = {name: np.array(cache.units(name, item.prefix, "pages")) for name in "abc"}
            DONE[key] = Done(answers, units, cache.store.pools[item.prefix].arena.array().copy())
    return DONE[key]


@TUNED
@FORMAT
@pytest.mark.parametrize(("window", "extras"), [(None, False), (33, True)])
@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_bytes_and_answers_of_many_steps(
    rig: ModuleType, fmt: Mxfp8, window: int | None, extras: bool, arena: str
) -> None:
    item = rig.group(window=window or 0)
    # Pages of 32 tokens would hide the order inside a chunk.
    page = 64 if fmt.scale_layout == "interleaved" else 32
    settings = {"cache.arena": arena, "cache.memory": "2MiB", "page": page}
    want = reference(rig, fmt, item, window, extras, torch.float32, settings)
    with rig.cache(fmt, item, **settings) as ours:
        got = steps(rig, ours, item, window, extras, torch.float32)
        for one, other in zip(got, want.answers, strict=True):
            assert one.isfinite().all()
            torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * float(other.abs().max()))
        for name, units in want.units.items():
            np.testing.assert_array_equal(ours.units(name, item.prefix, "pages"), units)
        np.testing.assert_array_equal(ours.store.pools[item.prefix].arena.array(), want.arena)


@TUNED
@FORMAT
def test_queries_in_bf16(rig: ModuleType, fmt: Mxfp8) -> None:
    item = rig.group((64, 128))
    settings = {"page": 256, "cache.memory": "4MiB"}  # two chunks of interleaved scales
    want = reference(rig, fmt, item, None, False, torch.bfloat16, settings)
    with rig.cache(fmt, item, **settings) as ours:
        got = steps(rig, ours, item, None, False, torch.bfloat16)
        for one, other in zip(got, want.answers, strict=True):
            scale = float(other.float().abs().max())
            torch.testing.assert_close(one.float(), other.float(), rtol=0.03, atol=0.02 * scale)
        np.testing.assert_array_equal(ours.store.pools["full"].arena.array(), want.arena)


@TUNED
@FORMAT
def test_only_valid_rows_are_written_scales_included(rig: ModuleType, fmt: Mxfp8) -> None:
    """Speculation: of eight drafted tokens three are accepted. Not a byte of the others is written, of either component."""
    item = rig.group()
    with rig.cache(fmt, item) as cache:
        cache.admit("a", 30)
        rig.write(cache, "a", 30, 1)
        before = cache.store.pools["full"].arena.array().copy()
        valid = torch.tensor([True, True, True, False, False, False, False, False])
        drafted = {layer: rig.rows(item, 8, 50 + layer) for layer in item.layers}
        with cache.begin([("a", 8)]) as step:
            for layer, values in drafted.items():
                step.store(layer, values, valid)
            step.commit([3])
        assert cache.length("a") == 33
        tokens = range(30, 38)
        for layer, values in drafted.items():
            want = fmt.encode(cache.layouts["full"], values)
            for name in ("k", "v"):
                for region, field in ((name, "x"), (f"{name}_block_scale", "scale")):
                    got = rig.raw(cache, layer, "full", region, "a", tokens)
                    np.testing.assert_array_equal(got[:3], want[region, field].view(torch.uint8)[:3].numpy())
                    assert not got[3:].any(), region
        # Nothing else of the pool changed: what is left is the new page, zeroed, and the accepted rows.
        page = int(cache.units("a", "full", "pages")[1])
        after = cache.store.pools["full"].arena.array()
        envelope = cache.layouts["full"].envelope_bytes if fmt.tensor_scale is None else None
        if envelope:
            changed = np.flatnonzero(after != before) // envelope
            assert set(changed.tolist()) <= {page, int(cache.units("a", "full", "pages")[0])}


@TUNED
@FORMAT
def test_unwritten_slots_are_zero_in_recycled_pages(rig: ModuleType, fmt: Mxfp8) -> None:
    """An E8M0 byte of 0xFF is NaN: pages are full of it before they are handed out, and no slot reads as anything but 0."""
    item = rig.group()
    with rig.cache(fmt, item) as cache:
        cache.admit("old", 64)
        rig.write(cache, "old", 64, 1)
        cache.release("old")
        cache.admit("new", 5)
        rig.write(cache, "new", 5, 2)
        at = torch.cat([rig.slots(cache, "new", "full", range(5, 32)), torch.tensor([-1, 3])])  # −1, and the null unit
        for layer in item.layers:
            for dtype in (torch.float32, torch.bfloat16):
                for name, values in rig.load(cache, layer, item, at, dtype).items():
                    assert not values.any(), name


@TUNED
def test_rare_blocks_among_ordinary_ones(rig: ModuleType) -> None:
    """NaN and infinity in one token leave every other token as it was."""
    item = rig.group((64, 64), layers=(0,))
    for fmt in (Mxfp8(), Mxfp8(scale_rule="floor"), Mxfp8E5m2(), Mxfp8E5m2(scale_rule="floor")):
        with rig.cache(fmt, item) as ours, rig.cache(fmt, item, tuned=False) as theirs:
            for cache in (ours, theirs):
                cache.admit("a", 20)
                values = rig.rows(item, 20, 7)
                values["k"][4, 1, 3], values["k"][9, 0, 40], values["v"][11, 1, 63] = torch.nan, torch.inf, -torch.inf
                values["v"][12] = 0.0
                values["k"][13] = 1e-42
                values["k"][14] *= 1e36
                with cache.begin([("a", 20)]) as step:
                    step.store(0, values)
                    step.commit()
            at = rig.slots(ours, "a", "full", range(20))
            got, want = rig.load(ours, 0, item, at), rig.load(theirs, 0, item, at)
            for name in ("k", "v"):
                torch.testing.assert_close(got[name], want[name], rtol=0, atol=0, equal_nan=True)
            assert got["k"][4, 1, :32].isnan().all()
            assert got["k"][9, 0, 40].isinf()
            assert got["k"][[0, 1, 2, 3, 5]].isfinite().all()


@pytest.mark.usefixtures("without_numba")
def test_pieces_do_not_show(rig: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch: the same bytes and values when a call is cut into many pieces."""
    from kvcore_mxfp8.cpu import fast, pages

    item = rig.group()
    found = []
    for piece in (fast.PIECE, 700):
        monkeypatch.setattr(fast, "PIECE", piece)
        monkeypatch.setattr(pages, "PIECE", piece)
        with rig.cache(Mxfp8(), item) as cache:
            cache.admit("a", 70)
            rig.write(cache, "a", 70, 3, valid=torch.arange(70) % 5 != 2)
            order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
            at = rig.slots(cache, "a", "full", order.tolist())
            found.append((cache.store.pools["full"].arena.array().copy(), rig.load(cache, 3, item, at)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    for name in ("k", "v"):
        assert torch.equal(found[0][1][name], found[1][1][name])


@TUNED
def test_outputs_that_are_not_contiguous(rig: ModuleType) -> None:
    item = rig.group()
    with rig.cache(Mxfp8(), item) as cache:
        cache.admit("a", 9)
        stored = rig.write(cache, "a", 9, 3)
        at = rig.slots(cache, "a", "full", range(9))
        want = rig.load(cache, 0, item, at)
        out = {
            t.name: torch.full((t.num_heads, 9, 2 * t.head_dim), torch.nan).transpose(0, 1)[..., ::2]
            for t in item.tensors
        }
        cache.store.load(0, at, out)
        for name, values in out.items():
            assert torch.equal(values, want[name])
        with cache.begin([("a", 9)]) as step:  # and rows
            step.store(0, {n: v.transpose(0, 1).contiguous().transpose(0, 1) for n, v in stored[0].items()})
            step.commit()
        again = rig.load(cache, 0, item, rig.slots(cache, "a", "full", range(9, 18)))
        for name, values in again.items():
            assert torch.equal(values, want[name])


@TUNED
def test_rows_of_another_shape_are_refused(rig: ModuleType) -> None:
    """An indexed write would spread one head over all of them."""
    item = rig.group()
    with rig.cache(Mxfp8(), item) as cache:
        cache.admit("a", 2)
        with cache.begin([("a", 2)]) as step:
            table = cache.store.tables["full"]
            values = {name: value[:, :1] for name, value in rig.rows(item, 2, 1).items()}
            with pytest.raises(LayoutError, match="rows do not match"):
                table.store(0, values, step.batch("full"), None)
            step.abandon()


@TUNED
def test_memory_that_is_kept_serves_with_and_without_inference_mode(rig: ModuleType) -> None:
    item = rig.group()
    for first in (True, False):
        with rig.cache(Mxfp8(tensor_scale=0.5), item) as cache:
            cache.admit("a", 12)
            for mode in (first, not first):
                with torch.inference_mode(mode):
                    rig.write(cache, "a", 3, 1)
                    at = rig.slots(cache, "a", "full", range(3))
                    q, out = torch.ones(3, 4, 80), torch.full((3, 4, 64), torch.nan)
                    rig.load(cache, 0, item, at)
                    with cache.begin([("a", 3)]) as step:
                        for layer in item.layers:
                            step.store(layer, rig.rows(item, 3, 2))
                            step.attend(layer, q, out, AttendParams(0.1))
                        step.commit()
                    assert out.isfinite().all()


def test_heads_are_rows_where_strides_allow_it(rig: ModuleType) -> None:
    """Torch: both ways of addressing are in use above: of heads of 80 in units that 80 does not divide, and of 64."""
    from kvcore_mxfp8.cpu.pages import StoredTensor

    for order in ("head_major", "token_major"):
        with rig.cache(Mxfp8(order=order), rig.group((80, 64))) as cache:  # type: ignore[arg-type]
            pool = cache.store.pools["full"]
            ways = {n: StoredTensor(pool, n, "rceil").tokens[3]._rows is not None for n in ("k", "v")}
        assert ways == {"k": False, "v": True}
