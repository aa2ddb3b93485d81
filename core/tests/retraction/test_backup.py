"""What every backend in host memory does: exact bytes, accounting, failures that leave nothing behind."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest

from kvcore.contract import Backup, Fence, UnitBlock
from kvcore.errors import BackupError

NAMES = ["host_tensor", "host_pool", "host_pool inline", "host_pool tiny blocks"]


@pytest.fixture(params=NAMES)
def backup(request: pytest.FixtureRequest, shelf: ModuleType) -> Iterator[Backup]:
    backup: Backup = shelf.BACKENDS[request.param]()
    yield backup
    backup.close()


def test_every_backend_is_tried(shelf: ModuleType) -> None:
    assert list(shelf.BACKENDS) == NAMES


@pytest.mark.parametrize("cuttable", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_restores_every_block_in_any_order(backup: Backup, shelf: ModuleType, reverse: bool, cuttable: bool) -> None:
    saved = shelf.blocks(1, ((3, 48), (1, 7), (5, 9), (0, 6), (2, 100)), cuttable=cuttable)
    backup.save("r", saved).wait()
    backup.save("s", shelf.blocks(2)).wait()
    target = shelf.poisoned(saved)
    backup.restore("r", target[::-1] if reverse else target).wait()
    for want, got in zip(saved, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


def test_blocks_alike_come_back_in_the_order_they_were_saved_in(backup: Backup, shelf: ModuleType) -> None:
    """Unit ranges of one component and one size: nothing but their order tells them apart."""
    saved = shelf.blocks(1, ((2, 8), (2, 8), (2, 8)))
    for block in saved:
        block.components = ("same",)
    backup.save("r", saved).wait()
    target = shelf.poisoned(saved)
    for block in target:
        block.components = ("same",)
    backup.restore("r", target).wait()
    for want, got in zip(saved, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


def test_bytes_are_accounted_and_dropped(backup: Backup, shelf: ModuleType) -> None:
    backup.save("a", shelf.blocks(1)).wait()
    backup.save("b", shelf.blocks(2)).wait()
    assert backup.bytes_held == 128
    backup.drop("a")
    assert backup.bytes_held == 64
    with pytest.raises(BackupError, match="no such backup"):
        backup.restore("a", shelf.blocks(1))
    with pytest.raises(BackupError, match="no such backup"):
        backup.drop("a")


def save(backup: Backup, key: str, blocks: list[UnitBlock]) -> None:
    backup.save(key, blocks).wait()


def restore(backup: Backup, key: str, blocks: list[UnitBlock]) -> None:
    backup.restore(key, blocks).wait()


def test_failed_save_keeps_nothing(backup: Backup, shelf: ModuleType) -> None:
    broken = shelf.blocks(1)
    broken[1].fail = True
    with pytest.raises(BackupError, match="nothing is kept") as caught:
        save(backup, "r", broken)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert caught.value.fields["key"] == "r"
    assert backup.bytes_held == 0
    with pytest.raises(BackupError, match="no such backup"):
        backup.drop("r")
    broken[1].fail = False
    save(backup, "r", broken)  # the key is free


def test_failed_restore_may_be_repeated(backup: Backup, shelf: ModuleType) -> None:
    saved = shelf.blocks(1)
    save(backup, "r", saved)
    target = shelf.poisoned(saved)
    target[1].fail = True
    with pytest.raises(BackupError, match="restoring") as caught:
        restore(backup, "r", target)
    assert isinstance(caught.value.__cause__, RuntimeError)
    target[1].fail = False
    restore(backup, "r", target)
    restore(backup, "r", target)  # the bytes stay until they are dropped
    for want, got in zip(saved, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


def test_refuses_blocks_that_were_not_saved_and_keys_in_use(backup: Backup, shelf: ModuleType) -> None:
    save(backup, "r", shelf.blocks(1))
    with pytest.raises(BackupError, match="key is in use"):
        backup.save("r", shelf.blocks(2))
    wrong = (((3, 16),), ((3, 16), (2, 24)), ((3, 16), (2, 8), (2, 8)), ((6, 8), (2, 8)))
    for shapes in wrong:
        target = shelf.poisoned(shelf.blocks(1, shapes))
        with pytest.raises(BackupError, match="not those saved"):
            backup.restore("r", target)
        assert all((b.data == 0xFF).all() for b in target)


def test_closing_forgets_everything_and_may_be_repeated(backup: Backup, shelf: ModuleType) -> None:
    save(backup, "r", shelf.blocks(1))
    backup.close()
    backup.close()
    assert backup.bytes_held == 0
    with pytest.raises(BackupError):
        backup.restore("r", shelf.blocks(1))


def test_the_fence_of_several_copies_is_done_when_one_of_them_fails() -> None:
    """Quarantine ends with the last copy, not with the first failure."""
    from kvcore.contract import all_fences

    class Step(Fence):
        def __init__(self, *, fails: bool) -> None:
            self.over, self.fails = False, fails

        def done(self) -> bool:
            return self.over

        def wait(self) -> None:
            self.over = True
            if self.fails:
                raise RuntimeError("copy engine is gone")

    steps = [Step(fails=True), Step(fails=False)]
    fence = all_fences(steps)
    with pytest.raises(RuntimeError):
        fence.wait()
    assert fence.done()
    assert all(step.over for step in steps)
