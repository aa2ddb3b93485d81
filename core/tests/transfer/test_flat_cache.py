"""A request that travels from cache to cache over a wire of flat reads: through the façade, its I/O threads and all."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, TensorSpec
from kvcore.testing.harness import Subject, View, open_cache, pull
from kvcore.transfer.copier import ThreadCopier

GROUP = LayerGroup("full", (0, 1, 2), (TensorSpec("k", 2, 32), TensorSpec("v", 2, 32)), num_query_heads=4)
TOKENS = 21


@pytest.mark.parametrize(
    ("orders", "arenas", "staged"),
    [
        (("token_major", "head_major"), ("page_major", "page_major"), True),
        (("head_major", "token_major"), ("layer_major", "page_major"), True),
        (("head_major", "head_major"), ("page_major", "page_major"), False),
        (("head_major", "head_major"), ("page_major", "layer_major"), False),
    ],
)
def test_values_arrive(flat: ModuleType, orders: tuple[str, str], arenas: tuple[str, str], staged: bool) -> None:
    made: list[object] = []

    def transport() -> object:
        wire = flat.Wire(steps=3)
        traits = flat.TransportTraits(executes_programs=False, min_run_bytes=256)
        made.append(flat.FlatTransport(1 << 14, ThreadCopier(), wire, traits))
        return made[-1]

    base = load_plugins(())
    registries = [Subject(base, format=base.format("bf16", order=order), transport=transport) for order in orders]
    with (
        open_cache(registries[0], GROUP, page_size=4, arena=arenas[0]) as source,
        open_cache(registries[1], GROUP, page_size=4, arena=arenas[1]) as target,
    ):
        ours, theirs = View(source, GROUP), View(target, GROUP)
        source.admit("r", TOKENS)
        ours.write("r", TOKENS, seed=1)
        want = {layer: ours.load(layer, ours.slots("r", 0, TOKENS)) for layer in GROUP.layers}
        done = pull(source, target, "r", TOKENS)
        assert done.num_tokens == TOKENS
        for layer in GROUP.layers:
            got = theirs.load(layer, theirs.slots("r", 0, TOKENS))
            for name, values in want[layer].items():
                torch.testing.assert_close(got[name], values, rtol=0, atol=0, msg=f"{name} of layer {layer}")
        read = sum(transport.reader.stats.read_bytes for transport in made)
        assert read == 6 * ours.layout.envelope_bytes, "six pages, and nothing read over"
        through = sum(transport.reader.stats.staged_bytes for transport in made)
        assert through == (read if staged else 0)
