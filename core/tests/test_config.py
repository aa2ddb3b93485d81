"""The configuration: typed, strict, and never changed by the environment."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.cli.main import main
from kvcore.config import Config, load_config, parse_bool, parse_bytes, parse_settings
from kvcore.errors import ConfigError
from kvcore.transfer.session.base import TransferOptions


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "kvcore.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    config = load_config()
    assert (config.cache.format, config.cache.page_size, config.cache.memory) == ("fp32", 16, 256 * 2**20)
    assert (config.transfer.transport, config.transfer.bind) == ("shm", "tcp://127.0.0.1:*")
    assert (config.retraction.policy, config.retraction.backend) == ("backup", "host_tensor")


def test_a_file_and_overrides(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        plugins = ["transformers"]
        [cache]
        format = "bf16"
        page_size = 32
        memory = "64MiB"
        format_options = { order = "token_major" }
        [transfer]
        lease_s = 5
        [retraction]
        policy = "recompute"
        """,
    )
    config = load_config(path, {"cache.format": "fp16", "cache.page_size": None, "cache.memory": "1GiB"})
    assert config.plugins == ("transformers",)
    assert config.cache.format == "fp16"
    assert config.cache.page_size == 32  # None is "not given"
    assert config.cache.memory == 2**30
    assert config.cache.format_options == {"order": "token_major"}
    assert config.transfer.lease_s == 5.0
    assert config.retraction.policy == "recompute"
    added = load_config(path, {"cache.format_options.block": 4})
    assert added.cache.format_options == {"order": "token_major", "block": 4}


def test_defaults_of_a_caller_yield_to_the_file_and_to_overrides(tmp_path: Path) -> None:
    path = written(tmp_path, '[cache]\nformat = "bf16"\n')
    defaults = {"cache.format": "mxfp8", "cache.memory": "64MiB", "cache.page_size": 32, "plugins": ["transformers"]}
    config = load_config(path, {"cache.memory": "1GiB", "cache.page_size": None}, defaults)
    assert (config.cache.format, config.cache.memory, config.cache.page_size) == ("bf16", 2**30, 32)
    assert config.plugins == ("transformers",)
    assert load_config(None, {"plugins": []}, defaults).plugins == ()


def test_a_default_below_what_is_no_table_leaves_the_fault_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a table") as error:
        load_config(written(tmp_path, "cache = 3"), None, {"cache.format": "bf16"})
    assert error.value.fields["key"] == "cache"


def test_times_of_the_transfer_default_to_those_of_the_protocol() -> None:
    """Two sets of defaults would disagree one day; what the protocol does with each time is tested there."""
    transfer, protocol = load_config().transfer, TransferOptions()
    times = {name: getattr(transfer, name) for name in transfer.__struct_fields__ if name.endswith("_s")}
    assert times == {field.name: getattr(protocol, field.name) for field in dataclasses.fields(protocol)}


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("cache.format=bf16", "cache.format", "bf16"),
        ('cache.format = "bf16"', "cache.format", "bf16"),
        ("cache.memory=64MiB", "cache.memory", "64MiB"),
        ("transfer.lease_s=2.5", "transfer.lease_s", 2.5),
        ("plugins=['a', \"b\"]", "plugins", ["a", "b"]),
        ("transfer.options.stage_bytes=1024", "transfer.options.stage_bytes", 1024),
        ("x=true", "x", True),
        ("x=", "x", ""),
        ("x=a=b", "x", "a=b"),
        ("x=1\ny = 2", "x", "1\ny = 2"),
    ],
)
def test_settings_of_the_command_line(text: str, key: str, value: Any) -> None:
    assert parse_settings([text]) == {key: value}


def test_settings_override_like_keys_and_are_refused_like_them() -> None:
    config = load_config(None, parse_settings(["cache.memory=1GiB", "transfer.held_fraction=1", "plugins=[]"]))
    assert (config.cache.memory, config.transfer.held_fraction) == (2**30, 1.0)
    for bad in (["cache.format"], ["=1"], ["a..b=1"], ["a=1", "a=2"]):
        with pytest.raises(ConfigError):
            parse_settings(bad)
    with pytest.raises(ConfigError) as caught:
        load_config(None, parse_settings(["cache.pagesize=16"]))
    assert caught.value.remedy == "did you mean 'page_size'?"
    with pytest.raises(ConfigError):
        load_config(None, parse_settings(["cache.page_size=16 tokens"]))


