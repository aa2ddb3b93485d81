"""What a sender remembers of a request, and what may be offered of it (no I/O)."""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import KVCoreError, ProtocolError, RequestError, TransferError, TransferExpiredError
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import Peer, add_bytes

_MAX_OFFER_BYTES = control.MAX_MESSAGE_BYTES // 2

Ends = dict[tuple[str, str, str], npt.NDArray[np.int64]]
"""By ``(group, range, component)``: the logical unit that comes next, of every layer."""


@dataclass
class PeerState:
    """A receiver that has said hello.

    Attributes:
        manifest: what it said.
        heard_at, sent_at: when a message last came and went.
        has_taken: it has said what it takes.
    """

    manifest: Manifest
    heard_at: float
    sent_at: float
    has_taken: bool = False

    @property
    def instance(self) -> str:
        """Its instance id."""
        return self.manifest.instance

    @property
    def engine(self) -> str:
        """The engine it is a rank of."""
        return self.manifest.engine

    @property
    def rank(self) -> int:
        """Which rank."""
        return self.manifest.ranks.rank

    @property
    def num_ranks(self) -> int:
        """How many ranks the engine has: all of them must pull a request before any of them may keep it."""
        return self.manifest.ranks.size


@dataclass(frozen=True)
class Asker:
    peer: Peer
    attempt: int


@dataclass(frozen=True)
class Ask:
    """An ask as it came: from one rank of the engine that wants the request."""

    asker: Asker
    engine: str
    start: int
    stop: int
    layerwise: bool
    asked_at: float
    token: bytes = b""


@dataclass(frozen=True)
class Offered:
    start: int
    stop: int
    payloads: tuple[Payload, ...]
    last: bool


@dataclass
class Reader:
    """One rank that pulls a request.

    Attributes:
        asker: who, and which of its attempts.
        nothing: it has nothing to read here: it is only told when the request is over.
        layerwise: it can use offers of single layers.
        lease_ends: when its lease ends; None until the prompt is complete.
        sent: offers sent to it.
        pulled: which of them it has reported.
        nbytes: what it has reported, by component.
        early: of that, what was reported before the last chunk started.
        checking: checksums of what it has read are being taken.
        reported, acked: it has said that it has everything; it has accepted the commit.
        checksums: of what it has read, by component, where configured.
    """

    asker: Asker
    nothing: bool
    layerwise: bool
    lease_ends: float | None = None
    sent: int = 0
    pulled: set[int] = field(default_factory=set)
    nbytes: dict[str, int] = field(default_factory=dict)
    early: int | None = None
    checking: bool = False
    reported: bool = False
    acked: bool = False
    checksums: dict[str, int] = field(default_factory=dict)


@dataclass
class Outgoing:
    """A request that was begun and is not over.

    Attributes:
        engine, num_readers: who pulls it, and in how many ranks; unknown until the first of them asks.
        readers: by peer.
        lease_ends: when the lease ends of ranks that have not asked; None until the prompt is complete.
        committed: every rank has everything, and was told that it is valid.
        units: of its offers.
    """

    request: str
    num_tokens: int
    token: bytes = b""
    offers: list[Offered] = field(default_factory=list)
    offered_tokens: int = 0
    ends: Ends = field(default_factory=dict)
    complete: bool = False
    engine_data: bytes = b""
    engine: str = ""
    num_readers: int = 0
    readers: dict[Peer, Reader] = field(default_factory=dict)
    lease_ends: float | None = None
    committed: bool = False
    units: int = 0

    @property
    def everyone_asked(self) -> bool:
        """Whether every rank of the engine that pulls the request has asked for it."""
        return bool(self.readers) and len(self.readers) == self.num_readers

    def offers_for(self, reader: Reader) -> list[Offered]:
        """The offers a reader is told of: all, or one empty last one where it has nothing to read."""
        if not reader.nothing:
            return self.offers
        return [Offered(0, self.num_tokens, (), True)] if self.complete else []

    def total_bytes(self) -> dict[str, int]:
        """What all readers have reported, by component."""
        total: dict[str, int] = {}
        for reader in self.readers.values():
            add_bytes(total, reader.nbytes)
        return total

    def lease(self) -> float | None:
        """When the first lease ends of anyone who has still to acknowledge; None where nobody has one."""
        leases = [reader.lease_ends for reader in self.readers.values() if not reader.acked]
        if not self.everyone_asked:
            leases.append(self.lease_ends)
        return min((lease for lease in leases if lease is not None), default=None)


