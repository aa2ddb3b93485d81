"""``kvcore plan``: the options (light: ``kvcore --help`` loads neither this command's work nor transformers)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvcore.contract import Command


def plan(
    config: Annotated[Path, typer.Argument(help="A model's config.json, or the directory it is in.")],
    format: Annotated[
        list[str] | None,
        typer.Option(help="KV format; may be repeated. [default: of --settings, or the model's dtype]"),
    ] = None,
    memory: Annotated[str | None, typer.Option(help="KV memory of each rank, e.g. 40GiB.")] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.", min=1)] = 1,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page. [default: 16]")] = None,
    max_requests: Annotated[
        int | None, typer.Option(help="Requests served at once. [default: 64 where each needs fixed room]", min=1)
    ] = None,
    settings: Annotated[Path | None, typer.Option(help="Configuration file of kvcore (TOML).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a token of a model costs, and how many fit into a memory. No weights are read."""
    from kvcore_transformers.commands.plan_report import PlanOptions, plan_command

    overrides = {"cache.memory": memory, "cache.page_size": page_size, "cache.max_requests": max_requests}
    plan_command(
        PlanOptions(
            model=config,
            settings=settings,
            overrides=overrides,
            formats=tuple(format or ()),
            tp=tp,
            max_requests=max_requests,
            json=json,
        )
    )


COMMANDS = (Command("plan", "Show bytes per token of a model, and the tokens and requests that fit a memory.", plan),)
