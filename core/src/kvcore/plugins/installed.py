"""What installed distributions say of their plugins, read from metadata alone: nothing is imported (no torch)."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Any, Literal

from kvcore.config import Config
from kvcore.errors import PluginError
from kvcore.plugins.registry import KINDS

GROUP = "kvcore"
BUILTIN = "builtin"
"""The plugin that is always enabled."""

ProvidedKind = Literal["formats", "state_components", "transports", "backups", "commands"]
PROVIDED_KINDS: tuple[ProvidedKind, ...] = ("formats", "state_components", "transports", "backups", "commands")


def distribution_of(entry: metadata.EntryPoint) -> str:
    """Name of the distribution of an entry point."""
    return (entry.dist.name if entry.dist else "") or "unknown distribution"


def version_of(entry: metadata.EntryPoint) -> str:
    """Version of the distribution of an entry point."""
    return (entry.dist.version if entry.dist else "") or "unknown"


class Installed:
    """What the metadata of installed distributions says. See :func:`installed_now`."""

    def __init__(self) -> None:
        every = metadata.entry_points()
        self._names: dict[int, str] = {}  # a name is parsed out of the whole metadata: once a distribution
        self._groups: dict[str, list[metadata.EntryPoint]] = {
            group: sorted(every.select(group=group), key=lambda e: (e.name, self._distribution(e), e.value))
            for group in (GROUP, *(f"{GROUP}.{kind}" for kind in PROVIDED_KINDS))
        }
        self.plugins: dict[str, list[metadata.EntryPoint]] = {}
        """Entry points of plugins by name: more than one where two distributions use the same name."""
        for entry in self._groups[GROUP]:
            self.plugins.setdefault(entry.name, []).append(entry)

    def _distribution(self, entry: metadata.EntryPoint) -> str:
        key = id(entry.dist)  # kept alive by the entries
        if key not in self._names:
            self._names[key] = distribution_of(entry)
        return self._names[key]

    def promises(self, kind: str) -> dict[str, list[tuple[str, str]]]:
        """Names of a kind → ``(plugin, distribution)`` of who lists it; plugin is "" where no plugin matches."""
        owners = {(self._distribution(entry), entry.value): entry.name for entry in self._groups[GROUP]}
        found: dict[str, list[tuple[str, str]]] = {}
        for entry in self._groups[f"{GROUP}.{kind}"]:
            distribution = self._distribution(entry)
            found.setdefault(entry.name, []).append((owners.get((distribution, entry.value), ""), distribution))
        return found

    def promised_by(self, entry: metadata.EntryPoint) -> dict[str, tuple[str, ...]]:
        """Kind → names that a plugin's own distribution lists for it."""
        mine = (entry.name, self._distribution(entry))
        found = {
            kind: tuple(sorted(name for name, owners in self.promises(kind).items() if mine in owners))
            for kind in PROVIDED_KINDS
        }
        return {kind: names for kind, names in found.items() if names}


_read: tuple[Any, Installed] | None = None


def installed_now() -> Installed:
    """What is installed now. Reading it takes tens of milliseconds, so it is read again when a folder of the search path
    has changed; what a distribution lists does not change in place."""
    global _read
    now = (tuple(sys.path), tuple(map(_state_of, sys.path)))
    if _read is None or _read[0] != now:
        _read = (now, Installed())
    return _read[1]


def _state_of(folder: str) -> tuple[int, ...]:
    try:
        found = os.stat(folder or ".")  # noqa: PTH116 -- an entry of the search path need not be a path
    except OSError:
        return ()
    return (found.st_ino, found.st_mtime_ns, found.st_nlink, found.st_size)


def provided_names(kind: ProvidedKind) -> tuple[str, ...]:
    """Every name of a kind that an installed distribution's metadata lists, without importing anything."""
    return tuple(sorted(installed_now().promises(kind)))


def provider_of(kind: ProvidedKind, name: str) -> str | None:
    """Return the plugin whose distribution's metadata lists ``name``; None where none does.

    Raises:
        PluginError: two distributions do, or the entry does not point at a plugin.
    """
    return _provider(installed_now(), kind, name)


def _provider(installed: Installed, kind: ProvidedKind, name: str) -> str | None:
    providers = installed.promises(kind).get(name, [])
    if not providers:
        return None
    if len(providers) > 1:
        raise PluginError(
            f"two installed plugins provide this {KINDS[kind].noun}",
            name=name,
            plugins=sorted(plugin for plugin, _ in providers),
            distributions=sorted(distribution for _, distribution in providers),
            remedy="uninstall one of them, or name the wanted one in plugins",
        )
    plugin, distribution = providers[0]
    if not plugin:
        raise PluginError(
            "entry point lists a name but points at no plugin",
            group=f"{GROUP}.{kind}",
            name=name,
            distribution=distribution,
            remedy=f"give it the same value as the distribution's entry point in the group {GROUP!r}",
        )
    return plugin


def resolve_plugins(config: Config) -> tuple[str, ...]:
    """Names to load for a configuration, sorted: the built-ins, those it lists, and the providers of what it names.

    Where two installed plugins provide a name, the one that ``plugins`` lists is meant; if it lists none or both,
    that is a PluginError. A name that nothing provides is left to the registry, which names the nearest known one.
    """
    installed = installed_now()
    listed = set(config.plugins)
    names = {BUILTIN, *listed}
    wanted: list[tuple[ProvidedKind, str]] = [("transports", config.transfer.transport)]
    wanted += [("formats", name) for name in dict.fromkeys((config.cache.format, *config.cache.formats.values()))]
    if config.retraction.policy == "backup":
        wanted.append(("backups", config.retraction.backend))
    for kind, name in wanted:
        meant = {plugin for plugin, _ in installed.promises(kind).get(name, [])} & listed
        provider = meant.pop() if len(meant) == 1 else _provider(installed, kind, name)
        if provider is not None:
            names.add(provider)
    return tuple(sorted(names))
