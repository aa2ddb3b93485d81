"""What both ends of a transfer share, as an engine sees them, and what they are opened with."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Generic

from kvcore.config import TransferConfig
from kvcore.contract import Unique
from kvcore.engine.turns import Turns, in_turn
from kvcore.errors import RequestError, TransferError, UnknownRequestError
from kvcore.layout.moves import Bytes
from kvcore.memory.store import Store
from kvcore.requests.manager import Manager
from kvcore.transfer.session.base import EventT, TransferOptions
from kvcore.transfer.wire.endpoint import EndpointStats
from kvcore.transfer.wire.loop import Endpoint


class Side(Unique, ABC, Generic[EventT]):
    """What both ends share: the endpoint, and events that reach the engine once their units are seen to."""

    def __init__(
        self,
        link: Endpoint[EventT],
        manager: Manager,
        store: Store,
        turns: Turns | None,
        on_close: Callable[[Side[Any]], None],
    ) -> None:
        self._turns = turns or Turns()
        self._link = link
        self._on_close = on_close
        self._manager = manager
        self._store = store
        self._queue: deque[EventT] = deque()

    @in_turn
    def events(self) -> list[EventT]:
        """Take what has happened; the units of what is over are released, or ready to decode."""
        self._drain()
        taken = list(self._queue)
        self._queue.clear()
        return taken

    def wait_event(self, timeout_s: float) -> bool:
        """Wait until :meth:`events` has something; False when the time is over or the endpoint is closed."""
        if not self._queue:
            event = self._link.wait_event(timeout_s)
            if event is not None:
                self._take(event)
        return bool(self._queue)

    def stats(self) -> EndpointStats:
        """Bytes and times so far."""
        return self._link.stats()

    @in_turn
    def close(self) -> None:
        """Abort what is under way and leave nothing behind. Idempotent."""
        self._link.close()
        self._drain()
        self._on_close(self)

    @property
    @abstractmethod
    def holds_units(self) -> bool:
        """Whether units are held for a transfer: of a closed side, because reads into them may never end."""

    @in_turn
    def let_go(self, request_id: str) -> None:
        """The engine takes a request away: end its transfer, if it is in one.

        Holding its units is not enough: a fork may be their only owner now and write into them in place.
        """
        if self._moves(request_id):
            # Over already, or an endpoint that has failed: either way it is never committed.
            with contextlib.suppress(UnknownRequestError, TransferError):
                self._abort(request_id, "its engine took it away")
            self._disown(request_id)

    @in_turn
    def refuse_steps(self, request_ids: Iterable[str]) -> None:
        """Raise RequestError for a request that must not be computed on now."""
        for request_id in request_ids:
            if self._frozen(request_id):
                with contextlib.suppress(TransferError):  # an endpoint that has failed says so where it is used
                    self._drain()
            if self._frozen(request_id):
                raise RequestError(
                    "the request is in a transfer, nothing may be written to it",
                    request=request_id,
                    remedy="wait for its final event, or step a fork of it",
                )

    @in_turn
    def refuse_rollback(self, request_id: str) -> None:
        """Raise RequestError for a request in a transfer: what was sent of it must not be computed again differently."""
        if self._moves(request_id):
            with contextlib.suppress(TransferError):
                self._drain()
        if self._moves(request_id):
            raise RequestError(
                "the request is in a transfer, its tokens cannot be taken back",
                request=request_id,
                remedy="abort the transfer, or wait for its final event",
            )

    def _drain(self) -> None:
        for event in self._link.events():
            self._take(event)

    @in_turn
    def _take(self, event: EventT) -> None:
        self._apply(event)
        self._queue.append(event)

    @abstractmethod
    def _apply(self, event: EventT) -> None:
        """See to the units that an event is about."""

    @abstractmethod
    def _moves(self, request_id: str) -> bool:
        """Whether a request is in a transfer: begun, or being filled."""

    @abstractmethod
    def _frozen(self, request_id: str) -> bool:
        """Whether bytes of a request must not change: it is offered to the end, or being filled."""

    def _disown(self, request_id: str) -> None:
        """The id may be in use again before the final event comes, which must not release the new request."""

    @abstractmethod
    def _abort(self, request_id: str, reason: str) -> None:
        """Give a request up; its final event follows."""


def forget(side: Side[Any]) -> None:
    """Nobody keeps the side."""


def options_of(config: TransferConfig) -> TransferOptions:
    return TransferOptions(
        lease_s=config.lease_s,
        heartbeat_s=config.heartbeat_s,
        peer_timeout_s=config.peer_timeout_s,
        ask_timeout_s=config.ask_timeout_s,
        read_timeout_s=config.read_timeout_s,
        quiesce_s=config.quiesce_s,
        hello_timeout_s=config.hello_timeout_s,
    )


def arrays_of(store: Store) -> dict[str, Bytes]:
    """The arenas for checksums; raises UnsupportedError for memory the CPU cannot address."""
    return {group: arena.array() for group, arena in store.arenas().items()}
