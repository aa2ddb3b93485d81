"""Configurations of models with states to layer groups, against what the model of transformers itself keeps."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from kvcore.cli.main import main
from kvcore.config import Config, load_config
from kvcore.engine.cache import KVCache
from kvcore.errors import CapacityError, ConfigError, UnsupportedError
from kvcore.spec import Shard, StatePart
from kvcore_transformers.models.adapters import GemmaAdapter, enabled
from kvcore_transformers.models.hybrids import InklingAdapter, QwenNextAdapter
from kvcore_transformers.models.loading import model_spec

NAMES = ("inkling", "inkling_unlike", "inkling_scaled", "qwen3_next")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_groups_are_what_a_model_keeps(zoo, name, dtype):
    """Oracle: the cache of plain transformers after a prompt, layer by layer: shapes, dtypes, and nothing else."""
    model = zoo.hybrid(name, dtype=dtype)
    held = transformers.DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.arange(9)[None], cache=held, use_cache=True)
    # The configuration object names another dtype than the model computes in, as after model.to(dtype).
    model.config.dtype = None
    for config in (model.config, model.config.to_dict()):
        spec = model_spec(enabled(Config()), config, dtype)
        found = {}
        for group in spec.groups:
            for layer in group.layers:
                found.setdefault(layer, []).extend(
                    [(t.num_heads, t.head_dim, dtype) for t in group.tensors]
                    + [(*(size for _, size in s.axes), _DTYPES[s.dtype]) for s in group.states]
                )
        assert found == {layer: _kept(item) for layer, item in enumerate(held.layers)}


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _kept(layer):
    """``(heads, dim)`` of keys and values, then ``(channels, taps)`` of convolutions, then recurrent states."""
    kept = []
    if getattr(layer, "keys", None) is not None:
        kept += [(x.shape[1], x.shape[3], x.dtype) for x in (layer.keys, layer.values)]
    if hasattr(layer, "conv_states"):
        # A convolution of K taps looks back to K − 1 inputs; transformers keeps the newest one once more.
        kept += [(x.shape[1], x.shape[2] - 1, x.dtype) for x in layer.conv_states.values() if x is not None]
        kept += [(*x.shape[1:], x.dtype) for x in layer.recurrent_states.values() if x is not None]
    return kept


def test_inkling_by_default_has_states_of_two_kinds():
    """Its sliding layers have more heads of keys and values, so their convolutions are wider."""
    spec = InklingAdapter().spec(transformers.InklingTextConfig())
    full, swa, state_full, state_swa = spec.groups
    assert [group.prefix for group in spec.groups] == ["full", "swa", "state_full", "state_swa"]
    assert (state_full.layers, state_swa.layers) == (full.layers, swa.layers)
    assert (len(full.layers), len(swa.layers), swa.space_options) == (11, 55, (("window", 512),))
    assert [(s.name, s.kind, s.dtype) for s in state_swa.states] == [
        (name, "conv", "fp32") for name in ("conv_k", "conv_v", "conv_attn", "conv_mlp")
    ]
    assert [dict(s.axes) for s in state_full.states] == [{"channel": n, "tap": 3} for n in (1024, 1024, 6144, 6144)]
    assert [dict(s.axes) for s in state_swa.states] == [{"channel": n, "tap": 3} for n in (2048, 2048, 6144, 6144)]
    assert [(s.split, s.parts) for s in state_swa.states[1:3]] == [("channel", (StatePart(16, 128),)), ("", ())]


def test_a_rank_of_qwen_next_has_its_part_of_queries_keys_and_values():
    """Four ranks: the channels of four query heads, four key heads and eight value heads each."""
    spec = QwenNextAdapter().spec(transformers.Qwen3NextConfig(dtype="bfloat16"))
    full, state = spec.groups
    assert full.layers == tuple(range(3, 48, 4))
    assert state.layers == tuple(layer for layer in range(48) if layer % 4 != 3)
    conv, recurrent = state.states
    assert (conv.dtype, recurrent.dtype, dict(recurrent.axes)) == (
        "bf16",
        "fp32",
        {"head": 32, "dim": 128, "state": 128},
    )
    assert Shard(1, 4).ids(conv) == ((512, 1024), (2560, 3072), (5120, 6144))
    assert Shard(1, 4).ids(recurrent) == ((8, 16),)


@pytest.mark.parametrize(
    ("adapter", "config", "key"),
    [
        (InklingAdapter, transformers.InklingTextConfig(), "swa_head_dim"),
        (InklingAdapter, transformers.InklingTextConfig(), "conv_kernel_size"),
        (QwenNextAdapter, transformers.Qwen3NextConfig(), "linear_key_head_dim"),
    ],
)
def test_a_configuration_that_lacks_a_number_is_an_error(adapter, config, key):
    """Rather than a default that another checkpoint does not share."""
    data = config.to_dict()
    del data[key]
    with pytest.raises(ConfigError) as error:
        adapter().spec(data)
    assert error.value.fields["key"] == key


def test_convolutions_that_look_back_to_nothing_are_refused():
    with pytest.raises(UnsupportedError) as refusal:
        InklingAdapter().spec(transformers.InklingTextConfig(conv_kernel_size=1))
    assert refusal.value.fields["setting"] == "conv_kernel_size"


# --- kvcore plan -----------------------------------------------------------------------------------------------------

# As published: what the class has defaults for is left out.
QWEN = {"model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "dtype": "bfloat16"}
DELTA = (
    3 * (2 * 16 * 128 + 32 * 128) * 2 + 32 * 128 * 128 * 4
)  # three inputs a channel in bf16, a matrix a head in fp32


@pytest.fixture
def plan(tmp_path, capsys):
    """``plan(config, *options, plugins=…)``: exit code, the plan or None, and what was said."""

    def run(config, *options, plugins=("mamba_backup",)):
        path, settings = tmp_path / "config.json", tmp_path / "kvcore.toml"
        path.write_text(json.dumps(config))
        settings.write_text(f"plugins = {list(plugins)}\n[cache]\nmemory = '8GiB'\nmax_requests = 16\n")
        code = main(["plan", str(path), "--json", "--settings", str(settings), *options])
        out, err = capsys.readouterr()
        return code, json.loads(out)["formats"] if code == 0 else None, err

    return run


def test_states_cost_a_request_and_not_a_token(plan):
    code, said, _ = plan(QWEN)
    assert code == 0
    (bf16,) = said.values()
    assert bf16["bytes_per_token"]["full/kv"] == bf16["bytes_per_token"]["total"] == 12 * 2 * 2 * 256 * 2
    assert bf16["per_request_bytes"] == 36 * DELTA
    assert bf16["request_capacity"] == 16


def test_the_states_of_a_rank_are_shown(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    (tmp_path / "kvcore.toml").write_text("plugins = ['mamba_backup']\n[cache]\nmemory = '8GiB'\n")
    assert main(["plan", str(tmp_path), "--tp", "4", "--settings", str(tmp_path / "kvcore.toml")]) == 0
    shown = capsys.readouterr().out.replace("\n  ", " ").replace("\n", " ")
    assert "state: 36 layers, conv 2048 × 3 in bf16, recurrent 8 × 128 × 128 in fp32" in shown


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["inkling_unlike", "qwen3_next"])
def test_what_is_planned_is_what_is_allocated(zoo, plan, name, tp):
    """The arenas of a real cache on that rank, slots included, and the requests it then holds."""
    cls, special = zoo.HYBRIDS[name]
    # Two ranks need an even number of heads.
    config = cls(**{**zoo.COMMON, **special, **({"swa_num_key_value_heads": 2} if name == "inkling_unlike" else {})})
    settings = {"plugins": ["mamba_backup"], "cache.format": "fp32", "cache.page_size": 4, "cache.memory": "1MiB"}
    settings |= {"cache.max_requests": 3}
    options = ("--format", "fp32", "--page-size", "4", "--memory", "1MiB", "--max-requests", "3", "--tp", str(tp))
    _, said, _ = plan(config.to_dict(), *options)
    loaded = load_config(None, settings)
    registry = enabled(loaded)
    spec = model_spec(registry, config, torch.float32)
    with KVCache.create(spec, loaded, registry, shard=Shard(tp_size=tp)) as cache:
        assert sum(cache.stats().allocated_bytes.values()) == said["fp32"]["allocated_bytes"]
        assert (cache.token_capacity, cache.capacity.per_request_bytes) == (
            said["fp32"]["token_capacity"],
            said["fp32"]["per_request_bytes"],
        )
        for n in range(said["fp32"]["request_capacity"]):
            cache.admit(f"r{n}", 1)
        with pytest.raises(CapacityError):
            cache.admit("one more", 1)


def test_a_rank_plans_its_part_of_the_states(plan):
    _, said, _ = plan(QWEN, "--tp", "4")
    assert said["bf16"]["per_request_bytes"] == 36 * DELTA // 4


@pytest.mark.parametrize("model", ["qwen3_next", "inkling_text"])
def test_without_a_plugin_for_states_the_model_is_refused_by_name(plan, model):
    config = {"inkling_text": transformers.InklingTextConfig().to_dict(), "qwen3_next": QWEN}[model]
    code, _, said = plan(config, plugins=())
    assert code != 0
    assert model in said
    assert "state" in said


@pytest.mark.parametrize("adapter", [InklingAdapter, QwenNextAdapter, GemmaAdapter])
def test_layers_of_several_types_are_never_guessed(adapter):
    """A ``config.json`` may leave them out and say ``full_attention_interval``: read as it is, all would attend."""
    raw = {"model_type": adapter.model_types[0], "num_hidden_layers": 4, "num_attention_heads": 4, "hidden_size": 64}
    with pytest.raises(ConfigError, match="does not name its layers") as caught:
        adapter().spec(raw)
    assert caught.value.fields["model"] == adapter.model_types[0]
