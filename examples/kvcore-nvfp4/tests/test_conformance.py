"""The conformance kit on nvfp4: with the default tensor scale, and with another one."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvcore.testing import GROUPS, FormatSuite
from kvcore_nvfp4.format import Nvfp4


class TestNvfp4(FormatSuite):
    """The default."""

    @pytest.fixture
    def kv_format(self) -> Nvfp4:
        return Nvfp4()


class TestNvfp4Scaled(FormatSuite):
    """A tensor scale, and pages so small that units need padding."""

    groups: ClassVar = {"grouped": GROUPS["grouped"]}
    page_size = 4

    @pytest.fixture
    def kv_format(self) -> Nvfp4:
        return Nvfp4(tensor_scale=0.0131)
