"""Control messages between a sender (prefill) and a receiver (decode), and their strict decoding (no I/O).

Every message is a msgpack map: fields appended by a newer minor version are ignored, a missing or mistyped one is a
:class:`ProtocolError`. Each names the instance it comes from and the instance it is meant for; an instance id is new at
every start, so messages of or for a process that has been restarted are recognised and refused.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from kvcore.errors import (
    KVCoreError,
    ProtocolError,
    RequestError,
    TransferError,
    error_from_dict,
)
from kvcore.requests.payload import Payload

PROTOCOL: tuple[int, int] = (1, 0)
"""Version of the messages. Another major version is refused at hello; a higher minor one only appends fields."""

MAX_ENGINE_DATA_BYTES = 64 * 1024
"""Most opaque bytes an engine may attach to a request."""

MAX_TOKEN_BYTES = 256
"""Longest token of a request."""

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest control message; longer ones are refused by both ends."""

MAX_REQUEST_ID = 256
"""Longest request id, in characters."""

MAX_INSTANCE_ID = 256
"""Longest instance id, in characters."""

MAX_RENEWALS = 4096
"""Most attempts that one heartbeat renews; who works on more sends several."""

MAX_ERROR_TEXT = 4096
"""Longest code, message, remedy or text among the fields of an error, in characters."""

MAX_ERROR_BYTES = 64 * 1024
"""Most bytes of an error's fields, packed."""

MAX_ERROR_DEPTH = 8
"""Deepest nesting of an error's fields, themselves included."""

_encoder = msgspec.msgpack.Encoder()

_Text = Annotated[str, msgspec.Meta(max_length=MAX_ERROR_TEXT)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Bytes = Annotated[int, msgspec.Meta(ge=0, lt=2**56)]
_RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_REQUEST_ID)]
_InstanceId = Annotated[str, msgspec.Meta(max_length=MAX_INSTANCE_ID)]
_Token = Annotated[bytes, msgspec.Meta(max_length=MAX_TOKEN_BYTES)]
_EngineData = Annotated[bytes, msgspec.Meta(max_length=MAX_ENGINE_DATA_BYTES)]


class WireError(msgspec.Struct, frozen=True):
    """A :class:`KVCoreError` as it travels: its code, message, remedy and plain fields.

    The fields stay packed until their size is known. ProtocolError for fields that are too many, nested too deeply, or no
    map; an error of one's own is cut to what the other end reads.
    """

    code: _Text
    message: _Text
    remedy: _Text = ""
    fields: msgspec.Raw = msgspec.Raw(b"\x80")

    def __post_init__(self) -> None:
        self._plain_fields()

    @classmethod
    def of(cls, error: KVCoreError) -> WireError:
        """Pack an error; what is over the limits of its fields is cut or left out."""
        facts = error.as_dict()
        code, message, remedy = (_cut(facts[name]) for name in ("code", "message", "remedy"))
        return cls(code, message, remedy, msgspec.Raw(_pack_fields(facts["fields"])))

    def unpack(self) -> TransferError | RequestError:
        """Rebuild the error; whatever is not about a transfer or a request becomes a plain TransferError."""
        fields = {key: value for key, value in self._plain_fields().items() if key not in _ARGUMENTS}
        error = error_from_dict({"code": self.code, "message": self.message, "remedy": self.remedy, "fields": fields})
        if isinstance(error, TransferError | RequestError):
            return error
        return TransferError(self.message, remedy=self.remedy, **{**fields, "code": self.code})

    def _plain_fields(self) -> dict[str, Any]:
        size = len(memoryview(self.fields))
        if size > MAX_ERROR_BYTES:
            raise ProtocolError("fields of an error are too long", limit_bytes=MAX_ERROR_BYTES, got_bytes=size)
        fields = msgspec.msgpack.decode(self.fields, type=dict[str, Any])
        level: list[Any] = [fields]
        for _ in range(MAX_ERROR_DEPTH):
            level = [
                child
                for item in level
                for child in (item.values() if isinstance(item, dict) else item)
                if isinstance(child, dict | list)
            ]
        if level:
            raise ProtocolError("fields of an error are nested too deeply", limit=MAX_ERROR_DEPTH)
        return fields


_ARGUMENTS = ("self", "message", "remedy")


def _cut(text: str) -> str:
    """Text that another process can read: no longer than it takes, and without lone surrogates."""
    return text[:MAX_ERROR_TEXT].encode("utf-8", "replace").decode()


