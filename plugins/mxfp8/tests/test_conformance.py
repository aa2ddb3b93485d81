"""The conformance kit on ``mxfp8``: both scale layouts and both scale rules."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, TensorSpec
from kvcore.testing import GROUPS, FormatSuite
from kvcore_mxfp8.format import Mxfp8

ODD = LayerGroup("full", (1, 2), (TensorSpec("k", 2, 80), TensorSpec("v", 2, 48)), num_query_heads=4)


class _Suite(FormatSuite):
    page_size = 32
    groups: ClassVar = {"odd": ODD}

    @pytest.fixture
    def registry(self) -> Registry:
        return load_plugins(("mxfp8",))


class TestDefault(_Suite):
    """On several groups of the kit, with pages that interleaved scales would not fit."""

    page_size = 16
    groups: ClassVar = {**{name: GROUPS[name] for name in ("unequal", "latent", "indexed")}, "odd": ODD}

    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8()


class TestFlatFloor(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8(scale_rule="floor", order="token_major")


class TestInterleaved(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8(scale_layout="interleaved")


class TestInterleavedFloor(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8(scale_layout="interleaved", scale_rule="floor", order="token_major")


class TestScaled(_Suite):
    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8(tensor_scale=0.37)


@pytest.mark.usefixtures("without_numba")
class TestTorchKernels(_Suite):
    """What serves where Numba is not installed."""

    @pytest.fixture
    def kv_format(self) -> Mxfp8:
        return Mxfp8(scale_layout="interleaved", tensor_scale=2.5)
