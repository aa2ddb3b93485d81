"""Models that ``kvcore run`` knows by name, with a task, settings and the packages these need (no torch)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from kvcore.config import Config
from kvcore.errors import ConfigError, PluginError
from kvcore.plugins import provided_names
from kvcore_transformers.commands.prompts import Prompt
from kvcore_transformers.guard import model as guard
from kvcore_transformers.guard import task

DEFAULT_COUNT = 32
"""Prompts of a task, unless told otherwise."""


@dataclass(frozen=True)
class BuiltinModel:
    """A model that comes with this package, and how it is run unless told otherwise.

    Attributes:
        directory: where its weights are.
        prompts: ``prompts(count)``: prompts of its task, with their answers.
        settings: configuration keys, for what neither a file nor the command line say.
        plugins: distributions of the plugins that the settings name, by plugin.
        formats: the same by format.
    """

    directory: Callable[[], Path]
    prompts: Callable[[int], list[Prompt]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    plugins: Mapping[str, str] = field(default_factory=dict)
    formats: Mapping[str, str] = field(default_factory=dict)

    def check_installed(self, config: Config) -> None:
        """Raise PluginError, saying what to install, where a plugin that ``config`` asks for is not there."""
        installed = {entry.name for entry in entry_points(group="kvcore")}
        for plugin, distribution in self.plugins.items():
            if plugin in config.plugins and plugin not in installed:
                raise PluginError(
                    "the model's states need a plugin that is not installed",
                    plugin=plugin,
                    remedy=f"pip install {distribution}",
                )
        for name, distribution in self.formats.items():
            if name == config.cache.format and name not in provided_names("formats"):
                raise PluginError(
                    "the format is not installed",
                    format=name,
                    remedy=f"pip install {distribution}, or choose another one with --format",
                )


def guard_prompts(count: int) -> list[Prompt]:
    """The first ``count`` sequences of the guard model's task."""
    batch = task.sequences(count)
    return [
        Prompt(f"ledger-{number}", token_ids=tuple(prompt), answer=tuple(answer), max_new_tokens=len(answer))
        for number, (prompt, answer) in enumerate(zip(batch.prompts.tolist(), batch.answers.tolist(), strict=True))
    ]


BUILTIN: dict[str, BuiltinModel] = {
    guard.NAME: BuiltinModel(
        directory=guard.weights_directory,
        prompts=guard_prompts,
        settings={
            "plugins": ["mamba_backup"],
            "cache.format": "mxfp8",
            "cache.page_size": 8,
            # 28 pages: room for two requests at their start, 13 pages each; the older one needs 16 in the end.
            "cache.memory": "136KiB",
            "cache.max_requests": 4,
            "cache.max_rows": 4,
            "cache.max_tokens": 64,
        },
        plugins={"mamba_backup": "kvcore-mamba-backup"},
        formats={"mxfp8": "kvcore-mxfp8"},
    )
}


def find(model: str | None) -> BuiltinModel | None:
    """The model of that name. A directory of the same name is reached as ``./NAME``."""
    return BUILTIN.get(model or "")


def check_count(model: BuiltinModel | None, prompts: Path | None, count: int | None) -> None:
    """Raise ConfigError where a number of prompts is given and nothing makes prompts."""
    if count is None or (model is not None and prompts is None):
        return
    raise ConfigError(
        "only a model with a task of its own makes as many prompts as it is asked for",
        option="--count",
        got=count,
        remedy=f"leave --count out (a prompt file is served whole), or use --model {' or '.join(BUILTIN)}",
    )
