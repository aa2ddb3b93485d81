"""All sides of a cache share one transport, registered once; closed sides leave nothing behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from kvcore import KVCache, LayerGroup, ModelSpec, TensorSpec, load_config, load_plugins
from kvcore.contract import Arena, PeerConnection
from kvcore.engine.exchange import Exchange
from kvcore.engine.peers import ReceiveDone, ReceiveSide, SendSide
from kvcore.errors import PluginError, RequestError, StaleHandleError, TransferError
from kvcore.plugins import Registry
from kvcore.testing.harness import Subject
from kvcore.transfer.shm.transport import ShmTransport

HEADS = (TensorSpec("k", 1, 8), TensorSpec("v", 1, 8))
MODEL = ModelSpec("m", (LayerGroup("full", (0,), HEADS, 1),), "fp32")


class Counted(ShmTransport):
    """What was done with it, of all of its kind."""

    log: list[str]
    answer: Any = None

    def register(self, arenas: Mapping[str, Arena]) -> bytes:
        self.log.append("register")
        real = super().register(arenas)
        return real if self.answer is None else self.answer

    def connect(self, endpoint: bytes) -> PeerConnection:
        self.log.append("connect")
        return super().connect(endpoint)

    def close(self) -> None:
        self.log.append("close")
        super().close()


@pytest.fixture
def kind() -> type[Counted]:
    return type("CountedHere", (Counted,), {"log": []})


def build(kind: type[Counted]) -> KVCache:
    registry: Registry = Subject(load_plugins(()), transport=kind)
    made = KVCache.create(MODEL, load_config(None, {"cache.memory": "64KiB", "cache.format": "fp32"}), registry)
    kind.log.clear()  # one was opened and closed to see whether it serves
    return made


@pytest.fixture
def cache(kind: type[Counted]) -> Iterator[KVCache]:
    with build(kind) as made:
        yield made


@pytest.fixture
def other() -> Iterator[KVCache]:
    config = load_config(None, {"cache.memory": "64KiB", "cache.format": "fp32"})
    with KVCache.create(MODEL, config, load_plugins(config)) as made:
        yield made


def move(source: KVCache, send: SendSide, target: KVCache, receive: ReceiveSide, name: str) -> None:
    """A request of three tokens, from one cache to the other."""
    receive.ask(name, 3)
    source.admit(name, 3)
    send.begin(name, 3)
    with source.begin([(name, 3)]) as step:
        step.store(0, {tensor.name: torch.full((3, 1, 8), 7.0) for tensor in HEADS})
        step.commit()
    send.offer(name, 0, 3, last=True)
    seen: list[Any] = []
    while not any(isinstance(event, ReceiveDone) for event in seen):
        assert receive.wait_event(10)
        seen += receive.events()
    while source.manager.requests:
        assert send.wait_event(10)
        send.events()
    slots = torch.from_numpy(target.slots(name, "full", 0, 3))
    out = {tensor.name: torch.zeros(3, 1, 8) for tensor in HEADS}
    target.store.load(0, slots, out)
    assert all((values == 7).all() for values in out.values())
    target.release(name)


def test_one_transport_serves_every_side(kind: type[Counted], cache: KVCache, other: KVCache) -> None:
    first, second = cache.serve(), cache.serve()
    away = other.serve()
    back = cache.connect(away.address)
    assert kind.log == ["register", "connect"]
    one, two = other.connect(first.address), other.connect(second.address)
    move(cache, first, other, one, "a")
    move(cache, second, other, two, "b")
    move(other, away, cache, back, "c")
    first.close()
    move(cache, second, other, two, "d")
    move(other, away, cache, back, "e")
    assert "close" not in kind.log
    cache.close()
    assert kind.log == ["register", "connect", "close"]


def test_a_side_that_could_not_be_opened_leaves_the_others_alone(
    kind: type[Counted], cache: KVCache, other: KVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = cache.serve()
    receive = other.connect(send.address)
    other_record = cache._exchange._registered().record
    monkeypatch.setattr(ReceiveSide, "open", _refused)
    with pytest.raises(TransferError, match="not reached"):
        cache.connect("tcp://127.0.0.1:9")
    assert cache._exchange._registered().record is other_record
    assert "close" not in kind.log
    move(cache, send, other, receive, "a")


def _refused(*args: Any, **options: Any) -> ReceiveSide:
    raise TransferError("not reached")


def test_sides_that_were_closed_are_forgotten(cache: KVCache, other: KVCache) -> None:
    exchange: Exchange = cache._exchange
    for _ in range(3):
        send = cache.serve()
        receive = other.connect(send.address)
        move(cache, send, other, receive, "a")
        kept = weakref.ref(send), weakref.ref(receive)
        with pytest.raises(RequestError, match="constants are in use"):
            cache.set_constants("full", {})
        for side in (receive, send):
            side.close()
            side.close()
        assert not len(exchange)
        del side, send, receive
        gc.collect()
        assert [side() for side in kept] == [None, None]
    cache.set_constants("full", {})


def test_a_closed_side_that_still_holds_units_is_kept(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    side = cache.serve()
    monkeypatch.setattr(type(side), "holds_units", True)
    side.close()
    assert len(cache._exchange) == 1


@pytest.mark.parametrize("answer", [-1, "shm", [], {"host": 1}])
def test_an_endpoint_record_that_is_no_bytes_is_refused_where_it_is_given(kind: type[Counted], answer: Any) -> None:
    """Sent on, it would be the peer that fails: over a manifest nobody can decode."""
    with build(kind) as cache:
        kind.answer = answer
        for _ in range(2):
            with pytest.raises(PluginError, match="endpoint record") as error:
                cache.serve()
            assert error.value.fields["got"] == type(answer).__name__
        assert kind.log == ["register", "close"] * 2
        kind.answer = None
        cache.serve()


def test_a_transport_that_answers_none_is_refused(kind: type[Counted], monkeypatch: pytest.MonkeyPatch) -> None:
    with build(kind) as cache:
        monkeypatch.setattr(kind, "register", lambda self, arenas: None)
        with pytest.raises(PluginError, match="endpoint record"):
            cache.serve()


def test_a_closed_cache_opens_no_side(cache: KVCache) -> None:
    cache.close()
    with pytest.raises(StaleHandleError):
        cache.serve()
