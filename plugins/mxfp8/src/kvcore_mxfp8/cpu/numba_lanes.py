# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
"""Blocks of 32 numbers and their codes as vectors, for what Numba compiles: spelled out in LLVM's terms, since compilers
find only some of them.

Everything takes addresses. ``like`` is a number of the type of the rows: ``uint16`` for bf16, or ``float32``. Arithmetic
is that of :mod:`kvcore_mxfp8.reference`, on fp32 numbers and their bits; most blocks of bf16 rows need no fp32 at all:
their bits, less the exponent of the scale, are rounded as 16-bit integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvcore_mxfp8.elements import BLOCK

INFINITY = np.uint32(0x7F800000)
QUIET_NAN = 0x7FC00000
WITHOUT_SIGN = 0x7FFFFFFF
_CHUNK = 16
"""Numbers worked on at once in fp32: more would not fit into the registers."""

LEAST_SCALE, LARGEST_SCALE = 20, 230
"""Between these, rows in bf16 and the products of elements and scales are normal numbers or round to 0."""

_I8, _I16, _I32 = ir.IntType(8), ir.IntType(16), ir.IntType(32)


@dataclass(frozen=True)
class _Code:
    """The codes of an element, without their sign.

    Attributes:
        mantissa: bits of it.
        bias: of the exponent.
        largest: the largest finite code.
        special: the first one that is no number, and bits of that in fp32.
    """

    mantissa: int
    bias: int
    largest: int
    special: tuple[int, int]


_E4M3 = _Code(mantissa=3, bias=7, largest=0x7E, special=(0x7F, QUIET_NAN))
_E5M2 = _Code(mantissa=2, bias=15, largest=0x7B, special=(0x7C, int(INFINITY)))


@intrinsic
def bits_of(typing, value):
    """Bits of an fp32 number."""
    return types.uint32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], _I32)


@intrinsic
def number_of(typing, bits):
    """The fp32 number of some bits."""
    return types.float32(types.uint32), lambda context, builder, signature, args: builder.bitcast(
        args[0], ir.FloatType()
    )


@intrinsic
def read(typing, address, like):
    """The number at an address, of the type of ``like``."""

    def generate(context, builder, signature, args):
        return builder.load(builder.inttoptr(args[0], context.get_value_type(like).as_pointer()))

    return like(address, like), generate


@intrinsic
def read_wide(typing, address, like):
    """The number of a row at an address, in fp32."""

    def generate(context, builder, signature, args):
        found = builder.load(builder.inttoptr(args[0], context.get_value_type(like).as_pointer()))
        if like == types.uint16:
            found = builder.bitcast(builder.shl(builder.zext(found, _I32), _I32(16)), ir.FloatType())
        return found

    return types.float32(address, like), generate


@intrinsic
def width_of(typing, like):
    """Bytes of a number."""
    return types.int64(like), lambda context, builder, signature, args: ir.Constant(ir.IntType(64), like.bitwidth // 8)


@intrinsic
def write(typing, address, value):
    """Write a number to an address."""

    def generate(context, builder, signature, args):
        builder.store(args[1], builder.inttoptr(args[0], args[1].type.as_pointer()))
        return context.get_dummy_value()

    return types.void(address, value), generate


@intrinsic
def prefetch(typing, address):
    """Have the cache line of an address brought near."""

    def generate(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(fetch, [builder.inttoptr(args[0], _I8.as_pointer()), _I32(0), _I32(3), _I32(1)])
        return context.get_dummy_value()

    return types.void(address), generate


class _Vector:
    """Writes vector instructions, with constants for operands."""

    def __init__(self, builder: Any, lane: Any, count: int) -> None:
        self.builder, self.lane, self.type = builder, lane, ir.VectorType(lane, count)

    def of(self, value: int) -> Any:
        return ir.Constant(self.type, [value] * self.type.count)

    def and_(self, a: Any, b: int) -> Any:
        return self.builder.and_(a, self.of(b))

    def add(self, a: Any, b: int) -> Any:
        return self.builder.add(a, self.of(b))

    def shr(self, a: Any, b: int) -> Any:
        return self.builder.lshr(a, self.of(b))

    def shl(self, a: Any, b: int) -> Any:
        return self.builder.shl(a, self.of(b))

    def less(self, a: Any, b: int) -> Any:
        """Of numbers whose upper bit is clear, or as signed ones."""
        return self.builder.icmp_signed("<", a, self.of(b))

    def smaller(self, a: Any, b: int) -> Any:
        return self.builder.select(self.less(a, b), a, self.of(b))

    def number(self, bits: Any) -> Any:
        return self.builder.bitcast(bits, ir.VectorType(ir.FloatType(), self.type.count))

    def bits(self, numbers: Any) -> Any:
        return self.builder.bitcast(numbers, self.type)

    def spread(self, value: Any) -> Any:
        """One number in every lane."""
        one = self.builder.insert_element(ir.Constant(ir.VectorType(value.type, 1), ir.Undefined), value, _I32(0))
        lanes = ir.Constant(ir.VectorType(_I32, self.type.count), [0] * self.type.count)
        return self.builder.shuffle_vector(one, ir.Constant(one.type, ir.Undefined), lanes)

    def load(self, address: Any, at: int = 0) -> Any:
        """Elements of the lane's type from the ``at``-th on."""
        return self._at(address, at, self.type)

    def load_as(self, lane: Any, address: Any, at: int = 0) -> Any:
        """The same of shorter integers, filled up with zeros."""
        return self.builder.zext(self._at(address, at, ir.VectorType(lane, self.type.count)), self.type)

    def _at(self, address: Any, at: int, kind: Any) -> Any:
        size = kind.element.width // 8
        first = self.builder.add(address, ir.Constant(address.type, at * size))
        found = self.builder.load(self.builder.inttoptr(first, kind.as_pointer()), align=size)
        found.align = size
        return found

    def store_as(self, lane: Any, values: Any, address: Any, at: int = 0) -> None:
        """Write the lower bits of numbers as elements ``at`` and after."""
        kind = ir.VectorType(lane, self.type.count)
        size = lane.width // 8
        first = self.builder.add(address, ir.Constant(address.type, at * size))
        values = values if kind == self.type else self.builder.trunc(values, kind)
        self.builder.store(values, self.builder.inttoptr(first, kind.as_pointer()), align=size)


