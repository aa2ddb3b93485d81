"""What ``kvcore accuracy`` does: one model reads texts through two caches at once, and its predictions are compared.

The texts are given token by token (teacher forcing), so that a difference cannot grow by changing the text. Keys and
values go the way they go when requests are served: stored into pages chunk by chunk, and read back from them by
attention, those of the chunk itself too.
"""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from kvcore.config import load_config
from kvcore.engine.cache import KVCache
from kvcore.errors import ConfigError
from kvcore_transformers.modeling.attention import ATTENTION
from kvcore_transformers.modeling.state_batch import batch_of
from kvcore_transformers.models.adapters import enabled
from kvcore_transformers.models.loading import cache_for, load_model, load_tokenizer
from kvcore_transformers.models.weights import ensure_model

_REQUEST = "text"


@dataclass(frozen=True)
class AccuracyOptions:
    """The command line of ``kvcore accuracy``.

    Attributes:
        model: local model directory; None means the demonstration model.
        texts: files; none means the shipped ones.
        config, overrides: configuration file, and its keys (None meaning "not given").
        baseline: format to compare with.
        chunk: tokens in one forward pass.
        max_tokens: tokens read of each text; None means all.
        json: print JSON.
    """

    model: Path | None
    texts: tuple[Path, ...]
    config: Path | None
    overrides: Mapping[str, Any]
    baseline: str
    chunk: int
    max_tokens: int | None
    json: bool


class Accuracy(msgspec.Struct, frozen=True):
    """Predictions of two formats over the same tokens.

    Attributes:
        predictions: how many; every token of a text but its first is predicted once.
        kl: mean Kullback-Leibler divergence of the format's prediction from the baseline's, in nats.
        top1_agreement: share of predictions whose likeliest token is the same.
        perplexity, baseline_perplexity: exponential of the mean loss of the token that follows.
    """

    predictions: int
    kl: float
    top1_agreement: float
    perplexity: float
    baseline_perplexity: float


