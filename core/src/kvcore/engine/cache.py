"""``KVCache``: the façade an engine embeds.

It joins one manager (integers: which request holds which units) with the store of this process (bytes, kernels,
transport) by step plans. An engine's loop is::

    cache.admit("r1", len(prompt))
    with cache.begin([("r1", chunk)]) as step:
        for layer in model:
            step.store(layer, {"k": k, "v": v})
            step.attend(layer, q, out, params)
        step.commit()
    cache.release("r1")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import TYPE_CHECKING

import msgspec

from kvcore.config import Config
from kvcore.contract import Format, PoolView, Unique
from kvcore.engine.assembly import Parts, assemble
from kvcore.engine.exchange import Exchange
from kvcore.engine.peers import ReceiveSide, SendSide
from kvcore.engine.poison import poisoning
from kvcore.engine.step import Step
from kvcore.engine.step_rules import demand_length, demand_no_step, demand_size
from kvcore.engine.turns import Turns, in_turn, while_open
from kvcore.errors import CapacityError, ConfigError, PromptTooLongError, RequestError, nearest
from kvcore.layout import Int64Array
from kvcore.plugins import Registry
from kvcore.plugins.dispatch import KernelChoice
from kvcore.requests.manager import ManagerStats, Request
from kvcore.retraction.retractor import RetractionHandle, RetractionStats
from kvcore.spec import ModelSpec, Ranks, Shard

if TYPE_CHECKING:
    import torch


class CacheStats(msgspec.Struct, frozen=True):
    """What a cache holds.

    Attributes:
        manager: units by range, and requests.
        allocated_bytes: device bytes by layer group.
        backup_bytes: bytes of retracted requests.
        retraction: what retraction did so far.
    """

    manager: ManagerStats
    allocated_bytes: dict[str, int]
    backup_bytes: int
    retraction: RetractionStats


class KVCache(Unique):
    """The KV cache of one model in this process. Build with :meth:`create`; a context manager.

    Any thread may call it, its steps and its sides: calls take turns, each is whole. One step is open at a time. What is
    reached through ``manager`` and ``store`` does not take turns. A cache is not copied (UnsupportedError): requests are
    forked.

    Attributes:
        model, config: what it was built for.
        shard, ranks: which part of the model this process holds, and its place among its engine's ranks.
        layouts: by layer group.
        capacity: what fits, and the units of every range.
        manager: request life cycle.
        store: pools and kernels.
        poison_freed: for tests: units are filled with 0xFF when a request gives them up.
    """

    def __init__(
        self, model: ModelSpec, config: Config, parts: Parts, registry: Registry, shard: Shard, ranks: Ranks
    ) -> None:
        self.model = model
        self.config = config
        self.layouts = parts.layouts
        self.capacity = parts.capacity
        self.manager = parts.manager
        self.store = parts.store
        self.shard = shard
        self.ranks = ranks
        self._retractor = parts.retractor
        self._holders = parts.holders
        self._turns = Turns()
        self._step: Step | None = None
        self._exchange = Exchange(parts, model, config, registry, shard, ranks, self._turns)
        self.poison_freed = False

    @classmethod
    def create(
        cls,
        model: ModelSpec,
        config: Config,
        registry: Registry,
        *,
        shard: Shard | None = None,
        ranks: Ranks | None = None,
        formats: Format | Mapping[str, Format] | None = None,
    ) -> KVCache:
        """Resolve everything, refuse what cannot work, then allocate.

        Args:
            model: the whole model, the same on every rank.
            config, registry: what to build, and from what.
            shard: the heads and layers of this rank; None means all.
            ranks: the place of this process among the ranks of its engine; None means that it is the only one.
            formats: a format, or formats by layer group, that need not be registered; instead of ``config.cache.format``
                and ``config.cache.formats``.

        Raises ConfigError, LayoutError, PluginError or UnsupportedError before memory is touched, and CapacityError
        where ``config.cache.memory`` holds no unit.
        """
        shard = shard or Shard()
        parts = assemble(model, config, registry, shard, formats)
        return cls(model, config, parts, registry, shard, ranks or Ranks())

    # --- what belongs to the model ---

    @while_open
    def set_constants(self, group: str, values: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Set constants of a layer group, such as calibrated scales, before the first request.

        Args:
            group: prefix of the layer group.
            values: ``(region, field)`` → ``[L, *axes]`` in the field's storage dtype: L the group's layers on this rank in
                the order of its layout, axes as the field declares them. Fields that are not named stay as they are.

        Raises RequestError while stored bytes could depend on the old values: requests live or retracted, or a peer that
        was told of them. LayoutError for values that do not match the layout; nothing is changed then.
        """
        if self.manager.requests or self._retractor.num_kept or len(self._exchange):
            raise RequestError(
                "constants are in use",
                group=group,
                requests=len(self.manager.requests),
                retracted=self._retractor.num_kept,
                peers=len(self._exchange),
                remedy="set them before the first request and before serve or connect",
            )
        self.store.set_constants(group, values)

    def state(self, group: str) -> PoolView:
        """Views of the state slots of a group: what :meth:`Step.state_slots` indexes."""
        return self.store.state(group)

    # --- requests ---

    @property
    def token_capacity(self) -> int | None:
        """Tokens that fit: of the growing range that is full first. None where nothing grows with length."""
        return self.capacity.token_capacity

    @property
    def request_capacity(self) -> int | None:
        """Live requests that windows, rings and states are put aside for. None where only tokens bound them."""
        return self.capacity.request_capacity

    @in_turn
    def can_admit(self, num_tokens: int, *, headroom_tokens: int = 0) -> bool:
        """Whether ``admit`` would succeed now, counted in whole units, with room for further tokens left."""
        self._retractor.poll()
        if 0 < self.model.max_length < num_tokens:
            return False
        return self._exchange.over_budget() is None and self.manager.can_admit(
            num_tokens, headroom_tokens=headroom_tokens
        )

    @while_open
    def admit(self, request_id: str, num_tokens: int) -> Request:
        """Start a request of ``num_tokens`` prompt tokens and allocate their units.

        Raises EmptyPromptError, PromptTooLongError, DuplicateRequestError, or CapacityError (try later: also while
        finished prompts that decode processes have not taken over hold more than ``transfer.held_fraction`` of the
        memory); nothing is changed by a refusal.
        """
        self._retractor.poll()
        longest = self.model.max_length
        if longest and num_tokens > longest:
            raise PromptTooLongError(
                "the prompt is longer than the model accepts",
                request=request_id,
                num_tokens=num_tokens,
                capacity=longest,
            )
        held = self._exchange.over_budget()
        if held is not None:
            raise CapacityError(
                "finished prompts wait for decode processes and hold their share of the memory",
                request=request_id,
                remedy="try again when some were taken over or their leases have ended; transfer.held_fraction sets it",
                **held,
            )
        return self.manager.admit(request_id, num_tokens)

    @while_open
    def fork(self, request_id: str, new_id: str, prefix_tokens: int) -> Request:
        """Start ``new_id`` with the first tokens of another request; units are shared and copied on first write."""
        return self.manager.fork(request_id, new_id, prefix_tokens)

    @in_turn
    def release(self, request_id: str) -> None:
        """End a request: its units return to the pool, rows of a step under way are dropped, its transfer is aborted.

        A second call raises UnknownRequestError.
        """
        self._exchange.let_go(request_id)
        with self._poisoning(request_id):
            self.manager.release(request_id)
            self.store.invalidate(request_id)

    @in_turn
    def length(self, request_id: str) -> int:
        """Tokens of a request in the cache."""
        return self.manager.get(request_id).length

    @in_turn
    def units(self, request_id: str, group: str, range_name: str) -> Int64Array:
        """Unit ids of a request, in logical order."""
        return self.manager.units(request_id, group, range_name)

    @while_open
    def slots(self, request_id: str, group: str, start: int, stop: int, *, range_name: str | None = None) -> Int64Array:
        """Where the tokens ``[start, stop)`` of a request are now, for tests and debuggers: ``int64 [stop - start]``.

        Slots of a range of the group (None: the one tokens are stored in), as a step's batch names them and
        :meth:`kvcore.memory.store.Store.load` takes them; −1 for a token that the range holds nothing of. See
        :func:`kvcore.requests.spaces.slots_held`. RequestError outside ``0 <= start <= stop <= length``; ConfigError for
        an unknown group.
        """
        if group not in self.layouts:
            raise ConfigError("no such layer group", group=group, remedy=nearest(group, self.layouts))
        name = range_name or self.layouts[group].token_range
        return self.manager.slots(request_id, group, name, start, stop)

    @in_turn
    def joint_prefix(self, request_id: str, at_most: int) -> int:
        """Longest prefix that :meth:`fork` can share: see :meth:`kvcore.requests.manager.Manager.joint_prefix`."""
        return self.manager.joint_prefix(request_id, at_most)

    # --- checkpoints ---

    @while_open
    def checkpoint(self, request_id: str) -> None:
        """Keep the state of a request at its present length, for :meth:`rollback`. No byte moves.

        Whoever rejects tokens takes one before them. See :meth:`kvcore.requests.manager.Manager.checkpoint`. A fork does not
        inherit it, and :meth:`retract` drops it. UnsupportedError, with the reason, where a state component declares no
        checkpoints.
        """
        self._holders.demand_checkpoints()
        self.manager.checkpoint(request_id)

    @in_turn
    def drop_checkpoints(self, request_id: str, *, below: int | None = None) -> None:
        """Give up checkpoints at fewer than ``below`` tokens (all by default), and the state slots they hold."""
        with self._poisoning(request_id):
            self.manager.drop_checkpoints(request_id, below=below)

    @while_open
    def rollback(self, request_id: str, num_tokens: int) -> Request:
        """Take back the last tokens of a request, in every component or in none: see
        :meth:`kvcore.requests.manager.Manager.rollback`.

        RequestError too while it is in a transfer (unless ``num_tokens`` is 0): what was sent would be computed again.
        """
        if num_tokens:
            self._exchange.refuse_rollback(request_id)
        with self._poisoning(request_id):
            return self.manager.rollback(request_id, num_tokens)

    # --- steps ---

    @while_open
    def begin(self, rows: Sequence[tuple[str, int]], speculative: bool = False) -> Step:
        """Begin a step with ``(request id, new tokens)`` rows, in batch order.

        A cache has one open step: RequestError, with the open one untouched, until that is committed or abandoned
        (:attr:`open_step`); what is over is refused by all its ops (StaleHandleError). StepTooLargeError, which is never
        worth a retry, for more rows or tokens than ``cache.max_rows`` and ``cache.max_tokens``.

        Missing units are allocated for all rows or for none: CapacityError leaves everything as it was, and is the
        moment to retract. Where a retracted request's units are still being copied out, that is waited for first.
        A request whose whole prompt is offered is refused (RequestError) until it was taken over: a receiver reads its
        last page and its state. To go on here too, step a fork of it.

        Args:
            rows: ``(request id, new tokens)``.
            speculative: keep the state after every new token (:meth:`Step.state_trail`), so that ``commit`` may accept
                any number of them. Takes a state slot a token until then. A model without a state needs none of it.
                UnsupportedError where a state component declares no checkpoints.
        """
        demand_no_step(self.open_step)
        demand_size(rows, self.config.cache)
        if speculative:
            self._holders.demand_checkpoints()
        self._exchange.refuse_steps(request_id for request_id, _ in rows)
        demand_length(rows, self.manager, self.model.max_length)
        plan = self._retractor.with_room(lambda: self.manager.plan_step(rows, speculative=speculative))
        try:
            self.store.begin(plan)
        except BaseException:
            self.manager.abandon(plan, ran=False)
            raise
        self._step = Step(self.manager, self.store, plan, self._turns, self._exchange.abandoned)
        return self._step

    @property
    def open_step(self) -> Step | None:
        """The step that is neither committed nor abandoned."""
        return self._step if self._step is not None and self._step.is_open else None

    # --- retraction ---

    @while_open
    def retract(self, request_id: str, engine_data: bytes = b"") -> RetractionHandle:
        """Take a request off the device; its transfer is aborted, its checkpoints are dropped.

        See :meth:`kvcore.retraction.retractor.Retractor.retract`.
        """
        self._exchange.let_go(request_id)
        with self._poisoning(request_id):
            return self._retractor.retract(request_id, engine_data)

    @while_open
    def resume(self, handle: RetractionHandle) -> None:
        """Bring a request back into new units. See :meth:`kvcore.retraction.retractor.Retractor.resume`."""
        self._retractor.resume(handle)

    @in_turn
    def drop(self, handle: RetractionHandle) -> None:
        """Forget a retracted request."""
        self._retractor.drop(handle)

    # --- transfer ---

    @while_open
    def serve(self) -> SendSide:
        """Offer requests of this cache to other processes; ``address`` of the result is what they connect to."""
        return self._exchange.serve()

    @while_open
    def connect(self, addresses: str | Sequence[str], *, peer: str | None = None) -> ReceiveSide:
        """Pull requests from the caches served at ``addresses``: one for every rank of one prefill engine, in any order.

        Heads and layers are matched by their ids, whatever the two engines' degrees and stages are. ``peer`` says which
        of several ``transfer.curve_peers`` is the certificate of that engine. Raises HandshakeError for what cannot be
        converted, for what no rank of the sender holds, and where the sender does not take this process's key.
        """
        return self._exchange.connect(addresses, peer)

    # --- inspection, end ---

    def _poisoning(self, request_id: str) -> AbstractContextManager[None]:
        return poisoning(self.manager, self.store, request_id) if self.poison_freed else nullcontext()

    def explain(self) -> dict[str, tuple[KernelChoice, ...]]:
        """By layer group: the kernel of each op, and why each other one was refused."""
        return self.store.explain()

    @in_turn
    def stats(self) -> CacheStats:
        """What is held now."""
        arenas = {name: arena.nbytes for name, arena in self.store.arenas().items()}
        return CacheStats(self.manager.stats(), arenas, self._retractor.bytes_held, self._retractor.stats())

    @in_turn
    def check_integrity(self) -> None:
        """Raise IntegrityError unless every unit is accounted for."""
        self.manager.check_integrity()

    @in_turn
    def close(self) -> None:
        """Abandon an open step, stop transfers, forget backups, give all memory back. Idempotent."""
        if self._turns.closed:
            return
        if self.open_step is not None:
            self.open_step.abandon()
        self._turns.closed = True
        self._exchange.close()
        self._retractor.close()
        self.store.close()

    def __enter__(self) -> KVCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
