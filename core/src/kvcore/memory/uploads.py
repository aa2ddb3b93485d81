"""Small host tables on their way to a device: pinned, copied in stream order, and written again only when they are there.

A table that is rewritten for the next step while the copy for this one is still to come would give this step the next
one's units. Nothing else has to wait: the copy of a step is done long before the step after the next begins.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch


class Uploads(ABC):
    """Copies of one owner's tables, in the order of the calling thread's stream."""

    @abstractmethod
    def pin(self, table: torch.Tensor) -> torch.Tensor:
        """Return a host table of the same contents that :meth:`send` copies without waiting."""

    @abstractmethod
    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy a table, or a part of one that is contiguous on the host, to the device: soon."""

    @abstractmethod
    def sent(self) -> None:
        """Everything of this step has been given to :meth:`send`."""

    @abstractmethod
    def wait(self) -> None:
        """Wait until the tables that were sent may be written again."""


class StreamUploads(Uploads):
    """On a device of torch with streams."""

    def __init__(self, device: str) -> None:
        self._device = torch.device(device)
        self._event: Any = None

    def pin(self, table: torch.Tensor) -> torch.Tensor:
        """In pinned memory of torch."""
        return table.pin_memory()

    def send(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Without waiting for the stream."""
        dst.copy_(src, non_blocking=True)

    def sent(self) -> None:
        """Record an event."""
        cuda: Any = torch.cuda
        with cuda.device(self._device):
            self._event = cuda.Event(blocking=True)
            self._event.record()

    def wait(self) -> None:
        """Wait for the event of the last step's copies; they come before that step's kernels."""
        event, self._event = self._event, None
        if event is not None:
            event.synchronize()
