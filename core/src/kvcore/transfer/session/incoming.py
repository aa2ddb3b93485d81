"""What a receiver remembers of an ask, and what it has to read for an offer (no I/O)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvcore.contract import PeerConnection, ReadHandle, ReadJob
from kvcore.errors import (
    KVCoreError,
    LayoutError,
    PeerLostError,
    ProtocolError,
    RequestError,
    TransferError,
    TransferExpiredError,
)
from kvcore.layout import Int64Array
from kvcore.requests.payload import Payload
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, add_bytes
from kvcore.transfer.session.plan import PeerPlan


@dataclass(frozen=True)
class Pull:
    """What to read for an offer.

    Attributes:
        jobs: the reads.
        nbytes: logical bytes by component.
        units: the sender's units among it.
        landed: the units they land in, in the same order.
    """

    jobs: tuple[ReadJob, ...]
    nbytes: dict[str, int]
    units: tuple[Payload, ...]
    landed: tuple[Payload, ...]


@dataclass
class Read:
    """One offer being pulled."""

    offer: control.Offer
    handle: ReadHandle
    nbytes: dict[str, int]
    started_at: float


@dataclass
class Incoming:
    """One ask that is not over.

    Attributes:
        missing: by ``(group, range, component)``, which units of which layers have still to be offered.
        units, landed: what was read so far, where checksums are configured (see :class:`Pull`).
        checking: what arrived is held against the checksums of the commit.
        commit: the sender's; accepted once every rank of the sender has committed.
    """

    request: str
    attempt: int
    start: int
    stop: int
    tables: dict[tuple[str, str], Int64Array]
    missing: dict[tuple[str, str, str], npt.NDArray[np.bool_]]
    next_seq: int = 0
    tokens: int = 0
    complete: bool = False
    reads: list[Read] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=dict)
    units: list[Payload] = field(default_factory=list)
    landed: list[Payload] = field(default_factory=list)
    asked_commit_at: float | None = None
    commit: control.Commit | None = None
    checking: bool = False
    error: KVCoreError | None = None
    failed_at: float = 0.0

    @property
    def nothing(self) -> bool:
        """Nothing is read from this rank of the sender."""
        return self.start == self.stop

    def moves(self, since: float) -> bool:
        """Whether every read under way was started after ``since``."""
        return all(read.started_at > since for read in self.reads)

    def renewal(self) -> control.Renewal:
        """What a heartbeat says of it."""
        return control.Renewal(self.request, self.attempt)

    def ask(self, address: Mapping[str, str], *, layerwise: bool, token: bytes) -> control.Ask:
        """The message that asks for it."""
        return control.Ask(
            **address,
            request=self.request,
            attempt=self.attempt,
            start=self.start,
            stop=self.stop,
            layerwise=layerwise,
            token=token,
        )

    def pulled(self, address: Mapping[str, str], offer: control.Offer, nbytes: dict[str, int]) -> control.Pulled:
        """The message that reports an offer pulled."""
        return control.Pulled(**address, request=self.request, attempt=self.attempt, seq=offer.seq, nbytes=nbytes)

    def pulled_all(self, address: Mapping[str, str]) -> control.PulledAll:
        """The message that asks for the commit."""
        units = tuple(self.units)
        return control.PulledAll(**address, request=self.request, attempt=self.attempt, nbytes=self.nbytes, units=units)

    def abort(self, address: Mapping[str, str], error: KVCoreError) -> control.Abort:
        """The message that gives it up."""
        told = control.WireError.of(error)
        return control.Abort(**address, request=self.request, attempt=self.attempt, error=told)

    def done(self, commit: control.Commit) -> ReceiveDone:
        """The event that says that it is here and valid."""
        early = commit.pulled_early_bytes
        return ReceiveDone(self.request, self.attempt, self.stop, self.nbytes, commit.engine_data, early)


class Orphans:
    """Requests that were reported failed while reads still wrote their units, until these have ended."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Incoming, list[Read]]] = []

    def add(self, record: Incoming) -> None:
        """Wait for the reads of a request."""
        self._waiting.append((record, record.reads))

    @property
    def reads(self) -> int:
        """Reads that have not ended."""
        return sum(len(reads) for _, reads in self._waiting)

    def quiet(self) -> list[Incoming]:
        """Take the requests whose last read has ended."""
        for _, reads in self._waiting:
            reads[:] = [read for read in reads if not terminal(read.handle)]
        ended = [record for record, reads in self._waiting if not reads]
        self._waiting = [item for item in self._waiting if item[1]]
        return ended


