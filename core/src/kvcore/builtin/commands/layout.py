"""``kvcore layout``: what every byte of a unit is, drawn in the terminal (no torch)."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcore.builtin.commands.geometry import (
    HEAD_DIM,
    LAYERS,
    AsJson,
    HeadDim,
    Heads,
    KvHeads,
    Layers,
    PageSize,
    attention_group,
    sampled,
)
from kvcore.config import Config, load_config
from kvcore.contract import Format
from kvcore.errors import ConfigError, LayoutError
from kvcore.layout import Field, Layout, Region
from kvcore.layout.moves import Program
from kvcore.plugins import load_plugins
from kvcore.spec import LayerGroup, Shard

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_BAR = 72  # cells


def layout(
    context: typer.Context,
    format: Annotated[str, typer.Argument(help="KV format, with options as NAME:option=value,option=value.")],
    diff: Annotated[str | None, typer.Option(help="Show what differs in this format, written like FORMAT.")] = None,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    page_size: PageSize = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = HEAD_DIM,
    layers: Layers = LAYERS,
    json: AsJson = False,
) -> None:
    """Show the fields of a unit: where they lie, what is in them, and what is padding."""
    own = sampled(context, _format(_settings(format, config, page_size)))
    group = own or attention_group(heads, kv_heads, head_dim, layers)
    mine = layout_of(format, group, config, page_size)
    if diff is None:
        print(json_module.dumps(describe(mine))) if json else draw(mine, Console())
        return
    other = layout_of(diff, group, config, page_size)
    if json:
        report = {"differences": differences(mine, other), "conversion": conversion(mine, other)}
        print(json_module.dumps({"layout": describe(mine), "other": describe(other), **report}))
    else:
        _draw_difference(mine, other, (format, diff), Console())


def layout_of(text: str, group: LayerGroup, config: Path | None, page_size: int | None) -> Layout:
    """The layout of a group in the format that ``text`` names, page-major unless the configuration says otherwise."""
    return _build(_settings(text, config, page_size), group)


def _settings(text: str, config: Path | None, page_size: int | None) -> Config:
    name, options = parse_format(text)
    settings = load_config(config, {"cache.format": name, "cache.page_size": page_size})
    if load_config(config).cache.format == name:  # else the file's options are another format's
        options = {**settings.cache.format_options, **options}
    cache = msgspec.structs.replace(settings.cache, format_options=options)
    return msgspec.structs.replace(settings, cache=cache)


def parse_format(text: str) -> tuple[str, dict[str, Any]]:
    """``name:option=value,…`` to the name and its options; values are JSON where they can be read as such."""
    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for item in rest.split(",") if rest else ():
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ConfigError("format options are written name=value", format=name, got=item)
        try:
            options[key] = json_module.loads(value)
        except ValueError:
            options[key] = value
        except RecursionError:
            raise ConfigError("a format option is nested too deeply", format=name, option=key) from None
    return name, options


def _format(settings: Config) -> Format:
    return load_plugins(settings).format(settings.cache.format, **settings.cache.format_options)


def _build(settings: Config, group: LayerGroup) -> Layout:
    cache = settings.cache
    kv_format = _format(settings)
    kv_format.supports(group).require("format cannot hold this layer group", format=cache.format, group=group.prefix)
    return kv_format.layout(group, page_size=cache.page_size, shard=Shard(), arena=cache.arena)


# --- facts -----------------------------------------------------------------------------------------------------------


def describe(layout: Layout) -> dict[str, Any]:
    """The layout as plain values: what ``--json`` prints."""
    return {
        "format": layout.format,
        "revision": layout.revision,
        "group": layout.group,
        "layers": list(layout.layers),
        "arena": layout.arena,
        "envelope_bytes": layout.envelope_bytes,
        "bytes_per_token": {name: _number(size) for name, size in layout.bytes_per_token().items()},
        "alignment_bytes_per_token": _number(layout.alignment_bytes_per_token()),
        "fingerprint": layout.fingerprint(),
        "spaces": msgspec.to_builtins(layout.spaces),
        "ranges": msgspec.to_builtins(layout.ranges),
        "regions": [
            {
                "name": region.name,
                "component": region.component,
                "ranges": list(region.ranges),
                "unit_bytes": region.unit_bytes,
                "logical_bytes": region.logical_bytes,
                "alignment_bytes": region.alignment_bytes,
                "fields": [_field(field) for field in fields_in_order(region)],
            }
            for region in layout.regions
        ],
    }


def fields_in_order(region: Region) -> list[Field]:
    """Fields by offset."""
    return sorted(region.fields, key=lambda field: field.offset)


def _field(field: Field) -> dict[str, Any]:
    return {
        "name": field.name,
        "kind": field.kind,
        "dtype": field.dtype,
        "order": field.order,
        "offset": field.offset,
        "nbytes": field.nbytes,
        "logical_bytes": field.logical_bytes,
        "shape": list(field.shape),
        "strides": list(field.strides),
        "axes": msgspec.to_builtins(field.axes),
    }


def _number(value: Fraction) -> int | float:
    return value.numerator if value.denominator == 1 else float(value)


def _short(value: Fraction) -> str:
    return f"{float(value):,.2f}".rstrip("0").rstrip(".")


def differences(mine: Layout, other: Layout) -> list[dict[str, Any]]:
    """Every value that differs: ``path``, ``left``, ``right``; None on the side that has nothing there."""
    left, right = (dict(_flat(msgspec.to_builtins(item), "")) for item in (mine, other))
    paths = [*left, *(path for path in right if path not in left)]
    return [
        {"path": path, "left": left.get(path), "right": right.get(path)}
        for path in paths
        if left.get(path) != right.get(path)
    ]


def _flat(value: Any, path: str) -> Iterable[tuple[str, Any]]:
    """Leaves by dotted path; things that have a name go by it, so that an inserted one does not shift the others."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, Sequence) and not isinstance(value, str) and _named(value):
        for inner in value:
            yield from _flat({key: item for key, item in inner.items() if key != "name"}, f"{path}.{inner['name']}")
    else:
        yield path, value


