"""What both sides of a transfer share: timing options, events, and the outbox of a pure state machine (no I/O)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvcore.errors import ConfigError, KVCoreError, PeerLostError, ProtocolError, TransferError
from kvcore.log import get_logger, plain_trace
from kvcore.transfer.messages.control import AnyMessage, Bye

_log = get_logger("kvcore.transfer")


@dataclass(frozen=True)
class TransferOptions:
    """Times of the protocol, in seconds.

    Attributes:
        lease_s: how long the sender holds a finished prompt for a receiver that gives no sign.
        heartbeat_s: time between heartbeats.
        peer_timeout_s: silence after which a peer counts as lost (a cut connection is noticed at once).
        ask_timeout_s: how long an ask waits for a request that the sender's engine has not begun.
        read_timeout_s: a read older than this no longer renews the lease.
        quiesce_s: how long a failed request waits for its reads to become quiet.
        hello_timeout_s: how long a receiver waits for the answer to its hello, and a sender for the hello of who connects.
    """

    lease_s: float = 30.0
    heartbeat_s: float = 1.0
    peer_timeout_s: float = 8.0
    ask_timeout_s: float = 120.0
    read_timeout_s: float = 30.0
    quiesce_s: float = 10.0
    hello_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError("a time of the transfer must be positive", option=name, got=value)
        for name in ("lease_s", "peer_timeout_s"):
            if getattr(self, name) <= self.heartbeat_s:
                raise ConfigError(
                    "heartbeats must come more often than what they renew ends",
                    option=name,
                    got=getattr(self, name),
                    heartbeat_s=self.heartbeat_s,
                )


@dataclass(frozen=True)
class SendDone:
    """The receiver has everything; the sender's units may go.

    Attributes:
        request, attempt: which.
        num_tokens: length of the prompt.
        bytes_by_component: logical bytes pulled.
        pulled_early_bytes: of those, how many were reported pulled before the last chunk started.
    """

    request: str
    attempt: int
    num_tokens: int
    bytes_by_component: dict[str, int]
    pulled_early_bytes: int


@dataclass(frozen=True)
class SendFailed:
    """The request is over without an acknowledgement; the sender's units may go."""

    request: str
    error: KVCoreError


@dataclass(frozen=True)
class ReceiveProgress:
    """Tokens ``[start, stop)`` have landed. Not yet valid: only :class:`ReceiveDone` says that."""

    request: str
    attempt: int
    start: int
    stop: int


@dataclass(frozen=True)
class ReceiveDone:
    """Everything asked for has arrived and is committed.

    Attributes:
        request, attempt: which.
        num_tokens: length of the prompt.
        bytes_by_component: logical bytes pulled.
        engine_data: opaque bytes of the sender's engine.
        pulled_early_bytes: how many bytes were pulled before the sender's last chunk started.
    """

    request: str
    attempt: int
    num_tokens: int
    bytes_by_component: dict[str, int]
    engine_data: bytes
    pulled_early_bytes: int


@dataclass(frozen=True)
class ReceiveFailed:
    """Nothing of the request may be kept.

    Attributes:
        request, attempt: which.
        error: why.
        quiet: no read writes the destination units any more, they may be freed. False only where the transport could
            not say so in time: keep the units until :class:`ReceiveQuiet` of the same attempt.
    """

    request: str
    attempt: int
    error: KVCoreError
    quiet: bool


@dataclass(frozen=True)
class ReceiveQuiet:
    """The reads of a request that failed without being quiet have ended; its units may be freed now."""

    request: str
    attempt: int


SendEvent = SendDone | SendFailed
ReceiveEvent = ReceiveProgress | ReceiveDone | ReceiveFailed | ReceiveQuiet

Clock = Callable[[], float]
Peer = bytes
"""How the wire names a peer (the routing id of its socket)."""

EventT = TypeVar("EventT")

Work = Callable[[], Any]
"""What takes long: it reads what it was made with, and changes nothing of a session."""

Then = Callable[["Future[Any]"], None]
"""What a session does with what came of it."""


def settled(work: Work) -> Future[Any]:
    """Run work now; the future has what came of it."""
    future: Future[Any] = Future()
    try:
        future.set_result(work())
    except Exception as error:  # noqa: BLE001 -- raised again where the result is asked for
        future.set_exception(error)
    return future


class Session(Generic[EventT]):
    """A pure state machine: messages, calls and time in; messages and events out. Not thread-safe, never blocks.

    Attributes:
        defer: runs what takes long; at once unless whoever serves the session has a thread for it, and then in the order
            in which it came.
    """

    def __init__(self, instance: str, clock: Clock, options: TransferOptions) -> None:
        self.instance = instance
        self.options = options
        self.defer: Callable[[Work, Then], None] = lambda work, then: then(settled(work))
        self._clock = clock
        self._outbox: deque[tuple[Peer, AnyMessage]] = deque()
        self._events: deque[EventT] = deque()

    def outbox(self) -> list[tuple[Peer, AnyMessage]]:
        """Take the messages to send, in order."""
        taken = list(self._outbox)
        self._outbox.clear()
        return taken

    def resume(self, then: Then, outcome: Future[Any]) -> None:
        """Go on with what came of deferred work."""
        then(outcome)

    def events(self) -> list[EventT]:
        """Take the events that have happened, in order."""
        taken = list(self._events)
        self._events.clear()
        return taken


def add_bytes(total: dict[str, int], more: dict[str, int]) -> None:
    """Add byte counts by component into ``total``."""
    for component, count in more.items():
        total[component] = total.get(component, 0) + count


def mistaken(cause: BaseException | None) -> TransferError:
    """Why deferred work for a peer came to nothing; whatever the cause, it ends what the peer wanted and no more."""
    if isinstance(cause, TransferError):
        return cause
    _log.error("a peer's message could not be worked on", trace=plain_trace(cause) if cause else "")
    return ProtocolError("message could not be handled", cause=type(cause).__name__)


def left(message: Bye, instance: str) -> TransferError:
    """What a goodbye means for the requests of the peer that said it: it is lost, or found the messages broken."""
    error = message.error.unpack()
    if isinstance(error, ProtocolError | PeerLostError):
        return error
    return PeerLostError(f"the peer left: {error.message}", instance=instance)
