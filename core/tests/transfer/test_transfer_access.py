"""Without keys a sender serves its own user, and tells others nothing, over real sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
import zmq

from kvcore.errors import HandshakeError
from kvcore.transfer.messages import control
from kvcore.transfer.messages.manifest import Manifest
from kvcore.transfer.session.base import TransferOptions
from kvcore.transfer.users import Caller, caller_of, is_own, uids_of
from kvcore.transfer.wire.access import SameUser
from kvcore.transfer.wire.endpoint import SenderEndpoint

OPTIONS = TransferOptions(heartbeat_s=0.2, hello_timeout_s=2.0)
STRANGER = 12345
Ask = Callable[..., control.AnyMessage]


def everybody(uid: int) -> Callable[..., dict[Caller, int]]:
    return lambda callers: dict.fromkeys(callers, uid)


@contextmanager
def serving(kit: ModuleType, **options: Any) -> Iterator[tuple[SenderEndpoint, Ask]]:
    """A sender, and a way to say hello with another model and hear its answer."""
    manifest: Manifest = kit.manifest("sender", "s", kit.layout(), units=8, endpoint=b"e")
    context = zmq.Context()

    def ask(data: bytes | None = None, instance: str = "r") -> control.AnyMessage:
        mine = msgspec.structs.replace(kit.manifest("receiver", instance, kit.layout(), units=8), model="other")
        hello = control.Hello(src=instance, dst="", protocol=mine.protocol, manifest=mine.encode())
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.ROUTING_ID, instance.encode())
        dealer.connect(endpoint.address)
        dealer.send(control.encode(hello) if data is None else data)
        assert dealer.poll(5000), "no answer"
        return control.decode(dealer.recv())

    with SenderEndpoint(manifest, options=OPTIONS, **options) as endpoint:
        try:
            yield endpoint, ask
        finally:
            context.destroy(linger=0)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc://*"])
def test_ones_own_user_is_told_what_differs(kit: ModuleType, bind: str) -> None:
    with serving(kit, bind=bind) as (endpoint, ask):
        told = ask()
        assert isinstance(told, control.Refused)
        fields = told.error.unpack().fields
        assert (fields["field"], fields["remote"], "local" in fields) == ("model", "other", True)
        assert endpoint.stats().peers == 0


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1:*", "ipc://*"])
@pytest.mark.parametrize("data", [None, b"no message", b"\x81\xa4type\xa5hello"])
def test_another_user_is_told_nothing(kit: ModuleType, bind: str, data: bytes | None) -> None:
    with serving(kit, bind=bind, uids=everybody(STRANGER)) as (endpoint, ask):
        told = ask(data)
        assert isinstance(told, control.Refused)
        error = told.error.unpack()
        assert isinstance(error, HandshakeError)
        assert (error.message, error.fields) == ("not welcome at this sender", {})
        assert endpoint.stats().peers == 0


def test_who_is_unknown_is_another_user(kit: ModuleType) -> None:
    with serving(kit, uids=lambda callers: {}) as (_, ask):
        assert isinstance(told := ask(), control.Refused)
        assert not told.error.unpack().fields


def test_a_refusal_is_said_once_and_nothing_later_is_handled(kit: ModuleType) -> None:
    with serving(kit, uids=everybody(STRANGER)) as (endpoint, _), zmq.Context() as context:
        with context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(endpoint.address)
            for _ in range(5):
                dealer.send(b"anything")
            assert dealer.poll(5000)
            dealer.recv()
            assert not dealer.poll(300)


def test_anyone_may_be_served_and_is_told_the_field_only(kit: ModuleType) -> None:
    with serving(kit, allow="anyone", uids=everybody(STRANGER)) as (_, ask):
        told = ask()
        assert isinstance(told, control.Refused)
        error = told.error.unpack()
        assert (error.message, error.fields) == ("peers differ in model", {"field": "model"})


def test_with_keys_the_user_does_not_matter(kit: ModuleType) -> None:
    from kvcore.transfer.wire.loop import CurveKeys

    pairs = [zmq.curve_keypair() for _ in range(2)]
    keys = CurveKeys(*pairs[0], (pairs[1][0],))
    manifest = kit.manifest("sender", "s", kit.layout(), units=8, endpoint=b"e")
    with SenderEndpoint(manifest, options=OPTIONS, keys=keys, uids=everybody(STRANGER)) as endpoint:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.curve_publickey, dealer.curve_secretkey = pairs[1]
            dealer.curve_serverkey = pairs[0][0]
            dealer.connect(endpoint.address)
            dealer.send(b"no message")
            assert dealer.poll(5000)
            assert isinstance(control.decode(dealer.recv()), control.Bye)


# --- who it is ---


@contextmanager
def accepted(family: int) -> Iterator[tuple[socket.socket, socket.socket]]:
    address: Any = (
        ("127.0.0.1", 0) if family == socket.AF_INET else f"\0kvcore-test-{os.getpid()}-{time.monotonic_ns()}"
    )
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen()
        with socket.socket(family) as client:
            client.connect(listener.getsockname())
            server, _ = listener.accept()
            with server:
                yield server, client


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_the_user_of_a_local_connection_is_found(family: int) -> None:
    with accepted(family) as (server, client):
        caller = caller_of(server)
        assert uids_of([caller]) == {caller: os.geteuid()}
        assert is_own(os.geteuid())
        assert not is_own(None)
        client.close()
        if family == socket.AF_INET:
            assert uids_of([caller]) == {}  # the kernel would say root of a socket that is closed


def test_other_connections_and_hosts_are_nobody() -> None:
    with accepted(socket.AF_INET) as (server, _):
        mine = caller_of(server)
        here, there = mine.row.split()
        assert (
            uids_of([Caller(row=f"{there} {here[:-1]}F0"), Caller(row="0100000A:0050 0100007F:0050"), Caller()]) == {}
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_UNIX])
def test_a_child_of_another_user_is_seen_as_such(kit: ModuleType, tmp_path: Path, family: int) -> None:
    code = """