class AccuracyReport(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        model: name of its directory.
        format, format_options, baseline: what was compared.
        chunk: tokens in one forward pass.
        overall: over all texts.
        texts: by name of the file.
    """

    model: str
    format: str
    format_options: dict[str, Any]
    baseline: str
    chunk: int
    overall: Accuracy
    texts: dict[str, Accuracy]


@dataclass
class Sums:
    """Sums over predictions, of which every figure is made."""

    predictions: int = 0
    kl: float = 0.0
    same: int = 0
    loss: float = 0.0
    baseline_loss: float = 0.0

    def count(self, expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor) -> None:
        """Add predictions: logits ``[N, V]`` of the baseline and of the format, and the tokens ``[N]`` that followed."""
        reference, judged = (logits.double().log_softmax(-1) for logits in (expected, got))
        self.predictions += len(following)
        self.kl += float((reference.exp() * (reference - judged)).sum())
        self.same += int((expected.argmax(-1) == got.argmax(-1)).sum())
        at = following[:, None]
        self.loss -= float(judged.gather(-1, at).sum())
        self.baseline_loss -= float(reference.gather(-1, at).sum())

    def add(self, other: Sums) -> None:
        """Add those of another text."""
        self.predictions += other.predictions
        self.kl += other.kl
        self.same += other.same
        self.loss += other.loss
        self.baseline_loss += other.baseline_loss

    def accuracy(self) -> Accuracy:
        """The figures."""
        count = self.predictions
        worse, better = torch.tensor([self.loss, self.baseline_loss], dtype=torch.float64).div(count).exp().tolist()
        return Accuracy(count, self.kl / count, self.same / count, worse, better)


def accuracy_command(options: AccuracyOptions) -> None:
    """Measure and print."""
    report = measure(options, Console(stderr=True))
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_report(report, Console())


def measure(options: AccuracyOptions, console: Console) -> AccuracyReport:
    """Do everything but print the report; progress goes to ``console``.

    Raises ConfigError, PluginError, UnsupportedError or LayoutError for what cannot work, before weights are read where
    that can be known.
    """
    config = load_config(options.config, options.overrides)
    plain = msgspec.structs.replace(config.cache, format=options.baseline, format_options={})
    reference = msgspec.structs.replace(config, cache=plain)
    for settings in (reference, config):
        enabled(settings).format(settings.cache.format, **settings.cache.format_options)
    if options.chunk > config.cache.max_tokens:
        raise ConfigError("chunk out of range", chunk=options.chunk, max_tokens=config.cache.max_tokens)
    texts = read_texts(options.texts or shipped_texts())
    directory = ensure_model(options.model, lambda line: console.print(line, style="dim", highlight=False))
    tokenizer = load_tokenizer(directory)
    if tokenizer is None:
        raise ConfigError(
            "the model has no tokenizer, so it cannot read texts",
            model=str(directory),
            remedy="name a model directory with tokenizer files",
        )
    tokens = {name: _tokens(name, text, tokenizer, options.max_tokens) for name, text in texts.items()}
    model = load_model(directory)
    with cache_for(model, reference) as baseline, cache_for(model, config) as tested:
        for name, ids in tokens.items():
            _check_length(name, len(ids), baseline, tested)
        found = _read_all(model, baseline, tested, tokens, options.chunk, console)
    total = Sums()
    for sums in found.values():
        total.add(sums)
    return AccuracyReport(
        model=directory.name,
        format=config.cache.format,
        format_options=dict(config.cache.format_options),
        baseline=options.baseline,
        chunk=options.chunk,
        overall=total.accuracy(),
        texts={name: item.accuracy() for name, item in found.items()},
    )


def shipped_texts() -> tuple[Path, ...]:
    """The texts that come with this package: a story and a recipe."""
    folder = Path(str(importlib.resources.files("kvcore_transformers") / "data" / "accuracy"))
    return tuple(sorted(folder.glob("*.txt")))


def read_texts(paths: Sequence[Path]) -> dict[str, str]:
    """Read text files, by name (by path where two have the same). Raises ConfigError naming one that cannot be read."""
    names = [path.name for path in paths]
    texts = {}
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("a text cannot be read", path=str(path), cause=str(error)) from error
        texts[path.name if names.count(path.name) == 1 else str(path)] = text
    return texts


@torch.inference_mode()
def compare(
    model: Any,
    baseline: KVCache,
    tested: KVCache,
    tokens: Sequence[int],
    *,
    chunk: int,
    advance: Callable[[int], None] | None = None,
) -> Sums:
    """Have a model read one text through two caches.

    Args:
        model: a Hugging Face causal language model; its attention implementation is set to ``kvcore_paged``.
        baseline, tested: caches made for it, with room for the text.
        tokens: the text, two tokens at least.
        chunk: tokens in one forward pass.
        advance: told how many tokens were read.
    """
    model.set_attn_implementation(ATTENTION)
    ids, sums = torch.tensor(tokens), Sums()
    admitted: list[KVCache] = []
    try:
        for cache in (baseline, tested):
            cache.admit(_REQUEST, len(tokens))
            admitted.append(cache)
        for start in range(0, len(tokens), chunk):
            part = ids[start : start + chunk]
            following = ids[start + 1 : start + 1 + len(part)]
            expected, got = (_forward(model, cache, start, part)[: len(following)] for cache in (baseline, tested))
            sums.count(expected, got, following)
            if advance is not None:
                advance(len(part))
    finally:
        for cache in admitted:
            cache.release(_REQUEST)
    return sums


def _forward(model: Any, cache: KVCache, start: int, ids: torch.Tensor) -> torch.Tensor:
    """Logits ``[T, V]`` of the next tokens, with everything before ``start`` in the cache."""
    with cache.begin([(_REQUEST, len(ids))]) as step:
        result = model(
            input_ids=ids[None],
            position_ids=torch.arange(start, start + len(ids))[None],
            cache=batch_of(step, cache, model.config),
            use_cache=True,
        )
        step.commit()
    logits: torch.Tensor = result.logits[0]
    return logits


def _tokens(name: str, text: str, tokenizer: Any, most: int | None) -> tuple[int, ...]:
    ids = tuple(tokenizer(text)["input_ids"][:most])
    if len(ids) < 2:
        raise ConfigError("a text has nothing to predict", text=name, tokens=len(ids), expected="two tokens at least")
    return ids


def _check_length(name: str, tokens: int, *caches: KVCache) -> None:
    for cache in caches:
        longest = cache.model.max_length
        if longest and tokens > longest:
            raise ConfigError(
                "a text is longer than the longest sequence of the model",
                text=name,
                tokens=tokens,
                capacity=longest,
                remedy=f"read less of it: --max-tokens {longest}",
            )
        if cache.token_capacity is not None and tokens > cache.token_capacity:
            raise ConfigError(
                "a text does not fit the cache",
                text=name,
                format=cache.config.cache.format,
                tokens=tokens,
                capacity=cache.token_capacity,
                remedy="give more --memory, or read less of it with --max-tokens",
            )


def _read_all(
    model: Any,
    baseline: KVCache,
    tested: KVCache,
    texts: Mapping[str, Sequence[int]],
    chunk: int,
    console: Console,
) -> dict[str, Sums]:
    found = {}
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for name, tokens in texts.items():
            task = progress.add_task(escape(name), total=len(tokens))
            if not console.is_terminal:
                console.print(f"reading {name}, {len(tokens)} tokens", style="dim", highlight=False, markup=False)
            found[name] = compare(model, baseline, tested, tokens, chunk=chunk, advance=partial(progress.advance, task))
    return found


def print_report(report: AccuracyReport, console: Console) -> None:
    """Print a table: a row a text, and all together."""
    options = "".join(f", {key} {value}" for key, value in report.format_options.items())
    title = f"{report.model}: {report.format}{options} against {report.baseline}, {report.chunk} tokens a pass"
    table = Table(title=escape(title))
    for column in ("text", "predictions", "KL, nats", "same top token", "perplexity", "of the baseline", "change"):
        table.add_column(column, justify="left" if column == "text" else "right")
    for name, item in (*report.texts.items(), ("all", report.overall)):
        table.add_row(
            escape(name),
            str(item.predictions),
            f"{item.kl:.5f}",
            f"{item.top1_agreement:.1%}",
            f"{item.perplexity:.3f}",
            f"{item.baseline_perplexity:.3f}",
            f"{item.perplexity / item.baseline_perplexity - 1:+.2%}",
        )
    console.print(table)
