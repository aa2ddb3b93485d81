"""Runs suites on subjects without a test file of the user's: what ``kvcore check`` does."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from kvcore.contract import Backup, Format, Transport
from kvcore.errors import IntegrityError
from kvcore.plugins.registry import KINDS, Registry
from kvcore.testing.backups import BackupSuite
from kvcore.testing.formats.suite import FormatSuite
from kvcore.testing.index_spaces import IndexSpaceSuite
from kvcore.testing.sample import groups_of
from kvcore.testing.states import StateComponentSuite
from kvcore.testing.transports import TransportSuite

Outcome = Literal["passed", "failed", "skipped"]

SUITES = ("formats", "transports", "backups", "index_spaces", "state_components")
"""Kinds of things that a suite exists for."""

_MODULE = "from kvcore.testing.runner import collected\n\nglobals().update(collected())\n"


@dataclass(frozen=True)
class Case:
    """A suite on one subject.

    Attributes:
        kind: kind of the subject, see :data:`kvcore.plugins.registry.KINDS`.
        subject: its name.
        suite: the suite, or a subclass.
        fixtures: fixture name → what makes its value.
        attributes: attributes of the suite, such as ``groups``.
    """

    kind: str
    subject: str
    suite: type
    fixtures: Mapping[str, Callable[[], Any]]
    attributes: Mapping[str, Any] = field(default_factory=dict)


class Check(msgspec.Struct, frozen=True):
    """What became of one check.

    Attributes:
        kind, subject: of its case.
        check: name of the check, with its parameters.
        outcome: an error while the check was set up is a failure too.
        reason: why it failed, or which declared lack of a capability skipped it.
        details: the whole report of a failure.
    """

    kind: str
    subject: str
    check: str
    outcome: Outcome
    reason: str = ""
    details: str = ""


def cases_of(registry: Registry, plugin: str) -> list[Case]:
    """Everything that a plugin registers and a suite exists for.

    Formats, transports and backups are constructed with the options in their class's attribute ``check_options``, a
    mapping; without it, with none. A format is tried with its own sample groups, if it has any.
    """
    cases = []
    spaces, states = registry.index_spaces(), {item.name: item for item in registry.state_components()}

    def options(kind: str, name: str) -> dict[str, Any]:
        return dict(getattr(registry.item(kind, name), "check_options", {}))

    def add(
        kind: str,
        suite: type,
        fixtures: Callable[[str], dict[str, Callable[[], Any]]],
        attributes: Callable[[str], dict[str, Any]] = lambda name: {},
    ) -> None:
        for name in registry.names(kind):
            if registry.plugin_of(kind, name) == plugin:
                made = {"registry": lambda: registry, **fixtures(name)}
                cases.append(Case(kind, name, suite, made, attributes(name)))

    def kv_format(name: str) -> Format:
        return registry.format(name, **options("formats", name))

    def groups(name: str) -> dict[str, Any]:
        try:
            return {"groups": groups_of(kv_format(name))}
        except Exception:  # noqa: BLE001 - the checks make the same calls, and report what they raise
            return {}

    def transport(name: str) -> Transport:
        return registry.transport(name, **options("transports", name))

    def backup(name: str) -> Backup:
        return registry.backup(name, **options("backups", name))

    add("formats", FormatSuite, lambda name: {"kv_format": lambda: kv_format(name)}, groups)
    add("transports", TransportSuite, lambda name: {"new_transport": lambda: lambda: transport(name)})
    add("backups", BackupSuite, lambda name: {"new_backup": lambda: lambda: backup(name)})
    add("index_spaces", IndexSpaceSuite, lambda name: {"space": lambda: spaces[name]})
    add("state_components", StateComponentSuite, lambda name: {"component": lambda: states[name]})
    return cases


def unchecked(registry: Registry, plugin: str) -> dict[str, list[str]]:
    """What a plugin registers and no suite exists for: kind → names."""
    found = {}
    for kind in KINDS:
        if kind not in SUITES:
            names = [name for name in registry.names(kind) if registry.plugin_of(kind, name) == plugin]
            if names:
                found[kind] = names
    return found


# --- running ---------------------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """The cases under way, by class name, and what was reported of them."""

    cases: dict[str, Case]
    checks: dict[str, Check] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst phase of every check."""
        if report.when != "call" and report.passed:
            return
        if report.nodeid in self.checks and not report.failed:
            return
        _, class_name, *name = report.nodeid.split("::")
        case = self.cases[class_name]
        outcome: Outcome = "failed" if report.failed else "skipped" if report.skipped else "passed"
        reason = _reason(report)
        details = report.longreprtext if report.failed else ""
        self.checks[report.nodeid] = Check(case.kind, case.subject, "::".join(name), outcome, reason, details)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep what went wrong before any check ran."""
        if report.failed:
            self.errors.append(report.longreprtext)


_numbers = itertools.count()
_lock = threading.RLock()  # a check may run suites itself
_current: list[_Run] = []


def collected() -> dict[str, type]:
    """The test classes of the run under way; called by the module that pytest collects."""
    return {name: _class(name, case) for name, case in _current[-1].cases.items()}


def _class(name: str, case: Case) -> type:
    members: dict[str, Any] = {"__doc__": f"{case.kind}: {case.subject}", **case.attributes}
    for fixture, make in case.fixtures.items():
        members[fixture] = _fixture(fixture, make)
    return type(name, (case.suite,), members)


def _fixture(name: str, make: Callable[[], Any]) -> Any:
    def value(self: Any) -> Any:
        return make()

    return pytest.fixture(name=name)(value)


def run(cases: Sequence[Case], *, select: str = "") -> list[Check]:
    """Run suites in this process and report every check, in order.

    Args:
        cases: what to run.
        select: an expression of pytest's ``-k``, to run some checks only.

    Raises IntegrityError where a suite could not be collected or ran no check.
    """
    with _lock, tempfile.TemporaryDirectory(prefix="kvcore-check-") as folder:
        here = _Run({f"TestCase{number}": case for number, case in enumerate(cases)})
        module = Path(folder) / f"test_conformance_{next(_numbers)}.py"  # pytest imports a name only once
        module.write_text(_MODULE)
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")  # nobody else's settings
        arguments = [
            str(module),
            "-c",
            str(settings),
            "--rootdir",
            folder,
            "-q",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:logging",
            "--import-mode=importlib",
        ]
        output = io.StringIO()
        _current.append(here)
        try:
            with _plain_environment(), contextlib.redirect_stdout(output):
                code = pytest.main([*arguments, "-k", select], plugins=[here])
        finally:
            _current.pop()
            sys.modules.pop(module.stem, None)
    missed = here.cases.keys() - {name.split("::")[1] for name in here.checks}
    if here.errors or code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or missed:
        cause = "\n".join(here.errors) or output.getvalue()
        raise IntegrityError("the conformance kit could not run", exit_code=int(code), cause=cause[-4000:])
    return list(here.checks.values())


@contextlib.contextmanager
def _plain_environment() -> Iterator[None]:
    """Without the user's options and plugins of pytest, which could deselect checks."""
    changed = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": ""}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _reason(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message) if crash else ""
