"""The Triton kernels without a GPU: each file of checks in a process of its own, since Triton reads whether it interprets
when a kernel is decorated."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "interpreted"


CHECKS = sorted(path.name for path in HERE.glob("check_*.py"))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def run(checks: str, which: str) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", which, str(HERE / checks)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout, done.stdout
    assert "skipped" not in done.stdout, done.stdout


@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_in_the_interpreter(checks: str) -> None:
    run(checks, "not slow")


@pytest.mark.model  # a minute of what the test above tries in miniature
@pytest.mark.timeout(900)
@pytest.mark.parametrize("checks", CHECKS)
def test_kernels_in_the_interpreter_at_length(checks: str) -> None:
    """Every layout, order, dtype and option: a minute a file, as an interpreted program takes 0.1 s."""
    run(checks, "slow")
