"""The exact reference of every op, for any format: works from the layout and the format's encode and decode alone.

Slow on purpose: every element is addressed by its own index, through :meth:`kvcore.layout.Field.index`, and attention is
computed in fp64. What is faster is compared with this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from kvcore.contract import (
    DONE,
    FULL,
    AttendParams,
    BatchPlan,
    Fence,
    Format,
    Kernel,
    PoolView,
    Support,
    unsupported,
)
from kvcore.errors import LayoutError, UnsupportedError
from kvcore.layout import Field, Layout
from kvcore.memory.constants import ConstantFields
from kvcore.memory.tensors import as_stored, from_stored, int64_tensor
from kvcore.spec import LayerGroup

_EXACT = torch.float64


def places_tokens(layout: Layout) -> Support:
    """Whether a slot of the token range names a place of its own for one token, in every region that requests write.

    Only then may rows be scattered by slot alone: a ring or a state slot gives several tokens one unit, compressed rows
    have no place for each token, and a region without the token range has other bytes, or none, at its units.
    """
    name = layout.token_range
    space = layout.space_of_range(name)
    tokens = space.tokens_per_unit
    if tokens < 1 or (space.unit != "page" and tokens > 1):
        return unsupported(
            f"writes a token to a slot of its own; units of range {name!r} (space {space.kind!r}, unit {space.unit!r}, "
            f"{tokens} tokens each) have none"
        )
    for item in layout.moving_regions:
        if name not in item.ranges:
            return unsupported(
                f"writes every region at slots of range {name!r}; region {item.name!r} has {', '.join(item.ranges)}"
            )
    return FULL


class _FieldAccess:
    """Elements of one data field, addressed one by one."""

    def __init__(self, pool: PoolView, region: str, field: Field) -> None:
        self.key = (region, field.name)
        self.field = field
        self.views = {layer: pool.field(layer, region, field.name) for layer in pool.layout.layers}
        self.axes = [axis for axis in field.axes if axis.name != "slot"]
        self.shape = tuple(axis.size for axis in self.axes)
        self.coords = {}
        for n, axis in enumerate(self.axes):
            # [1, …, size, …, 1]: broadcasts against the tokens in front.
            shape = [1] * (len(self.axes) + 1)
            shape[n + 1] = axis.size
            self.coords[axis.name] = torch.arange(axis.size, device=pool.device).reshape(shape)

    def index(self, slots: torch.Tensor, page_size: int) -> tuple[Any, ...]:
        """Index of every element of the slots (int64 ``[N]``, none negative), broadcast to ``[N, *shape]``."""
        tokens = slots.reshape(-1, *([1] * len(self.axes)))
        coords = dict(self.coords)
        if self.field.has_axis("slot"):
            coords["slot"] = tokens % page_size
        return self.field.index(tokens // page_size, **coords)


class _Access:
    """Rows of a pool through the format's reference.

    Raises LayoutError where the format finds no bytes of a tensor that the group stores, UnsupportedError for formats that
    encode whole units.
    """

    def __init__(self, pool: PoolView, group: LayerGroup, format: Format) -> None:
        if format.encodes != "tokens":
            raise UnsupportedError(
                "reference kernels encode and decode token by token",
                format=format.name,
                encodes=format.encodes,
                group=group.prefix,
                remedy="install kernels of the format's own, or leave the op out of Format.ops",
            )
        self.layout = pool.layout
        self.format = format
        self.constants = ConstantFields(pool)
        regions = pool.layout.moving_regions
        self.fields = [_FieldAccess(pool, region.name, f) for region in regions for f in region.data_fields]
        self.page_size = pool.layout.space_of_range(pool.layout.token_range).tokens_per_unit
        self._check(pool, group)

    def _check(self, pool: PoolView, group: LayerGroup) -> None:
        """Decode no rows at all: what that does not give back, no load ever would."""
        stored = {tensor.name for tensor in group.tensors}
        nothing = torch.zeros(0, dtype=torch.int64, device=pool.device)
        lost, cause = stored, None
        try:
            lost = stored - set(self.read(self.layout.layers[0], nothing, self.page_size, torch.float32))
        except KeyError as error:
            cause = error
        if lost:
            raise LayoutError(
                "the layout does not hold every tensor of the group",
                format=self.format.name,
                group=group.prefix,
                expected=sorted(stored),
                got=[f"{region}.{field}" for region, field in (access.key for access in self.fields)],
                remedy="let the format's layout have a field for each of them",
            ) from cause

    def _bound(self, layer: int) -> Format:
        """The format with the constants of a layer, read anew: they may be set after kernels are bound."""
        if not self.constants:
            return self.format
        return self.format.with_constants(self.layout, self.constants.read(layer))

    def write(self, layer: int, rows: Mapping[str, torch.Tensor], slots: torch.Tensor, page_size: int) -> None:
        """Encode ``rows[name][N, H, D]`` and scatter them to ``slots`` (int64 ``[N]``, none negative)."""
        elements = self._bound(layer).encode(self.layout, rows)
        for access in self.fields:
            values = elements[access.key]
            if tuple(values.shape) != (len(slots), *access.shape):
                raise LayoutError(
                    "encoded rows do not match the field",
                    region=access.key[0],
                    field=access.key[1],
                    expected=[len(slots), *access.shape],
                    got=list(values.shape),
                )
            access.views[layer][access.index(slots, page_size)] = as_stored(values.contiguous(), access.field.dtype)

    def read(self, layer: int, slots: torch.Tensor, page_size: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Gather and decode the rows at ``slots`` (int64 ``[N]``, none negative)."""
        elements = {
            access.key: from_stored(
                access.views[layer][access.index(slots, page_size)].contiguous(), access.field.dtype
            )
            for access in self.fields
        }
        return self._bound(layer).decode(self.layout, elements, dtype)


