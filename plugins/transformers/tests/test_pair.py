"""What the parent of two worker processes tells them, and how it notices that one of them does not answer."""

from __future__ import annotations

import queue
import socket
import time

import msgspec
import pytest

from kvcore.config import Config, load_config
from kvcore.errors import PeerLostError
from kvcore_transformers.serving import fleet as fleet_module
from kvcore_transformers.serving.channel import Channel, FromWorker, Ping, Pong, Ready, Start, Stop, Submit, ToWorker
from kvcore_transformers.serving.fleet import Fleet, Silent
from kvcore_transformers.serving.pair import Pair, Setup
from kvcore_transformers.serving.requests import GenerationRequest


class Recorder:
    """A worker that only listens."""

    def __init__(self, role):
        self.role, self.pid, self.sent = role, 1, []

    def send(self, message):
        self.sent.append(message)


class Recorders:
    def __init__(self):
        self.workers = {}

    def start(self, role):
        self.workers[role] = Recorder(role)
        return self.workers[role]


def test_only_the_decode_process_has_a_backup():
    """A prefill process retracts nothing: ``host_pool`` would claim its whole size there for nothing."""
    config = load_config(None, {"retraction.backend": "host_pool", "retraction.options": {"size": 1 << 40}})
    workers = Recorders()
    Pair(workers, Setup("/model", config, 16))
    (prefill,), (decode,) = (workers.workers[role].sent for role in ("prefill", "decode"))
    assert isinstance(prefill, Start)
    assert Config.from_json(decode.config) == config
    changed = Config.from_json(prefill.config)
    assert changed.retraction.policy == "recompute"
    assert msgspec.structs.replace(changed, retraction=config.retraction) == config


class FakeProcess:
    """Stands for a process; the test holds the other end of its channel."""

    pid = 4711

    def __init__(self, arguments, *, pass_fds, **options):
        self.socket = socket.socket(fileno=socket.dup(pass_fds[0]))
        FakeProcess.last = self
        self.killed = False

    def wait(self, timeout=None):
        if self.killed or timeout is None:
            return -9
        raise fleet_module.subprocess.TimeoutExpired("worker", timeout)

    def send_signal(self, number):
        self.killed = True


@pytest.fixture
def far(monkeypatch):
    """A fleet of one worker and the far end of its channel, which answers nothing by itself."""
    monkeypatch.setattr(fleet_module.subprocess, "Popen", FakeProcess)
    monkeypatch.setattr(fleet_module, "_PING_S", 0.05)
    fleet = Fleet(silence_s=0.4)
    worker = fleet.start("decode")
    yield fleet, worker, FakeProcess.last
    fleet.close()
    FakeProcess.last.socket.close()


def test_a_worker_that_answers_is_not_lost(far):
    fleet, worker, process = far
    inbox = queue.SimpleQueue()
    channel = Channel(process.socket, ToWorker, inbox.put)
    channel.send(Pong())
    begun = time.monotonic()
    pings = 0
    while time.monotonic() - begun < 1.2:
        assert fleet.receive(0.02) is None
        while not inbox.empty():
            assert inbox.get() == Ping()
            pings += 1
            channel.send(Pong())
    assert pings > 5
    channel.send(Ready("", 3))
    assert fleet.expect(worker, Ready, 5) == Ready("", 3)
    channel.close()


def test_a_worker_that_falls_silent_is_lost_once_and_typed(far):
    """It is not waited for again: neither by a message to it, nor when it is ended."""
    fleet, worker, process = far
    heard = []
    channel = Channel(process.socket, ToWorker, heard.append)
    channel.send(Pong())
    begun = time.monotonic()
    message = fleet.receive(5)
    assert message is not None
    assert isinstance(message.body, Silent)
    assert 0.35 < time.monotonic() - begun < 2
    error = worker.end_of(message.body)
    assert isinstance(error, PeerLostError)
    assert (error.fields["pid"], error.fields["seconds"]) == (process.pid, 0.4)
    channel.send(Pong())  # it goes on: nobody listens to it any more, and it finds the word to end
    assert fleet.receive(0.5) is None
    assert heard[-1] == Stop()
    with pytest.raises(PeerLostError, match="does not answer"):
        fleet.expect(worker, Ready, 5)
    worker.send(Ping())
    begun = time.monotonic()
    worker.stop()
    assert process.killed
    assert time.monotonic() - begun < 1
    channel.close()


def test_a_worker_that_never_starts_is_lost_when_its_time_to_start_is_over(far, monkeypatch):
    fleet, worker, _ = far
    assert fleet.receive(0.6) is None, "it may still import"
    monkeypatch.setattr(fleet_module, "START_S", 0.5)
    message = fleet.receive(5)
    assert message is not None
    assert isinstance(worker.end_of(message.body), PeerLostError)


def test_a_full_pipe_does_not_stop_the_parent():
    """A stopped process reads nothing: what is sent to it piles up in the kernel until there is no more room."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, FromWorker, lambda message: None, send_timeout_s=0.2)
    message = Submit(GenerationRequest("r", tuple(range(1_000_000)), 1))
    begun = time.monotonic()
    with pytest.raises(PeerLostError, match="takes no messages"):
        channel.send(message)
    assert time.monotonic() - begun < 5
    begun = time.monotonic()
    for _ in range(10):
        with pytest.raises(PeerLostError):
            channel.send(Ping())
    assert time.monotonic() - begun < 0.1
    channel.close()
    theirs.close()
