"""One round: some prefill and decode processes, a random course of things, faults, and the reckoning at the end.

Everything comes from one seed: a round that fails is run again by its number.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from chaos.decode import DecodeEngine, DecodeRank
from chaos.memory import Shape, Violation
from chaos.ports import remember_programs
from chaos.prefill import Job, PrefillEngine, PrefillRank
from chaos.process import Order, World
from chaos.wire import Link, Net

from kvcore.transfer.session.base import TransferOptions

OPTIONS = TransferOptions(
    lease_s=4.0, heartbeat_s=1.0, peer_timeout_s=4.0, ask_timeout_s=6.0, read_timeout_s=4.0, quiesce_s=3.0,
    hello_timeout_s=5.0,
)  # fmt: skip

FAULTS = (
    "kill prefill", "kill decode", "restart", "stop", "continue", "cut", "stall", "abort by sender",
    "abort by receiver", "release at sender", "release at receiver", "released in a step",
    "step abandoned", "layer offered early", "lease ended",
    "read failed", "read stuck", "read outlived its request", "read of refilled units", "garbage", "nobody asks",
    "nobody begins", "another length", "retract", "fork",
)  # fmt: skip
"""Every kind of fault that is counted; a run of many rounds must have seen each."""

REQUESTS = tuple("abcdef")
LENGTHS = (1, 3, 4, 5, 8, 9, 13, 16, 21)


@dataclass
class Report:
    """What came of some rounds.

    Attributes:
        violations: what must never happen, by kind; with the seeds of the rounds, and the first few in words.
        story: the last lines of what happened in the first of these rounds.
    """

    rounds: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    seeds: list[int] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)


class Round:
    """The engines of one seed and what is done to them.

    Args:
        seed: decides everything.
        calm: nothing is broken on purpose.
        engines: how many prefill and decode engines; by default the seed decides.
        ranks: how many ranks each of them has; by default the seed decides.
    """

    def __init__(
        self, seed: int, *, calm: bool = False, engines: tuple[int, int] | None = None,
        ranks: tuple[int, int] | None = None,
    ) -> None:  # fmt: skip
        rng = random.Random(seed)
        rate = 0.0 if calm else rng.choice((0.03, 0.1, 0.25))
        self.world = World(rng, Net(rng, delay=rng.choice((0.0, 0.1, 0.5))), OPTIONS, fault_rate=rate)
        self.calm = calm
        self.garbage = not calm and seed % 4 == 3
        ranks = ranks or (rng.choice((1, 2)), rng.choice((1, 2)))
        engines = engines or (rng.choice((1, 1, 1, 2)), rng.choice((1, 1, 2, 3)))
        self.shapes = {"prefill": self._shapes(ranks[0]), "decode": self._shapes(ranks[1])}
        self.prefills: dict[str, PrefillEngine] = {}
        self.decodes: dict[str, DecodeEngine] = {}
        for number in range(engines[0]):
            self.start_prefill(f"p{number}")
        for number in range(engines[1]):
            self.start_decode(f"d{number}")

    def _shapes(self, ranks: int) -> list[Shape]:
        rng = self.world.rng
        heads = [(0, 1)] if ranks == 1 else [(0,), (1,)]
        units, token_major = rng.choice((20, 36)), rng.random() < 0.5
        arena = rng.choice(("page_major", "layer_major"))
        return [Shape(units, token_major, arena, part) for part in heads]

    def start_prefill(self, name: str) -> None:
        self.prefills[name] = PrefillEngine(self.world, name, self.shapes["prefill"])

    def start_decode(self, name: str) -> None:
        senders = {engine: [rank.place.name for rank in item.ranks] for engine, item in self.prefills.items()}
        self.decodes[name] = DecodeEngine(self.world, name, self.shapes["decode"], senders)

    @property
    def engines(self) -> list[PrefillEngine | DecodeEngine]:
        return [*self.prefills.values(), *self.decodes.values()]

    @property
    def ranks(self) -> list[PrefillRank | DecodeRank]:
        return [rank for engine in self.engines for rank in engine.living]

    # --- the course of things ---

    def run(self, steps: int = 64) -> None:
        """Run, wind down, and reckon. Raises :class:`Violation`."""
        rng = self.world.rng
        for step in range(steps):
            self.world.net.clock.now += rng.choice((0.01, 0.05, 0.1, 0.3))
            if rng.random() < 0.3:
                self.order()
            if not self.calm and rng.random() < self.world.fault_rate:
                self.fault()
            self.turn()
            if step % 20 == 0:
                for rank in self.ranks:
                    rank.cache.inspect()
        self.wind_down()

    def turn(self) -> None:
        engines = self.engines
        for engine in self.world.rng.sample(engines, len(engines)):
            engine.turn()
        for engine in engines:
            if engine.crippled and engine.runs:
                self._replace(engine)

    def _replace(self, engine: PrefillEngine | DecodeEngine) -> None:
        """Start an engine that lost a rank anew, once what is left of it has come to its end, which must not take long."""
        if isinstance(engine, DecodeEngine) and not engine.settled:
            if self.world.net.clock() - engine.crippled_at > 40:
                raise Violation("broken rule", "asks outlive the death of another rank", engine=engine.name)
            return
        self._reckon(engine)
        for rank in list(engine.living):
            engine.kill(rank)  # type: ignore[arg-type]
        self.world.faults["restart"] += 1
        (self.start_prefill if isinstance(engine, PrefillEngine) else self.start_decode)(engine.name)
        if engine.draining:
            self.engines[[item.name for item in self.engines].index(engine.name)].draining = True

    def order(self) -> None:
        """A prompt is told to a prefill and a decode engine; now and then one of them never hears of it."""
        rng = self.world.rng
        prefill, decode = rng.choice(list(self.prefills)), rng.choice(list(self.decodes))
        free = [request for request in REQUESTS if request not in self._busy()]
        if not self.calm and rng.random() < 0.1:
            free = list(REQUESTS)  # an id that is in use: refused somewhere, or mistaken for the one before
        if not free:
            return
        order = Order(rng.choice(free), rng.choice(LENGTHS), prefill)
        kinds = ("both", "nobody asks", "nobody begins", "another length")
        heard = "both" if self.calm else rng.choices(kinds, (90, 4, 3, 3))[0]
        if heard != "both":
            self.world.faults[heard] += 1
        if heard != "nobody begins":
            self.prefills[prefill].orders.append(order)
        if heard != "nobody asks":
            length = order.length + (heard == "another length")
            self.decodes[decode].orders.append(Order(order.request, length, prefill))

    def _busy(self) -> set[str]:
        busy = {order.request for engine in self.engines for order in engine.orders}
        for prefill in self.prefills.values():
            busy |= prefill.owed | set(prefill.jobs)
        for decode in self.decodes.values():
            busy |= {pull.request for pull in decode.pulls} | set(decode.running)
            busy |= {held.running.request for held in decode.retracted}
        return busy

    # --- faults ---

    def fault(self) -> None:
        """Break something."""
        rng = self.world.rng
        actions: list[tuple[Callable[[], str], float]] = [
            (self._kill_prefill, 1), (self._kill_decode, 1), (self._stop, 3), (self._continue, 6), (self._cut, 1.5),
            (self._stall, 2), (self._abort_sender, 3), (self._abort_receiver, 3), (self._release_sender, 3),
            (self._release_receiver, 3), (self._garbage, 4 if self.garbage else 0),
        ]  # fmt: skip
        calls, weights = zip(*actions, strict=True)
        kind = rng.choices(calls, weights)[0]()
        if kind:
            self.world.faults[kind] += 1
            self.world.note("***", kind)

    def _kill(self, engine: PrefillEngine | DecodeEngine) -> None:
        """One rank of it dies; the others learn of it in their own time."""
        if not engine.crippled:
            engine.kill(self.world.rng.choice(engine.ranks))  # type: ignore[arg-type]

    def _kill_prefill(self) -> str:
        self._kill(self.world.rng.choice(list(self.prefills.values())))
        return "kill prefill"

    def _kill_decode(self) -> str:
        self._kill(self.world.rng.choice(list(self.decodes.values())))
        return "kill decode"

    def _stop(self) -> str:
        rank = self.world.rng.choice(self.ranks)
        stopped, rank.stopped = rank.stopped, True
        return "" if stopped else "stop"

    def _continue(self) -> str:
        stopped = [rank for rank in self.ranks if rank.stopped]
        if not stopped:
            return ""
        self.world.rng.choice(stopped).stopped = False
        return "continue"

    def _link(self) -> Link | None:
        links = [link for link in self.world.net.links.values() if link.open]
        return self.world.rng.choice(links) if links else None

    def _cut(self) -> str:
        link = self._link()
        if link is not None:
            link.cut()
        return "cut" if link is not None else ""

    def _stall(self) -> str:
        link = self._link()
        if link is not None:
            link.stalled_until = self.world.net.clock() + self.world.rng.uniform(0.5, 8.0)
        return "stall" if link is not None else ""

    def _prefill(self) -> tuple[PrefillEngine, Job] | None:
        engine = self.world.rng.choice(list(self.prefills.values()))
        if not engine.runs or engine.crippled or not engine.jobs:
            return None
        return engine, self.world.rng.choice(list(engine.jobs.values()))

    def _abort_sender(self) -> str:
        found = self._prefill()
        if found is not None:
            found[0].abort(found[1])
        return "abort by sender" if found is not None else ""

    def _release_sender(self) -> str:
        found = self._prefill()
        if found is None:
            return ""
        engine, job = found
        engine.release(job)
        if self.world.rng.random() < 0.5:  # its client tries again at once
            order = Order(job.request, job.length, engine.name)
            engine.orders.appendleft(order)
            self.world.rng.choice(list(self.decodes.values())).orders.append(order)
        return "release at sender"

    def _abort_receiver(self) -> str:
        engine = self.world.rng.choice(list(self.decodes.values()))
        order = engine.abort() if engine.runs and not engine.crippled else None
        if order is None:
            return ""
        if self.world.rng.random() < 0.5:  # its client tries again at once
            engine.orders.appendleft(order)
            self.prefills[order.prefill].orders.appendleft(order)
        return "abort by receiver"

    def _release_receiver(self) -> str:
        engine = self.world.rng.choice(list(self.decodes.values()))
        return "release at receiver" if engine.runs and not engine.crippled and engine.release_asked() else ""

    def _garbage(self) -> str:
        link, rng = self._link(), self.world.rng
        if link is None:
            return ""
        queue = rng.choice((link.up, link.down))
        if queue and rng.random() < 0.7:
            due, data = queue[0]
            queue[0] = (due, data[: rng.randrange(len(data))])
        else:
            link.send(queue, rng.randbytes(rng.randrange(40)))
        return "garbage"

    # --- the end ---

    def wind_down(self) -> None:
        """Mend what can be mended, begin nothing new, let what is under way end in its own time, and reckon."""
        for rank in self.ranks:
            rank.stopped = False
        for engine in self.engines:
            engine.wind_down()
        for link in self.world.net.links.values():
            link.stalled_until = 0.0
        for _ in range(28):
            self.world.net.clock.now += 0.8
            self.turn()
            if all(engine.settled for engine in self.engines):
                break
        for engine in self.engines:
            self._reckon(engine)

    def _reckon(self, engine: PrefillEngine | DecodeEngine) -> None:
        """Demand that an engine's end is in order, and add what it has seen."""
        faults = self.world.faults
        if isinstance(engine, PrefillEngine):
            engine.give_up()
        engine.reckon()
        for rank in engine.ranks:
            if isinstance(rank, PrefillRank):
                faults["read of refilled units"] += rank.memory.stale_reads
            else:
                faults["read failed"] += rank.copier.failed
                faults["read stuck"] += rank.copier.stuck


def run(seeds: Iterable[int], *, calm: bool = False, tell: Callable[[], None] = lambda: None) -> Report:
    """Run rounds; count what must never happen instead of raising it. ``tell`` is called after each."""
    total = Report()
    for seed in seeds:
        total.rounds += 1
        attempt = Round(seed, calm=calm)
        try:
            with remember_programs():
                attempt.run()
        except Exception as error:  # noqa: BLE001 -- whatever it is, it is a finding, and the other rounds go on
            total.violations[error.kind if isinstance(error, Violation) else "unexpected error"] += 1
            total.seeds.append(seed)
            if len(total.words) < 5:
                total.words.append(f"seed {seed}: {error!r}")
            total.story = total.story or list(attempt.world.log)
        total.faults.update(attempt.world.faults)
        total.outcomes.update(attempt.world.outcomes)
        tell()
    return total
