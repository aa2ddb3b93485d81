"""The direction of the arrows: who may import whom, in core and between the distributions."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core" / "src" / "kvcore"

# A module of core imports only from those before it. A new module gets its place here.
ORDER = """
    errors log
    layout.dtypes layout.fields layout.regions layout.layout layout layout.strides
    layout.moves.matching layout.moves.applying layout.moves.programs layout.moves
    spec config
    contract.base contract.formats contract.spaces contract.pools contract.kernels contract.models contract.backups contract.saved
    contract.transports contract.commands contract
    plugins.hookspecs plugins.options plugins.needs plugins.registry plugins.installed plugins.loader plugins plugins.dispatch
    requests requests.allocator requests.spaces requests.stepplan requests.table requests.ranges requests.counts
    requests.payload requests.unit_lists requests.holds requests.checkpoints requests.rules requests.decode requests.steps
    requests.integrity requests.manager
    memory memory.tensors memory.uploads memory.constants memory.states memory.pool memory.batch memory.opchecks
    memory.groups memory.paged_attention memory.store
    transfer transfer.copier transfer.users
    transfer.messages transfer.messages.control transfer.messages.manifest
    transfer.session transfer.session.base transfer.session.deadlines transfer.session.sources transfer.session.plan
    transfer.session.checksums transfer.session.outgoing transfer.session.handshake
    transfer.session.waiting transfer.session.greeting transfer.session.held transfer.session.sender
    transfer.session.incoming transfer.session.receiver transfer.session.joined
    transfer.wire transfer.wire.awake transfer.wire.worker transfer.wire.budget transfer.wire.loop transfer.wire.access
    transfer.wire.strangers transfer.wire.endpoint
    transfer.flat transfer.flat.staging transfer.flat.batches transfer.flat.reads
    transfer.shm transfer.shm.windows transfer.shm.memfd transfer.shm.stage_wire transfer.shm.stage_server
    transfer.shm.stage_channel transfer.shm.stage_reader transfer.shm.server transfer.shm.transport
    retraction retraction.fit retraction.retractor
    engine engine.turns engine.sizing engine.fitting engine.links engine.assembly engine.handover engine.sides engine.peers engine.exchange engine.poison engine.step engine.step_rules engine.cache
""".split()  # noqa: SIM905 - a line a layer

# The only ones that may load torch when they are imported.
TENSORS = [
    *(name for name in ORDER if name.startswith("memory.")),
    "retraction.retractor",
    "engine.assembly",
    "engine.handover",
    "engine.sides",
    "engine.peers",
    "engine.exchange",
    "engine.poison",
    "engine.step",
    "engine.step_rules",
    "engine.cache",
]

# Faults of other systems came from these: code run by unpickling, segments unlinked by another process's tracker.
BANNED = ["pickle", "shelve", "marshal", "multiprocessing.shared_memory"]


def imports_of(source: str, modules: set[str]) -> Iterator[tuple[str, str]]:
    """Every import anywhere in a module as ``(module, name)``; name is "" where a whole module is imported."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in line {node.lineno}"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in modules else (str(node.module), alias.name)


