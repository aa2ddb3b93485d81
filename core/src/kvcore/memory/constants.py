"""Constants: the bytes of a cache that belong to the model, such as a scale per tensor.

A constant unit is filled before the first request and read by every step. It is never moved with a request, so peers
compare digests of it instead.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping

import torch

from kvcore.contract import PoolView
from kvcore.errors import ConfigError, LayoutError, nearest
from kvcore.layout import Field, Layout
from kvcore.memory.tensors import as_stored, from_stored

Key = tuple[str, str]
Check = Callable[[Layout, Mapping[Key, torch.Tensor]], None]
"""``(region, field)``."""


class ConstantFields:
    """The constant fields of one pool.

    Values are indexed as the field declares its axes, padding left out, in its storage dtype: ``[*axes]`` for a layer,
    ``[L, *axes]`` for all layers of the pool in the order of ``layout.layers``.
    """

    def __init__(self, pool: PoolView) -> None:
        self._pool = pool
        self._layers = pool.layout.layers
        self._fields: dict[Key, Field] = {}
        self._where: dict[Key, tuple[torch.Tensor | int, ...]] = {}
        for region in pool.layout.constant_regions:
            ((_, first, _),) = pool.placement.ranges[region.name]
            for field in region.data_fields:
                self._fields[region.name, field.name] = field
                shape = field.logical_shape
                coords = {
                    axis.name: torch.arange(axis.size, device=pool.device).reshape(
                        [axis.size if n == at else 1 for n in range(len(shape))]
                    )
                    for at, axis in enumerate(field.axes)
                }
                self._where[region.name, field.name] = field.index(first + 1, **coords)
        self._unset = set(self._fields)

    def __bool__(self) -> bool:
        return bool(self._fields)

    @property
    def unset(self) -> tuple[Key, ...]:
        """Fields that nobody has filled yet."""
        return tuple(key for key in self._fields if key in self._unset)

    def read(self, layer: int) -> dict[Key, torch.Tensor]:
        """Values of one storage layer: ``[*axes]`` by ``(region, field)``."""
        return {key: self._read(key, layer) for key in self._fields}

    def _read(self, key: Key, layer: int) -> torch.Tensor:
        view = self._pool.field(layer, *key)
        return from_stored(view[self._where[key]].contiguous(), self._fields[key].dtype)

    def write(self, values: Mapping[Key, torch.Tensor], check: Check | None = None) -> None:
        """Fill fields with ``[L, *axes]`` each; fields that are not named stay as they are.

        Raises LayoutError for a field that is no constant of this pool, another shape or another dtype, and what ``check``
        (:meth:`kvcore.contract.Format.check_constants`) raises; nothing is written then.
        """
        ready = {key: self._checked(key, tensor) for key, tensor in values.items()}
        if check is not None:
            check(self._pool.layout, values)
        for key, tensor in ready.items():
            for n, layer in enumerate(self._layers):
                self._pool.field(layer, *key)[self._where[key]] = tensor[n].to(self._pool.device)
            self._unset.discard(key)

    def _checked(self, key: Key, values: torch.Tensor) -> torch.Tensor:
        group = self._pool.layout.group
        if key not in self._fields:
            names = [f"{region}.{field}" for region, field in self._fields]
            raise LayoutError("no such constant", group=group, constant=key, remedy=nearest(".".join(key), names))
        field = self._fields[key]
        shape = [len(self._layers), *field.logical_shape]
        if list(values.shape) != shape:
            raise LayoutError(
                "constants do not match the field", group=group, constant=key, expected=shape, got=list(values.shape)
            )
        return as_stored(values.detach().contiguous(), field.dtype)

    def require(self) -> None:
        """Raise ConfigError while a field is unset: what it scales would be read as something else."""
        if self._unset:
            raise ConfigError(
                "constants were never set",
                group=self._pool.layout.group,
                format=self._pool.layout.format,
                constants=[f"{region}.{field}" for region, field in self.unset],
                remedy="call KVCache.set_constants before the first request",
            )

    def digests(self) -> dict[str, str]:
        """SHA-256 (hex) of the values by ``layer/region/field``, and where an axis is sharded by its global ids too.

        ``0/k_scale/x/head=3`` is the same on every rank that holds head 3 of layer 0, whatever else it holds, in which
        order its arena and axes are, and what its padding contains. So peers agree exactly where all keys that both of
        them have agree. Raises ConfigError while a field is unset.
        """
        self.require()
        found = {}
        for key, field in self._fields.items():
            for layer in self._layers:
                values = as_stored(self._read(key, layer), field.dtype).cpu()
                for ids, part in _by_id(field, values):
                    data = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                    found["/".join((str(layer), *key, *ids))] = hashlib.sha256(data).hexdigest()
        return found


def _by_id(field: Field, values: torch.Tensor) -> Iterator[tuple[list[str], torch.Tensor]]:
    """``values [*axes]`` cut into one part for every combination of global ids of sharded axes."""
    sharded = [n for n, axis in enumerate(field.axes) if axis.ids]
    names = [field.axes[n].name for n in sharded]
    front = values.movedim(sharded, list(range(len(sharded))))
    ids = [field.global_ids(name).tolist() for name in names]
    for places in itertools.product(*(range(len(column)) for column in ids)):
        found = [f"{name}={column[at]}" for name, column, at in zip(names, ids, places, strict=True)]
        yield found, front[places]
