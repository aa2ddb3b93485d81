"""The plain formats: layouts without torch, exact values."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import numpy as np
import pytest
import torch

from kvcore.builtin.formats import PLAIN_FORMATS, Bf16, Fp16, Fp32
from kvcore.errors import ConfigError, LayoutError, UnsupportedError
from kvcore.layout import Layout
from kvcore.spec import LayerGroup, Shard, TensorSpec

GROUP = LayerGroup("full", (0, 1, 4), (TensorSpec("k", 8, 64), TensorSpec("v", 8, 48)), 16)


def layout(
    fmt: Fp32, group: LayerGroup = GROUP, page_size: int = 16, shard: Shard | None = None, arena: str = "page_major"
) -> Layout:
    return fmt.layout(group, page_size=page_size, shard=shard or Shard(), arena=arena)  # type: ignore[arg-type]


def test_layouts_need_no_torch() -> None:
    code = (
        "import sys\n"
        "from kvcore.builtin.formats import Bf16\n"
        "from kvcore.builtin.pools.memfd import MemfdPool\n"
        "from kvcore.spec import LayerGroup, Shard, TensorSpec\n"
        "group = LayerGroup('full', (0,), (TensorSpec('k', 2, 8), TensorSpec('v', 2, 8)), 4)\n"
        "made = Bf16().layout(group, page_size=4, shard=Shard(), arena='page_major')\n"
        "assert made.envelope_bytes == 2 * 2 * 8 * 4 * 2\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(("order", "expected"), [("head_major", "head slot dim"), ("token_major", "slot head dim")])
@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
def test_one_region_a_tensor(order: str, expected: str, arena: str) -> None:
    made = layout(Bf16(order=order), arena=arena)  # type: ignore[arg-type]
    assert (made.format, made.group, made.layers, made.arena) == ("bf16", "full", (0, 1, 4), arena)
    assert made.components == ("full/kv",)
    assert [(r.name, r.ranges, [f.name for f in r.fields]) for r in made.regions] == [
        ("k", ("pages",), ["x"]),
        ("v", ("pages",), ["x"]),
    ]
    assert [r.fields[0].order for r in made.regions] == [expected] * 2
    assert [r.unit_bytes for r in made.regions] == [8 * 16 * 64 * 2, 8 * 16 * 48 * 2]
    space = made.space_of_range("pages")
    assert (space.name, space.kind, space.unit, space.tokens_per_unit) == ("full", "sequence", "page", 16)
    # 8 heads × (64 + 48) × 2 bytes × 3 layers
    assert made.bytes_per_token() == {"full/kv": 8 * 112 * 2 * 3}


def test_small_units_are_padded_to_the_alignment() -> None:
    group = LayerGroup("full", (0,), (TensorSpec("k", 1, 3),), 1)
    made = layout(Fp16(), group, page_size=1)
    assert made.region("k").unit_bytes == 16
    assert made.region("k").alignment_bytes == 10
    assert made.bytes_per_token() == {"full/kv": 6}


@pytest.mark.parametrize(
    ("tp", "rank", "ids"),
    [(1, 0, ((0, 8),)), (4, 1, ((2, 4),)), (8, 7, ((7, 8),)), (16, 0, ((0, 1),)), (16, 15, ((7, 8),))],
)
def test_heads_are_sharded_by_global_ids(tp: int, rank: int, ids: tuple[tuple[int, int], ...]) -> None:
    """C2: a rank's pool is sized from the heads it holds; past 8 ranks they are replicated."""
    made = layout(Fp32(), shard=Shard(rank, tp))
    for name in ("k", "v"):
        axis = made.region(name).field("x").axis("head")
        assert axis.ids == ids
        assert axis.size == max(1, 8 // tp)
        assert not made.region(name).field("x").axis("dim").ids


def test_latent_tensors_are_replicated() -> None:
    tensors = (TensorSpec("latent", 1, 512, sharded=False), TensorSpec("rope", 1, 64, sharded=False))
    made = layout(Bf16(), LayerGroup("full", (0, 1), tensors, 16), page_size=64, shard=Shard(3, 4))
    assert [r.name for r in made.regions] == ["latent", "rope"]
    assert all(not axis.ids for r in made.regions for axis in r.field("x").axes)
    assert made.bytes_per_token() == {"full/kv": (512 + 64) * 2 * 2}


def test_draft_groups_and_pipeline_stages() -> None:
    group = LayerGroup("full", (0, 1, 2, 3), GROUP.tensors, 16, role="draft")
    made = layout(Fp32(), group, shard=Shard(layers=(2, 3, 9)))
    assert made.layers == (2, 3)
    assert made.components == ("draft/full/kv",)
    with pytest.raises(ConfigError, match="no layer of the group"):
        layout(Fp32(), group, shard=Shard(layers=(9,)))


def test_refusals() -> None:
    with pytest.raises(ConfigError, match="did you mean 'head_major'"):
        Bf16(order="head_majr")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="needs a state component"):
        layout(Bf16(), LayerGroup("state", (0,), (TensorSpec("conv", 1, 8),), kind="state"))
    with pytest.raises(UnsupportedError, match="stores no tensors"):
        layout(Bf16(), LayerGroup("full", (0,), ()))
    with pytest.raises(LayoutError, match="page size"):
        layout(Bf16(), page_size=0)
    with pytest.raises(ConfigError, match="do not divide"):
        layout(Bf16(), shard=Shard(0, 3))
    made = layout(Fp32())
    with pytest.raises(LayoutError, match="rows do not match"):
        Fp32().encode(made, {"k": torch.zeros(1, 8, 64)})


