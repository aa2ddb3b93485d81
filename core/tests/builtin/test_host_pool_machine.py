"""host_pool against a dictionary: saves, restores and drops while copies run late and in pieces."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from kvcore.builtin.backups.host_pool import HostPoolBackup
from kvcore.errors import BackupError, CapacityError

SIZE, BLOCK = 400, 10

shapes = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 25)), min_size=1, max_size=3)


class Machine(RuleBasedStateMachine):
    """The oracle is a copy of what was saved, and counts bytes by arithmetic of its own."""

    shelf: ModuleType
    keys = Bundle("keys")

    def __init__(self) -> None:
        super().__init__()
        self.late = self.shelf.LateCopier()
        self.pool = HostPoolBackup(size=SIZE, block_size=BLOCK, copier=self.late)
        self.saved: dict[str, list[np.ndarray]] = {}
        self.sources: dict[str, tuple[Any, list[Any]]] = {}  # saves whose units may not change yet
        self.restores: list[tuple[str, Any, list[Any]]] = []
        self.leaving: list[tuple[int, list[Any]]] = []  # blocks of dropped keys, and the restores still to read them
        self.cuttable: dict[str, bool] = {}  # a pool's blocks can all be cut or none of them
        self.count = 0

    def needed(self, arrays: list[np.ndarray]) -> int:
        return -(-sum(array.size for array in arrays) // BLOCK)

    def taken(self) -> int:
        return sum(map(self.needed, self.saved.values())) + sum(
            blocks for blocks, readers in self.leaving if not all(fence.done() for fence in readers)
        )

    @rule(target=keys, shapes=shapes, cuttable=st.booleans(), seed=st.integers(0, 1000))
    def save(self, shapes: list[tuple[int, int]], cuttable: bool, seed: int) -> Any:
        blocks = self.shelf.blocks(seed, shapes, cuttable=cuttable)
        arrays = [block.data.copy() for block in blocks]
        self.count += 1
        key = f"k{self.count}"
        if self.taken() + self.needed(arrays) > SIZE // BLOCK:
            with pytest.raises(CapacityError):
                self.pool.save(key, blocks)
            return multiple()
        self.sources[key] = (self.pool.save(key, blocks), blocks)
        self.saved[key] = arrays
        self.cuttable[key] = cuttable
        return key

    def targets(self, key: str) -> list[Any]:
        """Poisoned blocks shaped as those saved."""
        shapes = enumerate(self.saved[key])
        cuttable = self.cuttable[key]
        return list(self.shelf.poisoned([self.shelf.Block(f"c{i}", data, cuttable=cuttable) for i, data in shapes]))

    @rule(key=keys)
    def restore(self, key: str) -> None:
        like = self.targets(key)
        self.restores.append((key, self.pool.restore(key, like[::-1]), like))

    @rule(key=consumes(keys))
    def drop(self, key: str) -> None:
        arrays = self.saved.pop(key)
        self.sources.pop(key, None)
        readers = [fence for other, fence, _ in self.restores if other == key]
        self.leaving.append((self.needed(arrays), readers))
        self.restores = [("" if other == key else other, fence, like) for other, fence, like in self.restores]
        self.pool.drop(key)
        self.settle()

    @rule(count=st.integers(1, 3))
    def copy(self, count: int) -> None:
        self.late.run(count)
        self.settle()
        self.settle()

    @rule()
    def wait_for_the_last(self) -> None:
        """A wait overtakes the queue."""
        if self.restores:
            key, fence, _ = self.restores[-1]
            if key:
                fence.wait()
            else:
                with pytest.raises(BackupError):
                    fence.wait()
        self.settle()

    def settle(self) -> None:
        for key, (fence, blocks) in list(self.sources.items()):
            if fence.done():
                fence.wait()
                for block in blocks:
                    block.data[...] = 0xFF  # the units have a new owner
                del self.sources[key]
        for item in list(self.restores):
            key, fence, like = item
            if not fence.done():
                continue
            self.restores.remove(item)
            if key:
                fence.wait()
                for block, want in zip(like, self.saved[key], strict=True):
                    np.testing.assert_array_equal(block.data, want)
            else:
                with pytest.raises(BackupError):
                    fence.wait()
                assert all((block.data == 0xFF).all() for block in like)

    @invariant()
    def bytes_add_up(self) -> None:
        self.pool.check_integrity()
        held = sum(array.size for arrays in self.saved.values() for array in arrays)
        assert self.pool.bytes_held == held <= SIZE
        assert self.pool.bytes_free == SIZE - BLOCK * self.taken()

    def teardown(self) -> None:
        self.late.run()
        self.settle()
        assert not self.sources
        assert not self.restores
        for key, arrays in self.saved.items():  # also what nobody restored meanwhile
            like = self.targets(key)
            self.pool.restore(key, like).wait()
            for block, want in zip(like, arrays, strict=True):
                np.testing.assert_array_equal(block.data, want)
            self.pool.drop(key)
        self.late.run()
        assert self.pool.bytes_free == SIZE
        self.pool.close()


def test_against_a_dictionary(shelf: ModuleType) -> None:
    Machine.shelf = shelf
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
