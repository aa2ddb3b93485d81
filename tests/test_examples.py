"""The example distributions: built, installed beside core, and proven with the conformance kit; core knows none of them."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcore.testing import BackupSuite, FormatSuite, IndexSpaceSuite, StateComponentSuite, TransportSuite

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "conformance.md").read_text()
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples/*/pyproject.toml"))

USE = """
import torch
from kvcore.engine.cache import KVCache
from kvcore.config import load_config
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, ModelSpec, TensorSpec

settings = {"cache.format": "nvfp4", "cache.format_options": {"tensor_scale": 0.5}, "cache.memory": "256KiB"}
config = load_config(None, settings)
registry = load_plugins(config)
assert registry.plugins == ("builtin", "nvfp4"), registry.plugins
group = LayerGroup("full", (0, 1), (TensorSpec("k", 2, 32), TensorSpec("v", 2, 32)), num_query_heads=4)
with KVCache.create(ModelSpec("m", (group,), "fp32"), config, registry) as cache:
    cache.admit("a", 5)
    with cache.begin([("a", 5)]) as step:
        rows = {name: torch.arange(5 * 2 * 32).reshape(5, 2, 32) % 16 * 0.4 - 3 for name in ("k", "v")}
        step.store(1, rows)
        out = {name: torch.full((5, 2, 32), float("nan")) for name in rows}
        step.load(1, step.batch("full").slots[:5], out)
        # The block is -3.0, -2.6 … 3.0: scale 3 / 6 / 0.5 = 1, so the grid is 0, 0.25, 0.5, 0.75, 1, 1.5, 2, 3.
        want = [-3, -3, -2, -2, -1.5, -1, -0.5, -0.25, 0.25, 0.5, 1, 1.5, 2, 2, 3, 3]
        assert out["k"][0, 0, :16].tolist() == want, out["k"][0, 0, :16]
        step.commit()
    told = cache.store.constants("full")
    assert sorted(told) == [f"{layer}/tensor_scale/{name}" for layer in (0, 1) for name in ("k", "v")]
with KVCache.create(ModelSpec("m", (group,), "fp32"), config, registry) as same:
    assert same.store.constants("full") == told
    same.set_constants("full", {("tensor_scale", "v"): torch.tensor([0.5, 0.25])})  # calibrated: layer 1 is another
    new = same.store.constants("full")
    assert {key for key in told if told[key] != new[key]} == {"1/tensor_scale/v"}
print("as written")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples as pip installs them, from wheels built here."""
    target = tmp_path_factory.mktemp("site")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, EXAMPLES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def plugin_of(example: Path) -> str:
    """The name of its plugin."""
    project = tomllib.loads((example / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["kvcore"]
    return str(name)


def run(site: Path, *args: str) -> str:
    path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH", "")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True, check=False, cwd=site)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=plugin_of)
def test_it_passes_the_kit(installed: Path, example: Path) -> None:
    name = plugin_of(example)
    report = json.loads(run(installed, "-m", "kvcore.cli.main", "check", name, "--json"))
    assert report["ok"]
    assert [(row["suite"], row["subject"], row["failed"]) for row in report["subjects"]] == [("formats", name, 0)]
    assert report["subjects"][0]["passed"] > 50
    checks = {check["check"].partition("[")[0] for check in report["checks"] if check["outcome"] == "passed"}
    assert {"test_arrives_at_another_cache", "test_comes_back_from_retraction_bit_for_bit"} <= checks
    assert set(report["without_a_suite"]) <= {"kernels"}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=plugin_of)
def test_its_own_tests_pass(installed: Path, example: Path) -> None:
    # What the command has checked is not checked again.
    options = [
        "-c",
        os.devnull,
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "-k",
        "not conformance or Scaled",
    ]
    assert " passed" in run(installed, "-m", "pytest", *options, "--rootdir", str(example), str(example / "tests"))


def test_the_page_of_the_kit_shows_a_suite_that_passes(installed: Path, tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tmp_path / "test_page.py"
    path.write_text(block)
    options = ["-c", os.devnull, "-q", "-p", "no:cacheprovider", "-k", "zero_bytes", "--rootdir", str(tmp_path)]
    assert " passed" in run(installed, "-m", "pytest", *options, str(path))


def test_the_page_of_the_kit_lists_every_check() -> None:
    listed = re.findall(r"^\| `(\w+)` \|.*\|$", PAGE.partition("## Formats")[2], re.MULTILINE)
    suites = (FormatSuite, TransportSuite, BackupSuite, IndexSpaceSuite, StateComponentSuite)
    real = [name for suite in suites for name in dir(suite) if name.startswith("test_")]
    assert sorted(listed) == sorted(name.removeprefix("test_") for name in real)


def test_it_serves_a_cache_by_its_name(installed: Path) -> None:
    assert run(installed, "-c", USE) == "as written\n"


@pytest.mark.parametrize("example", EXAMPLES, ids=plugin_of)
def test_it_imports_public_names_only(example: Path) -> None:
    allowed = {"contract", "errors", "layout", "spec", "testing"}
    tops = {"KVCache", "LayerGroup", "ModelSpec", "Shard", "TensorSpec", "load_config", "load_plugins"}
    for path in example.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = []
            if isinstance(node, ast.ImportFrom):
                modules = [(node.module or "", alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                modules = [(alias.name, "") for alias in node.names]
            for module, name in modules:
                if module == "kvcore":
                    assert name in tops, (path, name)
                elif module.split(".")[0] == "kvcore":
                    assert module.split(".")[1] in allowed, (path, module)
                    assert not name.startswith("_"), (path, name)


@pytest.mark.parametrize("example", EXAMPLES, ids=plugin_of)
def test_nobody_knows_it(example: Path) -> None:
    words = {plugin_of(example), *{"nvfp4": ("e2m1",), "kivi2": ("kivi",)}[plugin_of(example)]}
    sources = [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    assert len(sources) > 50
    for path in sources:
        text = path.read_text().lower()
        assert not [word for word in words if word in text], path
