"""The numbers of a run, from outcomes written by hand."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from kvcore.errors import EmptyPromptError, PeerLostError
from kvcore_transformers.commands.report import Refusal, agreement, build_report, percentile, print_report
from kvcore_transformers.serving.pair import Outcome, ServedRun
from kvcore_transformers.serving.requests import EngineStats, GenerationRequest


def outcome(name, tokens=(), error=None, first=None, moved=0, early=0):
    return Outcome(
        GenerationRequest(name, (1, 2, 3), 4),
        tokens=list(tokens),
        finished=error is None,
        error=error,
        submitted_at=10.0,
        first_token_at=first,
        bytes_by_component={"full/kv": moved} if moved else {},
        pulled_early=early,
    )


@pytest.mark.parametrize(
    ("tokens", "reference", "want"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 4), 1.0),
        ((1, 2, 9, 4), (1, 2, 3, 4), 0.75),
        ((1, 2), (1, 2, 3, 4), 0.5),  # tokens that are missing are not equal
        ((1, 2, 3, 4), (1, 2), 0.5),  # neither are surplus ones
        ((), (), None),
    ],
)
def test_agreement_counts_tokens_by_position(tokens, reference, want):
    assert agreement([outcome("a", tokens)], {"a": reference}) == want


def test_agreement_leaves_out_what_failed_and_what_has_no_reference():
    outcomes = [outcome("a", (1, 2)), outcome("b", (1,), error=PeerLostError("gone")), outcome("c", (7,))]
    assert agreement(outcomes, {"a": (1, 3), "b": (9,)}) == 0.5
    assert agreement(outcomes, {}) is None


def test_percentiles_are_values_that_happened():
    values = [float(n) for n in range(1, 11)]
    assert (percentile(values, 0.5), percentile(values, 0.99), percentile([4.0], 0.5)) == (5.0, 10.0, 4.0)
    assert percentile([], 0.5) is None


def test_a_report_adds_up_and_prints():
    run = ServedRun(
        {
            "a": outcome("a", (1, 2), first=10.5, moved=300, early=200),
            "b": outcome("b", (3,), error=PeerLostError("gone", request="b"), first=11.0, moved=100),
        },
        {
            "prefill": EngineStats(ops={"store": 5, "attend_prefill": 2}),
            "decode": EngineStats(
                retractions=3,
                resumed=2,
                recomputed=1,
                bytes_saved={"full/kv": 2048, "state/conv": 96},
                ops={"store": 7},
                pull_seconds=1e-6,
            ),
        },
        seconds=2.0,
    )
    report = build_report(
        run,
        [
            GenerationRequest("a", (1, 2, 3), 4),
            Refusal("c", EmptyPromptError("empty")),
            GenerationRequest("b", (1,), 4),
        ],
        {"single": {"a": (1, 2)}, "plain": {"a": (1, 5)}},
        decode_text=lambda tokens: "-".join(map(str, tokens)),
        format="fp32",
        transport="shm",
        workers={"prefill": 1, "decode": 2},
    )
    data = msgspec.to_builtins(report)
    assert (data["requests"], data["failed"], data["agreement"], data["agreement_plain"]) == (3, 2, 1.0, 0.5)
    assert (data["bytes_moved"], data["pulled_early"]) == ({"full/kv": 400}, 0.5)
    assert (data["retractions"], data["resumed"], data["recomputed"]) == (3, 2, 1)
    assert data["bytes_saved"] == {"full/kv": 2048, "state/conv": 96}
    assert (data["accuracy"], {r["right"] for r in data["results"]}) == (None, {None})
    assert data["ops"] == {"store": 12, "attend_prefill": 2, "load": 0, "attend_decode": 0, "copy_units": 0}
    assert data["ttft_ms"] == {"p50": 500.0, "p99": 1000.0}
    assert data["transfer_gbps"] == pytest.approx(0.4)
    assert [(r["id"], r["text"], r["error"] and r["error"]["code"]) for r in data["results"]] == [
        ("a", "1-2", None),
        ("c", "", "empty_prompt"),
        ("b", "3", "peer_lost"),
    ]
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    for word in (
        "1-2",
        "peer_lost: gone",
        "2 failed",
        "3: 2 resumed, 1 recomputed",
        "0.5000",
        "full/kv 2.0 KiB, state/conv 96 B",
    ):
        assert word in out.getvalue()
    assert "accuracy" not in out.getvalue()


def test_accuracy_counts_whole_answers_of_prompts_that_have_one():
    """What failed, was refused, is short of a token or has one wrong is not right; surplus tokens do no harm."""
    tokens = {"right": (1, 2, 3, 4), "more": (1, 2, 3, 9), "late": (1, 2, 9, 4), "short": (1, 2), "free": (7,)}
    outcomes = {name: outcome(name, given) for name, given in tokens.items()}
    outcomes["lost"] = outcome("lost", (1, 2, 3, 4), error=PeerLostError("gone"))
    answers = dict.fromkeys(("right", "late", "lost", "refused"), (1, 2, 3, 4)) | {
        "more": (1, 2, 3),
        "short": (1, 2, 3),
    }
    report = build_report(
        ServedRun(outcomes, {}, 1.0),
        [Refusal("refused", EmptyPromptError("empty")), *(item.request for item in outcomes.values())],
        {},
        answers=answers,
        decode_text=str,
        format="fp32",
        transport="shm",
        workers={},
    )
    assert report.accuracy == pytest.approx(2 / 6)
    assert {item.id: item.right for item in report.results} == {
        "right": True,
        "more": True,
        "late": False,
        "short": False,
        "free": None,
        "lost": False,
        "refused": False,
    }
    out = io.StringIO()
    print_report(report, Console(file=out, width=160))
    assert "0.3333" in out.getvalue()


def test_a_run_in_which_nothing_came_back_still_reports():
    report = build_report(
        ServedRun({"a": outcome("a", error=PeerLostError("gone"))}, {}, 1.0),
        [GenerationRequest("a", (1, 2, 3), 4)],
        {},
        decode_text=str,
        format="fp32",
        transport="shm",
        workers={},
    )
    assert (report.failed, report.agreement, report.transfer_gbps, report.pulled_early) == (1, None, 0.0, 0.0)
    assert report.ttft_ms == {"p50": None, "p99": None}
    print_report(report, Console(file=io.StringIO()))
