"""Real processes with the public API, killed, stopped and restarted while prompts move: bytes are right, units come back."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

FAULTS = (
    "none", "kill prefill", "kill decode", "stop prefill", "stop decode", "pause prefill", "pause decode", "kill both",
)  # fmt: skip
"""A stop outlasts the peers' patience, a pause does not."""
PATIENCE_S, PAUSE_S = 5.0, 0.4


class Child:
    """A process and the pipe that it obeys."""

    def __init__(self, context: Any, target: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> Any:
        assert self._pipe.poll(60), "the process does not answer"
        return self._pipe.recv()

    def do(self, *command: Any) -> Any:
        self.send(*command)
        return self.answer()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    @property
    def alive(self) -> bool:
        return bool(self.process.is_alive())

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.process.join(10)

    def close(self) -> None:
        if self.alive:
            self.signal(signal.SIGCONT)
            self.kill()
        self._pipe.close()


class Pair:
    """A prefill and a decode process, started again when they are dead."""

    def __init__(self, real: Any) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["kvcore.engine.cache", "kvcore.engine.peers"])  # torch is slow to import
        self._real = real
        self.children: dict[str, Child] = {}
        self.address = ""
        self.starts = 0

    def start(self) -> None:
        """Start whoever is dead; connect anew."""
        for role in ("prefill", "decode"):
            if role not in self.children or not self.children[role].alive:
                if role in self.children:
                    self.children.pop(role).close()
                child = self.children[role] = Child(self._context, getattr(self._real, role))
                self.starts += 1
                if role == "prefill":
                    self.address = child.answer()
        assert self.children["decode"].do("connect", self.address) == "connected"

    def break_it(self, fault: str) -> None:
        kind, _, who = fault.partition(" ")
        roles = ("prefill", "decode") if who == "both" else (who,)
        if kind == "kill":
            for role in roles:
                self.children[role].kill()
        elif kind in ("stop", "pause"):
            self.children[who].signal(signal.SIGSTOP)
            time.sleep(PATIENCE_S if kind == "stop" else PAUSE_S)
            self.children[who].signal(signal.SIGCONT)

    def close(self) -> None:
        for child in self.children.values():
            child.close()


@pytest.fixture
def pair(chaos: SimpleNamespace) -> Iterator[Pair]:
    made = Pair(importlib.import_module("chaos.real"))
    yield made
    made.close()


@pytest.mark.slow  # processes that start, and peers that lose patience with one another
def test_processes_killed_stopped_and_restarted(pair: Pair) -> None:
    """Every request ends on every side that lives, and a fault-free round after each fault delivers everything."""
    rng, number, seen = random.Random(11), 0, Counter[str]()
    for fault in (*FAULTS, *rng.sample(FAULTS[1:], 3), "none"):
        pair.start()
        prefill, decode = pair.children["prefill"], pair.children["decode"]
        prompts = []
        for request in "abc":
            number += 1
            prompts.append((request, number, rng.randrange(20, 60)))
        decode.send("ask", prompts)
        prefill.send("serve", prompts)
        time.sleep(rng.uniform(0.0, 0.05))
        pair.break_it(fault)
        for role, child in pair.children.items():
            if not child.alive:
                continue
            assert child.answer() in ("asked", "served")
            ended, owed, empty = child.do("settle")
            assert not owed, f"{fault}: {role} waits for ever"
            assert empty, f"{fault}: {role} has lost units"
            assert "wrong bytes" not in ended, fault
            seen.update(ended)
            if fault == "none" or fault.startswith("pause"):
                assert set(ended) == {"SendDone" if role == "prefill" else "ReceiveDone"}, fault
                assert len(ended) == 3
    assert seen["ReceiveDone"] >= 12
    assert seen["ReceiveFailed"] >= 3
    assert seen["SendFailed"] >= 3
    assert pair.starts > 5
