"""A prefill engine: admits or forks prompts, computes them in chunks, offers, and sometimes lets go of one."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from chaos.memory import ALL_LAYERS, Ids, Shape, Violation
from chaos.ports import SendPort
from chaos.process import Device, Engine, Order, Place, Prompt, Rank, World

from kvcore.engine.peers import SendDone, SendSide
from kvcore.errors import (
    CapacityError,
    DuplicateRequestError,
    ProtocolError,
    TransferExpiredError,
    UnknownRequestError,
)
from kvcore.requests.stepplan import StepPlan


@dataclass(eq=False)
class Job:
    """A prompt being computed, or finished and waiting for its receiver.

    Attributes:
        writers: who wrote each token.
        offered: tokens offered so far.
        admitted: ranks whose manager has it.
    """

    number: int
    request: str
    length: int
    writers: list[int] = field(default_factory=list)
    offered: int = 0
    admitted: list[PrefillRank] = field(default_factory=list)


class Served:
    """The memory of a process as its peers have it mapped; it outlives the process."""

    def __init__(self, rank: PrefillRank) -> None:
        self.arenas = rank.cache.memory.arenas
        self.gone = False
        self.stale_reads = 0
        self._manager = rank.cache.manager

    def read_from(self, group: str, units: Ids) -> None:
        """Count pieces that are read from units which are free by now: nothing of them may be accepted."""
        self.stale_reads += bool(np.isin(units, self._manager.free_units(group, "pages")).any())


class PrefillRank(Rank):
    """Serves its part of prompts to whoever asks."""

    def __init__(self, world: World, place: Place, shape: Shape) -> None:
        super().__init__(world, place, shape)
        self.memory = Served(self)
        manifest = self.manifest("sender")
        world.served[manifest.endpoint] = self.memory
        self.port = SendPort(world.net, place.name, manifest, world.options)
        device: Any = Device(shape)
        port: Any = self.port
        self.side = SendSide(port, self.cache.manager, device)
        self.owed: dict[str, int] = {}
        """Begins whose final event has not come."""

    def begin(self, job: Job) -> None:
        self.side.begin(job.request, job.length)
        self.owed[job.request] = job.number

    def abort(self, request: str) -> None:
        """Give a request up; its units go with the event."""
        with contextlib.suppress(UnknownRequestError):
            self.side.abort(request, "random")

    def release(self, request: str) -> None:
        """Take a request away without a word: what the cache does for ``release`` and ``retract``."""
        self.side.let_go(request)
        if request in self.cache.manager:
            self.cache.manager.release(request)
        self.cache.poison()


class PrefillEngine(Engine[PrefillRank]):
    """Computes prompts on all its ranks."""

    def __init__(self, world: World, name: str, shapes: Sequence[Shape]) -> None:
        super().__init__(world, name)
        places = [Place(name, self.start, number, len(shapes)) for number in range(len(shapes))]
        self.ranks = [PrefillRank(world, place, shape) for place, shape in zip(places, shapes, strict=True)]
        self.jobs: dict[str, Job] = {}

    @property
    def owed(self) -> set[str]:
        """Requests that some rank is not through with."""
        return {request for rank in self.living for request in rank.owed}

    @property
    def settled(self) -> bool:
        """Whether every begin of what is left of the engine has ended."""
        return not self.owed

    # --- turns ---

    def turn(self) -> None:
        """Let the endpoints work, and the engine do one thing."""
        for rank in self.ranks:
            if rank.runs:
                rank.port.turn()
        if not self.runs or self.rng.random() < 0.3:
            return  # events wait while the endpoints go on
        if self.crippled:
            self.give_up()
            return
        if self.rng.random() < 0.6:
            self.take_events()
        unfinished = [job for job in self.jobs.values() if job.offered < job.length]
        if self.orders and not self.draining and self.rng.random() < 0.4:
            self.begin(self.orders.popleft())
        elif unfinished:
            self.chunk(self.rng.choice(unfinished))
        self.breathe()

    def breathe(self) -> None:
        """The endpoints' threads run whenever they like, also in the middle of what an engine does."""
        for rank in self.living:
            if self.rng.random() < 0.3:
                rank.port.turn()

    def take_events(self) -> None:
        for rank in self.living:
            events = rank.side.events()
            for event in events:
                self._over(rank, event)
            if events:
                rank.cache.poison()

    def _over(self, rank: PrefillRank, event: Any) -> None:
        self.world.note(rank.place.name, event)
        number = rank.owed.pop(event.request, None)
        if number is None:
            raise Violation("broken rule", "an event of a request that is over", rank=rank.place.name, event=event)
        job = self.jobs.get(event.request)
        if isinstance(event, SendDone):
            self.world.outcomes["sent"] += 1
        else:
            self.world.outcomes["send failed"] += 1
            if isinstance(event.error, TransferExpiredError):
                self.world.faults["lease ended"] += 1
            if isinstance(event.error, ProtocolError) and not self.world.faults["garbage"]:
                raise Violation("broken rule", "a protocol error among sound peers", event=event)
        if job is not None and job.number == number:
            if event.request in rank.cache.manager:
                raise Violation("lost units", "a final event did not release its request", event=event)
            if not isinstance(event, SendDone) or all(item.owed.get(job.request) != number for item in self.living):
                del self.jobs[event.request]
            if not isinstance(event, SendDone):  # the other ranks' part is worth nothing without it
                for other in self.living:
                    if other.owed.get(event.request) == number:
                        other.abort(event.request)

    # --- what an engine does ---

    def begin(self, order: Order) -> None:
        """Admit or fork, and begin, in either order; on all ranks or on none."""
        job = Job(self.world.number(), order.request, order.length)
        parents = [p for p in self.jobs.values() if len(p.writers) >= 2 and p.request != job.request]
        parent = self.rng.choice(parents) if parents and job.length > 2 and self.rng.random() < 0.3 else None
        calls = [self._admit_all, self._begin_all]
        if self.rng.random() < 0.3:
            calls.reverse()
        try:
            for call in calls:
                call(job, parent)
                self.breathe()
        except (CapacityError, DuplicateRequestError, UnknownRequestError) as error:
            self._undo(job)
            self.world.note(self.name, "cannot begin", job.request, type(error).__name__)
            if isinstance(error, CapacityError):
                self.orders.append(order)
            return
        for rank in self.ranks:
            if rank.owed.get(job.request) != job.number or job.request not in rank.cache.manager:
                raise Violation("broken rule", "an old event ended a new request", rank=rank.place.name, job=job)
        self.jobs[job.request] = job
        self.world.prompts[job.number] = Prompt(job.request, job.writers)
        self.world.note(self.name, "begin", job)

    def _admit_all(self, job: Job, parent: Job | None) -> None:
        for rank in self.ranks:
            manager = rank.cache.manager
            if parent is None:
                manager.admit(job.request, job.length)
            else:
                prefix = manager.joint_prefix(parent.request, min(len(parent.writers), job.length - 1))
                manager.fork(parent.request, job.request, prefix)
                job.writers[:] = parent.writers[:prefix]
                self.world.faults["fork"] += 1
            job.admitted.append(rank)

    def _begin_all(self, job: Job, parent: Job | None) -> None:
        for rank in self.ranks:
            self.take_events()
            rank.begin(job)

    def _undo(self, job: Job) -> None:
        """Some rank would not: give up what the others have begun or admitted of it."""
        for rank in self.ranks:
            begun = rank.owed.get(job.request) == job.number
            if rank in job.admitted and job.request in rank.cache.manager:
                (rank.release if begun else rank.cache.manager.release)(job.request)
            elif begun:
                rank.abort(job.request)
            rank.cache.poison()

    def chunk(self, job: Job) -> None:
        """Compute some tokens on every rank and offer what became final."""
        start = len(job.writers)
        count = min(job.length - start, self.rng.choice((1, 2, 4, 5, 8)))
        last = start + count == job.length
        plans = []
        try:
            for rank in self.ranks:
                rank.side.chunk_starts(job.request, last=last)
            self.breathe()
            for rank in self.ranks:
                plans.append((rank, rank.cache.manager.plan_step([(job.request, count)])))
        except (CapacityError, UnknownRequestError) as error:
            for rank, plan in plans:
                rank.cache.manager.abandon(plan, ran=False)
            if isinstance(error, CapacityError) and self.rng.random() < 0.3:
                self.abort(job)
            return  # an unknown request has failed: its event is waiting
        for rank, plan in plans:
            self._compute(rank, plan, job, last=last)
        self.breathe()
        ends = self.rng.random() / max(self.world.fault_rate, 1e-9)
        if ends < 0.2:
            self.world.faults["released in a step"] += 1
            self.release(job)
        elif ends < 0.4:
            self.world.faults["step abandoned"] += 1
            self._abandon(job, plans)
            return
        for rank, plan in plans:
            rank.cache.manager.commit(plan)
            rank.cache.poison()  # a window leaves units behind
        if job.request not in self.jobs:
            return
        job.writers += [job.number] * count
        data = str(job.number).encode() if last else b""
        for rank in self.ranks:
            with contextlib.suppress(UnknownRequestError):
                rank.side.offer(job.request, job.offered, len(job.writers), last=last, engine_data=data)
            if last and self.rng.random() < 0.5:
                rank.cache.check(job.request, job.writers, process=self.name)
        job.offered = len(job.writers)

    def _compute(self, rank: PrefillRank, plan: StepPlan, job: Job, *, last: bool) -> None:
        """Layer by layer; where it serves anybody, the first layers are offered while the others are computed."""
        writers, rest = {job.request: job.number}, list(ALL_LAYERS)
        rank.cache.begin(plan)
        with contextlib.suppress(UnknownRequestError):
            while len(rest) > 1 and self.rng.random() < 0.4 and rank.side.layerwise(job.request):
                layers, rest = rest[:1], rest[1:]
                rank.cache.write(plan, writers, layers)
                rank.side.offer_layers(job.request, job.offered, plan.rows[0].stop, layers, last=last)
                self.world.faults["layer offered early"] += 1
                self.breathe()
        rank.cache.write(plan, writers, ALL_LAYERS if len(rest) == len(ALL_LAYERS) else rest)

    def _abandon(self, job: Job, plans: Sequence[tuple[PrefillRank, StepPlan]]) -> None:
        """The step comes to nothing, and layers of it may be with a receiver already."""
        for rank, plan in plans:
            rank.cache.manager.abandon(plan)
            rank.cache.poison()  # copies of shared units go back
            rank.side.abandoned([job.request])
        if self.rng.random() < 0.5:
            self.release(job)
        else:
            self.abort(job)

    def abort(self, job: Job) -> None:
        """Give a request up."""
        self.world.note(self.name, "abort", job.request)
        for rank in self.living:
            rank.abort(job.request)

    def release(self, job: Job) -> None:
        """Take a request away on every rank."""
        self.world.note(self.name, "release", job.request)
        for rank in self.living:
            rank.release(job.request)
        del self.jobs[job.request]

    def kill(self, rank: PrefillRank) -> None:
        """A rank is gone, with its memory still mapped by whoever reads it."""
        rank.memory.gone = True
        self.world.net.died(sender=rank.place.name)
        self.cripple(rank)

    def wind_down(self) -> None:
        """Begin no more; finish what is begun."""
        self.draining = True

    def give_up(self) -> None:
        """Let go of everything; what is left of the engine holds nothing then."""
        for job in list(self.jobs.values()):
            self.release(job)
        for request in self.owed:
            for rank in self.living:
                rank.abort(request)
        self.take_events()

    def reckon(self) -> None:
        """Demand that every begin has ended and every unit is free."""
        self.take_events()
        for rank in self.living:
            session = rank.port.session
            if rank.owed or session.requests() or session.held_units():
                raise Violation("broken rule", "a request is held for ever", rank=rank.place.name, owed=rank.owed)
            rank.cache.demand_empty(rank.place.name)
