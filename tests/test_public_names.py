"""What engines and plugins import: every public name resolves, and every import that a page shows works."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import kvcore
from kvcore import contract, testing

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
IMPORT = re.compile(
    r"^ *(from kvcore(?:\.[\w.]+)? import (?:\([^)]*\)|[^\n(#]+)|import kvcore(?:\.[\w.]+)?)", re.MULTILINE
)


def imports(page: Path) -> list[str]:
    """Import statements in the python blocks of a page."""
    blocks = re.findall(r"```(?:python|py)\n(.*?)```", page.read_text(), re.DOTALL)
    return [statement for block in blocks for statement in IMPORT.findall(block)]


@pytest.mark.parametrize("name", [*kvcore.__all__])
def test_a_public_name_of_the_package_is_what_its_module_defines(name: str) -> None:
    value = getattr(kvcore, name)
    if name != "__version__":
        assert getattr(sys.modules[value.__module__], name) is value
    assert name in dir(kvcore)


def test_what_is_loaded_late_is_what_a_type_checker_sees() -> None:
    """A name that only one of the two knows would pass mypy and fail at run time, or the other way round."""
    tree = ast.parse(Path(str(kvcore.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    checked = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert set(checked) == set(kvcore.__all__) - {"__version__"}
    for name, module in checked.items():
        assert getattr(sys.modules[str(module)], name, None) is getattr(kvcore, name)


def test_a_name_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="KVCash"):
        _ = kvcore.KVCash


@pytest.mark.parametrize("package", [contract, testing], ids=lambda package: package.__name__)
def test_every_word_of_the_contract_and_of_the_kit_resolves(package: ModuleType) -> None:
    assert len(set(package.__all__)) == len(package.__all__)
    assert not [name for name in package.__all__ if not hasattr(package, name)]


def test_the_kit_has_every_suite() -> None:
    """A plugin's tests take their suites from ``kvcore.testing``, and see the values that differ where one fails."""
    for path in Path(str(testing.__file__)).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name.endswith("Suite"):
                suite = getattr(testing, node.name)
                for base in suite.__mro__[:-1]:
                    held = {name for name in vars(base) if name.startswith("test_")}
                    assert not held or base.__module__.removeprefix("kvcore.testing.") in testing._KIT


def test_only_names_about_tensors_load_torch() -> None:
    """Configuration, errors, models and plans work where torch is not installed."""
    needs_torch = {"KVCache", "CacheStats", "Step"}
    code = (
        "import sys, kvcore, kvcore.contract\n"
        "for name in sys.argv[1:]:\n"
        "    getattr(kvcore, name)\n"
        "    assert 'torch' not in sys.modules, name\n"
    )
    names = [name for name in kvcore.__all__ if name not in needs_torch]
    done = subprocess.run([sys.executable, "-c", code, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_import_that_a_page_shows_works(page: Path) -> None:
    for statement in imports(page):
        exec(compile(statement.strip(), str(page), "exec"), {})


def test_pages_import_an_engines_names_from_one_place() -> None:
    """Where a short name exists, no page shows a long one."""
    for page in PAGES:
        for statement in imports(page):
            for node in ast.walk(ast.parse(statement.strip())):
                if isinstance(node, ast.ImportFrom) and node.module not in {"kvcore", "kvcore.contract"}:
                    long = {alias.name for alias in node.names} & {*kvcore.__all__, *contract.__all__}
                    assert not long, f"{page.name}: {statement}"
