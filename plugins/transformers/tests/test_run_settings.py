"""``kvcore run --set``: any configuration key, refused like one in a file, before a model is looked for."""

from __future__ import annotations

import json

import pytest

from kvcore.cli.main import main


@pytest.mark.parametrize(
    ("setting", "key"),
    [
        ("transfer.lease=3", "transfer.lease"),
        ("transfer.lease_s=0", "transfer.lease_s"),
        ("cache.memory=64M", "cache.memory"),
        ("transfer.checksum=md5", "transfer.checksum"),
    ],
)
def test_settings_are_checked_first(setting: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--set", setting, "--model", "/nowhere", "--json"]) == 2
    error = json.loads(capsys.readouterr().err.strip().splitlines()[-1])["error"]
    assert error["fields"]["key"] == key


def test_what_is_no_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--set", "cache.format"]) == 2
    assert "KEY=VALUE" in capsys.readouterr().err
