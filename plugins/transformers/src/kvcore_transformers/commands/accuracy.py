"""``kvcore accuracy``: the options (light: ``kvcore --help`` loads no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcore.config import parse_settings
from kvcore.contract import Command


def accuracy(
    format: Annotated[str | None, typer.Option(help="KV format to judge. [default: fp32]")] = None,
    baseline: Annotated[str, typer.Option(help="KV format to compare with.")] = "bf16",
    text: Annotated[
        list[Path] | None, typer.Option(help="Text file, UTF-8; may be repeated. [default: two shipped texts]")
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="Local model directory. [default: SmolLM2-135M-Instruct, converted once]")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    memory: Annotated[str | None, typer.Option(help="KV memory of each format, e.g. 64MiB. [default: 256MiB]")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page. [default: 16]")] = None,
    chunk: Annotated[int, typer.Option(help="Tokens in one forward pass; 1 reads as decoding does.", min=1)] = 64,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens read of each text. [default: all]", min=2)] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key; may be repeated. Format options are "
                     "of the format that is judged."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:  # fmt: skip
    """Measure what a KV format changes in a model's predictions, on texts it is made to read."""
    from kvcore_transformers.commands.accuracy_report import (  # rich and the work, when run
        AccuracyOptions,
        accuracy_command,
    )

    flags = {"cache.format": format, "cache.memory": memory, "cache.page_size": page_size}
    accuracy_command(
        AccuracyOptions(
            model=model,
            texts=tuple(text or ()),
            config=config,
            overrides=parse_settings(settings or (), flags),
            baseline=baseline,
            chunk=chunk,
            max_tokens=max_tokens,
            json=json,
        )
    )


COMMANDS = (Command("accuracy", "Measure what a KV format changes in a model's predictions.", accuracy),)
