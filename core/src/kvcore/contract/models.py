"""State components and model adapters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal

from kvcore.contract.base import Support, unsupported
from kvcore.layout import ArenaOrder, Layout
from kvcore.spec import LayerGroup, ModelSpec, Shard


class StateComponent(ABC):
    """State a model keeps outside the KV cache (convolution windows, recurrent states, pending compressions).

    Attributes:
        name: the id shown to users.
        final: ``each_chunk`` where what is written stays valid, ``prompt_done`` where only the last value counts.
    """

    name: ClassVar[str]
    final: ClassVar[Literal["each_chunk", "prompt_done"]] = "prompt_done"

    @abstractmethod
    def applies(self, group: LayerGroup) -> bool:
        """Whether this component holds the state of ``group``."""

    @abstractmethod
    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes of the state on one rank."""

    def checkpoint(self, group: LayerGroup) -> Support:
        """Whether the state can be kept at one length and had back later (KVCache.checkpoint, rollback, speculation).

        A checkpoint is a reference to the slot, not a copy made by the component: FULL is right where the bytes of a slot,
        copied as they are, are all there is of the state at that length. It is valid at exactly the length it was
        taken at, and its slot is never written again: the next step writes into a copy. In a speculative step whoever
        computes the state writes it whole to a slot of its own after every token. Refuse, with a reason, where
        part of the state lies elsewhere, or depends on where its slot lies.
        """
        return unsupported(f"{self.name} declares no checkpoints")


class ModelAdapter(ABC):
    """Turns a model's configuration into layer groups.

    Attributes:
        name: the id shown to users.
    """

    name: ClassVar[str]

    @abstractmethod
    def matches(self, config: Any) -> bool:
        """Whether the adapter knows this configuration (a mapping or a configuration object of its library)."""

    @abstractmethod
    def spec(self, config: Any) -> ModelSpec:
        """Return the model's layer groups; raise UnsupportedError naming what is missing."""
