"""docs/mxfp8.md shows what the commands print."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvcore.cli.main import main

PAGE = Path(__file__).parents[3] / "docs" / "mxfp8.md"
LLAMA_70B = {
    "model_type": "llama",
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "hidden_size": 8192,
    "dtype": "bfloat16",
    "max_position_embeddings": 131072,
}
BLOCKS = re.findall(r"```console\n\$ kvcore (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[command for command, _ in BLOCKS])
def test_the_page_shows_what_the_commands_print(command, shown, tmp_path, monkeypatch, capsys) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(command.split()) == 0
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == shown.splitlines()


def test_layouts_and_capacity_are_shown() -> None:
    assert [command.split()[0] for command, _ in BLOCKS] == ["layout", "layout", "plan"]
