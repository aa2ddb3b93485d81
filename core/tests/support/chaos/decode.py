"""A decode engine: asks for prompts, decodes them, forks, retracts, resumes, and sometimes lets go of one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.memory import LAYERS, Ids, Shape, Violation
from chaos.ports import ReceivePort
from chaos.process import Device, Engine, Order, Place, Rank, World
from chaos.wire import Connection, Copier

from kvcore.engine.peers import ReceiveDone, ReceiveFailed, ReceiveQuiet, ReceiveSide
from kvcore.errors import (
    CapacityError,
    DuplicateRequestError,
    PeerLostError,
    ProtocolError,
    UnknownRequestError,
)

Over = ReceiveDone | ReceiveFailed | ReceiveQuiet


@dataclass(eq=False)
class Pull:
    """A request being pulled by all ranks: it runs once all of them have it, and is dropped when one of them has not.

    Attributes:
        begin: number of the begin that the first rank to be done has received.
        done: ranks that have it.
        failed: some rank does not get it.
        taken: the engine took it away meanwhile.
    """

    order: Order
    begin: int | None = None
    done: set[int] = field(default_factory=set)
    failed: bool = False
    taken: bool = False

    @property
    def request(self) -> str:
        return self.order.request

    @property
    def length(self) -> int:
        return self.order.length


@dataclass(eq=False)
class Ask:
    """One rank's part of a pull.

    Attributes:
        units: where it lands.
        waiting: it has failed while a read was still under way.
    """

    pull: Pull
    units: dict[str, list[int]]
    waiting: bool = False


@dataclass(eq=False)
class Running:
    """A request that decodes, and the writer of each of its tokens."""

    request: str
    writers: list[int]
    stop: int


@dataclass(eq=False)
class Retracted:
    """A request off the device: by rank, ``(group, first logical unit, count, entries)``."""

    running: Running
    saved: list[list[tuple[str, int, int, dict[str, Any]]]]


class Line:
    """A conversation with all ranks of one prefill engine: its port, its side, what is asked for on it."""

    def __init__(self, port: ReceivePort, side: ReceiveSide) -> None:
        self.port, self.side = port, side
        self.asked: dict[str, Ask] = {}


class DecodeRank(Rank):
    """Pulls its part of prompts. ``senders``: by prefill engine, the wire names of its ranks."""

    def __init__(self, world: World, place: Place, shape: Shape, senders: Mapping[str, Sequence[str]]) -> None:
        super().__init__(world, place, shape)
        self.senders = senders
        self.copier = Copier(world.net, self.claim, fault_rate=world.fault_rate / 2, stuck_s=world.options.lease_s * 2)
        self.owner: dict[str, dict[int, Ask]] = {group: {} for group in LAYERS}
        self.lines: dict[str, Line] = {}
        self.old: list[Line] = []
        for engine in senders:
            self.connect(engine)

    @property
    def all_lines(self) -> list[Line]:
        return [*self.old, *self.lines.values()]

    def connect(self, engine: str) -> None:
        """Connect anew: every conversation is an instance of its own."""
        world, arenas = self.world, self.cache.memory.arenas
        port: Any = ReceivePort(
            world.net, self.place.name.encode(), self.senders[engine], self.manifest("receiver"), world.options,
            lambda record: Connection(self.copier, world.served[record], arenas),
        )  # fmt: skip
        device: Any = Device(self.shape)
        self.lines[engine] = Line(port, ReceiveSide(port, self.cache.manager, device))

    def claim(self, group: str, units: Ids) -> list[Ask]:
        """Who is owed the bytes that land in these units. Nobody may write into any other."""
        owners = [self.owner[group].get(unit) for unit in units.tolist()]
        if None in owners:
            raise Violation("wrong bytes", "a read lands in units that nobody waits for", rank=self.place.name,
                            group=group, units=units.tolist())  # fmt: skip
        return [owner for owner in owners if owner is not None]

    def turn(self, *, hurry: bool = False) -> None:
        """Let the copier and the endpoints work."""
        self.copier.turn(everything=hurry)
        for line in self.all_lines:
            line.port.turn()

    def tend_lines(self, *, again: bool) -> None:
        """Connect again where a conversation is over; close it once nothing of it is under way."""
        for engine, line in list(self.lines.items()):
            if line.port.session.failure is not None and again:
                self.old.append(line)
                self.connect(engine)
        for line in list(self.old):
            if line.port.quiet and not line.asked:
                line.side.close()
                self.old.remove(line)

    def ask(self, engine: str, pull: Pull) -> None:
        line = self.lines[engine]
        line.side.ask(pull.request, pull.length)
        self.cache.poison()
        tables = self.cache.manager.destinations(pull.request, pull.length)
        ask = Ask(pull, {group: [u for u in table.tolist() if u >= 0] for (group, _), table in tables.items()})
        line.asked[pull.request] = ask
        for group, units in ask.units.items():
            if any(unit in self.owner[group] for unit in units):
                raise Violation("wrong bytes", "units were handed out while a read is under way", ask=ask)
            self.owner[group].update(dict.fromkeys(units, ask))

    def abort(self, pull: Pull) -> None:
        """Give a pull up here; its units go with the event."""
        for line in self.all_lines:
            ask = line.asked.get(pull.request)
            if ask is not None and ask.pull is pull:
                with contextlib.suppress(UnknownRequestError):
                    line.side.abort(pull.request, "random")

    def let_go(self, request: str) -> None:
        """What the cache does for ``release`` and ``retract``."""
        for line in self.all_lines:
            line.side.let_go(request)
        self.cache.manager.release(request)
        self.cache.poison()


class DecodeEngine(Engine[DecodeRank]):
    """Decodes on all its ranks what all of them have received."""

    def __init__(self, world: World, name: str, shapes: Sequence[Shape], senders: Mapping[str, Sequence[str]]) -> None:
        super().__init__(world, name)
        self.running: dict[str, Running] = {}
        self.retracted: list[Retracted] = []
        self.pulls: list[Pull] = []
        places = [Place(name, self.start, number, len(shapes)) for number in range(len(shapes))]
        self.ranks = [DecodeRank(world, place, shape, senders) for place, shape in zip(places, shapes, strict=True)]

    # --- turns ---

    def turn(self) -> None:
        """Let the copiers and the endpoints work, and the engine do one thing."""
        for rank in self.ranks:
            if rank.runs:
                rank.turn(hurry=self.draining)
        if not self.runs or self.rng.random() < 0.3:
            return
        self.take_events()
        for rank in self.living:
            rank.tend_lines(again=not self.draining and not self.crippled)
        if self.draining or self.crippled:
            return
        choice = self.rng.random()
        if self.orders and choice < 0.4:
            self.ask(self.orders.popleft())
        elif choice < 0.5 and self.retracted:
            self.resume()
        elif choice < 0.55 and self.running:
            self.fork()
        elif choice < 0.6 and self.running:
            self.retract(self.rng.choice(list(self.running.values())))
        elif self.running:
            self.step()
        self.breathe()

    def breathe(self) -> None:
        """Endpoints and copiers run whenever they like, also in the middle of what an engine does."""
        for rank in self.living:
            if self.rng.random() < 0.3:
                rank.turn()

    def take_events(self) -> None:
        for number, rank in enumerate(self.ranks):
            if rank.dead:
                continue
            over = False
            for line in rank.all_lines:
                for event in line.side.events():
                    if isinstance(event, Over):
                        self.world.note(rank.place.name, event)
                        self._over(number, line, event)
                        over = True
            if over:
                rank.cache.poison()

    def _over(self, number: int, line: Line, event: Over) -> None:
        rank, ask = self.ranks[number], line.asked.get(event.request)
        if ask is None or ask.waiting != isinstance(event, ReceiveQuiet):
            raise Violation("broken rule", "an event of a request that is over", rank=rank.place.name, event=event)
        if isinstance(event, ReceiveFailed):
            self.world.outcomes["receive failed"] += 1
            if isinstance(event.error, ProtocolError) and not self.world.faults["garbage"]:
                raise Violation("broken rule", "a protocol error among sound peers", event=event)
            self._fail(ask.pull)
            if not event.quiet:
                self.world.faults["read outlived its request"] += 1
                ask.waiting = True
                return
        del line.asked[event.request]
        for group, units in ask.units.items():
            for unit in units:
                del rank.owner[group][unit]
        if isinstance(event, ReceiveDone):
            self._received(number, ask.pull, event)
        elif not ask.pull.taken and event.request in rank.cache.manager:
            raise Violation("lost units", "a failed request was not released", rank=rank.place.name, event=event)

    def _received(self, number: int, pull: Pull, event: ReceiveDone) -> None:
        """A rank has its part: it is checked at once, and kept if every rank has the same."""
        if not event.engine_data:
            raise Violation("broken rule", "a request was accepted that nobody had committed", event=event)
        rank, begin = self.ranks[number], int(event.engine_data)
        prompt = self.world.prompts[begin]
        if (event.request, event.num_tokens) != (
            prompt.request,
            len(prompt.writers),
        ) or event.num_tokens != pull.length:
            raise Violation("broken rule", "what was received is not what was asked for", event=event, pull=pull)
        if pull.begin not in (None, begin):
            raise Violation("wrong bytes", "two ranks have received different prompts", event=event, pull=pull)
        pull.begin = begin
        if pull.taken:
            return
        rank.cache.check(event.request, prompt.writers, rank=rank.place.name, begin=begin)
        pull.done.add(number)
        if pull.failed:
            rank.let_go(event.request)
        elif len(pull.done) == len(self.ranks):
            self.pulls.remove(pull)
            self.world.outcomes["received"] += 1
            stop = len(prompt.writers) + self.rng.choice((0, 1, 5, 9))
            self.running[event.request] = Running(event.request, list(prompt.writers), stop)

    def _fail(self, pull: Pull) -> None:
        """A pull fails as a whole: no rank keeps its part."""
        if pull.failed:
            return
        pull.failed = True
        if pull in self.pulls:
            self.pulls.remove(pull)
        for number, rank in enumerate(self.ranks):
            if rank.dead or pull.taken:
                continue
            if number in pull.done:
                self.world.outcomes["dropped for another rank"] += 1
                rank.let_go(pull.request)
            else:
                rank.abort(pull)

    # --- what an engine does ---

    def ask(self, order: Order) -> None:
        """Ask on all ranks, or on none."""
        if not all(rank.lines[order.prefill].port.session.connected for rank in self.ranks):
            self.orders.append(order)
            return
        self.take_events()  # an ask sees to the units of what is over; the book must have heard of it
        pull = Pull(order)
        self.pulls.append(pull)
        try:
            for rank in self.ranks:
                rank.ask(order.prefill, pull)
        except (CapacityError, DuplicateRequestError, PeerLostError) as error:
            self._fail(pull)
            for rank in self.ranks:
                rank.cache.poison()
            if isinstance(error, CapacityError):
                if self.running:
                    self.retract(self.rng.choice(list(self.running.values())))
                self.orders.append(order)
            return
        self.world.note(self.name, "ask", pull)

    def step(self) -> None:
        """Decode one token of some requests."""
        rows = self.rng.sample(list(self.running.values()), self.rng.randint(1, min(3, len(self.running))))
        for row in [row for row in rows if len(row.writers) >= row.stop]:
            self.finish(row)
            rows.remove(row)
        if not rows:
            return
        plans = []
        try:
            for rank in self.ranks:
                plans.append((rank, rank.cache.manager.plan_step([(row.request, 1) for row in rows])))
        except CapacityError:
            for rank, plan in plans:
                rank.cache.manager.abandon(plan, ran=False)
            self.retract(self.rng.choice(rows))
            return
        writer = self.world.number()
        for rank, plan in plans:
            rank.cache.begin(plan)
            rank.cache.write(plan, dict.fromkeys((row.request for row in rows), writer))
        self.breathe()
        for rank, plan in plans:
            rank.cache.manager.commit(plan)
            rank.cache.poison()  # a window leaves units behind
        for row in rows:
            row.writers.append(writer)
        if self.rng.random() < 0.3:
            self.check(self.rng.choice(rows))

    def check(self, running: Running) -> None:
        for rank in self.ranks:
            rank.cache.check(running.request, running.writers, rank=rank.place.name)

    def fork(self) -> None:
        parent = self.rng.choice(list(self.running.values()))
        at_most = len(parent.writers) - self.rng.choice((0, 0, 1, 3))
        prefix = self.ranks[0].cache.manager.joint_prefix(parent.request, at_most)
        name = f"fork-{self.world.number()}"
        if prefix > 0:
            for rank in self.ranks:
                rank.cache.manager.fork(parent.request, name, prefix)
            self.running[name] = Running(name, parent.writers[:prefix], prefix + 6)
            self.world.faults["fork"] += 1

    def retract(self, running: Running) -> None:
        """Off the device: every unit is copied out, then given back."""
        saved = []
        for rank in self.ranks:
            payloads = rank.cache.manager.payloads(running.request, 0, len(running.writers), last=True)
            saved.append([(p.group, p.first, p.num_units, rank.cache.memory.take(p.group, p.ids)) for p in payloads])
            rank.let_go(running.request)
        del self.running[running.request]
        self.retracted.append(Retracted(running, saved))
        self.world.faults["retract"] += 1

    def resume(self) -> None:
        """Back into other units, on all ranks or on none."""
        held = self.rng.choice(self.retracted)
        running, length = held.running, len(held.running.writers)
        for number, rank in enumerate(self.ranks):
            try:
                rank.cache.manager.admit(running.request, length, external=True)
            except (CapacityError, DuplicateRequestError):
                for other in self.ranks[:number]:
                    other.cache.manager.release(running.request)
                    other.cache.poison()
                return
            tables = rank.cache.manager.destinations(running.request, length)
            rank.cache.poison()
            for group, first, count, entries in held.saved[number]:
                rank.cache.memory.put(group, tables[group, "pages"][first : first + count], entries)
            rank.cache.manager.set_length(running.request, length)
        self.retracted.remove(held)
        self.running[running.request] = running
        self.check(running)

    def finish(self, running: Running) -> None:
        self.check(running)
        for rank in self.ranks:
            rank.let_go(running.request)
        del self.running[running.request]
        self.world.outcomes["decoded"] += 1

    def abort(self) -> Order | None:
        """Give one pull up."""
        if not self.pulls:
            return None
        pull = self.rng.choice(self.pulls)
        self.world.note(self.name, "abort", pull)
        self._fail(pull)
        return pull.order

    def release_asked(self) -> bool:
        """Take one request away while it is being pulled."""
        if not self.pulls:
            return False
        pull = self.rng.choice(self.pulls)
        self.world.note(self.name, "release", pull)
        self.pulls.remove(pull)
        pull.failed = pull.taken = True
        for rank in self.living:
            if pull.request in rank.cache.manager:
                rank.let_go(pull.request)
        return True

    def kill(self, rank: DecodeRank) -> None:
        """A rank is gone, with its memory and its reads."""
        self.world.net.died(peer=rank.place.name.encode())
        self.cripple(rank)

    def wind_down(self) -> None:
        """Ask no more; let everything that is under way end."""
        self.draining = True

    @property
    def settled(self) -> bool:
        """Whether every ask of what is left of the engine has ended."""
        return not any(line.asked for rank in self.living for line in rank.all_lines)

    def reckon(self) -> None:
        """Demand that every ask has ended and, with everything released, that every unit is free."""
        self.take_events()
        for rank in self.living:
            rank.tend_lines(again=False)
            for line in rank.all_lines:
                if line.asked or line.port.session.requests() or line.port.session.reads_in_flight:
                    raise Violation("broken rule", "a receive never ended", rank=rank.place.name, asked=line.asked)
        if not self.crippled:
            for pull in self.pulls:
                raise Violation("broken rule", "some rank never heard of a pull again", pull=pull)
            for running in list(self.running.values()):
                self.finish(running)
        for rank in self.living:
            for request in rank.cache.manager.requests:  # what an engine without all its ranks had: no use to anybody
                rank.let_go(request.id)
            rank.cache.demand_empty(rank.place.name)
