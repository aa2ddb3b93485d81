"""``kvcore plan`` with block scales: exactly 33 bytes where bf16 has 64, and what is planned is what is allocated."""

from __future__ import annotations

import json

import pytest
import transformers

from kvcore.config import Config, load_config
from kvcore.engine.cache import KVCache
from kvcore.plugins import load_plugins
from kvcore_transformers.models.adapters import LlamaAdapter

# As published.
SMOLLM2_135M = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
    "max_position_embeddings": 8192,
}
LLAMA_70B = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "max_position_embeddings": 131072,
}


@pytest.fixture
def plan(tmp_path, mx_models):
    def run(config, *options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        return mx_models.said("plan", str(path), *options)["formats"]

    return run


@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_e5m2"])
@pytest.mark.parametrize(("config", "tp"), [(SMOLLM2_135M, 1), (LLAMA_70B, 1), (LLAMA_70B, 8)])
def test_33_bytes_for_64(plan, config, tp, name) -> None:
    said = plan(config, "--format", "bf16", "--format", name, "--memory", "8GiB", "--tp", str(tp))
    plain, scaled = said["bf16"], said[name]
    elements = plain["bytes_per_token"]["total"] // 2
    assert 64 * scaled["bytes_per_token"]["total"] == 33 * plain["bytes_per_token"]["total"]
    assert scaled["bytes_per_token"] == {
        "total": elements // 32 * 33,
        "full/kv": elements,
        "full/block_scale": elements // 32,
    }
    assert scaled["padding"] == 0
    assert scaled["token_capacity"] / plain["token_capacity"] == pytest.approx(64 / 33, rel=1e-2)


def test_interleaved_scales_are_padded_to_chunks(plan, tmp_path) -> None:
    """A head of 64 has two blocks, of the four of a chunk; a head of 128 has all four and costs no more than flat."""
    config = tmp_path / "kvcore.toml"
    config.write_text(
        '[cache]\nformat = "mxfp8"\npage_size = 128\n[cache.format_options]\nscale_layout = "interleaved"\n'
    )
    (small,) = plan(SMOLLM2_135M, "--format", "mxfp8", "--settings", str(config)).values()
    (large,) = plan(LLAMA_70B, "--format", "mxfp8", "--settings", str(config)).values()
    assert (small["bytes_per_token"]["total"], small["padding"]) == (30 * 2 * 3 * (64 + 4), 0)
    assert (large["bytes_per_token"]["total"], large["padding"]) == (80 * 2 * 8 * 132, 0)


@pytest.mark.parametrize(
    ("page", "layout", "head_dim"),
    [(16, "flat", 64), (16, "flat", 80), (64, "interleaved", 80), (128, "interleaved", 32)],
)
def test_what_is_planned_is_what_is_allocated(plan, tmp_path, page, layout, head_dim) -> None:
    raw = {**SMOLLM2_135M, "num_hidden_layers": 3, "head_dim": head_dim}
    cache = {"format": "mxfp8", "page_size": page, "memory": "3MiB", "format_options": {"scale_layout": layout}}
    path = tmp_path / "kvcore.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in cache.items() if key != "format_options"]
    path.write_text("[cache]\n" + "\n".join(lines) + f'\n[cache.format_options]\nscale_layout = "{layout}"\n')
    (said,) = plan(raw, "--format", "mxfp8", "--settings", str(path)).values()
    config = Config.from_mapping({"cache": cache})
    assert load_config(path).cache == config.cache
    spec = LlamaAdapter().spec(transformers.LlamaConfig(**raw))
    with KVCache.create(spec, config, load_plugins(config)) as made:
        arenas = sum(arena.tensor().numel() for arena in made.store.arenas().values())
        assert (said["allocated_bytes"], said["token_capacity"]) == (arenas, made.token_capacity)
        made.admit("all of it", said["token_capacity"])
        assert not made.can_admit(1)


def test_options_of_a_file_reach_the_format_that_is_planned(plan, tmp_path) -> None:
    """The same file and ``--format`` as for ``kvcore run``: options are those of the format the file names, or, where it
    names none, of the one on the command line. Dropped silently, the plan was of other bytes than what is allocated."""
    interleaved = 30 * 2 * 3 * (64 + 4)
    config = tmp_path / "kvcore.toml"
    options = '[cache.format_options]\nscale_layout = "interleaved"\n'
    config.write_text("[cache]\npage_size = 128\n" + options)
    (said,) = plan(SMOLLM2_135M, "--format", "mxfp8", "--settings", str(config)).values()
    assert said["bytes_per_token"]["total"] == interleaved
    config.write_text('[cache]\nformat = "mxfp8"\npage_size = 128\n' + options)
    said = plan(SMOLLM2_135M, "--settings", str(config))
    assert list(said) == ["mxfp8"]
    assert said["mxfp8"]["bytes_per_token"]["total"] == interleaved
    said = plan(SMOLLM2_135M, "--format", "bf16", "--format", "mxfp8", "--settings", str(config))
    assert said["bf16"]["bytes_per_token"]["total"] == 30 * 2 * 3 * 64 * 2
    assert said["mxfp8"]["bytes_per_token"]["total"] == interleaved
    config.write_text("[cache]\npage_size = 128\n")
    assert list(plan(SMOLLM2_135M, "--settings", str(config))) == ["bf16"]
