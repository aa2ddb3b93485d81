"""What an installed plugin needs and is not there, found without importing it (no torch).

Kernels import what they need when they are first used: what a wheel forgot to ask for is noticed at the first store.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib import metadata, util
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

__all__ = ["missing_needs"]

_GUARDS = ("ImportError", "ModuleNotFoundError", "Exception", "TYPE_CHECKING", "find_spec", "platform", "version_info")


def missing_needs(entry: metadata.EntryPoint) -> tuple[str, ...]:
    """What a plugin needs and is not installed, one phrase each; empty where nothing is missing.

    Distributions that its metadata requires here, extras of these included, in a version that it takes; and modules that
    its source imports although the metadata asks for nothing by their name. An import below a ``try``, an ``if`` or a
    ``with`` that asks whether it works is optional, and so is what an extra asks for.
    """
    if entry.dist is None:
        return ()
    absent, unfit = set[str](), set[str]()
    for need in _required(entry.dist, frozenset(), set()):
        name, found = canonicalize_name(need.name), _distribution(need.name)
        if found is None:
            absent.add(name)
        elif not need.specifier.contains(found.version, prereleases=True):
            unfit.add(f"{name}{need.specifier}, which it requires ({found.version} is installed)")
    named = {canonicalize_name(need.name) for need in _requirements(entry.dist)}
    missing = {module: canonicalize_name(module) for module in _imported(entry.module) if not _importable(module)}
    modules = {module: name for module, name in missing.items() if name not in absent}
    unnamed = {module for module, name in modules.items() if name not in named}
    # An extra that is absent and names none of these may be where a module of another name comes from.
    if any(_distribution(name) is None for name in named - absent - set(modules.values())):
        unnamed = set()
    return (
        *(f"{name}, which it requires" for name in sorted(absent)),
        *sorted(unfit),
        *(f"{module}, which it imports and does not require" for module in sorted(unnamed)),
    )


def _distribution(name: str) -> metadata.Distribution | None:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None


def _requirements(found: metadata.Distribution) -> Iterator[Requirement]:
    for text in found.requires or ():
        try:
            yield Requirement(text)
        except InvalidRequirement:  # the installer's to say
            continue


def _required(
    found: metadata.Distribution, extras: frozenset[str], seen: set[tuple[str, frozenset[str]]]
) -> list[Requirement]:
    """What a distribution requires here with these extras, and what extras of that do."""
    needs = []
    for need in _requirements(found):
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in (*extras, "")):
            continue
        needs.append(need)
        inner, key = _distribution(need.name), (canonicalize_name(need.name), frozenset(need.extras))
        if need.extras and inner is not None and key not in seen:
            seen.add(key)
            needs += _required(inner, key[1], seen)
    return needs


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
