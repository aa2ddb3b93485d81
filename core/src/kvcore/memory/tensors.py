"""Storage dtypes as torch dtypes, and typed views into raw arenas."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import LayoutError, UnsupportedError
from kvcore.layout import Buffer, Field
from kvcore.layout.dtypes import dtype as dtype_of


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype with the bits of a storage dtype.

    Raises LayoutError for an unknown name, UnsupportedError where the installed torch is too old to have it.
    """
    found = getattr(torch, dtype_of(name).torch_name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(
            "this torch has no such dtype", dtype=name, torch=torch.__version__, remedy="update torch"
        )
    return found


def view_dtype(name: str) -> torch.dtype:
    """Return the dtype in which stored elements are moved: 1-byte dtypes as ``uint8``, ``u16`` as ``int16``.

    Torch on the CPU has no indexed writes for some of the 8-bit floats, nor for ``uint16``: their bits are moved.
    """
    if dtype_of(name).itemsize == 1:
        return torch.uint8
    return torch.int16 if name == "u16" else torch_dtype(name)


def as_stored(values: torch.Tensor, name: str) -> torch.Tensor:
    """Reinterpret elements of storage dtype ``name`` in its :func:`view_dtype` (no bits change).

    Raises LayoutError when ``values`` have another dtype: nothing is converted here.
    """
    if values.dtype not in (torch_dtype(name), view_dtype(name)):
        raise LayoutError("elements have the wrong dtype", expected=name, got=str(values.dtype))
    return values.view(view_dtype(name))


def from_stored(values: torch.Tensor, name: str) -> torch.Tensor:
    """Inverse of :func:`as_stored`."""
    return values.view(torch_dtype(name))


def byte_view(arena: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """Raw units of a buffer: ``uint8 [units, unit_bytes]`` over ``arena`` (``uint8 [nbytes]``)."""
    return arena.as_strided((buffer.num_units, buffer.unit_bytes), (buffer.unit_stride, 1), buffer.base)


def field_view(arena: torch.Tensor, buffer: Buffer, field: Field) -> torch.Tensor:
    """Typed view of one field: ``[units, *physical shape]`` in :func:`view_dtype`, sharing memory with ``arena``.

    Raises LayoutError when an address of the field is not a multiple of its item size.
    """
    item = field.itemsize
    steps = {"base": buffer.base + field.offset, "unit stride": buffer.unit_stride, "address": arena.data_ptr()}
    for what, value in steps.items():
        if value % item:
            raise LayoutError(
                "field cannot be viewed in its dtype",
                region=buffer.region,
                field=field.name,
                dtype=field.dtype,
                what=what,
                expected=f"multiple of {item}",
                got=value,
                remedy="give the layout an alignment that is a multiple of the item size",
            )
    typed = arena[: arena.numel() // item * item].view(view_dtype(field.dtype))
    strides = (buffer.unit_stride // item, *(step // item for step in field.strides))
    return typed.as_strided((buffer.num_units, *field.shape), strides, (buffer.base + field.offset) // item)


def tensor_of(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the memory of a writable array and keeps it alive."""
    return torch.from_numpy(array)


def int64_tensor(ids: Any, device: str = "cpu") -> torch.Tensor:
    """Return ids of any integer kind (tensor, array, sequence) as ``int64``, so that offsets cannot wrap."""
    if isinstance(ids, torch.Tensor):
        return ids.to(device=device, dtype=torch.int64)
    return torch.from_numpy(np.array(ids, np.int64)).to(device)


def kept_rows(slots: torch.Tensor, valid: torch.Tensor | None) -> torch.Tensor | None:
    """Indices of the rows that a store on the CPU writes (slot not −1, and valid), or None for all of them."""
    if valid is None and (not slots.numel() or int(slots.min()) >= 0):
        return None
    keep = slots >= 0
    return (keep if valid is None else keep & valid).nonzero().squeeze(1)
