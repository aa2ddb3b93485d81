"""KV formats (no torch at import)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from kvcore.contract.base import FULL, Support
from kvcore.layout import ArenaOrder, Layout
from kvcore.spec import LayerGroup, Shard

if TYPE_CHECKING:
    import torch


class Format(ABC):
    """A KV format: the bytes of a layer group, and the slow exact reference between values and bytes.

    A format that implements these three methods has working ``store``, ``load`` and ``attend_*`` ops (the reference
    kernels are derived), transfer, retraction and sizing. ``encode`` and ``decode`` are the oracle of every faster
    kernel.

    Attributes:
        name: the id used in configurations and on the wire.
        revision: changes whenever the meaning of the bytes does; peers must agree.
        ops: every op that a kernel has to serve for a pool of this format: of the standard ones
            (:data:`kvcore.contract.OPS`) those that it has, and its own, any identifier, which
            :meth:`kvcore.engine.step.Step.run` calls by name.
        magnitudes: smallest and largest size of a token's head (its largest value) whose values keep the format's
            precision; what is smaller may lose it, what is larger may be cut off, and nothing becomes infinite or NaN.
        max_error: the precision: largest error of a value, relative to the largest of its token's head.
        encodes: what :meth:`encode` and :meth:`decode` take: ``"tokens"``, each by itself, or whole ``"units"``, where
            tokens of a unit share something, such as a scale of a channel over 32 tokens. Then no reference kernel is
            derived from them: what writes and reads tokens are kernels of the plugin's.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1
    ops: tuple[str, ...] = ("store", "load", "attend_decode", "attend_prefill", "copy_units")
    magnitudes: tuple[float, float] = (1e-6, 1e3)
    max_error: float = 0.25
    encodes: Literal["tokens", "units"] = "tokens"

    def supports(self, group: LayerGroup) -> Support:
        """Whether the format can hold this group (a block that divides head_dim, …)."""
        return FULL

    def sample_groups(self) -> Sequence[LayerGroup]:
        """Layer groups that the conformance kit tries the format with; none (the default) are the kit's own. The first is
        what ``kvcore layout`` and ``kvcore explain`` show.

        For a format of other tensors than ``k`` and ``v`` or ``latent`` and ``rope``, of certain widths, or of spaces of
        its own. :meth:`supports` has to accept each of them.
        """
        return ()

    @abstractmethod
    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes of ``group`` on one rank. Raise LayoutError or ConfigError for what cannot be."""

    @abstractmethod
    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Encode rows to stored elements.

        Args:
            layout: as returned by :meth:`layout`.
            rows: tensor name → values ``[T, H, D]``.

        Returns:
            ``(region, field)`` → elements ``[T, *other axes]`` in the field's storage dtype, axes in the field's
            declaration order without ``slot``, padding left out. Every data field of the layout is present but those
            of constant regions.

            A format that :attr:`encodes` units is given all tokens of one or more units of every range, so T is a
            multiple of every ``tokens_per_unit``. It returns elements ``[T / tokens_per_unit, *axes]``, all axes in
            declaration order, of every data field in a range whose units stand for tokens. What else there is, such as
            the newest tokens in a ring, is left out.
        """

    @abstractmethod
    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Inverse of :meth:`encode`: rows ``[T, H, D]`` by tensor name, in ``dtype``."""

    def constants(self, layout: Layout) -> Mapping[tuple[str, str], torch.Tensor]:
        """Initial values of constant fields (index space ``constant``), such as a scale per tensor.

        Returns:
            ``(region, field)`` → elements ``[L, *axes]`` in the field's storage dtype, axes in declaration order; L
            are the layers of ``layout`` in order. A constant field that is left out has to be set by the engine
            (:meth:`kvcore.engine.cache.KVCache.set_constants`) before the first request.
        """
        return {}

    def check_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> None:
        """Raise ConfigError for constants with which stored bytes would mean nothing, such as a scale of 0 or NaN.

        Asked before they are written; shapes and dtypes are checked already.
        """

    def with_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> Format:
        """Return this format as it encodes and decodes rows of one layer, given the constants of that layer.

        Called for layouts with constant fields only; ``encode`` and ``decode`` of what is returned must use these values
        and no other. Without it they use what :meth:`constants` declares.

        Args:
            layout: as returned by :meth:`layout`.
            constants: ``(region, field)`` → elements ``[*axes]``, every constant field of the layout.
        """
        return self
