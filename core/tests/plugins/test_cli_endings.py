"""How ``kvcore`` ends where its output fails or it is interrupted: one line or none, and an exit code that says which."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvcore.cli.app
from kvcore.cli.main import INTERRUPTED, UNREAD, main

SRC = Path(__file__).parents[2] / "src"
ENV = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "kvcore.cli.main", *args]


@pytest.mark.parametrize("args", [("--version",), ("layout", "fp32"), ("layout", "fp32", "--json")])
def test_output_to_a_full_disk_is_one_line(args: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command(*args), stdout=full, stderr=subprocess.PIPE, text=True, env=ENV, check=False)
    assert done.returncode == 1
    assert done.stderr == "kvcore: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize("args", [("--help",), ("layout", "fp32"), ("layout", "fp32", "--json")])
def test_a_pipe_that_nobody_reads_is_quiet(args: tuple[str, ...]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command(*args), stdout=write, stderr=subprocess.PIPE, text=True, env=ENV, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (UNREAD, "")


@pytest.mark.parametrize(("args", "code"), [(("--version",), 0), (("nosuch",), 2)])
def test_an_error_that_cannot_be_said_keeps_its_exit_code(args: tuple[str, ...], code: int) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command(*args), stdout=subprocess.DEVNULL, stderr=full, env=ENV, check=False)
    assert done.returncode == code
    closed = subprocess.run(
        ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *command(*args)], env=ENV, capture_output=True, check=False
    )
    assert (closed.returncode, closed.stdout, closed.stderr) == (code, b"", b"")


def test_an_interrupt_while_modules_are_imported_is_one_line(tmp_path: Path) -> None:
    """The first import of the command's own module interrupts it, as an impatient hand does."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, os, signal\n"
        "class Impatient:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Impatient())\n"
    )
    env = {**ENV, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ENV['PYTHONPATH']}"}
    done = subprocess.run(command("layout", "fp32"), capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "", "kvcore: interrupted\n")


@pytest.mark.parametrize("where", ["load_command", "configure_logging"])
def test_an_interrupt_anywhere_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    def interrupt(*args: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(kvcore.cli.app, where, interrupt)
    assert main(["layout", "fp32"]) == INTERRUPTED
    assert capsys.readouterr() == ("", "kvcore: interrupted\n")


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        (KeyboardInterrupt, INTERRUPTED, "kvcore: interrupted\n"),
        (lambda: INTERRUPTED, INTERRUPTED, ""),
        (lambda: 3, 3, ""),
        (BrokenPipeError, UNREAD, ""),
    ],
    ids=["interrupt", "said so itself", "own code", "unread"],
)
def test_a_command_ends_as_it_says(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ends: Callable[[], Any],
    code: int,
    said: str,
) -> None:
    def callback() -> int:
        made = ends()
        if isinstance(made, BaseException):
            raise made
        return int(made)

    monkeypatch.setattr(kvcore.cli.app, "load_command", lambda name: kvcore.cli.app.Command("x", "x", callback))
    monkeypatch.setattr("kvcore.cli.main._drop_output", lambda: None)
    assert main(["x"]) == code
    assert capsys.readouterr() == ("", said)
