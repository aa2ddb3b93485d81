"""Real processes with the public API, killed, stopped and restarted while prompts move: bytes are right, units come back."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest


@pytest.mark.slow  # processes that start, and peers that lose patience with one another
def test_processes_killed_stopped_and_restarted(chaos: SimpleNamespace) -> None:
    """Every request ends on every side that lives, and rounds without a fault deliver everything; retraction works too."""
    processes = importlib.import_module("chaos.processes")
    report = processes.run(12, 11)
    assert not report.violations, "\n".join(report.words)
    assert set(report.faults) == set(processes.FAULTS)
    seen = report.outcomes
    assert seen["ReceiveDone"] >= 12
    assert seen["ReceiveFailed"] >= 3
    assert seen["SendFailed"] >= 3
    assert seen["retracted and resumed"] >= 12
    assert seen["process started"] > 5
    assert seen["started again at its address"] >= 2


def members(group: int) -> list[int]:
    """The processes of a process group that run."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, pgrp = entry.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(pgrp) == group and state != "Z":
            found.append(int(entry.parent.name))
    return found


def test_a_run_is_told_as_json() -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--rounds", "3", "--json"]
    told = json.loads(subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, check=True).stdout)
    assert told["rounds"] == 3
    assert told["violations"] == {}
    assert sum(told["outcomes"].values()) > 0
    assert set(map(type, told["outcomes"].values())) == {int}


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_behind() -> None:
    """Ctrl-C while processes start or are stopped: all of them are gone, and what they shared."""
    before = set(Path("/dev/shm").iterdir())
    command = [sys.executable, "-m", "benchmarks.chaos", "--processes", "--rounds", "50"]
    root = Path(__file__).parents[3]
    run = subprocess.Popen(command, cwd=root, start_new_session=True, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(members(run.pid)) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(30) not in (0, None)
    while members(run.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = members(run.pid)
    if left:
        os.killpg(run.pid, signal.SIGKILL)
    assert not left
    assert not set(Path("/dev/shm").iterdir()) - before
