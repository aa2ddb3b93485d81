"""Whether Triton can serve a device, and what its chip does itself (no Triton at import)."""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kvcore.contract import FULL, Support, unsupported

_EIGHT_BIT = (8, 9)
"""From this CUDA capability on, chips convert 8-bit floats themselves."""

_LEAST = (8, 0)

_BLOCK_SCALED_ARCHES = ("gfx950",)


@dataclass(frozen=True)
class Chip:
    """What kernels are compiled for.

    Attributes:
        native: it converts e4m3fn and e5m2 itself. Where it does not, or knows another e4m3 (fnuz, of gfx942), bits are
            converted by value with integers.
        block_scaled: its matrix units multiply blocks with E8M0 scales.
        processors: how many programs run side by side.
        interpreted: no chip at all, but Triton's interpreter.
        cuda: it is one of NVIDIA's.
        large_tiles: its matrix units have memory of their own, and take block scales in tiles of 128 by 128 only.
    """

    native: bool
    block_scaled: bool
    processors: int
    interpreted: bool = False
    cuda: bool = True
    large_tiles: bool = False


def interpreting() -> bool:
    """Whether kernels are interpreted in this process: Triton reads this when it decorates a kernel."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")


def device_support(device: str) -> Support:
    """CUDA and ROCm devices, and everything in the interpreter."""
    if importlib.util.find_spec("triton") is None:
        return unsupported("needs Triton, which is not installed (pip install 'kvcore-mxfp8[triton]')")
    if interpreting():
        return FULL
    if torch.device(device).type != "cuda":
        return unsupported(f"runs on GPUs, the device is {device}")
    if not torch.cuda.is_available():
        return unsupported("torch finds no GPU")
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found < _LEAST:
        return unsupported(f"needs CUDA capability {_LEAST[0]}.{_LEAST[1]}, the device has {found[0]}.{found[1]}")
    return FULL


def chip_of(device: str) -> Chip:
    """The chip of a device that :func:`device_support` accepts."""
    if interpreting():
        return Chip(native=False, block_scaled=False, processors=1, interpreted=True)
    found = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        arch = str(found.gcnArchName).split(":")[0]
        return Chip(False, arch in _BLOCK_SCALED_ARCHES, found.multi_processor_count, cuda=False)
    capability = (found.major, found.minor)
    # Of these, 10.x and 12.x have block-scaled matrix units; later ones are not known.
    return Chip(
        native=capability >= _EIGHT_BIT,
        block_scaled=found.major in (10, 12),
        processors=found.multi_processor_count,
        large_tiles=found.major == 10,
    )


def on(device: str) -> AbstractContextManager[object]:
    """Make a device current while kernels are launched: Triton launches on the current one, not on that of its arguments."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else nullcontext()
