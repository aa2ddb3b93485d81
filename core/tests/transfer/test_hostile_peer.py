"""Peers that send whatever they like, tens of thousands of times, next to an honest pair that must not notice."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.errors import ProtocolError
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, SendDone

R1 = b"r1"
# logical bytes of a unit in the kit's layout: 2 layers, k and v, 4 slots, 2 heads, 8 dims, fp32; and one byte of scale
KV, SCALE = 2 * 2 * 4 * 2 * 8 * 4, 2 * 4 * 2
OWN = tuple(f"own{n}" for n in range(4))
"""Requests that the sender's engine does begin, and that hostile peers may pull."""


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, hostile: ModuleType) -> None:
    for module in ("sender", "receiver"):
        monkeypatch.setattr(f"kvcore.transfer.session.{module}._log", hostile.Silent())


class Scene:
    """An honest pair, transfer after transfer, and hostile peers of the same sender: :meth:`attack` sends one message."""

    def __init__(self, kit: ModuleType, hostile: ModuleType, seed: int) -> None:
        self.kit, self.hostile, self.rng = kit, hostile, random.Random(seed)
        self.net = kit.Net(["r1"])
        self.sender = self.net.sender
        self.peers = [f"foe{n}".encode() for n in range(3)]
        self.speakers = {
            peer: hostile.Speaker(
                peer.decode(), "sender-1", kit.manifest("receiver", peer.decode()).encode(), stop=8,
                request=OWN[0], nbytes={"full/kv": 2 * KV, "full/scale": 2 * SCALE},
            )
            for peer in self.peers
        }  # fmt: skip
        self.sent = self.transfers = 0
        self.request = "honest-0"
        self.turn: bytes | None = None  # who sends the next input; anybody where it is None
        self.answers: Counter[str] = Counter()

    def greet(self, peer: bytes) -> None:
        """A hello that is accepted."""
        self.put(peer, self.hostile.pack(self.speakers[peer].message("hello")))
        assert peer in self.sender.peers()

    def attack(self, peer: bytes, data: bytes) -> None:
        """Send one input. What was dropped has left nothing, and the honest peer is told nothing of it."""
        self.put(peer, data)
        self.sent += 1
        if peer not in self.sender.peers():
            self.demand_forgotten(peer)
        if self.sent % 64 == 0:
            self.serve_own()

    def put(self, peer: bytes, data: bytes) -> None:
        self.net.collect()
        try:
            message = control.decode(data)
        except ProtocolError as error:
            self.sender.broken(peer, error)
        else:
            self.sender.handle(peer, message)
        for to, answer in self.sender.outbox():
            assert to == peer or (to in self.peers), "an honest peer is told of what a hostile one did"
            self.answers[type(answer).__name__] += 1
            assert control.decode(control.encode(answer)) == answer

    def demand_forgotten(self, peer: bytes) -> None:
        records = self.sender._requests.records()
        assert not any(peer in record.readers for record in records)
        assert not self.sender._waiting.asked_by(peer)
        if self.sent % 256 == 0:
            assert not self.hostile.holds(self.sender, peer)

    def serve_own(self) -> None:
        """The engine begins and offers what hostile peers ask for, again and again."""
        for request in OWN:
            if not self.sender.has(request):
                self.sender.begin(request, 8)
                self.sender.offer(request, 0, 8, [self.kit.payload([31, 32], 0)], last=True)
        self.drain()

    def drain(self) -> None:
        """Messages to hostile peers go nowhere; those to the honest one stay on the wire."""
        keep = [item for item in self.sender.outbox() if item[0] not in self.peers]
        self.sender._outbox.extend(keep)

    def transfer(self) -> Iterator[None]:
        """An honest transfer, stage by stage; the bytes are right and it is done."""
        net, kit, receiver = self.net, self.kit, self.net.receivers[R1]
        request = f"honest-{self.transfers + 1}"
        net.memories[R1].clear()
        for component in kit.COMPONENTS:
            for unit in (11, 12, 13):
                net.sender_memory[component, unit] = (request, component, unit)
        receiver.ask(request, {kit.KEY: np.array([3, 9, 4], np.int64)}, 0, 12)
        net.settle()  # who knows an id and asks first is served first: ids of others are learnt from here on
        self.transfers += 1
        self.request = request
        yield
        net.sender.begin(request, 12)
        yield
        net.sender.offer(request, 0, 8, [kit.payload([11, 12], 0)])
        yield
        net.settle(reads=False)
        yield
        net.settle()
        yield
        net.sender.note_chunk_start(request, last=True)
        net.sender.offer(request, 8, 12, [kit.payload([13], 2)], last=True, engine_data=b"first")
        yield
        for _ in range(40):  # one message, one read at a time
            net.collect()
            moved = net.deliver_down(R1) or net.deliver_up(R1)
            for read in net.connections[R1].running:
                read.finish()
            receiver.tick()
            net.collect()
            yield
            if not moved and not net.up[R1] and not net.down[R1]:
                break
        net.settle()
        done = receiver.events()[-1]
        assert isinstance(done, ReceiveDone), done
        nbytes = {"full/kv": 3 * KV, "full/scale": 3 * SCALE}
        assert (done.request, done.bytes_by_component, done.engine_data) == (request, nbytes, b"first")
        ends = [e for e in net.sender.events() if e.request.startswith("honest")]
        assert [(type(e), e.request, e.bytes_by_component) for e in ends] == [(SendDone, request, nbytes)]
        assert net.memories[R1] == {
            (component, there): (request, component, here)
            for component in kit.COMPONENTS
            for there, here in {3: 11, 9: 12, 4: 13}.items()
        }

    def run(self, inputs: Iterator[bytes], *, burst: int = 12) -> None:
        """Send every input from some hostile peer, at some stage of an honest transfer, before or after a hello."""
        for peer in self.peers:
            self.greet(peer)
        self.serve_own()
        more = True
        while more:
            for _ in self.transfer():
                for _ in range(burst):
                    data = next(inputs, None)
                    if data is None:
                        more = False
                        break
                    peer = self.turn or self.rng.choice(self.peers)
                    if peer not in self.sender.peers() and self.rng.random() < 0.8:
                        self.greet(peer)
                        if self.rng.random() < 0.7:
                            self.put(peer, self.hostile.pack(self.speakers[peer].message("ask")))
                    self.attack(peer, data)
        self.finish()

    def finish(self) -> None:
        """The hostile peers fall silent: nothing of them, of what they asked for, or of the honest requests is left."""
        for peer in self.peers:
            self.sender.lost(peer, "end of the test")
        for request in self.sender.requests():
            self.sender.abort(request, "end of the test")
        self.sender.outbox()
        assert list(self.sender.peers()) == [R1]
        assert not self.sender.held_units()
        for peer in self.peers:
            assert not self.hostile.holds(self.sender, peer)


