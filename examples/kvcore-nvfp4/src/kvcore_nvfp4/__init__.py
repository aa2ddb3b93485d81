"""A kvcore plugin: the ``nvfp4`` format."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import Format, PluginInfo, hookimpl

PLUGIN = PluginInfo(name="nvfp4", contract=(1, 0), summary="4-bit floats, an e4m3 scale for every 16")


@hookimpl
def kvcore_register_formats() -> Sequence[type[Format]]:
    """nvfp4."""
    from kvcore_nvfp4.format import Nvfp4

    return (Nvfp4,)