def not_connected(to: str, request: str, failure: TransferError | None) -> PeerLostError:
    """Why nothing can be asked for."""
    cause = str(failure or "no hello yet")
    return PeerLostError(f"not connected to {to}", request=request, cause=cause, remedy="connect again")


def not_held(request: str) -> TransferExpiredError:
    """Why an attempt is over that the sender does not know any more."""
    return TransferExpiredError("the sender no longer holds the request", request=request)


def not_quiet(quiesce_s: float) -> TransferError:
    """Why a conversation ends whose reads do not."""
    return TransferError("the transport cannot say that its reads have ended; it is retired", quiesce_s=quiesce_s)


def check_ask(request: str, start: int, stop: int, token: bytes) -> None:
    """Raise RequestError for what cannot be asked."""
    control.check_request_id(request)
    control.check_token(request, token)
    if not 0 <= start <= stop:
        raise RequestError("not a token range", request=request, start=start, stop=stop)


def renewals(records: Sequence[Incoming], since: float) -> list[tuple[control.Renewal, ...]]:
    """What heartbeats say of requests: of those whose reads were all started after ``since``. One heartbeat at least."""
    moving = [record.renewal() for record in records if record.moves(since)]
    return [tuple(moving[at : at + control.MAX_RENEWALS]) for at in range(0, max(len(moving), 1), control.MAX_RENEWALS)]


def check_tables(
    plan: PeerPlan, request: str, tables: Mapping[tuple[str, str], Int64Array], *, complete: bool
) -> tuple[dict[tuple[str, str], Int64Array], dict[tuple[str, str, str], npt.NDArray[np.bool_]]]:
    """Check an ask's tables; return copies of them, and by ``(group, range, component)`` what must arrive.

    What must arrive is bool ``[layers taken from this sender, units]``. Raises RequestError for forgotten or foreign
    ranges, foreign or null units, and a unit named twice.
    """
    known = dict(plan.ranges())
    if not set(tables) <= set(known) or (complete and set(tables) != set(known)):
        raise RequestError(
            "tables do not name the ranges of the cache",
            request=request,
            expected=sorted(known),
            got=sorted(tables),
        )
    taken, missing = {}, {}
    for key, table in tables.items():
        taken[key] = np.array(table, np.int64, copy=True).reshape(-1)
        try:
            plan.check_destination(*key, taken[key])
        except LayoutError as error:
            raise RequestError(error.message, request=request, **error.fields) from error
        for component in known[key]:
            missing[*key, component] = np.tile(taken[key] >= 0, (len(plan.layers[key[0]]), 1))
    return taken, missing


def check_offer(record: Incoming, offer: control.Offer) -> None:
    """Raise ProtocolError for an offer that does not follow the one before, or goes beyond the ask."""
    if record.complete or offer.seq != record.next_seq or offer.start != record.tokens or offer.stop < offer.start:
        raise ProtocolError(
            "offers do not follow one another", request=record.request, seq=offer.seq, start=offer.start,
            stop=offer.stop, expected_seq=record.next_seq, expected_start=record.tokens, complete=record.complete,
        )  # fmt: skip
    if offer.stop > record.stop or (offer.last and offer.stop != record.stop):
        raise ProtocolError("offer does not fit the ask", request=record.request, expected=record.stop, got=offer.stop)


