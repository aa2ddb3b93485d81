"""What an installed plugin needs and is not there, found without importing it (no torch).

Kernels import what they need when they are first used: what a wheel forgot to ask for is noticed at the first store.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

__all__ = ["missing_needs"]

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?([^;]*);?(.*)", re.DOTALL)
_EXTRA = re.compile(r"extra\s*==\s*['\"]([^'\"]+)['\"]")
_GUARDS = ("ImportError", "ModuleNotFoundError", "Exception", "TYPE_CHECKING", "find_spec", "platform", "version_info")


def missing_needs(entry: metadata.EntryPoint) -> tuple[str, ...]:
    """What a plugin needs and is not installed, one phrase each; empty where nothing is missing.

    Distributions that its metadata requires, extras of these included; and modules that its source imports although the
    metadata asks for nothing by their name. An import below a ``try``, an ``if`` or a ``with`` that asks whether it works
    is optional, and so is what an extra asks for; requirements under other markers are left to the installer.
    """
    if entry.dist is None:
        return ()
    absent = {name for name in _required(entry.dist, frozenset(), set()) if _distribution(name) is None}
    named = {_plain(match[1]) for match in _requirements(entry.dist)}
    modules = {module for module in _imported(entry.module) if not _importable(module) and _plain(module) not in absent}
    unnamed = {module for module in modules if _plain(module) not in named}
    # An extra that is absent and names none of these may be where a module of another name comes from.
    if any(_distribution(name) is None for name in named - absent - {_plain(module) for module in modules}):
        unnamed = set()
    return (
        *(f"{name}, which it requires" for name in sorted(absent)),
        *(f"{module}, which it imports and does not require" for module in sorted(unnamed)),
    )


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(found: metadata.Distribution) -> Iterator[re.Match[str]]:
    for text in found.requires or ():
        match = _REQUIREMENT.fullmatch(text)
        if match is not None:
            yield match


def _required(found: metadata.Distribution, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]) -> set[str]:
    """Names that a distribution requires with these extras, and those that extras of theirs do."""
    names: set[str] = set()
    for match in _requirements(found):
        marker = match[4].strip()
        extra = _EXTRA.fullmatch(marker)
        if marker and (extra is None or extra[1] not in extras):
            continue
        name = _plain(match[1])
        names.add(name)
        more = frozenset(word.strip() for word in (match[2] or "").split(",") if word.strip())
        inner = _distribution(name)
        if more and inner is not None and (name, more) not in seen:
            seen.add((name, more))
            names |= _required(inner, more, seen)
    return names


def _importable(module: str) -> bool:
    if module in sys.modules or module in sys.stdlib_module_names:
        return True
    try:
        return util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _imported(module: str) -> set[str]:
    """Top-level modules that the source of a plugin imports, wherever that stands, unless it asks first."""
    names: set[str] = set()
    for path in _sources(module):
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError):  # Python says so when it imports it
            continue
        names |= set(_imports(tree))
    return names


def _sources(module: str) -> list[Path]:
    """Files of the package that a plugin's module is, or is in."""
    try:
        spec = util.find_spec(module)
    except (ImportError, ValueError):
        return []
    if spec is None or spec.origin is None:
        return []
    origin = Path(spec.origin)
    whole = spec.submodule_search_locations is not None or "." in module
    return sorted(origin.parent.rglob("*.py")) if whole else [origin]


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        if not node.level and node.module:
            yield node.module.partition(".")[0]
    elif not _asks(node):
        for inner in ast.iter_child_nodes(node):
            yield from _imports(inner)


def _asks(node: ast.AST) -> bool:
    """Whether what stands below is imported only where it can be, or never."""
    if isinstance(node, ast.Try):
        return any(handler.type is None or _mentions(handler.type) for handler in node.handlers)
    if isinstance(node, ast.If):
        return _mentions(node.test)
    return isinstance(node, ast.With) and any(_mentions(item.context_expr) for item in node.items)


def _mentions(node: ast.AST) -> bool:
    text = ast.dump(node)
    return any(word in text for word in _GUARDS)
