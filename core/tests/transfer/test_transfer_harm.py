"""A peer that misbehaves ends its own requests or its own conversation, and nobody else's."""

from __future__ import annotations

import tracemalloc
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import HandshakeError, ProtocolError
from kvcore.layout import Axis, Field
from kvcore.layout.moves import Selection
from kvcore.layout.moves.matching import common_ids
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone, SendFailed
from kvcore.transfer.session.checksums import SenderChecksums, pack_sources
from kvcore.transfer.session.plan import PeerPlan, plan_peer

R1, R2 = b"r1", b"r2"
# logical bytes of a unit in the kit's layout: 2 layers, k and v, 4 slots, 2 heads, 8 dims, fp32; and one byte of scale
KV, SCALE = 2 * 2 * 4 * 2 * 8 * 4, 2 * 4 * 2


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def table(*ids: int) -> dict[tuple[str, str], Any]:
    return {("full", "pages"): np.array(ids, np.int64)}


def others_are_served(kit: ModuleType, net: Any) -> None:
    net.sender.events()
    net.receivers[R2].ask("other", table(9), 0, 3)
    net.sender.begin("other", 3)
    for component in kit.COMPONENTS:
        net.sender_memory[component, 20] = ("other", component, 20)
    net.sender.offer("other", 0, 3, [kit.payload([20], 0)], last=True)
    net.settle()
    assert isinstance(net.receivers[R2].events()[-1], ReceiveDone)
    assert [type(event) for event in net.sender.events()] == [SendDone]


@pytest.mark.parametrize(
    ("components", "layers", "nbytes"),
    [
        (None, [], {"full/kv": 2**56 - 1, "full/scale": SCALE}),
        (None, [], {"full/kv": 2 * KV + 1, "full/scale": 2 * SCALE}),
        (None, [0], {"full/kv": KV + 1}),
        (["full/kv"], [], {"full/kv": 2 * KV, "full/scale": 1}),
    ],
)
def test_a_report_of_more_than_was_offered_fails_its_request(
    kit: ModuleType, net: Any, components: list[str] | None, layers: list[int], nbytes: dict[str, int]
) -> None:
    """Two units are offered (of one layer, of one component): no report may count more than lies in them."""
    attempt = net.receivers[R1].ask("x", table(3, 4), 0, 8)
    net.sender.begin("x", 8)
    units = kit.payload([11, 12], 0, components) if components else kit.payload([11, 12], 0)
    net.sender.offer("x", 0, 4, [units.of_layers(layers)])
    net.settle(reads=False)
    report = control.Pulled(src="r1", dst="sender-1", request="x", attempt=attempt, seq=0, nbytes=nbytes)
    net.sender.handle(R1, report)
    (failed,) = net.sender.events()
    assert isinstance(failed, SendFailed)
    assert isinstance(failed.error, ProtocolError)
    assert failed.error.fields["request"] == "x"
    net.settle()
    assert isinstance(net.receivers[R1].events()[-1], ReceiveFailed)
    others_are_served(kit, net)


