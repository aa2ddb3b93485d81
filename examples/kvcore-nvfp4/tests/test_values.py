"""Values of nvfp4 against exact arithmetic: every code, every tie, every e4m3 scale, NaN and infinity."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import pytest
import torch

from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.layout import Layout
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_nvfp4.e2m1 import from_codes, pack, to_codes, unpack
from kvcore_nvfp4.format import Nvfp4

GROUP = LayerGroup("full", (0,), (TensorSpec("k", 1, 32),), num_query_heads=1)
GRID = [Fraction(n, 2) for n in (0, 1, 2, 3, 4, 6, 8, 12)]


def layout(fmt: Nvfp4, group: LayerGroup = GROUP) -> Layout:
    return fmt.layout(group, page_size=4, shard=Shard(), arena="page_major")


def nearest(value: Fraction, grid: list[Fraction]) -> int:
    """Index of the nearest point; of two, the even one. Past the end: the last."""
    best = min(abs(value - point) for point in grid)
    found = [n for n, point in enumerate(grid) if abs(value - point) == best]
    return next((n for n in found if n % 2 == 0), found[0]) if len(found) > 1 else found[0]


def e4m3(code: int) -> Fraction:
    """Value of a positive e4m3fn code."""
    exponent, mantissa = code >> 3, code & 7
    return Fraction(mantissa, 8) / 64 if not exponent else Fraction(8 + mantissa, 8) * Fraction(2) ** (exponent - 7)


E4M3 = [e4m3(code) for code in range(0x7F)]


def as_fp32(value: Fraction | float) -> float:
    return struct.unpack("<f", struct.pack("<f", float(value)))[0]


def expected(block: list[float], tensor_scale: float) -> list[float]:
    """What a block reads as, in exact arithmetic but for the roundings that the format declares."""
    scaled = [as_fp32(value / tensor_scale) for value in block]
    wanted = min(as_fp32(max(abs(value) for value in scaled) / 6), 448.0)
    scale = float(E4M3[nearest(Fraction(wanted), E4M3)])
    out = []
    for value in scaled:
        quotient = Fraction(as_fp32(abs(value) / scale)) if scale else Fraction(0)
        out.append(math.copysign(as_fp32(float(GRID[nearest(quotient, GRID)]) * as_fp32(scale * tensor_scale)), value))
    return out


def test_every_half_step_and_its_neighbours() -> None:
    steps = [n / 64 for n in range(0, 64 * 8)]
    near = [math.nextafter(value, side) for value in steps for side in (-1.0, 9.0)]
    values = torch.tensor([*steps, *near], dtype=torch.float32)
    values = torch.cat([values, -values])
    want = [nearest(abs(Fraction(float(v))), GRID) | (8 if math.copysign(1, float(v)) < 0 else 0) for v in values]
    assert to_codes(values).tolist() == want


def test_codes_and_bytes() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert [Fraction(v) for v in from_codes(codes).tolist()] == [*GRID, *(-v for v in GRID)]
    assert to_codes(from_codes(codes)).tolist() == codes.tolist()
    assert pack(codes).tolist() == [2 * n | (2 * n + 1) << 4 for n in range(8)]  # the even element is the low half
    every = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack(unpack(every)), every)


@pytest.mark.parametrize("tensor_scale", [1.0, 0.25, as_fp32(0.0131)])
def test_blocks_are_exact(tensor_scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    size = 10.0 ** (torch.rand((60, 1, 2, 1), generator=generator) * 8 - 4)
    rows = (torch.randn((60, 1, 2, 16), generator=generator) * size).flatten(-2)
    fmt = Nvfp4(tensor_scale)
    made = layout(fmt)
    back = fmt.decode(made, fmt.encode(made, {"k": rows}), torch.float32)["k"]
    for token in range(60):
        for start in (0, 16):
            want = expected(rows[token, 0, start : start + 16].tolist(), fmt.tensor_scale)
            assert back[token, 0, start : start + 16].tolist() == want, (token, start)


def test_not_numbers_and_infinity() -> None:
    rows = torch.full((3, 1, 32), 1.5)  # its block scale, 1/4, is exact
    rows[0, 0, 3] = torch.nan
    rows[1, 0, 20] = -torch.inf
    rows[2, 0, 0] = 1e30
    fmt = Nvfp4()
    made = layout(fmt)
    back = fmt.decode(made, fmt.encode(made, {"k": rows}), torch.float32)["k"][:, 0]
    assert back[0, :16].isnan().all()
    assert back[0, 16:].eq(1.5).all()
    assert back[1, 20] == -448 * 6
    assert back[1, :16].eq(1.5).all()
    assert back[2, 0] == 448 * 6
    assert not back[2, 1:16].any()


def test_tensor_scales_are_constants_of_every_layer_and_tensor() -> None:
    """The option is their initial value; the layout is the same whatever they are."""
    group = LayerGroup("full", (0, 5), (TensorSpec("k", 1, 32), TensorSpec("v", 1, 32)), num_query_heads=1)
    one, other = Nvfp4(), Nvfp4(tensor_scale=2.0)
    made = layout(one, group)
    assert made == layout(other, group)
    assert {region.component for region in made.constant_regions} == {"full/tensor_scale"}
    assert {key: value.tolist() for key, value in other.constants(made).items()} == {
        ("tensor_scale", "k"): [2.0, 2.0], ("tensor_scale", "v"): [2.0, 2.0]
    }  # fmt: skip


def test_tensors_are_scaled_by_their_own() -> None:
    group = LayerGroup("full", (0,), (TensorSpec("k", 1, 16), TensorSpec("v", 1, 16)), num_query_heads=1)
    made = layout(Nvfp4(), group)
    scales = {("tensor_scale", "k"): torch.tensor(0.25), ("tensor_scale", "v"): torch.tensor(3.0)}
    bound = Nvfp4(tensor_scale=7.0).with_constants(made, scales)
    generator = torch.Generator().manual_seed(2)
    rows = {name: torch.randn((5, 1, 16), generator=generator) for name in ("k", "v")}
    back = bound.decode(made, bound.encode(made, rows), torch.float32)
    for (_, name), scale in scales.items():
        for token in range(5):
            assert back[name][token, 0].tolist() == expected(rows[name][token, 0].tolist(), float(scale)), name


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf, math.nan, 1e-45, 1e39, True, "1"])
def test_tensor_scales_that_cannot_be(wrong: float) -> None:
    with pytest.raises(ConfigError):
        Nvfp4(tensor_scale=wrong)


def test_sizes_and_refusals() -> None:
    group = LayerGroup("full", (0, 1), (TensorSpec("k", 8, 128), TensorSpec("v", 8, 128)), num_query_heads=32)
    made = Nvfp4().layout(group, page_size=16, shard=Shard(), arena="page_major")
    # 2 layers × 2 tensors × 8 heads: 64 bytes of values and 8 of scales a head, for what takes 256 bytes in bf16.
    kv, scales = 2 * 2 * 8 * 64, 2 * 2 * 8 * 8
    assert made.bytes_per_token() == {"full/kv": kv, "full/block_scale": scales, "full/tensor_scale": 0}
    # A page is 16 tokens; constants take two units of two fp32 and their padding, in both layers.
    assert made.place({"pages": 3, "model": 2}).arena_bytes == 3 * 16 * (kv + scales) + 2 * 2 * 16
    assert not made.alignment_bytes_per_token()
    odd = LayerGroup("full", (0,), (TensorSpec("k", 1, 24),), 1)
    assert "not a multiple of the 16" in Nvfp4().supports(odd).reason
    with pytest.raises(UnsupportedError):
        layout(Nvfp4(), odd)
    with pytest.raises(LayoutError, match="rows do not match"):
        Nvfp4().encode(layout(Nvfp4()), {})
