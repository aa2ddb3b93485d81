"""The conformance kit: suites that a plugin proves itself with.

Subclass a suite in a test module, override the fixture that makes the subject, and run pytest::

    class TestMine(FormatSuite):
        @pytest.fixture
        def kv_format(self):
            return Mine()

``kvcore check PLUGIN`` runs the same suites on everything a plugin registers.
"""

from __future__ import annotations

from kvcore.errors import UnsupportedError

try:
    import pytest
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    raise UnsupportedError(
        "the conformance kit needs pytest and torch", missing=error.name, remedy="pip install 'kvcore[testing]'"
    ) from error

# Before the suites are imported: their assertions then show the values that differ.
_KIT = (
    "backups",
    "formats.attention",
    "formats.codec",
    "formats.values",
    "formats.layout",
    "formats.moves",
    "index_spaces",
    "models",
    "ranks.rig",
    "ranks.child",
    "states",
    "transports",
)
for _suite in _KIT:
    pytest.register_assert_rewrite(f"kvcore.testing.{_suite}")

from kvcore.testing.backups import BackupSuite  # noqa: E402
from kvcore.testing.formats.suite import FormatSuite  # noqa: E402
from kvcore.testing.index_spaces import IndexSpaceSuite  # noqa: E402
from kvcore.testing.models import ModelAdapterSuite  # noqa: E402
from kvcore.testing.runner import Case, Check, cases_of, run, unchecked  # noqa: E402
from kvcore.testing.sample import GROUPS, STATE_GROUPS, ThreeComponents, groups_of  # noqa: E402
from kvcore.testing.states import StateComponentSuite  # noqa: E402
from kvcore.testing.transports import TransportSuite  # noqa: E402

__all__ = [
    "GROUPS",
    "STATE_GROUPS",
    "BackupSuite",
    "Case",
    "Check",
    "FormatSuite",
    "IndexSpaceSuite",
    "ModelAdapterSuite",
    "StateComponentSuite",
    "ThreeComponents",
    "TransportSuite",
    "cases_of",
    "groups_of",
    "run",
    "unchecked",
]
