"""What the simulated processes share: orders to serve, a place in the world, and a fake device under real sides."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

from chaos.memory import Cache, Shape
from chaos.wire import Net

from kvcore.requests.spaces import INDEX_SPACES
from kvcore.spec import Ranks
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import TransferOptions

SPACES = {kind.kind: kind() for kind in INDEX_SPACES}


@dataclass(frozen=True)
class Order:
    """A prompt to serve: told to a prefill and to a decode process, independently of one another."""

    request: str
    length: int
    prefill: str


@dataclass(frozen=True)
class Prompt:
    """What was computed under one begin: the writer of each token."""

    request: str
    writers: list[int]


@dataclass
class World:
    """What every process of a round sees, and where what happens is counted.

    Attributes:
        prompts: by number of the begin; a writer's number is never used again.
        served: memory by endpoint record, also that of dead processes.
        faults, outcomes: what was done to the processes, and how their requests ended.
    """

    rng: random.Random
    net: Net
    options: TransferOptions
    fault_rate: float = 0.0
    prompts: dict[int, Prompt] = field(default_factory=dict)
    served: dict[bytes, Any] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    numbers: int = 0
    log: deque[str] = field(default_factory=lambda: deque(maxlen=400))

    def number(self) -> int:
        """A number that was never used: a writer, a begin, an instance."""
        self.numbers += 1
        return self.numbers

    def note(self, *words: Any) -> None:
        """Keep a line for whoever has to find out what went wrong."""
        self.log.append(f"{self.net.clock():9.2f} " + " ".join(map(str, words)))


class Device:
    """The store and the transport under a side, as far as it looks at them."""

    def __init__(self, shape: Shape) -> None:
        self.pools = {group: SimpleNamespace(layout=layout) for group, layout in shape.layouts().items()}

    def invalidate(self, request_id: str) -> None:
        """No step is under way when events are taken."""

    def close(self) -> None:
        """The memory is the process's."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands: ``engine`` is the name of its process group, ``start`` is new at every start of it."""

    engine: str
    start: str
    rank: int
    size: int

    @property
    def name(self) -> str:
        """Its name on the wire, which a successor has too."""
        return f"{self.engine}.{self.rank}"


class Rank:
    """One process. It takes turns while it runs, and is gone when killed.

    Attributes:
        stopped: stopped by a signal: it answers nothing and copies nothing, and does not know that time passes.
        dead: killed.
    """

    def __init__(self, world: World, place: Place, shape: Shape) -> None:
        self.world, self.place, self.shape = world, place, shape
        self.cache = Cache(shape, SPACES)
        self.stopped = self.dead = False

    @property
    def runs(self) -> bool:
        return not self.stopped and not self.dead

    def manifest(self, role: Any) -> Manifest:
        """A new instance of this rank, with an endpoint record of its own."""
        place = self.place
        instance = f"{place.name}-{self.world.number()}"
        ranks = Ranks(place.start, place.rank, place.size) if place.size > 1 else Ranks()
        return Manifest(
            instance=instance, role=role, model="m" * 64, layouts=self.shape.layouts(),
            units=self.shape.units_by_range(), transport="sim", ranks=ranks,
            endpoint=instance.encode() if role == "sender" else b"",
        )  # fmt: skip


RankT = TypeVar("RankT", bound=Rank)


class Engine(Generic[RankT]):
    """The ranks of one engine, which do the same things in the same order.

    Attributes:
        orders: what it still has to begin.
        crippled: a rank has died: nothing is begun any more, and the rest is given up once it has ended.
        draining: nothing is begun any more.
    """

    ranks: list[RankT]

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.start = f"{name}-{world.number()}"
        self.crippled = self.draining = False
        self.crippled_at = 0.0
        self.orders: deque[Order] = deque()

    @property
    def rng(self) -> random.Random:
        return self.world.rng

    @property
    def living(self) -> list[RankT]:
        return [rank for rank in self.ranks if not rank.dead]

    @property
    def runs(self) -> bool:
        """Whether the engine can do anything: a stopped rank holds the others up."""
        return all(rank.runs for rank in self.living)

    def cripple(self, rank: RankT) -> None:
        """A rank was killed."""
        rank.dead = True
        if not self.crippled:
            self.crippled, self.crippled_at = True, self.world.net.clock()
