"""Known faults of allocators and prefix sharing, each as an example that must come out right."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcore.errors import CapacityError, StaleHandleError
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import SequenceSpace

SPACES = {"sequence": SequenceSpace()}


def make(*shapes):
    """Manager with one group per ``(page size, capacity)``."""
    return Manager(
        [
            RangeBudget(
                f"g{n}",
                "pages",
                SpaceSpec(name=f"g{n}", kind="sequence", unit="page", tokens_per_unit=page),
                capacity + 1,
                0,
                (f"g{n}/kv",),
            )
            for n, (page, capacity) in enumerate(shapes)
        ],
        SPACES,
    )


def run(m, request, count):
    plan = m.plan_step([(request, count)])
    m.commit(plan)
    return plan.of("g0", "pages")


def table(m, request):
    return m.units(request, "g0", "pages").tolist()


def free(m):
    return m.stats().ranges[0].free


def test_c4_admission_counts_whole_pages():
    """C4: 4 free pages of 16; 17 tokens twice, then 1: yes, yes, no."""
    m = make((16, 4))
    answers = []
    for name, tokens in (("a", 17), ("b", 17), ("c", 1)):
        fits = m.can_admit(tokens)
        answers.append(fits)
        if fits:
            m.admit(name, tokens)
        else:
            with pytest.raises(CapacityError):
                m.admit(name, tokens)
    assert answers == [True, True, False]
    assert free(m) == 0


@pytest.mark.parametrize("prefix", [0, 3, 4, 5, 6, 7, 8])
def test_d1_retracted_suffix_then_dropped_prefix(prefix):
    """D1: the request of 11 tokens is retracted while its prefix stays shared; then the prefix goes."""
    m = make((4, 10))
    m.admit("request", 11)
    run(m, "request", 11)
    held = table(m, "request")
    m.fork("request", "prefix", prefix)
    m.release("request")
    kept = {token // 4 for token in range(prefix)}
    assert table(m, "prefix") == [held[n] for n in sorted(kept)]
    assert free(m) == 10 - len(kept)
    m.check_integrity()
    m.release("prefix")
    assert free(m) == 10
    m.check_integrity()


@pytest.mark.parametrize("prefix", [0, 3, 4, 5, 6, 7, 8])
def test_d1_prefix_extended_by_copy_on_write(prefix):
    """D1: the other way round: the request grows from the prefix, so the straddling page exists twice."""
    m = make((4, 10))
    m.admit("prefix", 8)
    run(m, "prefix", 8)
    m.truncate("prefix", prefix)
    before = free(m)
    m.fork("prefix", "request", prefix)
    assert free(m) == before
    pages = run(m, "request", 11 - prefix)
    whole, straddles = divmod(prefix, 4)
    own = table(m, "prefix")
    assert table(m, "request")[:whole] == own[:whole]
    assert pages.copies_src.tolist() == ([own[whole]] if straddles else [])
    assert pages.copies_dst.tolist() == ([table(m, "request")[whole]] if straddles else [])
    assert not set(table(m, "request")[whole:]) & set(own)
    m.truncate("request", prefix)  # retract the suffix: the copy of the straddling page stays owned
    assert free(m) == before - (1 if straddles else 0)
    m.check_integrity()
    m.release("request")
    assert free(m) == before
    m.release("prefix")
    assert free(m) == 10
    m.check_integrity()


def test_d1_truncated_inside_a_shared_page():
    """D1: both owners write into the page they share after going back behind its end: neither sees the other."""
    m = make((4, 10))
    m.admit("a", 8)
    run(m, "a", 8)
    m.fork("a", "b", 8)
    m.truncate("a", 5)
    pages = run(m, "a", 1)
    assert pages.copies_src.tolist() == [table(m, "b")[1]]
    assert table(m, "a")[0] == table(m, "b")[0]
    assert table(m, "a")[1] != table(m, "b")[1]
    assert run(m, "b", 1).copies_src.tolist() == []  # its pages are its own now, and full
    m.check_integrity()


def test_d3_recycled_pages_are_fresh_and_counts_stay_above_zero():
    """D3: lengths 0, 1, 3, 4, 5, 8 shared, freed, recycled."""
    m = make((4, 12))
    for length, pages in ((0, 0), (1, 1), (3, 1), (4, 1), (5, 2), (8, 2)):
        m.admit("a", 8)
        run(m, "a", 8)
        m.fork("a", "b", length)
        assert len(table(m, "b")) == pages
        counts = [m._ranges.find("g0", "pages").allocator.refcount(unit) for unit in table(m, "a")]
        assert counts == [2] * pages + [1] * (2 - pages)
        m.release("a")
        m.release("b")
        assert free(m) == 12
        m.check_integrity()
        m.admit("c", 8)
        fresh = m.plan_step([("c", 8)])
        assert fresh.of("g0", "pages").fresh.tolist() == table(m, "c")  # nothing of the previous tenant is kept
        m.commit(fresh)
        m.release("c")


@pytest.mark.parametrize("seed", range(2))
def test_d5_drain_returns_every_unit(seed):
    """D5: 500 random requests, finished, aborted or retracted at any moment; free == initial in every range."""
    rng = random.Random(seed)
    m = make((4, 60), (16, 30), (1, 250))
    initial = m.stats()
    waiting = [
        (f"r{n}", rng.choice([1, 3, 4, 5, 15, 16, 17, rng.randint(1, 60)]), rng.randint(0, 20)) for n in range(500)
    ]
    running: dict[str, list[int]] = {}
    drained = retracted = 0
    while waiting or running:
        while waiting and len(running) < 12 and m.can_admit(waiting[0][1], headroom_tokens=len(running)):
            name, prompt, output = waiting.pop(0)
            m.admit(name, prompt)
            running[name] = [prompt, output]
        rows = [(name, min(7, left[0]) or 1) for name, left in running.items()]
        try:
            plan = m.plan_step(rows)
        except CapacityError:
            name = rng.choice(list(running))  # retract: back to the queue, all its units with it
            left = running.pop(name)
            hold = m.hold(name)
            length = m.get(name).length
            m.release(name)
            hold.release()
            waiting.append((name, length + left[0], left[1]))
            retracted += 1
            continue
        aborted = [name for name, _ in rows if rng.random() < 0.02]
        for name in aborted:
            m.release(name)
            del running[name]
        if rng.random() < 0.05:
            m.abandon(plan)
            continue
        stale = m.commit(plan)
        assert sorted(row.request for row in stale) == sorted(aborted)
        for name, count in rows:
            if name in running:
                kind = 0 if running[name][0] else 1
                running[name][kind] -= count
                if running[name][0] <= 0 and running[name][1] <= 0:
                    m.release(name)
                    del running[name]
        if not running:
            drained += 1
            assert m.stats() == initial
        if rng.random() < 0.1:
            m.check_integrity()
    assert m.stats() == initial
    assert drained
    assert retracted
    m.check_integrity()


def test_e3_commit_skips_a_request_that_was_released_during_the_step():
    """E3: the aborted row is reported, the other row stands, and nothing of a new holder of the id changes."""
    m = make((4, 8))
    m.admit("a", 6)
    m.admit("b", 6)
    plan = m.plan_step([("a", 6), ("b", 6)])
    m.release("a")
    again = m.admit("a", 3)
    (stale,) = m.commit(plan)
    assert (stale.request, stale.generation) == ("a", plan.rows[0].generation)
    assert stale.generation != again.generation
    assert again.length == 0
    assert m.get("b").length == 6
    m.check_integrity()


def test_e3_units_an_open_step_may_still_write_go_to_nobody():
    """E3: A is released while its step is on the way: B must not get pages that A's rows are about to overwrite."""
    m = make((4, 4))
    m.admit("a", 12)
    run(m, "a", 4)
    plan = m.plan_step([("a", 6)])  # writes pages 1 and 2 of the table
    written = set(plan.of("g0", "pages").row(0).tolist()[1:])
    m.release("a")
    m.admit("b", 8)  # two pages are free: the one A only reads, and the one never given out
    assert not set(table(m, "b")) & written
    with pytest.raises(CapacityError):
        m.admit("c", 1)
    m.check_integrity()
    m.commit(plan)
    assert free(m) == 2
    m.check_integrity()


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_e3_stale_plan_after_its_end_writes_nothing(end):
    """E3: a plan that is over is refused, also when its request id is live again."""
    m = make((4, 8))
    m.admit("a", 4)
    plan = m.plan_step([("a", 4)])
    getattr(m, end)(plan)
    m.release("a")
    again = m.admit("a", 4)
    with pytest.raises(StaleHandleError):
        m.commit(plan)
    assert again.length == 0


