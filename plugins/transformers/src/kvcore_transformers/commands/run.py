"""``kvcore run``: the options (light: ``kvcore --help`` loads no torch)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcore.config import parse_settings
from kvcore.contract import Command


def run(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|guard",
            help="Local model directory; or 'guard', a tiny model that answers wrongly where any part of its cache or "
            "state is lost, with its own task, format mxfp8 and little memory. [default: SmolLM2-135M-Instruct, "
            "converted once]",
        ),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompt file, JSON lines. [default: 16 shipped prompts, or the model's task]")
    ] = None,
    count: Annotated[int | None, typer.Option(help="Prompts of 'guard'. [default: 32]", min=1)] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    format: Annotated[str | None, typer.Option(help="KV format. [default: fp32]")] = None,
    transport: Annotated[str | None, typer.Option(help="How KV moves between the processes. [default: shm]")] = None,
    memory: Annotated[str | None, typer.Option(help="KV memory of each process, e.g. 64MiB. [default: 256MiB]")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page. [default: 16]")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate per prompt.", min=1)] = 24,
    retraction: Annotated[
        str | None, typer.Option(help="'backup', 'recompute', or the name of a backup backend. [default: backup]")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Prompt tokens in one forward pass.", min=1)] = 64,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key; may be repeated.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
) -> None:
    """Serve prompts with a prefill process and a decode process, and compare the text with ordinary runs."""
    from kvcore_transformers.commands.running import (  # rich and the worker machinery, only when run
        RunOptions,
        run_command,
    )

    flags = {
        "cache.format": format,
        "cache.memory": memory,
        "cache.page_size": page_size,
        "transfer.transport": transport,
    }
    options = RunOptions(
        model=model,
        prompts=prompts,
        count=count,
        config=config,
        overrides=parse_settings(settings or (), {**flags, **_retraction(retraction)}),
        max_new_tokens=max_new_tokens,
        chunk=chunk,
        json=json,
    )
    raise typer.Exit(run_command(options))


def _retraction(name: str | None) -> dict[str, str | None]:
    if name in (None, "backup", "recompute"):
        return {"retraction.policy": name}
    return {"retraction.policy": "backup", "retraction.backend": name}


COMMANDS = (Command("run", "Serve prompts from a real model with a prefill process and a decode process.", run),)