def check_complete(plan: PeerPlan, record: Incoming) -> None:
    """Raise TransferError, naming component and layers, where the sender did not offer everything asked for."""
    for (group, range_name, component), lacking in record.missing.items():
        if lacking.any():
            units = np.flatnonzero(lacking.any(axis=0))
            raise TransferError(
                "the sender did not offer every unit asked for", request=record.request, group=group,
                range=range_name, component=component, first_missing=int(units[0]), missing=int(units.size),
                layers=[layer for layer, row in zip(plan.layers[group], lacking, strict=True) if row.any()],
            )  # fmt: skip


def check_commit(record: Incoming, commit: control.Commit) -> None:
    """Raise ProtocolError for a commit that nobody asked for, or of something else or more than what was pulled."""
    got = (commit.num_tokens, commit.num_offers, commit.nbytes)
    expected = (record.stop, record.next_seq, record.nbytes)
    if record.asked_commit_at is None or got != expected:
        raise ProtocolError("commit does not match what was pulled", request=record.request, expected=expected, got=got)
    total = sum(record.nbytes.values())
    if commit.pulled_early_bytes > total:
        raise ProtocolError(
            "more bytes were pulled early than at all", request=record.request, expected=f"at most {total}",
            got=commit.pulled_early_bytes,
        )  # fmt: skip


def pull_of(plan: PeerPlan, record: Incoming, offer: control.Offer) -> Pull:
    """What to read for an offer.

    Raises ProtocolError for names and units that are not in the manifests, not in the ask, or offered before.
    """
    merged: dict[tuple[str, str, int, bytes, tuple[int, ...]], tuple[str, ...]] = {}
    for payload in offer.payloads:
        key = (payload.group, payload.range, payload.first, payload.units, payload.layers)
        merged[key] = merged.get(key, ()) + payload.components
    jobs: list[ReadJob] = []
    nbytes: dict[str, int] = {}
    units, landed = [], []
    for (group, range_name, first, ids, layers), offered in merged.items():
        components, programs = plan.split(group, range_name, offered, layers)
        source = np.frombuffer(ids, "<i8").astype(np.int64, copy=False)
        if components:
            plan.check_source(group, range_name, components, source)
        table = record.tables.get((group, range_name))
        if table is None or not components or not source.size or record.nothing:
            continue
        if first + source.size > table.size:
            raise ProtocolError(
                "offer of units beyond the ask", request=record.request, group=group, range=range_name,
                expected=table.size, got=first + source.size,
            )  # fmt: skip
        span = slice(first, first + source.size)
        wanted = table[span] >= 0
        rows = [row for row, layer in enumerate(plan.layers[group]) if not layers or layer in layers]
        for component in components:
            lacking = record.missing[group, range_name, component]
            if not lacking[rows, span][:, wanted].all():
                raise ProtocolError("a unit is offered twice", request=record.request, group=group, range=range_name)
            lacking[rows, span] = False
        destination = table[span][wanted]
        if not destination.size or not rows:
            continue
        units.append(Payload.of(group, range_name, components, first, source[wanted], layers))
        landed.append(Payload.of(group, range_name, components, first, destination, layers))
        for program in programs:
            jobs.append(ReadJob(group, program, source[wanted], destination))
            add_bytes(nbytes, {n: size * int(destination.size) for n, size in program.unit_bytes.items() if size})
    return Pull(tuple(jobs), nbytes, tuple(units), tuple(landed))


def terminal(handle: ReadHandle) -> bool:
    """Whether a read has ended, one way or the other."""
    try:
        return handle.poll()
    except TransferError:
        return True
    except Exception:  # noqa: BLE001 -- told when its request failed; it may write still, so its units stay reserved
        return False


def transport_failed(call: str, cause: Exception) -> TransferError:
    """What a transport has raised, typed: its own TransferError, or one for what its contract does not name."""
    if isinstance(cause, TransferError):
        return cause
    return TransferError("the transport failed", call=call, cause=repr(cause), remedy="see kvcore check")


def why_gone(connection: PeerConnection | None) -> str:
    """Why a sender is lost by what the transport says of its connection; empty where it is not."""
    try:
        return "" if connection is None or connection.alive() else "its connection was closed"
    except Exception as error:  # noqa: BLE001 -- a plugin's bug costs its link, and no other
        return str(transport_failed("alive", error))
