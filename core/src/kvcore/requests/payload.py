"""The unit ids of one component set of one request and one token range: what is offered, saved and restored (no I/O)."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvcore.errors import ProtocolError
from kvcore.layout import Int64Array

_WIRE = np.dtype("<i8")


class Payload(msgspec.Struct, frozen=True):
    """Units of one unit range of one request, in logical order.

    Attributes:
        group: prefix of the layer group.
        range: name of the unit range.
        components: the components that move under these ids.
        first: logical index of the first unit.
        units: region unit ids, little-endian int64; empty is legal and moves nothing.
        layers: storage layer ids that are offered; empty means every layer the sender holds.
    """

    group: str
    range: str
    components: tuple[str, ...]
    first: int
    units: bytes
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        whole = len(self.units) % _WIRE.itemsize == 0
        if not whole or self.first < 0 or (self.units and int(np.frombuffer(self.units, _WIRE).min()) < 0):
            raise ProtocolError(
                "payload does not name units",
                group=self.group,
                range=self.range,
                first=self.first,
                units_bytes=len(self.units),
            )

    @classmethod
    def of(
        cls,
        group: str,
        range: str,
        components: Sequence[str],
        first: int,
        ids: Int64Array | Sequence[int],
        layers: Sequence[int] = (),
    ) -> Payload:
        """Build from unit ids ``[N]``; ``first`` is the logical index of ``ids[0]``."""
        return cls(group, range, tuple(components), int(first), np.asarray(ids, dtype=_WIRE).tobytes(), tuple(layers))

    def of_layers(self, layers: Sequence[int]) -> Payload:
        """The same units of some layers only."""
        return msgspec.structs.replace(self, layers=tuple(layers))

    @property
    def ids(self) -> Int64Array:
        """Region unit ids, read-only ``int64 [N]``."""
        return np.frombuffer(self.units, _WIRE).astype(np.int64, copy=False)

    @property
    def num_units(self) -> int:
        """N."""
        return len(self.units) // _WIRE.itemsize

    @property
    def stop(self) -> int:
        """Exclusive end of the logical indices."""
        return self.first + self.num_units
