"""The sending (prefill) side of the protocol, one rank of it: a pure state machine (no I/O, no threads).

It holds what was offered until every rank of the receiver acknowledges the commit, the request is aborted, a peer is
lost, or a lease ends; each request that was begun ends in exactly one ``SendDone`` or ``SendFailed``. A commit is given
only when every rank of the engine that asks has everything, so that no rank accepts what another could not pull.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial

from kvcore.errors import (
    DuplicateRequestError,
    KVCoreError,
    PeerLostError,
    ProtocolError,
    RequestError,
    TransferAbortedError,
    TransferError,
    TransferExpiredError,
    UnknownRequestError,
)
from kvcore.log import get_logger
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import (
    Clock,
    Peer,
    SendDone,
    SendFailed,
    TransferOptions,
    add_bytes,
    left,
    mistaken,
)
from kvcore.transfer.session.checksums import SenderChecksums
from kvcore.transfer.session.greeting import Greeter
from kvcore.transfer.session.held import Held
from kvcore.transfer.session.outgoing import (
    Ask,
    Asker,
    Offered,
    Outgoing,
    PeerState,
    Reader,
    check_ask,
    check_offer,
    check_payloads,
    check_pulled,
    check_pulled_all,
    check_units,
    commit_message,
    failure_message,
    offer_message,
)
from kvcore.transfer.session.waiting import Waiting

_log = get_logger("kvcore.transfer.sender")


class SenderSession(Greeter):
    """Offers the units of finished chunks to the receivers that ask for them."""

    def __init__(
        self,
        manifest: Manifest,
        *,
        clock: Clock = time.monotonic,
        options: TransferOptions | None = None,
        checksums: SenderChecksums | None = None,
    ) -> None:
        super().__init__(manifest, clock, options or TransferOptions(), checksums)
        self._requests = Held()
        self._waiting = Waiting()

    # --- the engine's calls ---

    def begin(self, request: str, num_tokens: int, token: bytes = b"") -> None:
        """Announce a request of ``num_tokens`` prompt tokens. An ask for it may have come already, or come later.

        Only asks with the same ``token`` are answered. Raises DuplicateRequestError where the id is in use; the first
        holder is untouched.
        """
        control.check_request_id(request)
        control.check_token(request, token)
        if num_tokens < 0:
            raise RequestError("a prompt cannot have a negative length", request=request, got=num_tokens)
        if request in self._requests:
            raise DuplicateRequestError("request is being sent already", request=request)
        record = self._requests.begin(request, num_tokens, token)
        for ask in self._waiting.begin(request):
            self._attach(record, ask)

    def offer(
        self,
        request: str,
        start: int,
        stop: int,
        payloads: Sequence[Payload],
        *,
        last: bool = False,
        engine_data: bytes = b"",
    ) -> None:
        """Offer the units that became final when tokens ``[start, stop)`` were prefilled.

        From here until ``SendDone`` or ``SendFailed`` the caller must hold them unchanged. Offers follow one another
        without gaps, no unit of a layer is offered twice, and ``last`` (with the engine's data) completes the prompt. An
        offer of some layers, before a chunk is through, covers no tokens yet: ``start == stop``. Raises RequestError,
        with nothing changed, for anything else.
        """
        record = self._known(request)
        check_offer(record, start, stop, last=last, engine_data=engine_data)
        ends = check_payloads(self.manifest, record, payloads)
        self._requests.offer(record, Offered(start, stop, tuple(payloads), last), ends)
        if last:
            self._requests.complete(record, bytes(engine_data), self._clock() + self.options.lease_s)
        self._push(record)

    def note_chunk_start(self, request: str, *, last: bool) -> None:
        """Note that a chunk starts. With ``last``, what was reported pulled so far counts as pulled early."""
        record = self._known(request)
        for reader in record.readers.values():
            if last and reader.early is None:
                reader.early = sum(reader.nbytes.values())

    def layerwise(self, request: str) -> bool:
        """Whether offers of single layers serve anybody: a rank that asked reads small pieces at no loss."""
        return any(reader.layerwise and not reader.nothing for reader in self._known(request).readers.values())

    def abort(self, request: str, reason: str) -> None:
        """Give a request up. Raises UnknownRequestError where it was never begun or is over."""
        self._fail(self._known(request), TransferAbortedError(f"aborted by the sender: {reason}", request=request))

    def has(self, request: str) -> bool:
        """Whether a request is begun and not over."""
        return request in self._requests

    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that are begun and not over."""
        return self._requests.ids()

    def held_units(self) -> int:
        """Units offered and not released yet, over all requests (each range counted once per component set)."""
        return self._requests.units

    # --- the wire ---

    def handle(self, peer: Peer, message: control.AnyMessage) -> None:
        """Handle one message. Nothing a peer sends raises: it fails that peer's requests, typed, and no others."""
        if isinstance(message, control.Hello):
            self._hello(peer, message)
            return
        state = self._peers.get(peer)
        if state is None or message.src != state.instance or message.dst != self.instance:
            if not isinstance(message, control.Bye):
                gone = PeerLostError("not a conversation of this instance", expected=message.dst, got=self.instance)
                self._post(peer, control.Bye(src=self.instance, dst=message.src, error=control.WireError.of(gone)))
            return
        state.heard_at = self._clock()
        match message:
            case control.Taken():
                self._taken(peer, message)
            case control.Ask():
                self._ask(peer, state, message)
            case control.Pulled():
                self._pulled(peer, message)
            case control.PulledAll():
                self._pulled_all(peer, message)
            case control.Ack():
                self._ack(peer, message)
            case control.Abort():
                self._aborted(peer, message)
            case control.Heartbeat():
                self._renew(peer, message)
            case control.Bye():
                self._drop(peer, left(message, state.instance))
            case _:
                self.broken(peer, ProtocolError("message is not for a sender", type=type(message).__name__))

    def broken(self, peer: Peer, error: ProtocolError) -> None:
        """Handle what could not be decoded: it fails the attempt it was about, else the whole conversation."""
        _log.warning("bad control message", peer=peer.hex(), error=control.shown(error))
        request, attempt = error.fields.get("request"), error.fields.get("attempt")
        if isinstance(request, str) and isinstance(attempt, int):
            held = self._held(peer, request, attempt)
            if held is not None:
                self._fail(held[0], error)
                return
        state = self._peers.get(peer)
        dst = state.instance if state else ""
        self._post(peer, control.Bye(src=self.instance, dst=dst, error=control.WireError.of(error)))
        self._drop(peer, error)

    def lost(self, peer: Peer, reason: str) -> None:
        """The wire says that a peer is gone."""
        state = self._peers.get(peer)
        if state is not None:
            self._drop(peer, PeerLostError(f"receiver lost: {reason}", instance=state.instance))

    def tick(self) -> None:
        """Let time pass: heartbeats, silent peers, leases. Call at least once a heartbeat."""
        now, options = self._clock(), self.options
        for peer in self._beats.due(now):
            state = self._peers[peer]
            if now - state.heard_at > options.peer_timeout_s:
                self.lost(peer, f"silent for {options.peer_timeout_s} s")
                continue
            if now >= state.sent_at + options.heartbeat_s:
                self._post(peer, control.Heartbeat(src=self.instance, dst=state.instance))
            self._watch(peer, state)
        for record in self._requests.expired(now):
            late = "lease ended before the receiver acknowledged"
            self._fail(record, TransferExpiredError(late, request=record.request, lease_s=options.lease_s))
        for request, ask in self._waiting.due(now):
            never = "the sender's engine never began the request"
            error = TransferExpiredError(never, request=request, ask_timeout_s=options.ask_timeout_s)
            self._unask(request, ask, error)

    def close(self, reason: str = "sender closed") -> None:
        """Fail everything and say goodbye. Idempotent."""
        for record in self._requests.records():
            self._fail(record, TransferAbortedError(reason, request=record.request))
        self._waiting.clear()
        for peer, state in list(self._peers.items()):
            error = PeerLostError(reason, instance=self.instance)
            self._post(peer, control.Bye(src=self.instance, dst=state.instance, error=control.WireError.of(error)))
        self._peers.clear()
        self._beats.clear()

    # --- inside ---

    def _known(self, request: str) -> Outgoing:
        record = self._requests.get(request)
        if record is None:
            raise UnknownRequestError("request is not being sent", request=request)
        return record

    def _post(self, peer: Peer, message: control.AnyMessage) -> None:
        state = self._peers.get(peer)
        if state is not None:
            state.sent_at = self._clock()
        self._outbox.append((peer, message))

    def _address(self, asker: Asker) -> dict[str, str]:
        return {"src": self.instance, "dst": self._peers[asker.peer].instance}

    def _tell(self, request: str, asker: Asker, error: KVCoreError) -> None:
        if asker.peer not in self._peers:
            return
        self._post(asker.peer, failure_message(self._address(asker), request, asker, error))

    def _fail(self, record: Outgoing, error: KVCoreError, *, culprit: Peer | None = None) -> None:
        """End a request without success, and say so to every rank that asked and does not know (``culprit`` does)."""
        self._requests.remove(record)
        told = set()
        for peer, reader in record.readers.items():
            state = self._peers.get(peer)
            if state is not None:
                told.add((state.engine, state.rank))
            if peer != culprit and not reader.acked:
                self._tell(record.request, reader.asker, error)
        if not record.everyone_asked:
            self._waiting.end(record.request, error, told, record.token)
        self._events.append(SendFailed(record.request, error))

    def _unask(self, request: str, ask: Ask, error: KVCoreError, *, culprit: Peer | None = None) -> None:
        """Forget an ask for what is not begun, and those of the engine's other ranks with it."""
        for dropped in self._waiting.drop(request, ask.engine):
            if dropped.asker.peer != culprit:
                self._tell(request, dropped.asker, error)

    def _drop(self, peer: Peer, error: KVCoreError) -> None:
        """A receiver is gone: its requests fail, for the other ranks of its engine too."""
        state = self._peers.pop(peer, None)
        self._beats.drop(peer)
        if self.checksums is not None:
            self.defer(partial(self.checksums.forget, peer), lambda _: None)
        for request, ask in self._waiting.asked_by(peer):
            self._unask(request, ask, error, culprit=peer)
        for record in self._requests.of_peer(peer, state):
            self._fail(record, error, culprit=peer)

    def _ask(self, peer: Peer, state: PeerState, message: control.Ask) -> None:
        asker = Asker(peer, message.attempt)
        ask = Ask(asker, state.engine, message.start, message.stop, message.layerwise, self._clock(), message.token)
        record = self._requests.get(message.request)
        holder = self._waiting.get(message.request, peer) if record is None else record.readers.get(peer)
        if holder is not None and holder.asker == ask.asker:
            return  # said twice
        waiting = self._waiting.engines(message.request, ask.token)
        others = {record.engine} if record is not None and record.engine else waiting
        if holder is not None or (others and others != {ask.engine}):
            error = DuplicateRequestError("request is being pulled already", request=message.request)
            self._tell(message.request, asker, error)
            return
        ended = None if record is not None else self._waiting.end_for(message.request, state, ask.token)
        if ended is not None:
            self._tell(message.request, asker, ended)
        elif record is not None:
            self._attach(record, ask)
        else:
            try:
                self._waiting.add(message.request, ask, ask.asked_at + self.options.ask_timeout_s)
            except TransferError as error:
                self._tell(message.request, asker, error)

    def _attach(self, record: Outgoing, ask: Ask) -> None:
        try:
            check_ask(record, ask)
        except TransferError as error:
            self._tell(record.request, ask.asker, error)
            return
        self._requests.attach(record, ask, self._peers[ask.asker.peer], self._clock() + self.options.lease_s)
        self._push(record)

    def _push(self, record: Outgoing) -> None:
        for peer, reader in record.readers.items():
            offers = record.offers_for(reader)
            for seq in range(reader.sent, len(offers)):
                self._post(peer, offer_message(self._address(reader.asker), record, reader, seq, offers[seq]))
            reader.sent = len(offers)

    def _held(self, peer: Peer, request: str, attempt: int) -> tuple[Outgoing, Reader] | None:
        record = self._requests.get(request)
        reader = record.readers.get(peer) if record is not None else None
        if record is None or reader is None or reader.asker.attempt != attempt:
            return None
        return record, reader

    def _renew_lease(self, reader: Reader) -> None:
        if reader.lease_ends is not None:
            reader.lease_ends = self._clock() + self.options.lease_s

    def _pulled(self, peer: Peer, message: control.Pulled) -> None:
        held = self._held(peer, message.request, message.attempt)
        if held is None:
            return  # of an attempt that is over: its PulledAll will be answered `expired`
        record, reader = held
        try:
            check_pulled(record, reader, message, self.manifest)
        except ProtocolError as error:
            self._fail(record, error)
            return
        reader.pulled.add(message.seq)
        add_bytes(reader.nbytes, message.nbytes)
        self._renew_lease(reader)

    def _pulled_all(self, peer: Peer, message: control.PulledAll) -> None:
        held = self._held(peer, message.request, message.attempt)
        if held is None:
            error = TransferExpiredError("the attempt is over", request=message.request)
            self._tell(message.request, Asker(peer, message.attempt), error)
            return
        record, reader = held
        self._renew_lease(reader)
        if reader.checking:
            return  # said again
        try:
            check_pulled_all(record, reader, message)
            if self.checksums is not None and not reader.reported:
                check_units(record, reader, message.units)
                reader.checking = True
        except TransferError as error:
            self._fail(record, error)
            return
        if reader.checking:
            assert self.checksums is not None
            work = partial(self.checksums.of, peer, message.units)
            self.defer(work, partial(self._summed, peer, record, reader))
        else:
            self._reported(record, reader)

    def _summed(self, peer: Peer, record: Outgoing, reader: Reader, sums: Future[dict[str, int]]) -> None:
        """Checksums are taken, for a request that may be over by now."""
        if self._requests.get(record.request) is not record or record.readers.get(peer) is not reader:
            return
        reader.checking = False
        error = sums.exception()
        if error is not None:
            self._fail(record, mistaken(error))
            return
        reader.checksums = sums.result()
        self._renew_lease(reader)
        self._reported(record, reader)

    def _reported(self, record: Outgoing, reader: Reader) -> None:
        reader.reported = True
        if record.committed:
            self._commit(record, reader)  # the answer has not arrived yet
        elif record.everyone_asked and all(item.reported for item in record.readers.values()):
            record.committed = True
            for item in record.readers.values():
                self._commit(record, item)

    def _commit(self, record: Outgoing, reader: Reader) -> None:
        self._post(reader.asker.peer, commit_message(self._address(reader.asker), record, reader))

    def _ack(self, peer: Peer, message: control.Ack) -> None:
        held = self._held(peer, message.request, message.attempt)
        if held is None:
            return
        record, reader = held
        if not record.committed:
            self._fail(record, ProtocolError("acknowledged before the commit", request=record.request))
            return
        reader.acked = True
        if not all(item.acked for item in record.readers.values()):
            return
        self._requests.remove(record)
        total, early = record.total_bytes(), sum(item.early or 0 for item in record.readers.values())
        self._events.append(SendDone(record.request, message.attempt, record.num_tokens, total, early))

    def _aborted(self, peer: Peer, message: control.Abort) -> None:
        ask = self._waiting.get(message.request, peer)
        if ask is not None and ask.asker.attempt == message.attempt:
            self._unask(message.request, ask, message.error.unpack(), culprit=peer)
        held = self._held(peer, message.request, message.attempt)
        if held is not None:
            self._fail(held[0], message.error.unpack(), culprit=peer)

    def _renew(self, peer: Peer, message: control.Heartbeat) -> None:
        for item in message.renew:
            asker = Asker(peer, item.attempt)
            ask = self._waiting.get(item.request, peer)
            held = self._held(peer, item.request, item.attempt)
            if held is not None:
                self._renew_lease(held[1])
            elif ask is None or ask.asker != asker:
                # An attempt nobody here knows would be waited for without end.
                self._post(peer, control.Expired(**self._address(asker), request=item.request, attempt=item.attempt))
