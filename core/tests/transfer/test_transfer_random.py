"""Random interleavings of a sender, two receivers, their engines, late reads, aborts, deaths and garbage.

The wire keeps order and loses nothing except when a process dies. The sender's engine reuses units the moment it is
told that it may, and so does the receivers'; the memory says whose bytes lie where. Whatever happens:

- every begin and every ask ends in exactly one terminal event;
- what a receiver is told is done, is the bytes of exactly that request and of one begin of it;
- no read lands in a unit that is not held by the request it was started for;
- in the end nothing is held.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from kvcore.errors import KVCoreError, RequestError, TransferError
from kvcore.transfer.session.base import ReceiveDone, ReceiveFailed, ReceiveQuiet, SendDone, SendFailed, TransferOptions

OPTIONS = TransferOptions(lease_s=6.0, heartbeat_s=1.0, peer_timeout_s=5.0, ask_timeout_s=20.0, read_timeout_s=6.0,
                          quiesce_s=4.0)  # fmt: skip
REQUESTS = ("a", "b", "c")


class World:
    """Engines on both ends of a :class:`Net`, and what they believe."""

    def __init__(self, kit: ModuleType, rng: random.Random) -> None:
        self.kit, self.rng = kit, rng
        self.net = kit.Net([], options=OPTIONS)
        self.started = 0
        self.begins = 0
        self.sending: dict[str, dict[str, Any]] = {}
        self.free_source = list(range(1, 40))
        self.receiving: dict[bytes, dict[int, dict[str, Any]]] = {}
        self.free: dict[bytes, list[int]] = {}
        self.terminal: dict[tuple[Any, ...], int] = {}
        self.done = self.failed = 0
        for peer in (b"p", b"q"):
            self.restart_receiver(peer)

    # --- the sender's engine ---

    def begin(self) -> None:
        self.sender_events()
        request = self.rng.choice(REQUESTS)
        tokens = self.rng.choice([0, 1, 4, 5, 8, 15])
        if request in self.sending:
            with pytest.raises(RequestError):
                self.net.sender.begin(request, tokens)
            return
        if len(self.free_source) < self.kit.pages(tokens):
            return
        self.begins += 1
        units = [self.free_source.pop(self.rng.randrange(len(self.free_source))) for _ in range(self.kit.pages(tokens))]
        self.sending[request] = {"begin": self.begins, "tokens": tokens, "units": units, "at": 0, "last": False}
        self.net.sender.begin(request, tokens)

    def offer(self) -> None:
        self.sender_events()
        open_requests = [r for r, s in self.sending.items() if not s["last"]]
        if not open_requests:
            return
        request = self.rng.choice(open_requests)
        state = self.sending[request]
        start = state["at"]
        stop = min(state["tokens"], start + self.rng.choice([1, 4, 5, 15]))
        last = stop == state["tokens"]
        if last:
            self.net.sender.note_chunk_start(request, last=True)
        lo, hi = start // 4, (self.kit.pages(stop) if last else stop // 4)
        for index in range(lo, hi):
            for component in self.kit.COMPONENTS:
                content = (request, state["begin"], component, index)
                self.net.sender_memory[component, state["units"][index]] = content
        payloads = [self.kit.payload(state["units"][lo:hi], lo)]
        data = str(state["begin"]).encode() if last else b""
        self.net.sender.offer(request, start, stop, payloads, last=last, engine_data=data)
        state["at"], state["last"] = stop, last

    def abort_send(self) -> None:
        self.sender_events()
        if self.sending:
            self.net.sender.abort(self.rng.choice(list(self.sending)), "random")

    def sender_events(self) -> None:
        for event in self.net.sender.events():
            assert isinstance(event, SendDone | SendFailed)
            state = self.sending.pop(event.request)  # a second terminal event would not find it
            self.terminal["send", state["begin"]] = self.terminal.get(("send", state["begin"]), 0) + 1
            self.release_source(state)

    def release_source(self, state: dict[str, Any]) -> None:
        for unit in state["units"]:
            for component in self.kit.COMPONENTS:
                self.net.sender_memory[component, unit] = "someone else's"
        self.free_source += state["units"]

    # --- the receivers' engines ---

    def restart_receiver(self, peer: bytes) -> None:
        self.started += 1
        if peer in self.net.receivers:
            self.free.pop(peer)
        self.receiving[peer] = {}
        self.free[peer] = list(range(1, 30))
        self.net.start_receiver(peer, f"{peer.decode()}{self.started}", hello=False)
        held = self.receiving[peer]

        def on_write(unit: int) -> None:
            assert any(unit in state["units"] for state in held.values()), "a late read hit a unit that nobody holds"

        self.net.connections[peer].on_write = on_write
        self.net.receivers[peer].hello()

    def ask(self) -> None:
        peer = self.rng.choice(list(self.net.receivers))
        session, request = self.net.receivers[peer], self.rng.choice(REQUESTS)
        tokens = self.sending[request]["tokens"] if request in self.sending else self.rng.choice([0, 1, 4, 5, 8, 15])
        here = self.rng.choice([0, 0, 0, tokens])
        count = self.kit.pages(tokens) if here < tokens else 0
        if len(self.free[peer]) < count:
            return
        units = [self.free[peer].pop() for _ in range(count)]
        try:
            attempt = session.ask(request, {self.kit.KEY: np.array(units, np.int64)}, here, tokens)
        except (RequestError, TransferError):
            self.free[peer] += units
            return
        self.receiving[peer][attempt] = {"request": request, "units": units, "tokens": tokens, "over": False}

    def abort_receive(self) -> None:
        peer = self.rng.choice(list(self.net.receivers))
        names = [request for request, _ in self.net.receivers[peer].requests()]
        if names:
            self.net.receivers[peer].abort(self.rng.choice(names), "random")

    def receiver_events(self) -> None:
        for peer, session in self.net.receivers.items():
            for event in session.events():
                if isinstance(event, ReceiveDone | ReceiveFailed):
                    state = self.receiving[peer][event.attempt]
                    assert not state["over"], "a second terminal event"
                    assert state["request"] == event.request
                    state["over"] = True
                if isinstance(event, ReceiveDone):
                    self.done += 1
                    self.check_content(peer, event, state)
                elif isinstance(event, ReceiveFailed):
                    self.failed += 1
                    assert isinstance(event.error, KVCoreError)
                if isinstance(event, ReceiveDone | ReceiveQuiet) or (isinstance(event, ReceiveFailed) and event.quiet):
                    state = self.receiving[peer].pop(event.attempt)
                    self.free[peer] += state["units"]
                    for unit in state["units"]:
                        for component in self.kit.COMPONENTS:
                            self.net.memories[peer][component, unit] = None

    def check_content(self, peer: bytes, event: ReceiveDone, state: dict[str, Any]) -> None:
        assert event.num_tokens == state["tokens"]
        for index, unit in enumerate(state["units"]):
            for component in self.kit.COMPONENTS:
                want = (event.request, int(event.engine_data), component, index)
                assert self.net.memories[peer][component, unit] == want

    # --- the world ---

    def read(self) -> None:
        running = [read for c in self.net.connections.values() for read in c.running]
        if running:
            read = self.rng.choice(running)
            if self.rng.random() < 0.15:
                read.fail()
            else:
                read.finish()

    def wire(self) -> None:
        peer = self.rng.choice(list(self.net.receivers))
        for _ in range(self.rng.choice([1, 1, 2, 5])):
            self.rng.choice([self.net.deliver_up, self.net.deliver_down])(peer)

    def clock(self) -> None:
        self.net.tick(self.rng.choice([0.1, 0.5, 1.0, 1.0, 2.0]))

    def garbage(self) -> None:
        peer = self.rng.choice(list(self.net.receivers))
        queue = self.rng.choice([self.net.up, self.net.down])[peer]
        self.net.collect()
        if queue and self.rng.random() < 0.7:
            queue[0] = queue[0][: self.rng.randrange(len(queue[0]))]
        else:
            queue.append(self.rng.randbytes(self.rng.randrange(40)))

    def kill_receiver(self) -> None:
        peer = self.rng.choice(list(self.net.receivers))
        if self.rng.random() < 0.5:
            self.net.sender.lost(peer, "cut")
        self.restart_receiver(peer)

    def kill_sender(self) -> None:
        for state in self.sending.values():
            self.terminal["send", state["begin"]] = 1  # its process is gone, and its memory
            self.release_source(state)
        self.sending = {}
        self.started += 1
        self.net.collect()
        self.net.start_sender(f"sender-{self.started}")
        for peer in self.net.receivers:
            self.net.down[peer].clear()
            self.net.connections[peer].up = False

    def reconnect(self) -> None:
        for peer, session in list(self.net.receivers.items()):
            if session.failure is not None and not session.requests() and not session.reads_in_flight:
                self.receiver_events()
                self.restart_receiver(peer)

    def events(self) -> None:
        self.sender_events()
        self.receiver_events()

    def drain(self) -> None:
        """Let everything that is under way come to its end."""
        for request in [r for r, s in self.sending.items() if not s["last"]]:
            self.net.sender.abort(request, "the engine stops")
        for _ in range(60):
            self.net.settle()
            self.net.tick(1.0)
            self.events()


@pytest.mark.parametrize("block", range(4))
def test_random_interleavings(kit: ModuleType, block: int) -> None:
    done = failed = 0
    for seed in range(block * 20, block * 20 + 20):
        rng = random.Random(seed)
        world = World(kit, rng)
        calm = seed % 2 == 0
        actions = [
            (world.begin, 3), (world.offer, 8), (world.ask, 4), (world.wire, 16), (world.read, 8), (world.clock, 2),
            (world.events, 4), (world.abort_send, 0.2 if calm else 0.8), (world.abort_receive, 0.2 if calm else 0.8),
            (world.garbage, 0 if calm else 0.3), (world.kill_receiver, 0 if calm else 0.3),
            (world.kill_sender, 0 if calm else 0.2), (world.reconnect, 1),
        ]  # fmt: skip
        calls, weights = zip(*actions, strict=True)
        for call in rng.choices(calls, weights, k=150):
            call()
        world.drain()
        assert not world.sending, f"held for ever (seed {seed})"
        assert not world.net.sender.held_units()
        assert not any(world.receiving.values()), f"a receive that never ended (seed {seed})"
        assert sorted(world.free_source) == list(range(1, 40))
        assert all(sorted(units) == list(range(1, 30)) for units in world.free.values())
        assert world.terminal == dict.fromkeys((("send", n) for n in range(1, world.begins + 1)), 1)
        done, failed = done + world.done, failed + world.failed
    assert done > 20, "the test must also see transfers that work"
    assert failed > 20
