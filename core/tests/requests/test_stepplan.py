"""Step plans on the wire."""

from __future__ import annotations

import struct
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import IntegrityError, ProtocolError
from kvcore.requests.stepplan import RangePlan, StepPlan, StepRow


def plan():
    rows = (StepRow("a", 1, 0, 3), StepRow("b", 7, 9, 1))
    pages = RangePlan("full", "pages", [0, 2, 5], [4, 5, 9, 2**40, 8], [5], [6], [8])
    states = RangePlan("state", "slots", [0, 1, 2], [3, 4], [7], [5], [4], [7, -1, 3, 4])
    return StepPlan(3, rows, (pages, states))


def test_round_trip_keeps_every_value():
    got = StepPlan.decode(plan().encode())
    assert got.step == 3
    assert got.rows == plan().rows
    assert got.rows[1].stop == 10
    assert got.num_tokens == 4
    pages = got.of("full", "pages")
    assert pages.row(0).tolist() == [4, 5]
    assert pages.row(1).tolist() == [9, 2**40, 8]
    assert (pages.fresh.tolist(), pages.copies_src.tolist(), pages.copies_dst.tolist()) == ([5], [6], [8])
    assert pages.trail.tolist() == []
    assert got.of("state", "slots").trail.tolist() == [7, -1, 3, 4]
    assert got.encode() == plan().encode()


def test_arrays_are_little_endian_int64_on_the_wire():
    raw = msgspec.msgpack.decode(plan().encode())
    assert raw["ranges"][0]["units"] == struct.pack("<5q", 4, 5, 9, 2**40, 8)


def test_arrays_are_private_and_read_only():
    units = np.array([4, 5])
    made = RangePlan("full", "pages", np.array([0, 2]), units, [], [], [])
    units[0] = 99
    assert made.units.tolist() == [4, 5]
    with pytest.raises(ValueError, match="read-only"):
        made.units[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        StepPlan.decode(plan().encode()).of("full", "pages").units[0] = 1


@pytest.mark.parametrize("indptr", [[], [1, 2], [0, 1], [0, 3], [0, 2, 1, 2]])
def test_indptr_must_cut_the_units(indptr):
    with pytest.raises(IntegrityError):
        RangePlan("full", "pages", indptr, [4, 5], [], [], [])


def test_parts_must_match_one_another():
    with pytest.raises(IntegrityError):
        RangePlan("full", "pages", [0], [], [], [1], [])
    with pytest.raises(IntegrityError):
        StepPlan(1, (), (RangePlan("full", "pages", [0, 0], [], [], [], []),))
    with pytest.raises(IntegrityError, match="entry per new token"):
        StepPlan(1, (StepRow("a", 1, 0, 3),), (RangePlan("s", "slots", [0, 1], [3], [], [], [], [4, 3]),))
    with pytest.raises(IntegrityError):
        plan().of("full", "rows")


@given(st.binary(max_size=64))
def test_garbage_is_a_protocol_error(data):
    with pytest.raises(ProtocolError):
        StepPlan.decode(data)


def test_every_truncation_is_a_protocol_error():
    whole = plan().encode()
    for n in range(len(whole)):
        with pytest.raises(ProtocolError):
            StepPlan.decode(whole[:n])


@pytest.mark.parametrize("value", [b"1234567", "text", 5, [1, 2]])
def test_wrong_array_is_a_protocol_error(value):
    raw = msgspec.msgpack.decode(plan().encode())
    raw["ranges"][0]["fresh"] = value
    with pytest.raises(ProtocolError):
        StepPlan.decode(msgspec.msgpack.encode(raw))
    raw = msgspec.msgpack.decode(plan().encode())
    raw["ranges"][1]["trail"] = value
    with pytest.raises(ProtocolError):
        StepPlan.decode(msgspec.msgpack.encode(raw))


def test_appended_fields_are_ignored():
    raw = msgspec.msgpack.decode(plan().encode())
    raw["later"] = 1
    assert StepPlan.decode(msgspec.msgpack.encode(raw)).encode() == plan().encode()


def test_manager_side_needs_no_torch():
    code = "import sys, kvcore.requests.manager, kvcore.requests.stepplan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
