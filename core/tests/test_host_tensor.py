"""The host_tensor backend on its own: exact bytes, recycled buffers, failures that leave nothing behind."""

import numpy as np
import pytest

from kvcore.builtin.host_tensor import HostTensorBackup
from kvcore.contract import DONE, Fence, UnitBlock
from kvcore.errors import BackupError


class Block(UnitBlock):
    """A block over a plain array; ``fail`` makes its copies raise."""

    def __init__(self, component: str, data: np.ndarray, *, fail: bool = False) -> None:
        self.group, self.components = "full", (component,)
        self.data, self.num_units, self.nbytes, self.fail = data, 1, data.nbytes, fail

    def copy_out(self, dst: np.ndarray) -> Fence:
        if self.fail:
            raise RuntimeError("copy engine is gone")
        dst[:] = self.data
        return DONE

    def copy_in(self, src: np.ndarray) -> Fence:
        if self.fail:
            raise RuntimeError("copy engine is gone")
        self.data[:] = src
        return DONE


def blocks(seed: int, sizes: tuple[int, ...] = (48, 16)) -> list[Block]:
    rng = np.random.default_rng(seed)
    return [Block(f"c{i}", rng.integers(0, 255, size, dtype=np.uint8)) for i, size in enumerate(sizes)]


def poisoned(like: list[Block]) -> list[Block]:
    return [Block(b.components[0], np.full(b.nbytes, 0xFF, np.uint8)) for b in like]


@pytest.mark.parametrize("reverse", [False, True])
def test_restores_every_block_in_any_order(reverse: bool) -> None:
    backup, saved = HostTensorBackup(), blocks(1)
    assert backup.save("r", saved).done()
    target = poisoned(saved)
    assert backup.restore("r", target[::-1] if reverse else target).done()
    for want, got in zip(saved, target, strict=True):
        np.testing.assert_array_equal(got.data, want.data)


def test_bytes_are_accounted_and_dropped() -> None:
    backup = HostTensorBackup()
    backup.save("a", blocks(1))
    backup.save("b", blocks(2))
    assert backup.bytes_held == 128
    backup.drop("a")
    assert backup.bytes_held == 64
    assert backup.bytes_spare == 64
    with pytest.raises(BackupError, match="no such backup"):
        backup.restore("a", blocks(1))
    with pytest.raises(BackupError, match="no such backup"):
        backup.drop("a")


def test_buffers_are_recycled_within_their_bound() -> None:
    backup = HostTensorBackup(recycle_bytes=100)
    for key in ("a", "b", "c"):
        backup.save(key, blocks(1))
    for key in ("a", "b", "c"):
        backup.drop(key)
    assert backup.bytes_spare == 64
    again = blocks(7, (16, 16))
    backup.save("d", again)  # takes the larger spare buffer
    assert backup.bytes_spare == 0
    assert backup.bytes_held == 32
    target = poisoned(again)
    backup.restore("d", target)
    np.testing.assert_array_equal(target[1].data, again[1].data)


def test_failed_save_keeps_nothing() -> None:
    backup, broken = HostTensorBackup(), blocks(1)
    broken[1].fail = True
    with pytest.raises(BackupError, match="nothing is kept") as caught:
        backup.save("r", broken)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert backup.bytes_held == 0
    broken[1].fail = False
    backup.save("r", broken)  # the key is free


def test_failed_restore_may_be_repeated() -> None:
    backup, saved = HostTensorBackup(), blocks(1)
    backup.save("r", saved)
    target = poisoned(saved)
    target[1].fail = True
    with pytest.raises(RuntimeError):
        backup.restore("r", target)
    target[1].fail = False
    backup.restore("r", target)
    np.testing.assert_array_equal(target[1].data, saved[1].data)


def test_refuses_blocks_that_were_not_saved_and_keys_in_use() -> None:
    backup = HostTensorBackup()
    backup.save("r", blocks(1))
    with pytest.raises(BackupError, match="key is in use"):
        backup.save("r", blocks(2))
    for wrong in (blocks(1, (48,)), blocks(1, (16, 48)), blocks(1, (48, 16, 16))):
        target = poisoned(wrong)
        with pytest.raises(BackupError, match="not those saved"):
            backup.restore("r", target)
        assert all((b.data == 0xFF).all() for b in target)
