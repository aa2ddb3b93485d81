"""Asks for requests that are not begun, and ends of requests that not every rank has heard of (no I/O)."""

from __future__ import annotations

from dataclasses import dataclass

from kvcore.errors import KVCoreError
from kvcore.transfer.session.base import Peer
from kvcore.transfer.session.outgoing import Ask, PeerState

_MAX_ENDED = 4096
"""Most ended requests remembered for asks that come too late."""


@dataclass
class _Ended:
    """A request that ended before every rank that may want it had asked.

    Attributes:
        error: why.
        told: ``(engine, rank)`` of those who know.
        token: of the request; others are not told.
    """

    error: KVCoreError
    told: set[tuple[str, int]]
    token: bytes


class Waiting:
    """What a sender remembers of requests that are not begun. An ask may come before, during or after prefill."""

    def __init__(self) -> None:
        self._asks: dict[str, dict[Peer, Ask]] = {}
        self._ended: dict[str, _Ended] = {}

    def begin(self, request: str) -> list[Ask]:
        """The request begins: take its asks, forget how an earlier one of its id ended."""
        self._ended.pop(request, None)
        return list(self._asks.pop(request, {}).values())

    def get(self, request: str, peer: Peer) -> Ask | None:
        """A peer's ask."""
        return self._asks.get(request, {}).get(peer)

    def engines(self, request: str, token: bytes) -> set[str]:
        """Engines whose ranks have asked with this token. Who asks with another one cannot keep them from it."""
        return {ask.engine for ask in self._asks.get(request, {}).values() if ask.token == token}

    def add(self, request: str, ask: Ask) -> None:
        """Remember an ask."""
        self._asks.setdefault(request, {})[ask.asker.peer] = ask

    def drop(self, request: str, engine: str) -> list[Ask]:
        """Take the asks of all ranks of an engine: none of them can be served without the others."""
        asks = self._asks.get(request, {})
        dropped = [asks.pop(peer) for peer, ask in list(asks.items()) if ask.engine == engine]
        if not asks:
            self._asks.pop(request, None)
        return dropped

    def asked_by(self, peer: Peer) -> list[tuple[str, Ask]]:
        """Every ask of a peer."""
        return [(request, asks[peer]) for request, asks in self._asks.items() if peer in asks]

    def asked_before(self, when: float) -> list[tuple[str, Ask]]:
        """Every ask that is as old as that."""
        return [(request, a) for request, asks in self._asks.items() for a in asks.values() if a.asked_at <= when]

    def end(self, request: str, error: KVCoreError, told: set[tuple[str, int]], token: bytes) -> None:
        """A request ended before everybody had asked: an ask still on its way need not wait for a second begin."""
        self._ended[request] = _Ended(error, told, token)
        while len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def end_for(self, request: str, state: PeerState, token: bytes) -> KVCoreError | None:
        """How the request ended that a rank asks for, once for every rank; None where it has not."""
        ended, who = self._ended.get(request), (state.engine, state.rank)
        if (
            ended is None
            or ended.token != token
            or who in ended.told
            or any(engine != state.engine for engine, _ in ended.told)
        ):
            return None
        ended.told.add(who)
        if len(ended.told) == state.num_ranks:
            del self._ended[request]
        return ended.error

    def clear(self) -> None:
        """Forget all asks."""
        self._asks.clear()
