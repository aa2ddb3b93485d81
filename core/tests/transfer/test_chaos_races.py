"""Races that a random course meets too rarely, each written down; and every fault at every other step of a round.

Time, wire and copier do what the test says: one prefill and one decode engine of one or two ranks each, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvcore.errors import CapacityError

RANKS = [(1, 1), (1, 2), (2, 1), (2, 2)]


class Duel:
    """A prefill and a decode engine; messages arrive at once, and what is not paused takes its turns.

    Attributes:
        paused: ranks of the decode engine whose copier does not move.
    """

    def __init__(self, chaos: Any, ranks: tuple[int, int], *, seed: int = 1) -> None:
        self.chaos = chaos
        self.round = chaos.Round(seed, calm=True, engines=(1, 1), ranks=ranks)
        self.world = self.round.world
        self.world.net.delay = 0.0
        self.paused: set[int] = set()
        self.pump()  # hellos

    @property
    def prefill(self) -> Any:
        return self.round.prefills["p0"]

    @property
    def decode(self) -> Any:
        return self.round.decodes["d0"]

    def pump(self, seconds: float = 0.0, *, times: int = 6) -> None:
        """Let the endpoints and copiers work, and take events; engines do nothing of their own."""
        for _ in range(times):
            self.world.net.clock.now += seconds / times
            for rank in self.prefill.ranks:
                if rank.runs:
                    rank.port.turn()
            for number, rank in enumerate(self.decode.ranks):
                if rank.runs:
                    if number not in self.paused:
                        rank.copier.turn(everything=True)
                    for line in rank.all_lines:
                        line.port.turn()
            for engine in (self.prefill, self.decode):
                engine.take_events()

    def begin(self, request: str = "x", length: int = 13) -> Any:
        """Both engines hear of a request; returns the prefill engine's job."""
        order = self.chaos.Order(request, length, "p0")
        self.prefill.begin(order)
        self.decode.ask(order)
        self.pump()
        return self.prefill.jobs[request]

    def compute(self, job: Any) -> None:
        while job.offered < job.length:
            self.prefill.chunk(job)

    def reckon(self) -> None:
        """Nothing is held by anybody, and everything has ended."""
        self.pump(12.0, times=24)
        for engine in (self.prefill, self.decode):
            engine.reckon()

    def outcomes(self) -> dict[str, int]:
        return {key: count for key, count in self.world.outcomes.items() if count}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_prompt_arrives_on_every_rank(chaos: SimpleNamespace, ranks: tuple[int, int]) -> None:
    duel = Duel(chaos, ranks)
    duel.compute(duel.begin())
    duel.pump()
    assert duel.outcomes() == {"sent": ranks[0], "received": 1}
    duel.reckon()


@pytest.mark.parametrize("ranks", RANKS)
def test_lease_ends_units_are_refilled_and_the_read_completes(chaos: SimpleNamespace, ranks: tuple[int, int]) -> None:
    """The copier is stuck until the sender's units hold another request: the bytes are wrong, and nobody keeps them."""
    duel = Duel(chaos, ranks)
    duel.paused = set(range(ranks[1]))
    duel.compute(duel.begin("x", 13))
    duel.pump()
    assert duel.decode.ranks[0].lines["p0"].port.session.reads_in_flight
    # A read older than read_timeout_s renews no lease; the decode side notices nothing by itself.
    duel.pump(duel.world.options.read_timeout_s + duel.world.options.lease_s, times=40)
    assert duel.world.faults["lease ended"] == ranks[0]
    other = duel.chaos.Order("y", 21, "p0")
    duel.prefill.begin(other)
    duel.compute(duel.prefill.jobs["y"])
    duel.paused.clear()
    duel.pump()
    assert duel.outcomes()["receive failed"] == ranks[1]
    assert "received" not in duel.outcomes()
    duel.prefill.abort(duel.prefill.jobs["y"])
    duel.reckon()


@pytest.mark.parametrize("senders", [1, 2])
def test_a_rank_dies_after_another_has_pulled(chaos: SimpleNamespace, senders: int) -> None:
    """One rank has every byte, the other dies before it has: no rank keeps the request."""
    duel = Duel(chaos, (senders, 2))
    duel.paused = {1}
    duel.compute(duel.begin())
    duel.pump()
    first, second = duel.decode.ranks
    assert not first.lines["p0"].port.session.reads_in_flight
    assert first.lines["p0"].asked, "it waits for the other rank"
    assert duel.outcomes() == {}
    duel.decode.kill(second)
    duel.pump(2 * duel.world.options.heartbeat_s, times=12)  # a sender learns it when it next says something
    assert duel.outcomes() == {"send failed": senders, "receive failed": 1}
    assert not first.lines["p0"].asked
    duel.reckon()


