"""What a model keeps: layer groups and the tensors of one token (no torch).

A model adapter turns a model's configuration into a :class:`ModelSpec`; formats turn each group into a layout.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import msgspec

from kvcore.errors import ConfigError, nearest

MAX_LAYERS = 2**16
"""Most layers of a model; adapters refuse more before they list them."""


class TensorSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor that a layer stores per token (or per request for states).

    Attributes:
        name: ``k``, ``v``, ``latent``, ``rope``, …
        num_heads: heads of the whole model, before sharding.
        head_dim: elements a head.
        sharded: whether tensor parallelism splits the heads; False means every rank holds all of them.
    """

    name: str
    num_heads: int
    head_dim: int
    sharded: bool = True


class StatePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run of the axis that tensor parallelism cuts, cut on its own.

    Attributes:
        num_heads: heads of the whole model in this run.
        width: elements a head.
    """

    num_heads: int
    width: int = 1


class StateSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor of state that a layer keeps per request.

    Attributes:
        name: unique in its group: ``conv``, ``conv_k``, ``recurrent``, …
        kind: what kind of state it is, which state components go by: ``conv`` (the last inputs of a short convolution),
            ``recurrent`` (a sum over all tokens: SSM, delta rule), or another word.
        dtype: storage dtype, the one the model computes the state in.
        axes: ``(axis, size)`` of the whole model, outermost first, such as ``(("channel", 512), ("tap", 3))``.
        split: the axis that tensor parallelism cuts; empty where every rank holds all of it.
        parts: what the split axis consists of, in order, each part cut by its heads: the channels of a convolution over
            queries, keys and values are three. They add up to the axis. Empty where nothing is split.
    """

    name: str
    kind: str
    dtype: str
    axes: tuple[tuple[str, int], ...]
    split: str = ""
    parts: tuple[StatePart, ...] = ()

    def __post_init__(self) -> None:
        sizes = dict(self.axes)
        if not sizes or len(sizes) < len(self.axes) or min(sizes.values()) < 0:
            raise ConfigError("axes of a state need distinct names and sizes", state=self.name, axes=self.axes)
        held = sum(part.num_heads * part.width for part in self.parts)
        if (self.split or self.parts) and sizes.get(self.split) != held:
            raise ConfigError(
                "the parts of a state do not add up to the axis that is split",
                state=self.name,
                split=self.split,
                expected=sizes.get(self.split, f"one of {', '.join(sizes)}"),
                got=held,
            )


class LayerGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that share one layout and one set of index spaces.

    Attributes:
        name: ``full``, ``swa``, ``state``, …; prefixes the group's components.
        layers: storage layer ids, ascending.
        tensors: what a layer stores of every token, for attention groups.
        num_query_heads: query heads of the whole model, for attention groups.
        kind: ``attention`` (stored per token, attended) or ``state`` (held per request, needs a state component).
        space: kind of index space, see :class:`kvcore.layout.SpaceSpec`.
        space_options: integers of that space, such as ``(("window", 512),)``.
        role: ``target`` or ``draft``.
        shares: ``(layer, storage layer)`` for layers that read another layer's storage.
        states: what a layer keeps per request, for groups of state.
    """

    name: str
    layers: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    num_query_heads: int = 0
    kind: Literal["attention", "state"] = "attention"
    space: str = "sequence"
    space_options: tuple[tuple[str, int], ...] = ()
    role: Literal["target", "draft"] = "target"
    shares: tuple[tuple[int, int], ...] = ()
    states: tuple[StateSpec, ...] = ()

    @property
    def prefix(self) -> str:
        """First part of the group's component names: ``full``, or ``draft/full`` for a draft model."""
        return self.name if self.role == "target" else f"{self.role}/{self.name}"

    def tensor(self, name: str) -> TensorSpec:
        """Return the tensor called ``name``."""
        for item in self.tensors:
            if item.name == name:
                return item
        raise ConfigError(
            "no such tensor in the layer group",
            group=self.name,
            tensor=name,
            remedy=nearest(name, (t.name for t in self.tensors)),
        )

    def storage_layer(self, layer: int) -> int:
        """Storage layer id of a model layer."""
        return dict(self.shares).get(layer, layer)


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model as the cache sees it.

    Attributes:
        name: for people and messages.
        groups: its layer groups, with distinct prefixes.
        dtype: name of the dtype the model computes in (``fp32``, ``bf16``, ``fp16``).
        max_length: longest sequence the model accepts, 0 when unlimited.
    """

    name: str
    groups: tuple[LayerGroup, ...]
    dtype: str
    max_length: int = 0

    def __post_init__(self) -> None:
        prefixes = [group.prefix for group in self.groups]
        if not prefixes or len(set(prefixes)) != len(prefixes):
            raise ConfigError("a model needs layer groups with distinct names", model=self.name, groups=prefixes)

    def group(self, prefix: str) -> LayerGroup:
        """Return the group with this prefix."""
        for item in self.groups:
            if item.prefix == prefix:
                return item
        raise ConfigError("no such layer group", group=prefix, remedy=nearest(prefix, (g.prefix for g in self.groups)))

    def fingerprint(self) -> str:
        """SHA-256 (hex) over everything but the name: two peers must agree on it."""
        anonymous = msgspec.structs.replace(self, name="")
        return hashlib.sha256(msgspec.json.encode(anonymous, order="deterministic")).hexdigest()


class Shard(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which part of the model one rank holds.

    Attributes:
        tp_rank, tp_size: tensor-parallel rank and degree.
        layers: layer ids of this pipeline stage; empty means all.
    """

    tp_rank: int = 0
    tp_size: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise ConfigError("tensor-parallel rank out of range", tp_rank=self.tp_rank, tp_size=self.tp_size)

    def heads(self, tensor: TensorSpec) -> tuple[tuple[int, int], ...]:
        """Global head ids of a tensor on this rank; ``()`` where it is not sharded.

        With more ranks than heads each head is replicated on ``tp_size / num_heads`` neighbouring ranks.
        """
        return (self._heads(tensor.name, tensor.num_heads),) if tensor.sharded else ()

    def ids(self, state: StateSpec) -> tuple[tuple[int, int], ...]:
        """Global ids of a state's split axis on this rank, in local order; ``()`` where it is not split.

        Each part gives the channels of its heads on this rank, so they are several ranges; adjoining ones are joined.
        """
        ranges: list[tuple[int, int]] = []
        base = 0
        for part in state.parts:
            if not part.num_heads * part.width:
                continue  # an empty part is nobody's
            first, last = self._heads(state.name, part.num_heads)
            lo, hi = base + first * part.width, base + last * part.width
            if ranges and ranges[-1][1] == lo:
                lo = ranges.pop()[0]
            ranges.append((lo, hi))
            base += part.num_heads * part.width
        return tuple(ranges)

    def _heads(self, name: str, total: int) -> tuple[int, int]:
        size, rank = self.tp_size, self.tp_rank
        if total % size and size % total:
            raise ConfigError("heads and ranks do not divide one another", tensor=name, num_heads=total, tp_size=size)
        if size <= total:
            count = total // size
            return rank * count, (rank + 1) * count
        head = rank * total // size
        return head, head + 1

    def num_heads(self, tensor: TensorSpec) -> int:
        """Heads of a tensor held on this rank."""
        ids = self.heads(tensor)
        return sum(hi - lo for lo, hi in ids) if ids else tensor.num_heads


class Ranks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The place of one process among the ranks of its engine (tensor- and pipeline-parallel ranks alike).

    Attributes:
        engine: id that the ranks of one engine share and that is new at every start; empty for an engine of one rank.
        rank, size: which of them, and how many there are.
    """

    engine: str = ""
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError("rank out of range", rank=self.rank, size=self.size)
        if self.size > 1 and not self.engine:
            raise ConfigError(
                "several ranks need the id of the engine they belong to",
                size=self.size,
                remedy="give all ranks of one engine the same id, new at every start (uuid.uuid4().hex)",
            )
