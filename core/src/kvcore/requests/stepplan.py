"""What one step does to the units of a model: made by the manager, obeyed by the store of every rank (no torch).

A :class:`StepPlan` is plain integers and serialisable, so that one manager can drive stores in other processes. Its
parts are obeyed in this order: copies, then zeroing of fresh units, then the rows' writes.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from kvcore.errors import IntegrityError, ProtocolError
from kvcore.layout import Int64Array

_WIRE = np.dtype("<i8")


class StepRow(msgspec.Struct, frozen=True):
    """One request in a step.

    Attributes:
        request: its id.
        generation: which admission of that id; a later one with the same id has another.
        start: tokens in the cache before the step.
        count: new tokens of the step, at positions ``[start, start + count)``.
    """

    request: str
    generation: int
    start: int
    count: int

    @property
    def stop(self) -> int:
        """Tokens in the cache once the step is stored."""
        return self.start + self.count


class RangePlan(msgspec.Struct, frozen=True, eq=False):
    """One unit range of one layer group in a step. Arrays are read-only int64; unit ids are region unit ids.

    Attributes:
        group: prefix of the layer group.
        range: name of the unit range.
        indptr: ``[R + 1]``, where each row's logical units start in ``units``.
        units: the rows' unit ids, ragged; a logical unit that is dead holds the null unit.
        fresh: units that no committed step has written since they were handed out: zeroed before the rows' writes.
        copies_src, copies_dst: ``[C]`` each, pairwise: copy-on-write, done before anything else of the step. Pairs are
            independent of one another: no destination is a source.
        trail: ``[T]`` in a speculative step, for a space whose units serve one length only: where the state after each new
            token goes, −1 where it is not kept; the last token of a row names the row's own unit. Else empty.
    """

    group: str
    range: str
    indptr: Int64Array
    units: Int64Array
    fresh: Int64Array
    copies_src: Int64Array
    copies_dst: Int64Array
    trail: Int64Array = msgspec.field(default_factory=lambda: np.empty(0, np.int64))

    def __post_init__(self) -> None:
        for name in ("indptr", "units", "fresh", "copies_src", "copies_dst", "trail"):
            array = np.array(getattr(self, name), dtype=np.int64, ndmin=1)
            array.flags.writeable = False
            msgspec.structs.force_setattr(self, name, array)
        ptr = self.indptr
        if ptr.ndim != 1 or not len(ptr) or ptr[0] != 0 or ptr[-1] != len(self.units) or np.any(np.diff(ptr) < 0):
            raise IntegrityError("indptr does not cut the units into rows", group=self.group, range=self.range)
        if len(self.copies_src) != len(self.copies_dst):
            raise IntegrityError("copies are not pairs", group=self.group, range=self.range)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.indptr) - 1

    def row(self, index: int) -> Int64Array:
        """Unit ids of one row, logical order."""
        return self.units[self.indptr[index] : self.indptr[index + 1]]


class StepPlan(msgspec.Struct, frozen=True, eq=False):
    """One step of a model.

    Attributes:
        step: number of the step, ascending; a store refuses a plan older than its last.
        rows: the requests of the step, in batch order, each at most once.
        ranges: one entry per layer group and unit range.
    """

    step: int
    rows: tuple[StepRow, ...]
    ranges: tuple[RangePlan, ...]

    def __post_init__(self) -> None:
        for item in self.ranges:
            if item.num_rows != len(self.rows):
                raise IntegrityError(
                    "a range does not have one entry per row",
                    group=item.group,
                    range=item.range,
                    expected=len(self.rows),
                    got=item.num_rows,
                )
            if len(item.trail) and len(item.trail) != self.num_tokens:
                raise IntegrityError(
                    "a trail does not have one entry per new token",
                    group=item.group,
                    range=item.range,
                    expected=self.num_tokens,
                    got=len(item.trail),
                )

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(row.count for row in self.rows)

    def of(self, group: str, range: str) -> RangePlan:
        """The entry of one unit range; raises IntegrityError where there is none."""
        for item in self.ranges:
            if item.group == group and item.range == range:
                return item
        raise IntegrityError("the plan has no such unit range", group=group, range=range)

    def encode(self) -> bytes:
        """MessagePack; arrays are little-endian int64 bytes."""
        return _ENCODER.encode(self)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> StepPlan:
        """Inverse of :meth:`encode`. Raises ProtocolError for what is not a plan."""
        try:
            return _DECODER.decode(data)
        except (msgspec.MsgspecError, IntegrityError, ValueError) as error:
            raise ProtocolError("not a step plan", reason=str(error)) from error


def _to_wire(value: Any) -> bytes:
    if isinstance(value, np.ndarray):
        return value.astype(_WIRE, copy=False).tobytes()
    raise TypeError(f"{type(value).__name__} is not part of a step plan")


def _from_wire(kind: Any, value: Any) -> Any:
    if not isinstance(value, bytes) or len(value) % _WIRE.itemsize:
        raise ValueError("array is not a whole number of int64")
    return np.frombuffer(value, _WIRE).astype(np.int64)


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_to_wire)
_DECODER = msgspec.msgpack.Decoder(StepPlan, dec_hook=_from_wire)