class ReferenceStore(Kernel):
    """Encode, then scatter element by element."""

    op = "store"
    name = "reference_store"
    formats = ("*",)

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Layouts with a slot of its own for every token: :func:`places_tokens`."""
        return places_tokens(layout)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        access = _Access(pool, group, format)

        def store(
            layer: int,
            rows: Mapping[str, torch.Tensor],
            plan: BatchPlan,
            valid: torch.Tensor | None = None,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            slots = int64_tensor(plan.slots, pool.device)
            keep = slots >= 0 if valid is None else (slots >= 0) & valid
            # Dropped before anything is indexed: torch wraps −1 to the last row.
            kept = {name: values[keep] for name, values in rows.items()}
            access.write(layer, kept, slots[keep], plan.page_size)
            return DONE

        return store


class ReferenceLoad(Kernel):
    """Gather element by element, then decode."""

    op = "load"
    name = "reference_load"
    formats = ("*",)

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Layouts with a slot of its own for every token: :func:`places_tokens`."""
        return places_tokens(layout)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        access = _Access(pool, group, format)

        def load(layer: int, slots: torch.Tensor, out: Mapping[str, torch.Tensor], after: Fence = DONE) -> Fence:
            after.wait()
            ids = int64_tensor(slots, pool.device)
            keep = ids >= 0
            for dtype in {values.dtype for values in out.values()}:
                rows = access.read(layer, ids[keep], access.page_size, dtype)
                for name, values in out.items():
                    if values.dtype == dtype:
                        values.zero_()
                        values[keep] = rows[name]
            return DONE

        return load


