"""The backend of ``docs/retraction.md``, taken from the page: the kit, a full disk, files that were cut."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from kvcore import BackupError, CapacityError, KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.contract import Backup
from kvcore.testing import BackupSuite
from kvcore.testing.backups import Memory

PAGE = Path(__file__).parents[1] / "docs" / "retraction.md"
(SOURCE,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The page's module, as an import would make it."""
    made = ModuleType("kvcore_files")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(SOURCE, str(PAGE), "exec"), made.__dict__)
    return made


@pytest.fixture
def new_backup(module: ModuleType, tmp_path: Path) -> Callable[[], Backup]:
    return lambda: module.FilesBackup(path=str(tmp_path))


class TestTheBackendOfThePage(BackupSuite):
    """Its fixture ``new_backup`` is the one above."""


@pytest.fixture
def backup(new_backup: Callable[[], Backup]) -> Iterator[Backup]:
    made = new_backup()
    yield made
    made.close()


def folder(tmp_path: Path) -> Path:
    (found,) = tmp_path.iterdir()
    return found


def test_the_backend_is_as_short_as_an_example_should_be() -> None:
    assert len(SOURCE.split("class FilesBackup")[1].splitlines()) < 65
    assert max(map(len, SOURCE.splitlines())) <= 120


def test_a_full_disk_leaves_nothing(backup: Backup, tmp_path: Path) -> None:
    """/dev/full refuses every byte as a disk without room does."""
    (folder(tmp_path) / "0").symlink_to("/dev/full")
    with pytest.raises(CapacityError, match="No space left") as caught:
        backup.save("a", Memory(1).blocks([1, 2]))
    assert caught.value.fields["key"] == "a"
    assert backup.bytes_held == 0
    assert not list(folder(tmp_path).iterdir())
    with pytest.raises(BackupError, match="no such backup"):
        backup.drop("a")
    backup.save("a", Memory(1).blocks([1, 2]))  # there is room again


def test_a_folder_that_is_gone_is_no_full_disk(backup: Backup, tmp_path: Path) -> None:
    folder(tmp_path).rmdir()
    with pytest.raises(BackupError, match="FileNotFoundError"):
        backup.save("a", Memory(1).blocks([1, 2]))
    assert backup.bytes_held == 0


@pytest.mark.parametrize("harm", ["cut", "longer", "one bit", "removed"])
def test_a_file_that_lost_bytes_is_refused_before_a_byte_is_written(backup: Backup, tmp_path: Path, harm: str) -> None:
    saved = Memory(1)
    backup.save("a", saved.blocks([1, 2]))
    (file,) = folder(tmp_path).iterdir()
    whole = file.read_bytes()
    target = saved.poisoned()
    if harm == "removed":
        file.unlink()
    else:
        harmed = {"cut": whole[:-1], "longer": whole + b"\0", "one bit": whole[:-1] + bytes([whole[-1] ^ 1])}[harm]
        file.write_bytes(harmed)
    with pytest.raises(BackupError) as caught:
        backup.restore("a", target.blocks([3, 4]))
    assert caught.value.fields["key"] == "a"
    assert all((array == 0xFF).all() for array in target.arrays.values())
    file.write_bytes(whole)
    backup.restore("a", target.blocks([3, 4])).wait()
    for name, array in target.arrays.items():
        np.testing.assert_array_equal(array[[3, 4]], saved.arrays[name][[1, 2]])


def test_blocks_of_another_layout_are_refused(backup: Backup) -> None:
    """As many bytes of other components, or cut otherwise."""
    saved = Memory(1)
    backup.save("a", saved.blocks([1, 2]))
    for change in ({"components": ("full/other",)}, {"group": "third"}, {"num_units": 1}, {"nbytes": 1}):
        target = saved.poisoned()
        blocks: list[Any] = target.blocks([3, 4])
        for name, value in change.items():
            setattr(blocks[0], name, value)
        with pytest.raises(BackupError, match="not those saved") as caught:
            backup.restore("a", blocks)
        assert caught.value.fields["expected"] != caught.value.fields["got"]
        assert all((array == 0xFF).all() for array in target.arrays.values())


def test_the_folder_goes_with_the_backend(new_backup: Callable[[], Backup], tmp_path: Path) -> None:
    made = new_backup()
    made.save("../../a key of any kind\0", Memory(1).blocks([1]))
    assert len(list(folder(tmp_path).iterdir())) == 1
    made.close()
    made.close()
    assert not list(tmp_path.iterdir())


@pytest.fixture
def installed(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's module as a distribution of its own, and a folder for its files."""
    info = tmp_path / "site" / "kvcore_files-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcore-files\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        f"[kvcore]\n{module.PLUGIN.name} = kvcore_files\n[kvcore.backups]\nfiles = {module.PLUGIN.name}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (tmp_path / "files").mkdir()
    return tmp_path / "files"


def test_a_request_outlives_a_full_disk(installed: Path) -> None:
    """Through the façade: found by its name, saved and restored; with a full disk computed again."""
    group = LayerGroup("full", (0,), (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8)), num_query_heads=1)
    options = {"retraction.backend": "files", "retraction.options.path": str(installed)}
    config = load_config(None, {"cache.memory": "64KiB", "cache.page_size": 4, **options})
    with KVCache.create(ModelSpec("m", (group,), "fp32"), config, load_plugins(config)) as cache:
        cache.admit("a", 6)
        rows = {name: torch.full((6, 1, 8), value) for name, value in (("k", 1.0), ("v", 2.0))}
        with cache.begin([("a", 6)]) as step:
            step.store(0, rows)
            step.commit()
        handle = cache.retract("a")
        assert not handle.recompute
        assert len(list(folder(installed).iterdir())) == 1
        cache.resume(handle)
        unit, *_ = cache.units("a", "full", "pages")
        out = {name: torch.full((1, 1, 8), 9.0) for name in rows}
        cache.store.load(0, torch.tensor([unit * 4]), out)
        assert all(torch.equal(out[name], rows[name][:1]) for name in rows)
        (folder(installed) / "1").symlink_to("/dev/full")
        assert cache.retract("a").recompute
        assert cache.stats().retraction.fallback_causes == {"full": 1}
        assert cache.stats().backup_bytes == 0
    assert not list(installed.iterdir())