@intrinsic
def largest_of(typing, address, like):
    """Bits in fp32 of the largest magnitude of 32 numbers of the type of ``like``."""
    half = like == types.uint16

    def generate(context, builder, signature, args):
        vector = _Vector(builder, _I16 if half else _I32, BLOCK)
        sizes = vector.and_(vector.load(args[0]), 0x7FFF if half else WITHOUT_SIGN)
        name = f"llvm.vector.reduce.umax.v{BLOCK}i{vector.lane.width}"
        reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(vector.lane, [vector.type]), name)
        largest = builder.call(reduce, [sizes])
        return builder.shl(builder.zext(largest, _I32), _I32(16)) if half else largest

    return types.uint32(address, like), generate


def _encoder(code: _Code) -> Callable[..., Any]:
    """Multiply 32 numbers with a factor and round them to codes."""
    shift = 23 - code.mantissa
    least = (128 - code.bias) << 23  # the smallest normal number
    # Numbers from this power of two on are as far apart as subnormal elements.
    step = (127 + 24 - code.bias - code.mantissa) << 23

    @intrinsic
    def encode(typing, address, like, to, factor):
        def generate(context, builder, signature, args):
            vector = _Vector(builder, _I32, _CHUNK)
            by = vector.spread(args[3])
            for at in range(0, BLOCK, _CHUNK):
                if like == types.uint16:
                    values = vector.shl(vector.load_as(_I16, args[0], at), 16)
                else:
                    values = vector.load(args[0], at)
                bits = vector.bits(builder.fmul(vector.number(values), by))
                size = vector.and_(bits, WITHOUT_SIGN)
                odd = vector.and_(vector.shr(size, shift), 1)
                rounded = vector.shr(builder.add(vector.add(size, (1 << (shift - 1)) - 1), odd), shift)
                normal = vector.add(rounded, -((127 - code.bias) << code.mantissa))
                moved = builder.fadd(vector.number(size), vector.number(vector.of(step)))
                found = builder.select(vector.less(size, least), vector.add(vector.bits(moved), -step), normal)
                sign = vector.and_(vector.shr(bits, 24), 0x80)
                vector.store_as(_I8, builder.or_(vector.smaller(found, code.largest), sign), args[2], at)
            return context.get_dummy_value()

        return types.void(address, like, to, types.float32), generate

    return encode  # type: ignore[no-any-return]


