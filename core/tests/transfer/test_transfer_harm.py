"""A peer that misbehaves ends its own requests or its own conversation, and nobody else's."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import ProtocolError
from kvcore.transfer.messages import control
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, SendDone, SendFailed

R1, R2 = b"r1", b"r2"
# logical bytes of a unit in the kit's layout: 2 layers, k and v, 4 slots, 2 heads, 8 dims, fp32; and one byte of scale
KV, SCALE = 2 * 2 * 4 * 2 * 8 * 4, 2 * 4 * 2


@pytest.fixture
def net(kit: ModuleType) -> Any:
    return kit.Net(["r1", "r2"])


def table(*ids: int) -> dict[tuple[str, str], Any]:
    return {("full", "pages"): np.array(ids, np.int64)}


def others_are_served(kit: ModuleType, net: Any) -> None:
    net.sender.events()
    net.receivers[R2].ask("other", table(9), 0, 3)
    net.sender.begin("other", 3)
    for component in kit.COMPONENTS:
        net.sender_memory[component, 20] = ("other", component, 20)
    net.sender.offer("other", 0, 3, [kit.payload([20], 0)], last=True)
    net.settle()
    assert isinstance(net.receivers[R2].events()[-1], ReceiveDone)
    assert [type(event) for event in net.sender.events()] == [SendDone]


@pytest.mark.parametrize(
    ("components", "layers", "nbytes"),
    [
        (None, [], {"full/kv": 2**56 - 1, "full/scale": SCALE}),
        (None, [], {"full/kv": 2 * KV + 1, "full/scale": 2 * SCALE}),
        (None, [0], {"full/kv": KV + 1}),
        (["full/kv"], [], {"full/kv": 2 * KV, "full/scale": 1}),
    ],
)
def test_a_report_of_more_than_was_offered_fails_its_request(
    kit: ModuleType, net: Any, components: list[str] | None, layers: list[int], nbytes: dict[str, int]
) -> None:
    """Two units are offered (of one layer, of one component): no report may count more than lies in them."""
    attempt = net.receivers[R1].ask("x", table(3, 4), 0, 8)
    net.sender.begin("x", 8)
    units = kit.payload([11, 12], 0, components) if components else kit.payload([11, 12], 0)
    net.sender.offer("x", 0, 4, [units.of_layers(layers)])
    net.settle(reads=False)
    report = control.Pulled(src="r1", dst="sender-1", request="x", attempt=attempt, seq=0, nbytes=nbytes)
    net.sender.handle(R1, report)
    (failed,) = net.sender.events()
    assert isinstance(failed, SendFailed)
    assert isinstance(failed.error, ProtocolError)
    assert failed.error.fields["request"] == "x"
    net.settle()
    assert isinstance(net.receivers[R1].events()[-1], ReceiveFailed)
    others_are_served(kit, net)


def test_who_reads_nothing_reports_no_bytes(kit: ModuleType, net: Any) -> None:
    attempt = net.receivers[R1].ask("x", table(), 3, 3)
    net.settle()
    net.sender.begin("x", 3)
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    at = {"src": "r1", "dst": "sender-1", "request": "x", "attempt": attempt}
    net.sender.handle(R1, control.Pulled(**at, seq=0, nbytes={"full/kv": 1}))
    (failed,) = net.sender.events()
    assert isinstance(failed.error, ProtocolError)


def test_a_commit_counts_no_more_early_bytes_than_bytes(kit: ModuleType, net: Any) -> None:
    receiver = net.receivers[R1]
    receiver.ask("x", table(3), 0, 3)
    net.sender.begin("x", 3)
    net.settle()
    net.sender._requests["x"].readers[R1].early = 2**61
    net.sender.offer("x", 0, 3, [kit.payload([11], 0)], last=True)
    net.settle()
    assert not any(isinstance(event, ReceiveDone) for event in receiver.events())
    assert [type(event.error) for event in net.sender.events()] == [ProtocolError]