@pytest.mark.parametrize("kind", PLAIN_FORMATS)
def test_values_are_rounded_to_nearest_even(kind: type[Fp32], rig: ModuleType) -> None:
    fmt = kind()
    made = layout(fmt)
    generator = torch.Generator().manual_seed(0)
    rows = {
        "k": torch.randn((5, 8, 64), generator=generator) * 30,
        "v": torch.randn((5, 8, 48), generator=generator) * 1e-3,
    }
    elements = fmt.encode(made, rows)
    assert set(elements) == {("k", "x"), ("v", "x")}
    back = fmt.decode(made, elements, torch.float32)
    for name in rows:
        want = rig.Geometry(format=fmt.name).rounded(rows[name])
        np.testing.assert_array_equal(back[name].numpy().astype(np.float64), want)


def test_values_outside_the_range() -> None:
    """fp16 overflows to infinity; NaN stays NaN and −0 stays −0 in all of them."""
    special = torch.tensor([65504.0, 65520.0, -1e30, torch.nan, -0.0]).view(5, 1, 1)
    group = LayerGroup("full", (0,), (TensorSpec("k", 1, 1),), 1)
    for fmt in (Bf16(), Fp16(), Fp32()):
        made = layout(fmt, group)
        back = fmt.decode(made, fmt.encode(made, {"k": special}), torch.float32)["k"].flatten()
        assert back[3].isnan()
        assert back[4] == 0
        assert back[4].signbit()
        if fmt.name == "fp16":
            assert back[:3].tolist() == [65504.0, torch.inf, -torch.inf]
        else:
            assert back[:3].isfinite().all()


def test_a_sliding_window_has_pages_of_its_own_space() -> None:
    group = LayerGroup("swa", (2, 3), GROUP.tensors, 16, space="window", space_options=(("window", 100),))
    made = layout(Bf16(), group)
    space = made.space_of_range("pages")
    assert (space.name, space.kind, space.unit, space.tokens_per_unit) == ("swa", "window", "page", 16)
    assert space.option("window") == 100
    assert [r.fields for r in made.regions] == [r.fields for r in layout(Bf16()).regions]


@pytest.mark.parametrize("space", ["ring", "per_request", "chunked"])
def test_other_spaces_are_refused(space: str) -> None:
    group = LayerGroup("odd", (0,), GROUP.tensors, 16, space=space)
    assert repr(space) in Fp32().supports(group).reason
    with pytest.raises(UnsupportedError) as error:
        layout(Fp32(), group)
    assert error.value.fields["group"] == "odd"
