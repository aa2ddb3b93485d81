"""``kvcore plan``: what is planned is what the layouts say and what a cache allocates."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from kvcore.cli.main import main
from kvcore.config import Config, load_config
from kvcore.engine.cache import KVCache
from kvcore.spec import Shard
from kvcore_transformers.commands.plan_report import count, read_model, size
from kvcore_transformers.models.adapters import adapter_for, enabled

KEYS = {"bytes_per_token", "padding", "per_request_bytes", "token_capacity", "request_capacity", "allocated_bytes"}
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
# As published: a multimodal model, and what its class has defaults for is left out.
GEMMA_4B = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {"hidden_size": 2560, "model_type": "gemma3_text", "num_hidden_layers": 34, "sliding_window": 1024},
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152, "num_hidden_layers": 27},
}
GIB = 1 << 30


@pytest.fixture
def plan(tmp_path, capsys):
    """``plan(config, *options)``: the ``formats`` of the JSON."""

    def run(config, *options):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        assert main(["plan", str(path), "--json", *options]) == 0
        said = json.loads(capsys.readouterr().out)
        assert set(said) == {"formats"}
        assert all(set(item) == KEYS for item in said["formats"].values())
        return said["formats"]

    return run


def test_llama_70b(plan):
    said = plan(LLAMA_70B, "--format", "bf16", "--format", "fp32", "--memory", "40GiB")
    assert set(said) == {"bf16", "fp32"}
    assert said["bf16"]["bytes_per_token"] == {"total": 327_680, "full/kv": 327_680}
    assert said["fp32"]["bytes_per_token"] == {"total": 655_360, "full/kv": 655_360}
    page = 16 * 327_680
    assert 40 * GIB % page == 0
    pages = 40 * GIB // page
    assert said["bf16"]["token_capacity"] == 16 * (pages - 1)  # one is the null page
    assert said["bf16"]["request_capacity"] == pages - 1
    assert said["bf16"]["allocated_bytes"] == 40 * GIB
    assert (said["bf16"]["padding"], said["bf16"]["per_request_bytes"]) == (0, 0)


def test_tensor_parallel_ranks_hold_their_heads_and_replicas_count(plan):
    """C2: with more ranks than heads each rank still holds one."""
    said = {
        tp: plan(LLAMA_70B, "--format", "bf16", "--tp", str(tp), "--memory", "40GiB")["bf16"] for tp in (1, 4, 8, 16)
    }
    assert said[4]["bytes_per_token"]["total"] == 327_680 // 4
    assert said[8]["bytes_per_token"]["total"] == 327_680 // 8
    assert said[16] == said[8]
    pages = {tp: item["token_capacity"] // 16 + 1 for tp, item in said.items()}
    assert pages[4] == 4 * pages[1]
    assert pages[8] == 8 * pages[1]


def test_latents_are_not_shared_out(plan):
    config = {**transformers.DeepseekV3Config().to_dict(), "dtype": "bfloat16"}
    said = {tp: plan(config, "--tp", str(tp), "--memory", "20GiB")["bf16"] for tp in (1, 16)}
    assert said[1]["bytes_per_token"]["total"] == 61 * (512 + 64) * 2
    assert said[1] == said[16]


def test_windows_cost_a_request_and_not_a_token(plan):
    (said,) = plan(GEMMA_4B, "--memory", "40GiB", "--max-requests", "32").values()
    layer = 2 * 4 * 256 * 2  # k and v, heads, dim, bf16
    assert said["bytes_per_token"] == {"total": 5 * layer, "full/kv": 5 * layer, "swa/kv": 0}
    assert said["per_request_bytes"] == 29 * layer * 16 * (1024 // 16 + 1)
    assert said["request_capacity"] == 32
    assert 0 < 40 * GIB - said["allocated_bytes"] < 16 * 5 * layer


def test_padding_is_told_apart_from_what_a_token_costs(plan):
    config = {**LLAMA_70B, "num_hidden_layers": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 3}
    (said,) = plan(config, "--format", "fp16", "--page-size", "3").values()
    assert said["bytes_per_token"]["total"] == 2 * 2 * 3 * 2
    assert said["padding"] == pytest.approx(2 * 2 * (32 - 18) / 3)


def test_without_a_memory_there_is_a_price_and_no_capacity(plan):
    (said,) = plan(GEMMA_4B).values()
    assert said["per_request_bytes"] > 0
    assert {said[key] for key in ("token_capacity", "request_capacity", "allocated_bytes")} == {None}


def test_the_default_format_is_the_dtype_of_the_model(plan):
    assert set(plan(LLAMA_70B)) == {"bf16"}
    assert set(plan({**LLAMA_70B, "torch_dtype": "float16"})) == {"fp16"}


def test_at_most_the_requests_asked_for(plan):
    (said,) = plan(LLAMA_70B, "--memory", "40GiB", "--max-requests", "100").values()
    assert said["request_capacity"] == 100


@pytest.mark.parametrize(("fmt", "page_size", "tp"), [("bf16", 16, 1), ("fp32", 4, 2), ("fp16", 1, 4), ("fp32", 3, 1)])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek"])
def test_what_is_planned_is_what_is_allocated(plan, tmp_path, family, fmt, page_size, tp):
    """The sizes of the real arenas of a cache on that rank, and the tokens it then admits."""
    small = {"num_hidden_layers": 3, "num_attention_heads": 4, "hidden_size": 32, "vocab_size": 97}
    config = {
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **small,
            num_key_value_heads=2,
            head_dim=6,
            sliding_window=9,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "deepseek": lambda: transformers.DeepseekV3Config(**small, kv_lora_rank=24, qk_rope_head_dim=8),
    }[family]()
    options = ["--format", fmt, "--page-size", str(page_size), "--tp", str(tp), "--memory", "3MiB"]
    (said,) = plan(config.to_dict(), *options, "--max-requests", "5").values()
    settings = {"format": fmt, "page_size": page_size, "memory": "3MiB", "max_requests": 5}
    registry = enabled(Config())
    spec = adapter_for(registry, config).spec(config)
    last = Shard(tp_rank=tp - 1, tp_size=tp)
    with KVCache.create(spec, Config.from_mapping({"cache": settings}), registry, shard=last) as cache:
        arenas = [arena.tensor() for arena in cache.store.arenas().values()]
        assert said["allocated_bytes"] == sum(arena.numel() for arena in arenas)
        assert all(arena.dtype is torch.uint8 for arena in arenas)
        assert said["token_capacity"] == cache.token_capacity
        tokens = said["token_capacity"]
        assert cache.manager.can_admit(tokens)
        assert not cache.manager.can_admit(tokens + 1)
        cache.manager.admit("all of it", tokens)
    page_bytes = sum(
        item.unit_bytes * len(layout.layers)
        for layout in cache.layouts.values()
        if layout.spaces[0].kind == "sequence"
        for item in layout.regions
    )
    per_page = page_size * (said["bytes_per_token"]["total"] + said["padding"])
    assert per_page == pytest.approx(page_bytes)


def test_a_directory_and_a_configuration_file(plan, tmp_path, capsys):
    settings = tmp_path / "kvcore.toml"
    settings.write_text('[cache]\nmemory = "1GiB"\npage_size = 32\n')
    plan(LLAMA_70B)
    assert main(["plan", str(tmp_path), "--settings", str(settings), "--json"]) == 0
    (said,) = json.loads(capsys.readouterr().out)["formats"].values()
    assert said["token_capacity"] == 32 * (GIB // (32 * 327_680) - 1)


def test_people_see_a_table_and_a_picture(plan, tmp_path, capsys):
    plan(LLAMA_70B)
    assert main(["plan", str(tmp_path), "--format", "bf16", "--format", "fp32", "--memory", "40GiB", "--tp", "4"]) == 0
    text = capsys.readouterr().out
    assert "one of 4 tensor-parallel ranks" in text
    assert "80 layers, k 2 × 128, v 2 × 128" in text
    rows = [line for line in text.splitlines() if line.startswith("│")]
    assert ["80 KiB" in rows[0], "160 KiB" in rows[1], "524,272" in rows[0]] == [True] * 3
    bars = {line.split()[0]: line.count("█") for line in text.splitlines() if line.startswith(("bf16 █", "fp32 █"))}
    assert bars["fp32"] == 2 * bars["bf16"] > 0
    assert main(["plan", str(tmp_path)]) == 0
    assert "–" in capsys.readouterr().out


def test_sizes_for_people():
    assert [size(v) for v in (0, 18.666, 1024, 1536, 327_680, 5 << 40)] == [
        "0 B",
        "18.7 B",
        "1 KiB",
        "1.5 KiB",
        "320 KiB",
        "5 TiB",
    ]
    assert (count(None), count(12345)) == ("–", "12,345")


@pytest.mark.parametrize(
    ("left_out", "kv_heads", "head_dim", "window"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 8, 256, None),
        ({"model_type": "mistral", "num_key_value_heads": 4, "max_position_embeddings": 9999}, 4, 256, 4096),
        ({"model_type": "qwen3", "num_key_value_heads": 4, "use_sliding_window": False}, 4, 128, None),
        ({"model_type": "qwen2", "num_key_value_heads": 4, "head_dim": 64, "sliding_window": 7}, 4, 64, None),
        ({"model_type": "llama"}, 16, 256, None),
    ],
)
def test_what_a_config_json_leaves_out_has_the_defaults_of_transformers(tmp_path, left_out, kv_heads, head_dim, window):
    """A Mistral without num_key_value_heads has eight of them, and not one a query head."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"num_hidden_layers": 2, "num_attention_heads": 16, "hidden_size": 4096, **left_out}))
    (group,) = read_model(path, enabled(load_config())).groups
    assert [(t.num_heads, t.head_dim) for t in group.tensors] == [(kv_heads, head_dim)] * 2
    assert group.space_options == (() if window is None else (("window", window),))


