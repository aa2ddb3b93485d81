"""One rank of a receiver and every rank of its sender: their conversations joined into one (no I/O, no threads).

Each rank of a receiver talks to each rank of the sender, also to those it reads nothing from. A rank of the sender
commits once every rank of the receiver has everything from it; a rank of the receiver accepts, and acknowledges, once
every rank of the sender has committed. So nothing is accepted before every rank has pulled everything, nothing is freed
before everybody has accepted, and no channel among the ranks of either side is needed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvcore.contract import PeerConnection, TransportTraits
from kvcore.errors import (
    DuplicateRequestError,
    HandshakeError,
    KVCoreError,
    PeerLostError,
    ProtocolError,
    RequestError,
    TransferAbortedError,
    TransferError,
    UnknownRequestError,
)
from kvcore.layout import Int64Array
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import (
    Clock,
    Peer,
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveProgress,
    ReceiveQuiet,
    Session,
    Then,
    TransferOptions,
    add_bytes,
)
from kvcore.transfer.session.checksums import Checks
from kvcore.transfer.session.incoming import not_connected
from kvcore.transfer.session.plan import PeerPlan, plan_peers
from kvcore.transfer.session.receiver import ReceiverSession


@dataclass
class _Joint:
    """One ask, at all ranks of the sender.

    Attributes:
        reading: the links that read something.
        tokens: how far each of them is.
        done: their results.
        ended: links that have failed, and whether their reads are quiet.
    """

    request: str
    attempt: int
    stop: int
    reading: frozenset[int]
    asked: set[int] = field(default_factory=set)
    tokens: dict[int, int] = field(default_factory=dict)
    progress: int = 0
    done: dict[int, ReceiveDone] = field(default_factory=dict)
    ended: dict[int, bool] = field(default_factory=dict)
    error: KVCoreError | None = None


class JoinedReceiver(Session[ReceiveEvent]):
    """Pulls requests from all ranks of one sender.

    A peer is named by its number, in the order of ``connects``.

    Args:
        manifest: of this rank.
        connects: one a rank of the sender; each opens the transport connection named by that rank's endpoint record.
        clock, options, checksums: see :class:`ReceiverSession`.
        traits: of the transport, to tell whether offers of single layers are welcome.

    Attributes:
        failure: why the conversation is over: a sender that has lost a rank is lost.
    """

    def __init__(
        self,
        manifest: Manifest,
        connects: Sequence[Callable[[bytes], PeerConnection]],
        *,
        clock: Clock = time.monotonic,
        options: TransferOptions | None = None,
        checksums: Checks | None = None,
        traits: TransportTraits | None = None,
    ) -> None:
        super().__init__(manifest.instance, clock, options or TransferOptions())
        self.manifest = manifest
        self.links = [
            ReceiverSession(manifest, connect, clock=clock, options=self.options, checksums=checksums)
            for connect in connects
        ]
        for link in self.links:
            link.defer = lambda work, then: self.defer(work, then)
        self.failure: TransferError | None = None
        self._traits = traits or TransportTraits(executes_programs=True)
        self._attempts = 0
        self._joints: dict[str, _Joint] = {}
        self._noisy: dict[str, list[_Joint]] = {}

    # --- the engine's calls ---

    @property
    def connected(self) -> bool:
        """Whether every rank of the sender has accepted the hello and none is lost."""
        return self.failure is None and all(link.connected for link in self.links)

    @property
    def plans(self) -> list[PeerPlan]:
        """What is taken from each rank; empty before all have said hello."""
        return [link.plan for link in self.links if link.plan is not None]

    def hello(self) -> None:
        """Start the conversations."""
        for link in self.links:
            link.hello()

    def ask(
        self, request: str, tables: Mapping[tuple[str, str], Int64Array], start: int, stop: int, token: bytes = b""
    ) -> int:
        """Ask every rank of the sender for its part of tokens ``[start, stop)``; see :meth:`ReceiverSession.ask`."""
        if request in self._joints:
            raise DuplicateRequestError("request is being received already", request=request)
        if not self.connected:
            raise not_connected("every rank of the sender", request, self.failure)
        parts = [{key: tables[key] for key, _ in plan.ranges() if key in tables} for plan in self.plans]
        ranges = {(group, item.name) for group, layout in self.manifest.layouts.items() for item in layout.ranges}
        if not set(tables) <= ranges:
            raise RequestError(
                "tables do not name the ranges of the cache",
                request=request,
                expected=sorted(ranges),
                got=sorted(tables),
            )
        numbers = range(len(self.links))
        reading = frozenset(number for number in numbers if dict(self.plans[number].ranges())) or frozenset(numbers)
        self._attempts += 1
        joint = _Joint(request, self._attempts, stop, reading, tokens=dict.fromkeys(reading, 0))
        try:
            for number, (link, part) in enumerate(zip(self.links, parts, strict=True)):
                link.ask(request, part, start if number in reading else stop, stop, token)
                joint.asked.add(number)
        except KVCoreError:
            for number in joint.asked:
                self.links[number].abort(request, "another rank of the sender could not be asked")
            self._forget_events()
            raise
        self._joints[request] = joint
        return self._attempts

    def abort(self, request: str, reason: str) -> None:
        """Give a request up everywhere; see :meth:`ReceiverSession.abort`."""
        joint = self._joints.get(request)
        if joint is None:
            raise UnknownRequestError("request is not being received", request=request)
        self._fail_links(joint, TransferAbortedError(f"aborted by the receiver: {reason}", request=request))
        self._join()

    def has(self, request: str) -> bool:
        """Whether a request is asked for and not over."""
        return request in self._joints

    def requests(self) -> tuple[tuple[str, int], ...]:
        """``(request, attempt)`` of what is asked for and not over."""
        return tuple((joint.request, joint.attempt) for joint in self._joints.values())

    @property
    def reads_in_flight(self) -> int:
        """Reads that are not terminal."""
        return sum(link.reads_in_flight for link in self.links)

    @property
    def bytes_read(self) -> int:
        """Logical bytes that have landed."""
        return sum(link.bytes_read for link in self.links)

    @property
    def copy_seconds(self) -> float:
        """Time the transport spent on them."""
        return sum(link.copy_seconds for link in self.links)

    # --- the wire ---

    def handle(self, peer: Peer, message: control.AnyMessage) -> None:
        """Handle one message of one rank of the sender."""
        self._link(peer).handle(peer, message)
        self._plan()
        self._join()

    def broken(self, peer: Peer, error: ProtocolError) -> None:
        """Handle what could not be decoded."""
        self._link(peer).broken(peer, error)
        self._join()

    def refused(self, peer: Peer, error: HandshakeError) -> None:
        """The wire says that a rank of the sender will not talk to this process."""
        self._link(peer).refused(error)
        self._join()

    def lost(self, peer: Peer, reason: str) -> None:
        """The wire says that a rank of the sender is gone."""
        self._link(peer).lost(reason)
        self._join()

    def tick(self) -> None:
        """Let time pass at every link."""
        for link in self.links:
            link.tick()
        self._join()

    def close(self, reason: str = "receiver closed") -> None:
        """Fail everything and say goodbye to every rank. Idempotent."""
        for link in self.links:
            link.close(reason)
        self._join()

    def give_up_reads(self) -> None:
        """Report every request whose reads are still not terminal as failed and not quiet."""
        for link in self.links:
            link.give_up_reads()
        self._join()

    def resume(self, then: Then, outcome: Future[Any]) -> None:
        """Go on at the link that deferred the work."""
        then(outcome)
        self._join()

    def outbox(self) -> list[tuple[Peer, control.AnyMessage]]:
        """Take the messages to send; the peer is the number of the rank."""
        return [(name(number), message) for number, link in enumerate(self.links) for _, message in link.outbox()]

    # --- inside ---

    def _link(self, peer: Peer) -> ReceiverSession:
        return self.links[int(peer)]

    def _plan(self) -> None:
        """Once every rank has said who it is: choose what to take from which."""
        remotes = [link.remote for link in self.links if link.remote is not None]
        if len(remotes) < len(self.links) or self.failure is not None or self.plans:
            return
        try:
            plans = plan_peers(self.manifest, remotes)
            for link, plan in zip(self.links, plans, strict=True):
                link.use(plan, layerwise=self._layerwise(plan))
        except KVCoreError as error:
            for link in self.links:
                link.leave(error)

    def _layerwise(self, plan: PeerPlan) -> bool:
        """Whether pieces as small as one layer of a unit cost the transport nothing extra."""
        return self._traits.executes_programs or plan.layer_run_bytes() >= self._traits.min_run_bytes

    def _forget_events(self) -> None:
        for link in self.links:
            link.events()

    def _join(self) -> None:
        """Bring what has happened at the links together."""
        while True:
            events = [(number, event) for number, link in enumerate(self.links) for event in link.events()]
            for number, event in events:  # which may abort at other links: events of their own
                self._take(number, event)
            lost = next((link.failure for link in self.links if link.failure is not None), None)
            self.failure = self.failure or lost
            rest = [link for link in self.links if link.failure is None] if self.failure is not None else []
            for link in rest:
                link.leave(PeerLostError("another rank of the sender is lost", cause=str(self.failure)))
            if not events and not rest:
                return

    def _take(self, number: int, event: ReceiveEvent) -> None:
        if isinstance(event, ReceiveQuiet):
            self._quiet(number, event)
            return
        joint = self._joints.get(event.request)
        if joint is None:
            return
        match event:
            case ReceiveProgress():
                self._progress(joint, number, event)
            case ReceiveDone():
                joint.done[number] = event
                if len(joint.done) == len(self.links) and joint.error is None:
                    self._accept(joint)
            case ReceiveFailed():
                joint.ended[number] = event.quiet
                if joint.error is None:
                    joint.error = event.error
                    self._fail_links(joint, event.error)
                if len(joint.ended) == len(self.links):
                    self._fail(joint)

    def _progress(self, joint: _Joint, number: int, event: ReceiveProgress) -> None:
        if number not in joint.reading:
            return
        joint.tokens[number] = event.stop
        tokens = min(joint.tokens.values())
        if tokens > joint.progress:
            self._events.append(ReceiveProgress(joint.request, joint.attempt, joint.progress, tokens))
            joint.progress = tokens

    def _accept(self, joint: _Joint) -> None:
        del self._joints[joint.request]
        total: dict[str, int] = {}
        for number, link in enumerate(self.links):
            link.accept(joint.request)
            add_bytes(total, joint.done[number].bytes_by_component)
        early = sum(item.pulled_early_bytes for item in joint.done.values())
        data = next((item.engine_data for _, item in sorted(joint.done.items()) if item.engine_data), b"")
        self._events.append(ReceiveDone(joint.request, joint.attempt, joint.stop, total, data, early))

    def _fail_links(self, joint: _Joint, error: KVCoreError) -> None:
        for number, link in enumerate(self.links):
            if number not in joint.ended:
                with contextlib.suppress(UnknownRequestError):  # its event is on the way
                    link.fail(joint.request, error)

    def _fail(self, joint: _Joint) -> None:
        assert joint.error is not None
        del self._joints[joint.request]
        quiet = all(joint.ended.values())
        if not quiet:
            self._noisy.setdefault(joint.request, []).append(joint)
        self._events.append(ReceiveFailed(joint.request, joint.attempt, joint.error, quiet))

    def _quiet(self, number: int, event: ReceiveQuiet) -> None:
        noisy = self._noisy.get(event.request, [])
        now = self._joints.get(event.request)
        for joint in [*noisy, *([now] if now is not None else [])]:
            if joint.ended.get(number) is not False:
                continue
            joint.ended[number] = True
            if joint is not now and all(joint.ended.values()):
                noisy.remove(joint)
                if not noisy:
                    del self._noisy[event.request]
                self._events.append(ReceiveQuiet(joint.request, joint.attempt))
            return


def name(number: int) -> Peer:
    """How a receiver's wire names the rank of the sender with this number."""
    return str(number).encode()
