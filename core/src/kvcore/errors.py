"""Every error kvcore raises.

Each one is a :class:`KVCoreError`: a sentence for a person, the same facts as structured ``fields``, and where one is
known a ``remedy``. ``as_dict()`` is what goes to logs, ``--json`` output and the wire.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar


class KVCoreError(Exception):
    """Base of all kvcore errors.

    Args:
        message: what happened, one sentence, without a final stop.
        remedy: what the reader can do about it; empty when there is nothing to say.
        fields: the facts of the message as plain values (region, field, expected, got, …).
    """

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy
        self.fields: dict[str, Any] = fields

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={_shown(value)}" for name, value in self.fields.items())
        text = f"{self.message} ({facts})" if facts else self.message
        return f"{text}. Remedy: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.remedy, self.fields))

    def as_dict(self) -> dict[str, Any]:
        """Return ``{code, message, remedy, fields}`` with plain values only."""
        return {
            "code": self.code,
            "message": self.message,
            "remedy": self.remedy,
            "fields": {name: _plain(value) for name, value in self.fields.items()},
        }


def _rebuild(cls: type[KVCoreError], message: str, remedy: str, fields: dict[str, Any]) -> KVCoreError:
    error = cls(message, remedy=remedy)
    error.fields = fields  # not as keywords: a peer's fields may have any name
    return error


_LONGEST = 2000
"""Characters of a value that a sentence shows; the field has all of it."""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"<{type(value).__name__}, nested too deeply to be shown>"
    except ValueError:  # Python refuses to write integers of thousands of digits
        text = hex(value) if isinstance(value, int) else f"<{type(value).__name__}>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"


_DEEPEST = 16
"""Nesting of a value that its plain form keeps; what lies deeper is shown as text."""


def _plain(value: Any, depth: int = 0) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth == _DEEPEST and isinstance(value, list | tuple | set | frozenset | dict):
        return _shown(value)
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item, depth + 1) for key, item in value.items()}
    return str(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a remedy naming the known word closest to ``name`` (all of them when none is close)."""
    words = sorted(known)
    close = get_close_matches(name, words, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(words)}" if words else "none is known"


class LayoutError(KVCoreError, ValueError):
    """A layout that does not describe its bytes exactly once, or two layouts that cannot be converted."""

    code = "layout"


class ConfigError(KVCoreError, ValueError):
    """A configuration that is wrong in itself: unknown key, wrong type, value out of range."""

    code = "config"


class UnsupportedError(KVCoreError):
    """A combination that cannot work, refused before memory is touched, with the reason."""

    code = "unsupported"


class PluginError(KVCoreError):
    """A plugin that is missing, broken, ambiguous, or written for another contract."""

    code = "plugin"


class CapacityError(KVCoreError):
    """Not enough units now; nothing was changed and the same call may succeed later."""

    code = "capacity"


class RequestError(KVCoreError):
    """A call about a request that does not fit the request's state."""

    code = "request"


class EmptyPromptError(RequestError, ValueError):
    """A prompt of zero tokens: there is nothing to attend to, so it is refused at admission."""

    code = "empty_prompt"


class PromptTooLongError(RequestError, ValueError):
    """A request that could not be held even by an empty pool."""

    code = "prompt_too_long"


class StepTooLargeError(RequestError, ValueError):
    """A step larger than the cache was built for: the same call never succeeds, whatever is retracted or released."""

    code = "step_too_large"


class DuplicateRequestError(RequestError):
    """A request id that is in use; the first holder is untouched."""

    code = "duplicate_request"


class UnknownRequestError(RequestError, KeyError):
    """A request id that was never admitted or is already released."""

    code = "unknown_request"

    __str__ = KVCoreError.__str__  # KeyError would quote the message


class StaleHandleError(RequestError):
    """A handle, step or table row that outlived the units it names; nothing was written."""

    code = "stale_handle"


class IntegrityError(KVCoreError):
    """Bookkeeping that no longer adds up: a bug in kvcore or in a plugin, never a user's input."""

    code = "integrity"


class BackupError(KVCoreError):
    """A save or restore that failed; the request and the pool are as they were before."""

    code = "backup"


class TransferError(KVCoreError):
    """A transfer that ended without its data being accepted; nothing of it is kept."""

    code = "transfer"


class HandshakeError(TransferError):
    """Two peers that cannot exchange data, found before any buffer was touched."""

    code = "handshake"


class ProtocolError(TransferError):
    """A control message that cannot be decoded or does not fit the conversation."""

    code = "protocol"


class PeerLostError(TransferError):
    """The other process died or its connection was cut."""

    code = "peer_lost"


class TransferAbortedError(TransferError):
    """Either side gave the transfer up."""

    code = "aborted"


class TransferExpiredError(TransferError):
    """The sender no longer held the units when the read was reported."""

    code = "expired"


ERRORS_BY_CODE: dict[str, type[KVCoreError]] = {}


def _collect(cls: type[KVCoreError]) -> None:
    ERRORS_BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _collect(sub)


_collect(KVCoreError)


def error_from_dict(data: dict[str, Any]) -> KVCoreError:
    """Rebuild an error from :meth:`KVCoreError.as_dict` (an unknown code becomes the base class)."""
    cls = ERRORS_BY_CODE.get(str(data.get("code")), KVCoreError)
    fields = {str(name): value for name, value in dict(data.get("fields") or {}).items()}
    return _rebuild(cls, str(data.get("message", "")), str(data.get("remedy", "")), fields)
