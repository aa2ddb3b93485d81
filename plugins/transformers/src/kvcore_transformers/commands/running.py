"""What ``kvcore run`` does: prepare, serve with two processes, compare with ordinary runs, report."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from kvcore.config import Config, load_config
from kvcore.engine.fitting import check_memory
from kvcore.engine.links import check_transfer
from kvcore.engine.sizing import Units, token_capacity, units_for_memory
from kvcore.errors import ConfigError, DuplicateRequestError, EmptyPromptError, KVCoreError
from kvcore.layout import Layout
from kvcore_transformers.commands.prompts import Prompt, read_prompts, shipped_prompts, tokenize
from kvcore_transformers.commands.report import Refusal, RunReport, build_report, print_report
from kvcore_transformers.commands.run_builtin import DEFAULT_COUNT, BuiltinModel, check_count, find
from kvcore_transformers.models.adapters import enabled
from kvcore_transformers.models.weights import ensure_model
from kvcore_transformers.serving.fleet import Fleet
from kvcore_transformers.serving.pair import Pair, ServedRun, Setup, serve_alone, without_backup
from kvcore_transformers.serving.requests import Event, FailedEvent, GenerationRequest, ReceivedEvent, TokenEvent


@dataclass(frozen=True)
class RunOptions:
    """The command line of ``kvcore run``; ``overrides`` are configuration keys, None meaning "not given"."""

    model: str | None
    prompts: Path | None
    count: int | None
    config: Path | None
    overrides: Mapping[str, Any]
    max_new_tokens: int
    chunk: int
    json: bool


def run_command(options: RunOptions) -> int:
    """Run, print, and return the exit code: 0, 1 where a request failed, 130 where it was interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    progress_console = Console(stderr=True)
    try:
        report = execute(options, progress_console)
    except KeyboardInterrupt:
        progress_console.print("kvcore: interrupted; the processes have been ended")
        return 130
    if options.json:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    else:
        print_report(report, Console())
    return 1 if report.failed else 0


def execute(options: RunOptions, console: Console) -> RunReport:
    """Do everything but print the report.

    Raises ConfigError, PluginError or UnsupportedError for what cannot work, before a process is started.
    """
    builtin = find(options.model)
    config = with_pool_size(load_config(options.config, options.overrides, builtin.settings if builtin else None))
    check_count(builtin, options.prompts, options.count)
    if builtin is not None:
        builtin.check_installed(config)
    _check_names(config)
    prompts = _prompts(options, builtin)
    directory = _directory(options.model, builtin, console)
    from kvcore_transformers.models import (
        loading,  # imports transformers: after everything that can be refused without it
    )

    hf_config = loading.load_config(directory)
    _check_sizes(config, hf_config, options.chunk, loading)
    tokenizer = loading.load_tokenizer(directory)
    entries = make_requests(
        prompts,
        tokenizer,
        vocab_size=hf_config.vocab_size,
        max_new_tokens=options.max_new_tokens,
        eos=loading.end_tokens(directory, hf_config),
    )
    requests = [entry for entry in entries if isinstance(entry, GenerationRequest)]
    setup = Setup(str(directory), config, options.chunk)
    with Fleet(config.transfer.peer_timeout_s) as fleet, _Display(console) as display:
        pair = Pair(fleet, setup, display.event, display.advance)
        display.workers(pair.workers)
        display.begin("starting two processes", 0)
        pair.connect()
        display.begin("serving", len(requests))
        served = pair.serve(requests)
        for worker in (pair.prefill, pair.decode):
            worker.stop()
        references = _references(fleet, setup, served, hf_config, loading, display)
    return build_report(
        served,
        entries,
        references,
        answers={prompt.id: prompt.answer for prompt in reversed(prompts) if prompt.answer is not None},
        decode_text=_decoder(tokenizer),
        format=config.cache.format,
        transport=config.transfer.transport,
        workers=pair.workers,
    )


def make_requests(
    prompts: Sequence[Prompt], tokenizer: Any, *, vocab_size: int, max_new_tokens: int, eos: tuple[int, ...]
) -> list[GenerationRequest | Refusal]:
    """Turn prompts into requests, in order; what cannot be one is refused by itself, the others go on.

    A prompt with an id that an earlier line has is refused (the earlier one is served), and so is an empty one.
    """
    entries: list[GenerationRequest | Refusal] = []
    taken: set[str] = set()
    for prompt in prompts:
        try:
            if prompt.id in taken:
                raise DuplicateRequestError("request id is in use; the first holder goes on", request=prompt.id)
            ids = tokenize(prompt, tokenizer, vocab_size)
            if not ids:
                raise EmptyPromptError(
                    "a prompt needs at least one token", request=prompt.id, remedy="begin it with a start token"
                )
        except KVCoreError as error:
            entries.append(Refusal(prompt.id, error))
        else:
            taken.add(prompt.id)
            entries.append(GenerationRequest(prompt.id, ids, prompt.max_new_tokens or max_new_tokens, eos))
    return entries


