"""What a side remembers of a request in a transfer: the units it holds, and the layers it has offered already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcore.errors import RequestError
from kvcore.layout import Int64Array
from kvcore.memory.store import Store
from kvcore.requests.manager import Manager
from kvcore.requests.payload import Payload
from kvcore.requests.ranges import ManagedRange


@dataclass
class EarlyLayers:
    """Layers of a chunk that were offered before it was through."""

    start: int
    stop: int
    last: bool
    layers: set[int] = field(default_factory=set)

    def check(self, request_id: str, start: int, stop: int, *, last: bool) -> None:
        """Raise RequestError unless these are the tokens that layers were offered of."""
        if (start, stop, last) != (self.start, self.stop, self.last):
            raise RequestError(
                "layers of another chunk were offered already",
                request=request_id,
                expected=(self.start, self.stop, self.last),
                got=(start, stop, last),
                remedy="complete the chunk with an offer of the same tokens, or abort",
            )

    def rest(self, payloads: Sequence[Payload], held: Callable[[str], tuple[int, ...]]) -> tuple[Payload, ...]:
        """The payloads of the layers that are still to be offered, of those held of a group."""
        left = []
        for payload in payloads:
            layers = [layer for layer in held(payload.group) if layer not in self.layers]
            if len(layers) == len(held(payload.group)):
                left.append(payload)
            elif layers:
                left.append(payload.of_layers(layers))
        return tuple(left)


class Held:
    """Units of one request that a transfer reads or writes: quarantined, whatever becomes of the request."""

    def __init__(self, manager: Manager, request_id: str, *, live_at: int = 0) -> None:
        self._manager = manager
        self._request = manager.get(request_id)
        self._holds = [manager.hold(request_id, live_at=live_at)]

    def add(self, payloads: Sequence[Payload]) -> None:
        """Hold what is offered later too: a prompt longer than a window gets units as it is computed."""
        self._holds.append(self._manager.hold_payloads(payloads))

    @property
    def live(self) -> bool:
        """Whether the request is still the engine's: its id may be another request's by now."""
        return self._request.state != "released"

    def units(self) -> Iterator[tuple[ManagedRange, Int64Array]]:
        """What is held, by range; a unit may come twice."""
        for hold in self._holds:
            yield from hold

    def fill(self, num_tokens: int) -> None:
        """The transfer is over and its tokens are valid."""
        self._end()
        if self.live:
            self._manager.set_length(self._request.id, num_tokens)

    def release(self, store: Store) -> None:
        """The transfer is over and the request with it."""
        self._end()
        if self.live:
            self._manager.release(self._request.id)
            store.invalidate(self._request.id)

    def _end(self) -> None:
        for hold in self._holds:
            hold.release()