FILE = """
[cache]
page_size = 32
format = "fp16"
[transfer.options]
stage_bytes = "64MiB"
"""


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("texts", "page_size", "kv_format", "options"),
    [
        (["cache.page_size=8", 'cache={format="bf16"}'], 8, "bf16", {"stage_bytes": "64MiB"}),
        (["cache={format='bf16'}"], 32, "bf16", {"stage_bytes": "64MiB"}),
        (["cache={}"], 32, "fp16", {"stage_bytes": "64MiB"}),
        (["transfer={}", "transfer.options.stage_readers=2"], 32, "fp16", {"stage_bytes": "64MiB", "stage_readers": 2}),
        (["transfer={options={stage_readers=2}}"], 32, "fp16", {"stage_bytes": "64MiB", "stage_readers": 2}),
        (
            ["transfer.options={stage_readers=2}", "transfer={options={stage_bytes=1}}"],
            32, "fp16", {"stage_bytes": 1, "stage_readers": 2},
        ),
        (["transfer.options={}"], 32, "fp16", {}),
        (["cache={page_size=8}", "cache.page_size=8"], 8, "fp16", {"stage_bytes": "64MiB"}),
    ],
)  # fmt: skip
def test_settings_are_merged_in_any_order_and_over_the_file(
    tmp_path: Path, flip: bool, texts: list[str], page_size: int, kv_format: str, options: dict[str, Any]
) -> None:
    given = parse_settings(texts[::-1] if flip else texts)
    config = load_config(written(tmp_path, FILE), given)
    assert (config.cache.page_size, config.cache.format) == (page_size, kv_format)
    assert config.transfer.options == options
    assert load_config(None, given, {"cache.page_size": 64}).cache.page_size == (page_size if page_size == 8 else 64)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize(
    ("first", "second", "key"),
    [
        ("cache.page_size=8", "cache={page_size=16}", "cache.page_size"),
        ("cache.page_size=1", "cache={page_size=true}", "cache.page_size"),
        ("cache=3", "cache.page_size=16", "cache"),
        ("cache.format=bf16", "cache.format.order='x'", "cache.format"),
        ("transfer.options={}", "transfer.options.stage_bytes=1", "transfer.options"),
        ("plugins=['a']", "plugins=['b']", "plugins"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flip: bool, first: str, second: str, key: str) -> None:
    with pytest.raises(ConfigError, match="a key is set twice") as caught:
        load_config(None, parse_settings([second, first] if flip else [first, second]))
    assert caught.value.fields["key"] == key


def test_a_table_over_what_is_none_is_refused(tmp_path: Path) -> None:
    for text in ("cache = 3", 'cache.format = "bf16"'):
        with pytest.raises(ConfigError, match="key has no parts"):
            load_config(written(tmp_path, text), {"cache.format.x": 1})


def test_a_setting_that_contradicts_its_flag_is_refused() -> None:
    flags = {"cache.format": "bf16", "cache.page_size": None}
    assert parse_settings(["cache.page_size=8"], flags) == {"cache.page_size": 8, "cache.format": "bf16"}
    assert parse_settings(["cache.format=bf16"], flags) == {"cache.format": "bf16"}
    with pytest.raises(ConfigError, match="contradicts a flag") as caught:
        parse_settings(["cache.format=fp16"], flags)
    assert caught.value.fields == {"key": "cache.format", "flag": "bf16", "got": "fp16"}
    with pytest.raises(ConfigError, match="a key is set twice"):
        load_config(None, parse_settings(['cache={format="fp16"}'], flags))


@pytest.mark.parametrize("value", [1, 1.0, 0.001])
def test_the_whole_of_a_range_may_be_held(value: float) -> None:
    assert load_config(None, {"transfer.held_fraction": value}).transfer.held_fraction == value


@pytest.mark.parametrize(
    ("data", "key", "remedy"),
    [
        ({"cache": {"pagesize": 16}}, "cache.pagesize", "did you mean 'page_size'?"),
        ({"cahce": {}}, "cahce", "did you mean 'cache'?"),
        ({"page_size": 16}, "page_size", "did you mean 'cache.page_size'?"),
        ({"transfer": {"lease": 3.0}}, "transfer.lease", "did you mean 'lease_s'?"),
        ({"transfer": {"held_fracton": 0.5}}, "transfer.held_fracton", "did you mean 'held_fraction'?"),
        ({"retraction": {"polcy": "backup"}}, "retraction.polcy", "did you mean 'policy'?"),
    ],
)
def test_unknown_keys_are_refused_at_any_depth(data: dict[str, Any], key: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="unknown configuration key") as caught:
        Config.from_mapping(data)
    assert caught.value.fields["key"] == key
    assert caught.value.remedy == remedy


def test_an_unknown_override_is_refused_like_a_key() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"cache.pagesize": 16})
    assert caught.value.fields["key"] == "cache.pagesize"
    with pytest.raises(ConfigError):
        load_config(None, {"plugins.first": "x"})
    with pytest.raises(ConfigError) as deep:
        load_config(None, {"cache.page_size": 16, "cache.page_size.of": 16})
    assert deep.value.fields["key"] == "cache.page_size"


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"cache": {"page_size": "16"}}, "cache.page_size"),
        ({"cache": {"page_size": True}}, "cache.page_size"),
        ({"cache": {"page_size": 1.5}}, "cache.page_size"),
        ({"cache": {"page_size": 0}}, "cache.page_size"),
        ({"cache": {"memory": -1}}, "cache.memory"),
        ({"cache": {"memory": 0}}, "cache.memory"),
        ({"cache": {"memory": "64M"}}, "cache.memory"),
        ({"cache": {"memory": True}}, "cache.memory"),
        ({"cache": {"arena": "column_major"}}, "cache.arena"),
        ({"cache": 3}, "cache"),
        ({"transfer": {"lease_s": 0}}, "transfer.lease_s"),
        ({"transfer": {"lease_s": float("nan")}}, "transfer.lease_s"),
        ({"transfer": {"lease_s": 1.0, "heartbeat_s": 1.0}}, "transfer.heartbeat_s"),
        ({"transfer": {"lease_s": float("inf")}}, "transfer.lease_s"),
        ({"transfer": {"quiesce_s": float("inf")}}, "transfer.quiesce_s"),
        ({"transfer": {"peer_timeout_s": 0.5}}, "transfer.heartbeat_s"),
        ({"transfer": {"ask_timeout_s": 0}}, "transfer.ask_timeout_s"),
        ({"transfer": {"read_timeout_s": -1.0}}, "transfer.read_timeout_s"),
        ({"transfer": {"hello_timeout_s": "10"}}, "transfer.hello_timeout_s"),
        ({"transfer": {"checksum": "md5"}}, "transfer.checksum"),
        ({"transfer": {"checksum": True}}, "transfer.checksum"),
        ({"transfer": {"held_fraction": 0}}, "transfer.held_fraction"),
        ({"transfer": {"held_fraction": 1.01}}, "transfer.held_fraction"),
        ({"transfer": {"held_fraction": float("nan")}}, "transfer.held_fraction"),
        ({"transfer": {"held_fraction": True}}, "transfer.held_fraction"),
        ({"transfer": {"curve_peers": ["peer.key"]}}, "transfer.curve_peers"),
        ({"transfer": {"curve_certificate": "own.key_secret"}}, "transfer.curve_peers"),
        ({"transfer": {"allow": "everyone"}}, "transfer.allow"),
        ({"retraction": {"policy": "forget"}}, "retraction.policy"),
        ({"plugins": "transformers"}, "plugins"),
        ({"plugins": [1]}, "plugins"),
    ],
)
def test_wrong_values_are_refused_naming_the_key(data: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_mapping(data)
    assert str(caught.value.fields["key"]).startswith(key)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as missing:
        load_config(tmp_path / "absent.toml")
    assert missing.value.fields["path"].endswith("absent.toml")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(written(tmp_path, "[cache\n"))
    latin = tmp_path / "latin.toml"
    latin.write_bytes(b'plugins = ["\xe9"]')
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(latin)
    with pytest.raises(ConfigError) as wrong:
        load_config(written(tmp_path, "[cache]\npagesize = 3\n"))
    assert wrong.value.fields["path"].endswith("kvcore.toml")


def test_json_gives_the_same_configuration_to_a_worker() -> None:
    config = load_config(
        None, {"cache.memory": "3MiB", "plugins": ["a", "b"], "retraction.options": {"x": [1, {"y": None}]}}
    )
    assert Config.from_json(config.to_json()) == config
    for bad in (b"", b"[]", b"\xff", b'{"cache": {"pagesize": 1}}'):
        with pytest.raises(ConfigError):
            Config.from_json(bad)


def test_no_environment_variable_changes_bytes() -> None:
    code = "from kvcore.config import load_config; print(load_config().to_json().decode())"
    noisy = {
        f"KVCORE_{name}": "7"
        for name in ("CACHE_PAGE_SIZE", "PAGE_SIZE", "FORMAT", "CACHE__FORMAT", "MEMORY", "CONFIG")
    }
    plain, loud = (
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
        )
        for env in ({}, noisy)
    )
    assert plain.stdout == loud.stdout == load_config().to_json().decode() + "\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("64MiB", 64 * 1024 * 1024),
        ("64 mib", 64 * 1024 * 1024),
        ("1.5GiB", 3 * 2**29),
        ("2GB", 2_000_000_000),
        ("0.5kB", 500),
        ("1TiB", 2**40),
        ("4096", 4096),
        ("7B", 7),
        (12, 12),
        (0, 0),
    ],
)
def test_sizes(text: str | int, value: int) -> None:
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1e9", "64MiBs", "0.3B", "1/2GiB", "१MiB", -1, True, None, 1.5])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_an_ambiguous_unit_names_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bytes("64M")
    assert caught.value.remedy == "did you mean 'MiB'?"
    with pytest.raises(ConfigError) as other:
        parse_bytes("64x")
    assert "GiB" in other.value.remedy


