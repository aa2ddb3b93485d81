"""The plugin of ``docs/plugins.md``, installed from the page and run; and no hook without a line on that page."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcore import contract
from kvcore.plugins import hookspecs
from kvcore.plugins.installed import PROVIDED_KINDS
from kvcore.plugins.registry import KINDS

PAGE = (Path(__file__).parents[1] / "docs" / "plugins.md").read_text()

USE = """
import torch
from kvcore import KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins

config = load_config(None, {"cache.format": "e5m2", "cache.memory": "64KiB", "cache.page_size": 4})
registry = load_plugins(config)
assert registry.plugins == ("builtin", "e5m2"), registry.plugins
group = LayerGroup("full", (0, 1), (TensorSpec("k", 2, 8), TensorSpec("v", 2, 8)), num_query_heads=4)
with KVCache.create(ModelSpec("m", (group,), "fp32"), config, registry) as cache:
    cache.admit("a", 6)
    step = cache.begin([("a", 6)])
    generator = torch.Generator().manual_seed(1)
    rows = {name: torch.randn(6, 2, 8, generator=generator) for name in ("k", "v")}
    step.store(1, rows)
    out = {name: torch.full((6, 2, 8), float("nan")) for name in rows}
    step.load(1, step.batch("full").slots[:6], out)
    for name, row in rows.items():
        # e5m2 by hand: the upper byte of fp16, rounded to nearest even.
        bits = row.half().view(torch.int16).to(torch.int32)
        bits = (bits + 0x7F + ((bits >> 8) & 1)) & ~0xFF
        assert torch.equal(out[name], bits.to(torch.int16).view(torch.float16).float()), name
    step.commit()
print("as written")
"""


def block(language: str) -> str:
    found = re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    assert len(found) == 1
    return str(found[0])


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The page's plugin, installed as its pyproject says."""
    project = tomllib.loads(block("toml"))["project"]
    (tmp_path / "kvcore_e5m2.py").write_text(block("python"))
    info = tmp_path / "kvcore_e5m2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(site: Path, *args: str) -> str:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_plugin_of_the_page_works_end_to_end(site: Path) -> None:
    assert run(site, "-c", USE) == "as written\n"


def test_the_plugin_of_the_page_is_shown_and_explained(site: Path) -> None:
    assert "kvcore-e5m2" in run(site, "-m", "kvcore.cli.main", "plugins", "--json")
    assert "reference_attend_decode" in run(site, "-m", "kvcore.cli.main", "explain", "--format", "e5m2", "--json")


def test_every_hook_has_a_line_on_the_page_and_a_place_in_the_registry() -> None:
    hooks = {name for name, _ in inspect.getmembers(hookspecs, inspect.isfunction) if name.startswith("kvcore_")}
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(kvcore_register_\w+)` \|.*$", PAGE, re.MULTILINE)}
    assert hooks == set(rows) == {kind.hook for kind in KINDS.values()}
    for kind in KINDS.values():
        assert f"`{kind.base.__name__}`" in rows[kind.hook]
        assert getattr(contract, kind.base.__name__) is kind.base
        assert (f"`kvcore.{kind.name}`" in rows[kind.hook]) == (kind.name in PROVIDED_KINDS)


@pytest.mark.slow
def test_the_plugin_of_the_page_passes_the_kit(site: Path) -> None:
    assert "e5m2" in run(site, "-m", "kvcore.cli.main", "check", "e5m2")
