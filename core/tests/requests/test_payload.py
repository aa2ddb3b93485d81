"""Payloads: unit ids by value."""

from __future__ import annotations

import struct

import msgspec
import numpy as np
import pytest

from kvcore.errors import ProtocolError
from kvcore.requests.payload import Payload


def test_ids_survive_the_wire():
    made = Payload.of("full", "pages", ["full/kv"], 3, np.array([5, 2**40]))
    assert made.units == struct.pack("<2q", 5, 2**40)
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=Payload)
    assert got == made
    assert got.ids.tolist() == [5, 2**40]
    assert got.ids.dtype == np.int64
    assert (got.first, got.num_units, got.stop, got.components) == (3, 2, 5, ("full/kv",))


def test_no_units_is_legal():
    """J6: a payload may be empty."""
    empty = Payload.of("full", "pages", (), 0, [])
    assert (empty.num_units, empty.stop, empty.ids.tolist()) == (0, 0, [])


@pytest.mark.parametrize(
    ("first", "units"), [(0, b"1234567"), (-1, b""), (0, struct.pack("<2q", 3, -1)), (0, b"x" * 9)]
)
def test_what_does_not_name_units_is_refused(first, units):
    with pytest.raises(ProtocolError):
        Payload("full", "pages", (), first, units)
