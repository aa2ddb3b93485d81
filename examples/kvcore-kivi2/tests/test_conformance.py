"""The conformance kit on kivi2."""

from __future__ import annotations

import pytest

from kvcore.testing import FormatSuite
from kvcore_kivi2.format import Kivi2


class TestKivi2(FormatSuite):
    """As it is."""

    @pytest.fixture
    def kv_format(self) -> Kivi2:
        return Kivi2()
