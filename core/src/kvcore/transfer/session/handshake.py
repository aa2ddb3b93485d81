"""What both sides of a hello check, before anything is asked or offered (no I/O)."""

from __future__ import annotations

from collections.abc import Iterable

from kvcore.errors import HandshakeError, KVCoreError, ProtocolError, TransferError
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import (
    Manifest,
    check_outline,
    check_peers,
    check_protocol,
    decode_manifest,
    decode_outline,
)
from kvcore.transfer.session.outgoing import PeerState


def remote_manifest(local: Manifest, message: control.Hello | control.Welcome) -> Manifest:
    """The manifest of the peer that introduces itself.

    Raises HandshakeError where the two cannot exchange bytes, and ProtocolError for a manifest that is none, or another
    instance's.
    """
    check_protocol(local.protocol, message.protocol)
    outline = decode_outline(message.manifest)
    if outline.instance != message.src:
        name = type(message).__name__.lower()
        raise ProtocolError(f"{name} of another instance", expected=message.src, got=outline.instance)
    check_outline(local, outline)
    remote = decode_manifest(message.manifest)
    check_peers(local, remote)
    return remote


def same_rank(states: Iterable[PeerState], remote: Manifest) -> PeerState | None:
    """The peer that has been the same rank of the same engine until now: it was restarted.

    Raises HandshakeError where ``remote`` counts other ranks than the rest of its engine.
    """
    for state in states:
        if state.engine != remote.engine:
            continue
        if state.num_ranks != remote.ranks.size:
            raise HandshakeError(
                "ranks of one engine disagree on how many they are", field="ranks", local=state.num_ranks,
                remote=remote.ranks.size, engine=remote.engine,
            )  # fmt: skip
        if state.rank == remote.ranks.rank:
            return state
    return None


def no_answer(hello_timeout_s: float) -> HandshakeError:
    """Why a receiver gives up that was never welcomed nor refused."""
    return HandshakeError(
        "no answer to the hello", hello_timeout_s=hello_timeout_s,
        remedy="check the address, the CURVE keys, and that the sender runs",
    )  # fmt: skip


def refused(error: TransferError, *, discreet: bool) -> control.WireError:
    """What a peer is told of why its hello is refused; ``discreet``: which field differs, and no value of one's own."""
    if discreet:
        error = HandshakeError(error.message, **{key: error.fields[key] for key in ("field",) if key in error.fields})
    return control.WireError.of(error)


def refusal(error: KVCoreError) -> HandshakeError:
    """What a peer said when it refused the hello, as a handshake's error."""
    if isinstance(error, HandshakeError):
        return error
    return HandshakeError(error.message, remedy=error.remedy, **error.fields)
