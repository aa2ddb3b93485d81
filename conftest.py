"""For every test of the repository."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where tests are spread over processes by file, begin with the long ones: one that comes last keeps a core idle."""
    if hasattr(config, "workerinput"):
        marks = ("model", "slow")
        long = {mark: {item.path for item in items if item.get_closest_marker(mark)} for mark in marks}
        items.sort(key=lambda item: [item.path not in long[mark] for mark in marks])
