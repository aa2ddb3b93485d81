"""What is shipped: each distribution as a wheel, and core on a machine without torch."""

from __future__ import annotations

import configparser
import email
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECTS = [path for where in ("plugins", "examples") for path in sorted(ROOT.glob(f"{where}/*/pyproject.toml"))]
DISTRIBUTIONS = [ROOT / "core", *(path.parent for path in PROJECTS)]


@pytest.fixture(scope="module", params=DISTRIBUTIONS, ids=lambda path: path.name)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, zipfile.ZipFile]:
    """A distribution's folder and its wheel, built with the tools at hand."""
    out = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return request.param, zipfile.ZipFile(built)


@pytest.mark.slow
def test_a_wheel_holds_its_package_and_nothing_else(wheel: tuple[Path, zipfile.ZipFile]) -> None:
    root, archive = wheel
    (package,) = [path for path in (root / "src").iterdir() if path.is_dir()]
    wanted = {
        path.relative_to(root / "src").as_posix()
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert f"{package.name}/py.typed" in wanted
    shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == wanted


@pytest.mark.slow
def test_a_wheel_says_what_it_is(wheel: tuple[Path, zipfile.ZipFile]) -> None:
    _, archive = wheel
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    entry_points = configparser.ConfigParser(delimiters=("=",))
    entry_points.optionxform = str  # type: ignore[assignment, method-assign]
    entry_points.read_string(archive.read(name.replace("METADATA", "entry_points.txt")).decode())
    modules = set(entry_points["kvcore"].values())
    # Every name it provides points at a plugin of its own, else it could not be enabled by that name.
    for section in entry_points.sections():
        if section.startswith("kvcore."):
            assert set(entry_points[section].values()) <= modules


def test_core_needs_no_torch_for_its_metadata_commands() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing it raises ModuleNotFoundError
        "from kvcore.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, check=False)

    done = run("plugins", "--json")
    assert done.returncode == 0, done.stderr
    builtin = next(row for row in json.loads(done.stdout)["plugins"] if row["name"] == "builtin")
    assert builtin["healthy"], builtin["error"]
    assert set(builtin["provides"]["formats"]) >= {"bf16", "fp16", "fp32"}
    assert run("--help").returncode == 0
    refused = run("explain")
    assert refused.returncode == 2
    assert "pip install 'kvcore[torch]'" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_ci_tries_what_make_offers() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in ("venv", "demo", "test", "bench", "lint", "fmt", "wheels", "clean"):
        assert f"\n{target}:" in makefile
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize(
    ("interpreter", "message"),
    [
        ("[ $1 = -V ] && echo Python 3.9.1; [ $1 = -V ]", "needs Python 3.11 or newer; "),
        ("case $2 in *ensurepip*) exit 1;; esac", "apt-get install python3-venv"),
    ],
)
def test_make_says_what_the_machine_lacks(tmp_path: Path, interpreter: str, message: str) -> None:
    for name in ("Makefile", "constraints.txt", "requirements-dev.txt", "core/pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{interpreter}\n")
    python.chmod(0o755)
    command = ["make", "-C", str(tmp_path), "venv", f"PYTHON={python}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert not (tmp_path / ".venv").exists()
