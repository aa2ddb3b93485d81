"""The ``kvcore`` command: subcommands come from plugins, and every error is one message and an exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcore import __version__
from kvcore.cli.main import main
from kvcore.errors import ConfigError

Install = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvcore {__version__}\n"


def test_help_lists_every_command_and_a_broken_one_as_broken(install: Install, capsys: Capture) -> None:
    install("healthy", "broken_import")
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["fake-hello", "Says", "hello."] for line in lines)
    broken = next(line for line in lines if line.split()[:1] == ["fake-broken"])
    assert "broken_import" in broken
    assert "No module named 'foo'" in broken
    assert any(line.split()[:1] == ["plugins"] for line in lines)


def test_no_command_shows_the_help_and_is_wrong_usage(capsys: Capture) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_a_command_imports_only_its_plugin(install: Install, capsys: Capture) -> None:
    install("healthy", "left", "broken_import")
    assert main(["fake-hello", "--name", "you"]) == 0
    assert capsys.readouterr().out == "hello you\n"
    assert "kvcore_fake_healthy" in sys.modules
    assert "kvcore_fake_left" not in sys.modules


def test_a_command_loads_no_torch(install: Install) -> None:
    site = install("healthy")
    code = (
        "import sys; from kvcore.cli.main import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules, 'torch was imported'; sys.exit(status)"
    )
    for args in (["fake-hello"], ["plugins", "--json"], ["--help"]):
        env = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run([sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("args", "status", "code", "words"),
    [
        (["plugns"], 2, "config", ["unknown command", "did you mean 'plugins'?"]),
        (["--verison"], 2, "usage", ["--verison", "did you mean '--version'?"]),
        (["fake-hello", "--nam", "x"], 2, "usage", ["--nam", "kvcore fake-hello --help"]),
        (["explain", "--page-size", "many"], 2, "usage", ["--page-size", "integer"]),
        (["explain", "--page-size", "0"], 2, "config", ["cache.page_size"]),
        (["explain", "--format", "fp23"], 2, "config", ["did you mean 'fp32'?"]),
        (["explain", "--config", "/no/such/file.toml"], 2, "config", ["/no/such/file.toml"]),
        (["explain", "--heads", "3", "--kv-heads", "2"], 2, "unsupported", ["multiple"]),
        (["fake-broken"], 2, "plugin", ["broken_import", "No module named 'foo'"]),
        (["fake-full"], 1, "capacity", ["no room", "needed"]),
    ],
)
def test_errors_are_one_message_and_an_exit_code(
    install: Install, capsys: Capture, args: list[str], status: int, code: str, words: list[str]
) -> None:
    install("healthy", "broken_import", "fails_when_run")
    assert main(args) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("kvcore: ")
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in words)
    if args[0] in ("fake-full", "explain", "plugns"):
        assert main([*args, "--json"]) == status
        said = capsys.readouterr()
        assert said.out == ""
        error = json.loads(said.err)["error"]
        assert error["code"] == code
        assert all(word in json.dumps(error) for word in words)


def test_a_command_may_return_its_exit_code(install: Install) -> None:
    install("fails_when_run")
    assert main(["fake-three"]) == 3


def test_an_interrupt_ends_with_130(install: Install, capsys: Capture) -> None:
    install("fails_when_run")
    assert main(["fake-stop"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_ctrl_c_ends_cleanly(install: Install) -> None:
    site = install("fails_when_run")
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcore.cli.main", "fake-wait"],
        env={**os.environ, "PYTHONPATH": str(site)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_plugins_shows_health_and_cause(install: Install, capsys: Capture) -> None:
    install("healthy", "broken_import", "twin_a", "twin_b")
    assert main(["plugins", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["plugins"]
    by_name = {row["name"]: row for row in rows}
    assert by_name["healthy"]["healthy"] is True
    assert by_name["healthy"]["provides"]["formats"] == ["fake8"]
    assert by_name["healthy"]["distribution"] == "kvcore-fake-healthy"
    assert by_name["broken_import"]["healthy"] is False
    assert by_name["broken_import"]["error"]["fields"]["cause"].startswith("ModuleNotFoundError")
    assert sum(row["name"] == "twin" for row in rows) == 2
    assert by_name["builtin"]["healthy"] is True
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert "BROKEN" in table
    assert "fake8" in table


def test_logs_are_configured_by_checked_variables(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """N3: a variable that says neither yes nor no is refused by name."""
    monkeypatch.setenv("KVCORE_LOG_JSON", "ture")
    assert main(["--version"]) == 2
    assert "KVCORE_LOG_JSON" in capsys.readouterr().err
    monkeypatch.setenv("KVCORE_LOG_JSON", "false")
    monkeypatch.setenv("KVCORE_LOG_LEVEL", "wran")
    assert main(["--version"]) == 2
    assert "KVCORE_LOG_LEVEL" in capsys.readouterr().err


def test_logs_go_to_stderr(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    import structlog

    from kvcore.cli.boot import configure_logging

    configure_logging({"KVCORE_LOG_JSON": "1", "KVCORE_LOG_LEVEL": "warning"})
    log = structlog.get_logger("test")
    log.info("not said")
    log.warning("said", units=3)
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert {"event": "said", "units": 3, "level": "warning"}.items() <= json.loads(line).items()
    with pytest.raises(ConfigError):
        configure_logging({"KVCORE_LOG_JSON": "maybe"})
    structlog.reset_defaults()


def test_explain_says_which_kernel_runs_and_why_not_the_others(capsys: Capture) -> None:
    assert main(["explain", "--format", "fp16", "--page-size", "8", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["format"], said["device"]) == ("fp16", "cpu")
    rows = {row["op"]: row for row in said["groups"]["full"]}
    assert set(rows) == {"store", "load", "attend_decode", "attend_prefill", "copy_units"}
    for row in rows.values():
        assert row["kernel"]
        assert all(item["reason"] for item in row["refused"])
        assert row["kernel"] not in [item["kernel"] for item in row["refused"]]
    assert any(row["refused"] for row in rows.values())
    assert main(["explain"]) == 0
    assert "attend_decode" in capsys.readouterr().out
