"""Plugins: the hooks, what was registered, how it is found and loaded, and which kernel serves which op (no torch)."""

from __future__ import annotations

from kvcore.plugins.loader import (
    BUILTIN,
    PluginReport,
    Registry,
    discover,
    load_command,
    load_plugins,
    provided_names,
    provider_of,
    resolve_plugins,
)

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
