"""What a token comes to does not depend on who shares its forward pass."""

from __future__ import annotations

import pytest
import torch

from kvcore_transformers.modeling.steady import LEAST_ROWS, steady_rows


class Holder(torch.nn.Module):
    device = torch.device("cpu")

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(inner, outer, bias=outer % 2 == 1)


@pytest.mark.parametrize(("inner", "outer"), [(576, 192), (576, 1536), (1536, 576), (32, 97)])
@torch.inference_mode()
def test_a_row_has_one_result(inner, outer):
    """Bit for bit, among 1 to 128 rows."""
    torch.manual_seed(0)
    holder, rows = Holder(inner, outer), torch.randn(128, inner)
    steady_rows(holder)
    want = holder.linear(rows)
    for count in (*range(1, 9), 33, 64):
        assert torch.equal(holder.linear(rows[:count]), want[:count]), count
        assert torch.equal(holder.linear(rows[None, :count])[0], want[:count]), count
        assert torch.equal(holder.linear(rows[-count:]), want[-count:]), count


class SiluRMSNormGated(torch.nn.Module):
    def forward(self, rows, gate):
        return rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True)) * torch.nn.functional.silu(gate)


@pytest.mark.parametrize("width", [16, 24, 7, 128])
@torch.inference_mode()
def test_a_head_has_one_norm(width):
    """Whatever the rest of the tensor: what is left over behind whole vectors takes another exponential."""
    torch.manual_seed(0)
    holder = Holder(8, 8)
    holder.norm = SiluRMSNormGated()
    rows, gate = torch.randn(2, 96, width)
    plain = holder.norm(rows, gate)
    steady_rows(holder)
    want = holder.norm(rows, gate)
    torch.testing.assert_close(want, plain)
    for count in range(1, 96):
        assert torch.equal(holder.norm(rows[:count], gate[:count]), want[:count]), count
        assert torch.equal(holder.norm(rows[-count:], gate[-count:]), want[-count:]), count


@torch.inference_mode()
def test_it_is_the_same_product(tiny_model):
    """Of plain torch up to rounding, in every shape; and twice is once."""
    model = tiny_model("qwen2")  # has biases
    plain = {
        name: module for name, module in tiny_model("qwen2").named_modules() if isinstance(module, torch.nn.Linear)
    }
    calls = []
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda *given: calls.append(given))
    steady_rows(model)
    once = [module.forward for module in model.modules() if isinstance(module, torch.nn.Linear)]
    steady_rows(model)
    assert [m.forward for m in model.modules() if isinstance(m, torch.nn.Linear)] == once
    torch.manual_seed(1)
    for name, module in plain.items():
        for shape in ((), (0,), (1,), (3,), (1, 2), (2, 1), (1, 1, 1), (2, 3), (1, LEAST_ROWS)):
            rows = torch.randn(*shape, module.in_features)
            got = model.get_submodule(name)(rows)
            assert got.shape == module(rows).shape
            torch.testing.assert_close(got, module(rows), rtol=1e-4, atol=1e-5)
    assert len(calls) == 9 * len(plain)
