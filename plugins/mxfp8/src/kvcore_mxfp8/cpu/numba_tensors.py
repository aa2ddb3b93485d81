"""Stored tensors and rows as the kernels compiled by Numba take them: addresses and numbers, checked here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.contract import PoolView
from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.paged_attention import Workspace
from kvcore_mxfp8.cpu.numba_kernels import load_rows, store_rows
from kvcore_mxfp8.cpu.pages import constants
from kvcore_mxfp8.elements import ScaleRule
from kvcore_mxfp8.geometry import Terms, geometry
from kvcore_mxfp8.regions import ORDERS, SCALES, VALUES, scale_region

_LIKE = {torch.bfloat16: np.uint16(0), torch.float32: np.float32(0)}
"""Rows of other dtypes go through fp32."""


@dataclass(frozen=True)
class Places:
    """Where the bytes of a tensor lie.

    Attributes:
        sizes: ``(tokens a unit, first unit, end of units, bytes from unit to unit of the payload, of the scales, dim)``.
        heads: int64 ``[2, H]``, bytes that a head adds in a unit of the payload and of the scales.
        tokens: int64 ``[2, page size]``, bytes that a token of a unit adds.
        blocks: int64 ``[blocks]``, bytes that a block adds in a unit of the scales.
    """

    sizes: tuple[int, int, int, int, int, int]
    heads: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]


class CompiledTensor:
    """One stored tensor of every layer."""

    def __init__(self, pool: PoolView, name: str, rule: ScaleRule) -> None:
        found = geometry(pool.layout, pool.placement, name)
        field = pool.layout.region(name).field(VALUES)
        buffer = pool.placement.buffer(pool.layout.layers[0], name)
        self.name, self.heads, self.dim, self.page_size = name, found.heads, found.dim, found.page_size
        self._head_major = field.order == ORDERS["head_major"]
        self._places = Places(
            (found.page_size, buffer.first_unit, buffer.num_units, found.unit, found.scale_unit, found.dim),
            np.stack([_offsets(found.heads, found.head), _offsets(found.heads, found.scale_head)]),
            np.stack([_offsets(found.page_size, found.slot), _offsets(found.page_size, found.scale_slot)]),
            _offsets(found.blocks, found.scale_block),
        )
        # Views are kept: their memory must outlive the addresses.
        self._payload = {n: pool.field(n, name, VALUES) for n in pool.layout.layers}
        self._scales = {n: pool.field(n, scale_region(name), SCALES) for n in pool.layout.layers}
        self._addresses = {n: (self._payload[n].data_ptr(), self._scales[n].data_ptr()) for n in pool.layout.layers}
        self.tensor_scales = constants(pool, name)
        self._e5m2, self._rceil = found.e5m2, rule == "rceil"
        self._space = Workspace()

    def put(self, layer: int, slots: torch.Tensor, valid: torch.Tensor | None, values: torch.Tensor) -> None:
        """Quantise and write ``values [T, H, D]`` to slots, int64 ``[T]``, dense; ``valid`` is bool ``[T]``, dense.

        Raises LayoutError for rows of another shape, IntegrityError for a slot outside the pool; nothing was written then.
        """
        count = slots.shape[0]
        self._check(values, count, "rows")
        if not count:
            return
        dtype, steps = values.dtype, values.stride()
        if dtype not in _LIKE or steps[2] != 1 or not values.is_cpu:
            dtype = dtype if dtype in _LIKE else torch.float32
            values = values.to("cpu", dtype).contiguous()
            steps = values.stride()
        mask = 0 if valid is None else valid.data_ptr()
        rows = _rows(values, dtype, steps)
        self._within(store_rows(*rows, slots.data_ptr(), mask, count, *self._where(layer)), slots)

    def take(self, layer: int, slots: torch.Tensor, out: torch.Tensor) -> None:
        """Read and dequantise slots, int64 ``[N]``, dense, into ``out [N, H, D]``; slots below 0 give 0.

        Raises errors as :meth:`put` does.
        """
        count = slots.shape[0]
        self._check(out, count, "outputs")
        if not count:
            return
        target, dtype = out, out.dtype
        if dtype not in _LIKE or out.stride(2) != 1 or not out.is_cpu:
            dtype = dtype if dtype in _LIKE else torch.float32
            target = torch.empty(out.shape, dtype=dtype)
        rows = _rows(target, dtype, target.stride())
        self._within(load_rows(*rows, slots.data_ptr(), count, *self._where(layer)), slots)
        if target is not out:
            out.copy_(target)

    def gather(self, layer: int, pages: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Read and dequantise pages, int64 ``[N]``, into memory that is kept: ``[H, N * page size, D]``."""
        slots = (pages[:, None] * self.page_size + torch.arange(self.page_size)).flatten()
        if self._head_major:
            out = self._space.take("rows", (self.heads, len(slots), self.dim), dtype)
            self.take(layer, slots, out.transpose(0, 1))
            return out
        out = self._space.take("rows", (len(slots), self.heads, self.dim), dtype)
        self.take(layer, slots, out)
        return out.transpose(0, 1)

    def _where(self, layer: int) -> tuple[Any, ...]:
        places, scale = self._places, self.tensor_scales.get(layer)
        extra = (self._e5m2, self._rceil, scale is not None, 1.0 if scale is None else float(scale))
        return places.sizes, places.heads, places.tokens, places.blocks, *self._addresses[layer], extra

    def _check(self, values: torch.Tensor, count: int, what: str) -> None:
        if values.shape != (count, self.heads, self.dim):
            raise LayoutError(
                f"{what} do not match",
                tensor=self.name,
                expected=[count, self.heads, self.dim],
                got=list(values.shape),
            )

    def _within(self, bad: int, slots: torch.Tensor) -> None:
        if bad >= 0:
            page, first, end = self._places.sizes[:3]
            raise IntegrityError(
                "slot is outside the pool",
                tensor=self.name,
                slot=int(slots[bad]),
                expected=f"{first * page} … {end * page - 1}, or below 0 for none",
            )


def _rows(values: torch.Tensor, dtype: torch.dtype, steps: tuple[int, ...]) -> tuple[Any, ...]:
    """Rows as kernels take them: what they are like, their address, and bytes from token to token and from head to head."""
    width = dtype.itemsize
    return _LIKE[dtype], values.data_ptr(), steps[0] * width, steps[1] * width


def _offsets(size: int, terms: Terms) -> npt.NDArray[np.int64]:
    """Bytes that each coordinate of an axis adds."""
    at, total = np.arange(size), np.zeros(size, np.int64)
    for divisor, modulus, stride in terms:
        steps = at // divisor
        total += (steps % modulus if modulus else steps) * stride
    return total
