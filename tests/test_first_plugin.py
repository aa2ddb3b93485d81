"""The plugin of ``docs/first_plugin.md``, installed from the page and run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "first_plugin.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    return str(found)


def test_the_first_plugin_is_listed_and_runs(tmp_path: Path) -> None:
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "kvcore_dtypes.py").write_text(block("python"))
    info = tmp_path / "kvcore_dtypes-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [line for group, entries in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in entries.items()))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def kvcore(*args: str) -> str:
        command = [sys.executable, "-m", "kvcore.cli.main", *args]
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "kvcore-dtypes" in kvcore("plugins", "--json")
    assert kvcore("dtypes", "--itemsize", "4") == "i32 4\nfp32 4\n"
