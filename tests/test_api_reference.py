"""``docs/api.md`` says what the docstrings of the contract say."""

from __future__ import annotations

import inspect
from pathlib import Path

from by_path import load

from kvcore import contract

ROOT = Path(__file__).parents[1]


def test_the_api_reference_is_up_to_date() -> None:
    script = load(ROOT / "scripts" / "api_reference.py")
    assert (ROOT / "docs" / "api.md").read_text() == script.page(), "run: python scripts/api_reference.py"


def test_every_class_of_the_contract_is_on_the_page() -> None:
    text = (ROOT / "docs" / "api.md").read_text()
    for name in contract.__all__:
        value = getattr(contract, name)
        if inspect.isclass(value) and value.__module__.startswith("kvcore.contract."):
            assert f"### `{name}`" in text, name
