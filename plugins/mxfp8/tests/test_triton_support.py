"""Where the Triton kernels serve, and with what reason they refuse; nothing here needs Triton or a GPU."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.plugins import load_plugins
from kvcore.plugins.dispatch import choose_kernels
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore_mxfp8.format import Mxfp8
from kvcore_mxfp8.geometry import MAX_UNIT_BYTES
from kvcore_mxfp8.triton.attend import TRITON_KERNELS, decode_tiles, most_split_rows, prefill_tiles, split_count
from kvcore_mxfp8.triton.support import Chip, chip_of, device_support

GROUP = LayerGroup("full", (0,), (TensorSpec("k", 2, 64), TensorSpec("v", 2, 64)), num_query_heads=4)


def layout_of(group: LayerGroup, page_size: int = 32) -> Any:
    return Mxfp8().layout(group, page_size=page_size, shard=Shard(), arena="page_major")


def refusals(group: LayerGroup, device: str, page_size: int = 32) -> dict[str, str]:
    layout = layout_of(group, page_size)
    answers = {kernel.op: kernel().supports(device, layout, group) for kernel in TRITON_KERNELS}
    return {op: answer.reason for op, answer in answers.items() if not answer}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch says that there is a GPU, and Triton is installed."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def capability(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, minor))

    capability(9, 0)
    return capability


def test_cpu_pools_are_served_by_torch_and_the_refusal_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    kernels = load_plugins(("mxfp8",)).kernels()
    assert {kernel.name for kernel in kernels if "triton" in kernel.name} == {item.name for item in TRITON_KERNELS}
    for choice in choose_kernels(kernels, "cpu", layout_of(GROUP), GROUP).choices:
        assert "triton" not in choice.chosen
        if choice.op != "copy_units":
            assert dict(choice.refused)[f"mxfp8_triton_{choice.op}"]


def test_reasons(monkeypatch: pytest.MonkeyPatch, gpu: Any) -> None:
    assert device_support("cuda:0")
    assert device_support("cpu").reason == "runs on GPUs, the device is cpu"
    gpu(7, 5)
    assert device_support("cuda:0").reason == "needs CUDA capability 8.0, the device has 7.5"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert device_support("cuda:0"), "the numbers of ROCm devices are others"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_support("cuda:0").reason == "torch finds no GPU"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "not installed" in device_support("cuda:0").reason


def test_groups_that_attention_does_not_serve(gpu: Any) -> None:
    assert refusals(GROUP, "cuda:0") == {}
    both = {"attend_decode", "attend_prefill"}
    latent = LayerGroup("full", (0,), (TensorSpec("latent", 1, 64, sharded=False),), num_query_heads=4)
    assert set(refusals(latent, "cuda:0")) == both
    unlike = LayerGroup("full", (0,), (TensorSpec("k", 2, 64), TensorSpec("v", 4, 64)), num_query_heads=4)
    assert refusals(unlike, "cuda:0")["attend_decode"] == "k has 2 heads and v 4, or they are sharded unlike"
    wide = LayerGroup("full", (0,), (TensorSpec("k", 2, 288), TensorSpec("v", 2, 64)), num_query_heads=4)
    assert set(refusals(wide, "cuda:0")) == both
    large = LayerGroup("full", (0,), (TensorSpec("k", 64, 256), TensorSpec("v", 64, 256)), num_query_heads=64)
    page_size = MAX_UNIT_BYTES // (64 * 256) + 32
    assert set(refusals(large, "cuda:0", page_size)) == {"store", "load", *both}


def test_everything_is_importable_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import kvcore_mxfp8.triton.attend as m; print(len(m.TRITON_KERNELS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


@pytest.mark.parametrize(
    ("hip", "properties", "native", "block_scaled"),
    [
        (None, {"major": 8, "minor": 0}, False, False),
        (None, {"major": 8, "minor": 9}, True, False),
        (None, {"major": 9, "minor": 0}, True, False),
        (None, {"major": 10, "minor": 0}, True, True),
        (None, {"major": 12, "minor": 0}, True, True),
        ("6.4", {"major": 9, "minor": 4, "gcnArchName": "gfx942:sramecc+:xnack-"}, False, False),
        ("6.4", {"major": 9, "minor": 5, "gcnArchName": "gfx950:sramecc+:xnack-"}, False, True),
    ],
)
def test_what_chips_do_themselves(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, properties: dict[str, Any], native: bool, block_scaled: bool
) -> None:
    """The e4m3 of gfx942 is another one (fnuz): its bits are converted by value."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    found = SimpleNamespace(multi_processor_count=100, **properties)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    large = block_scaled and properties["major"] == 10
    assert chip_of("cuda:0") == Chip(native, block_scaled, 100, cuda=hip is None, large_tiles=large)


@given(pairs=st.integers(1, 5000), tiles=st.integers(1, 5000), processors=st.integers(1, 400))
def test_splits_are_a_power_of_two_and_fit_their_space(pairs: int, tiles: int, processors: int) -> None:
    splits = split_count(pairs, tiles, processors)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or splits <= tiles
    assert splits == 1 or pairs * splits <= most_split_rows(processors)


def test_splits_fill_the_chip() -> None:
    assert split_count(pairs=8, tiles=512, processors=132) == 64
    assert split_count(pairs=64, tiles=512, processors=132) == 8
    assert split_count(pairs=1024, tiles=512, processors=132) == 1


@given(columns=st.sampled_from([1, 2, 4, 8]), block_scaled=st.booleans(), cuda=st.booleans())
def test_tiles_are_powers_of_two_that_matrix_units_take(columns: int, block_scaled: bool, cuda: bool) -> None:
    chip = Chip(cuda, block_scaled, 100, cuda=cuda)
    for tiles in (decode_tiles(chip, columns), prefill_tiles(chip, columns)):
        assert tiles.rows >= 16
        assert tiles.keys >= 16
        assert not tiles.rows & (tiles.rows - 1)
        assert not tiles.keys & (tiles.keys - 1)
        assert block_scaled or not tiles.scaled
