"""Support modules of these tests, loaded by path: test folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).parent / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvcore_repository_test_support_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
