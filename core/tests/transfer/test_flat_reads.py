"""Programs over a wire that copies contiguous bytes only: the suite of transports, conversions, bounds and failures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.contract import ReadJob, Transport, TransportTraits
from kvcore.errors import PeerLostError, TransferError
from kvcore.layout.moves import Program, Selection
from kvcore.testing import TransportSuite
from kvcore.transfer.copier import ThreadCopier
from kvcore.transfer.flat.reads import FlatStats

SRC, DST = [3, 1, 6, 2, 7], [2, 5, 1, 7, 3]
SHORT_GAPS = TransportTraits(executes_programs=False, min_run_bytes=64)
"""Runs from 64 bytes up are read straight, gaps of up to 64 bytes are read over."""


class TestSuiteStaged(TransportSuite):
    """With an ordinary cost, everything but whole units is staged; a wire that needs a few polls for every read."""

    @pytest.fixture
    def new_transport(self, flat: ModuleType) -> Callable[[], Transport]:
        return lambda: flat.FlatTransport(wire=flat.Wire(steps=3))


class TestSuiteThread(TransportSuite):
    """Copies on a thread, in a buffer so small that it takes many batches."""

    @pytest.fixture
    def new_transport(self, flat: ModuleType) -> Callable[[], Transport]:
        return lambda: flat.FlatTransport(staging_bytes=100_000, copier=ThreadCopier())


class TestSuiteDirect(TransportSuite):
    """A wire for which no run is too short."""

    @pytest.fixture
    def new_transport(self, flat: ModuleType) -> Callable[[], Transport]:
        traits = TransportTraits(executes_programs=False)
        return lambda: flat.FlatTransport(staging_bytes=64, traits=traits)


@pytest.fixture
def peers(flat: ModuleType) -> Iterator[Callable[..., Any]]:
    """Peers of two layouts; whatever was made is closed at the end."""
    made: list[Any] = []

    def make(*layouts: Any, **options: Any) -> Any:
        made.append(flat.Peers(*layouts, **options))
        return made[-1]

    yield make
    for item in made:
        item.client.wire.frozen = False
        item.close()


# --- conversions: bytes, and exactly what is read over ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "descriptors", "over"),
    [
        # The source's unit is 3 layers × (k, v) × 4 tokens × 2 heads × 8 bytes = 384, and all of it is wanted.
        ("TP 2→1", 1, 0),
        # 3 × 2 × 4 × 4 × 8 = 768 bytes, of each token's 32 the last 16: from byte 16 to the end, half of it with meaning.
        ("TP 1→2", 1, 768 - 16 - 384),
        ("order", 1, 0),
        # Layer-major: a window for each of 6 buffers, and none across them.
        ("layer-major TP 1→2", 6, 6 * (128 - 16 - 64)),
        ("layer-major order", 6, 0),
        # All of a unit is one run, too long to be staged.
        ("equal", 1, 0),
        # Page-major ↔ layer-major: a run a layer and region of 128 bytes: read straight.
        ("to layer-major", 6, 0),
        ("to page-major", 6, 0),
    ],
)
def test_i8_conversions_and_what_they_read_over(
    flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any, case: str, descriptors: int, over: int
) -> None:
    """I8: heads go by declared ids; 4 heads on pages of 4 in both orders. One unit is read at a time here."""
    half, whole = {"heads": 2, "ids": ((2, 4),)}, {"heads": 4, "ids": ((0, 4),)}
    major = {"arena": "layer_major"}
    src, dst = {
        "TP 2→1": (cases.kv(**half), cases.kv(**whole)),
        "TP 1→2": (cases.kv(**whole), cases.kv(**half)),
        "order": (cases.kv("NHD", **whole), cases.kv("HND", **whole)),
        "layer-major TP 1→2": (cases.kv(**whole, **major), cases.kv(**half)),
        "layer-major order": (cases.kv("HND", **whole, **major), cases.kv("NHD", **whole, **major)),
        "equal": (cases.kv(**whole), cases.kv(**whole)),
        "to layer-major": (cases.kv(**whole), cases.kv(**whole, **major)),
        "to page-major": (cases.kv(**whole, **major), cases.kv(**whole)),
    }[case]
    made = peers(src, dst, traits=SHORT_GAPS)
    staged = "TP" in case or "order" in case
    for s, d in zip(SRC, DST, strict=True):
        flat.finish(made.read([s], [d]))
    made.check(loop, SRC, DST)
    stats, moved = made.client.reader.stats, made.program.bytes_per_unit * 5
    assert stats.descriptors == 5 * descriptors
    assert (stats.read_bytes, stats.read_over_bytes) == (moved + 5 * over, 5 * over)
    assert (stats.batches, stats.staged_bytes) == ((5, stats.read_bytes) if staged else (0, 0))


def test_tp_four_to_two_and_the_other_rank(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Both sources of a rank, token-major: the second leaves what the first wrote."""
    dst = cases.kv("HND", heads=2, ids=((2, 4),))
    first, second = (
        peers(cases.kv("NHD", heads=1, ids=((rank, rank + 1),)), dst, traits=SHORT_GAPS) for rank in (2, 3)
    )
    flat.finish(first.read(SRC, DST))
    second.target[:] = first.target
    flat.finish(second.read(SRC, DST))
    for made in (first, second):
        want = made.expected(loop, SRC, DST)
        at = np.fromiter(want, np.int64, len(want))
        np.testing.assert_array_equal(second.target[at], np.fromiter(want.values(), np.int64, len(want)))
        assert made.client.reader.stats.read_over_bytes == 0
    assert (second.target == 0xFF).sum() == 3 * dst.envelope_bytes, "five of eight units are written"


