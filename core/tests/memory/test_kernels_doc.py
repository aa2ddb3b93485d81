"""The kernel that docs/kernels.md shows is run."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kvcore.contract import OPS
from kvcore.plugins.dispatch import resolve_kernels

DOC = Path(__file__).parents[3] / "docs" / "kernels.md"


def test_the_documented_kernel_serves_what_it_says(rig: ModuleType) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    scope: dict[str, Any] = {}
    exec(compile(code, str(DOC), "exec"), scope)
    (kernel,) = (kind() for kind in scope["kvcore_register_kernels"]())
    kernels = [*rig.KERNELS["both"], kernel]
    for order in ("token_major", "head_major"):
        geometry = rig.Geometry(order=order)
        store = geometry.store("both")
        geometry.poison(store)
        pool, group = store.pools["full"], geometry.model().groups[0]
        table = resolve_kernels(kernels, pool, group, rig.FORMATS["fp32"](order=order))
        (choice,) = [c for c in table.choices if c.op == "load"]
        if order == "head_major":
            assert (kernel.name, "needs the axis order 'slot head dim', not head slot dim") in choice.refused
        else:
            assert choice.chosen == kernel.name
        store.begin(rig.Book([9, 4], 4).plan([("a", 6)]))
        rows = {name: torch.randn(6, heads, dim) for name, (heads, dim) in geometry.tensors.items()}
        store.store(1, rows)
        out = {name: torch.full((3, *values.shape[1:]), torch.nan) for name, values in rows.items()}
        table.load(1, torch.tensor([17, -1, 36], dtype=torch.int32), out)
        for name, values in out.items():
            assert torch.equal(values, torch.stack([rows[name][5], torch.zeros_like(values[0]), rows[name][0]]))
        store.close()


def test_every_op_is_documented() -> None:
    text = DOC.read_text()
    assert all(f"| `{op}`" in text for op in OPS)
