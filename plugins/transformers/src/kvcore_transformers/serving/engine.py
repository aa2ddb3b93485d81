"""A small inference engine on kvcore: admission, chunked prefill, ragged decode on the pools, retraction, transfer.

One :class:`Engine` is one of three things, by what it is given: with neither side it serves requests alone; with a
``sender`` it computes prompts and offers them chunk by chunk; with a ``receiver`` it pulls computed prompts and decodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import accumulate, chain
from typing import Any

import msgspec
import torch

from kvcore.contract import Fence
from kvcore.engine.cache import KVCache
from kvcore.engine.peers import (
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveSide,
    SendDone,
    SendEvent,
    SendFailed,
    SendSide,
)
from kvcore.engine.step import Step
from kvcore.errors import (
    ConfigError,
    KVCoreError,
    PeerLostError,
    ProtocolError,
    RequestError,
    UnknownRequestError,
)
from kvcore_transformers.modeling.attention import ATTENTION
from kvcore_transformers.modeling.state_batch import batch_of, keeps_states, scales_by_position
from kvcore_transformers.modeling.steady import steady_rows
from kvcore_transformers.serving.requests import (
    AskedEvent,
    DoneEvent,
    EngineStats,
    Event,
    FailedEvent,
    GenerationRequest,
    PrefilledEvent,
    ReceivedEvent,
    Sequence,
    State,
    TokenEvent,
)
from kvcore_transformers.serving.scheduler import Batch, Row, Scheduler

LayerHook = Callable[[str, int, int, int, Fence], None]

DEFAULT_CHUNK = 64
"""Prompt tokens in one forward pass."""


class FirstToken(msgspec.Struct, frozen=True):
    """What a prefill engine sends along with the last chunk."""

    token: int


class Engine:
    """Runs requests on a model and a cache. Not thread-safe: one loop calls ``submit``, ``step`` and ``events``.

    Args:
        model: a Hugging Face causal language model; its attention implementation is set to ``kvcore_paged``, and
            its linear layers are made steady (:mod:`kvcore_transformers.modeling.steady`).
        cache: made for this model.
        chunk: prompt tokens in one forward pass.
        sender: offer computed prompts through it; requests end here when they are pulled.
        receiver: get computed prompts through it.
        on_layer: ``on_layer(request, start, stop, layer, fence)`` is called within the forward pass of a prompt's last
            chunk, tokens ``[start, stop)``, when all that a layer keeps is stored (keys and values; of a model with
            states those too): once the fence is done it is there, and will not be written again. The step is not
            committed yet.
    """

    def __init__(
        self,
        model: Any,
        cache: KVCache,
        *,
        chunk: int = DEFAULT_CHUNK,
        sender: SendSide | None = None,
        receiver: ReceiveSide | None = None,
        on_layer: LayerHook | None = None,
    ) -> None:
        if chunk < 1 or chunk > cache.config.cache.max_tokens:
            raise ConfigError("chunk out of range", chunk=chunk, max_tokens=cache.config.cache.max_tokens)
        if sender is not None and receiver is not None:
            raise ConfigError("an engine either sends or receives")
        model.set_attn_implementation(ATTENTION)
        steady_rows(model)
        self._model = model
        self._cache = cache
        self._sender = sender
        self._receiver = receiver
        self._on_layer = on_layer
        self._last_layer = max(layer for group in cache.model.groups for layer in group.layers)
        self._events: list[Event] = []
        self._stats = EngineStats()
        self._scheduler = Scheduler(
            cache,
            chunk=chunk,
            decodes=sender is None,
            receive=None if receiver is None else self._ask,
            announce=None if sender is None else self._begin_sending,
            max_length=cache.model.max_length,
            stats=self._stats,
            on_failed=self._report_failed,
            rows_apart=keeps_states(cache),
            equal_lengths=keeps_states(cache) and scales_by_position(model.config),
        )

    # --- the caller's side ---

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; raises what :meth:`Scheduler.submit` raises, and then nothing is queued."""
        self._scheduler.submit(request)

    def abort(self, request_id: str, reason: str = "aborted by the caller") -> None:
        """End a request in whatever state it is; a ``FailedEvent`` follows. Raises UnknownRequestError."""
        self._fail(self._scheduler.get(request_id), RequestError(reason, request=request_id))

    def lose_peer(self, reason: str) -> None:
        """The prefill process is gone: fail what waits for it; what has arrived goes on."""
        for sequence in list(self._scheduler.live.values()):
            if sequence.state in (State.WAITING, State.RECEIVING):
                self._fail(sequence, PeerLostError(f"the prefill process is gone: {reason}", request=sequence.id))

    @property
    def busy(self) -> bool:
        """Whether any request is in work."""
        return bool(self._scheduler.live)

    @property
    def stats(self) -> EngineStats:
        """Counts so far, a copy."""
        seconds = 0.0 if self._receiver is None else self._receiver.stats().copy_seconds
        ops = dict(self._cache.store.op_counts)
        saved = dict(self._stats.bytes_saved)
        return msgspec.structs.replace(self._stats, bytes_saved=saved, ops=ops, pull_seconds=seconds)

    def events(self) -> list[Event]:
        """Take what happened since the last call, in order."""
        taken, self._events = self._events, []
        return taken

    def step(self) -> bool:
        """Handle transfers, admit, run one forward pass. False where there was nothing to do now."""
        worked = self._poll_transfers()
        worked |= self._scheduler.admit()
        worked |= self._poll_transfers()  # admission may have found transfers that are over: their units are gone
        batch = self._scheduler.next_batch()
        if batch is None:
            return worked
        with batch.step as step:
            if batch.kind == "prefill":
                self._note_chunks(batch.rows)
            tokens = self._forward(step, batch.rows, self._layer_hook(batch))
            step.commit()
        self._stats.steps += 1
        for (sequence, count), token in zip(batch.rows, tokens, strict=True):
            start = sequence.computed
            sequence.computed += count
            if batch.kind == "decode":
                self._append(sequence, token)
            else:
                self._prefilled(sequence, start, token)
        return True

    def run(self, requests: list[GenerationRequest]) -> dict[str, tuple[int, ...] | KVCoreError]:
        """Serve requests to the end: generated tokens, or the error, by id. For engines without sides."""
        results: dict[str, tuple[int, ...] | KVCoreError] = {}
        for request in requests:
            try:
                self.submit(request)
            except KVCoreError as error:
                results.setdefault(request.id, error)
        while self.busy:
            self.step()
            for event in self.events():
                if isinstance(event, DoneEvent):
                    results[event.request] = event.tokens
                elif isinstance(event, FailedEvent):
                    results[event.request] = event.exception()
        return results

    # --- one forward pass ---

    @torch.inference_mode()
    def _forward(self, step: Step, rows: tuple[Row, ...], on_layer: Callable[[int, Fence], None] | None) -> list[int]:
        """Compute the rows' new tokens; return the greedy next token of each row.

        Rows are packed into one sequence; those of a model with states stand in the batch axis.
        """
        ids = [sequence.tokens[sequence.computed : sequence.computed + count] for sequence, count in rows]
        positions = [list(range(sequence.computed, sequence.computed + count)) for sequence, count in rows]
        cache = batch_of(step, self._cache, self._model.config, on_layer)
        keep: int | torch.Tensor = 1
        if cache.packs_rows:
            keep = torch.tensor([*accumulate(map(len, ids))], device=self._model.device) - 1
            ids, positions = [list(chain.from_iterable(ids))], [list(chain.from_iterable(positions))]
        result = self._model(
            input_ids=torch.tensor(ids, device=self._model.device),
            position_ids=torch.tensor(positions, device=self._model.device),
            cache=cache,
            use_cache=True,
            logits_to_keep=keep,
        )
        cache.finish()
        logits = result.logits[0] if cache.packs_rows else result.logits[:, -1]
        tokens: list[int] = logits.float().argmax(-1).tolist()
        return tokens

    def _layer_hook(self, batch: Batch) -> Callable[[int, Fence], None] | None:
        """What a forward pass tells of its layers: only those that compute a last chunk, so that no other pays for it."""
        if batch.kind != "prefill":
            return None
        ends = [item for item, count in batch.rows if item.computed + count == item.target]
        hooks: list[tuple[LayerHook, list[Sequence]]] = []
        if self._on_layer is not None:
            hooks.append((self._on_layer, ends))
        if self._sender is not None:
            hooks.append((self._offer_layer, [item for item in ends if self._layerwise(item)]))
        if not any(items for _, items in hooks):
            return None

        def stored(layer: int, fence: Fence) -> None:
            for hook, items in hooks:
                for item in items:
                    hook(item.id, item.computed, item.target, layer, fence)

        return stored

    # --- progress of a request ---

    def _append(self, sequence: Sequence, token: int) -> None:
        """A new token: its keys and values come with the next step, where there is one."""
        sequence.tokens.append(token)
        self._events.append(TokenEvent(sequence.id, token))
        if not sequence.wants_more:
            self._scheduler.finish(sequence)
            self._events.append(DoneEvent(sequence.id, sequence.generated))

    def _prefilled(self, sequence: Sequence, start: int, token: int) -> None:
        last = sequence.computed == sequence.target
        if self._sender is not None:
            data = msgspec.msgpack.encode(FirstToken(token)) if last else b""
            try:
                self._sender.offer(sequence.id, start, sequence.computed, last=last, engine_data=data)
            except UnknownRequestError:
                return  # it failed on the wire meanwhile; the event that says so is on its way
            if last:
                self._scheduler.start_sending(sequence)
                self._events.append(PrefilledEvent(sequence.id, token))
        elif last:
            recomputed = len(sequence.tokens) > sequence.target
            self._scheduler.start_running(sequence)
            if not recomputed:
                self._append(sequence, token)

    def _fail(self, sequence: Sequence, error: KVCoreError) -> None:
        side: SendSide | ReceiveSide | None = None
        if sequence.state is State.RECEIVING:
            side = self._receiver
        elif sequence.state in (State.PREFILLING, State.SENDING):
            side = self._sender
        if side is not None:
            # The transfer gives the units back once nothing reads or writes them any more.
            with contextlib.suppress(UnknownRequestError):  # it is over already; the event is on its way
                side.abort(sequence.id, error.message)
        self._ended(sequence, error, release=side is None)

    def _ended(self, sequence: Sequence, error: KVCoreError, *, release: bool) -> None:
        self._scheduler.finish(sequence, error, release=release)
        self._report_failed(sequence)

    def _report_failed(self, sequence: Sequence) -> None:
        assert sequence.error is not None
        self._events.append(FailedEvent(sequence.id, sequence.error.as_dict()))

    # --- transfer ---

    def _ask(self, sequence: Sequence) -> None:
        assert self._receiver is not None
        self._receiver.ask(sequence.id, len(sequence.request.prompt))
        self._events.append(AskedEvent(sequence.id))

    def _begin_sending(self, sequence: Sequence) -> None:
        assert self._sender is not None
        self._sender.begin(sequence.id, sequence.target)

    def _note_chunks(self, rows: tuple[Row, ...]) -> None:
        """Tell the sender that chunks of these prompts start now."""
        if self._sender is None:
            return
        for sequence, count in rows:
            with contextlib.suppress(UnknownRequestError):  # failed on the wire; the event is on its way
                self._sender.chunk_starts(sequence.id, last=sequence.computed + count == sequence.target)

    def _layerwise(self, sequence: Sequence) -> bool:
        """Whether single layers of a last chunk are worth an offer: every earlier chunk had the next one to hide behind."""
        assert self._sender is not None
        try:
            return self._sender.layerwise(sequence.id)
        except UnknownRequestError:
            return False  # failed on the wire; the event is on its way

    def _offer_layer(self, request: str, start: int, stop: int, layer: int, fence: Fence) -> None:
        """Have a layer pulled while the next ones are computed. The last one goes with the offer of the chunk."""
        assert self._sender is not None
        if layer != self._last_layer:
            with contextlib.suppress(UnknownRequestError):
                self._sender.offer_layers(request, start, stop, [layer], last=True, after=fence)

    def _poll_transfers(self) -> bool:
        events: list[SendEvent | ReceiveEvent] = []
        if self._sender is not None:
            events += self._sender.events()
        if self._receiver is not None:
            events += self._receiver.events()
        for event in events:
            self._transferred(event)
        return bool(events)

    def _transferred(self, event: SendEvent | ReceiveEvent) -> None:
        """Apply one event; one about a request that was aborted here before (its id may be waiting again) is over."""
        found = self._scheduler.live.get(event.request)
        sending = found if found is not None and found.state in (State.PREFILLING, State.SENDING) else None
        receiving = found if found is not None and found.state is State.RECEIVING else None
        match event:
            case SendDone() if sending is not None:
                self._scheduler.finish(sending, release=False)
                self._events.append(DoneEvent(sending.id, ()))
            case SendFailed() if sending is not None:
                self._ended(sending, event.error, release=False)
            case ReceiveDone() if receiving is not None:
                self._received(receiving, event)
            case ReceiveDone():
                self._cache.release(event.request)  # it arrived just before it was aborted: the units are ours
            case ReceiveFailed() if receiving is not None:
                self._ended(receiving, event.error, release=False)

    def _received(self, sequence: Sequence, event: ReceiveDone) -> None:
        try:
            first = msgspec.msgpack.decode(event.engine_data, type=FirstToken)
            if not 0 <= first.token < self._model.config.vocab_size:
                raise ValueError(f"token {first.token} is outside the vocabulary")
        except (msgspec.MsgspecError, ValueError) as error:
            refusal = ProtocolError("engine data of a prompt is wrong", request=sequence.id, cause=str(error))
            self._ended(sequence, refusal, release=True)
            return
        self._events.append(ReceivedEvent(sequence.id, event.bytes_by_component, event.pulled_early_bytes))
        sequence.computed = sequence.target
        self._scheduler.start_running(sequence)
        self._append(sequence, first.token)
