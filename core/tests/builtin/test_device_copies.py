"""Copies in torch, on the CPU with streams that keep a diary: bytes against loops, and the order of waits."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore.builtin.pools.cuda import CudaPool
from kvcore.builtin.pools.device_copies import Event, EventFence, Streams, TorchCopyQueue
from kvcore.contract import DONE, Piece
from kvcore.errors import ConfigError, StaleHandleError, TransferError, UnsupportedError
from kvcore.layout.moves import Program
from kvcore.plugins import load_plugins
from kvcore.plugins.dispatch import choose_builder
from kvcore.spec import Shard
from kvcore.testing.sample import GROUPS, ThreeComponents
from kvcore.transfer.shm.windows import windows_of


class Point(Event):
    """Reached when a test says so."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name, self.diary = name, diary
        self.reached = False
        self.error = ""

    def query(self) -> bool:
        if self.error:
            raise RuntimeError(self.error)
        return self.reached

    def synchronize(self) -> None:
        self.query()
        self.reached = True


class Diary(Streams):
    """Notes what is issued, and in which stream."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0
        self.capturing = False
        self.inside = False

    def _point(self, name: str) -> Point:
        self.count += 1
        self.lines.append(f"record {name}{self.count}")
        return Point(f"{name}{self.count}", self.lines)

    def written(self) -> Event | None:
        return None if self.capturing else self._point("written")

    @contextmanager
    def copying(self, after: Any) -> Iterator[None]:
        assert not self.inside, "two copies are issued at once"
        self.inside = True
        self.lines.append("wait " + (" ".join(event.name for event in after) or "for nothing"))
        yield
        self.inside = False

    def copied(self) -> Event:
        assert self.inside
        return self._point("copied")

    def pin(self, memory: Any) -> Callable[[], None]:
        self.lines.append("pin")
        return lambda: self.lines.append("unpin")

    def upload(self, ids: Any) -> torch.Tensor:
        assert self.inside
        return torch.from_numpy(np.array(ids))


def rand(nbytes: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 255, nbytes, dtype=np.uint8)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_gather_and_scatter(data: st.DataObject) -> None:
    """Any pieces, any chunks: every byte where the contract says, no other byte of the arena changed."""
    pieces, base = [], 0
    units = data.draw(st.integers(1, 9))
    for _ in range(data.draw(st.integers(1, 3))):
        nbytes = data.draw(st.sampled_from([1, 3, 4, 8, 16, 40]))
        stride = nbytes + data.draw(st.sampled_from([0, 1, 8]))
        base += data.draw(st.sampled_from([0, 2, 8]))
        pieces.append(Piece(base, stride, nbytes, units))
        base += stride * units
    ids = np.array(data.draw(st.lists(st.integers(0, units - 1), min_size=1, max_size=units, unique=True)), np.int64)
    arena = rand(base + 3)
    where = [p.base + int(u) * p.unit_stride + byte for u in ids for p in pieces for byte in range(p.nbytes)]
    queue = TorchCopyQueue(
        torch.from_numpy(arena.copy()), Diary(), bounce_bytes=data.draw(st.sampled_from([1, 64, 4096]))
    )
    out = np.full(len(where), 0xFF, np.uint8)
    queue.gather(pieces, ids, out).wait()
    np.testing.assert_array_equal(out, arena[where])
    new = rand(len(where), 1)
    queue.scatter(pieces, ids, new).wait()
    arena[where] = new
    np.testing.assert_array_equal(queue._arena.numpy(), arena)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_programs_run_on_the_device(data: st.DataObject, loop: ModuleType, cases: ModuleType) -> None:
    """Every byte of the destination as the loop over elements says, from staged units, in chunks of any size."""
    src, dst = data.draw(cases.pairs())
    a, b = src.place({"pages": 6}), dst.place({"pages": 7})
    windows = windows_of(Program.build(src, a, dst, b))
    size = data.draw(st.integers(1, 3))
    s = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size, unique=True))
    d = data.draw(st.lists(st.integers(0, 6), min_size=size, max_size=size, unique=True))
    source = rand(a.arena_bytes)
    if not windows.pieces:
        return
    where = [p.base + u * p.unit_stride + byte for u in s for p in windows.pieces for byte in range(p.nbytes)]
    arena = torch.full((b.arena_bytes,), 0xFF, dtype=torch.uint8)
    queue = TorchCopyQueue(arena, Diary(), bounce_bytes=data.draw(st.sampled_from([1, 4096])))
    queue.apply(windows.program(size), source[where], np.array(d)).wait()
    want = loop.convert(src, {"pages": 6}, dst, {"pages": 7}, list(zip(s, d, strict=True)), dst.components)
    got = arena.numpy()
    for to, at in want.items():
        assert got[to] == source[at]
    inside = {p for unit in d for p in _bytes_of(loop, dst, unit)}
    assert set(np.flatnonzero(got != 0xFF).tolist()) <= inside


def _bytes_of(loop: ModuleType, layout: Any, unit: int) -> set[int]:
    at, _ = loop.unit_addresses(layout, {"pages": 7})
    sizes = {region.name: region.unit_bytes for region in layout.regions}
    return {start + n for (_, name, u), start in at.items() if u == unit for n in range(sizes[name])}


def queue_of(diary: Diary) -> TorchCopyQueue:
    return TorchCopyQueue(torch.zeros(64, dtype=torch.uint8), diary)


ROWS = (Piece(0, 8, 8, 8),)


def test_copies_wait_on_the_device_for_the_last_mark() -> None:
    diary = Diary()
    queue = queue_of(diary)
    out = np.zeros(8, np.uint8)
    queue.gather(ROWS, np.array([1]), out)
    first = queue.mark()
    queue.gather(ROWS, np.array([1]), out)
    queue.mark()
    queue.scatter(ROWS, np.array([1]), out)
    assert diary.lines == [
        "wait for nothing", "record copied1", "record written2", "wait written2", "record copied3",
        "record written4", "wait written4", "record copied5",
    ]  # fmt: skip
    assert not first.done()


def test_a_mark_of_one_thread_does_not_replace_anothers() -> None:
    """Streams are current in a thread: two threads may be in two streams, and a copy comes after both."""
    diary = Diary()
    queue = queue_of(diary)
    other = threading.Thread(target=queue.mark)
    other.start()
    other.join()
    queue.mark()
    queue.mark()
    queue.gather(ROWS, np.array([1]), np.zeros(8, np.uint8))
    assert diary.lines[-2] == "wait written1 written3"


def test_a_captured_step_marks_nothing() -> None:
    """An event recorded into a graph cannot be waited for; the mark before it still holds."""
    diary = Diary()
    queue = queue_of(diary)
    queue.mark()
    diary.capturing = True
    assert queue.mark() is DONE
    queue.gather(ROWS, np.array([1]), np.zeros(8, np.uint8))
    assert diary.lines[1] == "wait written1"


def test_fences_end_once_and_keep_memory_until_then() -> None:
    point = Point("x", [])
    fence = EventFence(point, object())
    assert not fence.done()
    assert fence._keep
    point.reached = True
    assert fence.done()
    assert not fence._keep
    fence.wait()
    failed = Point("y", [])
    failed.error = "an illegal memory access was encountered"
    fence = EventFence(failed, object())
    assert fence.done(), "a device that failed does nothing more"
    with pytest.raises(TransferError, match="device failed") as caught:
        fence.wait()
    assert "illegal" in caught.value.fields["cause"]
    waited = EventFence(failed)
    with pytest.raises(TransferError):
        waited.wait()
    assert waited.done()


@pytest.mark.parametrize("error", ["", "lost"])
def test_closing_waits_for_the_last_copy_even_a_failed_one(error: str) -> None:
    """And lets the arena go: whoever still holds the queue does not hold the memory."""
    arena = torch.zeros(64, dtype=torch.uint8)
    memory = weakref.ref(arena)
    queue = TorchCopyQueue(arena, Diary())
    fence: Any = queue.gather(ROWS, np.array([1]), np.zeros(8, np.uint8))
    fence._event.error = error
    assert not fence._over
    queue.close()
    assert fence.done()
    del arena
    gc.collect()
    assert memory() is None
    with pytest.raises(StaleHandleError):
        queue.gather(ROWS, np.array([1]), np.zeros(8, np.uint8))
    queue.close()


def test_no_units_are_no_work() -> None:
    diary = Diary()
    assert queue_of(diary).gather(ROWS, np.zeros(0, np.int64), np.zeros(0, np.uint8)) is DONE
    assert diary.lines == []


def test_copies_work_in_inference_mode() -> None:
    queue = queue_of(Diary())
    with torch.inference_mode():
        queue.scatter(ROWS, np.array([2]), np.full(8, 7, np.uint8)).wait()
    assert queue._arena[16:24].eq(7).all()


# --- what the CPU can say of CUDA pools ---


@pytest.mark.parametrize("device", ["cpu", "cuda:x", "cuda:01", "cuda:", "CUDA", "cuda:0 "])
def test_other_devices_are_refused(device: str) -> None:
    layout = ThreeComponents().layout(GROUPS["indexed"], page_size=16, shard=Shard(), arena="page_major")
    assert device in CudaPool().supports(device, layout).reason
    with pytest.raises(ConfigError):
        CudaPool().allocate(64, device)


def test_a_machine_without_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """At configuration, with the reason of every builder."""
    layout = ThreeComponents().layout(GROUPS["indexed"], page_size=16, shard=Shard(), arena="page_major")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    builders = load_plugins(()).pool_builders()
    with pytest.raises(UnsupportedError, match="no pool builder") as caught:
        choose_builder(builders, "cuda:0", layout)
    assert any("torch_cuda" in text and "sees no CUDA device" in text for text in caught.value.fields["refused"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert CudaPool().supports("cuda:1", layout)
    assert "2 CUDA devices" in CudaPool().supports("cuda:2", layout).reason
    assert choose_builder(builders, "cuda", layout).name == "torch_cuda"
    assert choose_builder(builders, "cpu", layout).name == "memfd"
