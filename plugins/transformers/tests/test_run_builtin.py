"""Models that ``kvcore run`` knows by name: what they bring, what may be changed, and what must be installed."""

from __future__ import annotations

import json

import pytest

from kvcore.cli.main import main
from kvcore.config import load_config
from kvcore.errors import PluginError
from kvcore_transformers.commands import run_builtin
from kvcore_transformers.commands.run_builtin import BUILTIN, find, guard_prompts


def refusal(capsys):
    return json.loads(capsys.readouterr().err.strip().splitlines()[-1])["error"]


def test_names_and_directories():
    """``./guard`` is a directory, wherever one stands."""
    assert find("guard") is BUILTIN["guard"]
    assert find(None) is find("./guard") is find("/models/guard") is None
    assert (BUILTIN["guard"].directory() / "config.json").is_file()


def test_prompts_are_the_first_of_the_task_with_their_answers():
    few, more = guard_prompts(2), guard_prompts(3)
    assert more[:2] == few
    assert [prompt.id for prompt in more] == ["ledger-0", "ledger-1", "ledger-2"]
    for prompt in more:
        assert len(prompt.token_ids) == 100
        assert prompt.max_new_tokens == len(prompt.answer) == 22


def test_every_setting_is_a_default(tmp_path):
    """A file and the command line are stronger, key by key."""
    settings = BUILTIN["guard"].settings
    config = load_config(None, {}, settings)
    assert (config.cache.format, config.plugins) == ("mxfp8", ("mamba_backup",))
    path = tmp_path / "kvcore.toml"
    path.write_text('[cache]\nmemory = "1MiB"\n')
    changed = load_config(path, {"cache.format": "bf16"}, settings)
    assert (changed.cache.memory, changed.cache.format) == (2**20, "bf16")
    assert changed.cache.page_size == config.cache.page_size


@pytest.mark.parametrize("options", [("--count", "3"), ("--model", "guard", "--prompts", "p.jsonl", "--count", "3")])
def test_a_count_needs_a_task(options, capsys):
    assert main(["run", *options, "--json"]) == 2
    error = refusal(capsys)
    assert error["fields"]["option"] == "--count"
    assert "--model guard" in error["remedy"]


def test_a_plugin_that_is_not_installed_is_named_with_the_package(monkeypatch, capsys):
    monkeypatch.setattr(run_builtin, "entry_points", lambda group: [])
    assert main(["run", "--model", "guard", "--json"]) == 2
    error = refusal(capsys)
    assert (error["code"], error["fields"]["plugin"]) == ("plugin", "mamba_backup")
    assert error["remedy"] == "pip install kvcore-mamba-backup"


def test_a_format_that_is_not_installed_is_named_with_the_package(monkeypatch, capsys):
    monkeypatch.setattr(run_builtin, "provided_names", lambda kind: ("bf16", "fp32"))
    assert main(["run", "--model", "guard", "--json"]) == 2
    error = refusal(capsys)
    assert (error["code"], error["fields"]["format"]) == ("plugin", "mxfp8")
    assert "pip install kvcore-mxfp8" in error["remedy"]


def test_only_what_the_configuration_asks_for_must_be_installed(monkeypatch):
    """Another format than the usual one needs no package of the usual one."""
    monkeypatch.setattr(run_builtin, "provided_names", lambda kind: ("bf16", "fp32"))
    guard = BUILTIN["guard"]
    guard.check_installed(load_config(None, {"cache.format": "bf16"}, guard.settings))
    with pytest.raises(PluginError):
        guard.check_installed(load_config(None, {}, guard.settings))


def test_without_the_state_plugin_the_model_is_refused_by_name(capsys):
    """Before a process is started: a state without a holder would be lost without a sound (G6)."""
    assert main(["run", "--model", "guard", "--set", "plugins=[]", "--json"]) == 2
    error = refusal(capsys)
    assert error["code"] == "unsupported"
    assert (error["fields"]["group"], error["fields"]["known"]) == ("state", [])
    assert error["fields"]["model"] == str(BUILTIN["guard"].directory())
