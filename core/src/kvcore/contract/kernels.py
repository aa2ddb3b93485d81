"""Kernels and the batches they serve (no torch at import)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from kvcore.contract.base import Support
from kvcore.contract.formats import Format
from kvcore.contract.pools import PoolView
from kvcore.layout import Layout
from kvcore.spec import LayerGroup

if TYPE_CHECKING:
    import torch

Op = str
"""An identifier: one of :data:`OPS`, or an op of a format's own (:attr:`Format.ops`)."""
OPS: tuple[Op, ...] = Format.ops
"""The standard ops, with the signatures that :class:`Kernel` lists."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch of one step for one unit range, in buffers whose addresses never change.

    Attributes:
        step: number of the step; a plan of an earlier step is stale.
        page_size: tokens a unit.
        lengths: ``int64 [R]``, tokens in the cache of each row once this step is stored.
        query_indptr: ``int64 [R + 1]``, where each row's new tokens start in the ``T`` axis.
        positions: ``int64 [T]``, absolute position of each new token.
        slots: ``int64 [T]``, where each new token goes: ``unit * page_size + offset``; −1 is dropped.
        page_table: ``int64 [R, max units]``, unit ids; unused entries name the null unit.
        host_lengths, host_query_indptr: the same as tuples, for kernels that loop on the host.
        ranges: the batches of all unit ranges of the layer group by name, this one among them: for ops that read a ring
            and compressed rows, or write a residual beside the pages.
    """

    step: int
    page_size: int
    lengths: torch.Tensor
    query_indptr: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    host_lengths: tuple[int, ...]
    host_query_indptr: tuple[int, ...]
    ranges: Mapping[str, BatchPlan] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.host_lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.host_query_indptr[-1]

    @property
    def max_length(self) -> int:
        """Longest row."""
        return max(self.host_lengths, default=0)

    @property
    def max_query(self) -> int:
        """Most new tokens of a row; 1 in a decode step."""
        ptr = self.host_query_indptr
        return max((b - a for a, b in pairwise(ptr)), default=0)


@dataclass(frozen=True, slots=True)
class AttendParams:
    """Arguments of attention that are not the batch.

    Attributes:
        sm_scale: factor on ``q·k`` before the softmax.
        window: a query at position p sees keys in ``(p − window, p]``; None sees all before it.
        sinks: ``[Hq]`` logits of an extra key without value, or None.
        position_bias: ``[T, Hq, max length]`` added to scaled scores, indexed by absolute key position, or None.
    """

    sm_scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None


class Kernel(ABC):
    """One implementation of one op.

    ``bind`` is called once; what it returns is called every step and must not allocate device memory it could keep,
    synchronise, or rebuild tables. Bound signatures, by op (``after``: the fence the work has to wait for; each returns
    the fence of its own work):

    - ``store(layer, rows, plan, valid, after)``: write ``rows[name][T, H, D]`` at ``plan.slots``. Rows with slot −1 or
      ``valid[t]`` False (``valid``: bool ``[T]`` or None) are dropped.
    - ``load(layer, slots, out, after)``: fill ``out[name][N, H, D]`` from ``slots`` int64 ``[N]``; −1 gives zeros.
    - ``attend_decode(layer, q, out, plan, params, after)``: ``q [R, Hq, Dk]`` (one new token a row, already stored),
      ``out [R, Hq, Dv]``.
    - ``attend_prefill(layer, q, out, plan, params, after)``: ``q [T, Hq, Dk]``, ``out [T, Hq, Dv]``; causal: a query sees
      keys up to its own position.
    - any other op: ``(layer, plan, buffers, after)``; ``buffers`` is the mapping of tensors that the caller hands to
      :meth:`kvcore.engine.step.Step.run`, read or written as the op's plugin documents.
    - ``copy_units(range_name, src, dst, after)``: copy whole units of every layer and region of the range;
      ``src``, ``dst`` are int64 region unit ids, disjoint.

    Attributes:
        op: which op.
        name: shown by ``kvcore explain``.
        formats: names of formats it knows; ``("*",)`` works from the layout and the format's reference alone.
        priority: the supported kernel with the highest one is chosen; equal priorities are an error.
    """

    op: ClassVar[Op]
    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    priority: ClassVar[int] = 0

    @abstractmethod
    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Whether it can serve this pool; the reason of a refusal is shown to the user."""

    @abstractmethod
    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """Return the function called per step."""
