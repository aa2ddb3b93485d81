"""What a run came to: the numbers, as JSON and as tables (no torch)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcore.contract import OPS
from kvcore.errors import KVCoreError
from kvcore_transformers.serving.pair import Outcome, ServedRun
from kvcore_transformers.serving.requests import GenerationRequest


class RequestReport(msgspec.Struct, frozen=True):
    """One request of a run.

    Attributes:
        id: its id.
        prompt_tokens: length of the prompt.
        tokens: generated token ids.
        text: the same as text, where the model has a tokenizer.
        error: why it failed, or None.
        right: whether it is the right answer, of a prompt that has one.
        ttft_ms: milliseconds to the first token.
        bytes_moved: logical bytes pulled.
        pulled_early: share of them pulled before the last chunk began.
    """

    id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    error: dict[str, Any] | None
    right: bool | None
    ttft_ms: float | None
    bytes_moved: int
    pulled_early: float


class RunReport(msgspec.Struct, frozen=True):
    """A whole run.

    Attributes:
        requests, failed: how many.
        accuracy: share of the prompts with an answer that were answered right, from the first token to the last of the
            answer; those that failed were not. None where no prompt has one.
        agreement: share of tokens equal to a single-process run of the same format and chunking; None if none ran.
        agreement_plain: the same to plain transformers.
        bytes_moved: logical bytes pulled, by component.
        pulled_early: share of them pulled before the last chunk of their prompt began.
        retractions, resumed, recomputed: counts.
        bytes_saved: bytes of retracted requests copied to the backup, by component.
        ops: calls of each kernel op, both processes.
        ttft_ms: ``p50`` and ``p99``, milliseconds; None where no token came.
        transfer_gbps: 10⁹ bytes a second while copying.
        format, transport: by name.
        workers: process ids by role.
        seconds: serving, without start and comparison.
        results: one entry per prompt, in the order of the file.
    """

    requests: int
    failed: int
    accuracy: float | None
    agreement: float | None
    agreement_plain: float | None
    bytes_moved: dict[str, int]
    pulled_early: float
    retractions: int
    resumed: int
    recomputed: int
    bytes_saved: dict[str, int]
    ops: dict[str, int]
    ttft_ms: dict[str, float | None]
    transfer_gbps: float
    format: str
    transport: str
    workers: dict[str, int]
    seconds: float
    results: tuple[RequestReport, ...]


@dataclass(frozen=True)
class Refusal:
    """A prompt that never became a request, and why."""

    id: str
    error: KVCoreError


Tokens = Mapping[str, tuple[int, ...]]


def agreement(outcomes: Sequence[Outcome], reference: Tokens) -> float | None:
    """Share of tokens equal to a reference, position by position; a missing or surplus token is unequal.

    Requests that failed here, or have no reference, are left out; None where nothing is left.
    """
    equal = total = 0
    for outcome in outcomes:
        want = reference.get(outcome.request.id)
        if outcome.finished and want is not None:
            equal += sum(a == b for a, b in zip(outcome.tokens, want, strict=False))
            total += max(len(outcome.tokens), len(want))
    return equal / total if total else None


def percentile(values: Sequence[float], share: float) -> float | None:
    """Nearest-rank percentile; None of nothing."""
    ranked = sorted(values)
    return ranked[max(0, math.ceil(share * len(ranked)) - 1)] if ranked else None


def build_report(
    run: ServedRun,
    entries: Sequence[GenerationRequest | Refusal],
    references: Mapping[str, Tokens],
    *,
    answers: Tokens | None = None,
    decode_text: Callable[[Sequence[int]], str],
    format: str,
    transport: str,
    workers: Mapping[str, int],
) -> RunReport:
    """Put the numbers of a run together.

    Args:
        run: what was served.
        entries: the prompts in the order of the file: requests, all of them in ``run``, and refusals.
        references: tokens by request, of the runs ``single`` and ``plain``.
        answers: what a right answer begins with, by prompt, where that is known.
        decode_text: token ids to text.
        format, transport, workers: for the report.
    """
    outcomes = list(run.outcomes.values())
    moved: Counter[str] = Counter()
    ops: Counter[str] = Counter(dict.fromkeys(OPS, 0))
    for outcome in outcomes:
        moved.update(outcome.bytes_by_component)
    for stats in run.stats.values():
        ops.update(stats.ops)
    total = sum(moved.values())
    decode = run.stats.get("decode")
    times = [ms for outcome in outcomes if (ms := _ttft_ms(outcome)) is not None]
    want = answers or {}
    results = [
        _refused(entry, entry.id in want)
        if isinstance(entry, Refusal)
        else _request_report(run.outcomes[entry.id], want.get(entry.id), decode_text)
        for entry in entries
    ]
    judged = [result.right for result in results if result.right is not None]
    return RunReport(
        requests=len(results),
        failed=sum(result.error is not None for result in results),
        accuracy=sum(judged) / len(judged) if judged else None,
        agreement=agreement(outcomes, references.get("single", {})),
        agreement_plain=agreement(outcomes, references.get("plain", {})),
        bytes_moved=dict(moved),
        pulled_early=sum(outcome.pulled_early for outcome in outcomes) / total if total else 0.0,
        retractions=decode.retractions if decode else 0,
        resumed=decode.resumed if decode else 0,
        recomputed=decode.recomputed if decode else 0,
        bytes_saved=dict(decode.bytes_saved) if decode else {},
        ops=dict(ops),
        ttft_ms={"p50": percentile(times, 0.5), "p99": percentile(times, 0.99)},
        transfer_gbps=total / decode.pull_seconds / 1e9 if decode and decode.pull_seconds else 0.0,
        format=format,
        transport=transport,
        workers=dict(workers),
        seconds=run.seconds,
        results=tuple(results),
    )


def print_report(report: RunReport, console: Console) -> None:
    """Print each request's text and the table of numbers."""
    table = Table(title="requests", show_lines=True)
    for title in ("request", "prompt", "new", "first token", "pulled", "early", "text"):
        table.add_column(title, justify="left" if title in ("request", "text") else "right", overflow="fold")
    for item in report.results:
        text = item.text if item.error is None else f"FAILED: {_error_line(item.error)}"
        table.add_row(
            escape(item.id),
            str(item.prompt_tokens),
            str(len(item.tokens)),
            "" if item.ttft_ms is None else f"{item.ttft_ms:.0f} ms",
            _size(item.bytes_moved),
            f"{item.pulled_early:.0%}",
            escape(text.strip()),
        )
    console.print(table)
    summary = Table(title=f"{report.format} over {report.transport}", show_header=False)
    summary.add_column()
    summary.add_column(justify="right")
    for name, value in _summary(report):
        summary.add_row(name, escape(value))
    console.print(summary)


