"""Engines whose ranks are processes of their own, with block scales: any two degrees, stages, orders of scales,
retraction and speculation. What is read back is compared with values that global ids alone say."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow  # a process that loads torch takes seconds to start, and there are five of them

CHILD = Path(__file__).parent / "support" / "rank_child.py"
SMALL = {"page": 4, "window": 8, "tokens": 15, "chunk": 6}
LARGE = {"page": 32, "window": 40, "tokens": 75, "chunk": 40}
INTERLEAVED = {"cache.format_options": {"scale_layout": "interleaved"}}
FLAT = {"cache.format_options": {"scale_layout": "flat"}}
HOST_POOL = {"retraction.backend": "host_pool", "retraction.options": {"size": "1MiB"}}


class RankProcess:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the rank died"
        return json.loads(line)

    def tell(self, do: str, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **command}) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        self.process.wait(10)


class Ranks:
    """All ranks of one engine, in processes that served other tests before: starting one takes seconds."""

    def __init__(self, idle: list[RankProcess], shape: dict[str, int], spec: dict[str, Any]) -> None:
        spec = dict(spec)
        degree, cut = spec.pop("degree", 1), spec.pop("stages", [[]])
        places = [(layers, tp) for layers in cut for tp in range(degree)]
        config = {"cache.format": "mxfp8", "cache.page_size": shape["page"], "transfer.heartbeat_s": 0.2, **spec}
        engine = uuid.uuid4().hex
        self.all = [idle.pop() if idle else RankProcess() for _ in places]
        for n, (rank, (layers, tp)) in enumerate(zip(self.all, places, strict=True)):
            setup = {"engine": engine, "rank": n, "ranks": len(places), "tp_rank": tp, "tp_size": degree}
            rank.tell("build", layers=layers, window=shape["window"], config=config, **setup)

    def ready(self) -> None:
        for rank in self.all:
            answer = rank.read()
            assert answer == {}, answer

    def do(self, do: str, **command: Any) -> list[dict[str, Any]]:
        """At all ranks at once, as an engine's scheduler does."""
        for rank in self.all:
            rank.tell(do, **command)
        answers = [rank.read() for rank in self.all]
        assert not any("error" in answer for answer in answers), answers
        return answers


class Pair:
    """A prefill and a decode engine that are connected."""

    def __init__(self, left: Ranks, right: Ranks, shape: dict[str, int]) -> None:
        self.left, self.right, self.shape = left, right, shape

    def transfer(self, request: str, tag: int) -> tuple[Counter[str], Counter[str]]:
        """One prompt in chunks; returns the bytes sent and received, by component."""
        tokens = self.shape["tokens"]
        self.right.do("ask", request=request, tokens=tokens)
        for start in range(0, tokens, self.shape["chunk"]):
            stop = min(tokens, start + self.shape["chunk"])
            last = stop == tokens
            self.left.do("prefill", request=request, tag=tag, tokens=tokens, start=start, stop=stop, last=last)
        received = self._ended(self.right, ["ReceiveDone", request])
        self.check(request, tag, tokens)
        return self._ended(self.left, ["SendDone", request]), received

    def check(self, request: str, tag: int, tokens: int) -> None:
        for answer in self.right.do("check", request=request, tag=tag, tokens=tokens):
            assert answer.get("compared"), answer

    def _ended(self, engine: Ranks, how: list[str]) -> Counter[str]:
        moved: Counter[str] = Counter()
        for answer in engine.do("events", wait=30):
            assert [event[:2] for event in answer["events"]] == [how], answer
            moved.update(answer["events"][0][2])
        return moved


@pytest.fixture(scope="module")
def idle() -> Iterator[list[RankProcess]]:
    """Processes that are no rank of anything at the moment."""
    processes: list[RankProcess] = []
    yield processes
    for process in processes:
        process.close()


