"""What ``kvcore run`` does: prepare, serve with two processes, compare with ordinary runs, report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from kvcore.config import Config, load_config
from kvcore.errors import ConfigError, DuplicateRequestError, EmptyPromptError, KVCoreError
from kvcore.sizing import allocated_bytes, units_for_memory
from kvcore_transformers.fleet import Fleet
from kvcore_transformers.pair import Outcome, Pair, ServedRun, Setup, serve_alone
from kvcore_transformers.prompts import Prompt, read_prompts, shipped_prompts, tokenize
from kvcore_transformers.report import RunReport, build_report, print_report
from kvcore_transformers.requests import AskedEvent, DoneEvent, Event, FailedEvent, GenerationRequest, TokenEvent
from kvcore_transformers.weights import ensure_model

Refused = tuple[str, KVCoreError]


@dataclass(frozen=True)
class RunOptions:
    """The command line of ``kvcore run``; ``overrides`` are configuration keys, None meaning "not given"."""

    model: Path | None
    prompts: Path | None
    config: Path | None
    overrides: Mapping[str, Any]
    max_new_tokens: int
    chunk: int
    json: bool


def run_command(options: RunOptions) -> int:
    """Run, print, and return the exit code: 0, or 1 where a request failed."""
    signal.signal(signal.SIGTERM, _interrupt)
    progress_console = Console(stderr=True)
    report = execute(options, progress_console)
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_report(report, Console())
    return 1 if report.failed else 0


def execute(options: RunOptions, console: Console) -> RunReport:
    """Do everything but print the report.

    Raises ConfigError, PluginError or UnsupportedError for what cannot work, before a process is started.
    """
    config = load_config(options.config, options.overrides)
    prompts = read_prompts(options.prompts or shipped_prompts())
    directory = ensure_model(options.model, lambda line: console.print(line, style="dim", highlight=False))
    from kvcore_transformers import loading  # imports transformers: after everything that can be refused without it

    hf_config = loading.load_config(directory)
    tokenizer = loading.load_tokenizer(directory)
    config = _checked(config, hf_config, options.chunk, loading)
    requests, refused = make_requests(prompts, tokenizer, hf_config, options.max_new_tokens)
    setup = Setup(str(directory), config, options.chunk)
    with Fleet() as fleet, _Display(console) as display:
        pair = Pair(fleet, setup, display.event)
        display.workers({worker.role: worker.pid for worker in (pair.prefill, pair.decode)})
        display.begin("starting two processes", 0)
        pair.connect()
        display.begin("serving", len(requests))
        served = pair.serve(requests)
        workers = {worker.role: worker.pid for worker in (pair.prefill, pair.decode)}
        for worker in (pair.prefill, pair.decode):
            worker.stop()
        references = _references(fleet, setup, served, hf_config, display)
    return build_report(
        served,
        refused,
        references,
        decode_text=_decoder(tokenizer),
        format=config.cache.format,
        transport=config.transfer.transport,
        workers=workers,
    )


def make_requests(
    prompts: Sequence[Prompt], tokenizer: Any, hf_config: Any, max_new_tokens: int
) -> tuple[list[GenerationRequest], list[Refused]]:
    """Turn prompts into requests; what cannot be one is refused by itself, the others go on.

    A prompt with an id that an earlier line has is refused (the earlier one is served), and so is an empty one.
    """
    eos = getattr(hf_config, "eos_token_id", None)
    ends = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    requests: dict[str, GenerationRequest] = {}
    refused: list[Refused] = []
    for prompt in prompts:
        try:
            if prompt.id in requests:
                raise DuplicateRequestError("request id is in use; the first holder goes on", request=prompt.id)
            ids = tokenize(prompt, tokenizer, hf_config.vocab_size)
            if not ids:
                raise EmptyPromptError(
                    "a prompt needs at least one token", request=prompt.id, remedy="begin it with a start token"
                )
            requests[prompt.id] = GenerationRequest(prompt.id, ids, prompt.max_new_tokens or max_new_tokens, ends)
        except KVCoreError as error:
            refused.append((prompt.id, error))
    return list(requests.values()), refused


def _checked(config: Config, hf_config: Any, chunk: int, loading: Any) -> Config:
    """Refuse, before a process is started, what the workers would refuse: plugins, model, format, memory."""
    if chunk > config.cache.max_tokens:
        raise ConfigError("chunk out of range", chunk=chunk, max_tokens=config.cache.max_tokens)
    registry, layouts = loading.describe(config, hf_config)
    registry.transport(config.transfer.transport, **config.transfer.options)
    if config.retraction.policy == "backup":
        registry.backup(config.retraction.backend, **config.retraction.options)
    units_for_memory(layouts, config.cache.memory)
    return config


def _references(
    fleet: Fleet, setup: Setup, served: ServedRun, hf_config: Any, display: _Display
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Serve the requests that ended well again: with one kvcore process, and with plain transformers."""
    requests = [outcome.request for outcome in served.outcomes.values() if outcome.finished]
    if not requests:
        return {}
    single, plain = fleet.start("single"), fleet.start("plain")
    single.send(setup.message("single", _roomy(setup.config, hf_config, requests)))
    plain.send(setup.message("plain"))
    display.begin("comparing with a single-process run and with plain transformers", 2 * len(requests))
    found = {worker.role: serve_alone(fleet, worker, requests, display.advance) for worker in (single, plain)}
    return dict(found)
