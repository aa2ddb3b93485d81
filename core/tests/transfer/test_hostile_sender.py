"""A sender that sends whatever it likes: a receiver writes nothing it did not ask for, and every ask ends once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcore.errors import ProtocolError, TransferError
from kvcore.layout.moves import run_program
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, ReceiveQuiet, TransferOptions
from kvcore.transfer.session.joined import JoinedReceiver, name

UNITS, POISON, NULL = 64, 0xFF, 0xEE
SENDER = name(0)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch, hostile: ModuleType) -> None:
    for module in ("sender", "receiver"):
        monkeypatch.setattr(f"kvcore.transfer.session.{module}._log", hostile.Silent())


class Victim:
    """A receiver with memory of its own, and the hostile sender that it has connected to.

    A byte of the sender's memory is the number of its unit, of its null unit ``NULL``; here everything is ``POISON``.
    """

    def __init__(self, kit: ModuleType, hostile: ModuleType, rng: random.Random, *, welcome: bool = True) -> None:
        self.kit, self.hostile, self.rng = kit, hostile, rng
        mine, theirs = kit.manifest("receiver", "victim"), kit.manifest("sender", "foe")
        size = mine.placement("full").arena_bytes
        self.source = np.repeat(np.arange(UNITS, dtype=np.uint8), size // UNITS)
        self.source[: size // UNITS] = NULL
        self.memory = np.full(size, POISON, np.uint8)
        self.connection = kit.FakeConnection({}, {})
        self.connection._land = self.land
        self.clock = kit.Clock()
        self.options = TransferOptions()
        self.session = JoinedReceiver(mine, [lambda _: self.connection], clock=self.clock, options=self.options)
        self.manifest: bytes = theirs.encode()
        self.speaker = hostile.Speaker("foe", "victim", self.manifest)
        self.owned: dict[str, tuple[int, ...]] = {}  # units that may be written, by request
        self.asked: dict[str, tuple[int, ...]] = {}
        self.ends: Counter[str] = Counter()
        self.done: list[str] = []
        self.errors: Counter[str] = Counter()
        self.writable = np.zeros(UNITS, bool)
        self.sent = 0
        self.session.hello()
        if welcome:
            self.put(hostile.pack(self.speaker.message("welcome")))
            assert self.session.connected
            self.sent = 0

    def land(self, jobs: Sequence[Any]) -> None:
        """The bytes land: of units the sender has, in units that are owned now and by nobody's leave else."""
        may = {unit for units in self.owned.values() for unit in units}
        for job in jobs:
            assert set(job.dst_units.tolist()) <= may
            assert all(1 <= unit < UNITS for unit in job.src_units.tolist())
            run_program(job.program, self.source, self.memory, job.src_units, job.dst_units)
        self.look()

    def look(self) -> None:
        """Nothing was written that was never asked for."""
        units = self.memory.reshape(UNITS, -1)
        assert (units[~self.writable] == POISON).all()
        assert not (units == NULL).any()

    def ask(self, request: str, units: tuple[int, ...]) -> None:
        self.writable[list(units)] = True
        self.memory.reshape(UNITS, -1)[list(units)] = POISON
        self.session.ask(request, {self.kit.KEY: np.array(units, np.int64)}, 0, 4 * len(units))
        self.asked[request] = self.owned[request] = units

    def put(self, data: bytes) -> None:
        self.sent += 1
        try:
            message = control.decode(data)
        except ProtocolError as error:
            self.session.broken(SENDER, error)
        else:
            self.session.handle(SENDER, message)
        self.take()

    def take(self) -> None:
        """What the session says: each ask ends once, and what is done is whole."""
        for _, message in self.session.outbox():
            assert control.decode(control.encode(message)) == message
        for event in self.session.events():
            if isinstance(event, ReceiveQuiet):
                self.owned.pop(event.request)
            elif isinstance(event, ReceiveDone | ReceiveFailed):
                assert event.request in self.asked
                self.ends[event.request] += 1
                assert self.ends[event.request] == 1, "an ask has ended twice"
                if isinstance(event, ReceiveDone):
                    self.demand_whole(event)
                else:
                    self.errors[event.error.code] += 1
                if isinstance(event, ReceiveDone) or event.quiet:
                    self.owned.pop(event.request)

    def demand_whole(self, event: ReceiveDone) -> None:
        """Every byte of every unit that was asked for came from some unit of the sender."""
        units = self.asked[event.request]
        got = self.memory.reshape(UNITS, -1)[list(units)]
        # a unit: of each layer k and v, 256 bytes each, and 8 bytes of scale, padded to 16
        assert (got.reshape(len(units), 2, 528)[:, :, :520] != POISON).all()
        assert event.bytes_by_component == self.nbytes(len(units))
        self.done.append(event.request)

    def nbytes(self, units: int) -> dict[str, int]:
        # 2 layers, k and v, 4 slots, 2 heads, 8 dims, fp32; and one byte of scale
        return {"full/kv": units * 2 * 2 * 4 * 2 * 8 * 4, "full/scale": units * 2 * 4 * 2}

    def step(self) -> None:
        """A read ends or fails; time passes."""
        for read in self.connection.running:
            if self.rng.random() < 0.6:
                read.finish() if self.rng.random() < 0.95 else read.fail()
        self.clock.now += self.rng.choice((0.0, 0.0, 0.1))
        self.session.tick()
        self.take()

    def finish(self) -> None:
        """The sender falls silent. Every ask has ended, exactly once, and all reads are quiet."""
        for _ in range(8):
            self.clock.now += self.options.peer_timeout_s / 2 + 0.1
            for read in self.connection.running:
                read.finish()
            self.session.tick()
            self.take()
        assert not self.session.requests()
        assert not self.session.reads_in_flight
        assert self.ends == Counter(dict.fromkeys(self.asked, 1))
        assert not self.owned
        self.look()


