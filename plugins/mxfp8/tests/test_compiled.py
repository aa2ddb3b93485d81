"""What Numba compiles: when it serves, that it touches nothing but its rows, and numbers that only its short cuts see.

That it rounds right is shown in ``test_values.py``, and that it finds its bytes in ``test_kernels.py``.
"""

from __future__ import annotations

import mmap
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.tensors import torch_dtype
from kvcore_mxfp8.cpu.numba_support import device_support
from kvcore_mxfp8.elements import E4M3, E5M2, ELEMENTS, Element
from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2
from kvcore_mxfp8.reference import dequantise, quantise

ELEMENT = pytest.mark.parametrize("element", [E4M3, E5M2], ids=list(ELEMENTS))
RULE = pytest.mark.parametrize("rule", ["rceil", "floor"])


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal bits, but for those of NaN."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.element_size()]
    differ = (got.view(width) != want.view(width)) & ~(got.float().isnan() & want.float().isnan())
    assert not differ.any(), f"{int(differ.sum())} differ, the first at {differ.nonzero()[0].tolist()}"


def test_refusals_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "runs on the CPU" in device_support("cuda:0").reason
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "kvcore-mxfp8[cpu]" in device_support("cpu").reason
    monkeypatch.undo()
    numba = pytest.importorskip("numba")
    assert device_support("cpu").ok
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    assert "NUMBA_DISABLE_JIT" in device_support("cpu").reason
    monkeypatch.delenv("NUMBA_DISABLE_JIT")
    monkeypatch.setattr(numba, "version_info", SimpleNamespace(short=(0, 60)))
    assert "0.68 or newer" in device_support("cpu").reason


