"""A kvcore plugin: the state components ``short_conv`` and ``recurrent_state``."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import PluginInfo, StateComponent, hookimpl

PLUGIN = PluginInfo(name="mamba_backup", contract=(1, 0), summary="states of short convolutions, SSMs and delta rules")


@hookimpl
def kvcore_register_state_components() -> Sequence[type[StateComponent]]:
    """short_conv and recurrent_state."""
    from kvcore_mamba_backup.components import RecurrentState, ShortConv

    return (ShortConv, RecurrentState)