@pytest.mark.parametrize("senders", [1, 2])
def test_a_rank_that_is_done_drops_what_another_cannot_accept(chaos: SimpleNamespace, senders: int) -> None:
    """Every rank has pulled, one accepts, and the other's conversation breaks before the commit reaches it."""
    duel = Duel(chaos, (senders, 2))
    duel.paused = {1}
    duel.compute(duel.begin())
    duel.pump()
    second = duel.decode.ranks[1]
    second.copier.turn(everything=True)
    for line in second.all_lines:
        line.port.turn()
    for rank in duel.prefill.ranks:
        rank.port.turn()  # commits to both
    for link in second.lines["p0"].port.links:
        link.cut()
    duel.pump(1.0)
    assert duel.outcomes()["dropped for another rank"] == 1
    assert "received" not in duel.outcomes()
    duel.pump(12.0, times=24)
    duel.reckon()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_sender_rank_dies_before_it_commits(chaos: SimpleNamespace, ranks: tuple[int, int]) -> None:
    duel = Duel(chaos, ranks)
    duel.paused = set(range(ranks[1]))
    duel.compute(duel.begin())
    duel.pump()
    duel.prefill.kill(duel.prefill.ranks[-1])
    duel.pump(1.0)
    duel.paused.clear()  # the memory of the dead is still mapped: the reads end, and are worth nothing
    duel.pump(1.0)
    duel.prefill.give_up()
    assert duel.outcomes()["receive failed"] == ranks[1]
    assert "received" not in duel.outcomes()
    duel.reckon()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_request_is_taken_away_between_its_begin_and_its_first_offer(
    chaos: SimpleNamespace, ranks: tuple[int, int]
) -> None:
    """Its transfer ends, and the event of that leaves the next request of the same id alone."""
    duel = Duel(chaos, ranks)
    job = duel.begin()
    duel.prefill.release(job)
    order = duel.chaos.Order("x", 9, "p0")
    for rank in duel.prefill.ranks:  # the events of the first wait
        assert job.request in rank.owed
    duel.prefill.begin(order)
    assert duel.outcomes() == {"send failed": ranks[0]}
    duel.pump()
    assert duel.outcomes() == {"send failed": ranks[0], "receive failed": ranks[1]}
    duel.decode.ask(order)
    duel.compute(duel.prefill.jobs["x"])
    duel.pump()
    assert duel.outcomes()["received"] == 1
    duel.reckon()


def _ghosts(duel: Duel) -> None:
    """The receiver has everything and dies; its successor asks for the same, and its last words arrive after that."""
    job = duel.begin("x", 13)
    duel.compute(job)
    rank = duel.decode.ranks[0]
    for _ in range(2):
        rank.copier.turn(everything=True)
        rank.lines["p0"].port.turn()
    link = duel.world.net.links[b"d0.0", "p0.0"]
    assert link.up, "its report is on the way"
    duel.world.net.rng = SimpleNamespace(choice=lambda _: 2.0, random=lambda: 0.0)
    duel.decode.kill(rank)
    duel.round.start_decode("d0")
    duel.world.net.rng = duel.world.rng
    duel.pump()
    duel.paused = {0}
    again = duel.begin("x", 13)
    duel.prefill.chunk(again)
    duel.pump(3.0)  # now they arrive
    duel.compute(again)
    duel.paused.clear()
    duel.pump(1.0)


def test_messages_of_a_dead_process_are_not_its_successors(chaos: SimpleNamespace) -> None:
    """Restart with a new instance id: same name, same request, same attempt number; only the instance differs."""
    duel = Duel(chaos, (1, 1))
    _ghosts(duel)
    assert duel.outcomes() == {"send failed": 1, "sent": 1, "received": 1}
    duel.reckon()


def _again_at_once(duel: Duel) -> None:
    """An offer is on its way when its request is aborted and asked for again."""
    job = duel.begin("x", 13)
    duel.prefill.chunk(job)
    for rank in duel.prefill.ranks:
        rank.port.turn()
    assert any(link.down for link in duel.world.net.links.values())
    order = duel.decode.abort()
    duel.decode.take_events()
    duel.decode.ask(order)
    duel.pump()
    duel.prefill.begin(order)
    duel.compute(duel.prefill.jobs["x"])
    duel.pump()


@pytest.mark.parametrize("ranks", RANKS)
def test_an_answer_to_an_earlier_attempt_is_not_one_to_this(chaos: SimpleNamespace, ranks: tuple[int, int]) -> None:
    duel = Duel(chaos, ranks)
    _again_at_once(duel)
    assert duel.outcomes() == {
        "send failed": ranks[0], "receive failed": ranks[1], "sent": ranks[0], "received": 1
    }  # fmt: skip
    duel.reckon()


