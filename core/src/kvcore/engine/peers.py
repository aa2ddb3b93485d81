"""The two ends of a transfer, as an engine sees them: endpoint calls and the units behind them kept in step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

from kvcore.config import TransferConfig
from kvcore.contract import DONE, Fence
from kvcore.engine.handover import EarlyLayers, Finished, Held
from kvcore.engine.links import Registered, keys_of, keys_to
from kvcore.engine.sides import Side, arrays_of, forget, options_of
from kvcore.engine.turns import Turns, in_turn
from kvcore.errors import EmptyPromptError, RequestError, TransferError
from kvcore.memory.store import Store
from kvcore.requests.manager import Manager
from kvcore.requests.payload import Payload
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import (
    ReceiveDone,
    ReceiveEvent,
    ReceiveFailed,
    ReceiveQuiet,
    SendDone,
    SendEvent,
    SendFailed,
)
from kvcore.transfer.session.checksums import ReceiverChecksums, SenderChecksums
from kvcore.transfer.wire.endpoint import ReceiverEndpoint, SenderEndpoint

__all__ = [
    "ReceiveDone",
    "ReceiveEvent",
    "ReceiveFailed",
    "ReceiveQuiet",
    "ReceiveSide",
    "SendDone",
    "SendEvent",
    "SendFailed",
    "SendSide",
]


class SendSide(Side[SendEvent]):
    """Offers requests to the decode processes that connect. Calls are made by the engine's thread only.

    The final event of a request (:class:`SendDone`, :class:`SendFailed`) releases it. An engine that wants to end it
    earlier calls :meth:`abort`; releasing or retracting the request aborts its transfer too, and its units stay held until
    that event.
    """

    def __init__(
        self,
        endpoint: SenderEndpoint,
        manager: Manager,
        store: Store,
        *,
        turns: Turns | None = None,
        on_close: Callable[[Side[Any]], None] = forget,
    ) -> None:
        super().__init__(endpoint, manager, store, turns, on_close)
        self._endpoint = endpoint
        self._begun: dict[str, Held] = {}
        self._totals: dict[str, int] = {}
        self._early: dict[str, EarlyLayers] = {}
        self._finished = Finished()

    @classmethod
    def open(
        cls,
        manifest: Manifest,
        config: TransferConfig,
        link: Registered,
        manager: Manager,
        store: Store,
        *,
        turns: Turns | None = None,
        on_close: Callable[[Side[Any]], None] = forget,
    ) -> Self:
        """Start serving; ``on_close`` is called with the side once it is closed."""
        manifest = manifest.serving(link.record)
        endpoint = SenderEndpoint(
            manifest,
            bind=config.bind,
            options=options_of(config),
            keys=keys_of(config),
            allow=config.allow,
            checksums=SenderChecksums(manifest, arrays_of(store)) if config.checksum != "none" else None,
        )
        return cls(endpoint, manager, store, turns=turns, on_close=on_close)

    @property
    def holds_units(self) -> bool:
        """Whether units are held for a transfer."""
        return bool(self._begun)

    @property
    def address(self) -> str:
        """What decode processes connect to."""
        return self._endpoint.address

    @in_turn
    def begin(self, request_id: str, num_tokens: int, *, token: bytes = b"") -> None:
        """Announce a request of ``num_tokens`` prompt tokens; asks for it are answered from now on.

        With a ``token`` (at most 256 bytes, such as a random one that the router hands to both engines) only asks that
        bring the same are answered: an id alone takes nothing.

        Raises EmptyPromptError for no tokens, DuplicateRequestError while an earlier request of that id is not over.
        """
        if num_tokens < 1:
            raise EmptyPromptError(
                "a prompt needs at least one token",
                request=request_id,
                num_tokens=num_tokens,
                remedy="announce it once its prompt is known",
            )
        self._drain()  # an event of an earlier request of this id must not release the new one
        self._endpoint.begin(request_id, num_tokens, token)
        self._totals[request_id] = num_tokens

    @in_turn
    def chunk_starts(self, request_id: str, *, last: bool) -> None:
        """Say that a prefill chunk begins, so that bytes pulled before the last one can be counted."""
        self._endpoint.note_chunk_start(request_id, last=last)

    @in_turn
    def offer(self, request_id: str, start: int, stop: int, *, last: bool = False, engine_data: bytes = b"") -> None:
        """Offer the units that became final when tokens ``[start, stop)`` were computed and committed.

        ``last`` ends the prompt and carries ``engine_data`` (at most 64 KiB) to the receiver's engine. Layers that
        :meth:`offer_layers` has offered of this chunk are left out. Raises RequestError, with nothing offered, for
        tokens that do not follow what was offered before.
        """
        early = self._early.get(request_id)
        payloads = self._payloads(request_id, start, stop, last=last)
        if early is not None:
            early.check(request_id, start, stop, last=last)
            payloads = early.rest(payloads, self._layers)
        else:
            self._hold(request_id, payloads)
        self._endpoint.offer(request_id, start, stop, payloads, last=last, engine_data=engine_data)
        self._early.pop(request_id, None)
        if last:
            self._finished.add(request_id, self._begun[request_id])

    @in_turn
    def layerwise(self, request_id: str) -> bool:
        """Whether offers of single layers serve anybody: a receiver asked, and its transport reads small pieces at no
        loss (:class:`kvcore.contract.TransportTraits`). Worth asking once before a chunk."""
        return self._endpoint.layerwise(request_id)

    @in_turn
    def offer_layers(
        self, request_id: str, start: int, stop: int, layers: Collection[int], *, last: bool = False,
        after: Fence = DONE,
    ) -> None:  # fmt: skip
        """Offer some layers of tokens ``[start, stop)``, stored but not committed yet, while the others are computed.

        They are pulled at once. The chunk must be completed by :meth:`offer` of the same tokens, which offers the other
        layers; a step that is abandoned instead aborts the transfer.

        Args:
            request_id, start, stop, last: as for the chunk's :meth:`offer`.
            layers: storage layer ids, offered once a chunk.
            after: fence of their stores; waited for.
        """
        early = self._early.get(request_id) or EarlyLayers(start, stop, last)
        early.check(request_id, start, stop, last=last)
        for layer in layers:
            if layer in early.layers:
                raise RequestError("a layer is offered twice", request=request_id, layer=layer)
        wanted = set(layers)
        chunk = self._payloads(request_id, start, stop, last=last)
        payloads = [
            payload.of_layers([layer for layer in self._layers(payload.group) if layer in wanted])
            for payload in chunk
            if payload.num_units and wanted & set(self._layers(payload.group))
        ]
        after.wait()
        if request_id not in self._early:  # all units of the chunk at once: they are the same for every layer
            self._hold(request_id, chunk)
            self._early[request_id] = early
        self._endpoint.offer(request_id, start, start, payloads)
        early.layers |= wanted

    @in_turn
    def abandoned(self, request_ids: Collection[str]) -> None:
        """A step of these requests came to nothing: what :meth:`offer_layers` has offered of it is not to be kept."""
        for request_id in request_ids:
            if request_id in self._early:
                self.let_go(request_id)

    @in_turn
    def over_budget(self, fraction: float) -> dict[str, Any] | None:
        """What finished prompts hold, where it is more than ``fraction`` of a unit range; None where it is not.

        Prefill must not go on filling memory that decode processes are too slow, or too dead, to take over.
        """
        if len(self._finished):
            with contextlib.suppress(TransferError):  # an endpoint that has failed says so where it is used
                self._drain()
        return self._finished.over(fraction)

    def _layers(self, group: str) -> tuple[int, ...]:
        return self._store.pools[group].layout.layers

    def _payloads(self, request_id: str, start: int, stop: int, *, last: bool) -> tuple[Payload, ...]:
        return self._manager.payloads(request_id, start, stop, last=last, total=self._totals.get(request_id))

    def _hold(self, request_id: str, payloads: Sequence[Payload]) -> None:
        held = self._begun.get(request_id)
        if held is None:
            self._begun[request_id] = Held(self._manager, request_id, live_at=self._totals.get(request_id) or 0)
        else:
            held.add(payloads)

    @in_turn
    def abort(self, request_id: str, reason: str) -> None:
        """Give a request up; its :class:`SendFailed` follows. Raises UnknownRequestError when it is over."""
        self._abort(request_id, reason)

    def _abort(self, request_id: str, reason: str) -> None:
        self._endpoint.abort(request_id, reason)

    def _moves(self, request_id: str) -> bool:
        return request_id in self._totals

    def _frozen(self, request_id: str) -> bool:
        return request_id in self._finished and self._begun[request_id].live

    def _disown(self, request_id: str) -> None:
        del self._totals[request_id]

    def _apply(self, event: SendEvent) -> None:
        owned = self._totals.pop(event.request, None) is not None
        self._early.pop(event.request, None)
        self._finished.discard(event.request)
        held = self._begun.pop(event.request, None)
        if held is not None:
            held.release(self._store)
        elif owned and event.request in self._manager:  # admitted and not offered yet; else it has no units
            self._manager.release(event.request)
            self._store.invalidate(event.request)


class ReceiveSide(Side[ReceiveEvent]):
    """Pulls requests from one prefill engine, from all of its ranks."""

    def __init__(
        self,
        endpoint: ReceiverEndpoint,
        manager: Manager,
        store: Store,
        before_admit: Callable[[], None] = lambda: None,
        *,
        turns: Turns | None = None,
        on_close: Callable[[Side[Any]], None] = forget,
    ) -> None:
        super().__init__(endpoint, manager, store, turns, on_close)
        self._endpoint = endpoint
        self._before_admit = before_admit
        self._filling: dict[str, Held] = {}

    @classmethod
    def open(
        cls,
        addresses: str | Sequence[str],
        manifest: Manifest,
        config: TransferConfig,
        link: Registered,
        manager: Manager,
        store: Store,
        before_admit: Callable[[], None] = lambda: None,
        *,
        peer: str | None = None,
        turns: Turns | None = None,
        on_close: Callable[[Side[Any]], None] = forget,
    ) -> Self:
        """Connect to every rank of the sender and shake hands.

        ``peer`` is the sender's certificate among ``transfer.curve_peers``, see :func:`kvcore.engine.links.keys_to`.
        ``before_admit`` is called before units are allocated for a request: to give back those whose copies have ended.
        ``on_close`` is called with the side once it is closed.
        """
        endpoint = ReceiverEndpoint(
            addresses,
            manifest,
            link.transport,
            options=options_of(config),
            keys=keys_to(config, peer),
            checksums=ReceiverChecksums(manifest, arrays_of(store)) if config.checksum != "none" else None,
        )
        return cls(endpoint, manager, store, before_admit, turns=turns, on_close=on_close)

    @property
    def holds_units(self) -> bool:
        """Whether units are held for a transfer."""
        return bool(self._filling)

    @in_turn
    def ask(self, request_id: str, num_tokens: int, *, token: bytes = b"") -> None:
        """Allocate units for a prompt and pull it as it is computed; ``token`` as the prefill engine has begun it with.

        Raises what ``admit`` raises (EmptyPromptError, PromptTooLongError, DuplicateRequestError, CapacityError) and
        PeerLostError; nothing is held then. :class:`ReceiveDone` makes the request ready to decode.
        """
        self._drain()
        self._before_admit()
        self._manager.admit(request_id, num_tokens, external=True)
        try:
            tables = self._manager.destinations(request_id, num_tokens)
            self._endpoint.ask(request_id, tables, 0, num_tokens, token)
        except BaseException:
            self._manager.release(request_id)
            raise
        self._filling[request_id] = Held(self._manager, request_id)

    @in_turn
    def abort(self, request_id: str, reason: str) -> None:
        """Give a request up; its :class:`ReceiveFailed` follows once no read writes its units any more."""
        self._abort(request_id, reason)

    def _abort(self, request_id: str, reason: str) -> None:
        self._endpoint.abort(request_id, reason)

    def _moves(self, request_id: str) -> bool:
        return request_id in self._filling

    def _frozen(self, request_id: str) -> bool:
        return request_id in self._filling and self._filling[request_id].live

    def _apply(self, event: ReceiveEvent) -> None:
        if isinstance(event, ReceiveDone):
            self._filling.pop(event.request).fill(event.num_tokens)
        elif isinstance(event, ReceiveQuiet) or (isinstance(event, ReceiveFailed) and event.quiet):
            self._filling.pop(event.request).release(self._store)
