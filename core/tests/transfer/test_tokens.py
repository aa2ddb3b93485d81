"""A request that was begun with a token is served to who brings it; an id alone takes nothing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import DuplicateRequestError, ProtocolError, RequestError, TransferError
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone

R1, R2 = b"r1", b"r2"
TOKEN = b"only for r1"


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def table(*ids: int) -> dict[tuple[str, str], Any]:
    return {("full", "pages"): np.array(ids, np.int64)}


def begin(kit: ModuleType, net: Any, token: bytes) -> None:
    net.sender.begin("x", 4, token)
    for component in kit.COMPONENTS:
        net.sender_memory[component, 11] = ("x", component, 11)
    net.sender.offer("x", 0, 4, [kit.payload([11], 0)], last=True, engine_data=b"secret")


def refused(net: Any, peer: bytes) -> TransferError:
    (event,) = net.receivers[peer].events()
    assert isinstance(event, ReceiveFailed)
    assert event.quiet
    assert not net.memories[peer]
    assert isinstance(event.error, TransferError)
    assert "token" in event.error.message
    return event.error


def served(net: Any) -> None:
    done = net.receivers[R1].events()[-1]
    assert isinstance(done, ReceiveDone)
    assert done.engine_data == b"secret"
    assert [type(event) for event in net.sender.events()] == [SendDone]


@pytest.mark.parametrize("token", [b"", b"only for r2", TOKEN + b"x"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_another_token_takes_nothing(kit: ModuleType, net: Any, token: bytes, order: str) -> None:
    """Whoever asks first: a stranger's ask neither takes the request nor keeps its owner from it."""
    if order == "after":
        begin(kit, net, TOKEN)
    net.receivers[R2].ask("x", table(9), 0, 4, token)
    net.settle()
    net.receivers[R1].ask("x", table(3), 0, 4, TOKEN)
    net.settle()
    if order == "before":
        assert not net.receivers[R1].events()
        begin(kit, net, TOKEN)
        net.settle()
    refused(net, R2)
    served(net)


def test_a_request_without_a_token_is_not_for_who_brings_one(kit: ModuleType, net: Any) -> None:
    begin(kit, net, b"")
    net.receivers[R2].ask("x", table(9), 0, 4, TOKEN)
    net.settle()
    refused(net, R2)
    net.receivers[R1].ask("x", table(3), 0, 4)
    net.settle()
    served(net)


def test_the_same_token_twice_is_a_duplicate(kit: ModuleType, net: Any) -> None:
    net.receivers[R1].ask("x", table(3), 0, 4, TOKEN)
    net.settle()
    net.receivers[R2].ask("x", table(9), 0, 4, TOKEN)
    net.settle()
    (event,) = net.receivers[R2].events()
    assert isinstance(event, ReceiveFailed)
    assert isinstance(event.error, DuplicateRequestError)
    begin(kit, net, TOKEN)
    net.settle()
    served(net)


def test_how_a_request_ended_is_told_to_who_brings_its_token(kit: ModuleType, net: Any) -> None:
    net.sender.begin("x", 4, TOKEN)
    net.sender.abort("x", "of no interest to r2")
    net.receivers[R2].ask("x", table(9), 0, 4, b"wrong")
    net.settle()
    assert not net.receivers[R2].events()  # it waits, as for a request nobody has heard of
    net.receivers[R1].ask("x", table(3), 0, 4, TOKEN)
    net.settle()
    (event,) = net.receivers[R1].events()
    assert "of no interest" in event.error.message


@pytest.mark.parametrize("token", [b"t" * 257, "text", None])
def test_tokens_that_no_message_carries_are_refused(net: Any, token: Any) -> None:
    with pytest.raises(RequestError, match="token"):
        net.sender.begin("x", 4, token)
    assert not net.sender.has("x")
    with pytest.raises(RequestError, match="token"):
        net.receivers[R1].ask("x", table(3), 0, 4, token)
    assert not net.receivers[R1].has("x")


def test_a_longer_token_is_no_message() -> None:
    ask = control.Ask(src="r", dst="s", request="x", attempt=1, start=0, stop=1, layerwise=False, token=b"t" * 257)
    with pytest.raises(ProtocolError):
        control.decode(control.encode(ask))
