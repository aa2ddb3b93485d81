"""Storage dtypes by name (no torch).

A name fixes the bits: ``e4m3fn`` and ``e4m3fnuz`` are different dtypes and one is never read as the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import LayoutError, nearest


@dataclass(frozen=True)
class DType:
    """A storage dtype.

    Attributes:
        name: the name used in layouts and on the wire.
        itemsize: bytes per stored element.
        torch_name: attribute of ``torch`` holding the dtype with the same bits.
    """

    name: str
    itemsize: int
    torch_name: str


_ALL = (
    DType("u8", 1, "uint8"),
    DType("i8", 1, "int8"),
    DType("u16", 2, "uint16"),
    DType("i16", 2, "int16"),
    DType("i32", 4, "int32"),
    DType("i64", 8, "int64"),
    DType("fp16", 2, "float16"),
    DType("bf16", 2, "bfloat16"),
    DType("fp32", 4, "float32"),
    DType("e4m3fn", 1, "float8_e4m3fn"),
    DType("e4m3fnuz", 1, "float8_e4m3fnuz"),
    DType("e5m2", 1, "float8_e5m2"),
    DType("e5m2fnuz", 1, "float8_e5m2fnuz"),
    DType("e8m0", 1, "float8_e8m0fnu"),
)

DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}


def dtype(name: str) -> DType:
    """Return the dtype called ``name``; raise :class:`LayoutError` naming the nearest known one."""
    try:
        return DTYPES[name]
    except KeyError:
        raise LayoutError("unknown storage dtype", dtype=name, remedy=nearest(name, DTYPES)) from None