def _portable(value: Any, depth: int) -> Any:
    """A plain value cut to what msgpack holds and the other end reads."""
    if isinstance(value, str):
        return _cut(value)
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return _cut(hex(value))
    if isinstance(value, dict | list) and depth > MAX_ERROR_DEPTH:
        return "…"
    if isinstance(value, dict):
        return {_cut(key): _portable(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_portable(item, depth + 1) for item in value]
    return value


def _pack_fields(fields: dict[str, Any]) -> bytes:
    kept: dict[str, Any] = {}
    room = MAX_ERROR_BYTES - 5  # of the map's own header
    for name, value in fields.items():
        for shown in (_portable(value, 2), _LEFT_OUT):
            entry = {_cut(name): shown}
            size = len(_encoder.encode(entry)) - 1
            if size <= room:
                kept.update(entry)
                room -= size
                break
    return _encoder.encode(kept)


_LEFT_OUT = "… (too long to be sent)"


_MAX_SHOWN = 256
"""Characters of a text, and names of fields, that are shown of what a peer may have chosen."""


def _brief(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"


def shown(error: KVCoreError) -> dict[str, Any]:
    """An error for the log, cut where a peer may have made it long; a number or a truth is shown as it is."""
    facts = error.as_dict()
    fields = {
        _brief(name): value if isinstance(value, int | float | None) else _brief(str(value))
        for name, value in list(facts["fields"].items())[:_MAX_SHOWN]
    }
    return {**{name: _brief(facts[name]) for name in ("code", "message", "remedy")}, "fields": fields}


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """What every message says.

    Attributes:
        src: instance id of the process that wrote it.
        dst: instance id it is meant for; empty only in a hello and in the answer to something undecodable.
    """

    src: _InstanceId
    dst: _InstanceId


class Hello(Message, frozen=True, kw_only=True, tag="hello"):
    """Receiver → sender, first. The manifest stays packed until the protocol version is known to match."""

    protocol: tuple[int, int]
    manifest: bytes


class Welcome(Message, frozen=True, kw_only=True, tag="welcome"):
    """Sender → receiver: the hello is accepted; the sender's manifest."""

    protocol: tuple[int, int]
    manifest: bytes


class Refused(Message, frozen=True, kw_only=True, tag="refused"):
    """Sender → receiver: the hello is refused, naming the field and both values."""

    error: WireError


class TakenIds(msgspec.Struct, frozen=True):
    """Of one field, the ids of one axis that are taken from a rank."""

    axis: str
    ids: tuple[_Count, ...]


class TakenField(msgspec.Struct, frozen=True):
    """A field of which something is taken from a rank; ``only`` is None where it is everything both sides hold."""

    region: str
    field: str
    only: TakenIds | None


class TakenPart(msgspec.Struct, frozen=True):
    """Layers of which the same fields are taken from a rank."""

    layers: tuple[int, ...]
    fields: tuple[TakenField, ...]


class Taken(Message, frozen=True, kw_only=True, tag="taken"):
    """Receiver → sender, once after the welcome, where checksums are configured: what it takes from this rank."""

    groups: dict[str, tuple[TakenPart, ...]]


class Ask(Message, frozen=True, kw_only=True, tag="ask"):
    """Receiver → sender: tokens ``[start, stop)`` of a request are wanted, under a new attempt number.

    With ``start == stop`` nothing is read from this rank: it gets one empty last offer when the prompt is complete.
    ``layerwise``: offers of single layers are welcome. ``token``: what the sender's engine has begun the request with.
    """

    request: _RequestId
    attempt: _Count
    start: _Count
    stop: _Count
    layerwise: bool
    token: _Token


class Offer(Message, frozen=True, kw_only=True, tag="offer"):
    """Sender → receiver: the units of ``payloads`` are final and may be read.

    Attributes:
        seq: 0, 1, 2, … within the attempt.
        start, stop: tokens ``[start, stop)`` prefilled since the offer before.
        last: the prompt is complete.
    """

    request: _RequestId
    attempt: _Count
    seq: _Count
    start: _Count
    stop: _Count
    payloads: tuple[Payload, ...]
    last: bool


class Pulled(Message, frozen=True, kw_only=True, tag="pulled"):
    """Receiver → sender: every read of one offer is terminal; logical bytes by component."""

    request: _RequestId
    attempt: _Count
    seq: _Count
    nbytes: dict[str, _Bytes]


class PulledAll(Message, frozen=True, kw_only=True, tag="pulled_all"):
    """Receiver → sender: every read of the attempt is terminal. Asks for the commit; repeated until answered.

    ``units``: the sender's units that were read, where checksums are configured; else empty.
    """

    request: _RequestId
    attempt: _Count
    nbytes: dict[str, _Bytes]
    units: tuple[Payload, ...]


class Commit(Message, frozen=True, kw_only=True, tag="commit"):
    """Sender → receiver: every rank of the receiver has everything, and every offered unit was held unbroken until now.

    Attributes:
        num_tokens, num_offers: size of the prompt, and how many offers it took.
        nbytes: the bytes reported pulled, by component.
        pulled_early_bytes: of those, how many were reported before the last chunk started.
        engine_data: opaque bytes of the engine (first token, sampling state).
        checksums: of the bytes reported pulled, by component, where configured; else empty.
    """

    request: _RequestId
    attempt: _Count
    num_tokens: _Count
    num_offers: _Count
    nbytes: dict[str, _Bytes]
    pulled_early_bytes: _Count
    engine_data: _EngineData
    checksums: dict[str, int]


class Expired(Message, frozen=True, kw_only=True, tag="expired"):
    """Sender → receiver: the attempt is not held (any more); nothing read may be kept."""

    request: _RequestId
    attempt: _Count


class Ack(Message, frozen=True, kw_only=True, tag="ack"):
    """Receiver → sender: every rank of the sender has committed and it is accepted; the units may go."""

    request: _RequestId
    attempt: _Count


class Abort(Message, frozen=True, kw_only=True, tag="abort"):
    """Either way: the attempt is over, and why."""

    request: _RequestId
    attempt: _Count
    error: WireError


class Renewal(msgspec.Struct, frozen=True):
    """An attempt whose lease is renewed by a heartbeat."""

    request: _RequestId
    attempt: _Count


class Heartbeat(Message, frozen=True, kw_only=True, tag="heartbeat"):
    """Either way, once in a while: I am alive. A receiver lists the attempts it is working on."""

    renew: Annotated[tuple[Renewal, ...], msgspec.Meta(max_length=MAX_RENEWALS)] = ()


class Bye(Message, frozen=True, kw_only=True, tag="bye"):
    """Either way: the conversation is over, and why. Never answered."""

    error: WireError


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | Taken
    | Ask
    | Offer
    | Pulled
    | PulledAll
    | Commit
    | Expired
    | Ack
    | Abort
    | Heartbeat
    | Bye
)

_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


class _Attribution(msgspec.Struct):
    """The part of a broken message that says which attempt it was about."""

    type: str = ""
    request: str = ""
    attempt: int = -1


_attribution = msgspec.msgpack.Decoder(_Attribution)


def encode(message: Message) -> bytes:
    """Pack a message."""
    return _encoder.encode(message)


def decode(data: bytes) -> AnyMessage:
    """Unpack a message.

    Raises ProtocolError, and nothing else, for whatever is not exactly one well-formed message. Where the broken
    message still says which attempt it was about, the error has ``request`` and ``attempt`` fields, so that it can fail
    that request instead of leaving it waiting.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("control message too long", limit_bytes=MAX_MESSAGE_BYTES, got_bytes=len(data))
    try:
        return _decoder.decode(data)
    except ProtocolError as error:
        cause: Exception = error
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        cause = error
    what = str(cause)[:MAX_REQUEST_ID]  # an unknown type is quoted in full, however long
    raise ProtocolError(f"not a control message: {what}", got_bytes=len(data), **_attribute(data)) from cause


def _attribute(data: bytes) -> dict[str, Any]:
    try:
        part = _attribution.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):
        return {}
    if not 1 <= len(part.request) <= MAX_REQUEST_ID or part.attempt < 0:
        return {}  # of no attempt; and what an error says may be written to a log
    return {"type": part.type[:MAX_REQUEST_ID], "request": part.request, "attempt": part.attempt}


def check_request_id(request: str) -> None:
    """Raise RequestError for an id that no message could carry."""
    if not isinstance(request, str) or not 1 <= len(request) <= MAX_REQUEST_ID:
        raise RequestError("not a request id", got=request, expected=f"text of 1 to {MAX_REQUEST_ID} characters")


def check_token(request: str, token: bytes) -> None:
    """Raise RequestError for a token that no message could carry."""
    if not isinstance(token, bytes) or len(token) > MAX_TOKEN_BYTES:
        raise RequestError(
            "not a token", request=request, expected=f"at most {MAX_TOKEN_BYTES} bytes",
            got=f"{len(token)} bytes" if isinstance(token, bytes) else type(token).__name__,
        )  # fmt: skip