def check_offer(record: Outgoing, start: int, stop: int, *, last: bool, engine_data: bytes) -> None:
    """Raise RequestError for an offer that does not follow what was offered before."""
    facts: dict[str, Any] = {"request": record.request, "start": start, "stop": stop}
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
            request=record.request,
            limit_bytes=control.MAX_ENGINE_DATA_BYTES,
            got_bytes=len(engine_data),
            last=last,
        )


def check_payloads(manifest: Manifest, record: Outgoing, payloads: Sequence[Payload]) -> Ends:
    """Check an offer's payloads; return where each ``(group, range, component)`` it names ends with it.

    Raises RequestError for foreign components or layers, for too many units, and for a unit that was offered before.
    """
    ends: Ends = {}
    if sum(len(payload.units) for payload in payloads) > _MAX_OFFER_BYTES:
        raise RequestError("too many units for one offer", request=record.request, remedy="offer in smaller chunks")
    for payload in payloads:
        layout = manifest.layouts.get(payload.group)
        facts = {"request": record.request, "group": payload.group, "range": payload.range}
        known = {item.name for item in layout.ranges} if layout is not None else set()
        if layout is None or payload.range not in known or not set(payload.components) <= set(layout.components):
            raise RequestError(
                "payload of components that are not in the manifest", **facts, components=payload.components
            )
        rows = _rows(layout.layers, payload.layers, facts)
        if not payload.num_units:
            continue
        for component in payload.components:
            key = (payload.group, payload.range, component)
            if key not in ends:
                before = record.ends.get(key)
                ends[key] = np.zeros(len(layout.layers), np.int64) if before is None else before.copy()
            end = int(ends[key][rows].max(initial=0))
            if payload.first < end:
                raise RequestError(
                    "a unit is offered twice", **facts, component=component, expected=end, got=payload.first
                )
            ends[key][rows] = payload.stop
    return ends


def check_ask(record: Outgoing, ask: Ask) -> None:
    """Raise TransferError for an ask without the request's token, or of another prompt's length."""
    if not hmac.compare_digest(record.token, ask.token):  # in a time that does not tell how much of it is right
        raise TransferError(
            "the request has another token", request=record.request,
            remedy="ask with the token that the prefill engine has begun the request with",
        )  # fmt: skip
    if not ask.start <= ask.stop == record.num_tokens:
        raise TransferError(
            "ask does not fit the prompt", request=record.request, start=ask.start, stop=ask.stop,
            num_tokens=record.num_tokens,
        )  # fmt: skip


def check_pulled(record: Outgoing, reader: Reader, message: control.Pulled, manifest: Manifest) -> None:
    """Raise ProtocolError for a report of an offer that was not made or was reported, or of more bytes than lie in it."""
    if message.seq >= reader.sent or message.seq in reader.pulled:
        raise ProtocolError("offer reported pulled out of turn", request=record.request, seq=message.seq)
    offered = _offered_bytes(manifest, record.offers_for(reader)[message.seq])
    for component, count in message.nbytes.items():
        if count > offered.get(component, 0):
            raise ProtocolError(
                "more bytes are reported than were offered", request=record.request, seq=message.seq,
                component=component, expected=f"at most {offered.get(component, 0)}", got=count,
            )  # fmt: skip


def _offered_bytes(manifest: Manifest, offer: Offered) -> dict[str, int]:
    """By component: what the units of an offer hold here, padding included. No reader can take more of them."""
    total: dict[str, int] = {}
    for payload in offer.payloads:
        layout = manifest.layouts[payload.group]
        units = payload.num_units * len(payload.layers or layout.layers)
        for component in payload.components:
            size = sum(item.unit_bytes for item in layout.regions_of(component) if payload.range in item.ranges)
            add_bytes(total, {component: size * units})
    return total


