"""The Triton kernels compiled for chips that are not here: the instructions that were meant, and nothing spilled.

No GPU is needed: Triton brings its assemblers. Whether the numbers are right is for test_triton_interpreter.py.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from by_path import load

pytest.importorskip("triton", "3.9", reason="assembly is that of Triton 3.9, which is not installed")


@pytest.fixture(scope="module")
def targets() -> ModuleType:
    return load(Path(__file__).parent / "support" / "triton_targets.py")


@pytest.mark.parametrize("chip", ["sm_90", "sm_100"])
def test_store_uses_the_conversion_of_the_chip(targets: ModuleType, chip: str) -> None:
    """Rounding to nearest even and saturating; a flush of subnormals would change elements under the floor rule."""
    targets.store(chip, targets.of()).check(
        exactly={r"cvt\.rn\.satfinite\.e4m3x2\.f32": 16},  # 32 elements a thread
        uses=[r"st\.global\.v4"],  # bytes of a thread are stored together
        avoids=[r"\.ftz"],
        registers=64,
    )


@pytest.mark.parametrize("scales", ["flat", "interleaved"])
def test_load_reads_and_writes_words(targets: ModuleType, scales: str) -> None:
    uses = [r"ld\.global\.v4\.b32", r"cvt\.rn\.f16x2\.e4m3x2"]
    targets.load("sm_90", targets.of(scales=scales)).check(uses=uses, avoids=[r"\.ftz"], registers=64)


def test_gfx942_and_sm_80_convert_by_value(targets: ModuleType) -> None:
    """The e4m3 of gfx942 is another one (fnuz), sm_80 has none: neither may use a conversion of its own."""
    for chip, pattern in (("gfx942", r"v_cvt_\w*(fp8|bf8)"), ("sm_80", r"e4m3x2")):
        for found in (targets.store(chip, targets.of()), targets.load(chip, targets.of())):
            found.check(avoids=[pattern])


def test_decode_on_sm_90(targets: ModuleType) -> None:
    """Eight programs of it fit a processor's registers to hide the latency of memory: 168 for three blocks of 4 warps."""
    uses = [r"mma\.sync\S*bf16", r"cvt\.rn\.f16x2\.e4m3x2"]
    targets.decode("sm_90", targets.of()).check(uses=uses, registers=168, shared=48 * 1024)
    targets.merge("sm_90", targets.of()).check()


@pytest.mark.slow  # seconds of compiling, as all below that are
def test_prefill_on_sm_90_uses_its_matrix_units(targets: ModuleType) -> None:
    targets.prefill("sm_90", targets.of()).check(uses=[r"wgmma\.mma_async\S*bf16"])


def test_prefill_on_sm_100_multiplies_blocks_with_their_scales(targets: ModuleType) -> None:
    targets.prefill("sm_100", targets.of()).check(uses=[r"tcgen05\.mma\S*mxf8f6f4\S*block_scale"])


@pytest.mark.slow
def test_prefill_on_sm_120_multiplies_blocks_with_their_scales(targets: ModuleType) -> None:
    targets.prefill("sm_120", targets.of()).check(uses=[r"mma\.sync\S*mxf8f6f4\.block_scale"])


@pytest.mark.parametrize("e5m2", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prefill_on_gfx950_multiplies_blocks_with_their_scales(targets: ModuleType, e5m2: bool) -> None:
    targets.prefill("gfx950", targets.of(e5m2=e5m2)).check(uses=[r"v_mfma_scale_f32\w*f8f6f4"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "dim"), [("sm_90", 80), ("sm_100", 64), ("sm_80", 128), ("gfx950", 256), ("gfx942", 80)]
)
def test_every_kernel_compiles_for_every_chip(targets: ModuleType, chip: str, dim: int) -> None:
    """Every option of attention at once, e5m2 and interleaved scales: seconds a kernel. With all of them a few words of
    prefill may spill on NVIDIA's chips; without them, above, none do."""
    g = targets.of(dim, e5m2=True, scales="interleaved")
    for found in (targets.store(chip, g), targets.load(chip, g), targets.merge(chip, g)):
        found.check()
    targets.decode(chip, g, extras=True).check()
    targets.prefill(chip, g, extras=True).check(spilled=128 if chip.startswith("sm_") else 0)


def test_e5m2_is_converted_from_fp32_at_once(targets: ModuleType) -> None:
    """By way of fp16 it would be rounded twice."""
    found = targets.store("sm_90", targets.of(e5m2=True))
    found.check(exactly={r"cvt\.rn\.satfinite\.e5m2x2\.f32": 16}, avoids=[r"cvt\.\w*\.f16"])
