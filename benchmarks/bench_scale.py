"""What one transfer costs in the protocol's state machines while many are under way: no memory, no sockets.

A sender and a receiver of this process, joined by lists, keep a number of transfers begun and asked for. One after another
ends and another begins in its place, and both sides take a turn after every message, as their I/O threads do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.timing import Figure, figure
from kvcore.builtin.formats import PLAIN_FORMATS
from kvcore.contract import PeerConnection, ReadHandle, ReadJob
from kvcore.requests.payload import Payload
from kvcore.spec import LayerGroup, Shard, TensorSpec
from kvcore.transfer.messages.manifest import Manifest, new_instance
from kvcore.transfer.session.base import ReceiveDone, SendDone
from kvcore.transfer.session.joined import JoinedReceiver, name
from kvcore.transfer.session.sender import SenderSession

AT_ONCE = (1, 10, 100, 1000, 4000)
TOKENS, UNITS, SAMPLES, ROUNDS = 32, 8192, 200, 5


class _Landed(ReadHandle):
    def poll(self) -> bool:
        return True


class _Nothing(PeerConnection):
    """A peer whose bytes are there already."""

    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        return _Landed()

    def alive(self) -> bool:
        return True

    def quiesce(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        return


class _Pair:
    """A sender and a receiver, with ``count`` transfers under way."""

    def __init__(self, count: int) -> None:
        heads = (TensorSpec("k", 2, 64), TensorSpec("v", 2, 64))
        group = LayerGroup(name="full", layers=(0, 1), tensors=heads, num_query_heads=2)
        fp32 = next(item for item in PLAIN_FORMATS if item.name == "fp32")
        layout = fp32().layout(group, page_size=TOKENS, shard=Shard(), arena="page_major")
        self.range = layout.ranges[0].name
        self.components = layout.components

        def manifest(role: str) -> Manifest:
            return Manifest(
                instance=new_instance(), role=role, model="m" * 64, layouts={"full": layout},  # type: ignore[arg-type]
                units={"full": {self.range: UNITS}}, transport="none",
            )  # fmt: skip

        self.sender = SenderSession(manifest("sender"))
        self.receiver = JoinedReceiver(manifest("receiver"), [lambda _: _Nothing()])
        self.receiver.hello()
        self.settle()
        self.first = self.next = 0
        for _ in range(count):
            self.start()

    def settle(self) -> None:
        """Deliver every message, with a turn of both sides after each."""
        moving = True
        while moving:
            up, down = self.receiver.outbox(), self.sender.outbox()
            moving = bool(up or down)
            for _, message in up:
                self.sender.handle(b"receiver", message)
                self.turn()
            for _, message in down:
                self.receiver.handle(name(0), message)
                self.turn()

    def turn(self) -> None:
        self.sender.tick()
        self.receiver.tick()

    def start(self) -> None:
        """One more transfer is asked for and begun."""
        request, unit = str(self.next), self.next % (UNITS - 1) + 1
        self.next += 1
        self.receiver.ask(request, {("full", self.range): np.array([unit], np.int64)}, 0, TOKENS)
        self.sender.begin(request, TOKENS)
        self.settle()

    def finish(self) -> None:
        """The oldest is offered, pulled, committed and acknowledged."""
        unit = self.first % (UNITS - 1) + 1
        payload = Payload.of("full", self.range, self.components, 0, np.array([unit], np.int64))
        self.sender.offer(str(self.first), 0, TOKENS, [payload], last=True)
        self.first += 1
        self.settle()
        done = [*self.sender.events(), *self.receiver.events()]
        if not any(isinstance(item, SendDone) for item in done) or not isinstance(done[-1], ReceiveDone):
            raise RuntimeError(f"the benchmark's transfer did not succeed: {done}")

    def microseconds(self) -> float:
        """What a transfer takes now, from ask to acknowledgement."""
        begin = time.perf_counter()
        for _ in range(SAMPLES):
            self.finish()
            self.start()
        return (time.perf_counter() - begin) / SAMPLES * 1e6


def run() -> list[Figure]:
    """µs a transfer by transfers at once, and how much dearer the last row is than the first."""
    pairs = [_Pair(count) for count in AT_ONCE]
    rounds = [[pair.microseconds() for pair in pairs] for _ in range(ROUNDS)]
    figures = [
        figure(f"protocol of a transfer, {count} at once", statistics.median(column), "µs")
        for count, column in zip(AT_ONCE, zip(*rounds, strict=True), strict=True)
    ]
    ratio = statistics.median(row[-1] / row[0] for row in rounds)
    figures.append(figure(f"{AT_ONCE[-1]} transfers at once against {AT_ONCE[0]}", ratio, "× the time", at_most=1.5))
    return figures