def foreign(scene: Scene) -> tuple[Any, ...]:
    """Names and numbers that are right somewhere else."""
    return ("honest-1", OWN[1], "r1", "foe1", "sender-1", "full/scale", "pages", 3, 7, 63, 64, [7], [0, 0], [1, 0])


def every_field(scene: Scene) -> Iterator[bytes]:
    """Every message type, each field spoilt."""
    for kind in scene.hostile.KINDS:
        speaker = scene.speakers[scene.peers[0]]
        yield from scene.hostile.spoilt(speaker.message(kind), foreign(scene))


def mutations(scene: Scene, number: int) -> Iterator[bytes]:
    """Valid encodings with their bytes spoilt."""
    rng = scene.rng
    for _ in range(number):
        speaker = scene.speakers[rng.choice(scene.peers)]
        a, b = (scene.hostile.pack(speaker.message(rng.choice(scene.hostile.KINDS))) for _ in range(2))
        yield scene.hostile.mutated(rng, a, b)


def nonsense(scene: Scene, number: int) -> Iterator[bytes]:
    """Well-formed messages in an order, about requests and from instances, that make no sense."""
    rng = scene.rng
    for _ in range(number):
        peer = rng.choice(scene.peers)
        scene.turn = peer if rng.random() < 0.8 else None
        speaker = scene.speakers[peer]
        if rng.random() < 0.1:  # sense, as far as it comes
            about = {"request": rng.choice(OWN), "attempt": 1}
            for kind in ("ask", "pulled", "pulled_all", "ack"):
                scene.turn = peer
                yield scene.hostile.pack(speaker.message(kind, **about))
            continue
        kind = rng.choice(("ask", "pulled", "pulled_all", "ack", "abort", "heartbeat", *scene.hostile.KINDS))
        known = set(speaker.message(kind))
        request = rng.choice((*OWN, *OWN, scene.request, f"honest-{scene.transfers - 1}", "unknown"))
        few = {"full/kv": rng.choice((0, KV, 2 * KV)), "full/scale": rng.choice((0, SCALE, 2 * SCALE))}
        changes: dict[str, Any] = {
            "request": request,
            "attempt": rng.choice((1, 1, 1, 2, scene.transfers, 0)),
            "seq": rng.choice((0, 0, 1, 2)),
            "start": rng.choice((0, 0, 4, 8, 9)),
            "stop": rng.choice((8, 8, 12, 0)),
            "nbytes": rng.choice((speaker.nbytes, few, {})),
            "renew": [{"request": request, "attempt": rng.choice((1, scene.transfers))}] * rng.choice((1, 3)),
            "src": rng.choice((speaker.src, speaker.src, speaker.src, speaker.src, "r1")),
        }
        yield scene.hostile.pack(speaker.message(kind, **{k: v for k, v in changes.items() if k in known}))


