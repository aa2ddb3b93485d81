"""Whether Numba can serve a device (Numba is not imported before it is asked)."""

from __future__ import annotations

import importlib.util
import os
import sys

from kvcore.contract import FULL, Support, unsupported

OLDEST = (0, 68)
"""The first release that this was tried with. One that happens to be installed may be older."""


def device_support(device: str) -> Support:
    """The CPU, where Numba is installed and compiles."""
    if device != "cpu":
        return unsupported(f"runs on the CPU, the device is {device}")
    if importlib.util.find_spec("numba") is None:
        return unsupported("needs Numba, which is not installed (pip install 'kvcore-mxfp8[cpu]')")
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return unsupported("Numba does not compile: NUMBA_DISABLE_JIT is set")
    if sys.byteorder != "little":
        return unsupported("knows little-endian machines only")
    try:
        import numba
    except ImportError as error:  # as where NumPy is newer than Numba knows
        return unsupported(f"Numba cannot be imported: {error}")
    if numba.version_info.short < OLDEST:
        return unsupported(f"needs Numba {'.'.join(map(str, OLDEST))} or newer, installed is {numba.__version__}")
    return FULL