@pytest.fixture
def pair(idle: list[RankProcess], request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[Ranks] = []

    def start(prefill: dict[str, Any], decode: dict[str, Any], shape: dict[str, int]) -> Pair:
        for spec in (prefill, decode):
            made.append(Ranks(idle, shape, spec))
        for engine in made:
            engine.ready()
        addresses = [answer["address"] for answer in made[0].do("serve")]
        made[1].do("connect", addresses=addresses[::-1])
        return Pair(*made, shape)

    failures = request.session.testsfailed
    yield start
    for rank in (rank for engine in made for rank in engine.all):
        if request.session.testsfailed == failures and rank.process.poll() is None:
            rank.tell("drop")
            assert rank.read() == {}
            idle.append(rank)
        else:
            rank.close()


COMPONENTS = {"full/kv", "full/block_scale", "swa/kv", "swa/block_scale"}


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"degree": 1}, {"degree": 2}, id="tp 1-2"),
        pytest.param({"degree": 2}, {"degree": 1}, id="tp 2-1"),
        pytest.param({"degree": 4}, {"degree": 2}, id="tp 4-2, more ranks than heads"),
        pytest.param({"degree": 1}, {"degree": 4}, id="tp 1-4, more ranks than heads"),
        pytest.param({"stages": [[0, 1, 2], [3]]}, {"stages": [[0], [1, 2, 3]]}, id="stages"),
        pytest.param(
            {"degree": 2, "stages": [[0, 3], [1, 2]], "cache.arena": "layer_major"}, {"degree": 1}, id="both, arena"
        ),
    ],
)
@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [("mxfp8", SMALL, FLAT), ("mxfp8_e5m2", LARGE, INTERLEAVED)],
    ids=["flat", "interleaved, e5m2"],
)
def test_unequal_engines(pair, prefill, decode, name, shape, options) -> None:
    """A1: scales move with the payload they belong to, into recycled and poisoned memory, between any two engines."""
    common = {"cache.format": name, **options}
    engines = pair({**prefill, **common}, {**decode, **common}, shape)
    before = [answer["free"] for answer in engines.left.do("stats")]
    for tag, request in enumerate(("x", "y"), start=1):
        sent, received = engines.transfer(request, tag)
        assert sent == received, "every byte once, and none that nobody asked for"
        assert set(received) == COMPONENTS
        engines.right.do("release", request=request)
    assert [answer["free"] for answer in engines.left.do("stats")] == before
    assert all(answer["requests"] == 0 for answer in (*engines.left.do("stats"), *engines.right.do("stats")))


@pytest.mark.parametrize(
    ("left", "right"),
    [
        pytest.param(FLAT, INTERLEAVED, id="flat to interleaved"),
        pytest.param(INTERLEAVED, FLAT, id="interleaved to flat"),
        pytest.param(
            {"cache.format_options": {"order": "token_major"}, "cache.arena": "layer_major"},
            INTERLEAVED,
            id="token major to interleaved",
        ),
    ],
)
@pytest.mark.parametrize(("degree", "other"), [(2, 1), (1, 2)])
def test_peers_keep_their_scales_in_unlike_orders(pair, left, right, degree, other) -> None:
    engines = pair({"degree": degree, **left}, {"degree": other, **right}, LARGE)
    sent, received = engines.transfer("x", 3)
    assert sent == received
    assert set(received) == COMPONENTS


@pytest.mark.parametrize("backend", [{}, HOST_POOL], ids=["host_tensor", "host_pool"])
@pytest.mark.parametrize(("shape", "options"), [(SMALL, FLAT), (LARGE, INTERLEAVED)], ids=["flat", "interleaved"])
def test_retracted_and_resumed_on_every_rank(pair, shape, options, backend) -> None:
    """B2, B3: what was pulled goes out with its scales and comes back into other units, restored and not recomputed."""
    engines = pair({"degree": 1, **options}, {"degree": 2, **options, **backend}, shape)
    engines.transfer("x", 4)
    for answer in engines.right.do("retract", request="x"):
        assert not answer["recompute"]
        assert answer["bytes"] > 0
    engines.right.do("scribble", tokens=shape["tokens"])
    engines.right.do("resume")
    engines.check("x", 4, shape["tokens"])


@pytest.mark.parametrize("degree", [1, 2])
@pytest.mark.parametrize(("shape", "options"), [(SMALL, FLAT), (LARGE, INTERLEAVED)], ids=["flat", "interleaved"])
def test_only_accepted_rows_are_stored(pair, shape, options, degree) -> None:
    """Speculation after a transfer: rejected drafts leave no byte, neither elements nor scales; a retraction keeps the
    accepted ones."""
    engines = pair({"degree": 1, **options}, {"degree": degree, **options}, shape)
    engines.transfer("x", 5)
    length = shape["tokens"]
    for accepted in (2, 0, 4, 1):
        length += accepted
        for answer in engines.right.do("speculate", request="x", tag=5, drafted=4, accepted=accepted):
            assert answer == {"leaked": [], "length": length}
        engines.check("x", 5, length)
    engines.right.do("retract", request="x")
    engines.right.do("resume")
    engines.check("x", 5, length)