@pytest.mark.parametrize(("name", "race"), [("trusts_any_instance", _ghosts), ("ignores_attempts", _again_at_once)])
def test_mutants_that_a_random_course_hardly_notices(
    chaos: SimpleNamespace, name: str, race: Callable[[Duel], None]
) -> None:
    mutant = next(item for item in chaos.MUTANTS if item.__name__ == name)
    duel = Duel(chaos, (1, 1))
    with mutant(), pytest.raises(chaos.Violation):
        race(duel)


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1)])
def test_receivers_that_never_pull_stop_admission_until_leases_end(
    chaos: SimpleNamespace, ranks: tuple[int, int]
) -> None:
    """Eight decode engines ask and are stopped: finished prompts fill the cache, nothing more is admitted, none is lost."""
    round_ = chaos.Round(3, calm=True, engines=(1, 8), ranks=ranks)
    net, prefill = round_.world.net, round_.prefills["p0"]
    net.delay = 0.0
    decodes = list(round_.decodes.values())

    def pump(seconds: float) -> None:
        for _ in range(12):
            net.clock.now += seconds / 12
            for rank in prefill.ranks:
                rank.port.turn()
            for rank in round_.ranks:
                if rank.runs and rank not in prefill.ranks:
                    rank.turn()
            for engine in round_.engines:
                if engine.runs:
                    engine.take_events()

    pump(0.0)
    orders = [chaos.Order(f"r{number}", 13, "p0") for number in range(len(decodes))]
    for engine, order in zip(decodes, orders, strict=True):
        engine.ask(order)
    pump(0.0)
    for rank in round_.ranks:
        rank.stopped = rank not in prefill.ranks
    managers = [rank.cache.manager for rank in prefill.ranks]
    sides = [rank.side for rank in prefill.ranks]
    assert not any(side.over_budget(0.5) for side in sides)
    admitted = []
    for order in orders:
        if not all(manager.can_admit(order.length) for manager in managers):
            break
        prefill.begin(order)
        while prefill.jobs[order.request].offered < order.length:
            prefill.chunk(prefill.jobs[order.request])
        admitted.append(order.request)
    assert 2 <= len(admitted) < len(orders)
    assert all(rank.port.session.held_units() for rank in prefill.ranks)
    for side in sides:
        over = side.over_budget(0.5)
        assert over is not None
        assert over["held_units"] > over["limit_units"]
    with pytest.raises(CapacityError):
        managers[0].admit("one more", 13)
    pump(round_.world.options.lease_s + 1)
    assert all(manager.can_admit(13) for manager in managers), "leases have ended, or their receivers are lost"
    assert not any(side.over_budget(0.5) for side in sides)
    assert round_.world.outcomes["send failed"] == ranks[0] * len(admitted)
    for rank in round_.ranks:
        rank.stopped = False
    pump(round_.world.options.ask_timeout_s + 2)
    for engine in decodes:
        for rank in engine.ranks:
            rank.tend_lines(again=True)
    pump(1.0)
    order = chaos.Order("afterwards", 13, "p0")
    decodes[0].ask(order)
    prefill.begin(order)
    while prefill.jobs[order.request].offered < order.length:
        prefill.chunk(prefill.jobs[order.request])
    for _ in range(20):
        pump(0.1)
    assert round_.world.outcomes["received"] == 1
    for engine in round_.engines:
        engine.reckon()


FAULTS: dict[str, Callable[[Any], Any]] = {
    "abort by sender": lambda r: r._abort_sender(),
    "abort by receiver": lambda r: r._abort_receiver(),
    "release at sender": lambda r: r._release_sender(),
    "release at receiver": lambda r: r._release_receiver(),
    "kill prefill": lambda r: r._kill_prefill(),
    "kill decode": lambda r: r._kill_decode(),
    "cut": lambda r: r._cut(),
    "stall": lambda r: r._stall(),
    "stop": lambda r: r._stop(),
}


@pytest.mark.slow  # a few hundred short rounds
@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_all_through_a_round(chaos: SimpleNamespace, fault: str, ranks: tuple[int, int]) -> None:
    """The same round over and over, with the fault a little later each time."""
    happened = 0
    for step in range(0, 28, 2):
        attempt = chaos.Round(7, calm=True, engines=(1, 1), ranks=ranks)
        with chaos.remember_programs():
            for now in range(30):
                attempt.world.net.clock.now += 0.1
                if now % 6 == 0:
                    attempt.order()
                if now == step:
                    happened += bool(FAULTS[fault](attempt))
                attempt.turn()
            for rank in attempt.ranks:
                rank.stopped = False
            attempt.wind_down()
    assert happened > 5
