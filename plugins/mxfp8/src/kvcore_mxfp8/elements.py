"""The two element formats and the two scale rules (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BLOCK = 32
"""Elements of a head that share one scale. The last block of a head may be shorter."""

ScaleRule = Literal["rceil", "floor"]
"""How the scale of a block follows from its largest magnitude, *amax*:

- ``rceil``: the smallest power of two with ``amax / scale <= largest element``. No finite value saturates.
- ``floor``: ``2 ** (floor(log2(amax)) - floor(log2(largest element)))``, the rule of the OCP specification: up to one
  binade of range more for small elements, and what lies between the largest element and the next power of two saturates.
"""


@dataclass(frozen=True)
class Element:
    """An 8-bit floating point format.

    Attributes:
        dtype: name of its storage dtype.
        largest: largest finite value.
        largest_exponent: floor of its binary logarithm.
    """

    dtype: str
    largest: float
    largest_exponent: int


E4M3 = Element("e4m3fn", 448.0, 8)
"""Four exponent bits, three mantissa bits, no infinity."""

E5M2 = Element("e5m2", 57344.0, 15)
"""Five exponent bits, two mantissa bits. Its infinity is never written."""

ELEMENTS = {item.dtype: item for item in (E4M3, E5M2)}
