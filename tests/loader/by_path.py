"""Modules of test folders and scripts, loaded by path: test folders are no packages, and several have a ``rig.py``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def load(path: str | Path) -> ModuleType:
    """The module of a file, executed once a process."""
    path = Path(path).resolve()
    name = "_".join(path.relative_to(ROOT).with_suffix("").parts).replace("-", "_")
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
