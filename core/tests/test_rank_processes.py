"""Engines whose ranks are processes of their own: any two degrees, stages and orders, and a rank that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parent / "support" / "rank_child.py"
TOKENS, CHUNK = 15, 6
LAYERS = [0, 1, 2, 3, 4]
QUICK = {"transfer.heartbeat_s": 0.2, "transfer.peer_timeout_s": 2.0}


class RankProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank died"
        return json.loads(line)

    def tell(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def do(self, do: str, **command: Any) -> dict[str, Any]:
        self.tell(do, **command)
        answer = self.read()
        assert "error" not in answer, answer
        return answer

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait(10)


class Ranks:
    """All ranks of one engine, in processes that served other tests before: starting one takes seconds."""

    def __init__(
        self, idle: list[RankProcess], degree: int, stages: list[list[int]] | None = None, **config: Any
    ) -> None:
        cut = stages or [[]]
        engine, size = uuid.uuid4().hex, degree * len(cut)
        places = [(layers, tp) for layers in cut for tp in range(degree)]
        self.all = [idle.pop() if idle else RankProcess() for _ in places]
        for n, (rank, (layers, tp)) in enumerate(zip(self.all, places, strict=True)):
            rank.tell("build", engine=engine, rank=n, ranks=size, tp_rank=tp, tp_size=degree, layers=layers,
                      config={**QUICK, **config})  # fmt: skip

    def ready(self) -> None:
        for rank in self.all:
            assert rank.read() == {}

    def do(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """At all ranks at once, as an engine's scheduler does."""
        for rank in self.all:
            rank.tell(do, **command)
        answers = [rank.read() for rank in self.all]
        assert not any("error" in answer for answer in answers), answers
        return answers


@pytest.fixture(scope="module")
def idle() -> Iterator[list[RankProcess]]:
    """Processes that are no rank of anything at the moment."""
    processes: list[RankProcess] = []
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def engines(idle: list[RankProcess], request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(prefill: dict[str, Any], decode: dict[str, Any]) -> tuple[Ranks, Ranks]:
        made.extend(Ranks(idle, **spec) for spec in (prefill, decode))
        for engine in made:
            engine.ready()
        addresses = [answer["address"] for answer in made[0].do("serve")]
        made[1].do("connect", addresses=addresses[::-1])
        return made[0], made[1]

    failures = request.session.testsfailed
    yield start
    for rank in (rank for engine in made for rank in engine.all):
        if request.session.testsfailed == failures and rank.process.poll() is None:
            rank.do("drop")
            idle.append(rank)
        else:
            rank.close()


def transfer(prefill: Ranks, decode: Ranks, request: str, tag: int) -> tuple[list[int], list[int]]:
    """One prompt in three chunks; returns the bytes each rank sent and received."""
    decode.do("ask", request=request, tokens=TOKENS)
    for start in range(0, TOKENS, CHUNK):
        stop = min(TOKENS, start + CHUNK)
        prefill.do("prefill", request=request, tag=tag, tokens=TOKENS, start=start, stop=stop, last=stop == TOKENS)
    received = [answer["events"] for answer in decode.do("events", wait=20)]
    assert all([event[:2] for event in events] == [["ReceiveDone", request]] for events in received), received
    for answer in decode.do("check", request=request, tag=tag, tokens=TOKENS):
        assert answer.get("compared"), answer
    sent = [answer["events"] for answer in prefill.do("events", wait=20)]
    assert all([event[:2] for event in events] == [["SendDone", request]] for events in sent), sent
    return [events[0][2] for events in sent], [events[0][2] for events in received]


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"degree": 1}, {"degree": 2}, id="tp 1-2"),
        pytest.param({"degree": 2}, {"degree": 1}, id="tp 2-1"),
        pytest.param({"degree": 4}, {"degree": 2}, id="tp 4-2, more ranks than heads"),
        pytest.param({"degree": 2}, {"degree": 4}, id="tp 2-4, more ranks than heads"),
        pytest.param(
            {"degree": 1, "stages": [[0, 1, 2], [3, 4]]}, {"degree": 1, "stages": [[0], [1, 2, 3, 4]]}, id="stages"
        ),
        pytest.param(
            {"degree": 2, "stages": [[0, 3], [1, 2, 4]], "cache.arena": "layer_major"}, {"degree": 1}, id="both, arena"
        ),
    ],
)
def test_unequal_engines(engines: Any, prefill: dict[str, Any], decode: dict[str, Any]) -> None:
    """I8, I1: full and windowed layers, heads and a latent that every rank keeps, in recycled and poisoned memory."""
    left, right = engines(prefill, decode)
    before = [answer["free"] for answer in left.do("stats")]
    for tag, request in enumerate(("x", "y", "z"), start=1):
        sent, received = transfer(left, right, request, tag)
        assert sum(sent) == sum(received), "every byte once, and none that nobody asked for"
        if prefill["degree"] == 4:
            assert sent.count(0) == 2, "of two replicas one is read, the other is released all the same"
        right.do("release", request=request)
    assert [answer["free"] for answer in left.do("stats")] == before
    assert all(answer["requests"] == 0 for answer in (*left.do("stats"), *right.do("stats")))


