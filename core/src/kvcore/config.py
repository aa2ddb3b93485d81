"""The configuration: one TOML file, overridden by command-line flags (no torch).

Every key is typed, unknown ones are refused at any depth with the nearest known one named. No environment variable
changes which bytes are kept or moved.
"""

from __future__ import annotations

import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from kvcore.errors import ConfigError, nearest
from kvcore.layout import ArenaOrder

_UNITS = {"b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS[f"{_letter}b"] = 1000**_power
    _UNITS[f"{_letter}ib"] = 1024**_power
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-zA-Z]*)\s*")

_ABSENT: Any = object()

_DEPTH = 32
"""Levels of a configuration: more is no configuration but an input that somebody made."""

_TRUE = frozenset({"1", "true", "on", "yes"})
_FALSE = frozenset({"", "0", "false", "off", "no"})

# Marks integers that may be written as "64MiB".
_BYTES = {"kvcore": "bytes"}

Bytes = Annotated[int, msgspec.Meta(gt=0, extra=_BYTES)]
# What one process could not hold bookkeeping of is a slip of the keyboard, refused before anything is sized for it.
Count = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**24)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Part = Annotated[float, msgspec.Meta(gt=0, le=1)]


class CacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is kept and where.

    Attributes:
        format: name of the KV format.
        format_options: options of that format, which depend on it.
        formats: formats of single layer groups, by prefix (``{"swa": "bf16"}``), where they are not ``format``.
        page_size: tokens a page.
        memory: bytes of KV per rank, or a size such as ``"64MiB"``.
        device: ``cpu``, ``cuda:0``, …
        arena: what lies side by side in memory: all layers of a page, or all pages of a layer.
        max_requests: requests that windows, rings and states are put aside for: most live requests of a model that has
            any. Others are bounded by tokens alone.
        checkpoints: state slots put aside per request beyond the live one, for checkpoints and speculative steps.
        max_rows: most requests in a step.
        max_tokens: most new tokens in a step.
    """

    format: str = "fp32"
    format_options: dict[str, Any] = {}
    formats: dict[str, str] = {}
    page_size: Count = 16
    memory: Bytes = 256 * 1024**2
    device: str = "cpu"
    arena: ArenaOrder = "page_major"
    max_requests: Count = 64
    checkpoints: Natural = 0
    max_rows: Count = 64
    max_tokens: Count = 2048


class TransferConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How KV moves between processes.

    Attributes:
        transport: name of the transport.
        options: options of that transport, which depend on it; of ``shm``: ``stage_bytes``, ``stage_readers``,
            ``stage_timeout_s``.
        bind: ZeroMQ address the sender listens on; beyond loopback only with keys, or with ``allow`` for anyone.
        checksum: ``crc32`` has every offered unit's bytes checked where they arrive; ``none`` trusts the wire.
        held_fraction: part of a unit range, more than 0 and at most 1, that finished prompts may hold for decode
            processes before no further prompt is admitted.
        lease_s: how long offered units are held after the prompt is done, unless renewed or acknowledged.
        heartbeat_s: how often the receiver renews leases; shorter than ``lease_s`` and ``peer_timeout_s``.
        peer_timeout_s: silence after which a peer counts as lost; a cut connection is noticed at once.
        ask_timeout_s: how long a decode process's ask waits for a request that the prefill engine has not begun.
        read_timeout_s: a read older than this no longer renews its lease.
        quiesce_s: how long a failed request waits for its reads to become quiet.
        hello_timeout_s: how long a decode process waits for the answer to its hello, and a sender for the hello of who
            connects.
        curve_certificate: file with this process's CURVE key pair (``kvcore keys new``); "" is no encryption.
        curve_peers: files with the public certificates of the peers, the only ones that are talked to.
        allow: whom a sender without keys serves: ``same_user``, processes of its own user on its host, or ``anyone`` who
            reaches its address.
    """

    transport: str = "shm"
    options: dict[str, Any] = {}
    bind: str = "tcp://127.0.0.1:*"
    checksum: Literal["none", "crc32"] = "none"
    held_fraction: Part = 0.5
    lease_s: Seconds = 30.0
    heartbeat_s: Seconds = 1.0
    peer_timeout_s: Seconds = 8.0
    ask_timeout_s: Seconds = 120.0
    read_timeout_s: Seconds = 30.0
    quiesce_s: Seconds = 10.0
    hello_timeout_s: Seconds = 10.0
    curve_certificate: str = ""
    curve_peers: tuple[str, ...] = ()
    allow: Literal["same_user", "anyone"] = "same_user"

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            # A time that never ends would leave units held for a peer that is gone.
            if name.endswith("_s") and not math.isfinite(getattr(self, name)):
                raise ConfigError("a time must be finite", key=f"transfer.{name}", got=getattr(self, name))
        for name in ("lease_s", "peer_timeout_s"):
            if getattr(self, name) <= self.heartbeat_s:
                raise ConfigError(
                    "heartbeats must come more often than what they renew ends",
                    key="transfer.heartbeat_s",
                    remedy=f"make heartbeat_s shorter than {name}",
                    heartbeat_s=self.heartbeat_s,
                    **{name: getattr(self, name)},
                )
        if bool(self.curve_certificate) != bool(self.curve_peers):
            raise ConfigError(
                "CURVE needs one's own certificate and those of the peers",
                key="transfer.curve_peers",
                curve_certificate=self.curve_certificate,
                curve_peers=list(self.curve_peers),
            )


class RetractionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What happens to a request that is taken off the device.

    Attributes:
        policy: ``backup`` copies its bytes out, ``recompute`` prefills it again.
        backend: name of the backup backend.
        options: options of that backend, which depend on it; ``host_pool`` needs ``size``.
    """

    policy: Literal["backup", "recompute"] = "backup"
    backend: str = "host_tensor"
    options: dict[str, Any] = {}


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be configured.

    Attributes:
        plugins: plugins to enable besides the built-ins; the providers of named formats, transports and backups are
            enabled by themselves.
    """

    plugins: tuple[str, ...] = ()
    cache: CacheConfig = CacheConfig()
    transfer: TransferConfig = TransferConfig()
    retraction: RetractionConfig = RetractionConfig()

    @classmethod
    def from_mapping(cls, data: Mapping[str, Any]) -> Config:
        """Check plain nested values (as TOML and JSON give them) and build the configuration.

        Raises:
            ConfigError: unknown key, wrong type or value out of range, naming the key with its path.
        """
        _check_depth(data)
        return _convert(_checked(data, cls, ""), cls)

    def to_json(self) -> bytes:
        """Serialise, for workers in other processes; :meth:`from_json` gives an equal configuration."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> Config:
        """Decode and validate."""
        try:
            plain = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ConfigError("configuration is not valid JSON", cause=str(error)) from error
        except RecursionError:
            raise ConfigError("a configuration is nested too deeply", most=_DEPTH) from None
        return cls.from_mapping(plain)


def load_config(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file; None starts from the defaults.
        overrides: dotted key → value, e.g. ``{"cache.format": "fp16"}``; None as a value means "not given". Their order
            does not matter. Tables are merged, key by key, with each other and over the file; an empty table of
            options takes away those of the file.
        defaults: the same for what neither the file nor ``overrides`` say.

    Raises:
        ConfigError: the file cannot be read, anything in it or in the overrides is wrong, or two overrides say different
            values of one key.
    """
    data: dict[str, Any] = {}
    if path is not None:
        try:
            data = tomllib.loads(path.read_bytes().decode("utf-8"))
        except OSError as error:
            raise ConfigError("configuration file cannot be read", path=str(path), cause=str(error)) from error
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise ConfigError("configuration file is not valid TOML", path=str(path), cause=str(error)) from error
        except RecursionError:
            raise ConfigError("a configuration is nested too deeply", path=str(path), most=_DEPTH) from None
    data = _over(_tree(overrides or {}), _over(data, _tree(defaults or {})), tables=True)
    try:
        return Config.from_mapping(data)
    except ConfigError as error:
        if path is not None:
            error.fields["path"] = str(path)
        raise


