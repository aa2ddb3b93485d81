"""Options of a configuration, held to what the constructor of a format, transport or backup says it takes (no torch).

What is wrong is refused where it is configured. Otherwise a word given for a number or for an object is noticed when the
first byte is read, long after the engine started.
"""

from __future__ import annotations

import enum
import inspect
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvcore.errors import ConfigError, nearest

__all__ = ["checked_options"]

_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_UNKNOWN = object()


def checked_options(cls: type, options: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as the constructor of ``cls`` takes them.

    A value has to be of the parameter's type: plain types as TOML writes them (a list for a tuple, text for a path),
    and instances of any other class, which only a program can give. What an annotation leaves open is not checked.

    Args:
        cls: constructed with the options as keyword arguments.
        options: as configured.
        facts: who it is about, for the error.

    Raises:
        ConfigError: an option that the constructor does not take, or that is missing, or a value of another type. It
            names the options there are.
    """
    parameters = {p.name: p for p in inspect.signature(cls).parameters.values()}
    hints = {name: _hint(cls, p.annotation) for name, p in parameters.items() if p.kind in _BY_NAME}
    known = [name for name in hints if _configurable(hints[name])]
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    said = {**facts, "options": known}
    out: dict[str, Any] = {}
    for option, value in options.items():
        if option not in hints:
            if not open_ended:
                remedy = nearest(option, known) if known else "it takes no options"
                raise ConfigError("unknown option", **{**said, "option": option}, remedy=remedy)
            out[option] = value
            continue
        found = _fitting(value, hints[option])
        if found is _UNKNOWN:
            raise ConfigError(
                "wrong value of an option",
                **{**said, "option": option, "expected": " or ".join(_words(hints[option])), "got": value},
                remedy=_remedy(value, hints[option], configurable=option in known),
            )
        out[option] = found
    missing = [name for name in hints if name not in options and parameters[name].default is inspect.Parameter.empty]
    if missing:
        raise ConfigError("an option is missing", **{**said, "option": missing[0]}, remedy=f"set {missing[0]}")
    return out


def _hint(cls: type, annotation: Any) -> Any:
    """The type of a parameter; Any where it has none, or one that cannot be found at run time."""
    if annotation is inspect.Parameter.empty:
        return Any
    owner = next((base for base in cls.__mro__ if "__init__" in vars(base)), cls)
    names = vars(sys.modules.get(owner.__module__, types.ModuleType("")))
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": annotation}), names)["it"]
    except Exception:  # noqa: BLE001 -- names imported for type checkers only, and whatever else annotations hold
        return Any


def _members(hint: Any) -> Iterator[Any]:
    """The alternatives of a type, one where it has none."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        for inner in typing.get_args(hint):
            yield from _members(inner)
    else:
        yield hint


def _is_object(member: Any) -> bool:
    """Whether only a program can give a value: a class whose instances are no plain values."""
    if member is type(None) or not isinstance(member, type) or issubclass(member, (Path, enum.Enum)):
        return False
    return type(msgspec.inspect.type_info(member)) is msgspec.inspect.CustomType


def _configurable(hint: Any) -> bool:
    return any(not _is_object(member) and member is not type(None) for member in _members(hint))


def _fitting(value: Any, hint: Any) -> Any:
    """The value as the type wants it; ``_UNKNOWN`` where it is of another one."""
    members = list(_members(hint))
    if any(member is Any or (isinstance(member, type) and type(value) is member) for member in members):
        return value
    for member in members:
        try:
            return msgspec.convert(value, member, dec_hook=_made)
        except msgspec.ValidationError:
            continue
        except Exception:  # noqa: BLE001 -- a type that is none at run time, such as a protocol: nothing to hold to
            return value
    return _UNKNOWN


def _made(kind: type, value: Any) -> Any:
    """An instance of a class that is no plain type."""
    if isinstance(value, kind):
        return value
    if issubclass(kind, Path) and isinstance(value, str):
        return kind(value)
    raise ValueError(f"expected {kind.__name__}")


def _words(hint: Any) -> list[str]:
    """What an option may be, in words."""
    out = []
    for member in _members(hint):
        if typing.get_origin(member) is typing.Literal:
            out += [repr(word) for word in typing.get_args(member)]
        elif member is not type(None):
            out.append(member.__name__ if isinstance(member, type) else str(member))
    return out


def _remedy(value: Any, hint: Any, *, configurable: bool) -> str:
    if not configurable:
        return "leave it out: only a program can give it"
    words = [word for m in _members(hint) if typing.get_origin(m) is typing.Literal for word in typing.get_args(m)]
    if isinstance(value, str) and words and all(isinstance(word, str) for word in words):
        return nearest(value, words)
    return ""