class Script:
    """What an honest sender would say to the asks of a victim, one message at a time."""

    def __init__(self, victim: Victim, request: str, attempt: int, units: tuple[int, ...]) -> None:
        hostile, rng = victim.hostile, victim.rng
        count = len(units)
        nbytes = victim.nbytes(count)
        self.speaker = hostile.Speaker("foe", "victim", victim.manifest, request, attempt, 4 * count, nbytes)
        cut = rng.randint(0, count)
        sources = [rng.randrange(1, UNITS) for _ in range(count)]
        pieces = [(0, 4 * cut, 0, sources[:cut]), (4 * cut, 4 * count, cut, sources[cut:])] if cut else [
            (0, 4 * count, 0, sources)]  # fmt: skip
        self.rest = [
            self.speaker.message(
                "offer", seq=seq, start=start, stop=stop, last=seq == len(pieces) - 1,
                payloads=[hostile.payload(tuple(ids), first)] if ids else [],
            )
            for seq, (start, stop, first, ids) in enumerate(pieces)
        ]  # fmt: skip
        self.rest.append(self.speaker.message("commit", num_offers=len(pieces)))


KINDS = ("offer", "offer", "offer", "commit", "expired", "abort", "heartbeat")
"""What does not end the conversation as such; the others come as well, less often."""


def crooked(victim: Victim, script: Script) -> bytes:
    """A message that is out of place, or spoilt somewhere, near enough to the right one to get far."""
    rng, hostile = victim.rng, victim.hostile
    kind = rng.choice(KINDS) if rng.random() < 0.97 else rng.choice(hostile.KINDS)
    base = rng.choice(script.rest) if script.rest and rng.random() < 0.6 else script.speaker.message(kind)
    if base["type"] == "offer":
        n = rng.randrange(12)
        ids = tuple(rng.choice((0, 1, 5, 63, 64, 2**40, 7)) for _ in range(rng.randint(0, 3)))
        changes: list[dict[str, Any]] = [
            {"seq": rng.randrange(3)}, {"start": rng.choice((0, 4, 8))}, {"stop": rng.choice((0, 4, 8, 400))},
            {"last": not base["last"]}, {"payloads": base["payloads"] * 2}, {"payloads": []},
            {"payloads": [hostile.payload(ids, rng.choice((0, 1, 2**61)))]},
            {"payloads": [p | {"layers": rng.choice(([0], [1], [0, 0], [7], [1, 0]))} for p in base["payloads"]]},
            {"payloads": [p | {"components": rng.choice((["full/kv"], ["full/scale"], [], ["full/kv"] * 2, ["a"]))}
                          for p in base["payloads"]]},
            {"payloads": [p | {"group": "nope"} for p in base["payloads"]]},
            {"payloads": [p | {"range": "nope"} for p in base["payloads"]]},
            {"attempt": rng.randrange(4)},
        ]  # fmt: skip
        base = base | changes[n]
    elif base["type"] == "commit":
        base = base | rng.choice((
            {"num_tokens": 4}, {"num_offers": 0}, {"nbytes": {}}, {"nbytes": {"full/kv": 1}}, {"checksums": {"full/kv": 1}},
            {"pulled_early_bytes": 2**61}, {"engine_data": b"q" * 65536}, {"attempt": 2},
        ))  # fmt: skip
    data: bytes = hostile.pack(base)
    how = rng.random()
    if how < 0.15:
        return bytes(hostile.mutated(rng, data, hostile.pack(script.speaker.message(rng.choice(hostile.KINDS)))))
    if how < 0.3:
        return bytes(hostile.spoilt_once(rng, base))
    return data


def conversation(kit: ModuleType, hostile: ModuleType, rng: random.Random, *, honesty: float) -> Victim:
    """Asks, answered by a script that is left for something crooked now and then, until the victim has had enough."""
    victim = Victim(kit, hostile, rng)
    scripts: list[Script] = []
    for turn in range(24):
        if not victim.session.connected:
            break
        free = [u for u in range(1, UNITS) if not any(u in units for units in victim.owned.values())]
        if turn % 6 == 0:
            units = tuple(rng.sample(free, rng.randint(1, 4)))
            victim.ask(f"q{turn}", units)
            scripts.append(Script(victim, f"q{turn}", victim.session._attempts, units))
        script = rng.choice(scripts)
        if rng.random() < honesty and script.rest:
            victim.put(hostile.pack(script.rest.pop(0)))
        else:
            victim.put(crooked(victim, script))
        for _ in range(rng.randrange(3)):
            victim.step()
    victim.finish()
    return victim


