"""Fixtures shared by the plugin's tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from by_path import load

from kvcore.contract import unsupported


def _load(name: str) -> ModuleType:
    return load(Path(__file__).parent / "support" / f"{name}.py")


@pytest.fixture(scope="session")
def blocks() -> ModuleType:
    """Blocks that are hard to quantise, and exact arithmetic on them."""
    return _load("blocks")


@pytest.fixture(scope="session")
def rig() -> ModuleType:
    """Small caches of the formats, and their bytes read by hand."""
    return _load("rig")


@pytest.fixture(scope="session")
def mx_models() -> ModuleType:
    """Tiny models, and ``kvcore`` commands on them (needs transformers)."""
    return _load("models")


@pytest.fixture(scope="session")
def compiled() -> ModuleType:
    """Quantise and dequantise by the kernels that Numba compiles (skips without it)."""
    pytest.importorskip("numba")
    return _load("compiled")


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if Numba were not installed: what it would serve is served by torch."""
    refused = unsupported("left out by a test")
    monkeypatch.setattr("kvcore_mxfp8.cpu.kernels_numba.device_support", lambda device: refused)


@pytest.fixture(params=["torch", "numba"])
def tuned(request: pytest.FixtureRequest) -> str:
    """Each kind of kernels for the CPU in turn."""
    if request.param == "numba":
        pytest.importorskip("numba")
    else:
        request.getfixturevalue("without_numba")
    return str(request.param)
