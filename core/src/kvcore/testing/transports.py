"""The suite for transports: two of them in one process, one serving poisoned memory, one pulling into it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from kvcore.contract import PeerConnection, ReadHandle, ReadJob, Transport
from kvcore.errors import KVCoreError, TransferError
from kvcore.layout import ArenaOrder, Layout
from kvcore.layout.moves import Program
from kvcore.plugins import load_plugins
from kvcore.plugins.dispatch import choose_builder
from kvcore.plugins.registry import Registry
from kvcore.spec import Shard
from kvcore.testing.harness import TIMEOUT_S, skip_unsupported
from kvcore.testing.memory import POISON, Bytes, Map, pattern
from kvcore.testing.sample import GROUPS, ThreeComponents

DEVICE = "cpu"
GROUP = GROUPS["indexed"]
UNITS = 24


def _layout(*, arena: ArenaOrder = "page_major", shard: Shard | None = None, page_size: int = 16) -> Layout:
    return ThreeComponents().layout(GROUP, page_size=page_size, shard=shard or Shard(), arena=arena)


PAIRS: dict[str, tuple[Layout, Layout]] = {
    "equal": (_layout(), _layout()),
    "other arena order": (_layout(), _layout(arena="layer_major")),
    "heads of a rank": (_layout(), _layout(shard=Shard(1, 2))),
}
"""Source and destination of the reads: whole units, and two kinds of strided moves."""


class Peers:
    """A serving and a pulling transport, their arenas, and the connection between them."""

    def __init__(
        self,
        new_transport: Callable[[], Transport],
        registry: Registry,
        source: Layout,
        target: Layout,
        units: int = UNITS,
    ) -> None:
        counts = {"pages": units}
        self.source_map, self.target_map = Map(source, counts), Map(target, counts)
        self.program = Program.build(source, source.place(counts), target, target.place(counts))
        self._open: list[Callable[[], None]] = []
        self.server, self.client = new_transport(), new_transport()
        self._open += [self.client.close, self.server.close]
        try:
            builders = registry.pool_builders()
            self.source = choose_builder(builders, DEVICE, source).allocate(self.source_map.arena_bytes, DEVICE)
            self._open.append(self.source.close)
            self.target = choose_builder(builders, DEVICE, target).allocate(self.target_map.arena_bytes, DEVICE)
            self._open.append(self.target.close)
            self.source.array()[:] = pattern(self.source.nbytes, 1)
            self.target.array()[:] = POISON
            self.endpoint = self.server.register({GROUP.prefix: self.source})
            self.client.register({GROUP.prefix: self.target})
            self.connection: PeerConnection = self.client.connect(self.endpoint)
            self._open.insert(0, self.connection.close)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connection, both transports and both arenas."""
        while self._open:
            self._open.pop(0)()

    def job(self, src: Sequence[int], dst: Sequence[int]) -> ReadJob:
        """Units to pull."""
        return ReadJob(GROUP.prefix, self.program, np.array(src, np.int64), np.array(dst, np.int64))

    def expected(self, src: Sequence[int], dst: Sequence[int]) -> Bytes:
        """The destination after a read: element by element, by the kit's own addresses. Padding is left poisoned."""
        arena = np.full(self.target.nbytes, POISON, np.uint8)
        source = self.source.array()
        for layer in self.target_map.layout.layers:
            for region in self.target_map.layout.regions:
                for field in region.data_fields:
                    other = self.source_map.layout.region(region.name).field(field.name)
                    for s, d in zip(src, dst, strict=True):
                        values = source[self.source_map.element(layer, region.name, other, s, None)]
                        ids = field.axis("head").ids
                        if ids and ids != other.axis("head").ids:
                            values = np.take(
                                values, np.arange(*ids[0]), axis=[a.name for a in field.axes].index("head")
                            )
                        arena[self.target_map.element(layer, region.name, field, d, None)] = values
        return arena

    def data(self, arena: Bytes) -> Bytes:
        """The arena with every byte that carries no data set to 0: padding may or may not be moved."""
        out = np.zeros_like(arena)
        for layer in self.target_map.layout.layers:
            for region in self.target_map.layout.regions:
                for field in region.data_fields:
                    for unit in self.target_map.ids[region.name]:
                        where = self.target_map.element(layer, region.name, field, unit, None)
                        out[where] = arena[where]
        return out


