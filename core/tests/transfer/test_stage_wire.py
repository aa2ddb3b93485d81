"""Frames of the staging channel: however the stream is cut, and whatever comes."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.errors import ProtocolError
from kvcore.transfer.shm.stage_wire import HEADER, MAX_FRAME, Frames, StageReply, frame


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=20), max_size=6), st.data())
def test_frames_come_out_as_they_went_in_however_they_are_cut(texts: list[str], data: st.DataObject) -> None:
    messages = [StageReply(n, text) for n, text in enumerate(texts)]
    stream, frames, got = b"".join(frame(item) for item in messages), Frames(), list[bytes]()
    while stream:
        size = data.draw(st.integers(1, 40))
        got += frames.feed(stream[:size])
        stream = stream[size:]
    assert [msgspec.msgpack.decode(item, type=StageReply) for item in got] == messages


@settings(deadline=None, max_examples=60)
@given(st.binary(max_size=64))
def test_any_bytes_are_frames_or_refused(data: bytes) -> None:
    """Nothing but a typed error; what remains is less than one frame."""
    frames = Frames()
    with contextlib.suppress(ProtocolError):
        found = frames.feed(data)
        assert sum(len(item) + HEADER.size for item in found) <= len(data)


def test_a_frame_that_would_fill_memory_is_refused_by_its_header() -> None:
    with pytest.raises(ProtocolError, match="too long"):
        Frames().feed(HEADER.pack(MAX_FRAME + 1))
    assert Frames().feed(HEADER.pack(MAX_FRAME)) == []
