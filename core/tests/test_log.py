"""What a program that embeds kvcore finds in its output: what it asked for, and never a line on stdout."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs

from kvcore.log import get_logger, plain_trace
from kvcore.plugins import load_plugins

LOG = get_logger("kvcore.test")


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """As in a program that has not configured structlog; ``capture_logs`` of other tests counts as having done so."""
    before, configured = structlog.get_config(), structlog.is_configured()
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    if configured:
        structlog.configure(**before)


def test_without_a_configuration_nothing_below_warning_and_nothing_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    LOG.debug("a detail", x=1)
    LOG.info("a fact")
    assert capsys.readouterr() == ("", "")
    LOG.warning("careful", x=1)
    LOG.error("broken", cause="y")
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 2
    assert all(word in lines[0] for word in ("warning", "careful", "x=1", "kvcore.test"))
    assert "broken" in lines[1]


def test_what_a_program_configures_holds_also_when_it_does_so_late(capsys: pytest.CaptureFixture[str]) -> None:
    LOG.debug("before")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    LOG.debug("below")
    LOG.info("after")
    captured = capsys.readouterr()
    assert ("after" in captured.out, captured.out.count("\n"), captured.err) == (True, 1, "")
    with capture_logs() as logs:
        LOG.info("seen", x=1)
    assert logs == [{"event": "seen", "x": 1, "log_level": "info"}]


def test_every_logger_of_core_is_one_of_these(capsys: pytest.CaptureFixture[str]) -> None:
    import kvcore.plugins.loader
    import kvcore.retraction.retractor
    import kvcore.transfer.session.receiver
    import kvcore.transfer.shm.server

    for logger in (
        kvcore.plugins.loader._log,
        kvcore.retraction.retractor.log,
        kvcore.transfer.session.receiver._log,
        kvcore.transfer.shm.server._log,
    ):
        logger.debug("x")
    load_plugins(["not-there"], strict=False)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1


def test_tracebacks_show_no_values_of_locals(capsys: pytest.CaptureFixture[str]) -> None:
    """Rendering them costs minutes where one is large, and a log is no place for what was computed."""

    def fails() -> None:
        secret = "s3cret" + "!"  # noqa: F841
        raise ValueError("a bug")

    try:
        fails()
    except ValueError as error:
        LOG.exception("it failed")
        shown = capsys.readouterr().err
        trace = plain_trace(error)
    for text in (shown, trace):
        assert "ValueError: a bug" in text
        assert "s3cret!" not in text
    assert len(plain_trace(ValueError("x" * 10**6))) == 20_000
