"""What a hostile peer may send: every message both ways, each field spoilt, encodings spoilt, sequences without sense.

A message is a plain map here, packed by msgspec directly, so that nothing of what kvcore encodes with keeps a bad value back.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

Fields = dict[str, Any]

ERROR: Fields = {"code": "transfer_aborted", "message": "gone", "remedy": "", "fields": {"a": [1, {"b": None}]}}

BAD: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 2**31, 2**53 + 1, 2**56, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, float("nan"), float("inf"), -0.5, "", "x", "y" * 257, "z" * 70_000, "\x00", "é\U0001f600", "full", "full/kv",
    b"", b"\x00", b"\xff" * 8, b"\xff" * 15, b"q" * 70_000, [], [[]], [0], [-1], [2**63], [None] * 50, {}, {"": 0},
    {"full/kv": -1}, {"full/kv": 2**56}, {"nope": 1}, {"full": [{}]}, [{"request": "x", "attempt": 1}] * 3,
)  # fmt: skip
"""Values of every type, at and over every edge; each is put into every field."""


def nested(depth: int) -> Any:
    """Lists within lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


DEEP = (
    nested(20),
    nested(900),
    msgspec.Raw(b"\x91" * 100_000 + b"\xc0"),
    {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {"a": {}}}}}}}}}},
)


def units(*ids: int) -> bytes:
    return np.array(ids, "<i8").tobytes()


def payload(ids: tuple[int, ...], first: int = 0, **changes: Any) -> Fields:
    base: Fields = {
        "group": "full",
        "range": "pages",
        "components": ["full/kv", "full/scale"],
        "first": first,
        "units": units(*ids),
        "layers": [],
    }
    return base | changes


class Silent:
    """A logger: a hundred thousand warnings tell nobody anything."""

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


@dataclass
class Speaker:
    """Who speaks to whom, and about what."""

    src: str
    dst: str
    manifest: bytes
    request: str = "x"
    attempt: int = 1
    stop: int = 8
    nbytes: dict[str, int] = field(default_factory=dict)

    def message(self, kind: str, **changes: Any) -> Fields:
        """A well-formed message of a kind."""
        about: Fields = {"request": self.request, "attempt": self.attempt}
        base: Fields = {"type": kind, "src": self.src, "dst": self.dst}
        match kind:
            case "hello" | "welcome":
                base |= {"protocol": [1, 0], "manifest": self.manifest}
            case "refused" | "bye":
                base |= {"error": ERROR}
            case "taken":
                part = {
                    "layers": [0, 1],
                    "fields": [{"region": "k", "field": "x", "only": {"axis": "head", "ids": [0]}}],
                }
                base |= {"groups": {"full": [part]}}
            case "ask":
                base |= about | {"start": 0, "stop": self.stop, "layerwise": True, "token": b""}
            case "offer":
                base |= about | {
                    "seq": 0, "start": 0, "stop": self.stop, "payloads": [payload((11, 12))], "last": True,
                }  # fmt: skip
            case "pulled":
                base |= about | {"seq": 0, "nbytes": self.nbytes}
            case "pulled_all":
                base |= about | {"nbytes": self.nbytes, "units": [payload((11, 12))]}
            case "commit":
                base |= about | {
                    "num_tokens": self.stop, "num_offers": 1, "nbytes": self.nbytes, "pulled_early_bytes": 0,
                    "engine_data": b"e", "checksums": {},
                }  # fmt: skip
            case "expired" | "ack":
                base |= about
            case "abort":
                base |= about | {"error": ERROR}
            case "heartbeat":
                base |= {"renew": [about]}
            case _:
                raise ValueError(kind)
        return base | changes


KINDS = ("hello", "welcome", "refused", "taken", "ask", "offer", "pulled", "pulled_all", "commit", "expired", "ack",
         "abort", "heartbeat", "bye")  # fmt: skip


def pack(message: Any) -> bytes:
    return msgspec.msgpack.encode(message)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to everything within a message."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _places(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _places(item, (*path, index))


def _with(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = _with(value[path[0]], path[1:], new)
    return copy


def spoilt(message: Fields, foreign: tuple[Any, ...] = ()) -> Iterator[bytes]:
    """A message with one field, or one value within a field, replaced by every bad value, or left out, or named twice."""
    for path in _places(message):
        for value in (*BAD, *DEEP, *foreign):
            yield pack(_with(message, path, value))
    for name in message:
        yield pack({key: value for key, value in message.items() if key != name})
        pair = pack({name: message[name]})[1:]
        whole = pack(message)
        yield bytes([whole[0] + 1]) + whole[1:] + pair
        yield pack({name: message[name]})
    yield pack(list(message.values()))
    for value in ([1, {"a": 2}], *DEEP):
        yield pack(message | {"new": value})


def spoilt_once(rng: random.Random, message: Fields) -> bytes:
    """A message with one value in it replaced by a bad one."""
    return pack(_with(message, rng.choice(list(_places(message))), rng.choice(BAD)))


def mutated(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """An encoding with bytes flipped, cut, repeated or spliced with another one."""
    match rng.randrange(6):
        case 0:
            out = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                out[rng.randrange(len(out))] = rng.randrange(256)
            return bytes(out)
        case 1:
            return data[: rng.randrange(len(data))]
        case 2:
            start = rng.randrange(len(data))
            return data[:start] + data[min(len(data), start + rng.randint(1, 9)) :]
        case 3:
            start = rng.randrange(len(data))
            return data[:start] + data[start : start + rng.randint(1, 40)] + data[start:]
        case 4:
            return data[: rng.randrange(len(data))] + other[rng.randrange(len(other)) :]
        case _:
            start = rng.randrange(len(data))
            return data[:start] + rng.randbytes(rng.randint(1, 8)) + data[start + 1 :]


def holds(root: object, needle: bytes | str, *, limit: int = 1_000_000) -> list[str]:
    """Where an object of kvcore holds a value, however deep: the paths."""
    found: list[str] = []
    seen: set[int] = set()
    stack: list[tuple[str, object]] = [("", root)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, bytes | str):
            if item == needle:
                found.append(path)
            continue
        if item is None or isinstance(item, int | float | np.ndarray | type) or id(item) in seen or callable(item):
            continue
        seen.add(id(item))
        assert len(seen) < limit, "grows without end"
        if isinstance(item, dict):
            stack += [(f"{path}[{key!r}]", part) for pair in item.items() for key, part in [(pair[0], pair[0]), pair]]
        elif isinstance(item, list | tuple | set | frozenset) or type(item).__name__ == "deque":
            stack += [(f"{path}[]", part) for part in item]
        else:
            names = [*getattr(item, "__dict__", ()), *getattr(item, "__struct_fields__", ())]
            stack += [(f"{path}.{name}", getattr(item, name)) for name in names]
    return found
