"""Installs tiny distributions, good and bad, so that plugins are tested as they are found: through their metadata."""

from __future__ import annotations

import importlib
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

PRELUDE = """
from kvcore.contract import CONTRACT, Command, Format, IndexSpace, Kernel, ModelAdapter, PluginInfo
from kvcore.contract import hookimpl

def make_format(name):
    class Made(Format):
        def __init__(self, *, block: int = 32):
            if block < 1:
                raise ValueError("block must be positive")
            self.block = block
        def layout(self, group, *, page_size, shard, arena): return (self.name, page_size)
        def encode(self, layout, rows): return {("k", "x"): rows["k"]}
        def decode(self, layout, elements, dtype): return {"k": elements["k", "x"]}
    Made.name = name
    return Made
"""


@dataclass(frozen=True)
class Fake:
    """A distribution: one module named after it, and its entry points by group."""

    source: str | tuple[str, ...]  # pieces, each with its own indent
    plugin: str = ""  # name of its plugin; "" is the distribution's own
    formats: tuple[str, ...] = ()
    backups: tuple[str, ...] = ()
    transports: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    extra: dict[str, str] = field(default_factory=dict)  # more lines: group → "name = value"


def _formats(plugin: str, *names: str, requires: tuple[str, ...] = ()) -> str:
    made = "".join(f"make_format({name!r}), " for name in names)
    return f"""
        PLUGIN = PluginInfo({plugin!r}, CONTRACT, requires={requires!r}, summary="a fake")
        @hookimpl
        def kvcore_register_formats(): return ({made})
    """


FAKES: dict[str, Fake] = {
    "healthy": Fake(
        (
            _formats("healthy", "fake8"),
            """
        def hello(name: str = "world"):
            print("hello", name)
        @hookimpl
        def kvcore_register_commands(): return [Command("fake-hello", "Says hello.", hello)]
            """,
        ),
        formats=("fake8",),
        commands=("fake-hello",),
    ),
    "keeps": Fake(
        """
        from kvcore.contract import Backup, Transport
        def made(base, called):
            cls = type(called, (base,), {"name": called})
            cls.__abstractmethods__ = frozenset()
            return cls
        PLUGIN = PluginInfo("keeps", CONTRACT)
        @hookimpl
        def kvcore_register_backups(): return [made(Backup, "fake-disk")]
        @hookimpl
        def kvcore_register_transports(): return [made(Transport, "fake-wire")]
        """,
        backups=("fake-disk",),
        transports=("fake-wire",),
    ),
    "broken_import": Fake("import foo", formats=("broken8",), commands=("fake-broken",)),
    "exits_at_import": Fake("raise SystemExit(3)", formats=("exit8",)),
    "misspelt": Fake(
        'PLUGIN = PluginInfo("misspelt", CONTRACT)\n@hookimpl\ndef kvcore_register_format(): return ()\n',
    ),
    "unmarked": Fake('PLUGIN = PluginInfo("unmarked", CONTRACT)\ndef kvcore_register_formats(): return ()\n'),
    "unmarked_misspelt": Fake(
        'PLUGIN = PluginInfo("unmarked_misspelt", CONTRACT)\ndef kvcore_registr_backups(): return ()\n'
    ),
    "hook_takes_arguments": Fake(
        'PLUGIN = PluginInfo("hook_takes_arguments", CONTRACT)\n@hookimpl\ndef kvcore_register_formats(x): return ()\n'
    ),
    "wraps_hooks": Fake(
        'PLUGIN = PluginInfo("wraps_hooks", CONTRACT)\n'
        "@hookimpl(wrapper=True)\ndef kvcore_register_formats(): return (yield)\n"
    ),
    "other_major": Fake('PLUGIN = PluginInfo("other_major", (CONTRACT[0] + 1, 0))'),
    "newer_minor": Fake('PLUGIN = PluginInfo("newer_minor", (CONTRACT[0], CONTRACT[1] + 1))'),
    "malformed_info": Fake('PLUGIN = PluginInfo("malformed_info", "1.0")'),
    "without_plugin": Fake("x = 1"),
    "plugin_is_a_string": Fake('PLUGIN = "plugin_is_a_string"'),
    "named_otherwise": Fake('PLUGIN = PluginInfo("another", CONTRACT)'),
    "twin_a": Fake(_formats("twin", "twin8"), plugin="twin", formats=("twin8",)),
    "twin_b": Fake(_formats("twin", "twin16"), plugin="twin", formats=("twin16",)),
    "left": Fake(_formats("left", "shared8", "left8"), formats=("left8",)),
    "right": Fake(_formats("right", "shared8", "right8"), formats=("right8",)),
    "takes_fp32": Fake(_formats("takes_fp32", "fp32", "own8")),
    "popular_a": Fake(_formats("popular_a", "popular8"), formats=("popular8",)),
    "popular_b": Fake(_formats("popular_b", "popular8"), formats=("popular8",)),
    "needs_absent": Fake(_formats("needs_absent", "na8", requires=("helthy",)), formats=("na8",)),
    "needs_healthy": Fake(_formats("needs_healthy", "nh8", requires=("healthy",)), formats=("nh8",)),
    "needs_broken": Fake(_formats("needs_broken", "nb8", requires=("broken_import",)), formats=("nb8",)),
    "ring_a": Fake(_formats("ring_a", "ra8", requires=("ring_b",))),
    "ring_b": Fake(_formats("ring_b", "rb8", requires=("ring_a",))),
    "returns_none": Fake(
        'PLUGIN = PluginInfo("returns_none", CONTRACT)\n@hookimpl\ndef kvcore_register_formats(): pass\n'
    ),
    "returns_strings": Fake(
        'PLUGIN = PluginInfo("returns_strings", CONTRACT)\n@hookimpl\ndef kvcore_register_formats(): return ["fp8"]\n'
    ),
    "returns_wrong_kind": Fake(
        'PLUGIN = PluginInfo("returns_wrong_kind", CONTRACT)\n'
        '@hookimpl\ndef kvcore_register_backups(): return [make_format("x")]\n'
    ),
    "forgets_methods": Fake(
        """
        PLUGIN = PluginInfo("forgets_methods", CONTRACT)
        class Half(Format):
            name = "half"
            def layout(self, group, *, page_size, shard, arena): return None
        @hookimpl
        def kvcore_register_formats(): return [Half]
        """
    ),
    "registers_twice": Fake(_formats("registers_twice", "same8", "same8")),
    "raises_in_hook": Fake(
        'PLUGIN = PluginInfo("raises_in_hook", CONTRACT)\n@hookimpl\ndef kvcore_register_formats(): return 1 / 0\n',
        formats=("zero8",),
    ),
    "exits_in_hook": Fake(
        'import sys\nPLUGIN = PluginInfo("exits_in_hook", CONTRACT)\n'
        "@hookimpl\ndef kvcore_register_formats(): sys.exit(3)\n",
        formats=("exit9",),
    ),
    "class_for_a_hook": Fake(
        'PLUGIN = PluginInfo("class_for_a_hook", CONTRACT)\n@hookimpl\nclass kvcore_register_formats: pass\n'
    ),
    "returns_an_instance": Fake(
        'PLUGIN = PluginInfo("returns_an_instance", CONTRACT)\n'
        '@hookimpl\ndef kvcore_register_formats(): return [make_format("i8")()]\n',
        formats=("i8",),
    ),
    "promises_too_much": Fake(_formats("promises_too_much", "kept8"), formats=("kept8", "unkept8")),
    "points_nowhere": Fake(_formats("points_nowhere", "pn8"), extra={"kvcore.formats": "stray8 = another_module"}),
    "broken_kernels": Fake(
        (
            _formats("broken_kernels", "bk8"),
            """
        @hookimpl
        def kvcore_register_kernels():
            import no_such_kernels
            """,
        ),
        formats=("bk8",),
    ),
    "kernel_without_op": Fake(
        """
        PLUGIN = PluginInfo("kernel_without_op", CONTRACT)
        class K(Kernel):
            name, formats, op = "k", ("*",), "stroe"
            def supports(self, device, layout, group): return None
            def bind(self, pool, group, format): return None
        @hookimpl
        def kvcore_register_kernels(): return [K]
        """
    ),
    "model_a": Fake(
        """
        PLUGIN = PluginInfo("model_a", CONTRACT)
        class A(ModelAdapter):
            name = "a"
            def matches(self, config): return config["type"] in ("a", "both")
            def spec(self, config): return None
        @hookimpl
        def kvcore_register_models(): return [A]
        """
    ),
    "model_b": Fake(
        """
        PLUGIN = PluginInfo("model_b", CONTRACT)
        class B(ModelAdapter):
            name = "b"
            def matches(self, config): return config["type"] in ("b", "both")
            def spec(self, config): return None
        @hookimpl
        def kvcore_register_models(): return [B]
        """
    ),
    "fails_when_run": Fake(
        """
        from kvcore.errors import CapacityError
        PLUGIN = PluginInfo("fails_when_run", CONTRACT)
        def full(json: bool = False): raise CapacityError("no room", needed=3)
        def stop(): raise KeyboardInterrupt
        def three(): return 3
        def wait():
            import time
            print("ready", flush=True)
            time.sleep(60)
        @hookimpl
        def kvcore_register_commands():
            return [Command("fake-full", "", full), Command("fake-stop", "", stop), Command("fake-three", "", three),
                    Command("fake-wait", "", wait)]
        """,
        commands=("fake-full", "fake-stop", "fake-three", "fake-wait"),
    ),
}


