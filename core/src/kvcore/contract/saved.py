"""What every backup does alike: which bytes of a save a block gets back, and copies that fail as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcore.contract.backups import UnitBlock
from kvcore.contract.base import Fence, all_fences
from kvcore.errors import BackupError


class SavedPart(NamedTuple):
    """What a block is known by when it comes back: all that a backup keeps of it besides its bytes.

    A plain tuple of words and numbers, so that it may be written down (JSON) and compared.

    Attributes:
        group, components, num_units, nbytes: those of the :class:`UnitBlock`.
    """

    group: str
    components: tuple[str, ...]
    num_units: int
    nbytes: int


def saved_parts(blocks: Iterable[UnitBlock]) -> tuple[SavedPart, ...]:
    """The parts that ``blocks`` are, in their order: what ``save`` keeps for :func:`saved_offsets`."""
    return tuple(SavedPart(block.group, block.components, block.num_units, block.nbytes) for block in blocks)


def saved_offsets(key: str, saved: Sequence[SavedPart], blocks: Sequence[UnitBlock]) -> list[int]:
    """Where the bytes of each block start, if those of ``saved`` lie one behind the other in one buffer.

    Blocks come in any order. Several of one part (unit ranges alike) get their bytes in the order they were saved in.

    Args:
        key: named in the error.
        saved: what :func:`saved_parts` gave for the blocks that were saved.
        blocks: those to restore (or to save: then the offsets are where to write).

    Returns an offset a block, in the order of ``blocks``. Raises BackupError, before any byte is copied, where the
    blocks are not those saved: one is missing or left over, or has other components, units or bytes.
    """
    starts: dict[SavedPart, list[int]] = {}
    offset = 0
    for part in saved:
        starts.setdefault(part, []).append(offset)
        offset += part.nbytes
    asked = saved_parts(blocks)
    if sorted(asked) != sorted(saved):
        raise BackupError(
            "blocks to restore are not those saved",
            key=key,
            expected=list(map(tuple, saved)),
            got=list(map(tuple, asked)),
        )
    return [starts[part].pop(0) for part in asked]


def copy_all(copies: Iterable[Callable[[], Fence]]) -> Fence:
    """Begin every copy and return the fence of all.

    Args:
        copies: calls such as ``partial(block.copy_out, view)``, made in their order.

    Where one cannot begin, the others have ended when its exception leaves this function: no copy still touches memory
    that the caller is about to give up.
    """
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
