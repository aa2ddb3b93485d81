"""``kvcore check``: the conformance kit on everything a plugin registers."""

from __future__ import annotations

import json as json_module
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcore.builtin.commands.geometry import AsJson
from kvcore.plugins import load_plugins

if TYPE_CHECKING:
    from kvcore.testing import Check

Counts = Mapping[tuple[str, str], Counter[str]]


def check(
    plugin: Annotated[str, typer.Argument(help="Name of an installed plugin.", show_default=False)],
    json: AsJson = False,
) -> int:
    """Run the conformance kit on a plugin; exit code 1 where a check fails."""
    from kvcore.testing import cases_of, run, unchecked  # here: it needs pytest and torch

    registry = load_plugins([plugin])
    cases = cases_of(registry, plugin)
    checks = run(cases) if cases else []
    counts: dict[tuple[str, str], Counter[str]] = {(case.kind, case.subject): Counter() for case in cases}
    for item in checks:
        counts[item.kind, item.subject][item.outcome] += 1
    failed = [item for item in checks if item.outcome == "failed"]
    left = unchecked(registry, plugin)
    if json:
        print(json_module.dumps(_record(plugin, counts, checks, left)))
    else:
        _show(plugin, counts, checks, left)
    return 1 if failed else 0


def _record(plugin: str, counts: Counts, checks: Sequence[Check], left: Mapping[str, list[str]]) -> dict[str, object]:
    subjects = [
        {"suite": kind, "subject": subject, **{what: found[what] for what in ("passed", "failed", "skipped")}}
        for (kind, subject), found in counts.items()
    ]
    return {
        "plugin": plugin,
        "ok": not any(found["failed"] for found in counts.values()),
        "subjects": subjects,
        "faults": [msgspec.to_builtins(fault) for fault in faults(checks)],
        "checks": [msgspec.to_builtins(msgspec.structs.replace(item, details="")) for item in checks],
        "without_a_suite": left,
    }


class Fault(msgspec.Struct, frozen=True):
    """One cause for which checks failed: a typo in a format fails them all, and is shown once.

    Attributes:
        subject: what was checked.
        reason: the same for all of ``checks``.
        checks: their names, in order.
        details: the report of the first.
    """

    subject: str
    reason: str
    checks: tuple[str, ...]
    details: str


def faults(checks: Sequence[Check]) -> list[Fault]:
    """Failed checks by subject and reason, those that fail most checks first."""
    found: dict[tuple[str, str], list[Check]] = {}
    for item in checks:
        if item.outcome == "failed":
            found.setdefault((item.subject, item.reason or item.details), []).append(item)
    made = [
        Fault(subject, reason, tuple(item.check for item in items), items[0].details)
        for (subject, reason), items in found.items()
    ]
    return sorted(made, key=lambda fault: -len(fault.checks))


def _show(plugin: str, counts: Counts, checks: Sequence[Check], left: Mapping[str, list[str]]) -> None:
    console = Console()
    table = Table(title=f"conformance of {plugin}", caption=None if counts else "nothing that a suite exists for")
    table.add_column("suite")
    table.add_column("subject")
    for what in ("passed", "failed", "skipped"):
        table.add_column(what, justify="right")
    for (kind, subject), found in counts.items():
        style = "red" if found["failed"] else ""
        table.add_row(
            kind, escape(subject), *(str(found[what]) for what in ("passed", "failed", "skipped")), style=style
        )
    console.print(table)
    skipped = Counter((item.subject, item.reason) for item in checks if item.outcome == "skipped")
    for (subject, reason), number in skipped.items():
        console.print(escape(f"skipped {number} of {subject}: {reason}"), highlight=False)
    for kind, names in left.items():
        console.print(escape(f"no suite for {kind}: {', '.join(names)}"), highlight=False)
    for fault in faults(checks):
        alone = len(fault.checks) == 1
        what = fault.checks[0] if alone else f"{len(fault.checks)} checks fail alike"
        console.rule(escape(f"{fault.subject}: {what}"), style="red")
        if not alone:
            console.print(escape(f"the first of them: {fault.checks[0]}"), highlight=False)
        console.print(escape(fault.details), highlight=False)
