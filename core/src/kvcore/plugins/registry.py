"""What the enabled plugins registered, by kind and name (no torch until a kernel or a pool is asked for).

The registry calls each plugin's hook itself, one plugin at a time: so it knows who registered what, and what it holds
does not depend on the order in which plugins were loaded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from kvcore.contract import (
    OPS,
    Backup,
    Command,
    Format,
    IndexSpace,
    Kernel,
    ModelAdapter,
    PluginInfo,
    PoolBuilder,
    StateComponent,
    Transport,
)
from kvcore.errors import ConfigError, KVCoreError, PluginError, UnsupportedError, nearest
from kvcore.log import get_logger
from kvcore.plugins.options import checked_options
from kvcore.spec import LayerGroup

__all__ = ["KINDS", "Kind", "LoadedPlugin", "Registry", "collect", "describe_cause"]

_log = get_logger("kvcore.plugins")


@dataclass(frozen=True)
class Kind:
    """One kind of thing that can be registered.

    Attributes:
        name: plural, also the suffix of the entry-point group that lists its names.
        noun: for messages.
        hook: the hook that registers it.
        base: the abstract class of what is registered (commands are instances, all others subclasses).
        lazy: collected on first use rather than at load, because its modules import torch.
    """

    name: str
    noun: str
    hook: str
    base: type
    lazy: bool = False

    def identity(self, item: Any) -> str:
        """The name an item is registered under. Kernels of different ops may share one."""
        if self.base is Kernel:
            return f"{item.op}/{item.name}"
        return str(item.kind if self.base is IndexSpace else item.name)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("formats", "format", "kvcore_register_formats", Format),
        Kind("pools", "pool builder", "kvcore_register_pools", PoolBuilder, lazy=True),
        Kind("state_components", "state component", "kvcore_register_state_components", StateComponent),
        Kind("index_spaces", "index space", "kvcore_register_payload_builders", IndexSpace),
        Kind("backups", "backup", "kvcore_register_backups", Backup),
        Kind("kernels", "kernel", "kvcore_register_kernels", Kernel, lazy=True),
        Kind("transports", "transport", "kvcore_register_transports", Transport),
        Kind("models", "model adapter", "kvcore_register_models", ModelAdapter),
        Kind("commands", "command", "kvcore_register_commands", Command),
    )
}


@dataclass(frozen=True)
class LoadedPlugin:
    """An imported and checked plugin.

    Attributes:
        info: its ``PLUGIN``.
        distribution, version: where it was installed from.
        hooks: hook name → the plugin's own function.
        items: kind name → registered name → item, for the kinds collected at load.
    """

    info: PluginInfo
    distribution: str
    version: str
    hooks: Mapping[str, Callable[[], Any]]
    items: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The plugin's name."""
        return self.info.name


