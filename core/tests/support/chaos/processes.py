"""Rounds with real processes: killed, stopped, continued, started again at the same address, counted like the simulated ones."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos import real
from chaos.rounds import Report

FAULTS = (
    "none", "kill prefill", "kill decode", "stop prefill", "stop decode", "pause prefill", "pause decode", "kill both",
)  # fmt: skip
"""A stop outlasts the peers' patience, a pause does not."""
PATIENCE_S, PAUSE_S = 5.0, 0.4


class Child:
    """A process and the pipe that it obeys."""

    def __init__(self, context: Any, target: Any, *arguments: Any) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, *command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> Any:
        if not self._pipe.poll(60):
            raise TimeoutError("the process does not answer")
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
            self.kill()
        self._pipe.close()


class Pair:
    """A prefill and a decode process, started again when they are dead: the prefill process at the address it had."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["kvcore.engine.cache", "kvcore.engine.peers"])  # torch is slow to import
        self.children: dict[str, Child] = {}
        self.address = ""
        self.starts = self.same_address = 0

    def start(self) -> None:
        """Start whoever is dead; connect anew."""
        for role in ("prefill", "decode"):
            if role not in self.children or not self.children[role].alive:
                if role in self.children:
                    self.children.pop(role).close()
                arguments = (self.address,) if role == "prefill" else ()
                child = self.children[role] = Child(self._context, getattr(real, role), *arguments)
                self.starts += 1
                if role == "prefill":
                    before, self.address = self.address, child.answer()
                    self.same_address += before == self.address
        connected = self.children["decode"].do("connect", self.address)
        if connected != "connected":
            raise RuntimeError(f"decode did not connect: {connected}")

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

    def round(self, report: Report, rng: random.Random, fault: str) -> None:
        """Three prompts and one fault: what the living processes say in the end is counted."""
        self.start()
        prefill, decode = self.children["prefill"], self.children["decode"]
        first = 3 * report.rounds
        prompts = [(name, first + n, rng.randrange(20, 60)) for n, name in enumerate("abc", 1)]
        decode.send("ask", prompts)
        prefill.send("serve", prompts)
        time.sleep(rng.uniform(0.0, 0.05))
        self.break_it(fault)
        report.rounds += 1
        report.faults[fault] += 1
        for role, child in self.children.items():
            if child.alive:
                child.answer()
                ended, owed, empty = child.do("settle")
                report.outcomes.update(item for item in ended if item != "wrong bytes")
                whole = [item for item in ended if item in ("SendDone", "ReceiveDone")]
                calm = fault == "none" or fault.startswith("pause")
                found = {
                    "wrong bytes": "wrong bytes" in ended,
                    "lost units": not empty,
                    "broken rule": bool(owed) or (calm and len(whole) != 3),
                }
                for kind in (kind for kind, is_so in found.items() if is_so):
                    report.violations[kind] += 1
                    report.words.append(f"round {report.rounds}, {fault}, {role}: {kind}: {ended}, waits for {owed}")

    def close(self) -> None:
        for child in self.children.values():
            child.close()


def run(rounds: int, seed: int, tell: Callable[[], None] = lambda: None) -> Report:
    """Rounds with every fault in turn, the last without one. Processes and shared memory are gone when this returns."""
    report, rng, pair = Report(), random.Random(seed), Pair()
    before = set(Path("/dev/shm").iterdir())
    try:
        for number in range(rounds):
            pair.round(report, rng, "none" if number == rounds - 1 else FAULTS[number % len(FAULTS)])
            tell()
    except (EOFError, BrokenPipeError, TimeoutError, RuntimeError) as error:
        report.violations["unexpected error"] += 1
        report.words.append(f"round {report.rounds}: {error!r}")
    finally:
        pair.close()
    report.outcomes["process started"] = pair.starts
    report.outcomes["started again at its address"] = pair.same_address
    left = [
        *(f"pid {c.process.pid}" for c in pair.children.values() if c.alive),
        *set(Path("/dev/shm").iterdir()) - before,
    ]
    if left:
        report.violations["left behind"] += len(left)
        report.words.append(f"left behind: {left}")
    return report