def test_a_numba_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Installed, and made for an older NumPy: Numba says so with an ImportError, and torch has to serve."""
    (tmp_path / "numba.py").write_text('raise ImportError("Numba needs NumPy 1.99 or less")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    assert "Numba needs NumPy 1.99 or less" in device_support("cpu").reason


def test_without_numba_torch_serves(rig: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optional dependency that is missing must not break what does not need it; the reason is shown."""
    for name in [n for n in sys.modules if n.startswith("kvcore_mxfp8.cpu.numba_") or n.split(".")[0] == "numba"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numba", None)
    item = rig.group()
    with rig.cache(Mxfp8(), item) as cache:
        choices = {choice.op: choice for choice in cache.explain()["full"]}
        assert choices["store"].chosen == "mxfp8_torch_store"
        assert "not installed" in dict(choices["store"].refused)["mxfp8_numba_store"]
        cache.admit("a", 3)
        rig.write(cache, "a", 3, 1)


def test_where_no_cache_can_be_written_it_compiles_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba raises when it finds no directory for its cache: then nothing is kept, and nothing else changes."""
    pytest.importorskip("numba")
    from kvcore_mxfp8.cpu import numba_kernels

    asked = []

    def njit(**options: Any) -> Any:
        asked.append(options)
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: function

    def kernel() -> int:
        return 0

    monkeypatch.setattr(numba_kernels, "njit", njit)
    assert numba_kernels._compiled(kernel) is kernel
    assert [options.get("cache", False) for options in asked] == [True, False]


def test_what_is_kept_on_disk_is_of_these_sources(compiled: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numba looks for changes in the file of a kernel alone: code compiled from other lanes must not be found."""
    from kvcore_mxfp8.cpu import numba_kernels

    def kernel() -> int:
        return 0

    found = []
    for source in ("one", "another"):
        kernel.__qualname__ = "kernel"
        monkeypatch.setattr(numba_kernels.inspect, "getsource", lambda module, source=source: source)
        index = numba_kernels._compiled(kernel)._cache.cache_path, kernel.__qualname__
        found.append(index)
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


@ELEMENT
@RULE
@pytest.mark.parametrize("exponent", [1, 27, 28, 34, 35, 36, 127, 236, 237, 238, 245, 246, 254])
def test_every_bf16_number_beside_a_larger_one(
    compiled: ModuleType, element: Element, rule: str, exponent: int
) -> None:
    """All magnitudes up to the largest of their block, of both signs. Rows in bf16 are rounded as 16-bit integers where
    scales are neither tiny nor huge, and numbers that become subnormal must not be."""
    for top in (exponent << 7, (exponent << 7) + 0x60, (exponent << 7) + 0x61, (exponent << 7) + 0x7F):
        magnitudes = torch.arange(top + 1, dtype=torch.int32)
        magnitudes = torch.cat([magnitudes, magnitudes.new_zeros(-len(magnitudes) % 31)]).view(-1, 31)
        block = torch.cat([torch.full((len(magnitudes), 1), top, dtype=torch.int32), magnitudes], 1)
        for sign in (0, 0x8000):
            values = (block | sign).to(torch.int16).view(torch.bfloat16)
            elements, scales = compiled.quantise(values, element, rule)
            want, exact = quantise(values, element, rule)  # type: ignore[arg-type]
            assert torch.equal(scales, exact)
            same(elements, want)


@ELEMENT
@RULE
@pytest.mark.parametrize("dim", [32, 33, 80])
def test_hard_blocks_in_bf16_and_tensor_scales(
    blocks: ModuleType, compiled: ModuleType, element: Element, rule: str, dim: int
) -> None:
    source = blocks.adversarial(7, 4096).flatten()
    source = source[: len(source) // dim * dim].view(-1, dim)
    for values in (source.bfloat16(), source):
        for scale in (None, 0.3, 3.0e-5):
            divided = values if scale is None else values.float() / torch.tensor(scale, dtype=torch.float32)
            want, exact = quantise(divided, element, rule)  # type: ignore[arg-type]
            given = None if scale is None else float(np.float32(scale))
            elements, scales = compiled.quantise(values, element, rule, given)
            assert torch.equal(scales, exact)
            same(elements, want)


@ELEMENT
@pytest.mark.parametrize("dim", [32, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_with_tensor_scales(compiled: ModuleType, element: Element, dim: int, dtype: torch.dtype) -> None:
    """Products are rounded after each factor in fp32, then to the row's dtype: to nearest, subnormal and infinite too."""
    count = 256 * 256 // 8
    codes = torch.randint(0, 256, (count, dim), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    codes[:, :32] = torch.arange(256, dtype=torch.uint8).view(8, 32).repeat(count // 8, 1)
    blocks = -(-dim // 32)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(count // 256)[:, None].repeat(1, blocks)
    plain = dequantise(codes.view(torch_dtype(element.dtype)), scales)
    for scale in (None, 0.7, 3.0e-39, 1.0e30):
        want = plain if scale is None else plain * torch.tensor(scale, dtype=torch.float32)
        out = torch.full((count, dim), torch.nan, dtype=dtype)
        compiled.Dequantiser(element, dim)(codes, scales, out, None if scale is None else float(np.float32(scale)))
        same(out, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_rows_that_lie_anywhere(rig: ModuleType, dtype: torch.dtype) -> None:
    """Rows in the middle of others, at odd addresses, heads before tokens: the bytes are those of dense rows, and what
    lies around an output stays as it was."""
    pytest.importorskip("numba")
    item = rig.group((80, 64))
    with rig.cache(Mxfp8(), item) as cache:
        cache.admit("a", 9)
        dense = rig.rows(item, 9, 5, dtype=dtype)
        spread = {}
        for name, values in dense.items():
            around = torch.full((3, 11, values.shape[2] + 5), torch.nan, dtype=dtype)
            spread[name] = around[1:, 1:10, 3:-2].transpose(0, 1)
            spread[name].copy_(values)
            assert spread[name].data_ptr() % (2 * values.element_size())
        for rows in (dense, spread):
            with cache.begin([("a", 9)]) as step:
                step.store(3, rows)
                step.commit()
        at = rig.slots(cache, "a", "full", range(18))
        want = rig.load(cache, 3, item, at, dtype)
        around = {t.name: torch.full((2, 20, t.head_dim + 5), 77.0, dtype=dtype) for t in item.tensors}
        cache.store.load(3, at, {name: out[:, 1:19, 3:-2].transpose(0, 1) for name, out in around.items()})
        for name, out in around.items():
            assert torch.equal(want[name][:9], want[name][9:])
            assert torch.equal(out[:, 1:19, 3:-2].transpose(0, 1), want[name])
            out[:, 1:19, 3:-2] = 77.0
            assert bool(out.eq(77.0).all())


def test_slots_outside_of_the_pool_are_refused(rig: ModuleType) -> None:
    """Compiled code checks no bounds of its own: neither bytes of other memory are written, nor any of the call."""
    pytest.importorskip("numba")
    item = rig.group(layers=(0,))
    with rig.cache(Mxfp8E5m2(), item) as cache:
        cache.admit("a", 2)
        pool = cache.store.pools["full"]
        end = pool.end_unit("pages") * 32
        with cache.begin([("a", 2)]) as step:
            before = pool.arena.array().copy()
            table, plan = cache.store.tables["full"], step.batch("full")
            kept = plan.slots.clone()
            plan.slots[1] = end
            with pytest.raises(IntegrityError, match="outside the pool") as caught:
                table.store(0, rig.rows(item, 2, 1), plan, None)
            assert caught.value.fields["slot"] == end
            plan.slots.copy_(kept)
            with pytest.raises(LayoutError, match="rows do not match"):
                table.store(0, rig.rows(item, 3, 1), plan, None)
            with pytest.raises(LayoutError, match="valid does not match"):
                table.store(0, rig.rows(item, 2, 1), plan, torch.ones(1, dtype=torch.bool))
            with pytest.raises(NotImplementedError):  # no bytes, on a device with addresses of its own
                table.store(0, {name: values.to("meta") for name, values in rig.rows(item, 2, 1).items()}, plan, None)
            np.testing.assert_array_equal(pool.arena.array(), before)
            with pytest.raises(IntegrityError, match="outside the pool"):
                table.load(0, torch.tensor([2**40]), {t.name: torch.empty(1, 2, t.head_dim) for t in item.tensors})
            step.abandon()


def test_units_far_away(compiled: ModuleType) -> None:
    """K1: a slot times the bytes of a unit exceeds 32 bits in a large pool. Only the pages touched take memory."""
    from kvcore_mxfp8.cpu.numba_kernels import load_rows, store_rows

    unit, dim, far = 1 << 20, 32, 4500
    file = os.memfd_create("far")
    os.ftruncate(file, (far + 1) * unit)
    with mmap.mmap(file, (far + 1) * unit) as memory:
        pool = np.frombuffer(memory, np.uint8)
        values, out = torch.linspace(-1, 1, dim), torch.full((dim,), torch.nan)
        slots = torch.tensor([far])
        none = np.zeros((2, 1), np.int64)
        places = ((1, 0, far + 1, unit, unit, dim), none, none, np.array([dim]))
        where, extra = (pool.ctypes.data, pool.ctypes.data), (False, True, False, 1.0)
        like = np.float32(0)
        assert store_rows(like, values.data_ptr(), 0, 0, slots.data_ptr(), 0, 1, *places, *where, extra) == -1
        elements, scales = quantise(values[None], E4M3, "rceil")
        got = pool[far * unit : far * unit + dim + 1]
        assert got.tolist() == [*elements.view(torch.uint8)[0].tolist(), int(scales)]
        assert load_rows(like, out.data_ptr(), 0, 0, slots.data_ptr(), 1, *places, *where, extra) == -1
        assert torch.equal(out, dequantise(elements, scales)[0])
        del pool, got
    os.close(file)
