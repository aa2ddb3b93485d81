"""Engines whose ranks are processes of their own, with block scales: any two degrees, stages, orders of scales,
retraction and speculation. What is read back is compared with values that global ids alone say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcore.testing.ranks import RankPair, RankPool

pytestmark = pytest.mark.slow  # a process that loads torch takes seconds to start, and there are five of them

CHILD = Path(__file__).parent / "support" / "rank_child.py"
SMALL = {"page": 4, "window": 8, "tokens": 15, "chunk": 6}
LARGE = {"page": 32, "window": 40, "tokens": 75, "chunk": 40}
INTERLEAVED = {"cache.format_options": {"scale_layout": "interleaved"}}
FLAT = {"cache.format_options": {"scale_layout": "flat"}}
HOST_POOL = {"retraction.backend": "host_pool", "retraction.options": {"size": "1MiB"}}


class Pair:
    """A prefill and a decode engine that are connected, and the prompts of a shape."""

    def __init__(self, pair: RankPair, shape: dict[str, int]) -> None:
        self.pair, self.left, self.right, self.shape = pair, pair.left, pair.right, shape

    def transfer(self, request: str, tag: int) -> tuple[Counter[str], Counter[str]]:
        """One prompt in chunks; returns the bytes sent and received, by component."""
        shape = self.shape
        sent, received = self.pair.transfer(request, tag=tag, tokens=shape["tokens"], chunk=shape["chunk"])
        return sum(sent, Counter()), sum(received, Counter())

    def check(self, request: str, tag: int, tokens: int) -> None:
        self.pair.check(request, tag=tag, tokens=tokens)


@pytest.fixture(scope="module")
def idle() -> Iterator[RankPool]:
    """Processes that are no rank of anything at the moment."""
    with RankPool(CHILD) as pool:
        yield pool


@pytest.fixture
def pair(idle: RankPool, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Starts pairs of engines."""
    failures = request.session.testsfailed
    with idle.pairs(lambda: request.session.testsfailed == failures) as start:

        def make(prefill: dict[str, Any], decode: dict[str, Any], shape: dict[str, int]) -> Pair:
            common = {"cache.format": "mxfp8", "cache.page_size": shape["page"], "transfer.heartbeat_s": 0.2}
            options = {"options": {"window": shape["window"]}}
            return Pair(start(*({**common, **options, **spec} for spec in (prefill, decode))), shape)

        yield make


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
