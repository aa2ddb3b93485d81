"""What every plugin says of itself, what is supported and why not, and fences (no torch at import)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NoReturn

import msgspec
import pluggy

from kvcore.errors import UnsupportedError

hookimpl = pluggy.HookimplMarker("kvcore")
"""Marks a plugin's hook implementations; the hooks are those of :mod:`kvcore.plugins.hookspecs`."""

CONTRACT: tuple[int, int] = (1, 0)
"""Version of this module. A plugin of another major version is refused."""


class PluginInfo(msgspec.Struct, frozen=True):
    """Exposed by every plugin module as ``PLUGIN``.

    Attributes:
        name: equal to the name of its entry point in the group ``kvcore``.
        contract: the :data:`CONTRACT` it was written for.
        requires: names of plugins that must be enabled with it.
        summary: one line for ``kvcore plugins``.
    """

    name: str
    contract: tuple[int, int]
    requires: tuple[str, ...] = ()
    summary: str = ""


class Unique:
    """Owns memory, or a place in a protocol, once: :mod:`copy` and :mod:`pickle` are refused with UnsupportedError.

    A copy would own the same descriptors and units a second time, and give them back twice.
    """

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        kind = type(self).__name__
        raise UnsupportedError(
            f"a {kind} is neither copied nor pickled",
            kind=kind,
            remedy="fork a request to share its prefix; create another cache for memory of its own",
        )


class Support(msgspec.Struct, frozen=True):
    """Whether something is supported, and why not. Every capability is FULL or unsupported with a reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def require(self, message: str, *, remedy: str = "", **fields: Any) -> None:
        """Raise :class:`UnsupportedError` with the reason unless supported."""
        if not self.ok:
            raise UnsupportedError(message, remedy=remedy, reason=self.reason, **fields)


FULL = Support(True)


def unsupported(reason: str) -> Support:
    """Return a refusal with its reason."""
    return Support(False, reason)


class Fence(ABC):
    """A point in the order of work on a device: everything issued before it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work is finished, without waiting."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work is finished. Raises where it failed; it is over then too: ``done()`` is True."""


class _Done(Fence):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def __repr__(self) -> str:
        return "DONE"


DONE: Fence = _Done()
"""The fence of work that is finished: what every op on the CPU returns."""


class _AllFences(Fence):
    def __init__(self, fences: Sequence[Fence]) -> None:
        self._fences = tuple(fences)

    def done(self) -> bool:
        return all(fence.done() for fence in self._fences)

    def wait(self) -> None:
        failure: Exception | None = None
        for fence in self._fences:
            try:
                fence.wait()
            except Exception as error:  # noqa: BLE001 -- raised below, once nothing is under way any more
                failure = failure or error
        if failure is not None:
            raise failure


def all_fences(fences: Sequence[Fence]) -> Fence:
    """Return the fence of all of ``fences``: :data:`DONE` where every one is finished already."""
    return DONE if all(fence.done() for fence in fences) else _AllFences(fences)
