"""The sole owner of device memory: one arena per layer group, typed views into it, and moves of whole units."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from kvcore.contract import DONE, Arena, CopyQueue, Fence, Piece, PoolBuilder, PoolView, Unique, UnitBlock
from kvcore.errors import IntegrityError, LayoutError, UnsupportedError, nearest
from kvcore.layout import Buffer, Int64Array, Layout, Placement
from kvcore.memory.tensors import byte_view, field_view

_LOOP_BYTES = 8192
"""From this many bytes on, a loop of slice copies runs at memory speed; below, one indexed assignment is faster."""


def pieces(placement: Placement, components: Collection[str]) -> tuple[Piece, ...]:
    """The fewest pieces that hold the components: one, the envelope, for all components of a page-major arena."""
    out: list[Piece] = []
    for buffer in sorted((b for b in placement.buffers if b.component in components), key=lambda b: b.base):
        last = out[-1] if out else None
        # Arrays of a layer-major arena may touch too, but a unit of one ends where the next unit of it would start.
        if (
            last
            and last.unit_stride == buffer.unit_stride
            and last.base + last.nbytes == buffer.base
            and last.nbytes + buffer.unit_bytes <= last.unit_stride
        ):
            out[-1] = Piece(last.base, last.unit_stride, last.nbytes + buffer.unit_bytes, last.num_units)
            continue
        out.append(Piece(buffer.base, buffer.unit_stride, buffer.unit_bytes, buffer.num_units))
    return tuple(out)


def unit_runs(units: Int64Array) -> Iterator[tuple[int, int, int]]:
    """Cut unit ids into runs of consecutive ones: ``(position in units, first unit, number of units)``."""
    cut = np.flatnonzero(np.diff(units) != 1) + 1
    bounds = [0, *cut.tolist(), len(units)] if len(units) else [0]
    for lo, hi in pairwise(bounds):
        yield lo, int(units[lo]), hi - lo


class Pool(Unique, PoolView):
    """All bytes of one layer group on one rank.

    Unit ids are region unit ids; the first unit of every range is its null unit, which stays zero. Views are resolved
    once here; every offset is 64-bit.

    Args:
        layout: the bytes of a unit.
        units: units of every range, the null unit included.
        builder: allocates the arena.
        device: ``cpu``, ``cuda:0``, …

    Raises UnsupportedError where the builder cannot serve the device, CapacityError where memory is missing, LayoutError
    for unit counts that do not match the ranges.
    """

    def __init__(self, layout: Layout, units: Mapping[str, int], builder: PoolBuilder, device: str = "cpu") -> None:
        builder.supports(device, layout).require(
            "the pool builder cannot serve this pool", builder=builder.name, device=device, group=layout.group
        )
        self.layout = layout
        self.device = device
        self.placement = layout.place(units)
        self._builder = builder
        self.arena: Arena = builder.allocate(self.placement.arena_bytes, device)
        try:
            self._resolve()
        except BaseException:
            self.arena.close()
            raise
        self._piece_cache: dict[tuple[str, ...], tuple[Piece, ...]] = {}
        self.queue: CopyQueue | None = self.arena.queue()

    def _resolve(self) -> None:
        if self.arena.nbytes < self.placement.arena_bytes:
            raise IntegrityError(
                "arena is too small",
                builder=self._builder.name,
                expected=self.placement.arena_bytes,
                got=self.arena.nbytes,
            )
        # Views made in inference mode could never be written outside of it.
        with torch.inference_mode(False):
            raw = self.arena.tensor()
            self._bytes = {(b.layer, b.region): byte_view(raw, b) for b in self.placement.buffers}
            self._fields = {
                (b.layer, b.region, f.name): field_view(raw, b, f)
                for b in self.placement.buffers
                for f in self.layout.region(b.region).fields
            }

    # --- views ---

    def field(self, layer: int, region: str, field: str) -> torch.Tensor:
        """Strided view ``[units, *physical shape]`` in the storage dtype (1-byte dtypes as ``uint8``, ``u16`` as ``int16``)."""
        try:
            return self._fields[layer, region, field]
        except KeyError:
            self.layout.region(region).field(field)
            raise self._no_layer(layer) from None

    def units(self, layer: int, region: str) -> torch.Tensor:
        """Raw bytes ``uint8 [units, unit_bytes]``, strided."""
        try:
            return self._bytes[layer, region]
        except KeyError:
            self.layout.region(region)
            raise self._no_layer(layer) from None

    def envelopes(self) -> torch.Tensor:
        """Page-major arenas only: ``uint8 [units, envelope_bytes]``.

        Raises UnsupportedError for other arenas, and where not all regions have the same unit ranges.
        """
        if self.layout.arena != "page_major" or len({item.ranges for item in self.layout.regions}) > 1:
            raise UnsupportedError(
                "only page-major arenas whose regions all have the same unit ranges have envelopes",
                group=self.layout.group,
                arena=self.layout.arena,
                ranges={item.name: item.ranges for item in self.layout.regions},
            )
        size = self.layout.envelope_bytes
        return self.arena.tensor()[: self.placement.arena_bytes].view(-1, size)

    def unit_views(self, range_name: str) -> tuple[torch.Tensor, ...]:
        """The fewest views ``uint8 [units, bytes]`` that hold every byte of the units of a range."""
        parts = self.pieces(self.components_of(range_name))
        with torch.inference_mode(False):
            raw = self.arena.tensor()
            return tuple(raw.as_strided((p.num_units, p.nbytes), (p.unit_stride, 1), p.base) for p in parts)

    def buffer_infos(self) -> tuple[Buffer, ...]:
        """Every buffer of the pool, as its builder describes it."""
        return self._builder.buffer_infos(self.layout, self.placement)

    def _no_layer(self, layer: int) -> LayoutError:
        return LayoutError("no such storage layer", group=self.layout.group, layer=layer, layers=self.layout.layers)

    # --- units ---

    def pieces(self, components: Collection[str] | None = None) -> tuple[Piece, ...]:
        """The fewest pieces that hold the components (None: all of them), see :func:`pieces`."""
        names = self._names(components)
        if names not in self._piece_cache:
            self._piece_cache[names] = pieces(self.placement, names)
        return self._piece_cache[names]

    def components_of(self, range_name: str) -> tuple[str, ...]:
        """Components whose units lie in a range. Raises LayoutError for an unknown range."""
        self.layout.space_of_range(range_name)
        found = (item.component for item in self.layout.regions if range_name in item.ranges)
        return tuple(dict.fromkeys(found))

    def first_unit(self, range_name: str) -> int:
        """Region unit id of a range's first unit: its null unit."""
        return self._span(range_name)[0]

    def end_unit(self, range_name: str) -> int:
        """Region unit id past a range's last unit."""
        return sum(self._span(range_name))

    def _span(self, range_name: str) -> tuple[int, int]:
        self.layout.space_of_range(range_name)
        for spans in self.placement.ranges.values():
            for name, first, count in spans:
                if name == range_name:
                    return first, count
        raise LayoutError("no region has this unit range", group=self.layout.group, range=range_name)

    def fill(self, units: npt.ArrayLike, byte: int, components: Collection[str] | None = None) -> None:
        """Set every byte of the units, padding included, in all layers of the components (None: of all of them).

        Raises IntegrityError for units outside the pool and for null units, which stay zero. No other byte changes.
        """
        names = self._names(components)
        ids = self.checked_units(names, units, writable=True)
        raw = self.arena.tensor()
        for piece in self.pieces(names):
            rows = raw.as_strided((piece.num_units, piece.nbytes), (piece.unit_stride, 1), piece.base)
            for _, first, count in unit_runs(ids):
                rows[first : first + count].fill_(byte)
        self.mark()

    def zero(self, units: npt.ArrayLike, components: Collection[str] | None = None) -> None:
        """:meth:`fill` with 0."""
        self.fill(units, 0, components)

    def block(self, components: Collection[str], units: npt.ArrayLike) -> UnitBlock:
        """The units of some components as bytes to copy out and in again, all layers, padding included.

        The bytes are in arena order: piece by piece (see :func:`pieces`), and within a piece unit by unit. A pool whose
        memory the CPU cannot address gives them unit by unit, and its copies end after ``copy_out`` and ``copy_in``
        have returned.
        """
        names = self._names(components)
        ids = self.checked_units(names, units)
        if self.queue is not None:
            self.mark()  # here, where the engine's thread asks: the copy may be issued by another one
            return DeviceBlock(self, self.queue, names, ids, self.pieces(names))
        return _PoolBlock(self, names, ids, self.pieces(names))

    def mark(self) -> Fence:
        """The fence of everything this thread has given the pool's device to do; copies issued later come after it.

        Whoever writes a pool calls it. On the CPU that work is done, and this costs nothing.
        """
        return DONE if self.queue is None else self.queue.mark()

    def checked_units(self, components: Collection[str], units: npt.ArrayLike, *, writable: bool = False) -> Int64Array:
        """Return unit ids as int64 ``[n]``; raise IntegrityError for ids outside the pool or, to write, null units."""
        ids = np.asarray(units)
        if ids.size and ids.dtype.kind not in "iu":
            raise IntegrityError("unit ids are not integers", group=self.layout.group, dtype=str(ids.dtype))
        ids = ids.astype(np.int64, copy=False).reshape(-1)
        if not ids.size:
            return ids
        spans_of = {self.placement.ranges[r.name] for r in self.layout.regions if r.component in components}
        for spans in spans_of:
            bad = np.ones(ids.shape, bool)
            for _, first, count in spans:
                bad &= (ids < first + writable) | (ids >= first + count)
            if bad.any():
                raise IntegrityError(
                    "unit is outside the pool, or a null unit that stays zero",
                    group=self.layout.group,
                    components=tuple(components),
                    units=sorted(set(ids[bad].tolist()))[:8],
                    ranges=spans,
                )
        return ids

    def _names(self, components: Collection[str] | None) -> tuple[str, ...]:
        known = self.layout.components
        if components is None:
            return known
        for name in components:
            if name not in known:
                raise LayoutError("no such component", component=name, remedy=nearest(name, known))
        return tuple(name for name in known if name in components)

    def close(self) -> None:
        """Drop every view and give the arena back. Idempotent."""
        self._bytes.clear()
        self._fields.clear()
        self.arena.close()


