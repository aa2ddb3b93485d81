"""Protocols with one rule taken out: the chaos test must turn red for each, or it shows nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from kvcore.engine.peers import SendFailed, SendSide
from kvcore.errors import PeerLostError
from kvcore.transfer.messages import control
from kvcore.transfer.session.receiver import ReceiverSession
from kvcore.transfer.session.sender import SenderSession

Mutant = Callable[[], Any]


@contextmanager
def commits_after_the_end() -> Iterator[None]:
    """The sender commits although the lease has ended: it remembers what it no longer holds."""
    fail, pulled_all = SenderSession._fail, SenderSession._pulled_all
    dead: dict[tuple[int, bytes, str, int], Any] = {}

    def remember(self: Any, record: Any, error: Any, **options: Any) -> None:
        for peer, reader in record.readers.items():
            dead[id(self), peer, record.request, reader.asker.attempt] = record, reader
        with patch.object(SenderSession, "_tell", lambda *_: None):
            fail(self, record, error, **options)

    def commit(self: Any, peer: bytes, message: Any) -> None:
        record, reader = dead.get((id(self), peer, message.request, message.attempt), (None, None))
        if record is not None and record.complete:
            reader.nbytes = message.nbytes
            self._commit(record, reader)
        else:
            pulled_all(self, peer, message)

    with patch.multiple(SenderSession, _fail=remember, _pulled_all=commit):
        yield


@contextmanager
def frees_while_reading() -> Iterator[None]:
    """The receiver says that a failed request is quiet while its reads are still under way."""

    def settle(self: Any, record: Any) -> None:
        if self._requests.get(record.request) is record:
            self._report(record, quiet=True)

    with patch.object(ReceiverSession, "_settle", settle):
        yield


@contextmanager
def accepts_uncommitted() -> Iterator[None]:
    """The receiver keeps what has arrived without waiting for the commit."""
    ask_commit = ReceiverSession._ask_commit

    def accept(self: Any, record: Any) -> None:
        ask_commit(self, record)
        self._committed(
            record,
            control.Commit(
                src=self._sender, dst=self.instance, request=record.request, attempt=record.attempt,
                num_tokens=record.stop, num_offers=record.next_seq, nbytes=record.nbytes, pulled_early_bytes=0,
                engine_data=b"", checksums={},
            ),
        )  # fmt: skip

    with patch.object(ReceiverSession, "_ask_commit", accept):
        yield


@contextmanager
def keeps_what_a_lost_peer_had() -> Iterator[None]:
    """The sender's side does not release the requests of a receiver that is gone."""
    apply = SendSide._apply

    def forget(self: Any, event: Any) -> None:
        if not (isinstance(event, SendFailed) and isinstance(event.error, PeerLostError)):
            apply(self, event)

    with patch.object(SendSide, "_apply", forget):
        yield


@contextmanager
def trusts_any_instance() -> Iterator[None]:
    """Neither side compares instance ids: messages of a dead process are taken for its successor's."""
    sender, receiver = SenderSession.handle, ReceiverSession.handle

    def send_side(self: Any, peer: bytes, message: Any) -> None:
        state = self._peers.get(peer)
        if state is not None and not isinstance(message, control.Hello):
            message = msgspec.structs.replace(message, src=state.instance, dst=self.instance)
        sender(self, peer, message)

    def receive_side(self: Any, peer: bytes, message: Any) -> None:
        src = message.src if isinstance(message, control.Welcome) else self._sender
        receiver(self, peer, msgspec.structs.replace(message, src=src, dst=self.instance))

    with patch.object(SenderSession, "handle", send_side), patch.object(ReceiverSession, "handle", receive_side):
        yield


@contextmanager
def commits_rank_by_rank() -> Iterator[None]:
    """The sender commits to each rank as it reports, not once all of them have everything."""
    pulled_all = SenderSession._pulled_all

    def commit(self: Any, peer: bytes, message: Any) -> None:
        pulled_all(self, peer, message)
        held = self._held(peer, message.request, message.attempt)
        if held is not None and held[1].reported and not held[0].committed:
            self._commit(*held)

    with patch.object(SenderSession, "_pulled_all", commit):
        yield


@contextmanager
def forgets_what_was_not_offered() -> Iterator[None]:
    """Taking away a request that was begun and not offered yet ends no transfer."""
    with patch.object(SendSide, "_moves", lambda self, request_id: request_id in self._begun):
        yield


@contextmanager
def releases_by_name() -> Iterator[None]:
    """An event of an earlier request releases whatever has its id now."""
    apply = SendSide._apply

    def by_name(self: Any, event: Any) -> None:
        apply(self, event)
        if event.request in self._manager:
            self._manager.release(event.request)

    with patch.object(SendSide, "_apply", by_name):
        yield


@contextmanager
def ignores_attempts() -> Iterator[None]:
    """The receiver takes an answer to an earlier attempt for one to the attempt under way."""
    handle = ReceiverSession.handle

    def any_attempt(self: Any, peer: bytes, message: Any) -> None:
        record = self._requests.get(getattr(message, "request", ""))
        if record is not None:
            message = msgspec.structs.replace(message, attempt=record.attempt)
        handle(self, peer, message)

    with patch.object(ReceiverSession, "handle", any_attempt):
        yield


@contextmanager
def holds_nothing() -> Iterator[None]:
    """A request that is released while a transfer reads its units gives them back at once."""
    with patch(
        "kvcore.requests.holds.Hold.__init__", lambda self, parts, holds: vars(self).update(_parts=(), _holds=set())
    ):
        yield


MUTANTS: tuple[Mutant, ...] = (
    commits_after_the_end, frees_while_reading, accepts_uncommitted, keeps_what_a_lost_peer_had, trusts_any_instance,
    commits_rank_by_rank, forgets_what_was_not_offered, releases_by_name, ignores_attempts, holds_nothing,
)  # fmt: skip
