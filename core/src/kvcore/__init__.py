"""The KV-cache layer of an LLM inference engine. Importing this package loads no torch.

What an engine's author imports is here by its short name and loaded when it is first asked for. What a plugin's author
imports is in :mod:`kvcore.contract`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.config import Config, load_config
    from kvcore.contract import AttendParams
    from kvcore.engine.cache import CacheStats, KVCache
    from kvcore.engine.sizing import CapacityPlan, plan_capacity
    from kvcore.engine.step import Step
    from kvcore.errors import (
        BackupError,
        CapacityError,
        ConfigError,
        DuplicateRequestError,
        HandshakeError,
        IntegrityError,
        KVCoreError,
        LayoutError,
        PeerLostError,
        PluginError,
        ProtocolError,
        RequestError,
        StaleHandleError,
        TransferAbortedError,
        TransferError,
        TransferExpiredError,
        UnknownRequestError,
        UnsupportedError,
    )
    from kvcore.plugins import Registry, load_plugins, resolve_plugins
    from kvcore.spec import LayerGroup, ModelSpec, Ranks, Shard, StatePart, StateSpec, TensorSpec
    from kvcore.transfer.session.base import (
        ReceiveDone,
        ReceiveFailed,
        ReceiveProgress,
        ReceiveQuiet,
        SendDone,
        SendFailed,
    )

__version__ = "0.1.0"

_WHERE = {
    "config": "Config load_config",
    "contract": "AttendParams",
    "engine.cache": "CacheStats KVCache",
    "engine.sizing": "CapacityPlan plan_capacity",
    "engine.step": "Step",
    "errors": (
        "BackupError CapacityError ConfigError DuplicateRequestError HandshakeError IntegrityError "
        "KVCoreError LayoutError PeerLostError PluginError ProtocolError RequestError StaleHandleError "
        "TransferAbortedError TransferError TransferExpiredError UnknownRequestError UnsupportedError"
    ),
    "plugins": "Registry load_plugins resolve_plugins",
    "spec": "LayerGroup ModelSpec Ranks Shard StatePart StateSpec TensorSpec",
    "transfer.session.base": "ReceiveDone ReceiveFailed ReceiveProgress ReceiveQuiet SendDone SendFailed",
}
_MODULES = {name: f"kvcore.{module}" for module, names in _WHERE.items() for name in names.split()}

__all__ = [
    "AttendParams",
    "BackupError",
    "CacheStats",
    "CapacityError",
    "CapacityPlan",
    "Config",
    "ConfigError",
    "DuplicateRequestError",
    "HandshakeError",
    "IntegrityError",
    "KVCache",
    "KVCoreError",
    "LayerGroup",
    "LayoutError",
    "ModelSpec",
    "PeerLostError",
    "PluginError",
    "ProtocolError",
    "Ranks",
    "ReceiveDone",
    "ReceiveFailed",
    "ReceiveProgress",
    "ReceiveQuiet",
    "Registry",
    "RequestError",
    "SendDone",
    "SendFailed",
    "Shard",
    "StaleHandleError",
    "StatePart",
    "StateSpec",
    "Step",
    "TensorSpec",
    "TransferAbortedError",
    "TransferError",
    "TransferExpiredError",
    "UnknownRequestError",
    "UnsupportedError",
    "__version__",
    "load_config",
    "load_plugins",
    "plan_capacity",
    "resolve_plugins",
]


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
