"""The requests a sender has begun, found by id, by who reads them and by when their leases end (no I/O).

What is asked of all requests together is kept up to date with each of them, so that no call costs more the more requests
there are.
"""

from __future__ import annotations

from kvcore.transfer.session.base import Peer
from kvcore.transfer.session.deadlines import Deadlines, KeyT
from kvcore.transfer.session.outgoing import Ask, Ends, Offered, Outgoing, PeerState, Reader


class Held:
    """Requests that are begun and not over.

    Attributes:
        units: what was offered of them, each range counted once per component set.
        leases: the earliest lease of each finished prompt, or a time before it: leases are only ever renewed.
    """

    def __init__(self) -> None:
        self._records: dict[str, Outgoing] = {}
        self._read_by: dict[Peer, dict[str, None]] = {}
        self._lacking: dict[str, dict[str, None]] = {}
        """By engine: requests that some of its ranks have asked for, and not all."""
        self.leases: Deadlines[str] = Deadlines()
        self.units = 0

    def __contains__(self, request: str) -> bool:
        return request in self._records

    def get(self, request: str) -> Outgoing | None:
        """The request of an id."""
        return self._records.get(request)

    def ids(self) -> tuple[str, ...]:
        """Every id."""
        return tuple(self._records)

    def records(self) -> list[Outgoing]:
        """Every request."""
        return list(self._records.values())

    def begin(self, request: str, num_tokens: int, token: bytes) -> Outgoing:
        """A request begins."""
        record = self._records[request] = Outgoing(request, num_tokens, token)
        return record

    def attach(self, record: Outgoing, ask: Ask, state: PeerState, lease_ends: float) -> None:
        """A rank reads a request from now on; ``lease_ends`` is its lease where the prompt is complete."""
        peer = ask.asker.peer
        record.engine, record.num_readers = ask.engine, state.num_ranks
        reader = record.readers[peer] = Reader(ask.asker, ask.start == ask.stop, ask.layerwise)
        if record.complete:
            reader.lease_ends = lease_ends
        self._read_by.setdefault(peer, {})[record.request] = None
        if record.everyone_asked:
            _discard(self._lacking, record.engine, record.request)
        else:
            self._lacking.setdefault(record.engine, {})[record.request] = None

    def offer(self, record: Outgoing, offer: Offered, ends: Ends) -> None:
        """Units of a request are offered."""
        record.ends.update(ends)
        record.offers.append(offer)
        record.offered_tokens = offer.stop
        units = sum(payload.num_units for payload in offer.payloads)
        record.units += units
        self.units += units

    def complete(self, record: Outgoing, engine_data: bytes, lease_ends: float) -> None:
        """Everything of a request is offered: leases begin."""
        record.complete = True
        record.engine_data = engine_data
        record.lease_ends = lease_ends
        for reader in record.readers.values():
            reader.lease_ends = lease_ends
        self.leases.set(record.request, lease_ends)

    def remove(self, record: Outgoing) -> None:
        """A request is over."""
        del self._records[record.request]
        self.units -= record.units
        self.leases.drop(record.request)
        for peer in record.readers:
            _discard(self._read_by, peer, record.request)
        _discard(self._lacking, record.engine, record.request)

    def expired(self, now: float) -> list[Outgoing]:
        """Requests of which somebody's lease has ended."""
        ended = []
        for request in self.leases.due(now):
            record = self._records[request]
            lease = record.lease()
            if lease is None:
                continue
            if now >= lease:
                ended.append(record)
            else:
                self.leases.set(request, lease)
        return ended

    def of_peer(self, peer: Peer, state: PeerState | None) -> list[Outgoing]:
        """Requests that a rank reads and has not acknowledged, or that wait for it to ask."""
        found = [self._records[request] for request in self._read_by.get(peer, ())]
        waits = self._lacking.get(state.engine, ()) if state is not None else ()
        return [record for record in found if not record.readers[peer].acked] + [
            record for record in map(self._records.__getitem__, waits) if peer not in record.readers
        ]


def _discard(index: dict[KeyT, dict[str, None]], key: KeyT, request: str) -> None:
    requests = index.get(key)
    if requests is not None:
        requests.pop(request, None)
        if not requests:
            del index[key]