def test_other_axis_order(engines: Any) -> None:
    token_major = {"cache.format_options": {"order": "token_major"}}
    left, right = engines({"degree": 2, **token_major}, {"degree": 1})
    transfer(left, right, "x", 5)


def test_checksums_over_ranks(engines: Any) -> None:
    check = {"transfer.checksum": "crc32"}
    left, right = engines({"degree": 2, **check}, {"degree": 1, "cache.arena": "layer_major", **check})
    transfer(left, right, "x", 5)


def test_a_rank_killed_after_the_other_has_pulled(engines: Any) -> None:
    """No rank keeps the request, no unit is lost, and what is left of the pair says why."""
    left, right = engines({"degree": 2}, {"degree": 2})
    transfer(left, right, "warm", 1)
    right.do("release", request="warm")
    before = [answer["free"] for answer in left.do("stats")]
    survivor, victim = right.all
    right.do("ask", request="x", tokens=TOKENS)
    victim.process.send_signal(signal.SIGSTOP)  # it cannot report what it pulls
    read = survivor.do("stats")["read"]
    left.do("prefill", request="x", tag=2, tokens=TOKENS, start=0, stop=TOKENS, last=True)
    deadline = time.monotonic() + 10
    while survivor.do("stats")["read"] == read and time.monotonic() < deadline:
        time.sleep(0.02)
    assert survivor.do("stats")["read"] > read, "the first rank has pulled"
    assert survivor.do("events", wait=0.5)["events"] == [], "and does not accept before the second has"
    victim.process.kill()
    victim.process.wait(10)
    assert survivor.do("events", wait=20)["events"] == [["ReceiveFailed", "x", "peer_lost"]]
    for answer in left.do("events", wait=20):
        assert answer["events"] == [["SendFailed", "x", "peer_lost"]]
    assert [answer["free"] for answer in left.do("stats")] == before
    stats = survivor.do("stats")
    assert (stats["requests"], stats["held"]) == (0, 0)


def test_a_sender_rank_killed(engines: Any) -> None:
    """Every rank of the receiver fails typed, whichever rank of the sender it was reading from."""
    left, right = engines({"degree": 2}, {"degree": 2})
    right.do("ask", request="x", tokens=TOKENS)
    left.do("prefill", request="x", tag=2, tokens=TOKENS, start=0, stop=CHUNK, last=False)
    left.all[1].process.kill()
    left.all[1].process.wait(10)
    for answer in right.do("events", wait=20):
        assert answer["events"] == [["ReceiveFailed", "x", "peer_lost"]]
    assert left.all[0].do("events", wait=20)["events"] == [["SendFailed", "x", "peer_lost"]]
    assert all(answer["requests"] == 0 for answer in right.do("stats"))


def test_a_missing_rank_is_refused_at_hello(engines: Any) -> None:
    left, right = engines({"degree": 2}, {"degree": 1})
    right.all[0].tell("connect", addresses=[left.all[0].do("serve")["address"]])
    answer = right.all[0].read()
    assert answer["error"] == "handshake", answer
    assert "ranks" in answer["message"]
