"""``kvcore plugins`` and ``kvcore explain``; ``kvcore layout`` has a module of its own."""

from __future__ import annotations

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvcore.builtin.commands.check import check
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
from kvcore.builtin.commands.keys import keys
from kvcore.builtin.commands.layout import layout
from kvcore.config import Config, load_config, parse_settings
from kvcore.contract import Command
from kvcore.engine.fitting import check_memory, formats_of
from kvcore.engine.sizing import allocated_bytes
from kvcore.plugins import PluginReport, discover, load_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import ModelSpec, Shard


def plugins(
    deep: Annotated[bool, typer.Option("--deep", help="Also load kernels and pools (imports torch).")] = False,
    json: AsJson = False,
) -> None:
    """Show every installed plugin, what it provides, and what is wrong with it."""
    reports = discover(deep=deep)
    if json:
        rows = [{**msgspec.to_builtins(report), "healthy": report.healthy} for report in reports]
        print(json_module.dumps({"plugins": rows}))
        return
    table = Table(show_lines=True)
    for title in ("plugin", "distribution", "contract", "provides", "health"):
        table.add_column(title, overflow="fold")
    for report in reports:
        table.add_row(*(escape(cell) for cell in _cells(report)))
    Console().print(table)


def _cells(report: PluginReport) -> tuple[str, ...]:
    name = f"{report.name}\n{report.summary}" if report.summary else report.name
    contract = ".".join(map(str, report.contract)) if report.contract else "?"
    provides = "\n".join(f"{kind}: {', '.join(names)}" for kind, names in sorted(report.provides.items()))
    health = "ok"
    if report.error is not None:
        fields = report.error["fields"]
        details = [str(fields["cause"])] if fields.get("cause") else [f"{k}: {v}" for k, v in fields.items()]
        health = "\n".join([f"BROKEN: {report.error['message']}", *details, report.error["remedy"]]).rstrip()
    elif report.missing:
        health = "\n".join(f"INCOMPLETE: needs {need}, and is not installed" for need in report.missing)
    return name, f"{report.distribution} {report.version}", contract, provides, health


def explain(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="Configuration file (TOML).")] = None,
    format: Annotated[str | None, typer.Option(help="KV format.")] = None,
    page_size: PageSize = None,
    heads: Heads = None,
    kv_heads: KvHeads = None,
    head_dim: HeadDim = HEAD_DIM,
    layers: Layers = LAYERS,
    device: Annotated[str | None, typer.Option(help="Device.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any configuration key; may be repeated.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Show, for each op, the kernel that would run and why each other one was refused."""
    flags = {"cache.format": format, "cache.page_size": page_size, "cache.device": device}
    configured = load_config(config, parse_settings(settings or (), flags))
    registry = load_plugins(configured)
    own = sampled(context, registry.format(configured.cache.format, **configured.cache.format_options))
    group = own or attention_group(heads, kv_heads, head_dim, layers)
    choices = _choices(configured, registry, ModelSpec("explain", (group,), dtype="fp32"))
    if json:
        print(
            json_module.dumps({"format": configured.cache.format, "device": configured.cache.device, "groups": choices})
        )
        return
    for prefix, rows in choices.items():
        table = Table(title=f"{prefix}: {configured.cache.format} on {configured.cache.device}", show_lines=True)
        for title in ("op", "kernel", "refused"):
            table.add_column(title, overflow="fold")
        for row in rows:
            refused = "\n".join(f"{item['kernel']}: {item['reason']}" for item in row["refused"])
            table.add_row(row["op"], escape(row["kernel"]), escape(refused))
        Console().print(table)


def _choices(settings: Config, registry: Registry, model: ModelSpec) -> dict[str, list[dict[str, Any]]]:
    """Build the smallest pools the model needs and ask their kernel tables."""
    cache = settings.cache
    formats = formats_of(model, cache, registry)
    layouts = {}
    for group in model.groups:
        fmt = formats[group.prefix]
        fmt.supports(group).require("format cannot hold this layer group", format=fmt.name, group=group.prefix)
        layouts[group.prefix] = fmt.layout(group, page_size=cache.page_size, shard=Shard(), arena=cache.arena)
    kernels, builders = registry.kernels(), registry.pool_builders()  # refuses, with the remedy, where torch is missing
    from kvcore.memory.store import Store  # here: it imports torch, which `kvcore plugins` does without

    units = {prefix: {item.name: 2 for item in layout.ranges} for prefix, layout in layouts.items()}
    check_memory(builders, cache.device, allocated_bytes(layouts, units))
    store = Store(
        model,
        layouts,
        formats,
        units,
        builders,
        kernels,
        device=cache.device,
        max_rows=1,
        max_tokens=1,
    )
    try:
        return {
            prefix: [
                {
                    "op": choice.op,
                    "kernel": choice.chosen,
                    "refused": [{"kernel": name, "reason": reason} for name, reason in choice.refused],
                }
                for choice in choices
            ]
            for prefix, choices in store.explain().items()
        }
    finally:
        store.close()


COMMANDS: tuple[Command, ...] = (
    Command("plugins", "Show installed plugins, what they provide, and what is wrong with them.", plugins),
    Command("explain", "Show the kernel chosen for each op and why others were refused.", explain),
    Command("check", "Run the conformance kit on everything a plugin registers.", check),
    Command("keys", "Make a pair of keys that says who may connect to whom.", keys),
    Command("layout", "Draw the byte map of a unit of a format, or what differs between two.", layout),
)
