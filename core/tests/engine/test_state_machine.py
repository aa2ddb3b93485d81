"""Requests of a hybrid model through the façade in any order, against lists of tokens: real bytes, all else poisoned.

The model reads its state from memory, so a slot that is stale, shared, moved on or somebody else's shows in the next
value; the oracle folds the tokens a request should have.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from by_path import load
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcore.errors import CapacityError, RequestError, UnsupportedError

kit = load(Path(__file__).parents[1] / "support" / "state_kit.py")

MAX_REQUESTS, CHECKPOINTS = 4, 2

NAMES = st.sampled_from("abcdef")


class StateMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.cache = kit.build(
            **{"cache.max_requests": MAX_REQUESTS, "cache.checkpoints": CHECKPOINTS, "cache.memory": "96KiB"}
        )
        self.tokens: dict[str, list[int]] = {}
        self.checkpoints: dict[str, dict[int, tuple[list[int], list[int]]]] = {}  # tokens and slot, by length
        self.spoiled: set[str] = set()
        self.stored: dict[str, tuple[object, list[int]]] = {}  # retracted
        self.numbers = itertools.count(1)

    def choose(self, data, names):
        return data.draw(st.sampled_from(sorted(names)))

    def ready(self):
        return sorted(set(self.tokens) - self.spoiled)

    def free(self):
        return min(part.free for part in self.cache.stats().manager.ranges if part.group != "full")

    def slot(self, name):
        return self.cache.units(name, "chain", "slots").tolist()

    def shared(self, name):
        """Whether somebody else has the state of a request too: a fork, or a checkpoint of anybody."""
        owners = [self.slot(other) for other in self.tokens if other != name]
        owners += [slot for kept in self.checkpoints.values() for _, slot in kept.values()]
        return self.slot(name) in owners

    def picture(self):
        tables = {
            (name, group): self.cache.units(name, group, item.name).tolist()
            for name in self.tokens
            for group, layout in self.cache.layouts.items()
            for item in layout.ranges
        }
        views = [(item.id, item.length, item.state, item.checkpoints) for item in self.cache.manager.requests]
        return self.cache.stats().manager, tables, views

    @initialize()
    def begin(self):
        for name in "ab":
            self.admit(name, 3, 3)

    @rule(name=NAMES, tokens=st.integers(1, 9), first=st.integers(0, 5))
    def admit(self, name, tokens, first):
        """Admit a prompt, and compute what of it comes first."""
        if name in self.tokens or len(self.tokens) == MAX_REQUESTS or not self.free():
            return
        self.cache.admit(name, tokens)
        self.tokens[name], self.checkpoints[name] = [next(self.numbers) for _ in range(min(first, tokens))], {}
        if self.tokens[name]:
            kit.run(self.cache, (name, self.tokens[name]))

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), keep=st.booleans())
    def steps(self, data, keep):
        """A few steps, as an engine makes them: with a checkpoint of everybody before them, or without."""
        if keep:
            for name in self.ready():
                self.keep(name)
        for _ in range(data.draw(st.integers(1, 3))):
            if self.ready():
                end = data.draw(st.sampled_from(["commit", "commit", "commit", "abandon"]))
                self.step(data, data.draw(st.booleans()), end)
                self.every_unit_is_accounted_for()
                self.everything_reads_back()

    def step(self, data, speculative, end):
        names = data.draw(st.lists(st.sampled_from(self.ready()), unique=True, min_size=1, max_size=3))
        rows = {name: [next(self.numbers) for _ in range(data.draw(st.integers(1, 4)))] for name in names}
        before, free, refused = self.picture(), self.free(), None
        shared = {name: self.shared(name) for name in names}
        try:
            step = self.cache.begin([(name, len(more)) for name, more in rows.items()], speculative=speculative)
        except CapacityError as error:
            refused = error
        if refused is not None:
            assert refused.fields["needed"] > refused.fields["free"]
            assert refused.fields["group"] == "full" or free < sum(len(more) + 1 for more in rows.values())
            assert self.picture() == before
            return
        kit.poison(self.cache)
        gone = data.draw(st.sampled_from([None, *names])) if data.draw(st.integers(0, 5)) == 0 else None
        if gone:
            self.release_one(gone)
        writes = 10**6 if end == "commit" else data.draw(st.integers(0, 9))
        kit.compute(self.cache, step, list(rows.values()), writes=writes)
        if end != "commit":
            step.abandon()
            for name in names:
                if name != gone and self.tokens[name] and not speculative and not shared[name]:
                    self.spoiled.add(name)
            return
        accepted = None
        if speculative:
            accepted = [data.draw(st.integers(0, len(more))) for more in rows.values()]
        stale = step.commit(accepted)
        assert [row.request for row in stale] == ([gone] if gone else [])
        for name, count in zip(names, accepted or [len(more) for more in rows.values()], strict=True):
            if name != gone:
                self.tokens[name] += rows[name][:count]

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def checkpoint(self, data):
        name = self.choose(data, self.tokens)
        if name in self.spoiled:
            before = self.picture()
            with pytest.raises(RequestError, match="overwritten the state"):
                self.cache.checkpoint(name)
            assert self.picture() == before
            return
        self.keep(name)

    def keep(self, name):
        before = self.cache.stats()
        self.cache.checkpoint(name)
        assert self.cache.stats() == before, "a checkpoint takes no unit"
        if self.tokens[name]:
            self.checkpoints[name][len(self.tokens[name])] = (list(self.tokens[name]), self.slot(name))

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), below=st.integers(0, 12))
    def drop(self, data, below):
        name = self.choose(data, self.tokens)
        self.cache.drop_checkpoints(name, below=below)
        kept = self.checkpoints[name]
        self.checkpoints[name] = {at: kept[at] for at in kept if at >= below}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def rollback(self, data):
        name = self.choose(data, [name for name in self.tokens if min(self.kept(name))] or self.tokens)
        to = data.draw(st.sampled_from(self.kept(name)) | st.integers(0, len(self.tokens[name])))
        self.take_back(name, to)

    @precondition(lambda self: any(min(self.kept(name)) for name in self.tokens))
    @rule(data=st.data())
    def back_to_a_checkpoint(self, data):
        name = self.choose(data, [name for name in self.tokens if min(self.kept(name))])
        self.take_back(name, data.draw(st.sampled_from(self.kept(name))))

    def kept(self, name):
        """Lengths below the present one that a checkpoint was taken at; else 0."""
        return [at for at in self.checkpoints[name] if at < len(self.tokens[name])] or [0]

    def take_back(self, name, to):
        length = len(self.tokens[name])
        legal = to == 0 or to in self.checkpoints[name] or (to == length and name not in self.spoiled)
        before = self.picture()
        refused = None
        try:
            self.cache.rollback(name, length - to)
        except UnsupportedError as error:
            refused = error
        if refused is not None:
            assert not legal
            assert refused.fields["checkpoints"] == sorted(self.checkpoints[name])
            assert self.picture() == before
            return
        assert legal
        tokens, _ = self.checkpoints[name].get(to, (self.tokens[name][:to], []))
        self.tokens[name] = list(tokens)
        if to < length or name in self.spoiled:
            self.checkpoints[name] = {at: kept for at, kept in self.checkpoints[name].items() if at <= to}
        self.spoiled.discard(name)

    @precondition(lambda self: self.ready())
    @rule(data=st.data(), new=NAMES)
    def fork(self, data, new):
        name = self.choose(data, self.ready())
        if new in self.tokens or len(self.tokens) == MAX_REQUESTS:
            return
        self.cache.fork(name, new, len(self.tokens[name]))
        self.tokens[new], self.checkpoints[new] = list(self.tokens[name]), {}

    @precondition(lambda self: any(self.tokens[name] for name in self.ready()))
    @rule(data=st.data())
    def retract(self, data):
        name = self.choose(data, [name for name in self.ready() if self.tokens[name]])
        if name in self.stored:
            return
        self.stored[name] = (self.cache.retract(name), self.tokens.pop(name))
        del self.checkpoints[name]

    @precondition(lambda self: set(self.stored) - set(self.tokens))
    @rule(data=st.data())
    def resume(self, data):
        name = self.choose(data, set(self.stored) - set(self.tokens))
        handle, tokens = self.stored[name]
        try:
            self.cache.resume(handle)
        except CapacityError:
            assert len(self.tokens) == MAX_REQUESTS or not self.free()
            return
        del self.stored[name]
        self.tokens[name], self.checkpoints[name] = tokens, {}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def release(self, data):
        self.release_one(self.choose(data, self.tokens))

    def release_one(self, name):
        self.cache.release(name)
        del self.tokens[name], self.checkpoints[name]
        self.spoiled.discard(name)

    @invariant()
    def every_unit_is_accounted_for(self):
        self.cache.check_integrity()
        kit.poison(self.cache)

    @invariant()
    def everything_reads_back(self):
        live = {item.id: item for item in self.cache.manager.requests}
        assert set(live) == set(self.tokens)
        for name, tokens in self.tokens.items():
            assert live[name].state in ({"spoiled"} if name in self.spoiled else {"ready", "filling"})
            assert live[name].checkpoints == tuple(sorted(self.checkpoints[name]))
            if name not in self.spoiled:
                kit.check(self.cache, name, tokens)

    @invariant()
    def null_slots_stay_zero(self):
        for group, _, layers in kit.STATES:
            for layer in layers:
                assert not self.cache.state(group).field(layer, "h", "x")[0].any()

    def teardown(self):
        for name in list(self.tokens):
            self.cache.release(name)
        self.cache.check_integrity()
        assert all(part.free == part.capacity for part in self.cache.stats().manager.ranges)
        self.cache.close()


StateMachine.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStates = StateMachine.TestCase
