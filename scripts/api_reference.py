"""Write docs/api.md: the classes and functions of ``kvcore.contract`` as their docstrings describe them.

Usage: ``python scripts/api_reference.py`` writes the page. A test compares it with what the sources say.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
MODULES = {
    "kvcore.contract.formats": "Formats",
    "kvcore.contract.spaces": "Index spaces",
    "kvcore.contract.kernels": "Kernels",
    "kvcore.contract.pools": "Pools",
    "kvcore.contract.models": "Models and states",
    "kvcore.contract.backups": "Backups",
    "kvcore.contract.saved": "What backups do alike",
    "kvcore.contract.transports": "Transports",
    "kvcore.contract.commands": "Commands",
    "kvcore.contract.base": "Of all plugins",
}
HEAD = """# The contract, name by name

Written by `scripts/api_reference.py` from the docstrings of `kvcore.contract`: change those, not this page. Every name here
is imported from `kvcore.contract`. How they fit together: [Writing a plugin](plugins.md).
"""


class _Words(str):
    """An annotation as the source has it, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def signature(name: str, value: Any) -> str:
    """``name(arguments) -> result`` as the source has it, or the name alone where there is none to show."""
    try:
        shown = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    parameters = [_bare(item) for key, item in shown.parameters.items() if key not in ("self", "cls")]
    returns = shown.return_annotation
    return f"{name}{shown.replace(parameters=parameters, return_annotation=_Words(returns) if isinstance(returns, str) else returns)}"


def _bare(parameter: inspect.Parameter) -> inspect.Parameter:
    annotation = parameter.annotation
    return parameter.replace(annotation=_Words(annotation)) if isinstance(annotation, str) else parameter


def members(cls: type[Any]) -> Iterator[tuple[str, Any, str]]:
    """Public methods and properties that a class itself defines: name, function, how it is marked."""
    for name, value in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(value, property):
            yield name, value.fget, "property"
        elif isinstance(value, staticmethod | classmethod):
            yield name, value.__func__, "static" if isinstance(value, staticmethod) else "class"
        elif inspect.isfunction(value):
            yield name, value, ""


def described(cls: type[Any]) -> Iterator[str]:
    """The lines of one class."""
    yield f"### `{cls.__name__}`"
    yield from ("", "```text", inspect.getdoc(cls) or "", "```")
    for name, function, mark in members(cls):
        if not inspect.getdoc(function) or function is None:
            continue
        title = name if mark == "property" else signature(name, function)
        words = [mark, "must be implemented" if name in getattr(cls, "__abstractmethods__", ()) else ""]
        note = ", ".join(word for word in words if word)
        yield from ("", f"#### `{title}`", "")
        if note:
            yield from (f"*{note}*", "")
        yield from ("```text", inspect.getdoc(function) or "", "```")
    yield ""


def page() -> str:
    """The whole page."""
    contract = importlib.import_module("kvcore.contract")
    lines = [HEAD]
    for module_name, title in MODULES.items():
        lines += [f"## {title}", ""]
        for name in contract.__all__:
            value = getattr(contract, name)
            if getattr(value, "__module__", "") != module_name:
                continue
            if inspect.isclass(value):
                lines += described(value)
            elif inspect.isfunction(value):
                lines += [f"### `{signature(name, value)}`", "", "```text", inspect.getdoc(value) or "", "```", ""]
    return "\n".join(lines).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