# --- copy on write, in the order a store obeys ------------------------------------------------------------------------


class Bytes:
    """What a store does with a plan, on one token array per unit; freed and fresh memory is poison."""

    def __init__(self, m, page):
        self.m, self.page = m, page
        self.memory = np.full((m.stats().ranges[0].capacity + 1, page), -99)

    def poison(self):
        self.memory[self.m.free_units("g0", "pages")] = -99

    def step(self, plan, values):
        pages = plan.of("g0", "pages")
        for src, dst in zip(pages.copies_src, pages.copies_dst, strict=True):
            self.memory[dst] = self.memory[src]
        self.memory[pages.fresh] = 0
        for n, row in enumerate(plan.rows):
            for position in range(row.start, row.stop):
                self.memory[pages.row(n)[position // self.page], position % self.page] = values[row.request]

    def read(self, request):
        units = self.m.units(request, "g0", "pages")
        length = self.m.get(request).length
        return [int(self.memory[units[p // self.page], p % self.page]) for p in range(length)]


def test_source_of_a_copy_is_not_reused_before_the_copy():
    """The last owner but one of a page leaves it by copy-on-write while the other is released, before the step ran:
    the page must stay intact until the copy is done, however full the cache is."""
    m = make((4, 4))
    store = Bytes(m, 4)
    m.admit("a", 6)
    plan = m.plan_step([("a", 6)])
    store.step(plan, {"a": 7})
    m.commit(plan)
    m.fork("a", "b", 6)
    plan = m.plan_step([("b", 1)])
    source = plan.of("g0", "pages").copies_src.tolist()
    assert source == [table(m, "a")[1]]
    m.release("a")
    store.poison()
    m.admit("c", 4)  # takes the only free page
    store.memory[table(m, "c")] = -5  # a transfer that does not wait for steps
    assert table(m, "c") != source
    with pytest.raises(CapacityError):
        m.admit("d", 1)
    m.check_integrity()
    store.step(plan, {"b": 8})
    m.commit(plan)
    assert store.read("b") == [7] * 6 + [8]
    assert free(m) == 1
    m.check_integrity()


def test_no_unit_is_both_source_and_fresh_or_destination_of_one_plan():
    m = make((4, 6))
    m.admit("a", 6)
    run(m, "a", 6)
    m.fork("a", "b", 6)
    m.fork("a", "c", 6)
    plan = m.plan_step([("a", 3), ("b", 1)])  # copies for both, one new page for a
    pages = plan.of("g0", "pages")
    shared = table(m, "c")[1]
    assert pages.copies_src.tolist() == [shared, shared]
    assert len(set(pages.copies_dst.tolist())) == 2
    assert shared not in pages.copies_dst
    assert shared not in pages.fresh
    assert len(pages.fresh) == 1
    m.commit(plan)
    assert run(m, "c", 1).copies_src.tolist() == []  # the last owner writes in place
    m.check_integrity()


def test_half_run_and_abandoned_copies_harm_neither_owner():
    """Both owners write past a shared prefix in one step; the step dies after its writes. Each reads its own tokens."""
    m = make((4, 6))
    store = Bytes(m, 4)
    m.admit("a", 7)
    plan = m.plan_step([("a", 7)])
    store.step(plan, {"a": 7})
    m.commit(plan)
    m.fork("a", "b", 5)
    tables = table(m, "a"), table(m, "b")
    plan = m.plan_step([("a", 1), ("b", 3)])
    store.step(plan, {"a": 1, "b": 2})
    m.abandon(plan)
    store.poison()
    assert (table(m, "a"), table(m, "b")) == tables
    assert store.read("a") == [7] * 7
    assert store.read("b") == [7] * 5
    assert free(m) == 4
    m.check_integrity()


@pytest.mark.parametrize("end", ["commit", "abandon"])
def test_copying_row_released_before_its_step_ends(end):
    m = make((4, 6))
    m.admit("a", 6)
    run(m, "a", 6)
    m.fork("a", "b", 6)
    plan = m.plan_step([("b", 1)])
    m.release("b")
    m.check_integrity()
    (stale,) = getattr(m, end)(plan)
    assert stale.request == "b"
    m.check_integrity()
    assert free(m) == 4
    assert run(m, "a", 1).copies_src.tolist() == []