import os, socket, sys
family, address = int(sys.argv[1]), eval(sys.argv[2])
os.setgid(65534); os.setuid(65534)
with socket.socket(family) as client:
    client.connect(address)
    client.recv(1)
"""
    address: Any = ("127.0.0.1", 0) if family == socket.AF_INET else f"\0kvcore-test-{time.monotonic_ns()}"
    with socket.socket(family) as listener:
        listener.bind(address)
        listener.listen()
        name = listener.getsockname()
        name = name.decode() if isinstance(name, bytes) else name
        child = subprocess.Popen([sys.executable, "-S", "-c", code, str(int(family)), repr(name)])
        listener.settimeout(10)
        server, _ = listener.accept()
        with server:
            caller = caller_of(server)
            assert uids_of([caller]) == {caller: 65534}
            server.send(b"x")
        assert child.wait(10) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_users_hello_over_a_real_socket_is_refused(kit: ModuleType) -> None:
    code = """
import os, sys, zmq
os.setgid(65534); os.setuid(65534)
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    dealer.linger = 0
    dealer.connect(sys.argv[1])
    dealer.send(b"hello")
    assert dealer.poll(5000)
    sys.stdout.buffer.write(dealer.recv())
"""
    with serving(kit) as (endpoint, ask):
        child = subprocess.run(
            [sys.executable, "-c", code, endpoint.address], capture_output=True, timeout=20, check=False
        )
        assert child.returncode == 0, child.stderr
        told = control.decode(child.stdout)
        assert isinstance(told, control.Refused)
        assert not told.error.unpack().fields
        assert isinstance(mine := ask(), control.Refused)
        assert mine.error.unpack().fields["field"] == "model"


def test_a_descriptor_that_becomes_another_connections_is_asked_for_again() -> None:
    seen: list[int] = []

    def uids(callers: Any) -> dict[Caller, int]:
        seen.append(len(callers))
        return dict.fromkeys(callers, os.geteuid() if len(seen) == 1 else STRANGER)

    users = SameUser(uids)
    with accepted(socket.AF_INET) as (first, _), accepted(socket.AF_INET) as (second, _):
        users.accepted(7, first)
        assert [users.admits(7), users.admits(7)] == [True, True]
        users.forget(7)
        users.accepted(7, second)
        assert [users.admits(7), users.admits(8)] == [False, False]
        users.forget(7)
        assert not users.admits(7)
    assert seen[:2] == [1, 1]
