"""A prefill process and a decode process serve prompts: what their parent does (no torch).

The decode process asks first: it allocates a request's units when it has room, and only then is the prompt computed. So
a prompt never waits, computed and held, for a decode process that is full.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.config import Config, RetractionConfig
from kvcore.errors import KVCoreError, PeerLostError, error_from_dict
from kvcore_transformers.serving.channel import (
    Abort,
    Connect,
    Connected,
    Happened,
    PeerLost,
    Ready,
    Rejected,
    Report,
    Start,
    Submit,
    Tell,
)
from kvcore_transformers.serving.fleet import START_S, Fleet, Worker
from kvcore_transformers.serving.requests import (
    AskedEvent,
    DoneEvent,
    EngineStats,
    Event,
    FailedEvent,
    GenerationRequest,
    ReceivedEvent,
    TokenEvent,
)

_REPORT_S = 30.0


@dataclass
class Outcome:
    """What became of a request.

    Attributes:
        request: what was asked.
        tokens: generated tokens, all of them once ``finished``.
        finished: whether it ended well.
        error: why it failed.
        submitted_at, first_token_at: seconds of the monotonic clock.
        bytes_by_component: logical bytes pulled; ``pulled_early``: of them before the last chunk began.
    """

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    error: KVCoreError | None = None
    submitted_at: float = 0.0
    first_token_at: float | None = None
    bytes_by_component: dict[str, int] = field(default_factory=dict)
    pulled_early: int = 0

    @property
    def over(self) -> bool:
        """Whether nothing more will happen."""
        return self.finished or self.error is not None


@dataclass
class ServedRun:
    """Outcomes in the order asked, and what each process did (by role; absent where it died)."""

    outcomes: dict[str, Outcome]
    stats: dict[str, EngineStats]
    seconds: float


@dataclass(frozen=True)
class Setup:
    """What every worker of a run is started with."""

    model: str
    config: Config
    chunk: int

    def message(self, role: Any, config: Config | None = None) -> Start:
        """The first message to a worker."""
        return Start(role, self.model, (config or self.config).to_json(), self.chunk)


def without_backup(config: Config) -> Config:
    """The same for a process that retracts nothing: a backend may claim all its memory when it is built."""
    return msgspec.structs.replace(config, retraction=RetractionConfig(policy="recompute"))


class Pair:
    """The two processes and the requests they serve.

    Args:
        fleet: starts and ends the processes.
        setup: model, configuration, chunk.
        on_event: told of each event as it happens, for progress.
        on_over: told the id of each request that is over.
    """

    def __init__(
        self,
        fleet: Fleet,
        setup: Setup,
        on_event: Callable[[Event], None] | None = None,
        on_over: Callable[[str], None] | None = None,
    ) -> None:
        self._fleet = fleet
        self._on_event = on_event or (lambda event: None)
        self._on_over = on_over or (lambda request: None)
        self.prefill = fleet.start("prefill")
        self.decode = fleet.start("decode")
        self.prefill.send(setup.message("prefill", without_backup(setup.config)))
        self.decode.send(setup.message("decode"))

    @property
    def workers(self) -> dict[str, int]:
        """Process ids by role."""
        return {str(worker.role): worker.pid for worker in (self.prefill, self.decode)}

    def connect(self) -> None:
        """Wait until both processes are ready and connected. Raises what stopped one of them."""
        address = self._fleet.expect(self.prefill, Ready, START_S).address
        self._fleet.expect(self.decode, Ready, START_S)
        self.decode.send(Connect(address))
        self._fleet.expect(self.decode, Connected, START_S)

    def serve(self, requests: Sequence[GenerationRequest]) -> ServedRun:
        """Serve requests with distinct ids until each has ended, well or not."""
        begun = time.monotonic()
        outcomes = {request.id: Outcome(request, submitted_at=begun) for request in requests}
        for request in requests:
            self.decode.send(Submit(request))
        while any(not outcome.over for outcome in outcomes.values()):
            message = self._fleet.receive(1.0)
            if message is not None:
                self._take(message.worker, message.body, outcomes)
        seconds = time.monotonic() - begun
        stats: dict[str, EngineStats] = {}
        for worker in (self.prefill, self.decode):
            if (found := self._stats(worker)) is not None:
                stats[worker.role] = found
        return ServedRun(outcomes, stats, seconds)

    def _take(self, worker: Worker, body: Any, outcomes: dict[str, Outcome]) -> None:
        if (error := worker.end_of(body)) is not None:
            self._lost(worker, error, outcomes)
        elif isinstance(body, Rejected):
            self._failed(worker, outcomes[body.request], error_from_dict(body.error))
        elif isinstance(body, Happened):
            for event in body.events:
                self._happened(worker, event, outcomes[event.request])

    def _happened(self, worker: Worker, event: Event, outcome: Outcome) -> None:
        if outcome.over:
            return
        if isinstance(event, FailedEvent):
            self._failed(worker, outcome, event.exception())
            return
        if worker is self.prefill:
            return  # what it has done shows on the other side
        self._on_event(event)
        match event:
            case AskedEvent():
                self.prefill.send(Submit(outcome.request))
            case ReceivedEvent():
                outcome.bytes_by_component = event.bytes_by_component
                outcome.pulled_early = event.pulled_early_bytes
            case TokenEvent():
                if outcome.first_token_at is None:
                    outcome.first_token_at = time.monotonic()
                outcome.tokens.append(event.token)
            case DoneEvent():
                outcome.tokens = list(event.tokens)
                outcome.finished = True
                self._on_over(outcome.request.id)

    def _failed(self, worker: Worker, outcome: Outcome, error: KVCoreError) -> None:
        """A request failed in one process: the first reason stands, and the other process gives it up too."""
        if outcome.over or (worker is self.prefill and outcome.bytes_by_component):
            return  # once it has arrived, what the prefill side thinks of it no longer matters
        self._give_up(outcome, error)
        other = self.decode if worker is self.prefill else self.prefill
        other.send(Abort(outcome.request.id, error.message))

    def _give_up(self, outcome: Outcome, error: KVCoreError) -> None:
        outcome.error = error
        self._on_event(FailedEvent(outcome.request.id, error.as_dict()))
        self._on_over(outcome.request.id)

    def _lost(self, worker: Worker, error: KVCoreError, outcomes: dict[str, Outcome]) -> None:
        if worker is self.prefill:
            self.decode.send(PeerLost(error.message))  # what has arrived there goes on
            return
        for outcome in outcomes.values():
            if not outcome.over:
                self._give_up(outcome, PeerLostError(error.message, **{**error.fields, "request": outcome.request.id}))

    def _stats(self, worker: Worker) -> EngineStats | None:
        worker.send(Tell())
        try:
            report: Report = self._fleet.expect(worker, Report, _REPORT_S)
        except KVCoreError:
            return None
        return report.stats


def serve_alone(
    fleet: Fleet, workers: Sequence[Worker], requests: Sequence[GenerationRequest], on_over: Callable[[str], None]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Have each worker (``single`` or ``plain``, started) serve all requests by itself.

    Returns, by role, tokens by request, without those that failed. Raises what ended a worker.
    """
    tokens: dict[str, dict[str, tuple[int, ...]]] = {worker.role: {} for worker in workers}
    open_ids = {(worker.role, request.id) for worker in workers for request in requests}
    while open_ids:
        message = fleet.receive(1.0)
        if message is None or message.worker not in workers:
            continue
        role, body = message.worker.role, message.body
        if (error := message.worker.end_of(body)) is not None:
            raise error
        if isinstance(body, Ready):
            for request in requests:
                message.worker.send(Submit(request))
        elif isinstance(body, Rejected):
            open_ids.discard((role, body.request))
        elif isinstance(body, Happened):
            for event in body.events:
                if isinstance(event, DoneEvent):
                    tokens[role][event.request] = event.tokens
                if isinstance(event, DoneEvent | FailedEvent):
                    open_ids.discard((role, event.request))
                    on_over(event.request)
    return tokens