def manifests(scene: Scene) -> Iterator[bytes]:
    """Hellos with everything in their manifest spoilt. The name of another engine is left out: who knows it replaces it."""
    speaker = scene.speakers[scene.peers[0]]
    for encoded in scene.hostile.spoilt(msgspec.msgpack.decode(speaker.manifest), ("full/kv", "head", "fp32", 3, 64)):
        scene.turn = scene.peers[0]
        yield scene.hostile.pack(speaker.message("hello", manifest=encoded))


def some(inputs: Iterator[bytes], one_in: int, seed: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    return (item for item in inputs if rng.randrange(one_in) == 0)


@pytest.fixture
def scene(kit: ModuleType, hostile: ModuleType) -> Scene:
    return Scene(kit, hostile, 5)


def test_a_sender_next_to_spoilt_fields(scene: Scene) -> None:
    scene.run(some(every_field(scene), 6, 1))
    assert scene.sent > 1000
    assert scene.answers["Bye"]


def test_a_sender_next_to_spoilt_manifests(scene: Scene) -> None:
    scene.run(some(manifests(scene), 25, 2))
    assert scene.answers["Refused"] > 50
    assert scene.answers["Welcome"]


def test_a_sender_next_to_spoilt_bytes(scene: Scene) -> None:
    scene.run(mutations(scene, 1500))


def test_a_sender_next_to_nonsense(scene: Scene) -> None:
    scene.run(nonsense(scene, 2000))
    assert {"Bye", "Offer", "Expired", "Commit", "Welcome"} <= set(scene.answers)


@pytest.mark.slow  # fifty thousand
@pytest.mark.parametrize("what", ["fields", "manifests", "bytes", "sequences"])
def test_a_sender_is_attacked_at_length(kit: ModuleType, hostile: ModuleType, what: str) -> None:
    for seed in range(2 if what == "fields" else 1):
        scene = Scene(kit, hostile, 100 + seed)
        inputs = {"fields": every_field, "manifests": manifests, "bytes": lambda s: mutations(s, 20_000),
                  "sequences": lambda s: nonsense(s, 20_000)}[what](scene)  # fmt: skip
        scene.run(inputs)
        assert scene.sent >= {"fields": 9_000, "manifests": 3_000}.get(what, 20_000)


def test_a_broken_message_is_described_briefly(hostile: ModuleType) -> None:
    """Whatever it holds: the error is logged."""
    speaker = hostile.Speaker("foe0", "sender-1", b"")
    for kind in hostile.KINDS:
        for name in speaker.message(kind):
            for long in ("x" * 1_000_000, b"x" * 1_000_000, [0] * 1_000_000, {"x" * 1_000_000: 0}):
                spoilt = {**speaker.message(kind), "dst": 5, name: long}
                with pytest.raises(ProtocolError) as found:
                    control.decode(hostile.pack(spoilt))
                assert len(str(found.value.as_dict())) < 2000
