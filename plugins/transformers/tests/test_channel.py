"""The pipe between parent and worker: typed messages, garbage, and the death of the other end."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct

import msgspec
import pytest

from kvcore.errors import PeerLostError, ProtocolError
from kvcore_transformers.serving.channel import (
    Abort,
    Channel,
    FromWorker,
    Happened,
    Ready,
    Start,
    Stop,
    Submit,
    ToWorker,
)
from kvcore_transformers.serving.requests import DoneEvent, FailedEvent, GenerationRequest, TokenEvent


@pytest.fixture
def ends():
    """A channel's inbox, the channel, and the raw socket at the other end."""
    ours, theirs = socket.socketpair()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    channel = Channel(ours, ToWorker, inbox.put)
    yield inbox, channel, theirs
    channel.close()
    theirs.close()


def test_messages_arrive_whole_and_in_order():
    left, right = socket.socketpair()
    inbox, outbox = queue.SimpleQueue(), queue.SimpleQueue()
    parent, worker = Channel(left, FromWorker, outbox.put), Channel(right, ToWorker, inbox.put)
    sent = [
        Start("decode", "/m", b"{}", 64),
        Submit(GenerationRequest("r", tuple(range(100_000)), 5, (2,))),
        Abort("r", "why"),
        Stop(),
    ]
    for message in sent:
        parent.send(message)
    assert [inbox.get(timeout=5) for _ in sent] == sent
    events = (TokenEvent("r", 3), DoneEvent("r", (3,)), FailedEvent("s", {"code": "capacity", "message": "no"}))
    worker.send(Happened(events))
    worker.send(Ready("tcp://x", 5))
    assert outbox.get(timeout=5).events == events
    assert outbox.get(timeout=5) == Ready("tcp://x", 5)
    worker.close()
    assert isinstance(outbox.get(timeout=5), PeerLostError)
    parent.close()
    parent.close()


@pytest.mark.parametrize(
    "frame",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode({"type": "Explode"}),
        msgspec.msgpack.encode({"type": "Abort", "request": "r"}),
        msgspec.msgpack.encode({"type": "Submit", "request": 5}),
    ],
)
def test_garbage_is_a_typed_error(ends, frame):
    inbox, _, raw = ends
    raw.sendall(struct.pack("<I", len(frame)) + frame)
    assert isinstance(inbox.get(timeout=5), ProtocolError)


def test_an_absurd_length_is_not_waited_for(ends):
    inbox, _, raw = ends
    raw.sendall(struct.pack("<I", 0xFFFFFFFF))
    assert isinstance(inbox.get(timeout=5), ProtocolError)


@pytest.mark.parametrize("start", [b"", b"\x05", struct.pack("<I", 100) + b"half"])
def test_a_stream_that_ends_anywhere_is_the_death_of_the_peer(ends, start):
    inbox, channel, raw = ends
    raw.sendall(start)
    raw.close()
    assert isinstance(inbox.get(timeout=5), PeerLostError)
    with contextlib.suppress(PeerLostError):
        channel.send(Stop())  # the kernel may still take the first one
    with pytest.raises(PeerLostError):
        channel.send(Stop())


def test_closing_is_not_reported_as_a_death(ends):
    inbox, channel, _ = ends
    channel.close()
    with pytest.raises(queue.Empty):
        inbox.get(timeout=0.1)
