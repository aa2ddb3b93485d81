"""Gates on compiled kernels: each turns red for the kernel that breaks it, and for no other."""

from __future__ import annotations

import builtins
import importlib.util
import sys
from typing import Any

import pytest

from kvcore.errors import UnsupportedError
from kvcore.testing.triton import Compiled

FOUND = Compiled("k", "sm_90", "ld.global.v4 a;\nld.global.v4 b;\nadd.ftz c;", registers=40, spilled=8, shared=1024)
KEEPS: dict[str, Any] = {
    "uses": [r"ld\.global\.v4"],
    "avoids": [r"wgmma"],
    "exactly": {r"ld\.global\.v4": 2, "wgmma": 0},
    "registers": 40,
    "shared": 1024,
    "spilled": 8,
}
BREAKS: list[tuple[str, Any, str]] = [
    ("uses", [r"wgmma"], "wgmma appears nowhere"),
    ("avoids", [r"\.ftz"], r"\.ftz appears 1 times, never allowed"),
    ("exactly", {"ld": 3}, "ld appears 2 times, 3 expected"),
    ("registers", 39, "40 registers, 39 allowed"),
    ("shared", 1023, "1024 bytes of shared memory, 1023 allowed"),
    ("spilled", 7, "8 spilled, 7 allowed"),
]


def test_gates_that_hold() -> None:
    FOUND.check(**KEEPS)


@pytest.mark.parametrize(("gate", "value", "words"), BREAKS, ids=[item[0] for item in BREAKS])
def test_a_gate_that_does_not_hold(gate: str, value: object, words: str) -> None:
    with pytest.raises(AssertionError) as caught:
        FOUND.check(**(KEEPS | {gate: value}))
    assert str(caught.value) == f"k on sm_90: {words}"


def test_spills_need_to_be_allowed() -> None:
    with pytest.raises(AssertionError, match="8 spilled, 0 allowed"):
        FOUND.check()


def test_every_gate_that_does_not_hold_is_named() -> None:
    with pytest.raises(AssertionError) as caught:
        FOUND.check(**{gate: value for gate, value, _ in BREAKS})
    assert all(words in str(caught.value) for *_, words in BREAKS)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module is imported, and says what is missing when something is to be compiled."""
    real = builtins.__import__

    def importing(name: str, *args: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **more)

    spec = importlib.util.find_spec("kvcore.testing.triton")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    monkeypatch.setattr(builtins, "__import__", importing)
    spec.loader.exec_module(module)
    with pytest.raises(UnsupportedError, match="pip install triton"):
        module.compile_for(None, "sm_90", types={})
