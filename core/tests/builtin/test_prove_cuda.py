"""The script that proves CUDA pools, on the CPU and on the fake device: it runs, and it can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from by_path import load

SCRIPT = Path(__file__).parents[3] / "scripts" / "prove_cuda.py"


@pytest.fixture(scope="module")
def prove() -> ModuleType:
    return load(SCRIPT)


def setting(prove: ModuleType) -> Any:
    return prove.Setting("cpu", 2, 64, quick=True)


@pytest.mark.parametrize("name", ["pools", "kernels", "order", "retraction", "transfer", "figures"])
def test_every_check_runs_on_the_cpu(prove: ModuleType, name: str) -> None:
    assert getattr(prove, name)(setting(prove))
    assert getattr(prove, name) in prove.CHECKS


@pytest.fixture
def on_device(prove: ModuleType, device: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Run a check on the fake device."""
    registry = device.registry_of(device.FakePool())
    monkeypatch.setattr(prove, "load_plugins", lambda _: registry)
    return lambda name: getattr(prove, name)(setting(prove))


@pytest.mark.parametrize("name", ["pools", "kernels", "order", "retraction", "figures"])
def test_checks_pass_where_copies_end_late(on_device: Callable[[str], str], name: str) -> None:
    assert on_device(name)


def test_a_copy_that_overtakes_the_writes_before_it_is_seen(
    on_device: Callable[[str], str], device: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device.Device, "mark", lambda self: device.LateFence(self, lambda: None, 1))
    with pytest.raises(AssertionError, match="overtook"):
        on_device("order")
    with pytest.raises(AssertionError, match="not the values stored"):
        on_device("retraction")


def test_the_exit_code_says_whether_all_is_well(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(_: Any) -> str:
        return "fine"

    def wrong(_: Any) -> str:
        raise AssertionError("bytes differ")

    monkeypatch.setattr(sys, "argv", ["prove_cuda.py", "--device", "cpu", "--quick"])
    for checks, code in (((right,), 0), ((wrong, right), 1)):
        monkeypatch.setattr(prove, "CHECKS", checks)
        assert prove.main() == code
    out = capsys.readouterr().out
    assert "bytes differ" in out
    assert out.count("ok    fine") == 2, "a failure ended the run"


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    subprocess.run([sys.executable, str(SCRIPT), "--device", "cuda:0"], check=True)