def keys_and_values(rows: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """What attention reads of a group's rows: ``k`` and ``v``, or for latent attention the latent and rotary parts
    side by side as keys and the latent again as values."""
    if "latent" in rows:
        parts = [rows[name] for name in ("latent", "rope") if name in rows]
        return torch.cat(parts, dim=-1), rows["latent"]
    return rows["k"], rows["v"]


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    params: AttendParams,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of one request.

    Args:
        q: ``[n, Hq, Dk]``; k: ``[L, Hk, Dk]``; v: ``[L, Hv, Dv]``; Hq is a multiple of Hk and of Hv.
        positions: int64 ``[n]``, of the queries; key ``j`` has position ``j``.
        params: scale, window, sinks.
        bias: ``[n, Hq, L]`` or None.

    Returns ``[n, Hq, Dv]`` in fp64.
    """
    heads, length = q.shape[1], k.shape[0]
    keys = k.to(_EXACT).repeat_interleave(heads // k.shape[1], dim=1)
    values = v.to(_EXACT).repeat_interleave(heads // v.shape[1], dim=1)
    scores = torch.einsum("nhd,lhd->hnl", q.to(_EXACT), keys) * params.sm_scale
    if bias is not None:
        scores = scores + bias.to(_EXACT).transpose(0, 1)
    at = torch.arange(length, device=q.device)
    visible = at <= positions[:, None]
    if params.window is not None:
        visible &= at > positions[:, None] - params.window
    scores = scores.masked_fill(~visible, -torch.inf)
    if params.sinks is not None:
        sinks = params.sinks.to(_EXACT)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    weights = scores.softmax(dim=-1)[..., :length]
    return torch.einsum("hnl,lhd->nhd", weights, values)


class _ReferenceAttend(Kernel):
    formats = ("*",)

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Groups that store ``k`` and ``v``, or ``latent`` and optionally ``rope``, with a slot for every token. What else
        they store (an indexer's keys) no attention reads."""
        names = {tensor.name for tensor in group.tensors}
        if group.kind != "attention" or not ({"k", "v"} <= names or "latent" in names):
            return unsupported(
                f"attends over k and v, or latent and rope, not over {', '.join(sorted(names)) or 'nothing'}"
            )
        return places_tokens(layout)

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""
        access = _Access(pool, group, format)

        def attend(
            layer: int,
            q: torch.Tensor,
            out: torch.Tensor,
            plan: BatchPlan,
            params: AttendParams,
            after: Fence = DONE,
        ) -> Fence:
            after.wait()
            ptr = plan.host_query_indptr
            for row, length in enumerate(plan.host_lengths):
                begin, end = ptr[row], ptr[row + 1]
                if begin == end:
                    continue
                at = torch.arange(length, device=pool.device)
                slots = plan.page_table[row][at // plan.page_size] * plan.page_size + at % plan.page_size
                k, v = keys_and_values(access.read(layer, slots, plan.page_size, torch.float32))
                if q.shape[1] % k.shape[1] or q.shape[1] % v.shape[1] or q.shape[2] != k.shape[2]:
                    raise LayoutError(
                        "queries do not fit the keys", q=list(q.shape[1:]), k=list(k.shape[1:]), v=list(v.shape[1:])
                    )
                bias = None if params.position_bias is None else params.position_bias[begin:end, :, :length]
                out[begin:end] = exact_attention(q[begin:end], k, v, plan.positions[begin:end], params, bias)
            return DONE

        return attend


class ReferenceDecode(_ReferenceAttend):
    """Row by row, in fp64."""

    op = "attend_decode"
    name = "reference_attend_decode"


class ReferencePrefill(_ReferenceAttend):
    """Row by row, in fp64."""

    op = "attend_prefill"
    name = "reference_attend_prefill"


class ReferenceCopyUnits(Kernel):
    """Unit bytes of every layer and region, one region at a time."""

    op = "copy_units"
    name = "reference_copy_units"
    formats = ("*",)

    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Everything torch can address."""
        return FULL

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """See :class:`kvcore.contract.Kernel`."""

        def copy_units(range_name: str, src: torch.Tensor, dst: torch.Tensor, after: Fence = DONE) -> Fence:
            after.wait()
            pool.layout.space_of_range(range_name)
            sources, targets = int64_tensor(src, pool.device), int64_tensor(dst, pool.device)
            for region in pool.layout.regions:
                if range_name in region.ranges:
                    for layer in pool.layout.layers:
                        units = pool.units(layer, region.name)
                        units[targets] = units[sources]
            return DONE

        return copy_units


REFERENCE_KERNELS: tuple[type[Kernel], ...] = (
    ReferenceStore,
    ReferenceLoad,
    ReferenceDecode,
    ReferencePrefill,
    ReferenceCopyUnits,
)
