"""The suite for retraction backends."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from kvcore.contract import DONE, Backup, Fence, UnitBlock
from kvcore.errors import BackupError, KVCoreError
from kvcore.layout import ArenaOrder, Layout
from kvcore.plugins import load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import Shard
from kvcore.testing.harness import TIMEOUT_S, Subject, View, open_cache, skip_unsupported
from kvcore.testing.memory import POISON, Bytes, pattern
from kvcore.testing.sample import GROUPS, ThreeComponents

PAGE = 8
GROUP = GROUPS["indexed"]


class ArrayBlock(UnitBlock):
    """Units of a plain array ``[units, bytes]``; ``fail`` makes its copies raise after half of them."""

    def __init__(self, group: str, component: str, memory: Bytes, units: Sequence[int]) -> None:
        self.group, self.components = group, (component,)
        self.num_units, self.nbytes = len(units), len(units) * memory.shape[1]
        self.memory, self.ids = memory, list(units)
        self.fail = False

    def copy_out(self, dst: Bytes) -> Fence:
        """Gather."""
        rows = dst.reshape(self.num_units, self.memory.shape[1])
        rows[: self.num_units // 2] = self.memory[self.ids[: self.num_units // 2]]
        self._check()
        rows[:] = self.memory[self.ids]
        return DONE

    def copy_in(self, src: Bytes) -> Fence:
        """Scatter."""
        rows = src.reshape(self.num_units, self.memory.shape[1])
        self.memory[self.ids[: self.num_units // 2]] = rows[: self.num_units // 2]
        self._check()
        self.memory[self.ids] = rows
        return DONE

    def _check(self) -> None:
        if self.fail:
            raise RuntimeError("this copy fails on purpose")


class Memory:
    """Three components in plain arrays of 16 units, two under one group and one under another."""

    SIZES = (("full", "full/kv", 256), ("full", "full/block_scale", 16), ("other", "other/index_key", 48))

    def __init__(self, seed: int) -> None:
        self.arrays = {c: pattern(16 * size, seed + n).reshape(16, size) for n, (_, c, size) in enumerate(self.SIZES)}

    def blocks(self, units: Sequence[int]) -> list[ArrayBlock]:
        """One block a component."""
        return [ArrayBlock(group, name, self.arrays[name], units) for group, name, _ in self.SIZES]

    def poisoned(self) -> Memory:
        """Another memory of the same shape, full of 0xFF."""
        other = Memory(0)
        for array in other.arrays.values():
            array[:] = POISON
        return other


class BackupSuite:
    """What a backup promises. Override the fixture ``new_backup``: a callable that makes an empty one."""

    @pytest.fixture
    def registry(self) -> Registry:
        """Where formats, pools and kernels come from."""
        return load_plugins(())

    @pytest.fixture
    def backup(self, new_backup: Callable[[], Backup]) -> Iterator[Backup]:
        """An empty backup, closed at the end."""
        made = new_backup()
        yield made
        made.close()

    @pytest.fixture
    def layout(self, backup: Backup) -> Layout:
        """A layout of three components that the backup carries."""
        layout = ThreeComponents().layout(GROUP, page_size=PAGE, shard=Shard(), arena="page_major")
        for component in layout.components:
            skip_unsupported(backup.carries(layout, component), component)
        return layout

    def test_every_component_comes_back(self, backup: Backup, layout: Layout) -> None:
        """Into other units of other memory: the bytes saved, and no other byte written."""
        saved = Memory(1)
        backup.save("a", saved.blocks([3, 9, 4])).wait()
        target = saved.poisoned()
        backup.restore("a", target.blocks([1, 2, 8])).wait()
        for name, array in target.arrays.items():
            np.testing.assert_array_equal(array[[1, 2, 8]], saved.arrays[name][[3, 9, 4]], name)
            rest = np.delete(array, [1, 2, 8], axis=0)
            assert (rest == POISON).all(), f"{name}: units that are not the request's were written"

    def test_a_copy_is_a_copy(self, backup: Backup, layout: Layout) -> None:
        """Once the save is over, its units may be overwritten."""
        saved, original = Memory(1), Memory(1)
        backup.save("a", saved.blocks([5, 6])).wait()
        for array in saved.arrays.values():
            array[:] = POISON
        backup.restore("a", saved.blocks([7, 2])).wait()
        for name, array in saved.arrays.items():
            np.testing.assert_array_equal(array[[7, 2]], original.arrays[name][[5, 6]], name)

    def test_keeps_requests_apart(self, backup: Backup, layout: Layout) -> None:
        """Several keys, of unequal length, restored in another order than they were saved in."""
        units = {"a": [1], "b": [2, 3, 4, 5], "c": [6, 7]}
        memories = {key: Memory(10 * n) for n, key in enumerate(units)}
        for key, ids in units.items():
            backup.save(key, memories[key].blocks(ids)).wait()
        for key in ("b", "c", "a"):
            target = memories[key].poisoned()
            backup.restore(key, target.blocks(units[key][::-1])).wait()
            backup.drop(key)
            for name, array in target.arrays.items():
                np.testing.assert_array_equal(array[units[key][::-1]], memories[key].arrays[name][units[key]], name)

    def test_accounts_for_its_bytes(self, backup: Backup, layout: Layout) -> None:
        """``bytes_held`` covers what is saved, and is 0 again when all is dropped or closed."""
        assert backup.bytes_held == 0
        held = 0
        for key, ids in (("a", [1, 2]), ("b", [3])):
            blocks = Memory(1).blocks(ids)
            backup.save(key, blocks).wait()
            held += sum(block.nbytes for block in blocks)
            assert backup.bytes_held >= held
        backup.drop("a")
        rest = backup.bytes_held
        assert sum(block.nbytes for block in Memory(1).blocks([3])) <= rest < held
        backup.drop("b")
        assert backup.bytes_held == 0
        backup.save("c", Memory(1).blocks([1])).wait()
        backup.close()
        assert backup.bytes_held == 0

    def test_dropped_keys_are_gone(self, backup: Backup, layout: Layout) -> None:
        """A key that is unknown, or was dropped, is a BackupError, and its name is free again."""
        target = Memory(1).poisoned()
        for call in (lambda: backup.drop("never"), lambda: backup.restore("never", target.blocks([1]))):
            with pytest.raises(BackupError):
                call()
        backup.save("a", Memory(1).blocks([1])).wait()
        backup.drop("a")
        for call in (lambda: backup.drop("a"), lambda: backup.restore("a", target.blocks([1]))):
            with pytest.raises(BackupError):
                call()
        assert all((array == POISON).all() for array in target.arrays.values())
        again = Memory(2)
        backup.save("a", again.blocks([4])).wait()
        backup.restore("a", target.blocks([4])).wait()
        np.testing.assert_array_equal(target.arrays["full/kv"][4], again.arrays["full/kv"][4])

    def test_keys_in_use_are_refused(self, backup: Backup, layout: Layout) -> None:
        """The request that was saved first is untouched."""
        first, held = Memory(1), 0
        backup.save("a", first.blocks([1, 2])).wait()
        held = backup.bytes_held
        with pytest.raises(BackupError):
            backup.save("a", Memory(2).blocks([1, 2]))
        assert backup.bytes_held == held
        target = first.poisoned()
        backup.restore("a", target.blocks([1, 2])).wait()
        for name, array in target.arrays.items():
            np.testing.assert_array_equal(array[[1, 2]], first.arrays[name][[1, 2]], name)

    @pytest.mark.parametrize("broken", [0, 1, 2])
    def test_a_failed_save_keeps_nothing(self, backup: Backup, layout: Layout, broken: int) -> None:
        """Whichever component fails: an error, no byte held, the key free, and what else is saved unharmed."""
        other = Memory(5)
        backup.save("other", other.blocks([1])).wait()
        held = backup.bytes_held
        blocks = Memory(1).blocks([2, 3])
        blocks[broken].fail = True
        with pytest.raises((KVCoreError, RuntimeError)):
            backup.save("a", blocks).wait()
        assert backup.bytes_held == held
        with pytest.raises(BackupError):
            backup.drop("a")
        blocks[broken].fail = False
        backup.save("a", blocks).wait()
        target = other.poisoned()
        backup.restore("other", target.blocks([1])).wait()
        np.testing.assert_array_equal(target.arrays["full/kv"][1], other.arrays["full/kv"][1])

    @pytest.mark.parametrize("broken", [0, 1, 2])
    def test_a_failed_restore_may_be_repeated(self, backup: Backup, layout: Layout, broken: int) -> None:
        """The bytes are still held, and the second attempt puts them all in place."""
        saved = Memory(1)
        backup.save("a", saved.blocks([2, 3])).wait()
        held = backup.bytes_held
        target = saved.poisoned()
        blocks = target.blocks([4, 5])
        blocks[broken].fail = True
        with pytest.raises((KVCoreError, RuntimeError)):
            backup.restore("a", blocks).wait()
        assert backup.bytes_held == held
        blocks[broken].fail = False
        backup.restore("a", blocks).wait()
        for name, array in target.arrays.items():
            np.testing.assert_array_equal(array[[4, 5]], saved.arrays[name][[2, 3]], name)

    def test_other_blocks_are_refused(self, backup: Backup, layout: Layout) -> None:
        """Fewer components, or fewer units, than were saved: a BackupError, and no byte written."""
        saved = Memory(1)
        backup.save("a", saved.blocks([2, 3])).wait()
        target = saved.poisoned()
        for wrong in (target.blocks([4, 5])[:2], target.blocks([4])):
            with pytest.raises(BackupError):
                backup.restore("a", wrong).wait()
        assert all((array == POISON).all() for array in target.arrays.values())

    def test_nothing_is_legal(self, backup: Backup, layout: Layout) -> None:
        """A request without units is saved, restored and dropped."""
        backup.save("empty", Memory(1).blocks([])).wait()
        backup.restore("empty", Memory(1).blocks([])).wait()
        backup.drop("empty")
        assert backup.bytes_held == 0

    @pytest.mark.parametrize("arena", ["page_major", "layer_major"])
    def test_retracts_a_request_of_a_cache(
        self, registry: Registry, new_backup: Callable[[], Backup], layout: Layout, arena: ArenaOrder
    ) -> None:
        """Through the façade: three components of real pools, twice in a row, while others write its old units."""
        subject = Subject(registry, format=ThreeComponents(), backup=new_backup)
        with open_cache(subject, GROUP, page_size=PAGE, arena=arena) as cache:
            view = View(cache, GROUP)
            cache.admit("a", 2 * PAGE + 3)
            view.write("a", 2 * PAGE + 3, seed=1)
            before = {name: view.request_bytes("a", name) for name in view.layout.components}
            for number in range(2):
                old = view.tables("a")[view.range]
                handle = cache.retract("a")
                assert not handle.recompute, "nothing was saved"
                assert set(handle.bytes_by_component) == set(view.layout.components)
                _wait_free(view, old)
                cache.admit(f"tenant-{number}", 2 * PAGE + 3)
                assert view.tables(f"tenant-{number}")[view.range] == old, "the tenant took other units"
                view.write(f"tenant-{number}", 2 * PAGE + 3, seed=2)
                cache.resume(handle)
                assert view.tables("a")[view.range] != old
                for name, values in before.items():
                    np.testing.assert_array_equal(view.request_bytes("a", name), values, name)
            cache.release("a")
            assert cache.stats().backup_bytes == 0


def _wait_free(view: View, units: Sequence[int]) -> None:
    """Wait until a retracted request's units can be allocated: its copy is over."""
    end = time.monotonic() + TIMEOUT_S
    while not set(units) <= set(view.cache.manager.free_units(view.group.prefix, view.range).tolist()):
        assert time.monotonic() < end, "the units of a retracted request never became free"
        view.cache.can_admit(1)  # settles copies that have ended
        time.sleep(0.001)
