"""Every end of a cache's transfers, on the one transport that they share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

from kvcore.config import Config
from kvcore.engine.assembly import Parts
from kvcore.engine.links import Registered, open_transport, register
from kvcore.engine.peers import ReceiveSide, SendSide
from kvcore.engine.sides import Side
from kvcore.engine.turns import Turns
from kvcore.plugins import Registry
from kvcore.spec import ModelSpec, Ranks, Shard
from kvcore.transfer.messages.manifest import Manifest, new_instance


class Exchange:
    """The sides of a cache: opened, told of what happens to requests, and forgotten when they are closed.

    The arenas are registered with a transport once, when the first side is opened.

    Args:
        parts: what the cache is made of.
        model, config, registry, shard, ranks: as of the cache.
        turns: of the cache, shared with every side.
    """

    def __init__(
        self,
        parts: Parts,
        model: ModelSpec,
        config: Config,
        registry: Registry,
        shard: Shard,
        ranks: Ranks,
        turns: Turns,
    ) -> None:
        self._parts = parts
        self._model = model
        self._config = config
        self._registry = registry
        self._shard = shard
        self._ranks = ranks
        self._turns = turns
        self._sides: list[SendSide | ReceiveSide] = []
        self._link: Registered | None = None

    def __len__(self) -> int:
        """Sides that are open, or closed while reads that never end may write into units they hold."""
        return len(self._sides)

    def serve(self) -> SendSide:
        """See :meth:`kvcore.engine.cache.KVCache.serve`."""
        manifest, parts = self._manifest("sender"), self._parts
        made = SendSide.open(
            manifest, self._config.transfer, self._registered(), parts.manager, parts.store,
            turns=self._turns, on_close=self._forget,
        )  # fmt: skip
        self._sides.append(made)
        return made

    def connect(self, addresses: str | Sequence[str], peer: str | None) -> ReceiveSide:
        """See :meth:`kvcore.engine.cache.KVCache.connect`."""
        manifest, parts = self._manifest("receiver"), self._parts
        made = ReceiveSide.open(
            addresses, manifest, self._config.transfer, self._registered(), parts.manager, parts.store,
            parts.retractor.poll, peer=peer, turns=self._turns, on_close=self._forget,
        )  # fmt: skip
        self._sides.append(made)
        return made

    def refuse_steps(self, request_ids: Iterable[str]) -> None:
        """Raise RequestError for a request that must not be computed on now."""
        ids = list(request_ids) if self._sides else ()
        for side in self._sides:
            side.refuse_steps(ids)

    def refuse_rollback(self, request_id: str) -> None:
        """Raise RequestError for a request in a transfer."""
        for side in self._sides:
            side.refuse_rollback(request_id)

    def abandoned(self, request_ids: Collection[str]) -> None:
        """A step of these requests came to nothing."""
        for side in self._sides:
            if isinstance(side, SendSide):
                side.abandoned(request_ids)

    def over_budget(self) -> dict[str, Any] | None:
        """What finished prompts hold, where a side holds more than its share; None where none does."""
        fraction = self._config.transfer.held_fraction
        found = (side.over_budget(fraction) for side in self._sides if isinstance(side, SendSide))
        return next((facts for facts in found if facts is not None), None)

    def let_go(self, request_id: str) -> None:
        """The engine takes a request away."""
        for side in self._sides:
            side.let_go(request_id)

    def close(self) -> None:
        """Close every side, then the transport. Idempotent."""
        for side in list(self._sides):
            side.close()
        if self._link is not None:
            self._link.transport.close()

    def _manifest(self, role: Literal["sender", "receiver"]) -> Manifest:
        """What peers are told of the cache, but how to reach it."""
        parts = self._parts
        parts.store.require_constants()
        return Manifest(
            instance=new_instance(),
            role=role,
            model=self._model.fingerprint(),
            layouts=parts.layouts,
            units=parts.capacity.units,
            transport=self._config.transfer.transport,
            shard=self._shard,
            ranks=self._ranks,
            constants={group: parts.store.constants(group) for group in parts.layouts},
            checksum=self._config.transfer.checksum,
        )

    def _registered(self) -> Registered:
        if self._link is None:
            transport = open_transport(self._config, self._registry, self._parts.layouts)
            self._link = register(transport, self._parts.store.arenas())
        return self._link

    def _forget(self, side: Side[Any]) -> None:
        self._sides = [other for other in self._sides if other is not side or other.holds_units]
