"""What the engine is asked and what it answers (no torch)."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvcore.errors import KVCoreError, error_from_dict
from kvcore.retraction.retractor import RetractionHandle


class GenerationRequest(msgspec.Struct, frozen=True):
    """One prompt.

    Attributes:
        id: unique among the requests in work.
        prompt: token ids, at least one.
        max_new_tokens: tokens to generate at most, at least 1.
        eos: token ids that end the text; they are part of the output.
    """

    id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    eos: tuple[int, ...] = ()


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # no units
    RECEIVING = "receiving"  # units allocated, filled by another process
    PREFILLING = "prefilling"  # units allocated, its tokens are being computed in chunks
    RUNNING = "running"  # one new token a step
    SENDING = "sending"  # prefilled here, units held until the other process has pulled them
    RETRACTED = "retracted"  # no units; resumes before anything waiting is admitted
    DONE = "done"
    FAILED = "failed"


@dataclass(eq=False)
class Sequence:
    """A request in work.

    The cache holds one token less than the sequence: the newest token has no keys and values yet.

    Attributes:
        request: what was asked.
        order: arrival number; a smaller one is older.
        state: where it stands.
        tokens: prompt and generated tokens.
        computed: tokens in the cache.
        target: tokens the cache must hold before the next token can be sampled (or decoding goes on).
        handle: what was saved, while retracted.
        error: why it failed.
        retractions: how often it was taken off the device.
        served: number of the decode pass that last computed a token of it, 0 before the first.
    """

    request: GenerationRequest
    order: int
    state: State = State.WAITING
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    target: int = 0
    handle: RetractionHandle | None = None
    error: KVCoreError | None = None
    retractions: int = 0
    served: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)
        self.target = len(self.tokens)

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.id

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens generated so far."""
        return tuple(self.tokens[len(self.request.prompt) :])

    @property
    def wants_more(self) -> bool:
        """Whether another token is to be generated."""
        generated = len(self.tokens) - len(self.request.prompt)
        ended = generated > 0 and self.tokens[-1] in self.request.eos
        return generated < self.request.max_new_tokens and not ended


class TokenEvent(msgspec.Struct, frozen=True, tag=True):
    """A request generated a token."""

    request: str
    token: int


class DoneEvent(msgspec.Struct, frozen=True, tag=True):
    """A request ended well, with these tokens."""

    request: str
    tokens: tuple[int, ...]


class FailedEvent(msgspec.Struct, frozen=True, tag=True):
    """A request failed: ``error`` is :meth:`kvcore.errors.KVCoreError.as_dict`."""

    request: str
    error: dict[str, Any]

    def exception(self) -> KVCoreError:
        """The error as an exception."""
        return error_from_dict(self.error)


class AskedEvent(msgspec.Struct, frozen=True, tag=True):
    """Units are allocated here and another process was asked to fill them: it may compute the prompt now."""

    request: str


class ReceivedEvent(msgspec.Struct, frozen=True, tag=True):
    """A request's prompt has arrived and is valid: logical bytes by component, and those pulled early."""

    request: str
    bytes_by_component: dict[str, int]
    pulled_early_bytes: int


class PrefilledEvent(msgspec.Struct, frozen=True, tag=True):
    """A request's prompt is in the cache here and its last chunk is offered, with this first token."""

    request: str
    token: int


Event = AskedEvent | ReceivedEvent | PrefilledEvent | TokenEvent | DoneEvent | FailedEvent


class EngineStats(msgspec.Struct):
    """What an engine did.

    Attributes:
        retractions: requests taken off the device.
        resumed: brought back from a backup.
        recomputed: brought back by computing their tokens again.
        bytes_saved: bytes copied to the backup, by component.
        steps: forward passes.
        ops: calls of each kernel op.
        pull_seconds: time spent copying pulled bytes.
    """

    retractions: int = 0
    resumed: int = 0
    recomputed: int = 0
    bytes_saved: dict[str, int] = {}
    steps: int = 0
    ops: dict[str, int] = {}
    pull_seconds: float = 0.0
