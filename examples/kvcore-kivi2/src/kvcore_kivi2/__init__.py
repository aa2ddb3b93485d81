"""A kvcore plugin: the ``kivi2`` format, and its kernels for the CPU."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import Format, Kernel, PluginInfo, hookimpl

PLUGIN = PluginInfo(
    name="kivi2", contract=(1, 0), summary="2 bits, keys by channel and values by token; newest in fp16"
)


@hookimpl
def kvcore_register_formats() -> Sequence[type[Format]]:
    """kivi2."""
    from kvcore_kivi2.format import Kivi2

    return (Kivi2,)


@hookimpl
def kvcore_register_kernels() -> Sequence[type[Kernel]]:
    """What a format with a scale over several tokens has to bring: its own ``store`` and attention."""
    from kvcore_kivi2.kernels import KERNELS

    return KERNELS
