"""What a plugin implements (no torch at import).

Hooks register (:mod:`kvcore.plugins.hookspecs`); behaviour lives in the small abstract classes here. Everything a kernel or a
backend receives is a plain object resolved at start-up: pluggy is never crossed per token.

Shapes: ``T`` new tokens of a step, ``R`` rows (requests) of a step, ``Hq`` query heads, ``H`` heads of a stored tensor,
``D`` its head dim, all as held by this rank.
"""

from __future__ import annotations

from kvcore.contract.backups import (
    Backup,
    UnitBlock,
)
from kvcore.contract.base import (
    CONTRACT,
    DONE,
    FULL,
    Fence,
    PluginInfo,
    Support,
    all_fences,
    hookimpl,
    unsupported,
)
from kvcore.contract.commands import (
    Command,
)
from kvcore.contract.formats import (
    Format,
)
from kvcore.contract.kernels import (
    OPS,
    AttendParams,
    BatchPlan,
    Kernel,
    Op,
)
from kvcore.contract.models import (
    ModelAdapter,
    StateComponent,
)
from kvcore.contract.pools import (
    Arena,
    CopyQueue,
    Piece,
    PoolBuilder,
    PoolView,
)
from kvcore.contract.spaces import (
    IndexSpace,
)
from kvcore.contract.transports import (
    PeerConnection,
    ReadHandle,
    ReadJob,
    Transport,
    TransportTraits,
)

__all__ = [
    "CONTRACT",
    "DONE",
    "FULL",
    "OPS",
    "Arena",
    "AttendParams",
    "Backup",
    "BatchPlan",
    "Command",
    "CopyQueue",
    "Fence",
    "Format",
    "IndexSpace",
    "Kernel",
    "ModelAdapter",
    "Op",
    "PeerConnection",
    "Piece",
    "PluginInfo",
    "PoolBuilder",
    "PoolView",
    "ReadHandle",
    "ReadJob",
    "StateComponent",
    "Support",
    "Transport",
    "TransportTraits",
    "UnitBlock",
    "all_fences",
    "hookimpl",
    "unsupported",
]