def write_distribution(site: Path, name: str) -> None:
    """Write one fake as an installed distribution into a site directory."""
    fake = FAKES[name]
    pieces = (fake.source,) if isinstance(fake.source, str) else fake.source
    body = "\n".join(textwrap.dedent(piece) for piece in pieces)
    module = f"kvcore_fake_{name}"
    (site / f"{module}.py").write_text(f"{PRELUDE}\n{body}\n")
    info = site / f"kvcore_fake_{name}-1.5.dist-info"
    info.mkdir()
    dist = f"kvcore-fake-{name.replace('_', '-')}"
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.5\n")
    lines = ["[kvcore]", f"{fake.plugin or name} = {module}"]
    for group in ("formats", "backups", "transports", "commands"):
        lines += [f"[kvcore.{group}]", *(f"{item} = {module}" for item in getattr(fake, group))]
    text = "\n".join(lines)
    for group, line in fake.extra.items():
        text = text.replace(f"[{group}]", f"[{group}]\n{line}")
    (info / "entry_points.txt").write_text(text + "\n")


@pytest.fixture(autouse=True)
def _heeds_interrupts() -> Iterator[None]:
    """A runner that was started in the background ignores Ctrl-C, and processes that a test starts would inherit it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A site directory on ``sys.path``; what was imported from it is forgotten afterwards."""
    directory = tmp_path / "site"
    directory.mkdir()
    monkeypatch.syspath_prepend(str(directory))
    yield directory
    for module in [name for name in sys.modules if name.startswith("kvcore_fake_")]:
        del sys.modules[module]
    importlib.invalidate_caches()


@pytest.fixture
def install(site: Path) -> Callable[..., Path]:
    """``install("healthy", "left", …)``: install fakes; returns the site directory."""

    def put(*names: str) -> Path:
        for name in names:
            write_distribution(site, name)
        importlib.invalidate_caches()
        return site

    return put
