"""The suite for backups, tried with mutants of host_tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.contract import DONE, Backup, Fence, Support, UnitBlock, unsupported
from kvcore.errors import BackupError
from kvcore.layout import Layout
from kvcore.testing import BackupSuite, Case, run


def red(name: str, make: Callable[[], Backup]) -> bool:
    """Whether a check fails in every way it is run."""
    checks = run([Case("backups", "mutant", BackupSuite, {"new_backup": lambda: make})], select=name)
    assert {check.check.partition("[")[0] for check in checks} == {name}
    return all(check.outcome == "failed" for check in checks)


class Keeps(Backup):
    """Simple and right: what the mutants start from. It keeps one array a block."""

    name = "keeps"

    def __init__(self) -> None:
        self.held: dict[str, list[tuple[UnitBlock, np.ndarray]]] = {}

    def carries(self, layout: Layout, component: str) -> Support:
        return Support(True)

    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        if key in self.held:
            raise BackupError("in use", key=key)
        copies = []
        for block in blocks:
            copies.append((block, np.zeros(block.nbytes, np.uint8)))
            block.copy_out(copies[-1][1])
        self.held[key] = copies
        return DONE

    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        held = self.held.get(key)
        if held is None or [b.nbytes for b in blocks] != [b.nbytes for b, _ in held]:
            raise BackupError("not held", key=key)
        for block, (_, data) in zip(blocks, held, strict=True):
            block.copy_in(data)
        return DONE

    def drop(self, key: str) -> None:
        if key not in self.held:
            raise BackupError("not held", key=key)
        del self.held[key]

    @property
    def bytes_held(self) -> int:
        return sum(data.nbytes for held in self.held.values() for _, data in held)

    def close(self) -> None:
        self.held.clear()


def test_right_ones_pass() -> None:
    cases = [
        Case("backups", kind.name, BackupSuite, {"new_backup": lambda kind=kind: kind})
        for kind in (Keeps, HostTensorBackup)
    ]
    checks = run(cases)
    assert {check.outcome for check in checks} == {"passed"}
    assert len(checks) == 2 * 16


def test_a_backup_that_forgets_one_component() -> None:
    """It saves all, and restores all but the last: nothing is reported."""

    class Mutant(HostTensorBackup):
        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            class Nowhere(type(blocks[-1]) if blocks else object):  # type: ignore[misc]
                def copy_in(self, src: np.ndarray) -> Fence:
                    return DONE

            if len(blocks) < 2:
                return super().restore(key, blocks)
            last = Nowhere.__new__(Nowhere)
            last.__dict__.update(blocks[-1].__dict__)
            return super().restore(key, [*blocks[:-1], last])

    assert red("test_every_component_comes_back", Mutant)
    assert red("test_keeps_requests_apart", Mutant)


def test_a_backup_that_saves_one_component_less() -> None:
    class Mutant(HostTensorBackup):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            return super().save(key, blocks[:-1])

        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            return super().restore(key, blocks[:-1])

    assert red("test_every_component_comes_back", Mutant)
    assert red("test_accounts_for_its_bytes", Mutant)


def test_a_backup_of_a_pool_that_forgets_a_component() -> None:
    """One block holds all components of a page-major pool: the last bytes of it stay where they were."""

    class Mutant(HostTensorBackup):
        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            for saved in self._saved.values():
                saved.buffer[saved.nbytes // 2 :] = 0
            return super().restore(key, blocks)

    assert red("test_retracts_a_request_of_a_cache", Mutant)


def test_a_copy_that_is_only_a_reference() -> None:
    class Mutant(Keeps):
        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            for block, data in self.held[key]:
                block.copy_out(data)
            return super().restore(key, blocks)

    assert red("test_a_copy_is_a_copy", Mutant)


def test_requests_that_share_memory() -> None:
    class Mutant(Keeps):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            fence = super().save(key, blocks)
            for other in self.held.values():
                for (_, mine), (_, theirs) in zip(self.held[key], other, strict=False):
                    theirs[: mine.nbytes] = mine[: theirs.nbytes]
            return fence

    assert red("test_keeps_requests_apart", Mutant)


def test_a_key_that_is_overwritten() -> None:
    class Mutant(Keeps):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            self.held.pop(key, None)
            return super().save(key, blocks)

    assert red("test_keys_in_use_are_refused", Mutant)


def test_a_failed_save_that_is_kept() -> None:
    class Mutant(Keeps):
        def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            try:
                return super().save(key, blocks)
            except RuntimeError:
                self.held[key] = [(block, np.zeros(block.nbytes, np.uint8)) for block in blocks]
                raise

    assert red("test_a_failed_save_keeps_nothing", Mutant)


def test_a_failed_restore_that_loses_the_bytes() -> None:
    class Mutant(Keeps):
        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            held = self.held.pop(key)
            self.held[key] = held
            try:
                return super().restore(key, blocks)
            except RuntimeError:
                del self.held[key]
                raise

    assert red("test_a_failed_restore_may_be_repeated", Mutant)


def test_bytes_that_are_not_counted() -> None:
    class Mutant(Keeps):
        @property
        def bytes_held(self) -> int:
            return len(self.held)

    assert red("test_accounts_for_its_bytes", Mutant)


def test_unknown_keys_that_are_ignored() -> None:
    class Mutant(Keeps):
        def drop(self, key: str) -> None:
            self.held.pop(key, None)

    assert red("test_dropped_keys_are_gone", Mutant)


def test_other_blocks_that_are_accepted() -> None:
    class Mutant(Keeps):
        def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
            for block, (_, data) in zip(blocks, self.held[key], strict=False):
                block.copy_in(data[: block.nbytes])
            return DONE

    assert red("test_other_blocks_are_refused", Mutant)


def test_a_component_that_is_not_carried_is_skipped_with_its_reason() -> None:
    class Mutant(Keeps):
        def carries(self, layout: Layout, component: str) -> Support:
            return unsupported("no index keys") if component.endswith("index_key") else Support(True)

    checks = run([Case("backups", "mutant", BackupSuite, {"new_backup": lambda: Mutant})])
    assert {(check.outcome, check.reason) for check in checks} == {("skipped", "full/index_key: no index keys")}


def test_a_refusal_without_a_reason_is_a_failure() -> None:
    class Mutant(Keeps):
        def carries(self, layout: Layout, component: str) -> Support:
            return Support(False)

    checks = run([Case("backups", "mutant", BackupSuite, {"new_backup": lambda: Mutant})])
    assert {check.outcome for check in checks} == {"failed"}