def check_pulled_all(record: Outgoing, reader: Reader, message: control.PulledAll) -> None:
    """Raise ProtocolError where a receiver says that it has everything, and its own reports say otherwise."""
    if not record.complete or len(reader.pulled) != reader.sent or message.nbytes != reader.nbytes:
        raise ProtocolError(
            "receiver reports a prompt it has not pulled", request=record.request, expected=reader.nbytes,
            got=message.nbytes, offers=len(record.offers), pulled=len(reader.pulled),
        )  # fmt: skip


def check_units(record: Outgoing, reader: Reader, units: Sequence[Payload]) -> None:
    """Raise ProtocolError where checksums are asked of a unit that this reader was not offered, or twice of one."""
    offered = _by_component(payload for offer in record.offers_for(reader) for payload in offer.payloads)
    for key, wanted in _by_component(units).items():
        held, known = np.unique(offered.get(key, _NO_IDS), return_counts=True)
        ids, counts = np.unique(wanted, return_counts=True)
        at = np.searchsorted(held, ids)
        foreign = at == held.size
        foreign[~foreign] = (held[at[~foreign]] != ids[~foreign]) | (known[at[~foreign]] < counts[~foreign])
        if foreign.any():
            group, range_name, component, layers = key
            raise ProtocolError(
                "checksums are asked of units that were not offered", request=record.request, group=group,
                range=range_name, component=component, layers=layers, got=int(ids[foreign][0]),
            )  # fmt: skip


_NO_IDS = np.zeros(0, np.int64)


def _by_component(
    payloads: Iterable[Payload],
) -> dict[tuple[str, str, str, tuple[int, ...]], npt.NDArray[np.int64]]:
    parts: dict[tuple[str, str, str, tuple[int, ...]], list[npt.NDArray[np.int64]]] = {}
    for item in payloads:
        for component in item.components:
            parts.setdefault((item.group, item.range, component, item.layers), []).append(item.ids)
    return {key: np.concatenate(ids) for key, ids in parts.items()}


def offer_message(
    address: Mapping[str, str], record: Outgoing, reader: Reader, seq: int, offer: Offered
) -> control.Offer:
    """How offer number ``seq`` of a request is told to one of its readers."""
    return control.Offer(
        **address,
        request=record.request,
        attempt=reader.asker.attempt,
        seq=seq,
        start=offer.start,
        stop=offer.stop,
        payloads=offer.payloads,
        last=offer.last,
    )


def failure_message(
    address: Mapping[str, str], request: str, asker: Asker, error: KVCoreError
) -> control.Expired | control.Abort:
    """How it is told to who asked that a request is over without success."""
    if isinstance(error, TransferExpiredError):
        return control.Expired(**address, request=request, attempt=asker.attempt)
    told = control.WireError.of(error)
    return control.Abort(**address, request=request, attempt=asker.attempt, error=told)


def commit_message(address: Mapping[str, str], record: Outgoing, reader: Reader) -> control.Commit:
    """What a reader is told when every rank has everything: what it pulled is valid."""
    return control.Commit(
        **address,
        request=record.request,
        attempt=reader.asker.attempt,
        num_tokens=record.num_tokens,
        num_offers=reader.sent,
        nbytes=reader.nbytes,
        pulled_early_bytes=reader.early or 0,
        engine_data=record.engine_data,
        checksums=reader.checksums,
    )


def _rows(held: tuple[int, ...], layers: Iterable[int], facts: dict[str, str]) -> npt.NDArray[np.int64]:
    wanted = tuple(layers) or held
    for layer in wanted:
        if layer not in held:
            raise RequestError("payload of a layer that is not in the manifest", **facts, layer=layer, known=held)
    return np.array([held.index(layer) for layer in wanted], np.int64)
