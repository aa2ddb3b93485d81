"""The manager against plain Python: sets of units, lists of tokens, and a store that is a dictionary.

The store obeys each plan in the order copies, fresh, writes; all memory that is free is poison. Whatever the order of
admissions, steps, forks and releases, each live request must read back exactly the tokens it wrote.
"""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import kvcore.requests.steps
from kvcore.errors import (
    CapacityError,
    DuplicateRequestError,
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    StaleHandleError,
    UnknownRequestError,
)
from kvcore.layout import SpaceSpec
from kvcore.requests.manager import Manager, RangeBudget
from kvcore.requests.spaces import SequenceSpace
from kvcore.requests.stepplan import StepPlan

GROUPS = {"full": (4, 12, 0), "draft/full": (3, 15, 40)}  # page size, units that can be used, id of the null unit
MAX_REQUESTS = 6
MAX_TOKENS = min(page * capacity for page, capacity, _ in GROUPS.values())
NAMES = st.sampled_from("abcdefgh")


class ManagerMachine(RuleBasedStateMachine):
    most_new = 7
    many_rows = kvcore.requests.steps._MANY_ROWS

    def __init__(self):
        super().__init__()
        kvcore.requests.steps._MANY_ROWS = self.many_rows
        self.m = Manager(
            [
                RangeBudget(group, "pages", SpaceSpec(group, "sequence", "page", page), capacity + 1, first, (group,))
                for group, (page, capacity, first) in GROUPS.items()
            ],
            {"sequence": SequenceSpace()},
            max_requests=MAX_REQUESTS,
        )
        self.memory = {
            group: {first + n: ["poison"] * page for n in range(capacity + 1)}
            for group, (page, capacity, first) in GROUPS.items()
        }
        self.tokens: dict[str, list[int]] = {}  # what each live request must read
        self.reserved: dict[str, int] = {}
        self.reserved_before: dict[tuple[int, str], int] = {}
        self.filling: set[str] = set()
        self.family: dict[str, int] = {}  # requests that may share units
        self.steps: list[tuple[StepPlan, dict[str, int], dict[str, list[int]]]] = []
        self.holds: list[tuple[object, dict[str, set[int]]]] = []
        self.numbers = itertools.count(1)

    # --- the oracle's own view of what is taken ---

    def owned(self, group):
        return {unit for name in self.tokens for unit in self.m.units(name, group, "pages").tolist()}

    def blocked(self, group):
        """Units that must not be handed out: owned, held by a copy, or under an open step."""
        units = self.owned(group)
        for _, held in self.holds:
            units |= held[group]
        for plan, _, _ in self.steps:
            pages, page = plan.of(group, "pages"), GROUPS[group][0]
            units |= set(pages.copies_src.tolist())
            for n, row in enumerate(plan.rows):
                units |= set(pages.row(n).tolist()[row.start // page :])
        return units

    def count(self, group, tokens):
        return len({token // GROUPS[group][0] for token in range(tokens)})

    def has_room(self, tokens):
        return all(
            self.count(group, tokens) <= capacity - len(self.blocked(group))
            for group, (_, capacity, _) in GROUPS.items()
        )

    def in_step(self, name):
        return any(name in live for _, live, _ in self.steps)

    def needs(self, group, rows):
        """Units a step has to take: new pages, and one copy per row and page that has other owners."""
        page = GROUPS[group][0]
        owners = Counter(unit for name in self.tokens for unit in self.m.units(name, group, "pages").tolist())
        for plan, _, _ in self.steps:
            owners.update(plan.of(group, "pages").copies_src.tolist())
        total = 0
        for name, count in rows:
            start, stop = len(self.tokens[name]), len(self.tokens[name]) + count
            total += max(0, self.count(group, stop) - self.count(group, self.reserved[name]))
            table = self.m.units(name, group, "pages").tolist()
            touched = {token // page for token in range(start, stop)} & set(range(len(table)))
            total += sum(owners[table[n]] > 1 for n in touched)
        return total

    def empty(self, name):
        """Still to be filled, and nothing of it is there yet."""
        return name in self.filling and not self.tokens[name]

    def idle(self):
        return sorted(name for name in self.tokens if not self.in_step(name))

    def poison(self):
        for group, (page, capacity, first) in GROUPS.items():
            free = set(range(first + 1, first + capacity + 1)) - self.blocked(group)
            assert free == set(self.m.free_units(group, "pages").tolist())
            for unit in free:
                self.memory[group][unit] = ["poison"] * page

    # --- admission ---

    @rule(name=NAMES, tokens=st.integers(0, MAX_TOKENS + 3), external=st.booleans())
    def admit(self, name, tokens, external):
        taken = {group: self.blocked(group) for group in GROUPS}
        if tokens == 0:
            error = EmptyPromptError
        elif tokens > MAX_TOKENS:
            error = PromptTooLongError
        elif name in self.tokens:
            error = DuplicateRequestError
        elif len(self.tokens) == MAX_REQUESTS or not self.has_room(tokens):
            error = CapacityError
        else:
            error = None
        if name not in self.tokens:
            assert self.m.can_admit(tokens) == (error is None)
        if error:
            with pytest.raises(error):
                self.m.admit(name, tokens, external=external)
            return
        self.m.admit(name, tokens, external=external)
        self.tokens[name], self.reserved[name], self.family[name] = [], tokens, next(self.numbers)
        if external:
            self.filling.add(name)
        for group in GROUPS:
            units = self.m.units(name, group, "pages").tolist()
            assert len(set(units)) == len(units) == self.count(group, tokens)
            assert not set(units) & taken[group], "handed out while somebody holds it"

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def fill(self, data):
        """A transfer writes whole pages, the rest of the last one included."""
        name = data.draw(st.sampled_from(sorted(self.filling)))
        had = len(self.tokens[name])
        length = data.draw(st.integers(had, self.reserved[name]))
        new = [next(self.numbers) for _ in range(length - had)]
        self.tokens[name] += new
        for payload in self.m.payloads(name, had, length, last=True):
            page = GROUPS[payload.group][0]
            for n, unit in enumerate(payload.ids.tolist()):
                at = (payload.first + n) * page
                self.memory[payload.group][unit] = (self.tokens[name][at : at + page] + [0] * page)[:page]
        self.m.set_length(name, length)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), new=NAMES)
    def fork(self, data, new):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        prefix = data.draw(st.integers(0, len(self.tokens[name]) + 1))
        if self.in_step(name) or prefix > len(self.tokens[name]) or self.empty(name):
            error = RequestError
        elif new in self.tokens:
            error = DuplicateRequestError
        elif len(self.tokens) == MAX_REQUESTS:
            error = CapacityError
        else:
            error = None
        if error:
            with pytest.raises((RequestError, CapacityError)):
                self.m.fork(name, new, prefix)
            return
        free = self.m.stats().ranges
        self.m.fork(name, new, prefix)
        assert self.m.stats().ranges == free, "sharing takes no unit"
        self.filling.discard(name)
        self.tokens[new], self.reserved[new] = self.tokens[name][:prefix], prefix
        self.family[new] = self.family[name]

    # --- growing and shrinking ---

    @precondition(lambda self: self.idle())
    @rule(data=st.data(), more=st.integers(0, 9))
    def reserve(self, data, more):
        name = data.draw(st.sampled_from(self.idle()))
        stop = len(self.tokens[name]) + more
        before = self.m.stats()
        try:
            self.m.reserve(name, more)
        except PromptTooLongError:
            assert stop > MAX_TOKENS
            assert self.m.stats() == before
        except CapacityError:
            assert any(
                self.count(group, stop) - self.count(group, self.reserved[name]) > capacity - len(self.blocked(group))
                for group, (_, capacity, _) in GROUPS.items()
            )
            assert self.m.stats() == before
        else:
            self.reserved[name] = max(self.reserved[name], stop)

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def truncate(self, data):
        name = data.draw(st.sampled_from(self.idle()))
        length = data.draw(st.integers(0, len(self.tokens[name])))
        if self.empty(name):
            with pytest.raises(RequestError):
                self.m.truncate(name, length)
            return
        self.m.truncate(name, length)
        self.filling.discard(name)
        self.tokens[name] = self.tokens[name][:length]
        self.reserved[name] = length

    # --- steps ---

    @precondition(lambda self: self.idle())
    @rule(data=st.data())
    def plan(self, data):
        names = data.draw(st.lists(st.sampled_from(self.idle()), unique=True, max_size=4))
        rows = [(name, data.draw(st.integers(1, self.most_new))) for name in names]
        before, tables = self.m.stats(), self.tables()
        taken = {group: self.blocked(group) for group in GROUPS}
        failure: RequestError | CapacityError | None = None
        try:
            plan = self.m.plan_step(rows)
        except (RequestError, CapacityError) as error:
            failure = error
        refused = any(self.empty(name) or len(self.tokens[name]) + count > MAX_TOKENS for name, count in rows)
        assert isinstance(failure, RequestError) == refused
        if failure is not None:
            assert (self.m.stats(), self.tables()) == (before, tables)
            if isinstance(failure, CapacityError):
                group = failure.fields["group"]
                assert failure.fields["free"] == GROUPS[group][1] - len(taken[group])
                assert failure.fields["needed"] == self.needs(group, rows) > failure.fields["free"]
            return
        plan = StepPlan.decode(plan.encode())
        for group in GROUPS:
            new = {unit for name in names for unit in self.m.units(name, group, "pages").tolist()}
            new -= {unit for name in names for unit in tables[name, group]}
            assert not new & taken[group], "handed out while somebody holds it"
            pages = plan.of(group, "pages")
            assert not set(pages.copies_dst.tolist()) & set(pages.copies_src.tolist())
            assert not set(pages.fresh.tolist()) & set(pages.copies_dst.tolist())
        for name, count in rows:
            self.filling.discard(name)
            self.reserved_before[plan.step, name] = self.reserved[name]
            self.reserved[name] = max(self.reserved[name], len(self.tokens[name]) + count)
        new_tokens = {name: [next(self.numbers) for _ in range(count)] for name, count in rows}
        self.steps.append((plan, dict(rows), new_tokens))

    def tables(self):
        return {(name, group): self.m.units(name, group, "pages").tolist() for name in self.tokens for group in GROUPS}

    def obey(self, plan, new_tokens, writes):
        """The store: copies, then zeroes, then the first ``writes`` tokens of the batch."""
        for group, (page, _, _) in GROUPS.items():
            memory, pages = self.memory[group], plan.of(group, "pages")
            for src, dst in zip(pages.copies_src.tolist(), pages.copies_dst.tolist(), strict=True):
                memory[dst] = list(memory[src])
            for unit in pages.fresh.tolist():
                memory[unit] = [0] * page
            left = writes
            for n, row in enumerate(plan.rows):
                units = pages.row(n).tolist()
                for token in range(row.start, min(row.stop, row.start + left)):
                    memory[units[token // page]][token % page] = new_tokens[row.request][token - row.start]
                left = max(0, left - row.count)

    @precondition(lambda self: self.steps)
    @rule(data=st.data())
    def commit(self, data):
        plan, live, new_tokens = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        self.poison_but(plan)
        self.obey(plan, new_tokens, 10**9)
        accepted = [data.draw(st.integers(0, row.count)) for row in plan.rows]
        stale = self.m.commit(plan, accepted)
        assert [row.request for row in stale] == [row.request for row in plan.rows if row.request not in live]
        for row, count in zip(plan.rows, accepted, strict=True):
            if row.request in live:
                self.tokens[row.request] += new_tokens[row.request][:count]
                if count < row.count:  # what was taken for rejected tokens came back
                    had = self.reserved_before[plan.step, row.request]
                    self.reserved[row.request] = max(len(self.tokens[row.request]), had)
        with pytest.raises(StaleHandleError):
            self.m.commit(plan)

    @precondition(lambda self: self.steps)
    @rule(data=st.data(), ran=st.booleans())
    def abandon(self, data, ran):
        plan, live, new_tokens = self.steps.pop(data.draw(st.integers(0, len(self.steps) - 1)))
        if ran:
            self.poison_but(plan)
            self.obey(plan, new_tokens, data.draw(st.integers(0, 12)))
        stale = self.m.abandon(plan)
        assert [row.request for row in stale] == [row.request for row in plan.rows if row.request not in live]

    def poison_but(self, plan):
        """Poison what is free while the step is still open."""
        self.steps.append((plan, {}, {}))
        self.poison()
        self.steps.pop()

    # --- release, holds ---

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        generation = self.m.get(name).generation
        with pytest.raises(StaleHandleError):
            self.m.release(name, generation=generation - 1)
        self.m.release(name, generation=generation)
        del self.tokens[name], self.reserved[name]
        self.filling.discard(name)
        for _, live, _ in self.steps:
            live.pop(name, None)
        self.poison()

    @rule(name=NAMES)
    def release_unknown(self, name):
        if name not in self.tokens:
            with pytest.raises(UnknownRequestError):
                self.m.release(name)

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def hold(self, data):
        name = data.draw(st.sampled_from(sorted(self.tokens)))
        units = {group: set(self.m.units(name, group, "pages").tolist()) for group in GROUPS}
        self.holds.append((self.m.hold(name), units))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def release_hold(self, data):
        hold, _ = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        hold.release()
        self.poison()

    # --- what always holds ---

    @invariant()
    def counts_add_up(self):
        self.m.check_integrity()
        for stats in self.m.stats().ranges:
            capacity = GROUPS[stats.group][1]
            assert stats.free + stats.used + stats.quarantined == stats.capacity == capacity
            assert stats.free == capacity - len(self.blocked(stats.group))

    @invariant()
    def lengths_agree(self):
        assert {r.id: (r.length, r.reserved) for r in self.m.requests} == {
            name: (len(tokens), self.reserved[name]) for name, tokens in self.tokens.items()
        }

    @invariant()
    def nothing_is_shared_by_strangers_and_null_is_nobodys(self):
        for group, (_, _, null) in GROUPS.items():
            owner: dict[int, int] = {}
            for name in self.tokens:
                units = self.m.units(name, group, "pages").tolist()
                assert null not in units
                assert len(set(units)) == len(units)
                for unit in units:
                    assert owner.setdefault(unit, self.family[name]) == self.family[name]

    @invariant()
    def every_token_reads_back(self):
        for name, tokens in self.tokens.items():
            if self.in_step(name):
                continue  # a planned copy is not made yet
            for group, (page, _, _) in GROUPS.items():
                units = self.m.units(name, group, "pages").tolist()
                memory = self.memory[group]
                assert [memory[units[n // page]][n % page] for n in range(len(tokens))] == tokens
                # The rest of a page that was written holds no byte of an earlier owner.
                if len(tokens) % page:
                    assert "poison" not in memory[units[len(tokens) // page]]

    def teardown(self):
        for plan, _, _ in self.steps:
            self.m.abandon(plan)
        for name in list(self.tokens):
            self.m.release(name)
        for hold, _ in self.holds:
            hold.release()
        self.m.check_integrity()
        assert all(stats.free == stats.capacity for stats in self.m.stats().ranges)
        kvcore.requests.steps._MANY_ROWS = ManagerMachine.many_rows


class DecodeMachine(ManagerMachine):
    """The same with one new token a row, planned over arrays however few the rows are."""

    most_new = 1
    many_rows = 1


for machine in (ManagerMachine, DecodeMachine):
    machine.TestCase.settings = settings(
        max_examples=50, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
TestManager = ManagerMachine.TestCase
TestDecode = DecodeMachine.TestCase
