"""Triton store and load in the interpreter, bit for bit against the reference. Run by test_triton_interpreter.py."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
import torch
from triton_rig import LAYOUTS, SLOW, Rig, one_row, slow_dtypes

from kvcore.builtin.kernels.reference import ReferenceLoad
from kvcore.contract import FULL, Arena, PoolBuilder, Support
from kvcore.memory.pool import Pool
from kvcore.plugins import load_plugins
from kvcore.plugins.dispatch import choose_kernels


def bits(values: torch.Tensor) -> torch.Tensor:
    """Values as integers, every NaN the same."""
    kind = {2: torch.int16, 4: torch.int32}[values.dtype.itemsize]
    return values.masked_fill(values.isnan(), torch.nan).view(kind)


def adversarial(count: int, dim: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Rows ``[count, 1, dim]`` of every magnitude: subnormals, zeros of both signs, largest numbers, ties, Inf, NaN."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(0, 255, (count, -(-dim // 32), 1))
    spread = rng.integers(0, 14, (count, exponent.shape[1], 32))
    raw = rng.integers(0, 2**23, spread.shape) & rng.choice([0x7FFFFF, 0x780000, 0x7C0000, 0x600000], spread.shape)
    patterns = (np.maximum(exponent - spread, 0) << 23 | raw | rng.integers(0, 2, spread.shape) << 31).astype(np.uint32)
    patterns[rng.random(patterns.shape) < 0.05] = 0x80000000
    patterns[rng.random(patterns.shape) < 0.05] = 0
    patterns[0 : count // 8, :, 3] = 0x7F800000  # Inf
    patterns[count // 8 : count // 4, 0, 31] = 0xFFC00001  # NaN
    patterns[count // 16 : count // 8, 0, 5] = 0xFF800000  # Inf and -Inf
    values = torch.from_numpy(patterns.view(np.float32).reshape(count, 1, -1)[..., :dim].copy())
    return values.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow_dtypes(torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("rule", ["rceil", "floor"])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_store_writes_the_bytes_of_the_reference(name: str, rule: str, dtype: torch.dtype) -> None:
    rig = Rig((1, 64), (1, 48), name=name, page_size=64, units=12, options={"scale_rule": rule})
    mine, reference = rig.bind("store")
    plan = rig.plan([640], [640])
    rows = {"k": adversarial(640, 64, dtype, 1), "v": adversarial(640, 48, dtype, 2)}
    assert rows["k"].isnan().any()
    assert rows["k"].isinf().any()
    mine(2, rows, plan)
    reference(2, rows, plan)
    got, want = rig.bytes()
    np.testing.assert_array_equal(got, want)


@SLOW
@pytest.mark.parametrize("rule", ["rceil", "floor"])
def test_every_magnitude_of_bf16_gets_the_scale_and_element_of_the_reference(rule: str) -> None:
    """Every bf16 pattern once as the largest of its block."""
    rig = Rig((32, 32), (1, 32), page_size=32, units=35, options={"scale_rule": rule})
    mine, reference = rig.bind("store")
    plan = rig.plan([1024], [1024])
    patterns = torch.arange(0x8000, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    fractions = torch.tensor([1.0, -0.5, 0.75, 2.0**-9, -(2.0**-12), 0.0, 1.0 / 3]).to(torch.bfloat16)
    block = torch.cat([fractions, fractions.new_full((25,), -0.9)])
    k = (patterns[:, None] * block[None, :]).view(1024, 32, 32)
    rows = {"k": k, "v": torch.zeros(1024, 1, 32, dtype=torch.bfloat16)}
    mine(5, rows, plan)
    reference(5, rows, plan)
    got, want = rig.bytes()
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arena", ["page_major", pytest.param("layer_major", marks=SLOW)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda item: "-".join(item.values()))
@pytest.mark.parametrize(
    ("k", "v", "page_size"), [((2, 80), (2, 48), 32), pytest.param((3, 160), (3, 16), 128, marks=SLOW)]
)
def test_layouts_orders_and_odd_heads(
    layout: dict[str, str], arena: str, k: tuple[int, int], v: tuple[int, int], page_size: int
) -> None:
    """Scatter and gather over pages in random order, some rows dropped; both widths have a shorter last block."""
    rig = Rig(k, v, query_heads=k[0], page_size=page_size, units=6, arena=arena, options=layout)
    plan = rig.plan([page_size + 5, 3, 2 * page_size], [9, 3, 21])
    plan.slots[[0, 4, 30]] = -1
    valid = torch.rand(33, generator=torch.Generator().manual_seed(3)) > 0.3
    # Strides that are not those of a dense tensor.
    generator = torch.Generator().manual_seed(4)
    rows = {
        "k": torch.randn((k[0], 33, k[1]), generator=generator).transpose(0, 1),
        "v": torch.randn((33, v[0], v[1] + 7), generator=generator)[..., : v[1]],
    }
    mine, reference = rig.bind("store")
    mine(5, rows, plan, valid)
    reference(5, rows, plan, valid)
    got, want = rig.bytes()
    assert (got != 0xFF).any()
    np.testing.assert_array_equal(got, want)

    slots = torch.cat([plan.slots[valid], torch.tensor([-1, 0, 1, -1])])
    mine, reference = rig.bind("load")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        outs = [
            {name: torch.full((len(slots), *shape), 7.0, dtype=dtype) for name, shape in (("k", k), ("v", v))}
            for _ in range(2)
        ]
        mine(5, slots, outs[0])
        reference(5, slots, outs[1])
        for name in "kv":
            assert outs[1][name].any()
            assert torch.equal(bits(outs[0][name]), bits(outs[1][name])), (name, dtype)
            assert not outs[0][name][-4:].any(), "unwritten and dropped slots are zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow_dtypes(torch.float32, torch.float16)], ids=str)
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_load_decodes_every_byte_of_payload_with_every_scale(name: str, dtype: torch.dtype) -> None:
    rig = Rig((8, 256), (1, 32), name=name, page_size=32, units=3)
    for pool in rig.pools:
        codes = torch.arange(256).to(torch.uint8)
        pool.field(2, "k", "x")[1] = codes
        pool.field(2, "k_block_scale", "scale")[1] = torch.arange(256).to(torch.uint8).view(8, 32, 1)
    slots = torch.arange(32, 64)
    mine, reference = rig.bind("load")
    outs = [{"k": torch.zeros((32, 8, 256), dtype=dtype), "v": torch.zeros((32, 1, 32), dtype=dtype)} for _ in range(2)]
    mine(2, slots, outs[0])
    reference(2, slots, outs[1])
    assert outs[1]["k"].isnan().any()
    assert torch.equal(bits(outs[0]["k"]), bits(outs[1]["k"]))


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
def test_tensor_scales_divide_what_is_stored_and_multiply_what_is_loaded(name: str) -> None:
    """A3: a calibrated scale reaches the bytes, of each layer its own."""
    rig = Rig(name=name, options={"tensor_scale": "calibrated"})
    plan = rig.plan([20], [20])
    rows = {n: adversarial(20, 128, torch.float32, 7).reshape(20, 2, 64) for n in "kv"}
    mine, reference = rig.bind("store")
    for layer in rig.layers:
        mine(layer, rows, plan)
        reference(layer, rows, plan)
    got, want = rig.bytes()
    np.testing.assert_array_equal(got, want)
    outs = [{n: torch.zeros(21, 2, 64) for n in "kv"} for _ in range(2)]
    slots = torch.cat([plan.slots, torch.tensor([-1])])
    mine, reference = rig.bind("load")
    mine(2, slots, outs[0])
    reference(2, slots, outs[1])
    for n in "kv":
        assert torch.equal(bits(outs[0][n]), bits(outs[1][n]))


class _Sparse(Arena):
    """Zeroed memory that costs nothing where it is not touched."""

    fd, device = None, "cpu"

    def __init__(self, nbytes: int) -> None:
        fd = os.memfd_create("sparse")
        os.truncate(fd, nbytes)
        self._bytes = np.frombuffer(mmap.mmap(fd, nbytes), np.uint8)
        os.close(fd)
        self.nbytes, self.address = nbytes, self._bytes.ctypes.data

    def tensor(self) -> torch.Tensor:
        return torch.from_numpy(self._bytes)

    def array(self) -> np.ndarray:
        return self._bytes

    def close(self) -> None:
        pass


class _SparsePool(PoolBuilder):
    name = "sparse"

    def supports(self, device: str, layout: object) -> Support:
        return FULL

    def allocate(self, nbytes: int, device: str) -> Arena:
        return _Sparse(nbytes)


def test_offsets_are_64_bit() -> None:
    """B2: a unit times its stride passes 2 ** 32."""
    rig = Rig((1, 32), (1, 64), page_size=32, units=3)
    layout = rig.pools[0].layout
    units = 2**33 // layout.envelope_bytes
    rig.pools = [Pool(layout, {"pages": units}, _SparsePool()) for _ in range(2)]
    assert rig.pools[0].arena.nbytes > 2**32
    generator = torch.Generator().manual_seed(1)
    rows = {"k": torch.randn((4, 1, 32), generator=generator), "v": torch.randn((4, 1, 64), generator=generator)}
    slots = torch.tensor([units * 32 - 1, (units // 2) * 32 + 3, (units // 3) * 32, 40])
    plan = one_row(rig.plan([4], [4]), slots)
    mine, reference = rig.bind("store")
    mine(5, rows, plan)
    reference(5, rows, plan)
    load, _ = rig.bind("load")
    outs = [{"k": torch.zeros(4, 1, 32), "v": torch.zeros(4, 1, 64)} for _ in range(3)]
    for n, pool in enumerate(rig.pools):
        bound = ReferenceLoad().bind(pool, rig.group, rig.format)
        bound(5, slots, outs[n])
    load(5, slots, outs[2])
    for name in "kv":
        assert outs[0][name].any(-1).all(), "written where the reference reads"
        assert torch.equal(outs[0][name], outs[1][name])
        assert torch.equal(outs[2][name], outs[1][name])


def test_a_pool_is_served_by_these_kernels() -> None:
    """Where they can serve, they are preferred to torch."""
    rig = Rig()
    kernels = load_plugins(("mxfp8",)).kernels()
    choices = choose_kernels(kernels, "cpu", rig.pools[0].layout, rig.group).choices
    chosen = {choice.op: choice.chosen for choice in choices if choice.op != "copy_units"}
    assert chosen == {op: f"mxfp8_triton_{op}" for op in chosen}
    assert len(chosen) == 4