class DeviceBlock(UnitBlock):
    """Units of a pool on a device, unit by unit, all pieces of one side by side. Copies return fences."""

    def __init__(
        self,
        pool: Pool,
        queue: CopyQueue,
        components: tuple[str, ...],
        units: Int64Array,
        parts: tuple[Piece, ...],
    ) -> None:
        self.group = pool.layout.group
        self.components = components
        self.num_units = len(units)
        self.nbytes = len(units) * sum(piece.nbytes for piece in parts)
        self._pool, self._queue, self._units, self._parts = pool, queue, units, parts

    def cut(self, first: int, count: int) -> UnitBlock:
        """The block of the units ``[first, first + count)``."""
        return DeviceBlock(self._pool, self._queue, self.components, self._units[first : first + count], self._parts)

    def copy_out(self, dst: npt.NDArray[np.uint8]) -> Fence:
        """Begin to gather the units into ``dst [nbytes]``."""
        _check_host(self, dst)
        return self._queue.gather(self._parts, self._units, dst) if self.num_units else DONE

    def copy_in(self, src: npt.NDArray[np.uint8]) -> Fence:
        """Begin to scatter ``src [nbytes]`` into the units. Raises IntegrityError for null units."""
        self._pool.checked_units(self.components, self._units, writable=True)
        _check_host(self, src)
        return self._queue.scatter(self._parts, self._units, src) if self.num_units else DONE


