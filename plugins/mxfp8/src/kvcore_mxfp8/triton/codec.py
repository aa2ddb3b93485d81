# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Device functions: quantise and dequantise blocks of 32, exactly as :mod:`kvcore_mxfp8.reference` does.

``native`` says that the chip converts 8-bit floats itself. Elsewhere, and in Triton's interpreter, whose conversions to
8-bit floats and to bf16 are not exact, the bits are computed with integers. Nothing here may flush subnormals.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_SCALE: tl.constexpr = tl.constexpr(255)
INF_SCALE: tl.constexpr = tl.constexpr(254)
INFINITY: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def widen(raw, bf16: tl.constexpr):
    """Values as fp32. bf16 comes as its bits, int16: they are the upper half of an fp32."""
    if bf16:
        values = (raw.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        values = raw.to(tl.float32)
    return values


@triton.jit
def narrow(values, like: tl.constexpr, bf16: tl.constexpr, native: tl.constexpr):
    """fp32 to what a pointer to ``like`` stores; bf16, rounded to nearest even, as its bits."""
    if not bf16:
        found = values.to(like)
    elif native:
        found = values.to(tl.bfloat16).to(tl.int16, bitcast=True)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        # A carry would make an infinity or a zero of a NaN.
        rounded = tl.where((bits & 0x7FFFFFFF) > INFINITY, 0x7FC0, rounded)
        found = rounded.to(tl.uint16).to(tl.int16, bitcast=True)
    return found


@triton.jit
def scale_bytes(amax, e5m2: tl.constexpr, rceil: tl.constexpr):
    """Scales by the largest magnitude of a block, given as the bits of an fp32 in int32: int32 ``0 … 255``."""
    exponent = amax >> 23
    scale = exponent - (15 if e5m2 else 8)
    if rceil:
        # 1.75 is the mantissa of the largest element of both formats.
        scale += ((amax & 0x7FFFFF) > 0x600000).to(tl.int32)
    scale = tl.maximum(scale, 0)
    if rceil:
        scale = tl.where(amax == INFINITY, INF_SCALE, scale)
    return tl.where(amax > INFINITY, NAN_SCALE, scale)


@triton.jit
def multipliers(scale, rceil: tl.constexpr):
    """What values are multiplied with before they are rounded, fp32: the inverse of the scale but at the ends."""
    bits = (254 - tl.minimum(tl.maximum(scale, 1), 253)) << 23
    if rceil:
        bits = tl.where(scale == 0, 0x3F800000, bits)
        bits = tl.where(scale == INF_SCALE, 0x00400000, bits)  # 2 ** -127, a subnormal
        bits = tl.where(scale == NAN_SCALE, 0x7FC00000, bits)
    else:
        bits = tl.where(scale == NAN_SCALE, 0, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def encode(values, e5m2: tl.constexpr, native: tl.constexpr):
    """fp32 to 8-bit floats, uint8: to nearest even, saturating; NaN stays NaN."""
    largest: tl.constexpr = 57344.0 if e5m2 else 448.0
    if native:
        bounded = tl.clamp(values, -largest, largest, tl.PropagateNan.ALL)
        found = bounded.to(tl.float8e5 if e5m2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        bits = values.to(tl.uint32, bitcast=True)
        sign = (bits >> 24) & 0x80
        size = bits & 0x7FFFFFFF
        # A normal number: what is dropped is rounded, then the exponent gets the other bias. A subnormal: adding a power
        # of two whose last place is that of the subnormals leaves the code as the difference. Then the largest, and NaN.
        if e5m2:
            normal = ((size + 0xFFFFF + ((size >> 21) & 1)) >> 21) - (112 << 2)
            small = (size.to(tl.float32, bitcast=True) + 128.0).to(tl.uint32, bitcast=True) - 0x43000000
            code = tl.where(size < (113 << 23), small, normal)
            code = tl.where(size > 0x47600000, 0x7B, code)
        else:
            normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
            small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
            code = tl.where(size < (121 << 23), small, normal)
            code = tl.where(size > 0x43E00000, 0x7E, code)
        code = tl.where(size > INFINITY, 0x7F, code)
        found = (code | sign).to(tl.uint8)
    return found


@triton.jit
def decode(codes, e5m2: tl.constexpr, native: tl.constexpr):
    """8-bit floats, uint8, to fp32, exactly."""
    if e5m2:
        # An e5m2 is the upper half of an fp16.
        values = (codes.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif native:
        values = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        wide = codes.to(tl.uint32)
        size = wide & 0x7F
        # Exponent and mantissa in place, then the bias: the product is exact for subnormals too.
        scaled = (size << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
        bits = tl.where(size == 0x7F, 0x7FC00000, scaled.to(tl.uint32, bitcast=True))
        values = (bits | ((wide & 0x80) << 24)).to(tl.float32, bitcast=True)
    return values


@triton.jit
def scale_values(scales):
    """E8M0 bytes to fp32."""
    wide = scales.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    return tl.where(wide == NAN_SCALE, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def quantise(values, e5m2: tl.constexpr, rceil: tl.constexpr, native: tl.constexpr):
    """Quantise ``[N, blocks, 32]`` fp32: codes of this shape and scales ``[N, blocks]``, both uint8."""
    # As integers magnitudes keep their order, and a NaN is larger than all.
    bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = scale_bytes(tl.max(bits, axis=2), e5m2, rceil)
    codes = encode(values * multipliers(scale, rceil)[:, :, None], e5m2, native)
    return codes, scale.to(tl.uint8)


@triton.jit
def place(coords, terms: tl.constexpr):
    """Bytes that coordinates of one axis add, see :data:`kvcore_mxfp8.geometry.Terms`."""
    total = coords * 0
    for n in tl.static_range(len(terms)):
        part = coords
        if terms[n][0] > 1:
            part = part // terms[n][0]
        if terms[n][1] > 0:
            part = part % terms[n][1]
        total += part * terms[n][2]
    return total
