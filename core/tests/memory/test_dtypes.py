"""Storage dtypes: the bits of every element, through views of an arena and through the kit, against numpy."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.contract import FULL, Format, Support, unsupported
from kvcore.errors import LayoutError
from kvcore.layout import ArenaOrder, Axis, Buffer, Field, Layout, SpaceSpec, UnitRange, region
from kvcore.layout.dtypes import DTYPES
from kvcore.layout.moves import Program
from kvcore.memory.tensors import as_stored, field_view, from_stored, torch_dtype, view_dtype
from kvcore.spec import LayerGroup, Shard
from kvcore.testing import GROUPS, FormatSuite

NUMPY = {
    "u8": "<u1", "i8": "<i1", "u16": "<u2", "i16": "<i2", "i32": "<i4", "i64": "<i8", "fp16": "<f2", "fp32": "<f4",
}  # fmt: skip
"""Dtypes whose values numpy knows."""


@pytest.mark.parametrize("name", DTYPES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_elements_keep_their_bits(name: str, data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """Any bits, written by index into a strided view: they are where the loop says, and come back."""
    field = data.draw(cases.fields(dtype=name))
    unit = -(-(field.offset + field.nbytes) // 16) * 16
    arena = torch.full((3 * unit,), 0xFF, dtype=torch.uint8)
    view = field_view(arena, Buffer("c", 0, "r", 0, unit, unit, 3), field)
    size = int(np.prod(field.logical_shape))
    raw = np.random.default_rng(data.draw(st.integers(0, 99))).integers(0, 256, size * field.itemsize, np.uint8)
    values = torch.from_numpy(raw).view(torch_dtype(name)).reshape(field.logical_shape)
    grids = torch.meshgrid([torch.arange(axis.size) for axis in field.axes], indexing="ij")
    where = field.index(1, **{axis.name: grid for axis, grid in zip(field.axes, grids, strict=True)})
    view[where] = as_stored(values, name)
    want = np.full(3 * unit, 0xFF, np.uint8)
    for n, coords in enumerate(loop.coordinates(field)):
        at = unit + loop.offset(field, coords)
        want[at : at + field.itemsize] = raw[n * field.itemsize : (n + 1) * field.itemsize]
    np.testing.assert_array_equal(arena.numpy(), want)
    back = from_stored(view[where].contiguous(), name)
    assert back.dtype == torch_dtype(name)
    np.testing.assert_array_equal(back.reshape(-1).view(torch.uint8).numpy(), raw)
    if name in NUMPY:
        np.testing.assert_array_equal(back.reshape(-1).numpy(), raw.view(NUMPY[name]))


@pytest.mark.parametrize("name", ["u8", "i8", "u16", "i16"])
def test_every_value_is_itself(name: str) -> None:
    every = np.arange(256 ** DTYPES[name].itemsize).astype(np.uint16).astype(NUMPY[name])
    back = from_stored(as_stored(torch.from_numpy(every.copy()), name), name)
    assert back.tolist() == every.tolist()
    assert len(set(back.tolist())) == len(every)


@pytest.mark.parametrize("name", DTYPES)
def test_a_value_of_another_dtype_is_refused(name: str) -> None:
    """Nothing is converted: 200 as i8 would be −56."""
    for other in DTYPES:
        values = torch.zeros(4, dtype=torch_dtype(other))
        if values.dtype in (torch_dtype(name), view_dtype(name)):
            assert as_stored(values, name).dtype == view_dtype(name)
        else:
            with pytest.raises(LayoutError, match="wrong dtype") as caught:
                as_stored(values, name)
            assert caught.value.fields == {"expected": name, "got": str(values.dtype)}


@pytest.mark.parametrize(("name", "other"), [("i8", "u8"), ("u16", "i16"), ("u16", "bf16")])
def test_one_dtype_is_never_read_as_another(name: str, other: str, cases: ModuleType) -> None:
    """Equal sizes; another fingerprint, and no conversion."""
    src, dst = (cases.paged(4, [cases.tensor("k", 4, 2, 4, dtype=dtype)]) for dtype in (name, other))
    assert src.fingerprint() != dst.fingerprint()
    assert Layout.from_json(src.to_json()) == src
    units = {"pages": 3}
    with pytest.raises(LayoutError, match="differ in dtype"):
        Program.build(src, src.place(units), dst, dst.place(units))


# --- a format of integers, through the kit ---------------------------------------------------------------------------

RANGE = {"i8": (0, 127), "i16": (0, 32767), "u16": (32768, 32767)}
"""Code of the value 0, and the codes of ± the largest value are this far from it."""


class Linear(Format):
    """Each head of a token scaled to the integers of its dtype: ``i8`` values, ``i16`` keys, ``u16`` for the rest."""

    name = "test_linear"
    max_error = 0.01
    DTYPE: ClassVar = {"k": "i16", "v": "i8"}

    def supports(self, group: LayerGroup) -> Support:
        return FULL if group.kind == "attention" else unsupported("tokens only")

    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        regions = []
        for tensor in group.tensors:
            lead = (Axis("slot", page_size), Axis("head", shard.num_heads(tensor), ids=shard.heads(tensor)))
            axes = (*lead, Axis("dim", tensor.head_dim))
            codes = Field("x", self.DTYPE.get(tensor.name, "u16"), "head slot dim", axes)
            scale = Field("s", "fp32", "slot head", lead, offset=codes.nbytes)
            regions.append(region(tensor.name, f"{group.prefix}/kv", (codes, scale), ranges=("pages",)))
        return Layout(
            self.name,
            1,
            group.prefix,
            tuple(layer for layer in group.layers if not shard.layers or layer in shard.layers),
            tuple(regions),
            (SpaceSpec(group.name, group.space, "page", page_size, group.space_options),),
            (UnitRange("pages", group.name),),
            arena,
        )

    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        out = {}
        for name, values in rows.items():
            dtype = self.DTYPE.get(name, "u16")
            zero, largest = RANGE[dtype]
            scale = values.float().abs().amax(-1) / largest
            codes = (values.float() / scale.where(scale > 0, 1.0)[..., None]).round().clamp(-largest, largest)
            stored = torch.where(scale[..., None] > 0, codes + zero, 0)  # zero bytes are zero
            out[name, "x"], out[name, "s"] = stored.to(torch_dtype(dtype)), scale
        return out

    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        return {
            name: ((codes.float() - RANGE[self.DTYPE.get(name, "u16")][0]) * elements[name, "s"][..., None]).to(dtype)
            for (name, field), codes in elements.items()
            if field == "x"
        }


class TestIntegers(FormatSuite):
    groups: ClassVar = {"indexed": GROUPS["indexed"], "latent": GROUPS["latent"]}
    page_size = 4

    @pytest.fixture
    def kv_format(self) -> Format:
        return Linear()
