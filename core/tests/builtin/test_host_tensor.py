"""What host_tensor alone does: recycled buffers, and copies of other devices that end later."""

from types import ModuleType

import numpy as np
import pytest

from kvcore.builtin.backups.host_tensor import HostTensorBackup
from kvcore.contract import Fence
from kvcore.errors import BackupError


def test_buffers_are_recycled_within_their_bound(shelf: ModuleType) -> None:
    backup = HostTensorBackup(recycle_bytes=100)
    for key in ("a", "b", "c"):
        backup.save(key, shelf.blocks(1))
    for key in ("a", "b", "c"):
        backup.drop(key)
    assert backup.bytes_spare == 64
    again = shelf.blocks(7, ((2, 8), (2, 8)))
    backup.save("d", again)  # takes the larger spare buffer
    assert backup.bytes_spare == 0
    assert backup.bytes_held == 32
    target = shelf.poisoned(again)
    backup.restore("d", target)
    np.testing.assert_array_equal(target[1].data, again[1].data)


class DeviceCopy(Fence):
    """A copy that is queued when it is issued and runs when someone waits."""

    def __init__(self, work: object, *, fails: bool = False) -> None:
        self.work, self.over, self.fails = work, False, fails

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        if not self.over:
            self.over = True
            self.work()  # type: ignore[operator]
        if self.fails:
            raise RuntimeError("device is gone")


def on_device(block: object, *, fails: bool = False) -> object:
    """Make a block's copies as late as a device's."""
    now = block.copy_out  # type: ignore[attr-defined]
    block.copy_out = lambda dst: DeviceCopy(lambda: now(dst), fails=fails)  # type: ignore[attr-defined]
    return block


def test_late_copies_end_before_their_buffer_is_used_again(shelf: ModuleType) -> None:
    backup, first = HostTensorBackup(), shelf.blocks(1)
    fence = backup.save("a", [on_device(block) for block in first])
    assert not fence.done()
    backup.drop("a")  # aborted while it is copied: its buffer goes to the next one
    assert fence.done()
    second = shelf.blocks(2)
    backup.save("b", [on_device(block) for block in second])
    target = shelf.poisoned(second)
    backup.restore("b", target)  # waits for the save
    for want, got in zip(second, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)
    backup.save("c", [on_device(block) for block in first])
    backup.close()


def test_late_failure_keeps_nothing(shelf: ModuleType) -> None:
    backup, broken = HostTensorBackup(), shelf.blocks(1)
    fence = backup.save("r", [on_device(broken[0]), on_device(broken[1], fails=True)])
    assert backup.bytes_held == 64
    with pytest.raises(BackupError, match="nothing is kept"):
        fence.wait()
    assert backup.bytes_held == 0
    with pytest.raises(BackupError, match="no such backup"):
        backup.drop("r")
