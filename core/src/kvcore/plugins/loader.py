"""Finding and loading plugins (no torch).

A plugin is an entry point in the group ``kvcore`` that exposes ``PLUGIN``. The names it provides are listed in further
groups of the same distribution (``kvcore.formats``, ``kvcore.state_components``, ``kvcore.transports``,
``kvcore.backups``, ``kvcore.commands``), so that they are known without importing it. A plugin is imported only if it is
enabled.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from importlib import metadata
from typing import Any, cast

import msgspec
import pluggy

from kvcore.config import Config
from kvcore.contract import CONTRACT, Command, PluginInfo
from kvcore.errors import ConfigError, PluginError, nearest
from kvcore.log import get_logger
from kvcore.plugins import hookspecs
from kvcore.plugins.installed import (
    BUILTIN,
    GROUP,
    PROVIDED_KINDS,
    Installed,
    distribution_of,
    installed_now,
    provided_names,
    provider_of,
    resolve_plugins,
    version_of,
)
from kvcore.plugins.needs import missing_needs
from kvcore.plugins.registry import KINDS, LoadedPlugin, Registry, collect, describe_cause

__all__ = [
    "BUILTIN",
    "PluginReport",
    "Registry",
    "discover",
    "load_command",
    "load_plugins",
    "provided_names",
    "provider_of",
    "resolve_plugins",
]

EAGER_KINDS: tuple[str, ...] = tuple(kind.name for kind in KINDS.values() if not kind.lazy)

_log = get_logger("kvcore.plugins")


class PluginReport(msgspec.Struct, frozen=True):
    """One installed plugin as ``kvcore plugins`` shows it.

    Attributes:
        name: its entry point's name.
        distribution, version: where it comes from.
        contract: the contract it was written for; None where it could not be read.
        provides: kind → names; of a plugin that failed, what its metadata promises.
        missing: what it needs that is not installed: it can be enabled, and fails when it uses that.
        error: :meth:`kvcore.errors.KVCoreError.as_dict` of what is wrong, None when it can be enabled.
    """

    name: str
    distribution: str
    version: str
    contract: tuple[int, int] | None = None
    summary: str = ""
    requires: tuple[str, ...] = ()
    provides: dict[str, tuple[str, ...]] = {}
    missing: tuple[str, ...] = ()
    error: dict[str, Any] | None = None

    @property
    def healthy(self) -> bool:
        """Whether it can be enabled and has what it needs."""
        return self.error is None and not self.missing


# --- loading ---------------------------------------------------------------------------------------------------------


def load_plugins(names: Config | Iterable[str] = (), *, strict: bool = True) -> Registry:
    """Import and check plugins: those named, the built-ins, and whatever they require.

    Args:
        names: a configuration, for what it needs (:func:`resolve_plugins`), or plugin names; order and repetition do
            not matter.
        strict: raise the first fault. False records faults in ``Registry.failures``; what healthy plugins registered
            works, and asking for something of a failed one raises with the original cause.

    Raises:
        PluginError: not installed; installed twice; failed import; no or wrong ``PLUGIN``; contract of another version;
            misspelt hook; a hook that raises or returns something else; a name registered by two plugins.
    """
    if isinstance(names, str):
        raise ConfigError("plugins must be a list of names", got=names)
    if isinstance(names, Config):
        names = resolve_plugins(names)
    installed = installed_now()
    loaded: dict[str, LoadedPlugin] = {}
    failures: dict[str, PluginError] = {}
    pending: dict[str, str] = dict.fromkeys({BUILTIN, *names}, "")  # name → who requires it
    while pending:
        name = min(pending)
        required_by = pending.pop(name)
        try:
            plugin = _load(name, installed, EAGER_KINDS)
        except PluginError as error:
            if required_by:
                error.fields["required_by"] = required_by
            failures[name] = error
            continue
        loaded[name] = plugin
        for other in plugin.info.requires:
            if other not in loaded and other not in failures:
                pending.setdefault(other, name)
    if failures and strict:
        raise failures[min(failures)]
    _fail_dependents(loaded, failures)
    for failure in failures.values():
        _log.warning("plugin failed", error=failure.as_dict())
    promised: dict[tuple[str, str], tuple[str, ...]] = {
        (kind, name): tuple(plugin for plugin, _ in providers if plugin)
        for kind in PROVIDED_KINDS
        for name, providers in installed.promises(kind).items()
    }
    healthy = [plugin for name, plugin in loaded.items() if name not in failures]
    return Registry(healthy, failures=failures, promised=promised, strict=strict)


def load_command(name: str) -> Command:
    """Return a subcommand, importing only the plugin that provides it.

    Raises:
        ConfigError: no installed plugin provides it; the nearest one is named.
        PluginError: its plugin is broken.
    """
    provider = provider_of("commands", name)
    if provider is None:
        raise ConfigError("unknown command", command=name, remedy=nearest(name, provided_names("commands")))
    return cast(Command, _load(provider, installed_now(), ("commands",)).items["commands"][name])


def discover(*, deep: bool = False) -> tuple[PluginReport, ...]:
    """Report every installed plugin, healthy or not, sorted by name. Imports them all.

    Args:
        deep: also collect kernels and pool builders, which imports torch.
    """
    installed = installed_now()
    kinds = tuple(KINDS) if deep else EAGER_KINDS
    loaded: dict[str, LoadedPlugin] = {}
    failures: dict[str, PluginError] = {}
    infos: dict[str, PluginInfo] = {}
    for name in installed.plugins:
        try:
            loaded[name] = _load(name, installed, kinds, seen=infos.__setitem__)
        except PluginError as error:
            failures[name] = error
    _fail_dependents(loaded, failures, installed.plugins)
    reports = []
    for name, entries in sorted(installed.plugins.items()):
        failure, info = failures.get(name), infos.get(name)
        for entry in entries:
            provides = installed.promised_by(entry)
            if name in loaded and failure is None:
                provides = {kind: tuple(sorted(items)) for kind, items in loaded[name].items.items() if items}
            reports.append(
                PluginReport(
                    name=name,
                    distribution=distribution_of(entry),
                    version=version_of(entry),
                    contract=info.contract if info else None,
                    summary=info.summary if info else "",
                    requires=tuple(info.requires) if info else (),
                    provides=provides,
                    missing=missing_needs(entry),
                    error=failure.as_dict() if failure else None,
                )
            )
    return tuple(reports)


def _fail_dependents(
    loaded: dict[str, LoadedPlugin], failures: dict[str, PluginError], installed: Iterable[str] = ()
) -> None:
    """A plugin that requires one that is missing or failed has failed too, and so on."""
    changed = True
    while changed:
        changed = False
        for name in sorted(loaded.keys() - failures.keys()):
            for other in loaded[name].info.requires:
                if other in loaded and other not in failures:
                    continue
                cause = failures.get(other)
                failures[name] = error = PluginError(
                    "plugin requires another that failed" if cause else "plugin requires another that is not installed",
                    plugin=name,
                    requires=other,
                    cause=str(cause) if cause else "not installed",
                    remedy=cause.remedy if cause else nearest(other, {*loaded, *installed}),
                )
                error.__cause__ = cause.__cause__ or cause if cause else None
                changed = True
                break


def _load(
    name: str,
    installed: Installed,
    kinds: Sequence[str],
    seen: Callable[[str, PluginInfo], None] | None = None,
) -> LoadedPlugin:
    """Import one plugin, check it, and collect the given kinds."""
    entries = installed.plugins.get(name, [])
    if not entries:
        raise PluginError("plugin is not installed", plugin=name, remedy=nearest(name, installed.plugins))
    if len(entries) > 1:
        raise PluginError(
            "two installed distributions have a plugin of this name",
            plugin=name,
            distributions=[distribution_of(entry) for entry in entries],
            remedy="uninstall one of them",
        )
    entry = entries[0]
    try:
        module = entry.load()
    except (Exception, SystemExit) as error:  # whatever a plugin's import raises, the report names the plugin
        raise PluginError(
            "plugin failed to import", plugin=name, distribution=distribution_of(entry), cause=describe_cause(error)
        ) from error
    info = _check_info(name, entry, module)
    if seen is not None:
        seen(name, info)
    plugin = LoadedPlugin(info, distribution_of(entry), version_of(entry), _hooks(name, entry, module))
    promised = installed.promised_by(entry)
    for kind in kinds:
        plugin.items[kind] = collect(plugin, KINDS[kind])
        _check_promises(plugin, kind, promised.get(kind, ()))
    return plugin


def _check_info(name: str, entry: metadata.EntryPoint, module: Any) -> PluginInfo:
    facts = {"plugin": name, "distribution": distribution_of(entry)}
    info = getattr(module, "PLUGIN", None)
    if not isinstance(info, PluginInfo):
        what = "plugin does not expose PLUGIN" if info is None else "PLUGIN is not a PluginInfo"
        raise PluginError(
            what,
            **facts,
            module=entry.value,
            got=type(info).__name__,
            remedy="PLUGIN = kvcore.contract.PluginInfo(name=…, contract=…)",
        )
    try:  # constructing a struct does not check its types
        info = msgspec.convert(msgspec.structs.asdict(info), PluginInfo)
    except msgspec.ValidationError as error:
        raise PluginError("PLUGIN is malformed", **facts, cause=str(error)) from error
    if info.name != name:
        raise PluginError("PLUGIN has another name than its entry point", **facts, expected=name, got=info.name)
    if info.contract[0] != CONTRACT[0] or info.contract[1] > CONTRACT[1]:
        newer = info.contract > CONTRACT
        raise PluginError(
            "plugin was written for another version of the contract",
            **facts,
            expected=".".join(map(str, CONTRACT)),
            got=".".join(map(str, info.contract)),
            remedy="upgrade kvcore" if newer else "upgrade the plugin",
        )
    return info


def _hooks(name: str, entry: metadata.EntryPoint, module: Any) -> dict[str, Callable[[], Any]]:
    """The plugin's hook functions, after refusing what pluggy would silently never call."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    known = [kind.hook for kind in KINDS.values()]
    facts = {"plugin": name, "distribution": distribution_of(entry)}
    for attribute in dir(module):
        options = manager.parse_hookimpl_opts(module, attribute)
        if options is None:
            meant = getattr(module, attribute, None)
            if _means_a_hook(attribute, known) and callable(meant):
                if not inspect.isroutine(meant):  # a class, say: pluggy would never call it, marked or not
                    remedy = "a hook is a function: def it, and mark it with kvcore.contract.hookimpl"
                    raise PluginError("named like a hook but no function", **facts, hook=attribute, remedy=remedy)
                spelt = attribute in known
                raise PluginError(
                    "function is named like a hook but not marked with @hookimpl" if spelt else "misspelt hook",
                    **facts,
                    hook=attribute,
                    remedy="mark it with kvcore.contract.hookimpl" if spelt else nearest(attribute, known),
                )
            continue
        hook = options["specname"] or attribute
        if hook not in known and not options["optionalhook"]:
            raise PluginError("misspelt hook", **facts, hook=hook, remedy=nearest(hook, known))
        if options["wrapper"] or options["hookwrapper"]:
            raise PluginError("hooks register, they cannot wrap those of other plugins", **facts, hook=hook)
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise PluginError("hook does not fit its specification", **facts, cause=str(error)) from error
    found: dict[str, Callable[[], Any]] = {}
    for caller in manager.get_hookcallers(module) or ():
        for implementation in caller.get_hookimpls():
            if caller.name in found:
                raise PluginError("plugin implements a hook twice", **facts, hook=caller.name)
            found[caller.name] = implementation.function
    return found


def _means_a_hook(name: str, known: Sequence[str]) -> bool:
    return name.startswith("kvcore_register_") or bool(get_close_matches(name, known, n=1, cutoff=0.85))


def _check_promises(plugin: LoadedPlugin, kind: str, promised: Sequence[str]) -> None:
    missing = set(promised) - set(plugin.items[kind])
    if missing:
        raise PluginError(
            "metadata lists names that the plugin does not register",
            plugin=plugin.name,
            distribution=plugin.distribution,
            group=f"{GROUP}.{kind}",
            names=sorted(missing),
            remedy=f"correct the entry points of {plugin.distribution!r} and install it again",
        )
