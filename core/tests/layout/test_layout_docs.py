"""The layout page says what is true: its code runs, and every message it lists exists."""

from __future__ import annotations

import re
from pathlib import Path

import kvcore.layout

PAGE = Path(__file__).parents[3] / "docs" / "layout.md"
SOURCES = [Path(kvcore.layout.__file__).parent / name for name in ("fields.py", "regions.py", "layout.py")]


def test_the_code_on_the_page_runs() -> None:
    text = PAGE.read_text()
    blocks = list(re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) >= 6
    names: dict[str, object] = {"__name__": "docs.layout"}
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        code = compile("\n" * line + block[1], str(PAGE), "exec")  # tracebacks show the line of the page
        exec(code, names)


def test_listed_errors_exist() -> None:
    table = PAGE.read_text().split("## Errors")[1]
    messages = [m for row in re.findall(r"^\| ([^|]+?) +\|", table, re.MULTILINE)[2:] for m in row.split(" / ")]
    assert len(messages) > 10
    source = "".join(path.read_text() for path in SOURCES)
    assert [m for m in messages if m not in source] == []
