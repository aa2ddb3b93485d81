"""Which requests run in the next forward pass, and which one gives its units up (no torch).

Rules, in this order:

- Retracted requests come back, oldest first, before anything waiting is admitted.
- Waiting requests are admitted in order of arrival, and only in that order: a large one is never overtaken.
- Prompts are computed in chunks whose borders depend on nothing but the prompt; short chunks of several requests share a
  forward pass. The two oldest prompts take turns, so that one's chunk is moved while the other's is computed.
- Models with states compute one chunk a forward pass; models that scale attention by position decode requests of one
  length together, those that have waited longest first.
- Prefill and decode passes alternate while there is work for both.
- When units run out the youngest running request is retracted, never the only one that holds units.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec

from kvcore.engine.cache import KVCache
from kvcore.engine.step import Step
from kvcore.errors import (
    BackupError,
    CapacityError,
    DuplicateRequestError,
    EmptyPromptError,
    KVCoreError,
    PromptTooLongError,
    RequestError,
    UnknownRequestError,
)
from kvcore.log import get_logger
from kvcore_transformers.serving.requests import EngineStats, GenerationRequest, Sequence, State

log = get_logger("kvcore.scheduler")

Row = tuple[Sequence, int]


@dataclass(frozen=True)
class Batch:
    """One forward pass: rows of ``(sequence, new tokens)`` and the step opened for them."""

    kind: Literal["prefill", "decode"]
    rows: tuple[Row, ...]
    step: Step


class Scheduler:
    """Queues of one engine.

    Args:
        cache: where requests live.
        chunk: prompt tokens of a request in one forward pass, and of all rows of a prefill pass together.
        decodes: whether requests go on to decode here; then room is kept for their growth.
        receive: called to let another process fill a request (it allocates its units); None computes prompts here.
        announce: called with a request that was admitted to be computed here, before its first chunk.
        max_length: longest sequence the model accepts, 0 when unlimited.
        stats: counted into.
        on_failed: told of requests that failed while being scheduled.
        rows_apart: a prefill pass is one chunk of one prompt (models with states, whose rows cannot be packed).
        equal_lengths: a decode pass takes requests of one length only.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        chunk: int,
        decodes: bool,
        receive: Callable[[Sequence], None] | None,
        announce: Callable[[Sequence], None] | None,
        max_length: int,
        stats: EngineStats,
        on_failed: Callable[[Sequence], None],
        rows_apart: bool = False,
        equal_lengths: bool = False,
    ) -> None:
        self.live: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.retracted: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._cache = cache
        # A cache of state alone has no limit in tokens.
        self._capacity = sys.maxsize if cache.token_capacity is None else cache.token_capacity
        self._chunk = chunk
        self._decodes = decodes
        self._receive = receive
        self._announce = announce
        self._max_length = max_length
        self._stats = stats
        self._on_failed = on_failed
        self._rows_apart = rows_apart
        self._equal_lengths = equal_lengths
        self._arrivals = 0
        self._passes = 0
        self._decode_next = False
        self._page = cache.config.cache.page_size
        self._max_rows = min(cache.config.cache.max_rows, cache.config.cache.max_tokens)  # a decode row is one token

    # --- arrival and end ---

    def submit(self, request: GenerationRequest) -> Sequence:
        """Queue a request.

        Raises EmptyPromptError, DuplicateRequestError, PromptTooLongError (for the pool or the model), RequestError.
        """
        if request.id in self.live:
            raise DuplicateRequestError("request id is in use; the first holder goes on", request=request.id)
        length = len(request.prompt)
        if not length:
            raise EmptyPromptError(
                "a prompt needs at least one token", request=request.id, remedy="begin it with a start token"
            )
        if request.max_new_tokens < 1:
            raise RequestError("at least one token must be asked for", request=request.id, got=request.max_new_tokens)
        if length > self._capacity:
            raise PromptTooLongError(
                "the prompt does not fit the cache, even alone",
                request=request.id,
                tokens=length,
                capacity=self._capacity,
                remedy="give the cache more memory",
            )
        if self._max_length and length + request.max_new_tokens > self._max_length:
            raise PromptTooLongError(
                "prompt and new tokens exceed the longest sequence of the model",
                request=request.id,
                tokens=length + request.max_new_tokens,
                capacity=self._max_length,
            )
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self.live[request.id] = sequence
        self.waiting.append(sequence)
        return sequence

    def get(self, request_id: str) -> Sequence:
        """The live sequence. Raises UnknownRequestError."""
        try:
            return self.live[request_id]
        except KeyError:
            raise UnknownRequestError("no such request in work", request=request_id) from None

    def finish(self, sequence: Sequence, error: KVCoreError | None = None, *, release: bool = True) -> None:
        """Take a sequence out of every queue and give its units back, whatever its state.

        Without ``release`` its units are a transfer's, which gives them back itself.
        """
        before, sequence.state = sequence.state, State.FAILED if error else State.DONE
        sequence.error = error
        if before is State.WAITING:
            self.waiting.remove(sequence)
        elif before is State.RETRACTED:
            self.retracted.remove(sequence)
            assert sequence.handle is not None
            self._cache.drop(sequence.handle)
        else:
            self._dequeue(sequence)
            if release:
                self._cache.release(sequence.id)
        del self.live[sequence.id]

    def start_running(self, sequence: Sequence) -> None:
        """All but the newest token are in the cache: decode from here on."""
        self._dequeue(sequence)
        sequence.state = State.RUNNING
        self.running.append(sequence)
        self.running.sort(key=lambda item: item.order)

    def start_sending(self, sequence: Sequence) -> None:
        """The prompt is computed; its units are held for another process."""
        self._dequeue(sequence)
        sequence.state = State.SENDING

    def _dequeue(self, sequence: Sequence) -> None:
        for queue in (self.prefilling, self.running):
            if sequence in queue:
                queue.remove(sequence)

    def _fail(self, sequence: Sequence, error: KVCoreError) -> None:
        self.finish(sequence, error)
        self._on_failed(sequence)

    # --- admission ---

    def holders(self) -> Iterator[Sequence]:
        """Sequences that hold units."""
        held = (State.RECEIVING, State.PREFILLING, State.RUNNING, State.SENDING)
        return (sequence for sequence in self.live.values() if sequence.state in held)

    def admit(self) -> bool:
        """Bring retracted requests back, then admit waiting ones, as far as there is room; whether any was."""
        admitted = False
        while self.retracted and self._fits(self.retracted[0].computed):
            if not self._resume(self.retracted[0]):
                break
            admitted = True
        while not self.retracted and self.waiting and self._fits(len(self.waiting[0].request.prompt)):
            sequence = self.waiting[0]
            try:
                self._start(sequence)
            except CapacityError:
                break
            except KVCoreError as error:
                self._fail(sequence, error)
                continue
            self.waiting.popleft()
            admitted = True
        return admitted

    def _fits(self, tokens: int) -> bool:
        """Whether a request can start and the ones that run can each grow by a page.

        A request that is alone needs no room for others, so every request that can be held at all is admitted.
        """
        active = sum(1 for _ in self.holders())
        if active >= self._max_rows:
            return False
        if not self._decodes:
            return self._cache.can_admit(tokens)
        tokens = min(tokens + 1, self._capacity)
        return self._cache.can_admit(tokens, headroom_tokens=self._page * active)

    def _start(self, sequence: Sequence) -> None:
        if self._receive is not None:
            self._receive(sequence)
            sequence.state = State.RECEIVING
        else:
            self._cache.admit(sequence.id, sequence.target)
            if self._announce is not None:
                try:
                    self._announce(sequence)
                except BaseException:
                    self._cache.release(sequence.id)
                    raise
            self._start_prefill(sequence)

    def _start_prefill(self, sequence: Sequence) -> None:
        sequence.state = State.PREFILLING
        sequence.computed = 0
        self.prefilling.append(sequence)
        self.prefilling.sort(key=lambda item: item.order)

    # --- retraction ---

    def retract(self, sequence: Sequence) -> None:
        """Take a running sequence off the device."""
        sequence.handle = self._cache.retract(sequence.id)
        self._dequeue(sequence)
        sequence.state = State.RETRACTED
        sequence.retractions += 1
        self._stats.retractions += 1
        for component, count in sequence.handle.bytes_by_component.items():
            self._stats.bytes_saved[component] = self._stats.bytes_saved.get(component, 0) + count
        self.retracted.append(sequence)
        self.retracted.sort(key=lambda item: item.order)
        log.info("retracted", request=sequence.id, length=sequence.computed, bytes=sequence.handle.nbytes)

    def _resume(self, sequence: Sequence) -> bool:
        handle = sequence.handle
        assert handle is not None
        try:
            if not handle.recompute:
                self._cache.resume(handle)
                self._stats.resumed += 1
                self._brought_back(sequence)
                self.start_running(sequence)
                return True
        except CapacityError:
            return False
        except BackupError as error:
            log.warning("restore failed; its tokens are computed again", request=sequence.id, cause=str(error))
            self._cache.drop(handle)
            sequence.handle = msgspec.structs.replace(handle, key="", bytes_by_component={})
        return self._recompute(sequence)

    def _recompute(self, sequence: Sequence) -> bool:
        """All tokens but the newest are prefilled again; nothing is sampled at the end."""
        length = len(sequence.tokens) - 1
        try:
            self._cache.admit(sequence.id, length)
        except CapacityError:
            return False
        self._stats.recomputed += 1
        self._brought_back(sequence)
        sequence.target = length
        self._start_prefill(sequence)
        return True

    def _brought_back(self, sequence: Sequence) -> None:
        sequence.handle = None
        self.retracted.remove(sequence)

    # --- the next forward pass ---

    def next_batch(self) -> Batch | None:
        """Open the step of the next forward pass, or None where there is nothing to compute now."""
        order = (self._decode_batch, self._prefill_batch)
        for make in order if self._decode_next else reversed(order):
            batch = make()
            if batch is not None:
                self._decode_next = batch.kind == "prefill"
                return batch
        return None

    def _prefill_batch(self) -> Batch | None:
        rows: list[Row] = []
        budget = self._chunk
        for sequence in self.prefilling:
            count = min(self._chunk, sequence.target - sequence.computed)
            if count > budget:
                if not rows:
                    break
                continue
            rows.append((sequence, count))
            budget -= count
            if self._rows_apart:
                break
        if not rows:
            return None
        step = self._cache.begin([(sequence.id, count) for sequence, count in rows])
        if len(self.prefilling) > 1:  # the two oldest take turns
            self.prefilling[0], self.prefilling[1] = self.prefilling[1], self.prefilling[0]
        return Batch("prefill", tuple(rows), step)

    def _decode_batch(self) -> Batch | None:
        while self.running:
            for sequence in [item for item in self.running if item.computed >= self._capacity]:
                self._fail(sequence, self._outgrown(sequence))
            if not self.running:
                break
            chosen = self._of_one_length() if self._equal_lengths else list(self.running)
            try:
                step = self._cache.begin([(sequence.id, 1) for sequence in chosen])
            except CapacityError as error:
                if not self._make_room(error):
                    return None
                continue
            self._passes += 1
            for sequence in chosen:
                sequence.served = self._passes
            return Batch("decode", tuple((sequence, 1) for sequence in chosen), step)
        return None

    def _of_one_length(self) -> list[Sequence]:
        """Of the running requests, the one that has waited longest and all that are as long as it."""
        first = min(self.running, key=lambda item: (item.served, item.order))
        return [item for item in self.running if item.computed == first.computed]

    def _make_room(self, error: CapacityError) -> bool:
        """Retract the youngest; False where only waiting for a prefill or a transfer helps."""
        if len(self.running) > 1:
            self.retract(self.running[-1])
            return True
        held = self._cache.stats().manager
        if held.requests > 1 or any(item.quarantined for item in held.ranges):
            return False  # a prompt being computed or moved, or a copy under way: all of them end
        only = self.running[0]
        self._fail(only, self._outgrown(only, error))
        return True

    def _outgrown(self, sequence: Sequence, cause: CapacityError | None = None) -> CapacityError:
        return CapacityError(
            "the request outgrew the cache: nothing else is left to retract",
            request=sequence.id,
            tokens=sequence.computed + 1,
            capacity=self._capacity,
            generated=len(sequence.generated),
            remedy="give the cache more memory or ask for fewer tokens",
            **({"cause": str(cause)} if cause else {}),
        )
