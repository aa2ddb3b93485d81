"""CUDA pools with a stand-in for the driver: which calls are made, in which stream and order. Not what a GPU does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvcore.builtin.pools.cuda import CudaArena
from kvcore.contract import DONE, Piece
from kvcore.errors import CapacityError, ConfigError, StaleHandleError, UnsupportedError
from kvcore.memory.uploads import StreamUploads


class Driver:
    """``torch.cuda`` as far as pools use it. ``calls`` is everything asked of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.current = "engine"
        self.capturing = False
        self.registered: dict[int, int] = {}
        self.code = 0
        driver = self

        class Stream:
            def __init__(self, device: Any) -> None:
                self.name = "copies"

            def wait_event(self, event: Any) -> None:
                driver.calls.append(f"{self.name} waits for {event.name}")

        class Event:
            def __init__(self, blocking: bool = False) -> None:
                assert blocking, "a thread that waits would take a core"
                self.name = ""

            def record(self, stream: Any = None) -> None:
                self.name = f"{stream.name if stream else driver.current}#{len(driver.calls)}"
                driver.calls.append(f"record {self.name}")

            def query(self) -> bool:
                return False

            def synchronize(self) -> None:
                driver.calls.append(f"host waits for {self.name}")

        @contextmanager
        def stream(entered: Any) -> Iterator[None]:
            before, driver.current = driver.current, entered.name
            yield
            driver.current = before

        @contextmanager
        def device(index: Any) -> Iterator[None]:
            yield

        def register(address: int, nbytes: int, flags: int) -> int:
            if not self.code:
                self.registered[address] = nbytes
            return self.code

        runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=self.registered.pop)
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "stream": stream,
            "device": device,
            "cudart": lambda: runtime,
            "current_stream": lambda device: SimpleNamespace(name=self.current),
            "is_current_stream_capturing": lambda: self.capturing,
            "mem_get_info": lambda device: (100, 1000),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


ROWS = (Piece(0, 8, 8, 8),)


def test_a_copy_is_issued_to_its_own_stream_after_the_engines(driver: Driver) -> None:
    arena = CudaArena(64, torch.device("cpu"))
    arena.tensor()[24:32] = 5
    queue = arena.queue()
    mark = queue.mark()
    host = np.zeros(8, np.uint8)
    fence = queue.gather(ROWS, np.array([3]), host)
    assert (host == 5).all()
    assert driver.calls == ["record engine#0", "record engine#1", "copies waits for engine#1", "record copies#3"]
    assert not fence.done()
    fence.wait()
    mark.wait()
    assert driver.calls[4:] == ["host waits for copies#3", "host waits for engine#1"]
    assert driver.current == "engine"
    arena.close()


def test_the_arena(driver: Driver) -> None:
    arena = CudaArena(64, torch.device("cpu"))
    assert arena.fd is None
    assert arena.address == arena.tensor().data_ptr()
    assert not arena.tensor().any()
    with pytest.raises(UnsupportedError, match="cannot address"):
        arena.array()
    fence = arena.queue().scatter(ROWS, np.array([1]), np.full(8, 3, np.uint8))
    arena.close()
    arena.close()
    assert fence.done(), "the memory went under a copy"
    with pytest.raises(StaleHandleError):
        arena.tensor()
    with pytest.raises(ConfigError):
        CudaArena(0, torch.device("cpu"))


def test_what_a_graph_captures_is_not_marked(driver: Driver) -> None:
    arena = CudaArena(64, torch.device("cpu"))
    driver.capturing = True
    assert arena.queue().mark() is DONE
    assert driver.calls == ["record engine#0"]


def test_a_device_without_room_says_what_is_free(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*sizes: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    with pytest.raises(CapacityError, match="not enough device memory") as caught:
        CudaArena(2000, torch.device("cpu"))
    assert (caught.value.fields["available_bytes"], caught.value.fields["total_bytes"]) == (100, 1000)


def test_host_memory_is_pinned_until_it_is_not(driver: Driver) -> None:
    queue = CudaArena(64, torch.device("cpu")).queue()
    memory = np.zeros(4096, np.uint8)
    unpin = queue.pin(memory)
    assert driver.registered == {memory.ctypes.data: 4096}
    unpin()
    unpin()
    assert driver.registered == {}
    queue.pin(np.zeros(0, np.uint8))()
    driver.code = 2
    with pytest.raises(CapacityError, match="cannot be pinned") as caught:
        queue.pin(memory)
    assert caught.value.fields["code"] == 2


def test_uploads_wait_for_the_copies_of_the_step_before(driver: Driver) -> None:
    uploads = StreamUploads("cuda:0")
    table = uploads.pin(torch.arange(4))
    device = torch.zeros(4, dtype=torch.int64)
    uploads.wait()
    uploads.send(device, table)
    uploads.sent()
    assert device.tolist() == [0, 1, 2, 3]
    uploads.wait()
    uploads.wait()
    assert driver.calls == ["record engine#0", "host waits for engine#0"]
