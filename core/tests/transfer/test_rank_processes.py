"""Engines whose ranks are processes of their own: any two degrees, stages and orders, and a rank that is killed."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.ranks import RankPair, RankPool

CHILD = Path(__file__).parents[1] / "support" / "rank_child.py"
TOKENS, CHUNK = 15, 6
QUICK = {"transfer.heartbeat_s": 0.2, "transfer.peer_timeout_s": 2.0}


@pytest.fixture(scope="module")
def idle() -> Iterator[RankPool]:
    """Processes that are no rank of anything at the moment."""
    with RankPool(CHILD) as pool:
        yield pool


@pytest.fixture
def engines(idle: RankPool, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts pairs of engines."""
    failures = request.session.testsfailed
    with idle.pairs(lambda: request.session.testsfailed == failures) as start:
        yield lambda prefill, decode: start({**QUICK, **prefill}, {**QUICK, **decode})


def transfer(pair: RankPair, request: str, tag: int) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """One prompt in three chunks; returns the bytes each rank sent and received."""
    return pair.transfer(request, tag=tag, tokens=TOKENS, chunk=CHUNK)


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
    pair = engines(prefill, decode)
    left, right = pair.left, pair.right
    before = [answer["free"] for answer in left.do("stats")]
    for tag, request in enumerate(("x", "y", "z"), start=1):
        sent, received = transfer(pair, request, tag)
        assert sum(sent, Counter()) == sum(received, Counter()), "every byte once, and none that nobody asked for"
        if prefill["degree"] == 4:
            silent = [rank for rank in sent if not rank.total()]
            assert len(silent) == 2, "of two replicas one is read, the other is released all the same"
        right.do("release", request=request)
    assert [answer["free"] for answer in left.do("stats")] == before
    assert all(answer["requests"] == 0 for answer in (*left.do("stats"), *right.do("stats")))


def test_other_axis_order(engines: Any) -> None:
    token_major = {"cache.format_options": {"order": "token_major"}}
    transfer(engines({"degree": 2, **token_major}, {"degree": 1}), "x", 5)


def test_checksums_over_ranks(engines: Any) -> None:
    check = {"transfer.checksum": "crc32"}
    transfer(engines({"degree": 2, **check}, {"degree": 1, "cache.arena": "layer_major", **check}), "x", 5)


def test_a_rank_killed_after_the_other_has_pulled(engines: Any) -> None:
    """No rank keeps the request, no unit is lost, and what is left of the pair says why."""
    pair = engines({"degree": 2}, {"degree": 2})
    left, right = pair.left, pair.right
    transfer(pair, "warm", 1)
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
    pair = engines({"degree": 2}, {"degree": 2})
    left, right = pair.left, pair.right
    right.do("ask", request="x", tokens=TOKENS)
    left.do("prefill", request="x", tag=2, tokens=TOKENS, start=0, stop=CHUNK, last=False)
    left.all[1].process.kill()
    left.all[1].process.wait(10)
    for answer in right.do("events", wait=20):
        assert answer["events"] == [["ReceiveFailed", "x", "peer_lost"]]
    assert left.all[0].do("events", wait=20)["events"] == [["SendFailed", "x", "peer_lost"]]
    assert all(answer["requests"] == 0 for answer in right.do("stats"))


def test_a_missing_rank_is_refused_at_hello(engines: Any) -> None:
    pair = engines({"degree": 2}, {"degree": 1})
    left, right = pair.left, pair.right
    right.all[0].tell("connect", addresses=[left.all[0].do("serve")["address"]])
    answer = right.all[0].read()
    assert answer["error"] == "handshake", answer
    assert "ranks" in answer["message"]