def _summary(report: RunReport) -> list[tuple[str, str]]:
    first = [report.ttft_ms["p50"], report.ttft_ms["p99"]]
    answers = [] if report.accuracy is None else [("accuracy: answers that are right", _share(report.accuracy))]
    return [
        ("requests", f"{report.requests}, {report.failed} failed"),
        *answers,
        ("tokens", str(sum(len(item.tokens) for item in report.results))),
        ("first token p50, p99", ", ".join("-" if ms is None else f"{ms:.0f} ms" for ms in first)),
        ("bytes pulled", _sizes(report.bytes_moved)),
        ("pulled before the last chunk began", f"{report.pulled_early:.1%}"),
        ("copying", f"{report.transfer_gbps:.2f} GB/s"),
        ("retractions", f"{report.retractions}: {report.resumed} resumed, {report.recomputed} recomputed"),
        ("bytes saved on retraction", _sizes(report.bytes_saved)),
        ("kernel calls", ", ".join(f"{op} {count}" for op, count in report.ops.items())),
        ("agreement with a single-process run", _share(report.agreement)),
        ("agreement with plain transformers", _share(report.agreement_plain)),
        ("serving", f"{report.seconds:.1f} s"),
    ]


def _refused(entry: Refusal, judged: bool) -> RequestReport:
    return RequestReport(
        id=entry.id,
        prompt_tokens=0,
        tokens=(),
        text="",
        error=entry.error.as_dict(),
        right=False if judged else None,
        ttft_ms=None,
        bytes_moved=0,
        pulled_early=0.0,
    )


def _request_report(
    outcome: Outcome, answer: tuple[int, ...] | None, decode_text: Callable[[Sequence[int]], str]
) -> RequestReport:
    moved = sum(outcome.bytes_by_component.values())
    return RequestReport(
        id=outcome.request.id,
        prompt_tokens=len(outcome.request.prompt),
        tokens=tuple(outcome.tokens),
        text=decode_text(outcome.tokens),
        error=outcome.error.as_dict() if outcome.error else None,
        right=None if answer is None else outcome.finished and tuple(outcome.tokens[: len(answer)]) == answer,
        ttft_ms=_ttft_ms(outcome),
        bytes_moved=moved,
        pulled_early=outcome.pulled_early / moved if moved else 0.0,
    )


def _ttft_ms(outcome: Outcome) -> float | None:
    return None if outcome.first_token_at is None else 1000 * (outcome.first_token_at - outcome.submitted_at)


def _error_line(error: Mapping[str, Any]) -> str:
    return f"{error['code']}: {error['message']}"


def _share(value: float | None) -> str:
    return "nothing to compare" if value is None else f"{value:.4f}"


def _sizes(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {_size(count)}" for name, count in counts.items()) or "none"


def _size(count: int) -> str:
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"
