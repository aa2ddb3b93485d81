"""Engines whose ranks are processes of their own, for tests of tensor-parallel ranks and pipeline stages.

A test suite writes a script, one rank of a model (:mod:`kvcore.testing.ranks.child`): what it stores, and what must be
there, by global ids alone::

    class Mine(RowsRank):
        settings = {"cache.page_size": 4, "cache.memory": "256KiB", "cache.max_requests": 4}

        def model(self): ...
        def rows(self, tag, layer, tensor, heads, start, stop): ...

    if __name__ == "__main__":
        main(Mine)

and starts engines of it, of any degrees and stages::

    with RankPool(Path("rank_child.py")) as pool, pool.pairs() as start:
        pair = start({"degree": 2}, {"degree": 1})
        sent, received = pair.transfer("x", tag=1, tokens=15, chunk=6)

Processes that have served one engine serve the next, because starting one takes seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ANSWER_S = 60.0
"""How long a rank may take for a command: starting one on a busy machine takes most."""

EVENT_S = 30.0
"""How long a transfer of a few pages may take."""

Answer = dict[str, Any]


class RankProcess:
    """A process that is some engine's rank, or waits to be one.

    Attributes:
        process: to stop or kill it.
    """

    def __init__(self, script: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, name="kvcore-rank-answers", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def tell(self, do: str, **command: Any) -> None:
        """Give a command; :meth:`read` has its answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def read(self) -> Answer:
        """The answer to the oldest command that has none yet; a refusal is ``{"error": code, "message": text}``."""
        try:
            line = self._lines.get(timeout=ANSWER_S)
        except queue.Empty:
            raise AssertionError(f"a rank did not answer within {ANSWER_S} s") from None
        assert line, "the rank died; its traceback is on stderr"
        answer: Answer = json.loads(line)
        return answer

    def do(self, do: str, **command: Any) -> Answer:
        """Give a command that must not be refused, and return its answer."""
        self.tell(do, **command)
        answer = self.read()
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        """Kill it, also where it was stopped. Idempotent."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait(10)
        self._reader.join(10)
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()


class RankEngine:
    """All ranks of one engine.

    Attributes:
        all: its processes, stage by stage.
    """

    def __init__(
        self,
        pool: RankPool,
        degree: int = 1,
        stages: Sequence[Sequence[int]] = ((),),
        options: Mapping[str, Any] | None = None,
        **config: Any,
    ) -> None:
        places = [(layers, tp) for layers in stages for tp in range(degree)]
        engine = uuid.uuid4().hex
        self.all = [pool.take() for _ in places]
        for n, (rank, (layers, tp)) in enumerate(zip(self.all, places, strict=True)):
            place = {"engine": engine, "rank": n, "ranks": len(places), "tp_rank": tp, "tp_size": degree}
            rank.tell("build", layers=list(layers), config=config, options=dict(options or {}), **place)

    def ready(self) -> None:
        """Wait until every rank has its cache."""
        for rank in self.all:
            answer = rank.read()
            assert answer == {}, answer

    def do(self, do: str, **command: Any) -> list[Answer]:
        """At all ranks at once, as an engine's scheduler does; none may refuse."""
        for rank in self.all:
            rank.tell(do, **command)
        answers = [rank.read() for rank in self.all]
        assert not any("error" in answer for answer in answers), answers
        return answers


class RankPair:
    """A prefill and a decode engine that are connected.

    Attributes:
        left, right: the engines.
    """

    def __init__(self, left: RankEngine, right: RankEngine) -> None:
        self.left, self.right = left, right
        addresses = [answer["address"] for answer in left.do("serve")]
        right.do("connect", addresses=addresses[::-1])  # in any order

    def transfer(
        self, request: str, *, tag: int, tokens: int, chunk: int
    ) -> tuple[list[Counter[str]], list[Counter[str]]]:
        """One prompt in chunks, compared where it arrived. Returns the bytes each rank sent and received, by component."""
        self.right.do("ask", request=request, tokens=tokens)
        for start in range(0, tokens, chunk):
            stop = min(tokens, start + chunk)
            span = {"start": start, "stop": stop, "last": stop == tokens}
            self.left.do("prefill", request=request, tag=tag, tokens=tokens, **span)
        received = self._ended(self.right, ["ReceiveDone", request])
        self.check(request, tag=tag, tokens=tokens)
        return self._ended(self.left, ["SendDone", request]), received

    def check(self, request: str, *, tag: int, tokens: int) -> None:
        """Every rank of the decode engine holds what it must."""
        for answer in self.right.do("check", request=request, tag=tag, tokens=tokens):
            assert answer.get("compared"), answer

    def _ended(self, engine: RankEngine, how: list[str]) -> list[Counter[str]]:
        moved = []
        for answer in engine.do("events", wait=EVENT_S):
            assert [event[:2] for event in answer["events"]] == [how], answer
            moved.append(Counter(answer["events"][0][2]))
        return moved


class RankPool:
    """Processes that run one script, and the engines made of them. A context manager: it ends them all.

    Args:
        script: calls :func:`kvcore.testing.ranks.child.main`.
    """

    def __init__(self, script: Path) -> None:
        self._script = script
        self._idle: list[RankProcess] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._idle:
            process.close()

    def take(self) -> RankProcess:
        """A process that is no rank of anything at the moment."""
        return self._idle.pop() if self._idle else RankProcess(self._script)

    @contextlib.contextmanager
    def pairs(self, reuse: Callable[[], bool] = lambda: True) -> Iterator[Callable[..., RankPair]]:
        """What starts pairs: ``start(prefill, decode)``, each the arguments of a :class:`RankEngine`.

        Afterwards their processes are idle again, or killed where ``reuse`` says that a test of them has failed.
        """
        made: list[RankEngine] = []

        def start(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> RankPair:
            engines = [RankEngine(self, **spec) for spec in (prefill, decode)]
            made.extend(engines)
            for engine in engines:
                engine.ready()
            return RankPair(*engines)

        ok = False
        try:
            yield start
            ok = reuse()
        finally:
            for rank in (rank for engine in made for rank in engine.all):
                if ok and rank.process.poll() is None:
                    rank.do("drop")
                    self._idle.append(rank)
                else:
                    rank.close()
