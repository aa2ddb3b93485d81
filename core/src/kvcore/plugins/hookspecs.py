"""The hooks: what a plugin can add. Each returns what it registers; the order of plugins never decides anything."""

from __future__ import annotations

from collections.abc import Sequence

import pluggy

from kvcore.contract import (
    Backup,
    Command,
    Format,
    IndexSpace,
    Kernel,
    ModelAdapter,
    PoolBuilder,
    StateComponent,
    Transport,
)

hookspec = pluggy.HookspecMarker("kvcore")


@hookspec
def kvcore_register_formats() -> Sequence[type[Format]]:  # type: ignore[empty-body]
    """KV formats: the layout of a layer group, and its exact encode and decode."""


@hookspec
def kvcore_register_pools() -> Sequence[type[PoolBuilder]]:  # type: ignore[empty-body]
    """Pool construction: how the regions of a group are allocated."""


@hookspec
def kvcore_register_state_components() -> Sequence[type[StateComponent]]:  # type: ignore[empty-body]
    """Extra per-request or per-token state of a model."""


@hookspec
def kvcore_register_payload_builders() -> Sequence[type[IndexSpace]]:  # type: ignore[empty-body]
    """Index spaces: request and token range to units, and which units are final after a chunk."""


@hookspec
def kvcore_register_backups() -> Sequence[type[Backup]]:  # type: ignore[empty-body]
    """Retraction backends."""


@hookspec
def kvcore_register_kernels() -> Sequence[type[Kernel]]:  # type: ignore[empty-body]
    """Kernels: implementations of ops for formats and devices."""


@hookspec
def kvcore_register_transports() -> Sequence[type[Transport]]:  # type: ignore[empty-body]
    """Transports between processes."""


@hookspec
def kvcore_register_models() -> Sequence[type[ModelAdapter]]:  # type: ignore[empty-body]
    """Model adapters: model configuration to layer groups."""


@hookspec
def kvcore_register_commands() -> Sequence[Command]:  # type: ignore[empty-body]
    """Subcommands of ``kvcore``."""
