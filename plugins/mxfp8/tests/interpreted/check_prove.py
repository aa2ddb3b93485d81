"""The script that proves the kernels on a GPU, in the interpreter: it runs, and it can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvcore_mxfp8.triton import attend as triton_attend
from kvcore_mxfp8.triton import kernels as triton_kernels

SCRIPT = Path(__file__).parents[2] / "scripts" / "prove_triton.py"


@pytest.fixture(scope="module")
def prove() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prove_triton", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows_are_exact", "attention_is_right", "figures"])
def test_every_check_runs(prove: ModuleType, name: str) -> None:
    assert getattr(prove, name)(prove.Setting("cpu", quick=True))
    assert getattr(prove, name) in prove.CHECKS


def test_a_wrong_scale_is_seen(prove: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        triton_kernels, "scale_rule", lambda format: {"rceil": "floor", "floor": "rceil"}[format.scale_rule]
    )
    with pytest.raises(AssertionError, match="store differs"):
        prove.rows_are_exact(prove.Setting("cpu", quick=True))


def test_attention_that_drops_its_sinks_is_seen(prove: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    extras = triton_attend._Attention.extras

    def without(self: object, params: object, unread: object) -> object:
        pointers, strides, have = extras(self, params, unread)  # type: ignore[arg-type]
        return pointers, strides, have | {"has_sinks": False}

    monkeypatch.setattr(triton_attend._Attention, "extras", without)
    with pytest.raises(AssertionError, match="is off by"):
        prove.attention_is_right(prove.Setting("cpu", quick=True))


def test_the_exit_code_says_whether_all_is_well(
    prove: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def right(_: object) -> str:
        return "fine"

    def wrong(_: object) -> str:
        raise AssertionError("bytes differ")

    monkeypatch.setattr(sys, "argv", ["prove_triton.py", "--device", "cpu", "--quick"])
    for checks, code in (((right,), 0), ((wrong, right), 1)):
        monkeypatch.setattr(prove, "CHECKS", checks)
        assert prove.main() == code
    out = capsys.readouterr().out
    assert "bytes differ" in out
    assert out.count("ok    fine") == 2, "a failure ended the run"