@settings(deadline=None)
@given(st.integers(0, 2**60))
def test_sizes_round_trip(value: int) -> None:
    assert parse_bytes(value) == parse_bytes(str(value)) == parse_bytes(f"{value}B") == value


@pytest.mark.parametrize("text", ["", "0", "false", "no", "off", " False "])
def test_n3_words_for_false(text: str) -> None:
    """N3: setting a flag to false switches it on, because bool() of a non-empty string is True."""
    assert parse_bool("KVCORE_FLAG", text) is False


@pytest.mark.parametrize("text", ["1", "true", "on", "yes", "TRUE\n"])
def test_n3_words_for_true(text: str) -> None:
    """N3, the other way."""
    assert parse_bool("KVCORE_FLAG", text) is True


@pytest.mark.parametrize("text", ["ture", "2", "none", "enabled", "1 1"])
def test_n3_anything_else_raises_naming_the_variable(text: str) -> None:
    """N3: a misspelt value is not an answer."""
    with pytest.raises(ConfigError, match="not a boolean") as caught:
        parse_bool("KVCORE_FLAG", text)
    assert caught.value.fields["variable"] == "KVCORE_FLAG"
    if text == "ture":
        assert caught.value.remedy == "did you mean 'true'?"


def test_settings_reach_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["explain", "--json", "--set", "cache.format=bf16", "--set", "cache.page_size=32"]
    assert main(given) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "bf16"
    assert main(["explain", "--set", "cache.pagesize=32"]) == 2
    assert "did you mean 'page_size'?" in capsys.readouterr().err


