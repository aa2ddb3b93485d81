"""Stored tensors and rows as Triton kernels take them (no Triton at import)."""

from __future__ import annotations

import torch

from kvcore.contract import Format, PoolView
from kvcore.errors import LayoutError, UnsupportedError
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.geometry import geometry
from kvcore_mxfp8.regions import SCALES, TENSOR_SCALE, VALUES, scale_region

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Of rows, queries and outputs."""


class StoredTensor:
    """One stored tensor of every layer.

    Attributes:
        name: of the tensor.
        geometry: where its bytes lie.
        payload, scales, constant: views of the pool by layer; ``constant`` holds the tensor scale, which may be set after
            kernels are bound. Without one it is the payload: kernels take a pointer they do not read.
    """

    def __init__(self, pool: PoolView, name: str) -> None:
        self.name = name
        self.geometry = geometry(pool.layout, pool.placement, name)
        layers = pool.layout.layers
        self.payload = {layer: pool.field(layer, name, VALUES) for layer in layers}
        self.scales = {layer: pool.field(layer, scale_region(name), SCALES) for layer in layers}
        self.constant = self.payload
        if self.geometry.scaled:
            ((_, first, _),) = pool.placement.ranges[TENSOR_SCALE]
            self.constant = {layer: pool.field(layer, TENSOR_SCALE, name)[first + 1] for layer in layers}

    def check(self, values: torch.Tensor, what: str) -> None:
        """Raise LayoutError unless ``values`` are ``[N, H, D]`` of this tensor: kernels read no shapes."""
        expected = (self.geometry.heads, self.geometry.dim)
        if values.ndim != 3 or tuple(values.shape[1:]) != expected:
            raise LayoutError(
                f"{what} do not match the stored tensor",
                tensor=self.name,
                expected=["N", *expected],
                got=list(values.shape),
            )


def scale_rule(format: Format) -> str:
    """The rule of a format of this distribution. Raises LayoutError for another."""
    if not isinstance(format, Mxfp8):
        raise LayoutError("the layout is of a format that these kernels do not know", format=format.name)
    return format.scale_rule


def readable(values: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Values as kernels read them, and whether they are bf16, given as int16: unit stride along the last axis."""
    if values.dtype not in DTYPES:
        values = values.to(torch.float32)
    if values.stride(-1) != 1:
        values = values.contiguous()
    return (values.view(torch.int16), True) if values.dtype == torch.bfloat16 else (values, False)


class Writable:
    """An output as kernels write it; :meth:`done` copies where it had to be another tensor.

    Attributes:
        tensor: unit stride along the last axis, bf16 as int16.
        bf16: whether it is.
    """

    def __init__(self, out: torch.Tensor) -> None:
        self._out = self._dense = out
        if out.dtype not in DTYPES:
            if not out.dtype.is_floating_point:
                raise UnsupportedError("an output has to be floating point", dtype=str(out.dtype))
            self._dense = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        elif out.stride(-1) != 1:
            self._dense = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        self.bf16 = self._dense.dtype == torch.bfloat16
        self.tensor = self._dense.view(torch.int16) if self.bf16 else self._dense

    def done(self) -> None:
        """Copy to the output, if it is another tensor."""
        if self._dense is not self._out:
            self._out.copy_(self._dense)
