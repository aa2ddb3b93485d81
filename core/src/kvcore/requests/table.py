"""The requests a manager holds: identity, generation, lengths and unit tables (integers only)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import numpy as np

from kvcore.errors import (
    CapacityError,
    DuplicateRequestError,
    RequestError,
    StaleHandleError,
    UnknownRequestError,
    nearest,
)
from kvcore.layout import Int64Array

RangeKey = tuple[str, str]
"""``(group prefix, range name)``."""

Overwritten = tuple[tuple[int, int], ...]
"""``(kept, stop)``: when the first ``kept`` tokens were left, tokens up to ``stop`` had been written (and rejected,
abandoned or truncated), or never arrived, which is the same: in a ring they lie where older ones did."""

RequestState = Literal["filling", "ready", "in_step", "spoiled", "released"]


class Request:
    """One request, as its manager sees it now. Read only: the manager alone changes it.

    A view outlives its request: it then says ``released`` for ever, also when the id is in use again.

    Attributes:
        id: chosen by the engine, unique among live requests.
        generation: unique per admission, ascending; tells two holders of one id apart.
    """

    __slots__ = (
        "_checkpoints",
        "_external",
        "_length",
        "_open_step",
        "_released",
        "_reserved",
        "_spoiled",
        "_tables",
        "_written",
        "generation",
        "id",
    )

    def __init__(self, request_id: str, generation: int, *, external: bool = False) -> None:
        self.id = request_id
        self.generation = generation
        self._external = external
        self._length = 0
        self._reserved = 0
        self._open_step: int | None = None
        self._released = False
        self._spoiled = False
        self._tables: dict[RangeKey, Int64Array] = {}
        self._checkpoints: dict[int, dict[RangeKey, Int64Array]] = {}
        self._written: dict[RangeKey, Overwritten] = {}

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """Lengths, ascending, that the request can go back to though its state has moved on."""
        return tuple(sorted(self._checkpoints))

    def reach(self, key: RangeKey, to: int) -> int:
        """Tokens that were written in a range since its first ``to`` were complete; not below the length."""
        return max([self._length, *(stop for kept, stop in self._written.get(key, ()) if to <= kept)])

    def wrote(self, key: RangeKey, stop: int, kept: int) -> None:
        """Note that tokens up to ``stop`` were written, of which the request keeps the first ``kept``."""
        notes = [(min(kept, at), other) for at, other in self._written.get(key, ())]
        notes.append((kept, stop))
        # What reaches no further than the tokens themselves, or than what was kept of more of them, says nothing new.
        self._written[key] = tuple(
            note for n, note in enumerate(notes)
            if note[1] > kept and not any(later[0] >= note[0] and later[1] >= note[1] for later in notes[n + 1 :])
        )  # fmt: skip

    def overwritten(self, key: RangeKey) -> Overwritten:
        """What :meth:`wrote` noted in a range, as far as it still matters."""
        return self._written.get(key, ())

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return self._length

    @property
    def reserved(self) -> int:
        """Tokens that units are held for; never below ``length``."""
        return self._reserved

    @property
    def state(self) -> RequestState:
        """``filling`` by a transfer or restore, ``ready``, ``in_step`` (planned, not committed) or ``released``;
        ``spoiled`` where an abandoned step has overwritten a state: it can only be released, or rolled back to a
        checkpoint."""
        if self._released:
            return "released"
        if self._spoiled:
            return "spoiled"
        if self._open_step is not None:
            return "in_step"
        return "filling" if self._external else "ready"

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, generation={self.generation}, length={self._length}, reserved={self._reserved}, "
            f"state={self.state!r})"
        )


class RequestTable:
    """Live requests by id."""

    def __init__(self, max_requests: int | None) -> None:
        self.max_requests = max_requests
        self._live: dict[str, Request] = {}
        self._generations = 0

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._live

    @property
    def full(self) -> bool:
        """Whether ``max_requests`` are live."""
        return self.max_requests is not None and len(self._live) >= self.max_requests

    @property
    def live(self) -> Mapping[str, Request]:
        """By id."""
        return self._live

    def check_new(self, request_id: str) -> None:
        """Raise what :meth:`add` would raise for this id, so that nothing need be undone."""
        if request_id in self._live:
            raise DuplicateRequestError(
                "request id is in use",
                request=request_id,
                generation=self._live[request_id].generation,
                remedy="release the first holder or choose another id",
            )
        if self.full:
            raise CapacityError(
                "as many requests as allowed are live",
                request=request_id,
                max_requests=self.max_requests,
                remedy="release or retract a request first",
            )

    def add(self, request_id: str, *, external: bool = False) -> Request:
        """Admit an id under a new generation."""
        self.check_new(request_id)
        self._generations += 1
        request = Request(request_id, self._generations, external=external)
        self._live[request_id] = request
        return request

    def get(self, request_id: str, generation: int | None = None) -> Request:
        """The live request. UnknownRequestError, or StaleHandleError when the id belongs to another generation now."""
        request = self._live.get(request_id)
        if request is None:
            raise UnknownRequestError(
                "no such request", request=request_id, remedy=_closest(request_id, self._live.keys())
            )
        if generation is not None and generation != request.generation:
            raise StaleHandleError(
                "the request id was released and admitted again",
                request=request_id,
                expected=generation,
                got=request.generation,
            )
        return request

    def find(self, request_id: str, generation: int) -> Request | None:
        """The live request of exactly this generation, or None."""
        request = self._live.get(request_id)
        return request if request is not None and request.generation == generation else None

    # --- fit for a call ---

    def sound(self, request_id: str) -> Request:
        """The request; RequestError where its state is lost."""
        request = self.get(request_id)
        if request._spoiled:
            raise RequestError(
                "an abandoned step has overwritten the state of the request",
                request=request_id,
                length=request._length,
                checkpoints=list(request.checkpoints),
                remedy="roll it back to a checkpoint, or release it and compute its tokens again",
            )
        return request

    def settled(self, request_id: str) -> Request:
        """The request; RequestError while it is in a step."""
        request = self.get(request_id)
        if request._open_step is not None:
            raise RequestError(
                "request is in an open step",
                request=request_id,
                step=request._open_step,
                remedy="commit or abandon that step first",
            )
        return request

    def idle(self, request_id: str) -> Request:
        """:meth:`sound` and :meth:`settled`."""
        self.sound(request_id)
        return self.settled(request_id)

    def filled(self, request_id: str) -> Request:
        """:meth:`idle`, and nothing of it is still on its way."""
        request = self.idle(request_id)
        demand_filled(request)
        return request

    def remove(self, request: Request) -> dict[RangeKey, Int64Array]:
        """Forget a request; returns the units it held, once for each reference: its tables and its checkpoints."""
        del self._live[request.id]
        tables, request._tables = request._tables, {key: np.empty(0, np.int64) for key in request._tables}
        checkpoints, request._checkpoints = request._checkpoints, {}
        for kept in checkpoints.values():
            for key, ids in kept.items():
                tables[key] = np.concatenate((tables[key], ids))
        request._released = True
        request._open_step = None
        return tables


def token_count(value: int, request_id: str) -> int:
    """A number of tokens as an int; RequestError for what is no whole number, such as an item of a float tensor.

    Integers of numpy and torch are converted: a length goes on the wire, into handles, and into tables for good.
    """
    if type(value) is int:
        return value
    try:
        return int(operator.index(value))
    except TypeError:
        raise RequestError(
            "a number of tokens is a whole number",
            request=request_id,
            got=value,
            kind=type(value).__name__,
            remedy="convert it with int()",
        ) from None


def demand_filled(request: Request) -> None:
    """Raise RequestError while a transfer or restore fills the request."""
    if request._external and not request._length:
        raise RequestError(
            "request is still being filled",
            request=request.id,
            remedy="call set_length when the transfer or restore is done",
        )


def _closest(request_id: str, live: Collection[str]) -> str:
    # Listing thousands of live ids would help nobody.
    return nearest(request_id, live) if 0 < len(live) <= 8 else "it was never admitted, or is released"
