"""What ``kvcore plan`` does: a model's configuration and formats to bytes, tokens and requests of one rank (no torch).

Nothing is computed here that is not derived from the layouts an engine would be given, so what is planned is what is
allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from kvcore.config import CacheConfig, Config, load_config
from kvcore.engine.fitting import Holders, formats_of
from kvcore.engine.sizing import CapacityPlan, plan_capacity
from kvcore.errors import ConfigError
from kvcore.layout import Layout
from kvcore.plugins import load_plugins, resolve_plugins
from kvcore.plugins.registry import Registry
from kvcore.spec import ModelSpec, Shard, StateSpec
from kvcore_transformers import PLUGIN
from kvcore_transformers.models.adapters import AttentionAdapter, adapter_for
from kvcore_transformers.models.hf_config import check_layers

_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
_BAR = 48  # cells of the largest format
_PLENTY = 1 << 50  # a memory that every model fits into


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The command line.

    Attributes:
        model: ``config.json`` or its directory.
        settings: kvcore's configuration file, if any.
        overrides: dotted keys of that configuration.
        formats: names; empty means the one that ``settings`` name, or the plain format of the model's dtype.
        tp: tensor-parallel ranks.
        max_requests: requests served at once, None for what the configuration says.
        json: print JSON.
    """

    model: Path
    settings: Path | None = None
    overrides: dict[str, Any] = {}
    formats: tuple[str, ...] = ()
    tp: int = 1
    max_requests: int | None = None
    json: bool = False


class FormatPlan(msgspec.Struct, frozen=True):
    """One format on one rank.

    Attributes:
        capacity: its sizes.
        requests: most requests at once, each of at least one token; None where nothing bounds them.
    """

    capacity: CapacityPlan
    requests: int | None


def plan_command(options: PlanOptions) -> None:
    """Print the plan. Raises ConfigError, UnsupportedError, LayoutError or PluginError for what cannot work."""
    spec, plans = plan_model(options)
    if options.json:
        print(json.dumps({"formats": {name: as_json(plan, options) for name, plan in plans.items()}}))
        return
    show(spec, plans, options, Console())


def plan_model(options: PlanOptions) -> tuple[ModelSpec, dict[str, FormatPlan]]:
    """The model's groups, and by format name what they come to on one rank."""
    settings = load_config(options.settings, options.overrides)
    registry = _enabled(settings, options.formats)
    spec = read_model(options.model, registry)
    # What the file says, and not the default: that is the dtype of the model.
    written = load_config(options.settings, options.overrides, {"cache.format": ""}).cache.format
    names = options.formats or (written or spec.dtype,)
    shard = Shard(tp_size=options.tp)
    plans = {}
    for name in dict.fromkeys(names):
        # Options belong to the format that the file names; where it names none, to those of the command line.
        own = settings.cache.format_options if name == written or not written else {}
        cache = msgspec.structs.replace(settings.cache, format=name, format_options=own)
        layouts = layouts_of(spec, registry, cache, shard)
        plans[name] = plan_format(layouts, settings, registry, options)
    return spec, plans


def _enabled(settings: Config, formats: Sequence[str]) -> Registry:
    """Load this plugin, those the configuration names, and the providers of every format asked for."""
    names = {PLUGIN.name}
    for name in formats or (settings.cache.format,):
        cache = msgspec.structs.replace(settings.cache, format=name)
        names.update(resolve_plugins(msgspec.structs.replace(settings, cache=cache)))
    return load_plugins(sorted(names))


# --- the model -------------------------------------------------------------------------------------------------------


