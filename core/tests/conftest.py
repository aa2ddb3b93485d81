"""Fixtures shared by core's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def _load(name: str) -> ModuleType:
    path = Path(__file__).parent / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvcore_test_support_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def loop() -> ModuleType:
    """The slow oracle of the layout language: loops over indices, no code shared with kvcore."""
    return _load("layout_loop")


@pytest.fixture(scope="session")
def cases() -> ModuleType:
    """Layouts of real formats, and hypothesis strategies for made-up ones."""
    return _load("layout_cases")


@pytest.fixture(scope="session")
def rig() -> ModuleType:
    """A store without a manager, with slow oracles for bytes and attention (needs torch)."""
    return _load("rig")


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """What the transfer tests share: arenas, manifests, a wire and a memory that do what a test tells them to."""
    return _load("transfer_kit")


@pytest.fixture(scope="session")
def shelf() -> ModuleType:
    """Blocks, backends, a copier that copies when told to, and a small cache, for retraction (needs torch)."""
    return _load("backup_kit")
