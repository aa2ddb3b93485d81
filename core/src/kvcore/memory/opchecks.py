"""What a store demands of its arguments: each check raises a typed error, and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.contract import AttendParams, BatchPlan, Format
from kvcore.errors import ConfigError, IntegrityError, LayoutError, UnsupportedError
from kvcore.layout import Layout
from kvcore.memory.pool import Pool
from kvcore.spec import LayerGroup, ModelSpec

Shapes = Mapping[str, tuple[int, int]]
"""``(heads, head dim)`` of every stored tensor, as held by this rank."""


def check_format(group: LayerGroup, layout: Layout, fmt: Format) -> None:
    """The format holds the group, and the layout is its own."""
    fmt.supports(group).require("the format cannot hold the layer group", format=fmt.name, group=group.prefix)
    if (layout.format, layout.revision) != (fmt.name, fmt.revision):
        raise LayoutError(
            "layout is of another format",
            group=group.prefix,
            expected=f"{fmt.name} revision {fmt.revision}",
            got=f"{layout.format} revision {layout.revision}",
        )


def check_layers(model: ModelSpec) -> None:
    """No layer stores its tokens twice; it may have states besides."""
    owner: dict[int, str] = {}
    for group in (group for group in model.groups if group.kind == "attention"):
        for layer in (*group.layers, *(layer for layer, _ in group.shares)):
            if layer in owner:
                raise ConfigError("a layer is in two groups", layer=layer, groups=[owner[layer], group.prefix])
            owner[layer] = group.prefix


def check_rows(
    group: LayerGroup, shapes: Shapes, rows: Mapping[str, torch.Tensor], tokens: int, valid: torch.Tensor | None
) -> None:
    """Rows to store: every tensor of the group as ``[tokens, *shape]``, and one bool a token."""
    for name, shape in shapes.items():
        if name not in rows or tuple(rows[name].shape) != (tokens, *shape):
            got = list(rows[name].shape) if name in rows else sorted(rows)
            raise LayoutError(
                "rows do not match the step", group=group.prefix, tensor=name, expected=[tokens, *shape], got=got
            )
    if len(rows) != len(shapes):
        raise LayoutError("rows name unknown tensors", group=group.prefix, expected=list(shapes), got=sorted(rows))
    if valid is not None and (valid.dtype != torch.bool or tuple(valid.shape) != (tokens,)):
        raise LayoutError("valid is not one bool a token", expected=[tokens], got=f"{valid.dtype} {list(valid.shape)}")


def check_attend(plan: BatchPlan, q: torch.Tensor, out: torch.Tensor, params: AttendParams) -> None:
    """Queries, output and parameters of attention have the shapes of the step."""
    if q.ndim != 3 or q.shape[0] != plan.num_tokens or out.ndim != 3 or out.shape[:2] != q.shape[:2]:
        raise LayoutError(
            "queries do not match the step",
            expected=f"q [{plan.num_tokens}, Hq, Dk] and out [{plan.num_tokens}, Hq, Dv]",
            got=[list(q.shape), list(out.shape)],
        )
    if params.window is not None and params.window < 1:
        raise ConfigError("a window holds at least the token itself", window=params.window)
    if params.sinks is not None and tuple(params.sinks.shape) != (q.shape[1],):
        raise LayoutError("sinks are one logit a query head", expected=[q.shape[1]], got=list(params.sinks.shape))
    if params.position_bias is not None:
        shape = (*q.shape[:2], plan.max_length)
        if tuple(params.position_bias.shape) != shape:
            raise LayoutError(
                "position bias does not match the step", expected=list(shape), got=list(params.position_bias.shape)
            )


def check_window(group: LayerGroup, params: AttendParams) -> None:
    """A group that keeps a window is asked for no more than it."""
    held = dict(group.space_options).get("window") if group.space == "window" else None
    if held is not None and (params.window is None or params.window > held):
        raise UnsupportedError(
            "the layer group keeps a window only, and attention asks for more",
            group=group.prefix,
            expected=f"a window of at most {held}",
            got=params.window,
            remedy="pass AttendParams(window=…)",
        )


def check_load(pool: Pool, shapes: Shapes, slots: torch.Tensor, out: Mapping[str, torch.Tensor]) -> None:
    """Slots of the pool or −1, and an output for every tensor."""
    layout = pool.layout
    item = layout.token_range
    end = pool.end_unit(item) * layout.space_of_range(item).tokens_per_unit
    if slots.ndim != 1 or bool(((slots < -1) | (slots >= end)).any()):
        raise IntegrityError("slot is outside the pool", group=layout.group, expected=f"[N] in -1 … {end - 1}")
    for name, shape in shapes.items():
        if name not in out or tuple(out[name].shape) != (len(slots), *shape):
            raise LayoutError("output does not match the slots", tensor=name, expected=[len(slots), *shape])