def modules_of(root: Path, package: str) -> dict[str, Path]:
    """Dotted name → file of every module of a package."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


CORE_MODULES = modules_of(CORE, "kvcore")
NAMES = set(CORE_MODULES)
PLUGINS = {path.parent: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("plugins/*/pyproject.toml"))}


def layer(module: str) -> str:
    """``kvcore.transfer.shm.transport`` → ``transfer.shm``."""
    return module.removeprefix("kvcore.")


def core_imports(module: str) -> set[str]:
    """Modules of core that a module imports."""
    found = {name for name, _ in imports_of(CORE_MODULES[module].read_text(), NAMES)}
    return {name for name in found if name.split(".")[0] == "kvcore"}


def test_imports_are_seen_wherever_they_are() -> None:
    source = (
        "import a.b\nfrom kvcore.memory import pool\nfrom kvcore.layout import Layout\n"
        "def f():\n    from kvcore.memory.store import Store\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n"
    )
    assert set(imports_of(source, {"kvcore.memory.pool"})) == {
        ("a.b", ""),
        ("kvcore.memory.pool", ""),
        ("kvcore.layout", "Layout"),
        ("kvcore.memory.store", "Store"),
        ("typing", "TYPE_CHECKING"),
        ("torch", ""),
    }


def test_every_module_of_core_has_its_place() -> None:
    free = ("builtin", "cli", "testing")  # on top of all others
    ordered = {layer(name) for name in NAMES if name != "kvcore" and layer(name).split(".")[0] not in free}
    assert ordered == set(ORDER)
    assert len(ORDER) == len(set(ORDER))
    assert set(TENSORS) <= set(ORDER)


@pytest.mark.parametrize("module", ORDER)
def test_imports_go_down(module: str) -> None:
    below = {f"kvcore.{name}" for name in ORDER[: ORDER.index(module)]}
    assert core_imports(f"kvcore.{module}") <= below


def test_a_folder_is_seen_at_a_glance() -> None:
    """At most 15 modules besides the one that says what the folder is."""
    for folder in {path.parent for path in CORE_MODULES.values()}:
        names = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
        assert len(names) <= 15, folder


def test_a_module_is_read_in_one_sitting() -> None:
    """At most 450 lines: what wants to be longer wants to be two things."""
    sources = dict(CORE_MODULES)
    for root in PLUGINS:
        sources |= modules_of(root / "src", str(root))
    lengths = {str(path): len(path.read_text().splitlines()) for path in sources.values()}
    assert not {path: lines for path, lines in lengths.items() if lines > 450}


def test_a_folder_of_core_says_what_it_is() -> None:
    for folder in {path.parent for path in CORE_MODULES.values()}:
        assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text())), folder


def test_core_never_imports_its_own_plugin_or_the_command_line() -> None:
    for module in NAMES:
        top = layer(module).split(".")[0]
        reached = {layer(name).split(".")[0] for name in core_imports(module)}
        if top != "builtin":
            assert "builtin" not in reached, module
        if top != "cli":
            assert "cli" not in reached, module


def test_core_names_no_plugin() -> None:
    assert PLUGINS
    for project in PLUGINS.values():
        distribution = project["project"]["name"]
        words = {distribution, distribution.replace("-", "_")}
        entry_points = set(project["project"]["entry-points"]["kvcore"])
        for module, path in CORE_MODULES.items():
            source = path.read_text()
            assert not [word for word in words if word in source], module
            constants = {node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)}
            assert not entry_points & constants, module
            for name, _ in imports_of(source, NAMES):
                assert not name.startswith("kvcore_"), module


def test_plugins_use_public_names_of_core_and_never_each_other() -> None:
    for root in PLUGINS:
        (package,) = [path for path in (root / "src").iterdir() if path.is_dir() and path.name.startswith("kvcore_")]
        for module, path in modules_of(package, package.name).items():
            for name, what in imports_of(path.read_text(), NAMES):
                top = name.split(".")[0]
                if top.startswith("kvcore_"):
                    assert top == package.name, f"{module} imports {name}"
                if top == "kvcore":
                    private = [
                        part for part in (*name.split("."), what) if part.startswith("_") and part != "__version__"
                    ]
                    assert not private, f"{module} imports {name}.{what}"
                    assert not name.startswith("kvcore.builtin"), f"{module} imports another plugin: {name}"


def test_nothing_unpickles_or_uses_tracked_shared_memory() -> None:
    sources = dict(CORE_MODULES)
    for root in PLUGINS:
        sources |= modules_of(root / "src", "")
    for module, path in sources.items():
        for name, what in imports_of(path.read_text(), NAMES):
            assert name not in BANNED, module
            assert f"{name}.{what}" not in BANNED, module


def test_only_modules_about_tensors_load_torch() -> None:
    torch_free = [f"kvcore.{name}" for name in ORDER if name not in TENSORS]
    torch_free += ["kvcore.builtin", "kvcore.builtin.commands.explain", "kvcore.builtin.formats", "kvcore.cli.main"]
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    assert 'torch' not in sys.modules, f'{name} imports torch'\n"
    )
    command = [sys.executable, "-c", code, "kvcore", *torch_free]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