def finish(handle: ReadHandle) -> None:
    """Poll until the read is over."""
    end = time.monotonic() + TIMEOUT_S
    while not handle.poll():
        assert time.monotonic() < end, f"no end of a read within {TIMEOUT_S} s"
        time.sleep(0.0005)


class TransportSuite:
    """What a transport promises. Override the fixture ``new_transport``: a callable that makes an unregistered one."""

    @pytest.fixture
    def registry(self) -> Registry:
        """Where pools come from."""
        return load_plugins(())

    @pytest.fixture
    def checked(self, new_transport: Callable[[], Transport]) -> Callable[[], Transport]:
        """The same callable, if the transport serves memory of the CPU."""
        probe = new_transport()
        try:
            skip_unsupported(probe.supports(DEVICE, PAIRS["equal"][0]), f"arenas on {DEVICE}")
        finally:
            probe.close()
        return new_transport

    @pytest.fixture
    def peers(self, checked: Callable[[], Transport], registry: Registry) -> Iterator[Peers]:
        """Two peers of equal layout."""
        made = Peers(checked, registry, *PAIRS["equal"])
        yield made
        made.close()

    @pytest.mark.parametrize("pair", PAIRS)
    def test_reads_are_exact(self, checked: Callable[[], Transport], registry: Registry, pair: str) -> None:
        """Scattered units arrive in the units asked for; no other byte of the destination or the source changes."""
        peers = Peers(checked, registry, *PAIRS[pair])
        try:
            src, dst = [3, 17, 4, 9, 10], [8, 2, 3, 21, 20]
            before = peers.source.array().copy()
            want = peers.expected(src, dst)
            finish(peers.connection.read([peers.job(src, dst)]))
            np.testing.assert_array_equal(peers.data(peers.target.array()), peers.data(want))
            np.testing.assert_array_equal(peers.source.array(), before, "a read changed the owner's memory")
            untouched = np.ones(peers.target.nbytes, bool)
            for layer, region in peers.target_map.starts:
                for unit in dst:
                    untouched[peers.target_map.unit(layer, region, unit)] = False
            assert (peers.target.array()[untouched] == POISON).all(), "bytes outside of the units were written"
        finally:
            peers.close()

    def test_many_reads_at_once(self, peers: Peers) -> None:
        """Reads started together all end, each with its own units, in several jobs."""
        pairs = [([n], [n + 12]) for n in range(1, 11)]
        want = np.full(peers.target.nbytes, POISON, np.uint8)
        for src, dst in pairs:
            moved = peers.expected(src, dst)
            for layer, region in peers.target_map.starts:
                span = peers.target_map.unit(layer, region, dst[0])
                want[span] = moved[span]
        jobs = [peers.job(*pair) for pair in pairs]
        handles = [peers.connection.read(jobs[n : n + 2]) for n in range(0, len(jobs), 2)]
        for handle in handles:
            finish(handle)
        np.testing.assert_array_equal(peers.data(peers.target.array()), peers.data(want))

    def test_nothing_to_read(self, peers: Peers) -> None:
        """No job, a job without units, and a job of dropped units (−1) end well and write nothing."""
        for jobs in ([], [peers.job([], [])], [peers.job([-1, 3], [4, -1])]):
            finish(peers.connection.read(jobs))
        assert peers.connection.quiesce(TIMEOUT_S)
        assert (peers.target.array() == POISON).all()

    @pytest.mark.parametrize(
        ("src", "dst"), [([UNITS], [1]), ([1], [UNITS]), ([-2], [1]), ([1], [-2]), ([1], [2**40]), ([1, 2], [1])]
    )
    def test_wrong_units_are_refused(self, peers: Peers, src: list[int], dst: list[int]) -> None:
        """An id outside of an arena is refused before any byte moves, also of the jobs before it."""
        with pytest.raises(TransferError):
            peers.connection.read([peers.job([1, 2], [3, 4]), peers.job(src, dst)])
        assert peers.connection.quiesce(TIMEOUT_S)
        assert (peers.target.array() == POISON).all(), "bytes moved although the read was refused"
        finish(peers.connection.read([peers.job([1], [1])]))

    def test_unknown_groups_are_refused(self, peers: Peers) -> None:
        """A group that was not registered cannot be read."""
        good = peers.job([1], [1])
        with pytest.raises(TransferError):
            peers.connection.read([good, ReadJob("nowhere", good.program, good.src_units, good.dst_units)])
        assert peers.connection.quiesce(TIMEOUT_S)
        assert (peers.target.array() == POISON).all()

    def test_success_means_landed(self, checked: Callable[[], Transport], registry: Registry) -> None:
        """When ``poll`` is first True every byte is there, and what the owner does afterwards changes none of them."""
        layout = _layout(page_size=256)
        peers = Peers(checked, registry, layout, layout, units=128)
        try:
            src, dst = list(range(1, 128)), list(range(127, 0, -1))
            want = {d: peers.source_map.units(peers.source.array(), s) for s, d in zip(src, dst, strict=True)}
            handle = peers.connection.read([peers.job(src, dst)])
            finish(handle)
            landed = {d: peers.target_map.units(peers.target.array(), d) for d in dst}
            peers.source.array()[:] = POISON
            for unit in dst:
                np.testing.assert_array_equal(landed[unit], want[unit], f"success before unit {unit} had arrived")
            assert handle.poll(), "success was taken back"
            assert peers.connection.quiesce(TIMEOUT_S)
            time.sleep(0.05)
            for unit in dst:
                np.testing.assert_array_equal(
                    peers.target_map.units(peers.target.array(), unit), want[unit], "bytes moved after success"
                )
        finally:
            peers.close()

    def test_quiet_means_over(self, peers: Peers) -> None:
        """After ``quiesce`` every read is terminal, and nothing moves that was not asked for again."""
        src, dst = list(range(1, UNITS)), list(range(1, UNITS))
        handles = [peers.connection.read([peers.job(src, dst)]) for _ in range(4)]
        assert peers.connection.quiesce(TIMEOUT_S)
        peers.target.array()[:] = POISON
        for handle in handles:
            assert handle.poll(), "a read is under way although the connection is quiet"
        time.sleep(0.05)
        assert (peers.target.array() == POISON).all(), "bytes moved on a quiet connection"

    def test_not_an_endpoint(self, peers: Peers) -> None:
        """A record that is no endpoint is an error of the library, not a crash."""
        for record in (b"", b"\x00", b"not an endpoint", peers.endpoint[: len(peers.endpoint) // 2]):
            with pytest.raises(TransferError):
                peers.client.connect(record)

    def test_the_peer_is_gone(self, peers: Peers) -> None:
        """Once the owner has closed, ``alive`` turns False, and no new read or connection is started."""
        assert peers.connection.alive()
        peers.server.close()
        end = time.monotonic() + TIMEOUT_S
        while peers.connection.alive():
            assert time.monotonic() < end, "the connection still claims that its peer lives"
            time.sleep(0.005)
        with pytest.raises(TransferError):
            finish(peers.connection.read([peers.job([1], [1])]))
        with pytest.raises(TransferError):
            peers.client.connect(peers.endpoint)

    def test_closed_connections_read_nothing(self, peers: Peers) -> None:
        """``close`` may be called twice; a read afterwards is refused."""
        peers.connection.close()
        peers.connection.close()
        assert not peers.connection.alive()
        with pytest.raises(TransferError):
            peers.connection.read([peers.job([1], [1])])
        assert (peers.target.array() == POISON).all()

    def test_leaves_nothing_behind(self, checked: Callable[[], Transport], registry: Registry) -> None:
        """After ``close`` there are as many descriptors and threads as before, also after a failed connect."""

        def once() -> None:
            peers = Peers(checked, registry, *PAIRS["equal"])
            try:
                finish(peers.connection.read([peers.job([1, 2], [3, 4])]))
                with pytest.raises(KVCoreError):
                    peers.client.connect(b"not an endpoint")
            finally:
                peers.close()
            peers.client.close()
            peers.server.close()

        once()  # what a process opens once and keeps does not count
        before = _footprint()
        for _ in range(3):
            once()
        assert _footprint() == before


def _footprint() -> tuple[int, int]:
    gc.collect()
    descriptors = len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))
    return descriptors, threading.active_count()