def _short_encoder(code: _Code) -> Callable[..., Any]:
    """The same for 32 numbers in bf16, by their scale; says whether all are 0 or normal elements: else it was in vain."""
    shift = 7 - code.mantissa

    @intrinsic
    def encode(typing, address, to, scale):
        def generate(context, builder, signature, args):
            vector = _Vector(builder, _I16, BLOCK)
            bits = vector.load(args[0])
            size = vector.and_(bits, 0x7FFF)
            exponent = builder.sub(builder.trunc(args[2], _I16), _I16(code.bias))
            at = builder.sub(size, vector.spread(builder.shl(exponent, _I16(7))))
            odd = vector.and_(vector.shr(at, shift), 1)
            rounded = vector.shr(builder.add(vector.add(at, (1 << (shift - 1)) - 1), odd), shift)
            sign = vector.and_(vector.shr(bits, 8), 0x80)
            vector.store_as(_I8, builder.or_(vector.smaller(rounded, code.largest), sign), args[1])
            return builder.icmp_unsigned("==", builder.bitcast(vector.less(at, 1 << 7), _I32), _I32(0))

        return types.boolean(address, to, scale), generate

    return encode  # type: ignore[no-any-return]


def _decoder(code: _Code) -> Callable[..., Any]:
    """Multiply 32 codes with two factors, one after the other, and write them as numbers of the type of ``like``."""
    shift = 23 - code.mantissa
    least = (128 - code.bias) << 23
    special, special_bits = code.special

    @intrinsic
    def decode(typing, address, to, like, scale, factor):
        def generate(context, builder, signature, args):
            vector = _Vector(builder, _I32, _CHUNK)
            scales = [vector.spread(value) for value in args[3:]]
            for at in range(0, BLOCK, _CHUNK):
                codes = vector.load_as(_I8, args[0], at)
                size = vector.and_(codes, 0x7F)
                placed = vector.shl(size, shift)
                normal = vector.add(placed, (127 - code.bias) << 23)
                # With the exponent of the smallest normal number, a subnormal one is too large by exactly that number.
                moved = builder.fsub(vector.number(vector.add(placed, least)), vector.number(vector.of(least)))
                rare = vector.add(placed, special_bits - (special << shift))
                found = builder.select(vector.less(size, 1 << code.mantissa), vector.bits(moved), normal)
                found = builder.select(vector.less(size, special), found, rare)
                value = vector.number(builder.or_(found, vector.shl(vector.and_(codes, 0x80), 24)))
                for by in scales:
                    value = builder.fmul(value, by)
                bits = vector.bits(value)
                if like == types.uint16:
                    odd = vector.and_(vector.shr(bits, 16), 1)
                    rounded = builder.add(vector.add(bits, 0x7FFF), odd)
                    # The carry of a NaN could make a number of it.
                    number = vector.less(vector.and_(bits, WITHOUT_SIGN), int(INFINITY) + 1)
                    bits = vector.shr(builder.select(number, rounded, vector.of(QUIET_NAN)), 16)
                vector.store_as(_I16 if like == types.uint16 else _I32, bits, args[1], at)
            return context.get_dummy_value()

        return types.void(address, to, like, types.float32, types.float32), generate

    return decode  # type: ignore[no-any-return]


def _short_decoder(code: _Code) -> Callable[..., Any]:
    """The same to numbers in bf16, by their scale; says whether all codes are normal numbers: else it was in vain."""
    shift = 7 - code.mantissa

    @intrinsic
    def decode(typing, address, to, scale):
        def generate(context, builder, signature, args):
            vector = _Vector(builder, _I16, BLOCK)
            codes = vector.load_as(_I8, args[0])
            size = vector.and_(codes, 0x7F)
            exponent = builder.shl(builder.sub(builder.trunc(args[2], _I16), _I16(code.bias)), _I16(7))
            placed = builder.add(vector.shl(size, shift), vector.spread(exponent))
            vector.store_as(_I16, builder.or_(placed, vector.shl(vector.and_(codes, 0x80), 8)), args[1])
            first = 1 << code.mantissa
            span = ir.Constant(vector.type, [code.special[0] - first] * BLOCK)
            normal = builder.icmp_unsigned("<", vector.add(size, -first), span)
            return builder.icmp_unsigned("==", builder.bitcast(normal, _I32), _I32(-1))

        return types.boolean(address, to, scale), generate

    return decode  # type: ignore[no-any-return]


encode_e4m3, encode_e5m2 = _encoder(_E4M3), _encoder(_E5M2)
short_encode_e4m3, short_encode_e5m2 = _short_encoder(_E4M3), _short_encoder(_E5M2)
decode_e4m3, decode_e5m2 = _decoder(_E4M3), _decoder(_E5M2)
short_decode_e4m3, short_decode_e5m2 = _short_decoder(_E4M3), _short_decoder(_E5M2)
