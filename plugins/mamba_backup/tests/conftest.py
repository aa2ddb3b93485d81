"""Fixtures shared by the plugin's tests."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from by_path import load


@pytest.fixture(scope="session")
def hybrid() -> ModuleType:
    """Hybrid models in miniature on whole caches, and their oracle (needs torch)."""
    return load(Path(__file__).parent / "support" / "hybrid.py")
