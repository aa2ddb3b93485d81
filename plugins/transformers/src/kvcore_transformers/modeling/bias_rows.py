"""A relative position bias over rows of unlike length.

A model computes its bias for one range of query positions and one of key positions, the same for every row of a batch.
The bias depends on their distance only and is zero from a certain distance on, the extent. So rows of unlike length are
served by positions that are nobody's: queries right after as many keys as the extent reaches, which covers every distance
that matters; each row then takes what belongs to its own positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvcore.errors import RequestError


class BiasGeometry:
    """The positions a model is told for one step, and its bias brought to the rows of that step.

    Args:
        starts: tokens of each row before the step.
        tokens: new tokens of each row.
        absolute: whether the model reads positions themselves too, not only distances (a scale that grows with the
            position): then rows must start at one length.

    Raises RequestError for rows that start at unlike lengths where they must not.
    """

    def __init__(self, starts: Sequence[int], tokens: int, *, absolute: bool = False) -> None:
        self._starts = tuple(starts)
        self._tokens = tokens
        self._equal = len(set(self._starts)) <= 1
        self._longest = max(self._starts, default=0) + tokens
        self._columns: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        if absolute and not self._equal:
            raise RequestError(
                "the model scales attention by position, so rows of one forward pass must be of one length",
                lengths=sorted(set(self._starts)),
                remedy="put requests of unlike length into steps of their own",
            )

    def query_offset(self, extent: int) -> int:
        """Position of each row's first new token, as the model is told."""
        return self._starts[0] if self._equal and self._starts else extent - 1

    def key_length(self, extent: int) -> int:
        """Keys that the model is told of, from position 0 on."""
        return self.query_offset(extent) + self._tokens

    def rows(self, bias: torch.Tensor, extent: int) -> torch.Tensor:
        """From the model's ``[R, Hq, T, K]`` to the step's ``[R * T, Hq, max length]``, by absolute key position.

        Raises RequestError for a bias of other positions than the model was told.
        """
        expected = (len(self._starts), self._tokens, self.key_length(extent))
        if (bias.shape[0], *bias.shape[2:]) != expected:
            raise RequestError("position bias does not match the step", expected=list(expected), got=list(bias.shape))
        by_token = bias.transpose(1, 2)
        if not self._equal:
            at, beyond = self._at(extent, bias.device)
            by_token = by_token.gather(3, at.expand(*by_token.shape[:3], -1)).masked_fill(beyond, 0.0)
        return by_token.flatten(0, 1)

    def _at(self, extent: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """``[R, 1, 1, max length]``: the told position that is as far from a row's queries as each of its keys; and where
        that is before the first one told, which is beyond the extent."""
        if extent not in self._columns:
            starts = torch.tensor(self._starts, device=device)[:, None, None, None]
            at = torch.arange(self._longest, device=device) + (extent - 1 - starts)
            # Keys after a row's queries are of other rows, or of nobody: attention does not look at them.
            self._columns[extent] = at.clamp(0, self.key_length(extent) - 1), at < 0
        return self._columns[extent]