DEEP = 5000


@pytest.mark.parametrize(
    "text",
    [
        f"x = {'[' * DEEP}{']' * DEEP}",
        f"x = {'{a=' * DEEP}1{'}' * DEEP}",
        f"cache.format{'.a' * DEEP} = 1",
        f"[{'.'.join('a' * DEEP)}]",
        f"cache.format_options.x = {'[' * 40}{']' * 40}",
    ],
)
def test_what_is_nested_too_deeply_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["explain", "--config", str(written(tmp_path, text))]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "nested too deeply" in captured.err


def test_settings_and_json_that_are_nested_too_deeply_are_refused() -> None:
    deep = "[" * DEEP + "]" * DEEP
    for text in (f"cache.format={deep}", f"cache.format{'.a' * DEEP}=1", f"{'a.' * DEEP}a={deep}"):
        with pytest.raises(ConfigError, match="nested too deeply"):
            load_config(None, parse_settings([text]))
    with pytest.raises(ConfigError, match="nested too deeply"):
        Config.from_json('{"plugins": ' + deep + "}")
    value: Any = 1
    for _ in range(DEEP):
        value = [value]
    with pytest.raises(ConfigError, match="nested too deeply"):
        Config.from_mapping({"plugins": value})
    error = ConfigError("x", got=value, long="a" * 10_000)
    assert "nested too deeply to be shown" in str(error)
    assert len(str(error)) < 3000


@pytest.mark.parametrize("key", ["page_size", "max_requests", "max_rows", "max_tokens", "checkpoints"])
def test_numbers_past_all_bookkeeping_are_refused(key: str) -> None:
    assert getattr(load_config(None, {f"cache.{key}": 2**24}).cache, key) == 2**24
    for number in (2**24 + 1, 10**12, 10**30):
        with pytest.raises(ConfigError, match="wrong value") as caught:
            load_config(None, {f"cache.{key}": number})
        assert caught.value.fields["key"] == f"cache.{key}"
