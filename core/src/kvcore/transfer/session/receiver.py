"""A receiver's conversation with one rank of a sender: a pure state machine over a :class:`PeerConnection` (no threads).

It asks, pulls every offer into the units it was given, and accepts only what is committed. Each ask ends in exactly one
``ReceiveDone`` or ``ReceiveFailed``; a failure is reported once no read writes its units any more. How a receiver joins
the conversations with all ranks of a sender: :mod:`kvcore.transfer.session.joined`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial

from kvcore.contract import PeerConnection
from kvcore.errors import (
    DuplicateRequestError,
    HandshakeError,
    KVCoreError,
    PeerLostError,
    ProtocolError,
    TransferAbortedError,
    TransferError,
    UnknownRequestError,
)
from kvcore.layout import Int64Array
from kvcore.log import get_logger
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import (
    Clock,
    Peer,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveProgress,
    ReceiveQuiet,
    Session,
    TransferOptions,
    add_bytes,
    left,
    mistaken,
)
from kvcore.transfer.session.checksums import Checks, pack_sources
from kvcore.transfer.session.handshake import no_answer, refusal, remote_manifest
from kvcore.transfer.session.incoming import (
    Incoming,
    Orphans,
    Read,
    check_ask,
    check_commit,
    check_complete,
    check_offer,
    check_tables,
    not_connected,
    not_held,
    not_quiet,
    pull_of,
    renewals,
    transport_failed,
    why_gone,
)
from kvcore.transfer.session.plan import PeerPlan

_log = get_logger("kvcore.transfer.receiver")

SENDER: Peer = b""
"""A receiver has one peer."""


class ReceiverSession(Session[ReceiveEvent]):
    """Pulls requests from one rank of a sender.

    It can ask once it was welcomed *and* given its plan (:meth:`use`), which takes the manifests of all ranks. A request
    that is done stays here until :meth:`accept`: only then is the sender told that it may let go.

    Args:
        manifest: of this process.
        connect: opens the transport connection named by the sender's endpoint record.
        clock, options: time.
        checksums: checks what arrived before a request is done; needed where the manifest says so.

    Attributes:
        remote: the sender's manifest, once welcomed.
        plan: what is taken from it.
        failure: why the conversation is over.
    """

    def __init__(
        self,
        manifest: Manifest,
        connect: Callable[[bytes], PeerConnection],
        *,
        clock: Clock = time.monotonic,
        options: TransferOptions | None = None,
        checksums: Checks | None = None,
    ) -> None:
        super().__init__(manifest.instance, clock, options or TransferOptions())
        self.manifest = manifest
        self.connection: PeerConnection | None = None
        self.remote: Manifest | None = None
        self.plan: PeerPlan | None = None
        self.failure: TransferError | None = None
        self._connect = connect
        self._checksums = checksums
        self._layerwise = False
        self._sender = ""
        self._heard_at = self._beat_at = clock()
        self._attempts = 0
        self._requests: dict[str, Incoming] = {}
        self._reading: dict[int, Incoming] = {}  # by attempt: with reads under way, the only ones a tick looks at
        self._orphans = Orphans()
        self.bytes_read = 0
        self.copy_seconds = 0.0

    # --- the engine's calls ---

    @property
    def connected(self) -> bool:
        """Whether the hello was accepted on both sides and the sender is not lost."""
        return self.plan is not None and self.failure is None

    def hello(self) -> None:
        """Start the conversation."""
        self._heard_at = self._clock()
        self._post(
            control.Hello(src=self.instance, dst="", protocol=self.manifest.protocol, manifest=self.manifest.encode())
        )

    def use(self, plan: PeerPlan, *, layerwise: bool = False) -> None:
        """Reach the sender's memory; requests can be asked for from now on.

        Args:
            plan: what is taken from this sender.
            layerwise: whether offers of single layers are welcome.

        Raises what the transport's ``connect`` raises.
        """
        self.connection = self._connect(plan.remote.endpoint)
        self.plan = plan
        self._layerwise = layerwise
        if self.manifest.checksum != "none":
            self._post(control.Taken(**self._address(), groups=pack_sources(plan.sources)))

    def ask(
        self, request: str, tables: Mapping[tuple[str, str], Int64Array], start: int, stop: int, token: bytes = b""
    ) -> int:
        """Ask for tokens ``[start, stop)`` of a request; returns the attempt number.

        Args:
            request: its id; the sender may begin it before or after.
            tables: per ``(group, range)``, the destination unit of every logical unit, ``int64 [logical units]``; −1
                where it is not wanted (already here, or dead). Everything else must arrive, or the request fails. All
                ranges are named, unless ``start == stop``: then nothing is pulled and the tables may be empty.
            start: tokens already here; only decides how much must be covered.
            stop: length of the prompt.
            token: what the sender's engine has begun the request with.

        Raises PeerLostError without a sender, DuplicateRequestError, RequestError; nothing is sent on error.
        """
        if self.plan is None or self.failure is not None:
            raise not_connected("a sender", request, self.failure)
        if request in self._requests:
            raise DuplicateRequestError("request is being received already", request=request)
        check_ask(request, start, stop, token)
        taken, missing = check_tables(self.plan, request, tables, complete=start < stop)
        self._attempts += 1
        record = self._requests[request] = Incoming(request, self._attempts, start, stop, taken, missing)
        self._post(record.ask(self._address(), layerwise=self._layerwise, token=token))
        return self._attempts

    def accept(self, request: str) -> None:
        """Let the sender go: a request that is done is kept. Raises UnknownRequestError where it is not done here."""
        record = self._requests.get(request)
        if record is None or record.commit is None or record.error is not None:
            raise UnknownRequestError("request is not done", request=request)
        del self._requests[request]
        self._post(control.Ack(**self._address(), request=record.request, attempt=record.attempt))

    def abort(self, request: str, reason: str) -> None:
        """Give a request up: ``ReceiveFailed`` follows once its reads are quiet.

        Raises UnknownRequestError where it is not being received; aborting one that is failing already does nothing.
        """
        self.fail(request, TransferAbortedError(f"aborted by the receiver: {reason}", request=request))

    def fail(self, request: str, error: KVCoreError) -> None:
        """:meth:`abort` for a reason that has a type of its own."""
        if request not in self._requests:
            raise UnknownRequestError("request is not being received", request=request)
        self._fail(self._requests[request], error)

    def has(self, request: str) -> bool:
        """Whether a request is asked for and not over."""
        return request in self._requests

    @property
    def reads_in_flight(self) -> int:
        """Reads that are not terminal."""
        return self._orphans.reads + sum(len(record.reads) for record in self._reading.values())

    # --- the wire ---

    def handle(self, peer: Peer, message: control.AnyMessage) -> None:
        """Handle one message. Nothing the sender sends raises: requests fail, typed."""
        if self.failure is not None or message.dst not in (self.instance, ""):
            return
        if isinstance(message, control.Welcome):
            self._welcome(message)
            return
        if isinstance(message, control.Refused):
            self._end(refusal(message.error.unpack()))
            return
        if isinstance(message, control.Bye):
            self._end(left(message, self._sender))
            return
        if self.remote is None or message.src != self._sender:
            _log.warning("message of another instance refused", expected=self._sender, got=message.src)
            return
        self._heard_at = self._clock()
        match message:
            case control.Heartbeat():
                pass
            case control.Offer() | control.Commit() | control.Expired() | control.Abort():
                record = self._requests.get(message.request)
                if record is not None and record.attempt == message.attempt and record.error is None:
                    self._about(record, message)
            case _:
                self.broken(peer, ProtocolError("message is not for a receiver", type=type(message).__name__))

    def broken(self, peer: Peer, error: ProtocolError) -> None:
        """Handle what could not be decoded: it fails the attempt it was about, else the whole conversation."""
        _log.warning("bad control message", error=control.shown(error))
        request, attempt = error.fields.get("request"), error.fields.get("attempt")
        record = self._requests.get(request) if isinstance(request, str) else None
        if record is not None and record.attempt == attempt:
            self._fail(record, error)
        else:
            self._end(error, tell=True)

    def refused(self, error: HandshakeError) -> None:
        """The wire says that the sender will not talk to this process."""
        if self.failure is None:
            self._end(error)

    def lost(self, reason: str) -> None:
        """The wire says that the sender is gone."""
        if self.failure is None:
            self._end(PeerLostError(f"sender lost: {reason}", instance=self._sender))

    def tick(self) -> None:
        """Let time pass and look at the reads under way. Call at least once a heartbeat, and whenever one may be done."""
        gone = why_gone(self.connection)  # first: it resets what says that a read has ended
        self._poll_reads()
        now, options = self._clock(), self.options
        if self.failure is None:
            if gone:
                self.lost(gone)
            elif self.remote is not None and now - self._heard_at > options.peer_timeout_s:
                self.lost(f"silent for {options.peer_timeout_s} s")
            elif self.remote is None and now - self._heard_at > options.hello_timeout_s:
                self._end(no_answer(options.hello_timeout_s))
            elif self.remote is not None and now - self._beat_at >= options.heartbeat_s:
                self._heartbeat(now)
        for record in [item for item in self._reading.values() if item.error is not None]:
            self._settle(record)

    def close(self, reason: str = "receiver closed") -> None:
        """Fail everything and say goodbye. Requests with reads in flight end as these do (``tick``). Idempotent."""
        if self.failure is None:
            for record in list(self._requests.values()):
                self._fail(record, TransferAbortedError(reason, request=record.request))
            self._end(PeerLostError(reason, instance=self.instance), tell=True)

    def leave(self, error: KVCoreError) -> None:
        """End the conversation and say why. Requests with reads in flight end as these do (``tick``). Idempotent."""
        if self.failure is None:
            self._end(error, tell=True)

    def give_up_reads(self) -> None:
        """Report every request whose reads are still not terminal as failed and not quiet."""
        for record in [item for item in self._reading.values() if item.error is not None]:
            self._report(record, quiet=not record.reads)

    # --- inside ---

    def _address(self) -> dict[str, str]:
        return {"src": self.instance, "dst": self._sender}

    def _post(self, message: control.AnyMessage) -> None:
        self._outbox.append((SENDER, message))

    def _heartbeat(self, now: float) -> None:
        self._beat_at = now
        live = [record for record in self._requests.values() if record.error is None]
        for record in live:
            if record.asked_commit_at is not None and record.commit is None:
                self._ask_commit(record)
        for renew in renewals(live, now - self.options.read_timeout_s):
            self._post(control.Heartbeat(**self._address(), renew=renew))

    def _welcome(self, message: control.Welcome) -> None:
        if self.remote is not None:
            return
        self._sender = message.src
        self._heard_at = self._clock()
        try:
            self.remote = remote_manifest(self.manifest, message)
        except KVCoreError as error:
            self._end(error, tell=True)

    def _about(
        self, record: Incoming, message: control.Offer | control.Commit | control.Expired | control.Abort
    ) -> None:
        try:
            match message:
                case control.Offer():
                    self._offered(record, message)
                case control.Commit():
                    self._committed(record, message)
                case control.Expired():
                    self._fail(record, not_held(record.request), tell=False)
                case control.Abort():
                    self._fail(record, message.error.unpack(), tell=False)
        except TransferError as error:
            self._fail(record, error)

    def _offered(self, record: Incoming, offer: control.Offer) -> None:
        check_offer(record, offer)
        assert self.plan is not None
        assert self.connection is not None
        pull = pull_of(self.plan, record, offer)
        record.next_seq += 1
        record.tokens = offer.stop
        record.complete = offer.last
        if self._checksums is not None:
            record.units += pull.units
            record.landed += pull.landed
        if pull.jobs:
            handle = self.connection.read(pull.jobs)
            record.reads.append(Read(offer, handle, pull.nbytes, self._clock()))
            self._reading[record.attempt] = record
        else:
            self._landed(record, offer, {})
        self._maybe_ask_commit(record)

    def _landed(self, record: Incoming, offer: control.Offer, nbytes: dict[str, int]) -> None:
        add_bytes(record.nbytes, nbytes)
        self._post(record.pulled(self._address(), offer, nbytes))
        self._events.append(ReceiveProgress(record.request, record.attempt, offer.start, offer.stop))

    def _poll_reads(self) -> None:
        for record in list(self._reading.values()):
            for read in list(record.reads):
                self._poll_read(record, read)
            if not record.reads:
                self._reading.pop(record.attempt, None)
                (self._maybe_ask_commit if record.error is None else self._settle)(record)
        self._events.extend(ReceiveQuiet(record.request, record.attempt) for record in self._orphans.quiet())

    def _poll_read(self, record: Incoming, read: Read) -> None:
        try:
            if not read.handle.poll():
                return
            self.copy_seconds += read.handle.seconds
        except Exception as error:  # noqa: BLE001 -- a plugin's: only a TransferError says that the read is quiet
            if isinstance(error, TransferError):
                record.reads.remove(read)
            self._fail(record, transport_failed("poll", error))
            return
        record.reads.remove(read)
        self.bytes_read += sum(read.nbytes.values())
        if record.error is None:
            self._landed(record, read.offer, read.nbytes)

    def _maybe_ask_commit(self, record: Incoming) -> None:
        if not record.complete or record.reads or record.asked_commit_at is not None:
            return
        assert self.plan is not None
        try:
            check_complete(self.plan, record)
        except TransferError as error:
            self._fail(record, error)
            return
        self._ask_commit(record)

    def _ask_commit(self, record: Incoming) -> None:
        record.asked_commit_at = self._clock()
        self._post(record.pulled_all(self._address()))

    def _committed(self, record: Incoming, commit: control.Commit) -> None:
        if record.commit is not None or record.checking:
            return  # the answer to a report that was repeated
        check_commit(record, commit)
        if self._checksums is None:
            self._valid(record, commit)
            return
        assert self.plan is not None
        record.checking = True
        work = partial(self._checksums.check, self.plan, record.landed, commit.checksums, record.request)
        self.defer(work, partial(self._checked, record, commit))

    def _checked(self, record: Incoming, commit: control.Commit, outcome: Future[None]) -> None:
        """What arrived was held against the checksums, of a request that may be over by now."""
        error, record.checking = outcome.exception(), False
        if error is not None:
            self._fail(record, mistaken(error))
        elif record.error is None:
            self._valid(record, commit)

    def _valid(self, record: Incoming, commit: control.Commit) -> None:
        record.commit = commit
        self._events.append(record.done(commit))

    def _fail(self, record: Incoming, error: KVCoreError, *, tell: bool = True) -> None:
        if record.error is not None:
            return
        record.error = error
        record.failed_at = self._clock()
        if tell and self.failure is None:
            self._post(record.abort(self._address(), error))
        self._settle(record)

    def _settle(self, record: Incoming) -> None:
        """Report a failed request once its reads are quiet, or once they had their time."""
        if self._requests.get(record.request) is not record:
            return  # reported already
        if not record.reads:
            self._report(record, quiet=True)
        elif self._clock() - record.failed_at >= self.options.quiesce_s:
            self._report(record, quiet=False)
            if self.failure is None:
                self._end(not_quiet(self.options.quiesce_s), tell=True)

    def _report(self, record: Incoming, *, quiet: bool) -> None:
        assert record.error is not None
        del self._requests[record.request]
        self._reading.pop(record.attempt, None)
        if not quiet:
            self._orphans.add(record)
        self._events.append(ReceiveFailed(record.request, record.attempt, record.error, quiet))

    def _end(self, error: KVCoreError, *, tell: bool = False) -> None:
        """The conversation is over: fail every request at once."""
        if tell:
            self._post(control.Bye(**self._address(), error=control.WireError.of(error)))
        self.failure = error if isinstance(error, TransferError) else TransferError(str(error))
        for record in list(self._requests.values()):
            self._fail(record, error, tell=False)