def _prompts(options: RunOptions, builtin: BuiltinModel | None) -> list[Prompt]:
    """The file that was named; else the task of a built-in model; else the shipped file."""
    if options.prompts is None and builtin is not None:
        return builtin.prompts(options.count or DEFAULT_COUNT)
    return read_prompts(options.prompts or shipped_prompts())


def _directory(model: str | None, builtin: BuiltinModel | None, console: Console) -> Path:
    if builtin is not None:
        return ensure_model(builtin.directory())
    path = None if model is None else Path(model)
    return ensure_model(path, lambda line: console.print(line, style="dim", highlight=False))


def with_pool_size(config: Config) -> Config:
    """Give ``host_pool`` as much host memory as the cache has where no size is configured: every request fits once."""
    retraction = config.retraction
    if (retraction.policy, retraction.backend) != ("backup", "host_pool") or "size" in retraction.options:
        return config
    options = {**retraction.options, "size": config.cache.memory}
    return msgspec.structs.replace(config, retraction=msgspec.structs.replace(retraction, options=options))


def _check_names(config: Config) -> None:
    """Refuse unknown plugins, formats, transports, addresses and backups, and more memory than there is, before a model is
    converted or loaded."""
    registry = enabled(config)
    registry.format(config.cache.format, **config.cache.format_options)
    check_transfer(config, registry, {})
    check_memory(registry.pool_builders(), config.cache.device, config.cache.memory)
    if config.retraction.policy == "backup":
        registry.backup(config.retraction.backend, **config.retraction.options).close()


def _check_sizes(config: Config, hf_config: Any, chunk: int, loading: Any) -> None:
    """Refuse, before a process is started, a model no plugin can hold and a cache without room for a token."""
    if chunk > config.cache.max_tokens:
        raise ConfigError("chunk out of range", chunk=chunk, max_tokens=config.cache.max_tokens)
    _, layouts = loading.describe(config, hf_config)
    _units(config, layouts, config.cache.memory)


def _references(
    fleet: Fleet, setup: Setup, served: ServedRun, hf_config: Any, loading: Any, display: _Display
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Serve the requests that ended well again: with one kvcore process, and with plain transformers."""
    requests = [outcome.request for outcome in served.outcomes.values() if outcome.finished]
    if not requests:
        return {}
    single, plain = fleet.start("single"), fleet.start("plain")
    single.send(setup.message("single", _roomy(setup.config, hf_config, requests, loading)))
    plain.send(setup.message("plain"))
    display.begin("comparing with a single-process run and with plain transformers", 2 * len(requests))
    return serve_alone(fleet, (single, plain), requests, display.advance)


def _roomy(config: Config, hf_config: Any, requests: Sequence[GenerationRequest], loading: Any) -> Config:
    """The same cache with room for all requests at once, so that nothing is retracted in the run compared with."""
    _, layouts = loading.describe(config, hf_config)
    page = config.cache.page_size
    needed = sum(len(item.prompt) + item.max_new_tokens + 2 * page for item in requests)
    memory = config.cache.memory
    while (token_capacity(layouts, _units(config, layouts, memory)) or needed) < needed:
        memory *= 2
    roomy = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, memory=memory))
    return without_backup(roomy)


def _units(config: Config, layouts: Mapping[str, Layout], memory: int) -> Units:
    """The units a cache of this configuration and ``memory`` bytes has."""
    cache = config.cache
    return units_for_memory(
        layouts,
        memory,
        max_requests=cache.max_requests,
        step_tokens=cache.max_tokens,
        step_rows=cache.max_rows,
        checkpoints=cache.checkpoints,
    )


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    if tokenizer is None:
        return lambda tokens: " ".join(map(str, tokens))
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def _interrupt(number: int, frame: Any) -> None:
    raise KeyboardInterrupt  # as Ctrl-C: the way out ends the processes


class _Display:
    """Progress on a console: bars on a terminal, plain lines elsewhere. A context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._title = ""
        self._total = 1
        self._tokens = 0

    def workers(self, pids: Mapping[str, int]) -> None:
        """Say which processes were started."""
        self._line(", ".join(f"{role} process {pid}" for role, pid in pids.items()))

    def begin(self, title: str, total: int) -> None:
        """The next part of the work; ``total`` 0 where it has no parts."""
        if self._task is not None:
            self._progress.update(self._task, completed=self._total, total=self._total)
        self._title, self._total, self._tokens = title, total or 1, 0
        self._task = self._progress.add_task(title, total=total or None)
        if not self._console.is_terminal:
            self._line(title)

    def event(self, event: Event) -> None:
        """Something happened to a request."""
        if isinstance(event, TokenEvent):
            self._tokens += 1
            if self._task is not None:
                self._progress.update(self._task, description=f"{self._title}: {self._tokens} tokens")
        elif isinstance(event, FailedEvent):
            self._line(f"{event.request} failed: {event.error['code']}: {event.error['message']}")
        elif isinstance(event, ReceivedEvent) and not self._console.is_terminal:
            self._line(f"{event.request} pulled")

    def advance(self, request: str) -> None:
        """One request is over."""
        if self._task is not None:
            self._progress.advance(self._task)
        if not self._console.is_terminal:
            self._line(f"{request} done")

    def _line(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    def __enter__(self) -> _Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
