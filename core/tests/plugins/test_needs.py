"""``kvcore plugins`` names what a plugin needs and is not installed, without waiting for the first store."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy
import pytest

from kvcore.builtin.kernels.tuned import TorchStore
from kvcore.cli.main import main
from kvcore.errors import PluginError
from kvcore.plugins import discover
from kvcore.plugins.dispatch import ChosenKernels

HEAD = 'from kvcore.contract import CONTRACT, PluginInfo, hookimpl\nPLUGIN = PluginInfo("needy", CONTRACT)\n'


def needy(site: Path, source: str, *requires: str, extras: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Install a plugin and return what it is said to miss; its kernels are in a module of their own."""
    package = site / "kvcore_fake_needy"
    package.mkdir()
    (package / "__init__.py").write_text(HEAD)
    (package / "kernels.py").write_text(source)
    info = site / "kvcore_fake_needy-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", "Name: kvcore-needy", "Version: 1.0", *(f"Requires-Dist: {r}" for r in requires)]
    (info / "METADATA").write_text("\n".join([*lines, *(f"Provides-Extra: {e}" for e in extras)]) + "\n")
    (info / "entry_points.txt").write_text("[kvcore]\nneedy = kvcore_fake_needy\n")
    importlib.invalidate_caches()
    (report,) = (item for item in discover() if item.name == "needy")
    assert report.error is None
    assert report.healthy == (not report.missing)
    return report.missing


FORGOT = "absent, which it imports and does not require"


@pytest.mark.parametrize(
    ("source", "requires", "missing"),
    [
        ("import absent", (), [FORGOT]),
        ("def bind():\n    from absent.deep import thing", (), [FORGOT]),
        ("class K:\n    def bind(self):\n        if self.x:\n            import absent as a, json", (), [FORGOT]),
        ("import numpy, json\nfrom kvcore.contract import Kernel\nfrom . import other", (), []),
        ("", ("absent>=1.0",), ["absent, which it requires"]),
        ("import absent", ("absent>=1.0", "numpy>=1"), ["absent, which it requires"]),
        ("", ("numpy[nothing]>=1", "Absent_Thing (>=2)"), ["absent-thing, which it requires"]),
        ("", ("absent; sys_platform == 'nowhere'",), []),
        ("", ("absent; sys_platform != 'nowhere'",), ["absent, which it requires"]),
        ("", ("NumPy>=9999",), [f"numpy>=9999, which it requires ({numpy.__version__} is installed)"]),
        ("", ("no requirement at all (",), []),
        ("import absent", ("absent; extra == 'fast'",), []),
        ("import absent", ("PyAbsent; extra == 'fast'",), []),  # may be where it comes from
        ("import other_one\nimport absent", ("absent; extra == 'fast'",), [FORGOT.replace("absent", "other_one")]),
        ("try:\n    import absent\nexcept ImportError:\n    absent = None", (), []),
        ("try:\n    import absent\nexcept (OSError, ImportError):\n    absent = None", (), []),
        ("try:\n    import absent\nexcept KeyError:\n    pass", (), [FORGOT]),
        ("from contextlib import suppress\nwith suppress(ImportError):\n    import absent", (), []),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import absent", (), []),
        ("from importlib.util import find_spec\nif find_spec('absent'):\n    import absent", (), []),
        ("not python at all (", (), []),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(site: Path, source: str, requires: tuple[str, ...], missing: list[str]) -> None:
    assert list(needy(site, source, *requires)) == missing


def test_extras_of_requirements_are_followed(site: Path) -> None:
    info = site / "carrier-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        'Metadata-Version: 2.1\nName: carrier\nVersion: 1.0\nRequires-Dist: absent; extra == "fast"\n'
        'Requires-Dist: carrier[fast]; extra == "all"\n'
    )
    assert list(needy(site, "", "carrier[all]")) == ["absent, which it requires"]


def test_the_command_says_so(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needy(site, "def store():\n    import absent")
    assert main(["plugins"]) == 0
    table = capsys.readouterr().out
    assert "INCOMPLETE" in table
    assert main(["plugins", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["plugins"]}
    assert (rows["needy"]["healthy"], rows["needy"]["missing"]) == (False, [FORGOT])
    assert rows["builtin"]["missing"] == []


def test_a_kernel_that_cannot_import_what_it_needs_is_named_when_it_is_bound() -> None:
    class Needy(TorchStore):
        name = "needy_store"

        def bind(self, *args: object) -> object:
            return importlib.import_module("absent")

    with pytest.raises(PluginError, match="needs a module that is not installed") as caught:
        ChosenKernels({"store": Needy()}, ()).bind(None, None, None)  # type: ignore[arg-type]
    assert (caught.value.fields["kernel"], caught.value.fields["module"]) == ("needy_store", "absent")
