"""What every ``kvcore`` process sets up first: its log, on stderr, so that stdout carries results alone."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import Any, TextIO, cast

import structlog

from kvcore.config import parse_bool
from kvcore.errors import ConfigError, nearest

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class _Stderr:
    """Whatever ``sys.stderr`` is when a line is written: programs and tests replace it."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text) if sys.stderr is not None else len(text)

    def flush(self) -> None:
        if sys.stderr is not None:
            sys.stderr.flush()


def configure_logging(environ: Mapping[str, str] = os.environ) -> None:
    """Log to stderr, for people by default.

    ``KVCORE_LOG_JSON`` (a boolean) gives one JSON object a line; ``KVCORE_LOG_LEVEL`` is ``debug``, ``info``,
    ``warning`` or ``error``. These choose what is said, never which bytes are kept or moved.

    Raises:
        ConfigError: a value that is not one of these, naming the variable.
    """
    as_json = parse_bool("KVCORE_LOG_JSON", environ.get("KVCORE_LOG_JSON", ""))
    level = environ.get("KVCORE_LOG_LEVEL", "").strip().lower() or "info"
    if level not in _LEVELS:
        raise ConfigError("unknown log level", variable="KVCORE_LOG_LEVEL", got=level, remedy=nearest(level, _LEVELS))
    colors = sys.stderr is not None and sys.stderr.isatty()
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(colors=colors)
    processors: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if as_json else "%H:%M:%S", utc=as_json),
    ]
    if as_json:
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Stderr())),
        cache_logger_on_first_use=False,
    )
