"""A kvcore plugin: the formats ``mxfp8`` and ``mxfp8_e5m2``, and kernels for them."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import Format, Kernel, PluginInfo, hookimpl

PLUGIN = PluginInfo(name="mxfp8", contract=(1, 0), summary="8-bit floats, a power-of-two scale for every 32")


@hookimpl
def kvcore_register_formats() -> Sequence[type[Format]]:
    """mxfp8 and mxfp8_e5m2."""
    from kvcore_mxfp8.format import Mxfp8, Mxfp8E5m2

    return (Mxfp8, Mxfp8E5m2)


@hookimpl
def kvcore_register_kernels() -> Sequence[type[Kernel]]:
    """Torch and Numba on the CPU, Triton on GPUs."""
    from kvcore_mxfp8.cpu.kernels_numba import NUMBA_KERNELS
    from kvcore_mxfp8.cpu.kernels_torch import TORCH_KERNELS
    from kvcore_mxfp8.triton.attend import TRITON_KERNELS

    return (*TORCH_KERNELS, *NUMBA_KERNELS, *TRITON_KERNELS)