def test_a_complete_config_json_is_planned_without_torch(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    code = (
        "import sys; from kvcore.cli.main import main; status = main(sys.argv[1:]);"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules; sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "plan", str(tmp_path), "--memory", "40GiB"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        (LLAMA_70B, ["--format", "bf61"], ["did you mean 'bf16'?"]),
        (LLAMA_70B, ["--tp", "3"], ["num_heads=8", "tp_size=3"]),
        (LLAMA_70B, ["--memory", "1KiB"], ["needed=10485760"]),
        (LLAMA_70B, ["--memory", "much"], ["not a size"]),
        ({"model_type": "telepathy"}, [], ["telepathy"]),
        ({"architectures": []}, [], ["model_type"]),
        ({**LLAMA_70B, "num_hidden_layers": "many"}, [], ["num_hidden_layers"]),
        (transformers.Qwen3NextConfig().to_dict(), [], ["state component", "qwen3_next"]),
        (transformers.MambaConfig().to_dict(), [], ["state component", "mamba"]),
    ],
)
def test_what_is_wrong_is_one_message(tmp_path, capsys, config, options, words):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err


def test_the_page_shows_what_the_commands_print(tmp_path, capsys, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text()
    (config,) = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    (tmp_path / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    blocks = re.findall(r"```console\n\$ kvcore (.*?)\n(.*?)```", page, re.DOTALL)
    assert {command.split()[0] for command, _ in blocks} == {"plan", "layout"}
    for command, shown in blocks:
        assert main(command.split()) == 0
        printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert printed == shown.splitlines(), command


@pytest.mark.parametrize("content", [None, "{", '["llama"]'])
def test_a_file_that_is_no_configuration_is_named(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert main(["plan", str(tmp_path)]) == 2
    assert str(tmp_path / "config.json") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (json.dumps({**LLAMA_70B, "num_hidden_layers": 10**8}), "num_hidden_layers"),
        (json.dumps({**LLAMA_70B, "num_hidden_layers": True}), "num_hidden_layers"),
        (json.dumps({"model_type": "llama", "num_hidden_layers": 10**8}), "num_hidden_layers"),
        (json.dumps({**LLAMA_70B, "hidden_size": 10**20}), "hidden_size"),
        ('{"model_type": "llama", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", "not valid JSON"),
    ],
    ids=["layers", "true", "left to transformers", "size", "deep"],
)
def test_numbers_that_no_model_has_are_refused_at_once(tmp_path, capsys, text, word):
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", str(path)]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert word in captured.err
