"""Loggers of kvcore (no torch): as the program says by ``structlog.configure``, and quiet where it says nothing.

structlog's own defaults write every line, debug too, to stdout, which belongs to the program that embeds kvcore.
"""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import structlog


class Logger:
    """A named logger. Which configuration holds is looked up with every line: programs configure late.

    Where structlog was not configured, warnings and errors go to stderr and nothing else is said.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> Any:
        if structlog.is_configured():
            return getattr(structlog.get_logger(self._name), method)
        if method in ("debug", "info"):  # nothing is made for a line that nobody sees
            return _unsaid
        return getattr(_quiet(self._name), method)


def _unsaid(*_: Any, **__: Any) -> None:
    return


def get_logger(name: str) -> Logger:
    """Return the logger of a part of kvcore: ``kvcore.transfer``, …"""
    return Logger(name)


_LONGEST_TRACE = 20_000
"""Characters of a traceback that a line carries: its end, which says what happened."""


def plain_trace(error: BaseException) -> str:
    """The traceback of an error as text, without the values of local variables: a renderer that shows them would work for
    minutes on what a peer has sent."""
    return "".join(traceback.format_exception(error))[-_LONGEST_TRACE:]


def _quiet(name: str) -> Any:
    return structlog.wrap_logger(
        structlog.PrintLogger(sys.stderr),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        context_class=dict,
        cache_logger_on_first_use=False,
    ).bind(logger=name)
