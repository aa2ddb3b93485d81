"""What the backends in host memory share: which bytes of a save a block gets back, and copies that fail as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from kvcore.contract import Fence, UnitBlock, all_fences
from kvcore.errors import BackupError

Part = tuple[str, tuple[str, ...], int, int]
"""What a block is known by: group, components, units, bytes."""


def part_of(block: UnitBlock) -> Part:
    """The part a block is."""
    return (block.group, block.components, block.num_units, block.nbytes)


def offsets_of(key: str, saved: Sequence[Part], blocks: Sequence[UnitBlock]) -> list[int]:
    """Where the bytes of each block start in those saved. BackupError where the blocks are not the saved ones.

    Blocks come in any order. Several of one part (unit ranges alike) get their bytes in the order they were saved in.
    """
    starts: dict[Part, list[int]] = {}
    offset = 0
    for part in saved:
        starts.setdefault(part, []).append(offset)
        offset += part[-1]
    asked = [part_of(block) for block in blocks]
    if sorted(asked) != sorted(saved):
        raise BackupError("blocks to restore are not those saved", key=key, expected=list(saved), got=asked)
    return [starts[part].pop(0) for part in asked]


def copy_all(copies: Iterable[Callable[[], Fence]]) -> Fence:
    """Begin every copy and return the fence of all. Where one cannot begin, the others have ended when it raises."""
    begun: list[Fence] = []
    try:
        for copy in copies:
            begun.append(copy())
    except BaseException:
        for fence in begun:
            try:
                fence.wait()
            except Exception:  # noqa: BLE001 -- the first failure is the one raised
                continue
        raise
    return all_fences(begun)