def test_units_of_several_sizes(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Buffers whose units are not equally far apart keep windows of their own, however near unit 0 of one lies."""
    sides = [
        cases.mxfp8("slot head block", heads=heads, ids=((0, heads),), arena="layer_major", layers=(0, 1))
        for heads in (4, 2)
    ]
    dear = TransportTraits(executes_programs=False, min_run_bytes=100_000)
    made = peers(*sides, traits=dear)
    flat.finish(made.read(SRC, DST))
    made.check(loop, SRC, DST)
    assert made.client.reader.stats.staged_bytes == made.client.reader.stats.read_bytes


def test_neighbouring_units_are_one_read(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Whole windows of neighbouring source units merge, wherever they go."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS)
    flat.finish(made.read([2, 5, 4, 3], [1, 2, 7, 6]))
    made.check(loop, [2, 5, 4, 3], [1, 2, 7, 6])
    assert made.client.reader.stats.descriptors == 1


def test_short_units_are_read_straight(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Equal layer-major units of 32 bytes, too short for the wire: no gap is bridged, so staging would only add a copy."""
    layout = cases.kv(arena="layer_major", k=2, v=2)
    made = peers(layout, layout, traits=SHORT_GAPS)
    flat.finish(made.read([1, 2, 5, 6], [4, 5, 1, 2]))
    made.check(loop, [1, 2, 5, 6], [4, 5, 1, 2])
    assert made.client.reader.stats == FlatStats(descriptors=12, read_bytes=12 * 64), "neighbours are one read"


# --- the bound -------------------------------------------------------------------------------------------------------


def test_staging_is_bounded_and_read_ahead(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Batches of as many units as half of the buffer holds; two of them are under way at once, in halves of their own."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=2 * 1024, wire=flat.Wire(steps=3))
    unit = made.src.envelope_bytes
    assert unit == 384
    flat.finish(made.read(SRC, DST))
    made.check(loop, SRC, DST)
    wire = made.client.wire
    assert [reads.total_bytes for _, reads, _ in wire.log] == [2 * unit, 2 * unit, unit]
    assert [int(reads.dst[0]) for _, reads, _ in wire.log] == [0, 1024, 0]
    assert wire.most_in_flight == 2


def test_a_unit_that_needs_both_halves(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=384, wire=flat.Wire(steps=3))
    flat.finish(made.read(SRC, DST))
    made.check(loop, SRC, DST)
    assert (made.client.reader.stats.batches, made.client.wire.most_in_flight) == (5, 1)


def test_a_unit_that_does_not_fit_is_refused(cases: ModuleType, peers: Any) -> None:
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=383)
    with pytest.raises(TransferError, match="cannot hold one unit") as caught:
        made.read([1], [1])
    assert caught.value.fields | {"group": "full", "expected": 384, "staging_bytes": 383} == caught.value.fields
    assert "768 it reads ahead" in str(caught.value)
    assert (made.client.wire.log, made.client.reader.stats) == ([], FlatStats())


def test_a_large_batch_is_not_overtaken(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """A unit that needs the whole buffer waits for both halves; small ones behind it do not take them away."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=512, wire=flat.Wire(steps=9))
    one_layer = Selection((1,), {(name, "x"): None for name in "kv"})
    places = made.src.place(made.units), made.dst.place(made.units)
    program = Program.build(made.src, places[0], made.dst, places[1], only=one_layer)

    def small(unit: int) -> ReadJob:
        return ReadJob("full", program, np.array([unit]), np.array([unit]))

    handles = [made.connection.read([job]) for job in (small(1), made.job([2], [2]), small(3), small(4))]
    for handle in handles:
        flat.finish(handle)
    assert [reads.total_bytes for _, reads, _ in made.client.wire.log] == [128, 384, 128, 128]
    at = np.fromiter(made.expected(loop, [2], [2]), np.int64)
    np.testing.assert_array_equal(made.target[at], np.fromiter(made.expected(loop, [2], [2]).values(), np.int64))


# --- success, failure, quiet -----------------------------------------------------------------------------------------


def test_success_waits_for_the_copy(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """A slot is not filled again before it was copied out, and success is not reported before the last copy."""
    held = flat.Held()
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024, copier=held)
    handle = made.read(SRC, DST)
    for done in range(5):
        for _ in range(3):
            assert not handle.poll()
        assert len(made.client.wire.log) == min(5, done + 2), "a slot was filled again before it was copied out"
        assert not made.connection.quiesce(0)
        held.run()
    assert handle.poll()
    assert handle.seconds > 0
    assert made.connection.quiesce(0)
    made.check(loop, SRC, DST)


def test_a_failed_batch_is_reported_once_all_are_quiet(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    """The first batch fails while the second is under way: no exception before both are over, none started after."""
    held = flat.Held()
    wire = flat.Wire(fail=lambda number: number == 1)
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024, copier=held, wire=wire)
    handle = made.read(SRC, DST)
    for _ in range(3):
        assert not handle.poll(), "raised or done although a copy is under way"
    held.run()
    for _ in range(2):
        with pytest.raises(TransferError, match="the wire failed"):
            handle.poll()
    assert (len(wire.log), held.tasks) == (2, []), "what failed was copied, or more was read"
    assert made.connection.quiesce(0)
    before = made.target.copy()
    made.client.reader.advance()
    np.testing.assert_array_equal(made.target, before)
    after = made.read([4], [4])
    assert not after.poll()
    held.run()
    assert after.poll(), "a slot was lost with the failure"


def test_a_refusal_by_the_wire(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Nothing was started: the read raises. Something was: the handle does, once that is over."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024)
    made.client.wire.refuse = lambda number: number == 0
    with pytest.raises(TransferError, match="the wire refused"):
        made.read(SRC, DST)
    assert made.connection.quiesce(0)
    made.client.wire.refuse = lambda number: number == 1
    handle = made.read(SRC, DST)
    with pytest.raises(TransferError, match="the wire refused"):
        flat.finish(handle)
    made.client.wire.refuse = lambda number: False
    flat.finish(made.read(SRC, DST))


def test_arenas_smaller_than_the_plan(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    """A peer that serves less than its manifest says, or a plan for a larger pool than is here: refused beforehand."""
    few, many = (peers(cases.kv("NHD"), cases.kv("HND"), units=units, traits=SHORT_GAPS) for units in (8, 9))
    for wrong, side in ((few.client.connect(few.server.endpoint), "source"), (None, "destination")):
        connection = wrong or few.client.connect(many.server.endpoint)
        with pytest.raises(TransferError, match="smaller than the plan") as caught:
            connection.read([many.job([1], [1])])
        assert caught.value.fields["side"] == side
    assert few.client.wire.log == []


def test_straight_reads_do_not_wait_for_a_slot(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    held = flat.Held()
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024, copier=held)
    place = made.src.place(made.units)
    straight = Program.build(made.src, place, made.src, place)
    last = ReadJob("full", straight, np.array([5]), np.array([5]))
    handle = made.connection.read([made.job(SRC[:3], DST[:3]), last])
    assert [staged for _, _, staged in made.client.wire.log] == [False, True, True]
    for _ in range(3):
        while not held.tasks:
            assert not handle.poll()
        held.run()
    assert handle.poll()


@pytest.mark.parametrize("how", ["connection", "transport"])
def test_closed_during_a_read(flat: ModuleType, cases: ModuleType, peers: Any, how: str) -> None:
    """What the wire has begun is waited for; what it has not is never begun, and nothing is copied any more."""
    held, wire = flat.Held(), flat.Wire(frozen=True)
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024, copier=held, wire=wire)
    handle = made.read(SRC, DST)
    assert not handle.poll()
    if how == "connection":
        made.connection.close()
    else:
        assert not made.client.reader.close(0), "quiet although the wire moves bytes"
    assert not handle.poll(), "terminal although the wire moves bytes"
    assert not made.connection.quiesce(0)
    with pytest.raises(TransferError):
        made.read([1], [1])
    wire.frozen = False
    with pytest.raises(TransferError, match="closed"):
        flat.finish(handle)
    assert made.connection.quiesce(0)
    assert made.client.reader.close(0)
    assert (len(wire.log), held.tasks) == (2, [])
    assert (made.target == 0xFF).all()


def test_a_copier_that_is_closed(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    held = flat.Held()
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, copier=held)
    handle = made.read(SRC, DST)
    assert not handle.poll()
    held.close()
    with pytest.raises(TransferError, match="closed before the copy"):
        handle.poll()


def test_the_peer_dies_during_a_read(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024)
    handle = made.read(SRC, DST)
    made.server.close()
    with pytest.raises(PeerLostError):
        flat.finish(handle)
    with pytest.raises(PeerLostError):
        made.read(SRC, DST)


def test_connections_share_one_buffer(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Whoever polls moves the reads of all along, so that a connection nobody polls holds no slot for ever."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), traits=SHORT_GAPS, staging_bytes=1024, wire=flat.Wire(steps=2))
    other = made.client.connect(made.server.endpoint)
    made.read([1, 2, 3], [1, 2, 3])
    flat.finish(other.read([made.job([6, 7], [6, 7])]))
    assert made.client.wire.most_in_flight == 2
    assert made.connection.quiesce(0)
    made.check(loop, [1, 2, 3, 6, 7], [1, 2, 3, 6, 7])