def parse_settings(items: Iterable[str], flags: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return overrides for :func:`load_config` from texts ``KEY=VALUE``, as the flag ``--set`` gives them.

    Args:
        items: the key is dotted (``transfer.lease_s``); the value is written as in TOML, and what is not TOML is a
            string: ``bf16`` and ``"bf16"`` are the same.
        flags: keys that have flags of their own, None meaning "not given"; they are returned too.

    Raises:
        ConfigError: no key, a key twice, or a key whose own flag says something else. Unknown keys and wrong types are
            found by :func:`load_config`.
    """
    out: dict[str, Any] = {}
    for item in items:
        key, equals, text = (part.strip() for part in item.partition("="))
        if not equals or not all(key.split(".")):
            raise ConfigError("not a setting", got=item, remedy="write KEY=VALUE, such as transfer.lease_s=10")
        if key in out:
            raise ConfigError("a key is set twice", key=key, got=item)
        out[key] = _toml_value(text)
    for key, flag in (flags or {}).items():
        if flag is not None and out.setdefault(key, flag) != flag:
            raise ConfigError(
                "a setting contradicts a flag", key=key, flag=flag, got=out[key], remedy="give one of the two"
            )
    return out


def _toml_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except RecursionError:
        raise ConfigError("a setting is nested too deeply", most=_DEPTH) from None
    return parsed["value"] if len(parsed) == 1 else text


def parse_bytes(text: str | int) -> int:
    """Return the bytes a size names: an integer, or text such as ``64MiB``, ``1.5 GiB``, ``2GB`` (decimal), ``4096``.

    Raises:
        ConfigError: not a size, a negative one, or one that is no whole number of bytes.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    remedy = 'write an integer or a size such as "64MiB"'
    if match is None:
        raise ConfigError("not a size in bytes", got=text, remedy=remedy)
    unit = match[2].lower() or "b"
    if unit not in _UNITS:
        shown = {"b": "B"} | {u: u[0].upper() + u[1:].replace("b", "B") for u in _UNITS if len(u) > 1}
        close = f"{unit[0]}ib" if f"{unit[0]}ib" in _UNITS else ""
        hint = f"did you mean {shown[close]!r}?" if close else f"known: {', '.join(shown.values())}"
        raise ConfigError("unknown unit of a size", got=text, unit=match[2], remedy=hint)
    size = Fraction(match[1]) * _UNITS[unit]
    if size.denominator != 1:
        raise ConfigError("not a whole number of bytes", got=text, remedy=remedy)
    return int(size)


def parse_bool(name: str, text: str) -> bool:
    """Return what a boolean setting written as text says; never the truth of the string itself.

    Args:
        name: the variable or option, for the message.
        text: ``1 true on yes`` or ``0 false off no`` or nothing; case and surrounding blanks do not matter.

    Raises:
        ConfigError: anything else, naming the variable.
    """
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError("not a boolean", variable=name, got=text, remedy=nearest(word, (_TRUE | _FALSE) - {""}))


# --- inside ----------------------------------------------------------------------------------------------------------


def _tree(items: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as nested tables. ConfigError where two of them say different things of one key."""
    out: dict[str, Any] = {}
    for key, value in items.items():
        if value is not None:
            _check_depth(value, key.count("."))
            for name in reversed(key.split(".")):
                value = {name: value}
            _join(out, value, "")
    return out


def _check_depth(data: Any, above: int = 0) -> None:
    """Refuse what is nested too deeply, level by level: other functions call themselves for what is inside."""
    level = [data]
    for _ in range(_DEPTH - above):
        level = [inner for item in level for inner in _inside(item)]
        if not level:
            return
    raise ConfigError("a configuration is nested too deeply", most=_DEPTH)


def _inside(item: Any) -> Iterable[Any]:
    return item.values() if isinstance(item, Mapping) else item if isinstance(item, list | tuple) else ()


def _join(out: dict[str, Any], more: Mapping[str, Any], path: str) -> None:
    """Merge into ``out``. Options that are emptied and given say different things; a table of keys may be empty."""
    for name, value in more.items():
        key = f"{path}.{name}" if path else name
        known = out.get(name, _ABSENT)
        if isinstance(value, dict) and (known is _ABSENT or isinstance(known, dict)):
            if known is _ABSENT or not path or bool(known) == bool(value):
                _join(out.setdefault(name, {}), value, key)
                continue
        elif known is _ABSENT or (known == value and type(known) is type(value)):
            out[name] = value
            continue
        raise ConfigError("a key is set twice", key=key, got=[known, value], remedy="set it once")


def _over(high: Mapping[str, Any], low: Mapping[str, Any], *, tables: bool = False, path: str = "") -> dict[str, Any]:
    """Two trees of tables as one: ``high`` is right, except that a table takes nothing away, unless of options and empty.

    With ``tables``, ConfigError for a table over what is none.
    """
    out = {**low, **high}
    for name in high.keys() & low.keys():
        above, below, key = high[name], low[name], f"{path}.{name}" if path else name
        if isinstance(above, dict) and isinstance(below, dict):
            if above or not path:
                out[name] = _over(above, below, tables=tables, path=key)
        elif isinstance(above, dict) and tables:
            raise ConfigError("key has no parts", key=key, got=below)
    return out


def _checked(data: Any, cls: type[msgspec.Struct], path: str) -> dict[str, Any]:
    """Refuse unknown keys, with their path, and turn written sizes into integers."""
    if not isinstance(data, Mapping):
        raise ConfigError("expected a table", key=path or "(top level)", got=type(data).__name__)
    known = typing.get_type_hints(cls, include_extras=True)
    out: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{path}.{name}" if path else str(name)
        if name not in known:
            raise ConfigError("unknown configuration key", key=key, remedy=_nearest_key(str(name), path, known))
        kind = known[name]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            out[name] = _checked(value, kind, key)
        elif any(getattr(meta, "extra", None) == _BYTES for meta in getattr(kind, "__metadata__", ())):
            out[name] = _size(value, key)
        else:
            out[name] = value
    return out


def _nearest_key(name: str, path: str, known: Mapping[str, Any]) -> str:
    """Name the nearest key: of this table, or the same word in another one."""
    if name not in known and not path:
        for table, kind in known.items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and name in kind.__struct_fields__:
                return f"did you mean '{table}.{name}'?"
    return nearest(name, known)


def _size(value: Any, key: str) -> int:
    try:
        return parse_bytes(value)
    except ConfigError as error:
        error.fields = {"key": key, **error.fields}
        raise


def _convert(data: dict[str, Any], cls: type[Config]) -> Config:
    try:
        return msgspec.convert(data, cls)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        text, _, where = str(error).partition(" - at `$")
        key = where.strip("`.")
        raise ConfigError(f"wrong value: {text}", key=key or "(top level)", got=_at(data, key)) from error


def _at(data: Any, key: str) -> Any:
    """The value at a dotted key, or what is above it where the path leaves the tables (``plugins[...]``)."""
    for name in key.split("."):
        if not isinstance(data, Mapping) or name not in data:
            break
        data = data[name]
    return data
