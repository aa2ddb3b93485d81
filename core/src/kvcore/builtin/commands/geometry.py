"""Options that describe a layer group on the command line, shared by the commands that need one (no torch)."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcore.contract import Format
from kvcore.errors import UnsupportedError
from kvcore.spec import MAX_LAYERS, LayerGroup, TensorSpec

_MOST = 2**24

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
PageSize = Annotated[int | None, typer.Option(help="Tokens a page.")]
Heads = Annotated[
    int | None, typer.Option(help="Query heads. [default: 8, or the next multiple of --kv-heads]", min=1, max=_MOST)
]
KvHeads = Annotated[
    int | None, typer.Option(help="Heads of K and V. [default: 2, or 1 where --heads is odd]", min=1, max=_MOST)
]
HeadDim = Annotated[int, typer.Option(help="Elements a head.", min=1, max=_MOST)]
Layers = Annotated[int, typer.Option(help="Layers.", min=1, max=MAX_LAYERS)]

HEAD_DIM, LAYERS = 64, 2
"""What the options are when they are not given."""

_HEADS, _KV_HEADS = 8, 2
_OPTIONS = ("heads", "kv_heads", "head_dim", "layers")


def sampled(context: typer.Context, kv_format: Format) -> LayerGroup | None:
    """The first layer group that a format samples, if it does and the command line describes none."""
    sources = [context.get_parameter_source(name) for name in _OPTIONS]
    if any(source is not None and source.name == "COMMANDLINE" for source in sources):
        return None
    return next(iter(kv_format.sample_groups()), None)


def attention_group(heads: int | None, kv_heads: int | None, head_dim: int, layers: int) -> LayerGroup:
    """A group ``full`` with tensors ``k`` and ``v``. Raises UnsupportedError where heads do not divide.

    A number of heads that is not given (None) fits the other.
    """
    if kv_heads is None:
        kv_heads = _KV_HEADS if heads is None or heads % _KV_HEADS == 0 else 1
    if heads is None:
        heads = -(-_HEADS // kv_heads) * kv_heads
    if heads % kv_heads:
        raise UnsupportedError("query heads are not a multiple of K/V heads", heads=heads, kv_heads=kv_heads)
    tensors = (TensorSpec("k", kv_heads, head_dim), TensorSpec("v", kv_heads, head_dim))
    return LayerGroup("full", tuple(range(layers)), tensors, num_query_heads=heads)
