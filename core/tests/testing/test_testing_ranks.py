"""The rig of rank processes sees what goes wrong in a rank; the ranks here are scripts without a cache."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from kvcore.testing.ranks import RankEngine, RankPool, RankProcess
from kvcore.testing.ranks import rig as ranks

# Answers like a rank. Requests are named after what goes wrong.
SCRIPT = """
import json, sys, time
received = False
for line in sys.stdin:
    command = json.loads(line)
    do, request = command.pop("do"), command.get("request")
    answer = {}
    if do == "build":
        place = command
        if command["config"].get("refuse") == command["tp_rank"]:
            answer = {"error": "config", "message": "no such key"}
    elif do == "serve":
        answer = {"address": f"rank{place['rank']}"}
    elif do == "connect":
        received, answer = True, {"addresses": command["addresses"]}
    elif do == "ask" or do == "prefill":
        name = request
    elif do == "check":
        answer = {"wrong": ["full", 0, "k"]} if request == "wrong" else {"compared": 0 if request == "empty" else 8}
    elif do == "events":
        kind = "ReceiveDone" if received else "SendDone"
        answer = {"events": [[kind, name, {"full/kv": 3}]]}
        if name == "failed":
            answer = {"events": [["ReceiveFailed", name, "peer_lost"]]}
        elif name == "twice":
            answer["events"] *= 2
    elif do == "die":
        sys.exit(3)
    elif do == "hang":
        time.sleep(600)
    elif do == "where":
        answer = place
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "rank.py"
    path.write_text(SCRIPT)
    return path


def test_a_pair_moves_a_prompt(script: Path) -> None:
    with RankPool(script) as pool, pool.pairs() as start:
        pair = start({"degree": 2, "stages": [[0], [1, 2]], "cache.page_size": 4}, {"degree": 1, "options": {"x": 1}})
        places = pair.left.do("where")
        assert [(p["rank"], p["tp_rank"], p["layers"]) for p in places] == [
            (0, 0, [0]), (1, 1, [0]), (2, 0, [1, 2]), (3, 1, [1, 2])
        ]  # fmt: skip
        assert {(p["ranks"], p["tp_size"]) for p in places} == {(4, 2)}
        assert len({p["engine"] for p in places}) == 1
        assert places[0]["config"] == {"cache.page_size": 4}
        (other,) = pair.right.do("where")
        assert other["engine"] != places[0]["engine"]
        assert (other["options"], other["config"]) == ({"x": 1}, {})
        sent, received = pair.transfer("x", tag=1, tokens=5, chunk=2)
        assert (sent, received) == ([Counter({"full/kv": 3})] * 4, [Counter({"full/kv": 3})])


@pytest.mark.parametrize("request_id", ["wrong", "empty", "failed", "twice"])
def test_what_went_wrong_fails_the_test(script: Path, request_id: str) -> None:
    """Other bytes than the ids say, nothing compared at all, a transfer that failed, one that ended twice."""
    with RankPool(script) as pool, pool.pairs() as start:
        pair = start({}, {})
        with pytest.raises(AssertionError):
            pair.transfer(request_id, tag=1, tokens=5, chunk=2)


def test_a_refusal_is_an_answer(script: Path) -> None:
    with RankPool(script) as pool:
        engine = RankEngine(pool, degree=2, refuse=1)
        with pytest.raises(AssertionError, match="no such key"):
            engine.ready()
        for rank in engine.all:
            rank.close()


def test_a_rank_that_dies_or_hangs_is_noticed(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command, message in (("die", "the rank died"), ("hang", "did not answer")):
        rank = RankProcess(script)
        rank.do("build", config={}, tp_rank=0)
        monkeypatch.setattr(ranks, "ANSWER_S", 0.3 if command == "hang" else 30.0)
        with pytest.raises(AssertionError, match=message):
            rank.do(command)
        rank.close()
        rank.close()
        assert rank.process.poll() is not None


def test_processes_serve_again_and_end_with_the_pool(script: Path) -> None:
    """A pair of a failed test is not used again: it may be in any state."""
    with RankPool(script) as pool:
        seen: list[list[int]] = []
        for reuse in (True, False, True):
            with pool.pairs(lambda reuse=reuse: reuse) as start:  # type: ignore[misc]
                pair = start({}, {})
                seen.append(sorted(rank.process.pid for rank in (*pair.left.all, *pair.right.all)))
                last = [rank.process for rank in (*pair.left.all, *pair.right.all)]
        assert seen[0] == seen[1]
        assert not set(seen[1]) & set(seen[2])
        assert all(process.poll() is None for process in last)
    assert all(process.poll() is not None for process in last)
