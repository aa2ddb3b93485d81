"""Support modules of these tests, loaded by path: test folders are no packages."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from by_path import load


def _load(name: str) -> ModuleType:
    return load(Path(__file__).parent / "support" / f"{name}.py")


@pytest.fixture(scope="session")
def guard_rig() -> ModuleType:
    """The guard model through prefill, decode and retraction."""
    return _load("guard_rig")


@pytest.fixture(scope="session")
def guard_faults() -> ModuleType:
    """What can go wrong with a part of a request, on purpose."""
    return _load("guard_faults")


@pytest.fixture(scope="session")
def guard_bytes() -> ModuleType:
    """A request's bytes, component by component."""
    return _load("guard_bytes")
