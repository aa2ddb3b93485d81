"""What the ``kvcore`` command does.

Subcommands come from plugins: their names from metadata, so that ``kvcore X`` imports only the plugin that provides
``X``.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import typer

from kvcore import __version__
from kvcore.cli.boot import configure_logging
from kvcore.cli.main import INTERRUPTED, say
from kvcore.contract import Command
from kvcore.errors import ConfigError, KVCoreError, LayoutError, PluginError, UnsupportedError, nearest
from kvcore.plugins import load_command, provided_names

USAGE = "usage: kvcore [--version] [--help] COMMAND [OPTIONS]"

# Typer carries its own copy of click's exceptions in some versions and imports click in others; this is the base class
# of every usage error in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]


class UsageError(KVCoreError):
    """A command line that cannot be understood."""

    code = "usage"


class _Interrupt(BaseException):
    """An interrupt on its way through typer, which would print a line of its own for it."""


def run(args: list[str]) -> int:
    """Run the command line and return its exit code. Raises KeyboardInterrupt, and OSError for output that fails."""
    try:
        configure_logging()
        return _dispatch(args)
    except KVCoreError as error:
        return _report(error, args)
    except (_Interrupt, typer.Abort):
        raise KeyboardInterrupt from None


def _dispatch(args: list[str]) -> int:
    if not args:
        print(_help())
        return 2
    first, rest = args[0], args[1:]
    if first in ("--help", "-h"):
        print(_help())
        return 0
    if first == "--version":
        print(f"kvcore {__version__}")
        return 0
    if first.startswith("-"):
        known = ("--help", "--version")
        remedy = f"{nearest(first, known)}; options of a command come after it"
        raise UsageError("unknown option", option=first, remedy=remedy)
    return _invoke(load_command(first), rest)


def _invoke(command: Command, args: list[str]) -> int:
    ended = False

    @functools.wraps(command.callback)
    def callback(*given: Any, **options: Any) -> Any:
        nonlocal ended
        try:
            result = command.callback(*given, **options)
        except KeyboardInterrupt:
            raise _Interrupt from None
        except typer.Exit:
            ended = True
            raise
        ended = True
        return result

    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["--help", "-h"]}
    )
    app.command(name=command.name, help=command.help)(callback)
    program = f"kvcore {command.name}"
    try:
        result = typer.main.get_command(app).main(args=args, prog_name=program, standalone_mode=False)
    except _UsageError as error:
        text = error.format_message() if hasattr(error, "format_message") else str(error)
        raise UsageError(text.rstrip("."), remedy=f"see {program} --help") from error
    if result == INTERRUPTED and not ended:  # typer's own answer, without a word
        raise KeyboardInterrupt
    return result if isinstance(result, int) else 0


def _help() -> str:
    """List every command with its help, and those whose plugin is broken as such."""
    rows = []
    for name in provided_names("commands"):
        try:
            rows.append((name, load_command(name).help))
        except PluginError as error:
            cause = error.fields.get("cause", error.message)
            rows.append((name, f"(broken: plugin {error.fields.get('plugin', '?')}: {cause}; see kvcore plugins)"))
    width = max((len(name) for name, _ in rows), default=0)
    lines = [USAGE, "", "The KV-cache layer of an LLM inference engine.", "", "commands:"]
    lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join([*lines, "", "kvcore COMMAND --help shows the options of a command."])


def _report(error: KVCoreError, args: Sequence[str]) -> int:
    """Print one message, as JSON where the command was asked for JSON, and return the exit code."""
    say(json.dumps({"error": error.as_dict()}) if "--json" in args else f"kvcore: {error}")
    # A combination refused at configuration, or whose bytes cannot be laid out, is a wrong configuration too.
    return 2 if isinstance(error, ConfigError | LayoutError | PluginError | UnsupportedError | UsageError) else 1
