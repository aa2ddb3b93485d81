"""Fixtures shared by the plugin's tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def hybrid() -> ModuleType:
    """Hybrid models in miniature on whole caches, and their oracle (needs torch)."""
    path = Path(__file__).parent / "support" / "hybrid.py"
    spec = importlib.util.spec_from_file_location("kvcore_mamba_backup_test_support_hybrid", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
