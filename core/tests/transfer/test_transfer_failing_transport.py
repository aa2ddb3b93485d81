"""A transport that raises what its contract does not name costs its link or its request, never the endpoint's thread."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import PeerLostError, TransferError
from kvcore.transfer.session.base import ReceiveFailed, ReceiveQuiet

R1, R2 = b"r1", b"r2"
TABLE = {("full", "pages"): np.array([3], np.int64)}


def broken(*_: Any) -> Any:
    raise ZeroDivisionError("a bug")


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def test_a_liveness_that_cannot_be_told_ends_its_link(net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", TABLE, 0, 3)
    monkeypatch.setattr(net.connections[R1], "alive", broken)
    receiver.tick()
    (failed,) = receiver.events()
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(failed.error, PeerLostError)
    assert "ZeroDivisionError" in str(failed.error)
    assert failed.quiet
    assert not receiver.connected
    receiver.tick()
    net.receivers[R2].tick()
    assert net.receivers[R2].connected


def test_a_read_that_cannot_be_polled_fails_its_request_and_is_not_quiet(kit: ModuleType, net: Any) -> None:
    """Nobody knows whether it writes still: its units stay reserved until it says so."""
    receiver = net.receivers[R1]
    receiver.ask("x", TABLE, 0, 3)
    net.sender.begin("x", 3)
    for component in kit.COMPONENTS:
        net.sender_memory[component, 11] = ("x", component, 11)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle(reads=False)
    (read,) = receiver.links[0]._requests["x"].reads
    poll = read.handle.poll
    read.handle.poll = broken
    receiver.tick()
    assert not [event for event in receiver.events() if isinstance(event, ReceiveFailed)]  # while it may become quiet
    net.clock.now += net.options.quiesce_s
    receiver.tick()
    (failed,) = receiver.events()
    assert isinstance(failed, ReceiveFailed)
    assert isinstance(failed.error, TransferError)
    assert failed.error.fields["call"] == "poll"
    assert not failed.quiet
    receiver.tick()
    assert receiver.events() == []
    read.handle.poll = poll
    net.settle()
    receiver.tick()
    assert [type(event) for event in receiver.events()] == [ReceiveQuiet]
