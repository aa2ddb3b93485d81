"""The conformance kit on both components."""

from __future__ import annotations

from typing import ClassVar

import pytest

from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import LayerGroup, StatePart, StateSpec
from kvcore.testing import STATE_GROUPS, StateComponentSuite
from kvcore_mamba_backup.components import RecurrentState, ShortConv

_TAPS = ("tap", 3)
KEYS = StateSpec("conv_k", "conv", "fp32", (("channel", 20), _TAPS), "channel", (StatePart(2, 10),))
EMPTY = StateSpec("conv_none", "conv", "fp32", (("channel", 0), _TAPS), "channel", (StatePart(0, 4),))
OUT = StateSpec("conv_attn", "conv", "bf16", (("channel", 7), _TAPS))
KKV = StateSpec(
    "conv", "conv", "bf16", (("channel", 24), _TAPS), "channel", (StatePart(2, 4), StatePart(2, 4), StatePart(4, 2))
)
SSM = StateSpec("ssm", "recurrent", "fp32", (("head", 4), ("dim", 6), ("state", 5)), "head", (StatePart(4),))
HALF = StateSpec("ssm_out", "recurrent", "fp16", (("head", 2), ("dim", 3)), "head", (StatePart(2),))


def _group(*states: StateSpec, layers: tuple[int, ...] = (0, 1, 4)) -> LayerGroup:
    return LayerGroup("state", layers, (), kind="state", space="per_request", states=states)


class _Suite(StateComponentSuite):
    @pytest.fixture
    def registry(self) -> Registry:
        return load_plugins(("mamba_backup",))


class TestShortConv(_Suite):
    groups: ClassVar = {"kit": STATE_GROUPS["conv"], "four, one empty": _group(KEYS, EMPTY, OUT, KKV)}

    @pytest.fixture
    def component(self) -> ShortConv:
        return ShortConv()


class TestRecurrentState(_Suite):
    groups: ClassVar = {
        "kit": STATE_GROUPS["recurrent"],
        "draft": STATE_GROUPS["draft"],
        "two of each": _group(KKV, SSM, OUT, HALF, layers=(3,)),
    }

    @pytest.fixture
    def component(self) -> RecurrentState:
        return RecurrentState()