def test_who_reads_nothing_reports_no_bytes(kit: ModuleType, net: Any) -> None:
    attempt = net.receivers[R1].ask("x", table(), 3, 3)
    net.settle()
    net.sender.begin("x", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    at = {"src": "r1", "dst": "sender-1", "request": "x", "attempt": attempt}
    net.sender.handle(R1, control.Pulled(**at, seq=0, nbytes={"full/kv": 1}))
    (failed,) = net.sender.events()
    assert isinstance(failed.error, ProtocolError)


def test_a_commit_counts_no_more_early_bytes_than_bytes(kit: ModuleType, net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.settle()
    net.sender._requests.get("x").readers[R1].early = 2**61
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle()
    assert not any(isinstance(event, ReceiveDone) for event in receiver.events())
    assert [type(event.error) for event in net.sender.events()] == [ProtocolError]


# --- ids and extents of a peer ---


def _axes(kit: ModuleType, ids: Any, **options: Any) -> Any:
    return kit.layout(heads=sum(hi - lo for lo, hi in ids), ids=ids, **options)


def test_ids_of_a_peer_allocate_nothing(kit: ModuleType) -> None:
    """Ids by the billion, on either side, whole and in pieces: what is common is found without writing them out."""
    mine = kit.manifest("receiver", "r", _axes(kit, ((2, 4), (7, 9))))
    for ids in (((0, 2**33),), ((8, 2**33), (0, 8)), ((5, 2**33), (4, 5), (3, 4), (0, 3))):
        theirs = kit.manifest("sender", "s", _axes(kit, ids))
        tracemalloc.start()
        plan = plan_peer(mine, theirs)
        PeerPlan(
            msgspec.structs.replace(theirs, role="receiver"), msgspec.structs.replace(mine, role="sender"), plan.sources
        )
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 20 << 20
        (program,) = plan.split(*kit.KEY, ("full/kv",))[1]
        assert program.unit_bytes["full/kv"] == 2 * KV
    with pytest.raises(HandshakeError, match="head ids"):
        plan_peer(mine, kit.manifest("sender", "s", _axes(kit, ((9, 2**33), (0, 8)))))


def test_a_whole_axis_of_a_peer_may_be_longer_than_memory(kit: ModuleType) -> None:
    mine = kit.manifest("receiver", "r", _axes(kit, ((2, 4),)))
    plan = plan_peer(mine, kit.manifest("sender", "s", kit.layout(heads=2**33)))
    assert plan.split(*kit.KEY, ("full/kv",))[1][0].unit_bytes["full/kv"] == KV


@pytest.mark.parametrize(
    "change", [{"ids": ((0, 2**33),)}, {"layers": tuple(range(5000)), "dim": 8, "ids": ((0, 1 << 16),)}]
)
def test_checksums_of_a_unit_longer_than_memory_are_refused(kit: ModuleType, change: dict[str, Any]) -> None:
    """The canonical form has every id that the receiver says it holds: refused before anything of that size is made."""
    mine = kit.manifest("sender", "s", _axes(kit, ((2, 4),)), checksum="crc32")
    theirs = kit.manifest("receiver", "r", _axes(kit, **change), checksum="crc32")
    checks = SenderChecksums(mine, {"full": np.zeros(mine.placement("full").arena_bytes, np.uint8)})
    sources = {"full": (Selection((0, 1), {("k", "x"): ("head", np.array([2, 3]))}),)}
    checks_taken = control.Taken(src="r", dst="s", groups=pack_sources(sources))
    with pytest.raises(HandshakeError) as found:
        checks.expect(b"r", theirs, checks_taken)
    assert found.value.fields["field"] == "taken"


@given(
    st.lists(st.integers(0, 24), unique=True, min_size=2, max_size=10),
    st.lists(st.integers(0, 24), unique=True, min_size=2, max_size=10),
    st.randoms(),
)
def test_common_ids_are_those_of_both(left: list[int], right: list[int], random: Any) -> None:
    """Against sets of written-out ids, ranges in any local order."""

    def field(cuts: list[int]) -> Field:
        ends = sorted(cuts)[: len(cuts) // 2 * 2]
        ids = list(zip(ends[::2], ends[1::2], strict=True))
        random.shuffle(ids)
        return Field("x", "u8", "head", (Axis("head", sum(b - a for a, b in ids), ids=tuple(ids)),))

    a, b = field(left), field(right)
    common, at_a, at_b = common_ids(a, b, "head")
    ids_a, ids_b = ([i for lo, hi in f.axes[0].ids for i in range(lo, hi)] for f in (a, b))
    assert common.tolist() == sorted(set(ids_a) & set(ids_b))
    assert [ids_a[i] for i in at_a] == common.tolist() == [ids_b[i] for i in at_b]


# --- units of a report ---


@pytest.mark.parametrize(
    ("units", "good"),
    [
        ([(["full/kv", "full/scale"], [11, 12], [])], True),
        ([(["full/kv"], [12], []), (["full/scale"], [11], [])], True),
        ([], True),
        ([(["full/kv"], [13], [])], False),
        ([(["full/kv"], [11, 11], [])], False),
        ([(["full/kv"], [11], []), (["full/kv"], [11], [])], False),
        ([(["full/kv"], [11], [0])], False),
        ([(["full/other"], [11], [])], False),
        ([(["full/kv", "full/kv"], [11], [])], False),
    ],
)
def test_only_units_of_the_offers_are_answered_for(
    kit: ModuleType, net: Any, monkeypatch: pytest.MonkeyPatch, units: Any, good: bool
) -> None:
    """A receiver learns the checksum of what it was offered, once, and of nothing else that lies in the arena."""
    asked: list[Any] = []

    class Sums:
        def of(self, peer: bytes, units: Any) -> dict[str, int]:
            asked.append(units)
            return {}

    net.receivers[R1].ask("x", table(3, 4), 0, 8)
    net.sender.begin("x", 8)
    net.sender.offer("x", 0, 8, [kit.payload([11, 12], 0)], last=True)
    net.settle(reads=False)
    monkeypatch.setattr(net.sender, "checksums", Sums())
    at = {"src": "r1", "dst": "sender-1", "request": "x", "attempt": 1}
    nbytes = {"full/kv": 2 * KV, "full/scale": 2 * SCALE}
    net.sender.handle(R1, control.Pulled(**at, seq=0, nbytes=nbytes))
    named = tuple(kit.payload(ids, 0, components).of_layers(layers) for components, ids, layers in units)
    net.sender.handle(R1, control.PulledAll(**at, nbytes=nbytes, units=named))
    assert bool(asked) is good
    failed = [event.error for event in net.sender.events()]
    assert [type(error) for error in failed] == ([] if good else [ProtocolError])
