"""Transports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec

from kvcore.contract.base import Support
from kvcore.contract.pools import Arena
from kvcore.layout import Int64Array, Layout

if TYPE_CHECKING:
    from kvcore.layout.moves import Program


class TransportTraits(msgspec.Struct, frozen=True):
    """What the planner needs to know of a transport.

    Attributes:
        executes_programs: it applies programs of strided moves itself; else it reads flat descriptors.
        min_run_bytes: shortest run worth a descriptor of its own.
        descriptor_cost_us: fixed cost of a descriptor in microseconds.
    """

    executes_programs: bool
    min_run_bytes: int = 0
    descriptor_cost_us: float = 0.0


@dataclass(frozen=True)
class ReadJob:
    """Units of one layer group to pull: ``program`` applied to pairs ``(src_units[i], dst_units[i])``."""

    group: str
    program: Program
    src_units: Int64Array
    dst_units: Int64Array


class ReadHandle(ABC):
    """A read under way.

    Attributes:
        seconds: time spent moving bytes, once terminal; 0 where the transport cannot tell.
    """

    seconds: float = 0.0

    @abstractmethod
    def poll(self) -> bool:
        """True once every byte has landed and none will move any more. Raises TransferError where the read failed
        *and* is quiet: after an exception, as after True, no destination byte changes."""


class PeerConnection(ABC):
    """Another process whose memory can be read."""

    @abstractmethod
    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        """Start pulling; returns at once. Raises TransferError where nothing was started."""

    @abstractmethod
    def alive(self) -> bool:
        """False once the wire knows that the peer is gone."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when :meth:`alive` or the state of a read may have changed, or None.

        Calling :meth:`alive` resets it. A connection without one is polled."""
        return None

    @abstractmethod
    def quiesce(self, timeout_s: float) -> bool:
        """Wait until no read of this connection touches local memory any more; False past the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Unmap and disconnect. Idempotent."""


class Transport(ABC):
    """Moves bytes between processes. Only the owner of memory writes it: the receiver pulls.

    Attributes:
        name: the id used in configurations.
        traits: for the planner.
    """

    name: ClassVar[str]
    traits: ClassVar[TransportTraits]

    @abstractmethod
    def supports(self, device: str, layout: Layout) -> Support:
        """Whether arenas of this device can be served."""

    @abstractmethod
    def register(self, arenas: Mapping[str, Arena]) -> bytes:
        """Make arenas (by layer group) readable to peers and known as destinations.

        Returns an opaque endpoint record for the manifest. Failure is an error here, not at the first read.
        """

    @abstractmethod
    def connect(self, endpoint: bytes) -> PeerConnection:
        """Reach the peer behind an endpoint record."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving, close connections, leave nothing behind. Idempotent."""
