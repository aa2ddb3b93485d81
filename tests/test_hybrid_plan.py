"""``kvcore plan`` of a model with states: a price of a token, and one of a request, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcore.cli.main import main

pytest.importorskip("transformers")

# As published: 36 of 48 layers are gated delta nets; the class of transformers knows which.
QWEN3_NEXT = {"model_type": "qwen3_next", "dtype": "bfloat16"}
MIB = 1 << 20


def plan(tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: str, *options: str) -> dict[str, object]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_NEXT))
    (tmp_path / "kvcore.toml").write_text(f'plugins = ["mamba_backup"]\n[cache]\n{settings}')
    command = ["plan", str(tmp_path), "--settings", str(tmp_path / "kvcore.toml"), "--json", *options]
    assert main(command) == 0
    (said,) = json.loads(capsys.readouterr().out)["formats"].values()
    return dict(said)


@pytest.mark.parametrize(
    ("tp", "token", "request_bytes"),
    [
        # 12 layers · K, V · heads · 256 · 2; 36 layers · ((key + key + value heads) · 128 · 3 · 2 + value heads · 128² · 4)
        (1, 12 * 2 * 2 * 256 * 2, 36 * ((16 + 16 + 32) * 128 * 3 * 2 + 32 * 128 * 128 * 4)),
        (4, 12 * 2 * 1 * 256 * 2, 36 * ((4 + 4 + 8) * 128 * 3 * 2 + 8 * 128 * 128 * 4)),  # a K/V head on two ranks
    ],
)
def test_a_state_is_the_price_of_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tp: int, token: int, request_bytes: int
) -> None:
    said = plan(tmp_path, capsys, "max_requests = 64", "--memory", "40GiB", "--tp", str(tp))
    costs = {"full/kv": token, "state/conv": 0, "state/recurrent": 0, "total": token}
    assert said["bytes_per_token"] == costs
    assert said["per_request_bytes"] == request_bytes
    assert said["request_capacity"] == 64
    slots, rest = 65 * request_bytes, 40 * 1024 * MIB  # the null slot among them; a page is 16 tokens
    assert said["token_capacity"] == ((rest - slots) // (16 * token) - 1) * 16


def test_checkpoints_are_slots_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = plan(tmp_path, capsys, "max_requests = 8", "--memory", "4GiB")
    four = plan(tmp_path, capsys, "max_requests = 8\ncheckpoints = 3", "--memory", "4GiB")
    assert four["per_request_bytes"] == 4 * int(str(one["per_request_bytes"]))
    assert int(str(four["token_capacity"])) < int(str(one["token_capacity"]))
