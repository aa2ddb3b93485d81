"""Control messages: strict decoding, and nothing but ProtocolError for what is not one."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.errors import (
    DuplicateRequestError,
    HandshakeError,
    LayoutError,
    ProtocolError,
    RequestError,
    TransferAbortedError,
    TransferError,
)
from kvcore.transfer.messages import control
from kvcore.transfer.messages.control import WireError


def messages(kit: ModuleType) -> list[control.Message]:
    """One of every kind."""
    at: dict[str, Any] = {"src": "a", "dst": "b"}
    about = {**at, "request": "r", "attempt": 3}
    error = WireError.of(TransferAbortedError("given up", request="r"))
    half = control.TakenField("k", "x", control.TakenIds("head", (0, 1)))
    part = control.TakenPart((0, 3), (half, control.TakenField("v", "x", None)))
    return [
        control.Hello(**at, protocol=(1, 0), manifest=b"m"),
        control.Welcome(**at, protocol=(1, 0), manifest=b"m"),
        control.Refused(**at, error=error),
        control.Taken(**at, groups={"full": (part,)}),
        control.Ask(**about, start=0, stop=5, layerwise=True, token=b"t"),
        control.Offer(**about, seq=0, start=0, stop=5, payloads=(kit.payload([1, 2], 0).of_layers([0, 3]),), last=True),
        control.Pulled(**about, seq=0, nbytes={"full/kv": 4096}),
        control.PulledAll(**about, nbytes={"full/kv": 4096}, units=(kit.payload([1, 2], 0),)),
        control.Commit(
            **about,
            num_tokens=5,
            num_offers=1,
            nbytes={"full/kv": 4096},
            pulled_early_bytes=0,
            engine_data=b"t",
            checksums={"full/kv": 7},
        ),
        control.Expired(**about),
        control.Ack(**about),
        control.Abort(**about, error=error),
        control.Heartbeat(**at, renew=(control.Renewal("r", 3),)),
        control.Bye(**at, error=error),
    ]


def _maps(kit: ModuleType) -> list[dict[str, Any]]:
    return [msgspec.msgpack.decode(control.encode(message)) for message in messages(kit)]


def test_every_message_survives_the_wire(kit: ModuleType) -> None:
    sent = messages(kit)
    assert {type(message) for message in sent} == set(control.AnyMessage.__args__), "a kind of message is not tested"
    for message in sent:
        assert control.decode(control.encode(message)) == message


def test_appended_fields_are_ignored(kit: ModuleType) -> None:
    """I6: a newer minor version appends fields; they do not make a request hang."""
    for message, fields in zip(messages(kit), _maps(kit), strict=True):
        assert control.decode(msgspec.msgpack.encode({**fields, "new": [1, {"x": None}]})) == message


def test_a_missing_field_is_a_typed_error_that_names_the_request(kit: ModuleType) -> None:
    """I6: with one required field missing, the error says which attempt it fails."""
    for fields in _maps(kit):
        for name in fields:
            if name == "renew":
                continue  # has a default
            broken = msgspec.msgpack.encode({key: value for key, value in fields.items() if key != name})
            with pytest.raises(ProtocolError) as found:
                control.decode(broken)
            if "request" in fields and name not in ("request", "attempt"):
                assert (found.value.fields["request"], found.value.fields["attempt"]) == ("r", 3)
            else:
                assert "request" not in found.value.fields


def test_unknown_kind_and_wrong_types(kit: ModuleType) -> None:
    (ask,) = (m for m in _maps(kit) if m["type"] == "ask")
    for change in (
        {"type": "push"}, {"type": 3}, {"start": -1}, {"start": "0"}, {"stop": 2**63}, {"request": ""},
        {"request": "x" * 300}, {"attempt": 1.5}, {"src": None},
    ):  # fmt: skip
        with pytest.raises(ProtocolError):
            control.decode(msgspec.msgpack.encode({**ask, **change}))


def test_bounds(kit: ModuleType) -> None:
    (commit,) = (m for m in _maps(kit) if m["type"] == "commit")
    full = {**commit, "engine_data": b"x" * control.MAX_ENGINE_DATA_BYTES}
    assert len(control.decode(msgspec.msgpack.encode(full)).engine_data) == 65536  # type: ignore[union-attr]
    with pytest.raises(ProtocolError):
        control.decode(msgspec.msgpack.encode({**commit, "engine_data": b"x" * 65537}))
    with pytest.raises(ProtocolError, match="too long"):
        control.decode(b"\x00" * (control.MAX_MESSAGE_BYTES + 1))


def test_payloads_that_name_no_units_are_refused(kit: ModuleType) -> None:
    (offer,) = (m for m in _maps(kit) if m["type"] == "offer")
    for change in ({"units": b"\x00" * 7}, {"units": b"\xff" * 8}, {"first": -1}):
        payload = {**offer["payloads"][0], **change}
        with pytest.raises(ProtocolError):
            control.decode(msgspec.msgpack.encode({**offer, "payloads": [payload]}))


@given(data=st.binary(max_size=300))
@example(b"\x91" * 100_000)  # nested without end
@example(b"\x81\xa4type" + b"\x91" * 5000)
@example(b"\xa4\xff\xff\xff\xff")  # text that is no UTF-8
@example(b"\xdf\xff\xff\xff\xff")
def test_random_bytes_are_protocol_errors(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        control.decode(data)


@given(data=st.data())
def test_cut_and_damaged_messages_are_protocol_errors(kit: ModuleType, data: st.DataObject) -> None:
    message = control.encode(data.draw(st.sampled_from(messages(kit))))
    with pytest.raises(ProtocolError):
        control.decode(message[: data.draw(st.integers(0, len(message) - 1))])
    with pytest.raises(ProtocolError):
        control.decode(message + data.draw(st.binary(min_size=1, max_size=8)))
    changed = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, len(message) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ProtocolError):
        control.decode(bytes(changed))


def test_errors_survive_the_wire() -> None:
    for error in (
        HandshakeError("peers differ in page size", remedy="agree", field="page size", local=4, remote=8),
        DuplicateRequestError("in use", request="r"),
        TransferAbortedError("given up"),
    ):
        again = WireError.of(error).unpack()
        assert type(again) is type(error)
        assert again.as_dict() == error.as_dict()
    foreign = WireError.of(LayoutError("bad", region="k")).unpack()
    assert type(foreign) is TransferError
    assert foreign.fields == {"region": "k", "code": "layout"}
    named = msgspec.Raw(msgspec.msgpack.encode({"self": 1, "message": 2, "remedy": 3}))
    assert type(WireError("nonsense", "m", "", named).unpack()) is TransferError


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def _cycle() -> Any:
    value: dict[str, Any] = {}
    value["again"] = [value, value]
    return value


@pytest.mark.parametrize(
    "change",
    [
        {"fields": {"got": _nested(8)}},
        {"fields": {"got": {"a": _nested(600)}}},
        {"fields": {"got": b"x" * 65536}},
        {"fields": {"got": [0] * 65536}},
        {"fields": [1]},
        {"fields": {"a": {3: 4}}, "code": "x" * 4097},
        {"message": "x" * 4097},
        {"remedy": "x" * 4097},
    ],
)
@pytest.mark.parametrize("kind", ["refused", "abort", "bye"])
def test_an_error_of_a_peer_is_bounded(kit: ModuleType, kind: str, change: dict[str, Any]) -> None:
    """Size and depth are looked at before anything is built of it; what is over them fails what it was about."""
    (plain,) = (m for m in _maps(kit) if m["type"] == kind)
    with pytest.raises(ProtocolError) as found:
        control.decode(msgspec.msgpack.encode({**plain, "error": {**plain["error"], **change}}))
    assert found.value.fields.get("request") == plain.get("request")


@pytest.mark.parametrize(
    "value",
    [
        _nested(600), _nested(100_000), _cycle(), 2**70, -(2**70), 10**5000, "x" * 10**6, "\ud800", [7] * 10**6,
        {"k" * 5000: {"\ud800": 1}}, b"x" * 10**6, float("nan"), object(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_every_error_can_be_told(value: Any) -> None:
    """An error of one's own is cut to what the other end reads; what it is, and small facts beside it, stay."""
    error = ProtocolError("m" * 10**6, remedy="r" * 10**6, request="x", got=value, expected=3)
    sent = control.encode(control.Bye(src="a", dst="b", error=WireError.of(error)))
    assert len(sent) < 100_000
    message = control.decode(sent)
    assert isinstance(message, control.Bye)
    again = message.error.unpack()
    assert type(again) is ProtocolError
    assert again.fields["request"] == "x"
    assert again.fields["expected"] == 3
    assert "got" in again.fields
    assert control.encode(control.Bye(src="a", dst="b", error=WireError.of(again))), "and told on"


def test_many_facts_are_told_as_far_as_there_is_room() -> None:
    error = ProtocolError("m", **{f"fact{n}": "x" * 1000 for n in range(200)})
    again = WireError.of(error).unpack()
    assert again.fields["fact0"] == "x" * 1000
    assert len(again.fields) < 200
    assert len(msgspec.msgpack.encode(again.fields)) <= control.MAX_ERROR_BYTES


@pytest.mark.parametrize("bad", ["", "x" * 257, 3, None])
def test_request_ids(bad: Any) -> None:
    with pytest.raises(RequestError):
        control.check_request_id(bad)
    control.check_request_id("x" * 256)
