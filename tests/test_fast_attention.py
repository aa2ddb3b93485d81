"""The format and kernels of ``docs/fast_attention.md``, taken from the page: served by them, exact, and not by the reference."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
import torch

from kvcore import AttendParams, KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.contract import Format
from kvcore.testing import GROUPS, FormatSuite

PAGE = Path(__file__).parents[1] / "docs" / "fast_attention.md"
(SOURCE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module as a distribution of its own."""
    info = tmp_path / "kvcore_bytes-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcore-bytes\nVersion: 0.1.0\n")
    entry = "kvcore_bytes"
    (info / "entry_points.txt").write_text(
        f"[kvcore]\n{entry} = kvcore_bytes\n[kvcore.formats]\nsigned_bytes = {entry}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    made = ModuleType("kvcore_bytes")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(SOURCE, str(PAGE), "exec"), made.__dict__)
    return made


class TestTheFormatOfThePage(FormatSuite):
    """With the kernels of its plugin, which the kit finds by the format's name."""

    groups: ClassVar = {"grouped": GROUPS["grouped"], "unequal": GROUPS["unequal"]}
    page_size = 4

    @pytest.fixture
    def kv_format(self, module: ModuleType) -> Format:
        made: Format = module.SignedBytes()
        return made


SPEC = LayerGroup("full", (0,), (TensorSpec("k", 2, 32), TensorSpec("v", 2, 32)), num_query_heads=4)


@pytest.mark.usefixtures("module")
def test_its_kernels_serve_attention_and_the_reference_the_rest() -> None:
    config = load_config(None, {"cache.format": "signed_bytes", "cache.memory": "1MiB"})
    with KVCache.create(ModelSpec("m", (SPEC,), "fp32"), config, load_plugins(config)) as cache:
        chosen = {choice.op: choice.chosen for choice in cache.explain()["full"]}
    assert chosen == {
        "store": "reference_store",
        "load": "reference_load",
        "attend_decode": "signed_bytes_decode",
        "attend_prefill": "signed_bytes_prefill",
        "copy_units": "torch_copy_units",
    }


@pytest.mark.usefixtures("module")
def test_it_attends_as_the_reference_does() -> None:
    """The same numbers, from the same pages."""
    config = load_config(None, {"cache.format": "signed_bytes", "cache.memory": "4MiB"})
    registry = load_plugins(config)
    slow = load_plugins(config)
    slow.kernels = lambda: [k for k in registry.kernels() if k.formats == ("*",)]  # type: ignore[method-assign]
    params = AttendParams(0.2)
    seen = []
    for plugins in (registry, slow):
        generator = torch.Generator().manual_seed(1)
        with KVCache.create(ModelSpec("m", (SPEC,), "fp32"), config, plugins) as cache:
            for name, tokens in (("a", 600), ("b", 411)):
                cache.admit(name, tokens)
                with cache.begin([(name, tokens - 1)]) as step:
                    step.store(0, {x: torch.randn(tokens - 1, 2, 32, generator=generator) for x in "kv"})
                    step.commit()
            with cache.begin([("a", 1), ("b", 1)]) as step:
                step.store(0, {x: torch.randn(2, 2, 32, generator=generator) for x in "kv"})
                q, out = torch.randn(2, 4, 32, generator=generator), torch.full((2, 4, 32), torch.nan)
                step.attend(0, q, out, params)
                seen.append(out)
                step.commit()
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)
