"""Flat reads into arenas that the CPU cannot address, on a device whose copies end late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.builtin.pools.device_copies import Event, Streams, TorchCopyQueue
from kvcore.builtin.pools.memfd import MemfdArena
from kvcore.contract import Transport, TransportTraits
from kvcore.errors import TransferError
from kvcore.layout.moves import Move, Program
from kvcore.plugins.registry import Registry
from kvcore.testing import TransportSuite
from kvcore.transfer.copier import ThreadCopier
from kvcore.transfer.flat.reads import FlatReader
from kvcore.transfer.flat.staging import StagingPlan

SRC, DST = [3, 1, 6, 2, 7], [2, 5, 1, 7, 3]
TRAITS = TransportTraits(executes_programs=False, min_run_bytes=64)


class TestSuiteDevice(TransportSuite):
    """The suite of transports, from memory into a device."""

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        return device.registry_of(device.FakePool(MemfdArena, lambda nbytes: device.FakeArena(nbytes, strict=False)))

    @pytest.fixture
    def new_transport(self, flat: ModuleType) -> Callable[[], Transport]:
        return lambda: flat.FlatTransport(wire=flat.Wire(steps=3), copier=ThreadCopier())


class TestSuiteBothDevices(TestSuiteDevice):
    """A device at both ends, and a buffer so small that it takes many batches."""

    @pytest.fixture
    def registry(self, device: ModuleType) -> Registry:
        return device.registry_of(device.FakePool(lambda nbytes: device.FakeArena(nbytes, strict=False)))

    @pytest.fixture
    def new_transport(self, flat: ModuleType) -> Callable[[], Transport]:
        return lambda: flat.FlatTransport(staging_bytes=110_000)


@pytest.fixture
def peers(flat: ModuleType, device: ModuleType) -> Iterator[Callable[..., Any]]:
    """Peers of two layouts, the reader's arena on a device; nothing stays pinned or under way."""
    made: list[Any] = []

    def make(*layouts: Any, **options: Any) -> Any:
        made.append(flat.Peers(*layouts, arena=device.FakeArena, **{"traits": TRAITS, **options}))
        return made[-1]

    yield make
    for item in made:
        item.arena.fake.stuck = False
        item.close()
        assert not item.arena.fake.pinned
        item.arena.close()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_pair_of_layouts(
    data: st.DataObject, flat: ModuleType, loop: ModuleType, cases: ModuleType, device: ModuleType
) -> None:
    """Every byte arrives and no other is written, by copies from pinned memory alone; nothing is read straight."""
    src, dst = data.draw(cases.pairs())
    gap = data.draw(st.sampled_from([0, 2, 8, 64, 1024]))
    wire = TransportTraits(executes_programs=False, min_run_bytes=gap)
    number = data.draw(st.integers(0, 5))
    ids = [data.draw(st.lists(st.integers(0, 7), min_size=number, max_size=number, unique=True)) for _ in range(2)]
    size = data.draw(st.sampled_from([1, 2, 5]))
    unit = StagingPlan.build(flat.Peers(src, dst).program, wire, straight=False).staged_bytes
    peers = flat.Peers(src, dst, arena=device.FakeArena, traits=wire, staging_bytes=max(1, size * unit))
    flat.finish(peers.read(*ids))
    peers.check(loop, *ids)
    assert all(staged for _, _, staged in peers.client.wire.log)
    assert peers.arena.fake.slow == 0
    peers.close()
    assert not peers.arena.fake.pinned


class _Now(Event):
    """Reached: torch on the CPU copies at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _Streams(Streams):
    """Of torch on the CPU."""

    def written(self) -> Event:
        return _Now()

    @contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        yield

    def copied(self) -> Event:
        return _Now()

    def pin(self, memory: Any) -> Callable[[], None]:
        return lambda: None

    def upload(self, ids: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(ids))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_copies_of_torch(data: st.DataObject, flat: ModuleType, loop: ModuleType, cases: ModuleType) -> None:
    """The queue of a GPU's arena runs what a read gives it, a few units at a time."""

    class OfTorch(flat.Memory):
        def queue(self) -> TorchCopyQueue:
            return TorchCopyQueue(torch.from_numpy(self.data), _Streams(), bounce_bytes=1 << 13)

    src, dst = data.draw(cases.pairs())
    wire = TransportTraits(executes_programs=False, min_run_bytes=data.draw(st.sampled_from([0, 8, 64, 1024])))
    ids = [data.draw(st.lists(st.integers(0, 7), min_size=4, max_size=4, unique=True)) for _ in range(2)]
    made = flat.Peers(src, dst, arena=lambda nbytes: OfTorch(np.zeros(nbytes, np.uint8)), traits=wire)
    flat.finish(made.read(*ids))
    made.check(loop, *ids)
    assert all(staged for _, _, staged in made.client.wire.log)
    made.close()


