"""One call at a time: how a cache, its steps and its sides behave when several threads call them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from kvcore.errors import StaleHandleError

P = ParamSpec("P")
R = TypeVar("R")


class Turns:
    """What a cache shares with its steps and sides.

    Attributes:
        lock: the thread that holds it may call on.
        closed: whether the memory is given back.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closed = False

    def demand_open(self, call: str) -> None:
        """StaleHandleError once the cache is closed."""
        if self.closed:
            raise StaleHandleError("the cache is closed", call=call, remedy="create another one")


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


def while_open(method: Callable[Concatenate[SelfT, P], R]) -> Callable[Concatenate[SelfT, P], R]:
    """:func:`in_turn`, and StaleHandleError once the cache is closed."""

    @functools.wraps(method)
    def call(self: SelfT, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._turns.lock:
            self._turns.demand_open(method.__name__)
            return method(self, *args, **kwargs)

    return call
