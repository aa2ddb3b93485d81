"""The documentation is executed: every python block of a page, top to bottom, in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = (
    "docs/embedding.md",
    "docs/engine_loop.md",
    "docs/index_spaces.md",
    "docs/recurrent_state.md",
    "docs/requests.md",
    "docs/transports.md",
)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str) -> None:
    text = (ROOT / page).read_text()
    blocks = [(match.start(1), match[1]) for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)]
    assert blocks
    namespace: dict[str, object] = {"__name__": "__docs__"}
    for position, block in blocks:
        line = text.count("\n", 0, position)
        exec(compile("\n" * line + block, str(ROOT / page), "exec"), namespace)


def test_the_engine_loop_is_as_short_as_its_title_says() -> None:
    _, loop, _ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/engine_loop.md").read_text(), re.DOTALL)
    assert "def prefill_turn" in loop
    assert "def decode_turn" in loop
    assert len(loop.splitlines()) <= 40
    assert max(map(len, loop.splitlines())) <= 120


@pytest.mark.parametrize(
    "page", sorted(str(p.relative_to(ROOT)) for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    missing = [link for link in LINK.findall(path.read_text()) if not (path.parent / link).exists()]
    assert not missing


def test_the_readme_leads_to_every_page() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text()))
    assert {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")} <= linked


def test_every_promise_names_tests_that_exist() -> None:
    named = re.findall(r"`([a-z_/]+\.py)::(test_[a-z0-9_]+)`", (ROOT / "docs/contract.md").read_text())
    assert len(named) > 30
    missing = [f"{path}::{test}" for path, test in named if f"def {test}(" not in (ROOT / path).read_text()]
    assert not missing