@pytest.mark.parametrize(("arena", "descriptors"), [("page_major", 1), ("layer_major", 6)])
def test_neighbours_at_the_source_are_one_read(
    flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any, arena: str, descriptors: int
) -> None:
    """Seven units scattered over the device: a descriptor a buffer, and one copy."""
    layout = cases.kv(arena=arena)
    made = peers(layout, layout)
    src, dst = [7, 6, 5, 1, 2, 3, 4], [5, 2, 7, 1, 3, 6, 4]
    flat.finish(made.read(src, dst))
    made.check(loop, src, dst)
    stats = made.client.reader.stats
    assert (stats.descriptors, stats.read_over_bytes, stats.batches) == (descriptors, 0, 1)
    assert made.arena.fake.issued == ["apply"]


def test_success_waits_for_the_device(flat: ModuleType, loop: ModuleType, cases: ModuleType, peers: Any) -> None:
    """A copy that does not end holds its slot: nothing is done, quiet, read there again, or given back."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), staging_bytes=1024)
    made.arena.fake.stuck = True
    handle = made.read(SRC, DST)
    for _ in range(20):
        assert not handle.poll()
    assert len(made.client.wire.log) == 2, "a slot was filled again under a copy"
    assert not made.connection.quiesce(0)
    assert not made.client.reader.close(0)
    assert made.arena.fake.pinned, "unpinned under a copy"
    made.arena.fake.stuck = False
    with pytest.raises(TransferError, match="closed during a read"):
        flat.finish(handle)
    assert made.client.reader.close(0)
    assert not made.arena.fake.pinned


def test_a_device_that_fails(flat: ModuleType, cases: ModuleType, peers: Any) -> None:
    """Reported once its copies are over; the reader goes on."""
    made = peers(cases.kv("NHD"), cases.kv("HND"), staging_bytes=1024)
    made.arena.fake.fail = "an illegal address"
    handle = made.read(SRC, DST)
    with pytest.raises(TransferError, match="read failed") as caught:
        flat.finish(handle)
    assert "an illegal address" in str(caught.value)
    assert not made.arena.fake.pending
    assert made.connection.quiesce(0)
    made.arena.fake.fail = ""
    flat.finish(made.read(SRC, DST))


def test_a_unit_that_does_not_fit_is_refused(cases: ModuleType, peers: Any) -> None:
    """Equal layouts too: nothing can be read straight into a device."""
    layout = cases.kv()
    made = peers(layout, layout, staging_bytes=383)
    with pytest.raises(TransferError, match="cannot hold one unit"):
        made.read([1], [1])


def test_groups_of_a_device_share_pinned_memory(device: ModuleType) -> None:
    """One buffer a device, as large as the staging buffer; a pool that cannot be pinned leaves nothing pinned."""
    arenas = [device.FakeArena(64) for _ in range(3)]
    arenas[2].device = "other:0"
    staging = np.zeros(1000, np.uint8)
    reader = FlatReader(TRAITS, dict(zip("abc", arenas, strict=True)), staging)
    assert [list(arena.fake.pinned.values()) for arena in arenas] == [[1000], [], [1000]]
    assert reader.close(0)
    assert reader.close(0)
    assert not any(arena.fake.pinned for arena in arenas)

    def refuse(memory: Any) -> Any:
        raise TransferError("no more memory to pin")

    arenas[2].fake.pin = refuse
    with pytest.raises(TransferError, match="no more memory"):
        FlatReader(TRAITS, dict(zip("abc", arenas, strict=True)), staging)
    assert not any(arena.fake.pinned for arena in arenas)


def test_moves_of_a_device_go_forwards() -> None:
    """Descending heads become moves of their own: a copy queue takes no negative stride."""
    backwards = Move(("a",), 124, 128, 0, 999, ((2, 4, 100), (4, -32, 8)), 4)
    program = Program((backwards,), ("a",), {"a": 32}, False, 9, 9, 9 * 128 + 4, 9 * 999)
    plan = StagingPlan.build(program, TransportTraits(executes_programs=False, min_run_bytes=32), straight=False)
    made = plan.rows.program(3)
    assert (made.src_units, made.src_bytes) == (3, 3 * plan.rows.nbytes)
    assert sum(move.nbytes for move in made.moves) == backwards.nbytes
    assert all(src > 0 and dst > 0 for move in made.moves for _, src, dst in move.dims)