def _named(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, Mapping) and "name" in value for value in values)


def conversion(mine: Layout, other: Layout) -> dict[str, Any]:
    """Whether units of ``mine`` can be read into ``other``, with how many strided moves a unit, or why not."""
    placed = [item.place({unit_range.name: 2 for unit_range in item.ranges}) for item in (mine, other)]
    together: dict[tuple[str, ...], list[str]] = {}
    for region in other.moving_regions:  # what belongs to the model is compared by peers, not moved
        together.setdefault(region.ranges, []).append(region.component)
    try:
        programs = [Program.build(mine, placed[0], other, placed[1], names) for names in together.values()]
    except LayoutError as error:
        return {"possible": False, "reason": str(error)}
    moves = sum(len(program.moves) for program in programs)
    return {"possible": True, "moves": moves, "whole_units": all(program.whole_units for program in programs)}


# --- pictures --------------------------------------------------------------------------------------------------------


def draw(layout: Layout, console: Console) -> None:
    """Print the byte map of every region."""
    console.print(_title(layout))
    colours = iter(_COLOURS * (1 + sum(len(region.fields) for region in layout.regions) // len(_COLOURS)))
    for region in layout.regions:
        fields = fields_in_order(region)
        styles = [next(colours) if field.kind == "data" else "bright_black" for field in fields]
        console.print()
        console.print(_region_title(region))
        console.print(_bar(region, fields, styles, min(_BAR, console.width - 2)))
        console.print(_table(fields, styles))


def _title(layout: Layout) -> Text:
    units = ", ".join(
        f"{unit_range.name}: one {space.unit}"
        + (f" for {space.tokens_per_unit} tokens" if space.tokens_per_unit else "")
        for unit_range in layout.ranges
        for space in (layout.space(unit_range.space),)
    )
    per_token = " + ".join(f"{name} {_short(size)}" for name, size in layout.bytes_per_token().items())
    return Text.assemble(
        (f"{layout.format}", "bold"),
        f" revision {layout.revision}, group {layout.group}, {_layers(layout)}, {layout.arena}\n",
        f"units      {units}\n",
        f"envelope   {layout.envelope_bytes:,} B: {len(layout.layers)} × ",
        f"({' + '.join(f'{region.name} {region.unit_bytes:,}' for region in layout.moving_regions)})\n",
        f"per token  {per_token} B, alignment {_short(layout.alignment_bytes_per_token())} B",
    )


def _layers(layout: Layout) -> str:
    return "1 layer" if len(layout.layers) == 1 else f"{len(layout.layers)} layers"


def _region_title(region: Region) -> Text:
    parts = [f"{region.unit_bytes:,} B a unit", f"component {region.component}", f"ranges {', '.join(region.ranges)}"]
    return Text.assemble((f"region {region.name}", "bold"), ": ", ", ".join(parts))


def _bar(region: Region, fields: Sequence[Field], styles: Sequence[str], width: int) -> Text:
    """One line of a unit: letters for data, dots for padding; the smallest field still has a cell."""
    cells = share([field.nbytes for field in fields], width)
    bar = Text("[")
    for letter, field, style, count in zip(letters(fields), fields, styles, cells, strict=True):
        bar.append(letter * count, style if field.kind == "data" else f"{style} dim")
    return bar.append("]")


def letters(fields: Sequence[Field]) -> list[str]:
    """The sign of each field in the picture and its table: A, B, … for data, a dot for what is none."""
    out, data = [], 0
    for field in fields:
        out.append(chr(ord("A") + data % 26) if field.kind == "data" else "·")
        data += field.kind == "data"
    return out


def share(sizes: Sequence[int], cells: int) -> list[int]:
    """Cells by size, at least one each; the largest gives what rounding demands."""
    total = sum(sizes)
    out = [max(1, size * cells // total) for size in sizes]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    out[largest] = max(1, out[largest] + cells - sum(out))
    return out


def _table(fields: Sequence[Field], styles: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in ("", "field", "bytes", "size", "dtype", "order", "shape", "strides"):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    for letter, field, style in zip(letters(fields), fields, styles, strict=True):
        name = field.name if field.kind == "data" else f"{field.name} ({field.kind})"
        row = (
            letter,
            name,
            f"{field.offset:,}–{field.offset + field.span - 1:,}",
            f"{field.nbytes:,}",
            field.dtype,
            field.order,
            " × ".join(map(str, field.shape)),
            " ".join(map(str, field.strides)),
        )
        table.add_row(*(escape(cell) for cell in row), style=style)
    return table


def _draw_difference(mine: Layout, other: Layout, names: tuple[str, str], console: Console) -> None:
    for item in (mine, other):
        console.print(_title(item), end="\n\n")
    found = differences(mine, other)
    if not found:
        console.print("no difference: the same bytes, and peers agree")
        return
    table = Table(title="differences")
    for title in ("what", *names):
        table.add_column(escape(title), overflow="fold")
    for row in found:
        table.add_row(
            row["path"], *(escape("–" if row[side] is None else str(row[side])) for side in ("left", "right"))
        )
    console.print(table)
    answer = conversion(mine, other)
    if answer["possible"]:
        console.print(f"a peer converts one to the other while reading: {answer['moves']} strided moves a unit")
    else:
        console.print(Text(f"no conversion between them: {answer['reason']}"))
