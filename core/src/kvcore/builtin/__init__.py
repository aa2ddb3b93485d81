"""The built-in formats, kernels, pools, index spaces, transports and backups: a plugin like any other.

Hooks import their module when they are called, so that a command which needs no tensors loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.contract import (
    CONTRACT,
    Backup,
    Command,
    Format,
    IndexSpace,
    Kernel,
    PluginInfo,
    PoolBuilder,
    Transport,
    hookimpl,
)

PLUGIN = PluginInfo(
    name="builtin", contract=CONTRACT, summary="plain formats, torch kernels, shm, host_tensor, host_pool"
)


@hookimpl
def kvcore_register_formats() -> Sequence[type[Format]]:
    """bf16, fp16, fp32."""
    from kvcore.builtin.formats import PLAIN_FORMATS

    return PLAIN_FORMATS


@hookimpl
def kvcore_register_pools() -> Sequence[type[PoolBuilder]]:
    """CPU arenas in memfd, CUDA arenas by torch."""
    from kvcore.builtin.pools.cuda import CudaPool
    from kvcore.builtin.pools.memfd import POOL_BUILDERS

    return (*POOL_BUILDERS, CudaPool)


@hookimpl
def kvcore_register_payload_builders() -> Sequence[type[IndexSpace]]:
    """The whole sequence."""
    from kvcore.requests.spaces import INDEX_SPACES

    return INDEX_SPACES


@hookimpl
def kvcore_register_backups() -> Sequence[type[Backup]]:
    """Host memory: a buffer a request, or one arena of fixed size."""
    from kvcore.builtin.backups.host_pool import HostPoolBackup
    from kvcore.builtin.backups.host_tensor import HostTensorBackup

    return (HostPoolBackup, HostTensorBackup)


@hookimpl
def kvcore_register_kernels() -> Sequence[type[Kernel]]:
    """The exact reference, derived from any format, and tuned torch kernels for the plain ones."""
    from kvcore.builtin.kernels.reference import REFERENCE_KERNELS
    from kvcore.builtin.kernels.tuned import TORCH_KERNELS

    return (*REFERENCE_KERNELS, *TORCH_KERNELS)


@hookimpl
def kvcore_register_transports() -> Sequence[type[Transport]]:
    """Shared memory between processes of one host."""
    from kvcore.transfer.shm.transport import ShmTransport

    return (ShmTransport,)


@hookimpl
def kvcore_register_commands() -> Sequence[Command]:
    """kvcore plugins, kvcore explain."""
    from kvcore.builtin.commands.explain import COMMANDS

    return COMMANDS
