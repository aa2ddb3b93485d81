"""``kvcore keys new``: pairs that zmq reads, whose secret was never anybody else's."""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.auth

from kvcore.builtin.commands.explain import COMMANDS
from kvcore.cli import app
from kvcore.errors import ConfigError


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def run(*args: str) -> int:
    return app._invoke(next(item for item in COMMANDS if item.name == "keys"), list(args))


def test_a_pair_is_made_and_both_files_and_the_configuration_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("new", "decode", "--folder", str(tmp_path)) == 0
    public, secret = tmp_path / "decode.key", tmp_path / "decode.key_secret"
    assert (stat.S_IMODE(secret.stat().st_mode), stat.S_IMODE(public.stat().st_mode)) == (0o600, 0o644)
    given, none = zmq.auth.load_certificate(public)
    again, key = zmq.auth.load_certificate(secret)
    assert none is None
    assert key is not None
    assert given == again == zmq.curve_public(key)
    out = capsys.readouterr().out
    here, peers = (tomllib.loads(f"[transfer]{part}")["transfer"] for part in out.split("[transfer]")[1:])
    assert here["curve_certificate"] == str(secret)
    assert peers["curve_peers"] == [str(public)]
    assert key.decode() not in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("new", "a", "--folder", str(tmp_path), "--json")
    made = json.loads(capsys.readouterr().out)
    assert (made["public"], made["secret"]) == (str(tmp_path / "a.key"), str(tmp_path / "a.key_secret"))
    assert made["config"][0] == f'curve_certificate = "{tmp_path / "a.key_secret"}"'


@pytest.mark.parametrize("there", ["a.key", "a.key_secret"])
def test_nothing_is_written_over(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match="never written over"):
        run("new", "a", "--folder", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


@pytest.mark.parametrize(("name", "folder"), [("a/b", "."), ("../a", "."), ("", "."), ("a", "no/such"), ("a\n", ".")])
def test_a_name_or_folder_that_is_none_is_refused(tmp_path: Path, name: str, folder: str) -> None:
    with pytest.raises(ConfigError):
        run("new", name, "--folder", str(tmp_path / folder))
    assert not list(tmp_path.iterdir())


def test_only_new_is_understood(tmp_path: Path) -> None:
    with pytest.raises(app.UsageError):
        run("old", "a", "--folder", str(tmp_path))
