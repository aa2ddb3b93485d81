"""The sending (prefill) side of the protocol: a pure state machine (no I/O, no threads).

It holds what was offered until the receiver acknowledges the commit, the request is aborted, the peer is lost, or the
lease ends; each request that was begun ends in exactly one ``SendDone`` or ``SendFailed``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

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
from kvcore.transfer import control
from kvcore.transfer.manifest import Manifest, check_peers, check_protocol, decode_manifest
from kvcore.transfer.outgoing import Asker, Offered, Outgoing, PeerState, Pending, check_payloads
from kvcore.transfer.payload import Payload
from kvcore.transfer.session import (
    Clock,
    Peer,
    SendDone,
    SendEvent,
    SendFailed,
    Session,
    TransferOptions,
    add_bytes,
    left,
)

_log = structlog.get_logger("kvcore.transfer.sender")

_MAX_UNASKED = 4096
"""Most ended requests remembered for asks that come too late."""


class SenderSession(Session[SendEvent]):
    """Offers the units of finished chunks to the receivers that ask for them."""

    def __init__(
        self, manifest: Manifest, *, clock: Clock = time.monotonic, options: TransferOptions | None = None
    ) -> None:
        super().__init__(manifest.instance, clock, options or TransferOptions())
        self.manifest = manifest
        self._manifest_bytes = manifest.encode()
        self._components = frozenset(c for layout in manifest.layouts.values() for c in layout.components)
        self._peers: dict[Peer, PeerState] = {}
        self._requests: dict[str, Outgoing] = {}
        self._pending: dict[str, Pending] = {}
        self._unasked: dict[str, KVCoreError] = {}

    # --- the engine's calls ---

    def begin(self, request: str, num_tokens: int) -> None:
        """Announce a request of ``num_tokens`` prompt tokens. An ask for it may have come already, or come later.

        Raises DuplicateRequestError where the id is in use; the first holder is untouched.
        """
        control.check_request_id(request)
        if num_tokens < 0:
            raise RequestError("a prompt cannot have a negative length", request=request, got=num_tokens)
        if request in self._requests:
            raise DuplicateRequestError("request is being sent already", request=request)
        self._unasked.pop(request, None)
        record = self._requests[request] = Outgoing(request, num_tokens)
        pending = self._pending.pop(request, None)
        if pending is not None:
            self._attach(record, pending.asker, pending.start, pending.stop)

    def offer(
        self,
        request: str,
        start: int,
        stop: int,
        payloads: Sequence[Payload],
        *,
        last: bool = False,
        engine_data: bytes = b"",
        checksums: Mapping[str, int] | None = None,
    ) -> None:
        """Offer the units that became final when tokens ``[start, stop)`` were prefilled.

        From here until ``SendDone`` or ``SendFailed`` the caller must hold them unchanged. Offers follow one another
        without gaps, no unit is offered twice, and ``last`` (with the engine's data) completes the prompt. Raises
        RequestError, with nothing changed, for anything else.
        """
        record = self._known(request)
        facts: dict[str, Any] = {"request": request, "start": start, "stop": stop}
        if record.complete:
            raise RequestError("the prompt is complete, nothing more can be offered", **facts)
        if start != record.offered_tokens or not start <= stop <= record.num_tokens:
            raise RequestError(
                "offers must follow one another", **facts, expected=record.offered_tokens, num_tokens=record.num_tokens
            )
        if last and stop != record.num_tokens:
            raise RequestError("the last offer does not end the prompt", **facts, num_tokens=record.num_tokens)
        if len(engine_data) > control.MAX_ENGINE_DATA_BYTES or (engine_data and not last):
            raise RequestError(
                "engine data goes with the last offer and is bounded",
                request=request,
                limit_bytes=control.MAX_ENGINE_DATA_BYTES,
                got_bytes=len(engine_data),
                last=last,
            )
        ends = check_payloads(self.manifest, record, payloads)
        record.ends.update(ends)
        record.offers.append(Offered(start, stop, tuple(payloads), last, dict(checksums or {})))
        record.offered_tokens = stop
        if last:
            record.complete = True
            record.engine_data = bytes(engine_data)
            record.lease_ends = self._clock() + self.options.lease_s
        self._push(record)

    def note_chunk_start(self, request: str, *, last: bool) -> None:
        """Note that a chunk starts. With ``last``, what was reported pulled so far counts as pulled early."""
        record = self._known(request)
        if last and record.early is None:
            record.early = sum(record.nbytes.values())

    def abort(self, request: str, reason: str) -> None:
        """Give a request up. Raises UnknownRequestError where it was never begun or is over."""
        self._fail(self._known(request), TransferAbortedError(f"aborted by the sender: {reason}", request=request))

    def has(self, request: str) -> bool:
        """Whether a request is begun and not over."""
        return request in self._requests

    def requests(self) -> tuple[str, ...]:
        """Ids of the requests that are begun and not over."""
        return tuple(self._requests)

    def held_units(self) -> int:
        """Units offered and not released yet, over all requests (each range counted once per component set)."""
        return sum(p.num_units for r in self._requests.values() for offer in r.offers for p in offer.payloads)

    def peers(self) -> dict[Peer, str]:
        """Instance ids of the receivers that have said hello."""
        return {peer: state.instance for peer, state in self._peers.items()}

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
            case control.Ask():
                self._ask(Asker(peer, message.attempt), message)
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
        _log.warning("bad control message", peer=peer.hex(), error=error.as_dict())
        request, attempt = error.fields.get("request"), error.fields.get("attempt")
        record = self._requests.get(request) if isinstance(request, str) else None
        if record is not None and record.asker == Asker(peer, int(attempt or 0)):
            self._fail(record, error)
            return
        state = self._peers.get(peer)
        self._post(
            peer,
            control.Bye(src=self.instance, dst=state.instance if state else "", error=control.WireError.of(error)),
        )
        self._drop(peer, error)

    def lost(self, peer: Peer, reason: str) -> None:
        """The wire says that a peer is gone."""
        state = self._peers.get(peer)
        if state is not None:
            self._drop(peer, PeerLostError(f"receiver lost: {reason}", instance=state.instance))

    def tick(self) -> None:
        """Let time pass: heartbeats, silent peers, leases. Call at least once a heartbeat."""
        now, options = self._clock(), self.options
        for peer, state in list(self._peers.items()):
            if now - state.heard_at > options.peer_timeout_s:
                self.lost(peer, f"silent for {options.peer_timeout_s} s")
            elif now - state.sent_at >= options.heartbeat_s:
                self._post(peer, control.Heartbeat(src=self.instance, dst=state.instance))
        for record in list(self._requests.values()):
            if record.lease_ends is not None and now >= record.lease_ends:
                self._fail(
                    record,
                    TransferExpiredError(
                        "lease ended before the receiver acknowledged", request=record.request, lease_s=options.lease_s
                    ),
                )
        for request, pending in list(self._pending.items()):
            if now - pending.asked_at >= options.ask_timeout_s:
                del self._pending[request]
                self._tell(
                    request,
                    pending.asker,
                    TransferExpiredError(
                        "the sender's engine never began the request",
                        request=request,
                        ask_timeout_s=options.ask_timeout_s,
                    ),
                )

    def close(self, reason: str = "sender closed") -> None:
        """Fail everything and say goodbye. Idempotent."""
        for record in list(self._requests.values()):
            self._fail(record, TransferAbortedError(reason, request=record.request))
        self._pending.clear()
        for peer, state in list(self._peers.items()):
            error = PeerLostError(reason, instance=self.instance)
            self._post(peer, control.Bye(src=self.instance, dst=state.instance, error=control.WireError.of(error)))
        self._peers.clear()

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
        if isinstance(error, TransferExpiredError):
            self._post(asker.peer, control.Expired(**self._address(asker), request=request, attempt=asker.attempt))
            return
        self._post(
            asker.peer,
            control.Abort(
                **self._address(asker), request=request, attempt=asker.attempt, error=control.WireError.of(error)
            ),
        )

    def _fail(self, record: Outgoing, error: KVCoreError, *, tell: bool = True) -> None:
        del self._requests[record.request]
        if record.asker is None:
            self._unasked[record.request] = error  # so that an ask still on its way need not wait for a second begin
            while len(self._unasked) > _MAX_UNASKED:
                del self._unasked[next(iter(self._unasked))]
        elif tell:
            self._tell(record.request, record.asker, error)
        self._events.append(SendFailed(record.request, error))

    def _drop(self, peer: Peer, error: KVCoreError) -> None:
        self._peers.pop(peer, None)
        self._pending = {k: p for k, p in self._pending.items() if p.asker.peer != peer}
        for record in list(self._requests.values()):
            if record.asker is not None and record.asker.peer == peer:
                self._fail(record, error, tell=False)

    def _hello(self, peer: Peer, message: control.Hello) -> None:
        if peer in self._peers:
            self._drop(peer, PeerLostError("the receiver was restarted", got=message.src))
        address = {"src": self.instance, "dst": message.src}
        try:
            check_protocol(self.manifest.protocol, message.protocol)
            remote = decode_manifest(message.manifest)
            if remote.instance != message.src:
                raise ProtocolError("hello of another instance", expected=message.src, got=remote.instance)
            check_peers(self.manifest, remote)
        except TransferError as error:
            _log.warning("hello refused", peer=peer.hex(), error=error.as_dict())
            self._post(peer, control.Refused(**address, error=control.WireError.of(error)))
            return
        now = self._clock()
        self._peers[peer] = PeerState(message.src, heard_at=now, sent_at=now)
        self._post(peer, control.Welcome(**address, protocol=self.manifest.protocol, manifest=self._manifest_bytes))

    def _ask(self, asker: Asker, message: control.Ask) -> None:
        record, pending = self._requests.get(message.request), self._pending.get(message.request)
        holder = record.asker if record is not None else pending.asker if pending is not None else None
        if holder == asker:
            return  # said twice
        if holder is not None:
            error = DuplicateRequestError("request is being pulled already", request=message.request)
            self._tell(message.request, asker, error)
        elif record is not None:
            self._attach(record, asker, message.start, message.stop)
        elif message.request in self._unasked:
            self._tell(message.request, asker, self._unasked.pop(message.request))
        else:
            self._pending[message.request] = Pending(asker, message.start, message.stop, self._clock())

    def _attach(self, record: Outgoing, asker: Asker, start: int, stop: int) -> None:
        if not start <= stop == record.num_tokens:
            error = TransferError(
                "ask does not fit the prompt",
                request=record.request,
                start=start,
                stop=stop,
                num_tokens=record.num_tokens,
            )
            self._tell(record.request, asker, error)
            return
        record.asker = asker
        self._renew_lease(record)
        self._push(record)

    def _push(self, record: Outgoing) -> None:
        asker = record.asker
        if asker is None:
            return
        for seq in range(record.sent, len(record.offers)):
            offer = record.offers[seq]
            self._post(
                asker.peer,
                control.Offer(
                    **self._address(asker),
                    request=record.request,
                    attempt=asker.attempt,
                    seq=seq,
                    start=offer.start,
                    stop=offer.stop,
                    payloads=offer.payloads,
                    last=offer.last,
                    checksums=offer.checksums,
                ),
            )
        record.sent = len(record.offers)

    def _held(self, peer: Peer, request: str, attempt: int) -> Outgoing | None:
        record = self._requests.get(request)
        return record if record is not None and record.asker == Asker(peer, attempt) else None

    def _renew_lease(self, record: Outgoing) -> None:
        if record.lease_ends is not None:
            record.lease_ends = self._clock() + self.options.lease_s

    def _pulled(self, peer: Peer, message: control.Pulled) -> None:
        record = self._held(peer, message.request, message.attempt)
        if record is None:
            return  # of an attempt that is over: its PulledAll will be answered `expired`
        if message.seq >= record.sent or message.seq in record.pulled:
            self._fail(
                record, ProtocolError("offer reported pulled out of turn", request=record.request, seq=message.seq)
            )
            return
        if not self._components.issuperset(message.nbytes):
            error = ProtocolError("unknown components", request=record.request, got=sorted(message.nbytes)[:8])
            self._fail(record, error)
            return
        record.pulled.add(message.seq)
        add_bytes(record.nbytes, message.nbytes)
        self._renew_lease(record)

    def _pulled_all(self, peer: Peer, message: control.PulledAll) -> None:
        asker = Asker(peer, message.attempt)
        record = self._held(peer, message.request, message.attempt)
        if record is None:
            self._post(peer, control.Expired(**self._address(asker), request=message.request, attempt=message.attempt))
            return
        if not record.complete or len(record.pulled) != len(record.offers) or message.nbytes != record.nbytes:
            error = ProtocolError(
                "receiver reports a prompt it has not pulled", request=record.request, expected=record.nbytes,
                got=message.nbytes, offers=len(record.offers), pulled=len(record.pulled),
            )  # fmt: skip
            self._fail(record, error)
            return
        record.committed = True
        self._renew_lease(record)
        self._post(
            peer,
            control.Commit(
                **self._address(asker),
                request=record.request,
                attempt=asker.attempt,
                num_tokens=record.num_tokens,
                num_offers=len(record.offers),
                nbytes=record.nbytes,
                pulled_early_bytes=record.early or 0,
                engine_data=record.engine_data,
            ),
        )

    def _ack(self, peer: Peer, message: control.Ack) -> None:
        record = self._held(peer, message.request, message.attempt)
        if record is None:
            return
        if not record.committed:
            self._fail(record, ProtocolError("acknowledged before the commit", request=record.request))
            return
        del self._requests[record.request]
        self._events.append(
            SendDone(record.request, message.attempt, record.num_tokens, dict(record.nbytes), record.early or 0)
        )

    def _aborted(self, peer: Peer, message: control.Abort) -> None:
        pending = self._pending.get(message.request)
        if pending is not None and pending.asker == Asker(peer, message.attempt):
            del self._pending[message.request]
        record = self._held(peer, message.request, message.attempt)
        if record is not None:
            self._fail(record, message.error.unpack(), tell=False)

    def _renew(self, peer: Peer, message: control.Heartbeat) -> None:
        for item in message.renew:
            asker = Asker(peer, item.attempt)
            pending = self._pending.get(item.request)
            record = self._held(peer, item.request, item.attempt)
            if record is not None:
                self._renew_lease(record)
            elif pending is None or pending.asker != asker:
                # An attempt nobody here knows would be waited for without end.
                self._post(peer, control.Expired(**self._address(asker), request=item.request, attempt=item.attempt))
