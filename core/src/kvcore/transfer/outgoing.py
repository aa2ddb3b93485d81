"""What a sender remembers of a request, and what may be offered of it (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.errors import RequestError
from kvcore.transfer import control
from kvcore.transfer.manifest import Manifest
from kvcore.transfer.payload import Payload
from kvcore.transfer.session import Peer

_MAX_OFFER_BYTES = control.MAX_MESSAGE_BYTES // 2


@dataclass
class PeerState:
    """A receiver that has said hello."""

    instance: str
    heard_at: float
    sent_at: float


@dataclass(frozen=True)
class Asker:
    peer: Peer
    attempt: int


@dataclass(frozen=True)
class Pending:
    """An ask for a request that is not begun yet."""

    asker: Asker
    start: int
    stop: int
    asked_at: float


@dataclass(frozen=True)
class Offered:
    start: int
    stop: int
    payloads: tuple[Payload, ...]
    last: bool
    checksums: dict[str, int]


@dataclass
class Outgoing:
    """A request that was begun and is not over."""

    request: str
    num_tokens: int
    offers: list[Offered] = field(default_factory=list)
    offered_tokens: int = 0
    ends: dict[tuple[str, str, str], int] = field(default_factory=dict)
    complete: bool = False
    engine_data: bytes = b""
    asker: Asker | None = None
    sent: int = 0
    pulled: set[int] = field(default_factory=set)
    nbytes: dict[str, int] = field(default_factory=dict)
    early: int | None = None
    lease_ends: float | None = None
    committed: bool = False


def check_payloads(
    manifest: Manifest, record: Outgoing, payloads: Sequence[Payload]
) -> dict[tuple[str, str, str], int]:
    """Check an offer's payloads; return where each ``(group, range, component)`` ends with it.

    Raises RequestError for foreign components, for too many units, and for a unit that was offered before.
    """
    ends: dict[tuple[str, str, str], int] = {}
    if sum(len(payload.units) for payload in payloads) > _MAX_OFFER_BYTES:
        raise RequestError("too many units for one offer", request=record.request, remedy="offer in smaller chunks")
    for payload in payloads:
        layout = manifest.layouts.get(payload.group)
        known = {item.name for item in layout.ranges} if layout is not None else set()
        if layout is None or payload.range not in known or not set(payload.components) <= set(layout.components):
            raise RequestError(
                "payload of components that are not in the manifest",
                request=record.request,
                group=payload.group,
                range=payload.range,
                components=payload.components,
            )
        if not payload.num_units:
            continue
        for component in payload.components:
            key = (payload.group, payload.range, component)
            end = ends.get(key, record.ends.get(key, 0))
            if payload.first < end:
                raise RequestError(
                    "a unit is offered twice",
                    request=record.request,
                    group=payload.group,
                    range=payload.range,
                    component=component,
                    expected=end,
                    got=payload.first,
                )
            ends[key] = payload.stop
    return ends
