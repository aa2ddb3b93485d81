"""Asks for requests that are not begun, and ends of requests that not every rank has heard of (no I/O)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvcore.errors import KVCoreError, TransferError
from kvcore.transfer.session.base import Peer
from kvcore.transfer.session.deadlines import Deadlines
from kvcore.transfer.session.outgoing import Ask, PeerState

MAX_WAITING_ASKS = 4096
"""Most asks of one peer that wait for requests that are not begun."""

MAX_WAITING_TOTAL = 65536
"""Most asks of all peers that wait for requests that are not begun."""

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
    """What a sender remembers of requests that are not begun. An ask may come before, during or after prefill.

    Attributes:
        deadlines: of the asks, by ``(request, peer)``.
    """

    def __init__(self) -> None:
        self._asks: dict[str, dict[Peer, Ask]] = {}
        self._by_peer: dict[Peer, dict[str, Ask]] = {}
        self.deadlines: Deadlines[tuple[str, Peer]] = Deadlines()
        self._ended: OrderedDict[str, _Ended] = OrderedDict()

    def begin(self, request: str) -> list[Ask]:
        """The request begins: take its asks, forget how an earlier one of its id ended."""
        self._ended.pop(request, None)
        asks = list(self._asks.get(request, {}).values())
        for ask in asks:
            self._remove(request, ask)
        return asks

    def get(self, request: str, peer: Peer) -> Ask | None:
        """A peer's ask."""
        return self._by_peer.get(peer, {}).get(request)

    def engines(self, request: str, token: bytes) -> set[str]:
        """Engines whose ranks have asked with this token. Who asks with another one cannot keep them from it."""
        return {ask.engine for ask in self._asks.get(request, {}).values() if ask.token == token}

    def add(self, request: str, ask: Ask, until: float) -> None:
        """Remember an ask until then. Raises TransferError where its peer, or all of them, have too many waiting."""
        peer = ask.asker.peer
        mine = len(self._by_peer.get(peer, ()))
        for scope, count, limit in (
            ("peer", mine, MAX_WAITING_ASKS),
            ("sender", len(self.deadlines), MAX_WAITING_TOTAL),
        ):
            if count >= limit:
                raise TransferError(
                    "too many asks wait for requests that were not begun", request=request, limit=limit, scope=scope,
                    remedy="ask nearer to when the sender's engine begins the request",
                )  # fmt: skip
        self._asks.setdefault(request, {})[peer] = ask
        self._by_peer.setdefault(peer, {})[request] = ask
        self.deadlines.set((request, peer), until)

    def drop(self, request: str, engine: str) -> list[Ask]:
        """Take the asks of all ranks of an engine: none of them can be served without the others."""
        dropped = [ask for ask in self._asks.get(request, {}).values() if ask.engine == engine]
        for ask in dropped:
            self._remove(request, ask)
        return dropped

    def asked_by(self, peer: Peer) -> list[tuple[str, Ask]]:
        """Every ask of a peer."""
        return list(self._by_peer.get(peer, {}).items())

    def due(self, now: float) -> list[tuple[str, Ask]]:
        """Every ask that has waited for as long as it may."""
        return [(request, self._by_peer[peer][request]) for request, peer in self.deadlines.due(now)]

    def end(self, request: str, error: KVCoreError, told: set[tuple[str, int]], token: bytes) -> None:
        """A request ended before everybody had asked: an ask still on its way need not wait for a second begin."""
        self._ended[request] = _Ended(error, told, token)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)

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
        self._by_peer.clear()
        self.deadlines.clear()

    def _remove(self, request: str, ask: Ask) -> None:
        peer = ask.asker.peer
        self.deadlines.drop((request, peer))
        asks, mine = self._asks[request], self._by_peer[peer]
        del asks[peer], mine[request]
        if not asks:
            del self._asks[request]
        if not mine:
            del self._by_peer[peer]
