"""``kvcore check`` and the runner behind it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvcore.testing
from kvcore.builtin.commands.check import check
from kvcore.cli.main import main
from kvcore.contract import Command, PluginInfo
from kvcore.errors import IntegrityError, PluginError
from kvcore.layout import SpaceSpec
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import LoadedPlugin, Registry
from kvcore.requests.spaces import SequenceSpace
from kvcore.spec import LayerGroup
from kvcore.testing import GROUPS, Case, IndexSpaceSuite, ThreeComponents, cases_of, run, unchecked

GOOD = Case("index_spaces", "sequence", IndexSpaceSuite, {"space": SequenceSpace})


class Broken(SequenceSpace):
    kind = "broken"

    def first_live(self, spec: SpaceSpec, length: int) -> int:
        return 1


def test_every_registered_thing_has_a_suite_or_is_named() -> None:
    registry = load_plugins(())
    found = {(case.kind, case.subject) for case in cases_of(registry, "builtin")}
    for kind in ("formats", "transports", "backups", "index_spaces", "state_components"):
        assert {name for of, name in found if of == kind} == set(registry.names(kind))
    assert set(unchecked(registry, "builtin")) == {"pools", "kernels", "commands"}
    assert not cases_of(registry, "another")


def test_failures_carry_the_values_that_differ() -> None:
    checks = run([GOOD, Case("index_spaces", "broken", IndexSpaceSuite, {"space": Broken})])
    assert {item.outcome for item in checks if item.subject == "sequence"} == {"passed"}
    (failed,) = [item for item in checks if item.check == "test_live_units" and item.subject == "broken"]
    assert failed.outcome == "failed"
    assert "assert 1 == 0" in failed.reason
    assert "test_live_units" in failed.details


def test_runs_in_one_process_do_not_mix() -> None:
    for _ in range(2):
        assert {item.subject for item in run([GOOD], select="test_live_units")} == {"sequence"}


def test_a_subject_that_cannot_be_made_is_a_failure() -> None:
    def explode() -> None:
        raise RuntimeError("no such device")

    checks = run([Case("index_spaces", "x", IndexSpaceSuite, {"space": explode})], select="test_live_units")
    assert [(item.outcome, item.reason) for item in checks] == [("failed", "RuntimeError: no such device")]


def test_the_users_pytest_options_do_not_hide_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k nothing_at_all --collect-only")
    assert len(run([GOOD])) == 8


def test_a_suite_without_checks_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="could not run"):
        run([GOOD, Case("index_spaces", "x", type("Empty", (), {}), {})])
    with pytest.raises(IntegrityError, match="could not run"):
        run([GOOD], select="no_such_check")


def test_options_that_a_subject_needs() -> None:
    """A class that cannot be made without options says which ones the kit shall use."""
    registry = load_plugins(())
    (case,) = [case for case in cases_of(registry, "builtin") if case.subject == "host_pool"]
    assert {item.outcome for item in run([case], select="test_a_copy_is_a_copy")} == {"passed"}


# --- the command -----------------------------------------------------------------------------------------------------


def plugin(*spaces: type[SequenceSpace]) -> Registry:
    info = PluginInfo("mine", (1, 0))
    return Registry([LoadedPlugin(info, "", "", {}, {"index_spaces": {space.kind: space for space in spaces}})])


def test_the_command_fails_where_a_check_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("kvcore.builtin.commands.check.load_plugins", lambda names: plugin(SequenceSpace, Broken))
    assert check("mine", json=True) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    rows = {row["subject"]: row for row in report["subjects"]}
    assert rows["sequence"] == {
        "suite": "index_spaces",
        "subject": "sequence",
        "passed": 8,
        "failed": 0,
        "skipped": 0,
    }
    assert rows["broken"]["failed"] == 1
    assert sum(item["outcome"] == "failed" for item in report["checks"]) == 1
    assert check("mine") == 1
    text = capsys.readouterr().out
    assert "conformance of mine" in text
    assert "broken: test_live_units" in text


class Typo(ThreeComponents):
    name = "typo"

    def sample_groups(self) -> Sequence[LayerGroup]:
        return (GROUPS["grouped"],)

    def layout(self, *args: Any, **options: Any) -> Any:
        return undefined_name  # noqa: F821


def test_one_typo_is_one_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Not the same traceback a hundred times over."""
    info = PluginInfo("mine", (1, 0))
    registry = Registry([*load_plugins(())._plugins, LoadedPlugin(info, "", "", {}, {"formats": {"typo": Typo}})])
    monkeypatch.setattr("kvcore.builtin.commands.check.load_plugins", lambda names: registry)
    assert check("mine") == 1
    text = capsys.readouterr().out
    assert text.count("NameError: name 'undefined_name' is not defined") == 1
    assert len(text.splitlines()) < 80
    (line,) = [line for line in text.splitlines() if "fail alike" in line]
    assert check("mine", json=True) == 1
    report = json.loads(capsys.readouterr().out)
    fault, *others = report["faults"]
    assert len(fault["checks"]) > 50
    assert f"typo: {len(fault['checks'])} checks fail alike" in line
    assert not others
    assert "NameError" in fault["details"]


def test_the_command_names_what_has_no_suite(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {"frobnicate": Command("frobnicate", "Frobnicate.", print)}
    registry = Registry([LoadedPlugin(PluginInfo("mine", (1, 0)), "", "", {}, {"commands": commands})])
    monkeypatch.setattr("kvcore.builtin.commands.check.load_plugins", lambda names: registry)
    assert main(["check", "mine", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["subjects"] == []
    assert report["without_a_suite"] == {"commands": ["frobnicate"]}
    assert main(["check", "mine"]) == 0
    assert "nothing that a suite exists for" in capsys.readouterr().out


def test_an_unknown_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginError, match="not installed"):
        check("bulitin")
    assert main(["check", "bulitin"]) == 2
    assert "did you mean 'builtin'?" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["pytest", "torch"])
def test_without_its_extra_the_kit_says_what_to_install(missing: str) -> None:
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from kvcore.cli.main import main; sys.exit(main(['check', 'builtin']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "pip install 'kvcore[testing]'" in done.stderr


# --- the kit itself --------------------------------------------------------------------------------------------------


def test_checks_are_skipped_in_one_way_only() -> None:
    """By a declared lack of a capability, through the one function that demands its reason."""
    found = []
    for path in Path(kvcore.testing.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("skip", "skipif", "xfail", "importorskip"):
                found.append((path.stem, node.attr))
    assert found == [("harness", "skip")]
