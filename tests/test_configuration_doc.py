"""docs/configuration.md lists every key with its type, default and meaning, as the configuration's types have them."""

from __future__ import annotations

import json
import re
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec

from kvcore.config import Config, load_config

DOC = Path(__file__).parent.parent / "docs" / "configuration.md"

TYPES = {
    "Bytes": "size",
    "Count": "integer, 1 to 2²⁴",
    "Natural": "integer, 0 to 2²⁴",
    "Seconds": "seconds > 0",
    "Part": "number in (0, 1]",
    "ArenaOrder": '"page_major", "layer_major"',
    "str": "string",
    "dict[str, Any]": "table",
    "dict[str, str]": "table",
    "tuple[str, ...]": "list of strings",
}
"""How the annotations of the structs are written for people."""


def meanings(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Attribute → text, from the docstring."""
    assert struct.__doc__ is not None
    _, _, attributes = struct.__doc__.partition("Attributes:\n")
    found: dict[str, str] = {}
    for line in attributes.splitlines():
        match = re.match(r"^ {8}(\w+): (.*)$", line)
        if match:
            found[match[1]] = match[2]
        elif line.strip():
            found[next(reversed(found))] += " " + line.strip()
    return {name: text.replace("``", "`") for name, text in found.items()}


def shown_type(annotation: str) -> str:
    if annotation.startswith("Literal["):
        return annotation.removeprefix("Literal[").removesuffix("]").replace("'", '"')
    return TYPES[annotation]


def section(struct: type[msgspec.Struct], prefix: str) -> list[str]:
    """The table of one part of the file."""
    rows = ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    texts, hints = meanings(struct), typing.get_type_hints(struct)
    default: Any = struct()
    for name in struct.__struct_fields__:
        if isinstance(hints[name], type) and issubclass(hints[name], msgspec.Struct):
            continue
        kind = shown_type(struct.__annotations__[name])
        value = getattr(default, name)
        shown = json.dumps(list(value) if isinstance(value, tuple) else value)
        if kind == "size":
            shown = f'"{value >> 20}MiB"'
        rows.append(f"| `{prefix}{name}` | {kind} | `{shown}` | {texts[name].rstrip('.')} |")
    return rows


def tables() -> dict[str, list[str]]:
    """Heading → table."""
    hints = typing.get_type_hints(Config)
    parts = {name: hints[name] for name in Config.__struct_fields__ if issubclass(_plain(hints[name]), msgspec.Struct)}
    return {"## Top level": section(Config, "")} | {
        f"## `[{name}]`": section(struct, f"{name}.") for name, struct in parts.items()
    }


def _plain(hint: Any) -> type:
    return hint if isinstance(hint, type) else tuple


def test_every_key_is_listed_as_it_is() -> None:
    text = DOC.read_text()
    for heading, rows in tables().items():
        assert heading in text
        after = text.split(heading + "\n", 1)[1].split("\n## ", 1)[0]
        found = [line for line in after.splitlines() if line.startswith("|")]
        assert found == rows, f"{heading} should have:\n" + "\n".join(rows)


def test_no_key_lacks_a_meaning_and_none_is_left_over() -> None:
    for struct in (
        Config,
        *(kind for kind in typing.get_type_hints(Config).values() if hasattr(kind, "__struct_fields__")),
    ):
        own = [
            n for n in struct.__struct_fields__ if not hasattr(typing.get_type_hints(struct)[n], "__struct_fields__")
        ]
        assert list(meanings(struct)) == own


def test_the_example_is_a_configuration(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOC.read_text(), re.DOTALL)
    path = tmp_path / "kvcore.toml"
    path.write_text(example)
    config = load_config(path)
    for table, keys in tomllib.loads(example).items():
        if isinstance(keys, dict):
            for key in keys:
                assert getattr(getattr(config, table), key) != getattr(getattr(Config(), table), key), (
                    f"{key} is a default"
                )