def describe_cause(error: BaseException) -> str:
    """One line for an exception: its type and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def collect(plugin: LoadedPlugin, kind: Kind) -> dict[str, Any]:
    """Call a plugin's hook of one kind and check what it returns; ``{}`` where it has none.

    Raises:
        PluginError: the hook raised (that is the cause), or returned something that is not of the kind.
    """
    hook = plugin.hooks.get(kind.hook)
    if hook is None:
        return {}
    facts = {"plugin": plugin.name, "distribution": plugin.distribution, "hook": kind.hook}
    try:
        result = hook()
    except (Exception, SystemExit) as error:
        raise PluginError(
            "hook of a plugin failed", **facts, cause=describe_cause(error), remedy=_remedy_for(error)
        ) from error
    if not isinstance(result, list | tuple):
        raise PluginError("hook must return a list or tuple", **facts, got=type(result).__name__)
    items: dict[str, Any] = {}
    for item in result:
        wrong = _what_is_wrong(kind, item)
        if wrong:
            raise PluginError(
                f"hook returned something that is not a {kind.noun}", **facts, got=repr(item), reason=wrong
            )
        name = kind.identity(item)
        if name in items:
            raise PluginError(f"plugin registers a {kind.noun} twice", **facts, name=name)
        items[name] = item
    return items


def _remedy_for(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return "this needs torch: pip install 'kvcore[torch]'"
    return ""


def _what_is_wrong(kind: Kind, item: Any) -> str:
    """Say why an item cannot be registered; empty when it can."""
    if kind.base is Command:
        if not isinstance(item, Command):
            return "expected an instance of Command"
        if not callable(item.callback):
            return "its callback is not callable"
    elif not (inspect.isclass(item) and issubclass(item, kind.base)):
        return f"expected a subclass of {kind.base.__name__} (the class, not an instance)"
    elif inspect.isabstract(item):
        return f"it does not implement {', '.join(sorted(getattr(item, '__abstractmethods__', ())))}"
    attributes = ("kind",) if kind.base is IndexSpace else ("name",)
    for attribute in attributes:
        value = getattr(item, attribute, None)
        if not isinstance(value, str) or not value:
            return f"its {attribute!r} must be a non-empty string"
    if kind.base is Kernel:
        op = getattr(item, "op", None)
        if not isinstance(op, str) or not op.isidentifier():
            return "its 'op' must be an identifier"
        formats = getattr(item, "formats", None)
        if not isinstance(formats, tuple) or not formats:
            return "its 'formats' must be a non-empty tuple of format names"
        if op not in OPS and "*" in formats:
            return f"its 'op' is none that every format has ({nearest(op, OPS)}): name the formats that declare it"
    return ""


class Registry:
    """Everything the enabled plugins registered.

    Args:
        plugins: the plugins that loaded.
        failures: why others did not, by plugin name (empty in strict mode).
        promised: ``(kind, name)`` → plugins whose distribution's metadata lists that name, enabled or not.
        strict: raise for every fault; False records it, and asking for what is concerned raises.
    """

    def __init__(
        self,
        plugins: Sequence[LoadedPlugin],
        *,
        failures: Mapping[str, PluginError] | None = None,
        promised: Mapping[tuple[str, str], tuple[str, ...]] | None = None,
        strict: bool = True,
    ) -> None:
        self._plugins = tuple(sorted(plugins, key=lambda plugin: plugin.name))
        self._failures: dict[str, PluginError] = dict(failures or {})
        self._promised = dict(promised or {})
        self._strict = strict
        self._items: dict[str, dict[str, tuple[str, Any]]] = {}
        self._conflicts: dict[tuple[str, str], PluginError] = {}
        for kind in KINDS.values():
            if not kind.lazy:
                self._merge(kind)

    # --- what is there ---

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of the plugins that loaded, sorted."""
        return tuple(plugin.name for plugin in self._plugins)

    @property
    def failures(self) -> Mapping[str, PluginError]:
        """Why plugins failed, by name (only with ``strict=False``)."""
        return dict(self._failures)

    def names(self, kind: str) -> tuple[str, ...]:
        """Registered names of a kind (see :data:`KINDS`), sorted."""
        return tuple(sorted(self._of(kind)))

    def plugin_of(self, kind: str, name: str) -> str:
        """Name of the plugin that registered something."""
        return self._entry(kind, name)[0]

    def item(self, kind: str, name: str) -> Any:
        """What a plugin registered: a class, or a command. Errors as :meth:`format`."""
        return self._entry(kind, name)[1]

    # --- by name, as instances ---

    def format(self, name: str, /, **options: Any) -> Format:
        """Return the format called ``name``.

        Raises:
            ConfigError: unknown name or option, the nearest known one is named; a value of another type than the
                constructor takes.
            PluginError: it belongs to a plugin that failed (chained to the cause) or is not enabled.
        """
        return cast(Format, self._make("formats", name, options))

    def transport(self, name: str, /, **options: Any) -> Transport:
        """Return a new transport; errors as :meth:`format`."""
        return cast(Transport, self._make("transports", name, options))

    def backup(self, name: str, /, **options: Any) -> Backup:
        """Return a new retraction backend; errors as :meth:`format`."""
        return cast(Backup, self._make("backups", name, options))

    def pool_builder(self, name: str, /, **options: Any) -> PoolBuilder:
        """Return the pool builder called ``name``; errors as :meth:`format`."""
        return cast(PoolBuilder, self._make("pools", name, options))

    def command(self, name: str) -> Command:
        """Return the subcommand called ``name``; errors as :meth:`format`."""
        return cast(Command, self._entry("commands", name)[1])

    # --- all of a kind, as instances, in order of their names ---

    def index_spaces(self) -> dict[str, IndexSpace]:
        """Index spaces by kind."""
        return {name: cast(IndexSpace, self._new("index_spaces", name)) for name in self.names("index_spaces")}

    def kernels(self) -> list[Kernel]:
        """Every kernel of every enabled plugin."""
        return [cast(Kernel, self._new("kernels", name)) for name in self.names("kernels")]

    def pool_builders(self) -> list[PoolBuilder]:
        """Every pool builder."""
        return [cast(PoolBuilder, self._new("pools", name)) for name in self.names("pools")]

    def state_components(self) -> list[StateComponent]:
        """Every state component."""
        return [cast(StateComponent, self._new("state_components", name)) for name in self.names("state_components")]

    def state_component(self, group: LayerGroup, *, model: str = "") -> StateComponent:
        """Return the one component that holds a group of state.

        Raises:
            UnsupportedError: none does, or several; it names the model and the group.
        """
        holders = [item for item in self.state_components() if item.applies(group)]
        if len(holders) != 1:
            known = [item.name for item in self.state_components()]
            remedy = "enable a plugin that provides a state component for this model"
            off = self._not_enabled("state_components")
            if holders:
                remedy = "enable only one of the plugins that provide these"
            elif off:
                remedy += f"; installed and not in plugins: {', '.join(off)}"
            raise UnsupportedError(
                "a group of recurrent state needs exactly one state component",
                model=model,
                group=group.prefix,
                states=[state.name for state in group.states],
                got=[item.name for item in holders],
                known=known,
                remedy=remedy,
            )
        return holders[0]

    def commands(self) -> dict[str, Command]:
        """Subcommands by name."""
        return {name: self.command(name) for name in self.names("commands")}

    def model_adapter(self, config: Any) -> ModelAdapter:
        """Return the one adapter that knows a model configuration.

        Raises:
            UnsupportedError: none does.
            PluginError: two do, or one of them fails when asked.
        """
        found: dict[str, ModelAdapter] = {}
        for name in self.names("models"):
            adapter = cast(ModelAdapter, self._new("models", name))
            try:
                matches = adapter.matches(config)
            except (Exception, SystemExit) as error:
                plugin = self.plugin_of("models", name)
                raise PluginError(
                    "model adapter failed", plugin=plugin, adapter=name, cause=describe_cause(error)
                ) from error
            if matches:
                found[name] = adapter
        if len(found) > 1:
            owners = sorted({self.plugin_of("models", name) for name in found})
            raise PluginError("two model adapters claim this model", adapters=sorted(found), plugins=owners)
        if not found:
            raise UnsupportedError(
                "no enabled plugin knows this model",
                adapters=list(self.names("models")),
                remedy="enable the plugin that adapts this kind of model",
            )
        return next(iter(found.values()))

    # --- inside ---

    def _merge(self, kind: Kind) -> None:
        """Join the plugins' items of one kind; a name that two plugins register belongs to neither."""
        owners: dict[str, list[tuple[str, Any]]] = {}
        for plugin in self._plugins:
            if plugin.name in self._failures:
                continue
            try:
                items = plugin.items[kind.name] if kind.name in plugin.items else collect(plugin, kind)
            except PluginError as error:
                if self._strict:
                    raise
                _log.warning("plugin failed", error=error.as_dict())
                self._failures[plugin.name] = error
                continue
            for name, item in items.items():
                owners.setdefault(name, []).append((plugin.name, item))
        merged: dict[str, tuple[str, Any]] = {}
        for name, found in sorted(owners.items()):
            if len(found) == 1:
                merged[name] = found[0]
                continue
            conflict = PluginError(
                f"two plugins register a {kind.noun} of one name",
                kind=kind.name,
                name=name,
                plugins=[plugin for plugin, _ in found],
                remedy="enable only one of them",
            )
            if self._strict:
                raise conflict
            _log.warning("plugins in conflict", error=conflict.as_dict())
            self._conflicts[kind.name, name] = conflict
        self._items[kind.name] = merged

    def _not_enabled(self, kind: str) -> list[str]:
        """Installed plugins whose metadata lists something of a kind and that the configuration leaves out."""
        listed = {name for (of, _), plugins in self._promised.items() if of == kind for name in plugins}
        return sorted(listed - {plugin.name for plugin in self._plugins} - set(self._failures))

    def _of(self, kind: str) -> dict[str, tuple[str, Any]]:
        if kind not in KINDS:
            raise ConfigError("unknown kind of plugin item", kind=kind, remedy=nearest(kind, KINDS))
        if kind not in self._items:
            self._merge(KINDS[kind])
        # A plugin may be found broken after its other items were merged: then none of them is handed out.
        return {name: entry for name, entry in self._items[kind].items() if entry[0] not in self._failures}

    def _entry(self, kind: str, name: str) -> tuple[str, Any]:
        items = self._of(kind)
        if name in items:
            return items[name]
        if (kind, name) in self._conflicts:
            conflict = self._conflicts[kind, name]
            raise PluginError(conflict.message, remedy=conflict.remedy, **conflict.fields) from conflict
        noun = KINDS[kind].noun
        providers = [*self._promised.get((kind, name), ())]
        late = self._items[kind].get(name)
        if late is not None:
            providers.append(late[0])
        for plugin in providers:
            if plugin in self._failures:
                failure = self._failures[plugin]
                raise PluginError(
                    f"the {noun} belongs to a plugin that failed: {failure.message}",
                    remedy=failure.remedy,
                    **{noun.replace(" ", "_"): name, **failure.fields},
                ) from (failure.__cause__ or failure)
        if providers:
            raise PluginError(
                f"the {noun} belongs to a plugin that is not enabled",
                **{noun.replace(" ", "_"): name, "plugins": sorted(providers)},
                remedy=f"add {sorted(providers)[0]!r} to plugins in the configuration",
            )
        known = {*items, *(other for of, other in self._promised if of == kind)}
        raise ConfigError(f"unknown {noun}", **{noun.replace(" ", "_"): name}, remedy=nearest(name, known))

    def _make(self, kind: str, name: str, options: Mapping[str, Any]) -> Any:
        plugin, cls = self._entry(kind, name)
        facts = {KINDS[kind].noun.replace(" ", "_"): name}
        accepted = checked_options(cls, options, facts)
        try:
            return cls(**accepted)
        except KVCoreError:
            raise
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "options are not accepted", **facts, options=dict(options), cause=describe_cause(error)
            ) from error
        except (Exception, SystemExit) as error:
            raise _not_constructed(kind, plugin, name, error) from error

    def _new(self, kind: str, name: str) -> Any:
        """Instantiate something that takes no options."""
        plugin, cls = self._entry(kind, name)
        try:
            return cls()
        except (Exception, SystemExit) as error:
            raise _not_constructed(kind, plugin, name, error) from error


def _not_constructed(kind: str, plugin: str, name: str, error: BaseException) -> PluginError:
    return PluginError(
        f"{KINDS[kind].noun} cannot be constructed", plugin=plugin, name=name, cause=describe_cause(error)
    )