def _check_host(block: UnitBlock, host: npt.NDArray[np.uint8]) -> None:
    if host.dtype != np.uint8 or host.shape != (block.nbytes,) or not host.flags.c_contiguous:
        raise LayoutError(
            "host memory does not fit the units",
            group=block.group,
            components=block.components,
            expected=f"contiguous uint8 [{block.nbytes}]",
            got=f"{host.dtype} {list(host.shape)}",
        )


class _PoolBlock(UnitBlock):
    """Units of a pool in host order. Gathers use ``take`` into the caller's memory: no temporary of the whole size."""

    def __init__(self, pool: Pool, components: tuple[str, ...], units: Int64Array, parts: tuple[Piece, ...]) -> None:
        self.group = pool.layout.group
        self.components = components
        self.num_units = len(units)
        self.nbytes = len(units) * sum(piece.nbytes for piece in parts)
        self._pool = pool
        self._units = units
        self._parts = parts

    def _slices(self, host: npt.NDArray[np.uint8]) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
        """Every piece as ``[pool units, bytes]``, with its part of the host memory as ``[units, bytes]``."""
        _check_host(self, host)
        arena, start = self._pool.arena.array(), 0
        for piece in self._parts:
            size = self.num_units * piece.nbytes
            rows = np.lib.stride_tricks.as_strided(
                arena[piece.base :], (piece.num_units, piece.nbytes), (piece.unit_stride, 1)
            )
            yield rows, host[start : start + size].reshape(self.num_units, piece.nbytes)
            start += size

    def cut(self, first: int, count: int) -> UnitBlock:
        """The block of the units ``[first, first + count)``."""
        return _PoolBlock(self._pool, self.components, self._units[first : first + count], self._parts)

    def _scattered(self) -> bool:
        joined = int(np.count_nonzero(np.diff(self._units) == 1))
        return self.num_units > 1 and joined * 2 < self.num_units

    def copy_out(self, dst: npt.NDArray[np.uint8]) -> Fence:
        """Gather the units into ``dst [nbytes]``."""
        scattered = self._scattered()
        for rows, host in self._slices(dst):
            if scattered and rows.flags.c_contiguous:
                # "clip" lets numpy write straight into the destination; ids were checked already.
                np.take(rows, self._units, axis=0, out=host, mode="clip")
            elif scattered and rows.shape[1] < _LOOP_BYTES:
                host[...] = rows[self._units]
            else:
                for at, first, count in unit_runs(self._units):
                    host[at : at + count] = rows[first : first + count]
        return DONE

    def copy_in(self, src: npt.NDArray[np.uint8]) -> Fence:
        """Scatter ``src [nbytes]`` into the units. Raises IntegrityError for null units."""
        self._pool.checked_units(self.components, self._units, writable=True)
        scattered = self._scattered()
        for rows, host in self._slices(src):
            if scattered and rows.shape[1] < _LOOP_BYTES:
                rows[self._units] = host
            else:
                for at, first, count in unit_runs(self._units):
                    rows[first : first + count] = host[at : at + count]
        return DONE