def converse(kit: ModuleType, hostile: ModuleType, seeds: range, honesty: float) -> tuple[int, int, Counter[str]]:
    sent, done, errors = 0, 0, Counter[str]()
    for seed in seeds:
        victim = conversation(kit, hostile, random.Random(seed), honesty=honesty)
        sent, done = sent + victim.sent, done + len(victim.done)
        errors += victim.errors
    return sent, done, errors


def test_an_honest_script_is_done(kit: ModuleType, hostile: ModuleType) -> None:
    """The victim is no wall: what is right arrives."""
    rng = random.Random(1)
    for _ in range(20):
        victim = Victim(kit, hostile, rng)
        victim.ask("x", (3, 9, 4))
        for message in Script(victim, "x", 1, (3, 9, 4)).rest:
            victim.put(hostile.pack(message))
            for read in victim.connection.running:
                read.finish()
            victim.session.tick()
            victim.take()
        assert victim.done == ["x"]
        victim.finish()


@pytest.mark.parametrize("honesty", [0.2, 0.8, 0.95])
def test_a_sender_that_lies(kit: ModuleType, hostile: ModuleType, honesty: float) -> None:
    _, done, errors = converse(kit, hostile, range(50), honesty)
    assert {"protocol", "transfer_aborted", "transfer_expired"} & set(errors)
    assert done or honesty < 0.5


def fields(victim: Victim) -> Iterator[bytes]:
    """Every field of every message about an ask that is open, spoilt."""
    script = Script(victim, "x", 1, (3, 9, 4))
    messages = [*script.rest, *(script.speaker.message(kind) for kind in victim.hostile.KINDS)]
    for message in messages:
        yield from victim.hostile.spoilt(message, ("y", "victim", 3, 63, 64, [7], [0, 0], ["full/kv"]))


def answer_one(kit: ModuleType, hostile: ModuleType, inputs: Iterator[bytes]) -> int:
    """Each input goes to a victim that waits for an answer to an ask; a new one where that one has had enough."""
    rng, sent = random.Random(7), 0
    victim: Victim | None = None
    for data in inputs:
        sent += 1
        if victim is None or not victim.session.connected:
            victim = Victim(kit, hostile, rng)
        if "x" not in victim.asked:
            victim.session.links[0]._attempts = 0  # what the inputs name
            victim.ask("x", (3, 9, 4))
        victim.put(data)
        for read in victim.connection.running:
            read.finish()
        victim.session.tick()
        victim.take()
        if victim.ends["x"] or not victim.session.connected:
            if not victim.session.connected:
                victim.finish()
            del victim.asked["x"]
            victim.ends.clear()
    return sent


def test_a_receiver_is_sent_spoilt_fields(kit: ModuleType, hostile: ModuleType) -> None:
    rng = random.Random(3)
    every = fields(Victim(kit, hostile, rng))
    assert answer_one(kit, hostile, (data for data in every if rng.randrange(25) == 0)) > 250


def manifests(hostile: ModuleType, encoded: bytes) -> Iterator[bytes]:
    """A manifest with everything in it spoilt, one after the other."""
    yield from hostile.spoilt(msgspec.msgpack.decode(encoded), ("full/kv", "head", "fp32", 3, 64))


def welcomed_by(kit: ModuleType, hostile: ModuleType, inputs: Iterator[bytes]) -> Counter[str]:
    """Welcomes with these manifests: accepted, or refused with a typed error."""
    seen = Counter[str]()
    rng = random.Random(2)
    for manifest in inputs:
        victim = Victim(kit, hostile, rng, welcome=False)
        victim.put(hostile.pack(victim.speaker.message("welcome", manifest=manifest)))
        seen["accepted" if victim.session.connected else "refused"] += 1
        if not victim.session.connected:
            assert isinstance(victim.session.failure, TransferError) or victim.session.failure is None
    return seen


def test_manifests_that_are_spoilt(kit: ModuleType, hostile: ModuleType) -> None:
    rng = random.Random(4)
    every = manifests(hostile, kit.manifest("sender", "foe").encode())
    seen = welcomed_by(kit, hostile, (data for data in every if rng.randrange(25) == 0))
    assert seen["refused"] > 50
    assert seen["accepted"]


@pytest.mark.slow  # ten thousands
def test_a_receiver_is_attacked_at_length(kit: ModuleType, hostile: ModuleType) -> None:
    sent = 0
    for honesty in (0.3, 0.7, 0.9, 0.97):
        sent += converse(kit, hostile, range(1000, 1250), honesty)[0]
    sent += answer_one(kit, hostile, fields(Victim(kit, hostile, random.Random(3))))
    sent += sum(welcomed_by(kit, hostile, manifests(hostile, kit.manifest("sender", "foe").encode())).values())
    assert sent > 20_000
