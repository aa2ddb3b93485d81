"""One call at a time: how a cache, its steps and its sides behave when several threads call them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """The lock that a cache shares with its steps and sides; the thread that holds it may call on."""

    def __init__(self) -> None:
        self.lock = threading.RLock()


class TakesTurns(Protocol):
    """What :func:`in_turn` needs: ``_turns``."""

    _turns: Turns


SelfT = TypeVar("SelfT", bound=TakesTurns)


def in_turn(method: Callable[Concatenate[SelfT, P], R]) -> Callable[Concatenate[SelfT, P], R]:
    """Have calls of a method wait for a call of the same cache that another thread is inside of."""

    @functools.wraps(method)
    def call(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns.lock:
            return method(self, *args, **kwargs)

    return call
