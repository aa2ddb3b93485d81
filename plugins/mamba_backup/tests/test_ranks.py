"""Engines whose ranks are processes of their own: states cut by their own groups, between any two degrees and stages.

Every element that arrives is compared with what its global ids alone say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvcore.testing.ranks import RankPool

pytestmark = pytest.mark.slow  # a process that loads torch takes seconds to start, and there are six of them

CHILD = Path(__file__).parent / "support" / "rank_child.py"
TOKENS, CHUNK = 15, 6
HOST_POOL = {"retraction.backend": "host_pool", "retraction.options": {"size": "1MiB"}}


@pytest.fixture(scope="module")
def idle() -> Iterator[RankPool]:
    """Processes that are no rank of anything at the moment."""
    with RankPool(CHILD) as pool:
        yield pool


@pytest.fixture
def pair(idle: RankPool, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts pairs of engines with one model."""
    failures = request.session.testsfailed
    with idle.pairs(lambda: request.session.testsfailed == failures) as start:
        quick = {"transfer.heartbeat_s": 0.2}
        yield lambda kind, *specs: start(*({**quick, "options": {"kind": kind}, **spec} for spec in specs))


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        pytest.param({"degree": 1}, {"degree": 2}, id="tp 1-2"),
        pytest.param({"degree": 2}, {"degree": 1}, id="tp 2-1"),
        pytest.param({"degree": 4}, {"degree": 2}, id="tp 4-2, more ranks than key heads"),
        pytest.param({"degree": 2}, {"degree": 4}, id="tp 2-4, more ranks than key heads"),
        pytest.param(
            {"stages": [[0, 1, 2], [3, 4, 5]], "cache.arena": "layer_major"},
            {"degree": 2, "stages": [[0, 1, 2, 3], [4, 5]]},
            id="stages, tp 1-2, arena",
        ),
    ],
)
@pytest.mark.parametrize("kind", ["conv", "delta"])
def test_unequal_engines(
    hybrid: ModuleType, pair: Any, kind: str, prefill: dict[str, Any], decode: dict[str, Any]
) -> None:
    """Convolutions over [key, key, value] are several id ranges a rank; a rank of the receiver takes each channel from one
    rank of the sender that has it, also where several do; into recycled and poisoned slots."""
    engines = pair(kind, prefill, decode)
    left, right = engines.left, engines.right
    before = [answer["free"] for answer in left.do("stats")]
    for tag, request in enumerate(("x", "y"), start=1):
        sent, received = (
            sum(part, Counter()) for part in engines.transfer(request, tag=tag, tokens=TOKENS, chunk=CHUNK)
        )
        assert sent == received, "every byte once, and none that nobody asked for"
        states = {name: received[name] for name in received if name.startswith("state/")}
        assert states == held_bytes(hybrid, kind, decode.get("degree", 1))
        right.do("step", request=request, tag=tag, start=TOKENS, stop=TOKENS + 3)
        engines.check(request, tag=tag, tokens=TOKENS + 3)
        right.do("release", request=request)
    assert [answer["free"] for answer in left.do("stats")] == before
    assert all(answer["requests"] == 0 for answer in (*left.do("stats"), *right.do("stats")))


def held_bytes(hybrid: ModuleType, kind: str, degree: int) -> dict[str, int]:
    """Bytes of one request's state on all ranks of an engine, counted element by element."""
    found: Counter[str] = Counter()
    group = hybrid.MODELS[kind].group("state")
    for state in group.states:
        other = 1
        for name, size in state.axes:
            other *= size if name != (state.split or state.axes[0][0]) else 1
        for rank in range(degree):
            count = len(hybrid.held(state, rank, degree)) * other * {"fp32": 4, "bf16": 2}[state.dtype]
            found[f"state/{state.kind}"] += count * len(group.layers)
    return dict(found)


@pytest.mark.parametrize("backend", [{}, HOST_POOL], ids=["host_tensor", "host_pool"])
@pytest.mark.parametrize("kind", ["conv", "delta"])
def test_retracted_and_resumed_on_every_rank(pair: Any, kind: str, backend: dict[str, Any]) -> None:
    """H1 on every rank: what was pulled goes out with its part of the state, and comes back into another slot."""
    engines = pair(kind, {"degree": 1}, {"degree": 2, **backend})
    engines.transfer("x", tag=4, tokens=TOKENS, chunk=CHUNK)
    for answer in engines.right.do("retract", request="x"):
        assert not answer["recompute"]
        assert answer["bytes"] > 0
    engines.right.do("scribble", tokens=TOKENS)
    engines.right.do("resume")
    engines.check("x", tag=4, tokens=TOKENS)
    engines.right.do("step", request="x", tag=4, start=TOKENS, stop=TOKENS + 2)
    engines.check("x", tag=4, tokens=TOKENS + 2)


def test_heads_that_ranks_do_not_divide(idle: RankPool) -> None:
    """Refused when the rank is built, with the state and both numbers."""
    rank = idle.take()
    try:
        place = {"engine": "e", "rank": 0, "ranks": 3, "tp_rank": 0, "tp_size": 3, "layers": [2, 5]}
        rank.tell("build", config={}, options={"kind": "delta"}, **place)
        answer = rank.read()
        assert answer["error"] == "config", answer
        assert "tensor='conv', num_heads=2, tp_size=3" in answer["message"]
    finally:
        rank.close()
