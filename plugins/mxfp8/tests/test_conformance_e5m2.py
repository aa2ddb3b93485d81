"""The conformance kit on ``mxfp8_e5m2``: both scale layouts and both scale rules."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, TensorSpec
from kvcore.testing import FormatSuite
from kvcore_mxfp8.format import Mxfp8E5m2

ODD = LayerGroup("full", (1, 2), (TensorSpec("k", 2, 80), TensorSpec("v", 2, 48)), num_query_heads=4)


class _Suite(FormatSuite):
    page_size = 32
    groups: ClassVar = {"odd": ODD}

    @pytest.fixture
    def registry(self) -> Registry:
        return load_plugins(("mxfp8",))


class TestE5m2(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8E5m2:
        return Mxfp8E5m2()


class TestE5m2Floor(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8E5m2:
        return Mxfp8E5m2(scale_rule="floor")


class TestE5m2Interleaved(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8E5m2:
        return Mxfp8E5m2(scale_layout="interleaved", order="token_major")


class TestE5m2InterleavedFloor(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8E5m2:
        return Mxfp8E5m2(scale_layout="interleaved", scale_rule="floor")
