"""CLI subcommands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Command:
    """A CLI subcommand: a function whose typed parameters are its options (typer)."""

    name: str
    help: str
    callback: Callable[..., Any]