def read_model(path: Path, registry: Registry) -> ModelSpec:
    """Layer groups of the model whose configuration is at ``path``; of a multimodal one, of its language part.

    Raises ConfigError where that is no configuration, UnsupportedError for a model that no plugin can hold.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        raw = json.loads(file.read_bytes())
    except OSError as error:
        raise ConfigError("the model's configuration cannot be read", path=str(file), cause=str(error)) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError("the model's configuration is not valid JSON", path=str(file), cause=str(error)) from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(
            "not a model's configuration: it names no model_type", path=str(file), remedy="name a config.json"
        )
    text = language_part(raw)
    check_layers(text)  # transformers lists them too
    adapter = adapter_for(registry, text)
    if not _says_enough(adapter, text):
        text = _with_defaults(raw, file)
    return adapter.spec(text)


def language_part(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping that describes the decoder: ``text_config`` of a multimodal model, with the dtype of the whole."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(raw)
    outer = {key: raw[key] for key in ("dtype", "torch_dtype") if raw.get(key)}
    return {**outer, **{key: value for key, value in inner.items() if key not in outer or value}}


def _says_enough(adapter: object, text: Mapping[str, Any]) -> bool:
    """Whether nothing is left to defaults that only transformers knows. Importing it takes seconds."""
    return isinstance(adapter, AttentionAdapter) and all(key in text for key in adapter.states)


def _with_defaults(raw: dict[str, Any], file: Path) -> Any:
    """The configuration with what the file leaves out, from the class transformers has for it."""
    import transformers

    kind = raw["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        return language_part(raw)
    try:
        whole = transformers.CONFIG_MAPPING[kind].from_dict(raw)
        text = whole.get_text_config()
    except Exception as error:  # its checks raise exceptions of many libraries
        raise ConfigError("the model's configuration is malformed", path=str(file), cause=str(error)) from error
    if text.dtype is None:
        text.dtype = whole.dtype
    return text


# --- sizes -----------------------------------------------------------------------------------------------------------


def layouts_of(spec: ModelSpec, registry: Registry, config: CacheConfig, shard: Shard) -> dict[str, Layout]:
    """Layouts by group, as a cache of this configuration has them."""
    holders = Holders(spec, formats_of(spec, config, registry), registry, shard)
    layouts = holders.layouts(page_size=config.page_size, arena=config.arena)
    holders.check(layouts, registry.index_spaces())
    return layouts


def plan_format(
    layouts: Mapping[str, Layout], settings: Config, registry: Registry, options: PlanOptions
) -> FormatPlan:
    """What the layouts of one format come to in the memory, or in no particular one where none was given."""
    cache, spaces = settings.cache, registry.index_spaces()
    capacity = plan_capacity(
        layouts,
        cache.memory if sized(options) else _PLENTY,
        cache.max_requests,
        spaces=spaces,
        step_tokens=cache.max_tokens,
        step_rows=cache.max_rows,
        checkpoints=cache.checkpoints,
    )
    limits = [] if capacity.request_capacity is None else [capacity.request_capacity]
    for group, layout in layouts.items():
        for item in layout.ranges:
            spec = layout.space(item.space)
            space = spaces[spec.kind]
            if space.units_per_request(spec) is None and space.num_units(spec, 1):
                limits.append(capacity.units[group][item.name] - space.reserved_units(spec))
    if options.max_requests is not None:
        limits.append(options.max_requests)
    return FormatPlan(capacity, min(limits, default=None))


def sized(options: PlanOptions) -> bool:
    """Whether a memory was given: without one there is a price of a token, but no capacity."""
    return options.settings is not None or options.overrides.get("cache.memory") is not None


def as_json(plan: FormatPlan, options: PlanOptions) -> dict[str, Any]:
    """What ``--json`` says of a format."""
    known, sizes = sized(options), plan.capacity
    return {
        "bytes_per_token": sizes.bytes_per_token,
        "padding": sizes.padding,
        "per_request_bytes": sizes.per_request_bytes,
        "token_capacity": sizes.token_capacity if known else None,
        "request_capacity": plan.requests if known else None,
        "allocated_bytes": sizes.allocated_bytes if known else None,
    }


# --- for people ------------------------------------------------------------------------------------------------------


def show(spec: ModelSpec, plans: Mapping[str, FormatPlan], options: PlanOptions, console: Console) -> None:
    """Print the groups, a table of the formats, and a picture of what a token costs."""
    console.print(_title(spec, options))
    table = Table()
    table.add_column("format")
    for title in ("a token", "padding", "a request", "tokens", "requests", "allocated"):
        table.add_column(title, justify="right")
    for name, plan in plans.items():
        facts = as_json(plan, options)
        table.add_row(
            escape(name),
            size(facts["bytes_per_token"]["total"]),
            size(facts["padding"]),
            size(facts["per_request_bytes"]),
            count(facts["token_capacity"]),
            count(facts["request_capacity"]),
            "–" if facts["allocated_bytes"] is None else size(facts["allocated_bytes"]),
        )
    console.print(table)
    console.print(_picture(plans))


def _title(spec: ModelSpec, options: PlanOptions) -> Text:
    text = Text.assemble((spec.name, "bold"), f", computed in {spec.dtype}")
    if options.tp > 1:
        text.append(f", one of {options.tp} tensor-parallel ranks")
    for group in spec.groups:
        shard = Shard(tp_size=options.tp)
        stored = [f"{item.name} {shard.num_heads(item)} × {item.head_dim}" for item in group.tensors]
        stored += [_state(item, shard) for item in group.states]
        space = [f"{name} {value}" for name, value in group.space_options]
        text.append(f"\n  {group.prefix}: {', '.join((f'{len(group.layers)} layers', *stored, *space))}")
    return text


def _state(state: StateSpec, shard: Shard) -> str:
    """A state as a rank holds it: ``conv 8192 × 3 in bf16``."""
    held = sum(hi - lo for lo, hi in shard.ids(state))
    sizes = (held if axis == state.split else size for axis, size in state.axes)
    return f"{state.name} {' × '.join(map(str, sizes))} in {state.dtype}"


def _picture(plans: Mapping[str, FormatPlan]) -> Text:
    """A bar a format: bytes of a token, by component, to one scale."""
    costs = {name: dict(plan.capacity.bytes_per_token) for name, plan in plans.items()}
    totals = {name: by_component.pop("total") for name, by_component in costs.items()}
    components = list(dict.fromkeys(c for by_component in costs.values() for c, cost in by_component.items() if cost))
    styles = {component: _COLOURS[n % len(_COLOURS)] for n, component in enumerate(components)}
    most, width = max(totals.values(), default=0) or 1, max(map(len, plans), default=0)
    text = Text()
    for name, by_component in costs.items():
        text.append(f"{name:>{width}} ")
        for component in components:
            cost = by_component.get(component, 0)
            text.append("█" * (max(1, round(cost * _BAR / most)) if cost else 0), styles[component])
        text.append(f" {size(totals[name])} a token\n")
    text.append(" " * (width + 1))
    for component in components:
        text.append("█ ", styles[component]).append(f"{component}  ")
    return text


def size(value: float) -> str:
    """Bytes for people, to one decimal: ``320 KiB``, ``1.5 MiB``."""
    amount, unit = float(value), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            break
        amount, unit = amount / 1024, larger
    return f"{amount:,.1f}".removesuffix(".0") + f" {unit}"


def count(value: int | None) -> str:
    """A number for people, a dash where there is none."""
    return "–" if value is None else f"{value:,}"
