"""What a side remembers of a request in a transfer: the units it holds, and the layers it has offered already."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

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


class Finished:
    """Prompts that wait to be taken over, and how many units they hold: counted as they come and go, so that asking costs
    the same whatever they hold."""

    def __init__(self) -> None:
        self._units: dict[str, list[tuple[ManagedRange, Int64Array]]] = {}
        self._owners: dict[ManagedRange, npt.NDArray[np.int32]] = {}  # by unit: prompts that hold it
        self._counts: dict[ManagedRange, int] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._units

    def __len__(self) -> int:
        return len(self._units)

    def add(self, request_id: str, held: Held) -> None:
        """The whole prompt is offered: nothing is added to what it holds any more."""
        lists: dict[ManagedRange, list[Int64Array]] = {}
        for part, ids in held.units():
            lists.setdefault(part, []).append(ids)
        units = [(part, np.unique(np.concatenate(ids))) for part, ids in lists.items()]
        for part, ids in units:
            owners = self._owners.get(part, np.zeros(0, np.int32))
            missing = int(ids.max(initial=-1)) + 1 - len(owners)
            if missing > 0:
                owners = np.concatenate((owners, np.zeros(max(missing, len(owners)), np.int32)))
            self._owners[part] = owners
            self._counts[part] = self._counts.get(part, 0) + int(np.count_nonzero(owners[ids] == 0))
            owners[ids] += 1
        self._units[request_id] = units

    def discard(self, request_id: str) -> None:
        """It was taken over, or given up."""
        for part, ids in self._units.pop(request_id, ()):
            owners = self._owners[part]
            owners[ids] -= 1
            self._counts[part] -= int(np.count_nonzero(owners[ids] == 0))

    def over(self, fraction: float) -> dict[str, Any] | None:
        """What is held of the first range of which more than ``fraction`` is held; None where none is."""
        for part, count in self._counts.items():
            limit = int(fraction * part.allocator.capacity)
            if count > limit:
                return {
                    "group": part.budget.group,
                    "range": part.budget.range,
                    "held_units": count,
                    "limit_units": limit,
                    "prompts": len(self._units),
                }
        return None
