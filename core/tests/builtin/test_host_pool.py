"""What host_pool alone does: options, a bound that nothing but bytes decides, copies on a thread of their own."""

import threading
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.errors import BackupError, CapacityError, ConfigError
from kvcore.plugins import load_plugins


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "retraction.options.size"),
        ({"size": "64MiBB"}, "MiB"),
        ({"size": 0}, "retraction.options.size"),
        ({"size": -1}, "retraction.options.size"),
        ({"size": 100, "block_size": 101}, "block"),
        ({"size": 100, "block_size": "0B"}, "retraction.options.block_size"),
        ({"size": 100, "copier": "thraed"}, "'thread'"),
        ({"sise": 100}, "'size'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_plugins(()).backup("host_pool", **options)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [1, 100, 4096, 5000, "3MiB", 50_000_001])
def test_default_blocks_use_all_but_a_little_of_the_size(size: int | str) -> None:
    from kvcore.config import parse_bytes

    with_default = HostPoolBackup(size=size, copier="inline")
    total = parse_bytes(size)
    assert total - max(4096, total // 4096) < with_default.max_bytes <= total
    assert with_default.bytes_free == with_default.max_bytes > 0


def test_only_a_lack_of_bytes_refuses_a_save(shelf: ModuleType) -> None:
    """Whatever was dropped in between: what fits by blocks is saved, and comes back whole."""
    pool = HostPoolBackup(size=1600, block_size=16, copier="inline")
    ones = [shelf.blocks(i, ((1, 16),)) for i in range(100)]
    for i, one in enumerate(ones):
        pool.save(f"k{i}", one)
    with pytest.raises(CapacityError, match="full") as caught:
        pool.save("more", shelf.blocks(7, ((1, 1),)))
    assert (caught.value.fields["needed"], caught.value.fields["free"]) == (16, 0)
    for i in range(0, 100, 2):  # gaps of one block: 50 of them
        pool.drop(f"k{i}")
    large = shelf.blocks(8, ((5, 100), (20, 15)))  # units longer than a gap, and shorter ones that cross borders
    pool.save("large", large)
    assert pool.bytes_free == 0
    assert pool.bytes_held == 1600
    target = shelf.poisoned(large)
    pool.restore("large", target).wait()
    for want, got in zip(large, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)
    for i in range(1, 100, 2):
        target = shelf.poisoned(ones[i])
        pool.restore(f"k{i}", target).wait()
        np.testing.assert_array_equal(target[0].data, ones[i][0].data)
    pool.check_integrity()


def test_a_refused_save_begins_nothing(shelf: ModuleType) -> None:
    late = shelf.LateCopier()
    pool = HostPoolBackup(size=64, block_size=16, copier=late)
    with pytest.raises(CapacityError):
        pool.save("r", shelf.blocks(1, ((5, 13),)))
    assert not late.tasks
    assert pool.bytes_held == 0
    assert pool.bytes_free == 64


def test_whole_units_are_gathered_without_a_buffer_between(shelf: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = HostPoolBackup(size=1 << 20, block_size=4096, copier="inline")
    seen = []
    block = shelf.blocks(1, ((64, 1000),))[0]
    now = block.copy_out
    monkeypatch.setattr(block, "copy_out", lambda dst: (seen.append(np.shares_memory(dst, pool._arena)), now(dst))[1])
    pool.save("r", [block])
    assert seen == [True]


def test_copies_run_on_a_thread_and_nobody_has_to_wait(shelf: ModuleType) -> None:
    pool, names, over = HostPoolBackup(size=4096), [], threading.Event()
    block = shelf.blocks(1)[0]
    block.before_copy = lambda: names.append(threading.current_thread().name)
    fence = pool.save("r", [block])
    for _ in range(1000):
        if fence.done():
            break
        over.wait(0.01)
    assert fence.done()
    assert names == ["kvcore-copier"]
    pool.close()


def test_who_waits_for_a_copy_that_has_not_begun_does_it(shelf: ModuleType) -> None:
    """A resume does not queue behind the saves of others."""
    late = shelf.LateCopier()
    pool = HostPoolBackup(size=4096, block_size=16, copier=late)
    saved = shelf.blocks(1)
    others = pool.save("other", shelf.blocks(2))
    pool.save("r", saved)
    target = shelf.poisoned(saved)
    pool.restore("r", target).wait()
    assert not others.done()
    for want, got in zip(saved, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)
    late.run()  # what was done already is not done again
    assert others.done()


def test_a_restore_never_reads_a_save_that_failed_meanwhile(shelf: ModuleType) -> None:
    late = shelf.LateCopier()
    pool = HostPoolBackup(size=4096, block_size=16, copier=late)
    saved = shelf.blocks(1)
    saved[1].fail = True
    fence = pool.save("r", saved)
    target = shelf.poisoned(saved)
    restored = pool.restore("r", target)
    late.run()
    for failed in (fence, restored):
        assert failed.done()
        with pytest.raises(BackupError):
            failed.wait()
    assert all((block.data == 0xFF).all() for block in target)
    assert pool.bytes_free == 4096


def test_dropped_bytes_are_free_when_nobody_copies_them_any_more(shelf: ModuleType) -> None:
    late = shelf.LateCopier()
    pool = HostPoolBackup(size=64, block_size=16, copier=late)
    saved = shelf.blocks(1, ((4, 16),))
    pool.save("r", saved).wait()
    target = shelf.poisoned(saved)
    fence = pool.restore("r", target)
    pool.drop("r")
    assert pool.bytes_held == 0
    assert pool.bytes_free == 0  # a restore is still to read them
    late.run()
    assert pool.bytes_free == 64
    with pytest.raises(BackupError, match="dropped"):
        fence.wait()
    unbegun = pool.save("s", saved)
    pool.drop("s")
    assert unbegun.done()
    assert pool.bytes_free == 64


def test_closed_pool_refuses(shelf: ModuleType) -> None:
    pool = HostPoolBackup(size=64)
    pool.close()
    with pytest.raises(BackupError, match="closed"):
        pool.save("r", shelf.blocks(1))


def test_closing_ends_copies_that_their_copier_forgot(shelf: ModuleType) -> None:
    """Whoever holds the fence, and the units with it, must not wait for ever."""

    class Careless(shelf.LateCopier):  # type: ignore[misc, name-defined]
        def close(self) -> None:
            pass

    pool = HostPoolBackup(size=4096, copier=Careless())
    fence = pool.save("r", shelf.blocks(1))
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not closing.is_alive()
    with pytest.raises(BackupError):
        fence.wait()


# --- whether it fits a cache ---


@pytest.mark.parametrize("arena", ["page_major", "layer_major"])
@pytest.mark.parametrize("length", [1, 4, 5, 14])
def test_bytes_of_a_request_are_foreseen(shelf: ModuleType, length: int, arena: str) -> None:
    from kvcore.requests.spaces import INDEX_SPACES
    from kvcore.retraction.fit import saved_bytes

    with shelf.build(HostPoolBackup(size="1MiB", copier="inline"), **{"cache.arena": arena}) as cache:
        shelf.retract_one(cache, length)
        spaces = {space.kind: space() for space in INDEX_SPACES}
        assert cache.stats().backup_bytes == saved_bytes(cache.layouts, spaces, length)


def test_a_pool_without_room_for_one_page_is_refused_at_configuration(shelf: ModuleType) -> None:
    options = {"retraction.backend": "host_pool", "retraction.options": {"size": shelf.PAGE_BYTES - 1}}
    with pytest.raises(ConfigError, match="no request at all") as caught:
        shelf.build(**options)
    assert caught.value.fields["needed"] == shelf.PAGE_BYTES
    assert "recompute" in caught.value.remedy


def test_a_pool_smaller_than_the_longest_request_says_what_it_saves(shelf: ModuleType) -> None:
    from structlog.testing import capture_logs

    options = {"retraction.backend": "host_pool", "retraction.options": {"size": 3 * shelf.PAGE_BYTES}}
    with capture_logs() as logs, shelf.build(**options) as cache:
        cache.admit("r", 13)
        shelf.write(cache, "r", 12, 1)
        handle = cache.retract("r")
        assert not handle.recompute
        cache.resume(handle)
        shelf.write(cache, "r", 1, 2)
        assert cache.retract("r").recompute
    told = [entry for entry in logs if "longest_saved" in entry]
    assert [(entry["log_level"], entry["longest_saved"]) for entry in told] == [("warning", 12)]


def test_a_pool_as_large_as_the_cache_saves_every_request(shelf: ModuleType) -> None:
    from structlog.testing import capture_logs

    options = {"retraction.backend": "host_pool", "retraction.options": {"size": "32KiB", "copier": "inline"}}
    with capture_logs() as logs, shelf.build(**options) as cache:
        _, handle = shelf.retract_one(cache, cache.manager.max_request_tokens)
        assert not handle.recompute
    assert logs == []
