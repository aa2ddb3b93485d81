"""What a plugin implements (no torch at import).

Hooks register (:mod:`kvcore.plugins.hookspecs`); behaviour lives in the small abstract classes here. Everything a kernel or a
backend receives is a plain object resolved at start-up: pluggy is never crossed per token.

The words of layouts and of a model's specification that an implementation needs are handed on here, so that one import
serves a plugin.

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
    Unique,
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
from kvcore.contract.saved import (
    SavedPart,
    copy_all,
    saved_offsets,
    saved_parts,
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
from kvcore.layout import (
    ArenaOrder,
    Axis,
    BlockOf,
    Field,
    Int64Array,
    Layout,
    Region,
    SpaceSpec,
    UnitRange,
    padding,
    region,
)
from kvcore.spec import LayerGroup, ModelSpec, Ranks, Shard, StatePart, StateSpec, TensorSpec

__all__ = [
    "CONTRACT",
    "DONE",
    "FULL",
    "OPS",
    "Arena",
    "ArenaOrder",
    "AttendParams",
    "Axis",
    "Backup",
    "BatchPlan",
    "BlockOf",
    "Command",
    "CopyQueue",
    "Fence",
    "Field",
    "Format",
    "IndexSpace",
    "Int64Array",
    "Kernel",
    "LayerGroup",
    "Layout",
    "ModelAdapter",
    "ModelSpec",
    "Op",
    "PeerConnection",
    "Piece",
    "PluginInfo",
    "PoolBuilder",
    "PoolView",
    "Ranks",
    "ReadHandle",
    "ReadJob",
    "Region",
    "SavedPart",
    "Shard",
    "SpaceSpec",
    "StateComponent",
    "StatePart",
    "StateSpec",
    "Support",
    "TensorSpec",
    "Transport",
    "TransportTraits",
    "Unique",
    "UnitBlock",
    "UnitRange",
    "all_fences",
    "copy_all",
    "hookimpl",
    "padding",
    "region",
    "saved_offsets",
    "saved_parts",
    "unsupported",
]
