"""How a sender gets to know who wants something of it: hellos, and what checksums are taken of (no I/O)."""

from __future__ import annotations

from abc import abstractmethod
from concurrent.futures import Future
from functools import partial

from kvcore.errors import HandshakeError, KVCoreError, PeerLostError, ProtocolError, TransferError
from kvcore.log import get_logger
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import Clock, Peer, SendEvent, Session, TransferOptions, mistaken
from kvcore.transfer.session.checksums import SenderChecksums
from kvcore.transfer.session.deadlines import Deadlines
from kvcore.transfer.session.handshake import refused, remote_manifest, same_rank
from kvcore.transfer.session.outgoing import PeerState

_log = get_logger("kvcore.transfer.sender")

MAX_UNREAD_BYTES = 64 << 20
"""Most bytes of manifests that wait to be read, of all peers together."""


class Greeter(Session[SendEvent]):
    """The receivers of a sender. What takes long of a hello is deferred, one hello of a peer at a time.

    Attributes:
        discreet: a refused hello is told which field differs, and no value of one's own.
    """

    def __init__(
        self, manifest: Manifest, clock: Clock, options: TransferOptions, checksums: SenderChecksums | None
    ) -> None:
        super().__init__(manifest.instance, clock, options)
        self.manifest = manifest
        self.checksums = checksums
        self._manifest_bytes = manifest.encode()
        self._peers: dict[Peer, PeerState] = {}
        self._beats: Deadlines[Peer] = Deadlines()
        self._greeted: set[Peer] = set()
        self._unread_bytes = 0
        self.discreet = False

    @abstractmethod
    def broken(self, peer: Peer, error: ProtocolError) -> None:
        """Handle what is no message."""

    @abstractmethod
    def _post(self, peer: Peer, message: control.AnyMessage) -> None: ...

    @abstractmethod
    def _drop(self, peer: Peer, error: KVCoreError) -> None: ...

    def peers(self) -> dict[Peer, str]:
        """Instance ids of the receivers that have said hello."""
        return {peer: state.instance for peer, state in self._peers.items()}

    def _watch(self, peer: Peer, state: PeerState) -> None:
        """Look at a peer again when it is time for a heartbeat or it may be lost; both only move later."""
        options = self.options
        self._beats.set(peer, min(state.sent_at + options.heartbeat_s, state.heard_at + options.peer_timeout_s))

    def _hello(self, peer: Peer, message: control.Hello) -> None:
        if peer in self._peers:
            self._drop(peer, PeerLostError("the receiver was restarted", got=message.src))
        if peer in self._greeted:
            return  # one at a time: a manifest takes long to read
        if self._unread_bytes + len(message.manifest) > MAX_UNREAD_BYTES:
            self._refuse(peer, message, HandshakeError("too many hellos wait to be read", remedy="connect again"))
            return
        self._greeted.add(peer)
        self._unread_bytes += len(message.manifest)
        self.defer(lambda: remote_manifest(self.manifest, message), lambda read: self._read(peer, message, read))

    def _refuse(self, peer: Peer, message: control.Hello, error: TransferError) -> None:
        _log.warning("hello refused", peer=peer.hex(), error=control.shown(error))
        told = refused(error, discreet=self.discreet)
        self._post(peer, control.Refused(src=self.instance, dst=message.src, error=told))

    def _read(self, peer: Peer, message: control.Hello, read: Future[Manifest]) -> None:
        """The manifest of a hello was read."""
        self._greeted.discard(peer)
        self._unread_bytes -= len(message.manifest)
        try:
            if read.exception() is not None:
                raise mistaken(read.exception())
            remote = read.result()
            before = same_rank(self._peers.values(), remote)
        except TransferError as error:
            self._refuse(peer, message, error)
            return
        for old in [old for old, state in self._peers.items() if state is before]:
            self._drop(old, PeerLostError("the receiver was restarted", got=remote.instance))
        now = self._clock()
        state = self._peers[peer] = PeerState(remote, heard_at=now, sent_at=now)
        self._watch(peer, state)
        version, mine = self.manifest.protocol, self._manifest_bytes
        self._post(peer, control.Welcome(src=self.instance, dst=message.src, protocol=version, manifest=mine))

    def _taken(self, peer: Peer, message: control.Taken) -> None:
        if self.checksums is None:
            self.broken(peer, ProtocolError("checksums are not configured", type="taken"))
            return
        state = self._peers[peer]
        if state.has_taken:
            self.broken(peer, ProtocolError("what is taken is said once", type="taken"))
            return
        state.has_taken = True
        work = partial(self.checksums.expect, peer, state.manifest, message)
        self.defer(work, partial(self._expected, peer, message.src))

    def _expected(self, peer: Peer, instance: str, outcome: Future[None]) -> None:
        """It is known what checksums are taken of, for a peer that may have gone in between."""
        error = outcome.exception()
        if error is not None and peer in self._peers and self._peers[peer].instance == instance:
            wrong = mistaken(error)
            self.broken(peer, ProtocolError(wrong.message, **wrong.fields))
