"""The conformance kit on kivi2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from kvcore import LayerGroup
from kvcore.testing import FormatSuite, groups_of
from kvcore_kivi2.format import Kivi2


class TestKivi2(FormatSuite):
    """As it is."""

    groups: ClassVar[Mapping[str, LayerGroup]] = groups_of(Kivi2())

    @pytest.fixture
    def kv_format(self) -> Kivi2:
        return Kivi2()
