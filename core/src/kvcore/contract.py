"""What a plugin implements (no torch at import).

Hooks register (:mod:`kvcore.hookspecs`); behaviour lives in the small abstract classes here. Everything a kernel or a
backend receives is a plain object resolved at start-up: pluggy is never crossed per token.

Shapes: ``T`` new tokens of a step, ``R`` rows (requests) of a step, ``Hq`` query heads, ``H`` heads of a stored tensor,
``D`` its head dim, all as held by this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import msgspec

from kvcore.errors import UnsupportedError
from kvcore.layout import ArenaOrder, Buffer, Int64Array, Layout, Placement, SpaceSpec
from kvcore.spec import LayerGroup, ModelSpec, Shard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    from kvcore.moves import Program

CONTRACT: tuple[int, int] = (1, 0)
"""Version of this module. A plugin of another major version is refused."""

Op = Literal["store", "load", "attend_decode", "attend_prefill", "copy_units"]
OPS: tuple[Op, ...] = ("store", "load", "attend_decode", "attend_prefill", "copy_units")


class PluginInfo(msgspec.Struct, frozen=True):
    """Exposed by every plugin module as ``PLUGIN``.

    Attributes:
        name: equal to the name of its entry point in the group ``kvcore``.
        contract: the :data:`CONTRACT` it was written for.
        requires: names of plugins that must be enabled with it.
        summary: one line for ``kvcore plugins``.
    """

    name: str
    contract: tuple[int, int]
    requires: tuple[str, ...] = ()
    summary: str = ""


class Support(msgspec.Struct, frozen=True):
    """Whether something is supported, and why not. Every capability is FULL or unsupported with a reason."""

    ok: bool
    reason: str = ""

    def __bool__(self) -> bool:
        return self.ok

    def require(self, message: str, *, remedy: str = "", **fields: Any) -> None:
        """Raise :class:`UnsupportedError` with the reason unless supported."""
        if not self.ok:
            raise UnsupportedError(message, remedy=remedy, reason=self.reason, **fields)


FULL = Support(True)


def unsupported(reason: str) -> Support:
    """Return a refusal with its reason."""
    return Support(False, reason)


class Fence(ABC):
    """A point in the order of work on a device: everything issued before it."""

    @abstractmethod
    def done(self) -> bool:
        """Whether the work is finished, without waiting."""

    @abstractmethod
    def wait(self) -> None:
        """Block until the work is finished. Raises where it failed; it is over then too: ``done()`` is True."""


class _Done(Fence):
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None

    def __repr__(self) -> str:
        return "DONE"


DONE: Fence = _Done()
"""The fence of work that is finished: what every op on the CPU returns."""


class _AllFences(Fence):
    def __init__(self, fences: Sequence[Fence]) -> None:
        self._fences = tuple(fences)

    def done(self) -> bool:
        return all(fence.done() for fence in self._fences)

    def wait(self) -> None:
        failure: Exception | None = None
        for fence in self._fences:
            try:
                fence.wait()
            except Exception as error:  # noqa: BLE001 -- raised below, once nothing is under way any more
                failure = failure or error
        if failure is not None:
            raise failure


def all_fences(fences: Sequence[Fence]) -> Fence:
    """Return the fence of all of ``fences``: :data:`DONE` where every one is finished already."""
    return DONE if all(fence.done() for fence in fences) else _AllFences(fences)


# --- formats ---------------------------------------------------------------------------------------------------------


class Format(ABC):
    """A KV format: the bytes of a layer group, and the slow exact reference between values and bytes.

    A format that implements these three methods has working ``store``, ``load`` and ``attend_*`` ops (the reference
    kernels are derived), transfer, retraction and sizing. ``encode`` and ``decode`` are the oracle of every faster
    kernel.

    Attributes:
        name: the id used in configurations and on the wire.
        revision: changes whenever the meaning of the bytes does; peers must agree.
    """

    name: ClassVar[str]
    revision: ClassVar[int] = 1

    def supports(self, group: LayerGroup) -> Support:
        """Whether the format can hold this group (a block that divides head_dim, …)."""
        return FULL

    @abstractmethod
    def layout(self, group: LayerGroup, *, page_size: int, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes of ``group`` on one rank. Raise LayoutError or ConfigError for what cannot be."""

    @abstractmethod
    def encode(self, layout: Layout, rows: Mapping[str, torch.Tensor]) -> dict[tuple[str, str], torch.Tensor]:
        """Encode rows to stored elements.

        Args:
            layout: as returned by :meth:`layout`.
            rows: tensor name → values ``[T, H, D]``.

        Returns:
            ``(region, field)`` → elements ``[T, *other axes]`` in the field's storage dtype, axes in the field's
            declaration order without ``slot``, padding left out. Every data field of the layout is present but those
            of constant regions.
        """

    @abstractmethod
    def decode(
        self, layout: Layout, elements: Mapping[tuple[str, str], torch.Tensor], dtype: torch.dtype
    ) -> dict[str, torch.Tensor]:
        """Inverse of :meth:`encode`: rows ``[T, H, D]`` by tensor name, in ``dtype``."""

    def constants(self, layout: Layout) -> Mapping[tuple[str, str], torch.Tensor]:
        """Initial values of constant fields (index space ``constant``), such as a scale per tensor.

        Returns:
            ``(region, field)`` → elements ``[L, *axes]`` in the field's storage dtype, axes in declaration order; L
            are the layers of ``layout`` in order. A constant field that is left out has to be set by the engine
            (:meth:`kvcore.cache.KVCache.set_constants`) before the first request.
        """
        return {}

    def with_constants(self, layout: Layout, constants: Mapping[tuple[str, str], torch.Tensor]) -> Format:
        """Return this format as it encodes and decodes rows of one layer, given the constants of that layer.

        Called for layouts with constant fields only; ``encode`` and ``decode`` of what is returned must use these values
        and no other. Without it they use what :meth:`constants` declares.

        Args:
            layout: as returned by :meth:`layout`.
            constants: ``(region, field)`` → elements ``[*axes]``, every constant field of the layout.
        """
        return self


# --- index spaces ----------------------------------------------------------------------------------------------------


class IndexSpace(ABC):
    """How tokens map to logical units ``0, 1, 2, …`` of a request (integers only; the manager maps them to unit ids).

    Attributes:
        kind: name used in :class:`kvcore.layout.SpaceSpec`.
    """

    kind: ClassVar[str]

    def check(self, spec: SpaceSpec) -> None:
        """Raise ConfigError for options the space does not accept."""

    @abstractmethod
    def num_units(self, spec: SpaceSpec, length: int) -> int:
        """Logical units a request of ``length`` tokens has touched: the exclusive end of its logical indices."""

    @abstractmethod
    def first_live(self, spec: SpaceSpec, length: int) -> int:
        """First logical unit that a query at position ``length`` may still read. 0 unless old units fall dead."""

    @abstractmethod
    def final_units(self, spec: SpaceSpec, start: int, stop: int, *, last: bool) -> tuple[int, int]:
        """Logical units ``[lo, hi)`` that became final when the cache grew from ``start`` to ``stop`` tokens.

        A final unit is never written again by prefill. With ``last`` the partial unit is final too. Over the chunks
        of a prompt every unit that is live at the end is listed exactly once; what falls dead before the end may be
        left out.
        """

    def evict_before(self, spec: SpaceSpec, length: int) -> int:
        """Logical units below this one are given back at ``length`` tokens; at most :meth:`first_live`, the default.

        A space may keep more than the next query reads, so that a request can be forked a little earlier.
        """
        return self.first_live(spec, length)

    def units_per_request(self, spec: SpaceSpec) -> int | None:
        """Most units a request holds between steps; None where that grows with its length.

        Units of a bounded space are reserved per request when a cache is sized, and allocated as a request reaches
        them. By default a space without tokens per unit is bounded by what the first token needs.
        """
        return None if spec.tokens_per_unit else self.num_units(spec, 1)

    def reserved_units(self, spec: SpaceSpec) -> int:
        """Units at the start of a range that are never allocated: the null unit, and what a space keeps behind it."""
        return 1

    def can_rewind(self, spec: SpaceSpec, length: int, to: int) -> bool:
        """Whether bytes written for ``length`` tokens still serve the first ``to`` of them, were ``to`` the length.

        Asked for forks, truncation and rejected tokens. By default where units stand for tokens, and for no tokens.
        """
        return to in (0, length) or spec.tokens_per_unit > 0


# --- pools -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Bytes that lie side by side in every unit: unit ``u`` has them at ``base + u * unit_stride``."""

    base: int
    unit_stride: int
    nbytes: int
    num_units: int


class CopyQueue(ABC):
    """Copies between an arena that the CPU cannot address and host memory.

    Whatever is issued starts after the work of the last :meth:`mark` of every thread, ends some time later, and may be
    waited for by the fence it returns. Host memory given to a copy is left alone until then, by both sides. Safe to call
    from any thread; :meth:`mark` speaks of the thread that calls it.

    Units are copied one after the other: unit ``i`` of ``n`` has its pieces at ``i * sum(nbytes of the pieces)``, in the
    order of the pieces. Ids are int64 ``[n]``, checked by the caller.
    """

    @abstractmethod
    def mark(self) -> Fence:
        """Note what this thread has given the device to do so far: copies issued from now on come after it.

        Returns its fence.
        """

    @abstractmethod
    def gather(self, pieces: Sequence[Piece], units: Int64Array, dst: npt.NDArray[np.uint8]) -> Fence:
        """Copy units of the arena into ``dst [n * bytes of a unit]``."""

    @abstractmethod
    def scatter(self, pieces: Sequence[Piece], units: Int64Array, src: npt.NDArray[np.uint8]) -> Fence:
        """Copy ``src [n * bytes of a unit]`` into units of the arena."""

    @abstractmethod
    def apply(self, program: Program, src: npt.NDArray[np.uint8], dst_units: Int64Array) -> Fence:
        """Run a program on the device: unit ``i`` of ``src`` goes to ``dst_units[i]`` of the arena.

        ``src`` is the program's source arena as far as it is needed (units ``0 … n - 1``); strides of its moves are not
        negative. No byte of the arena changes that the program does not write.
        """

    def pin(self, memory: npt.NDArray[np.uint8]) -> Callable[[], None]:
        """Make host memory fast for this device's copies, until what is returned is called. By default it is already."""
        return _nothing


def _nothing() -> None:
    return None


class Arena(ABC):
    """One piece of device memory, owned until :meth:`close`.

    Attributes:
        nbytes: size.
        address: address of the first byte in this process.
        device: ``cpu``, ``cuda:0``, …
        fd: file descriptor that another process can map read-only, or None.
    """

    nbytes: int
    address: int
    device: str
    fd: int | None = None

    @abstractmethod
    def tensor(self) -> torch.Tensor:
        """The whole arena as ``uint8 [nbytes]``, sharing memory."""

    @abstractmethod
    def array(self) -> npt.NDArray[np.uint8]:
        """The same for numpy; raises UnsupportedError for memory the CPU cannot address."""

    def queue(self) -> CopyQueue | None:
        """What copies between this arena and host memory. None, the default, where :meth:`array` gives the bytes."""
        return None

    @abstractmethod
    def close(self) -> None:
        """Give the memory back, once copies under way have ended. Idempotent."""


class PoolBuilder(ABC):
    """How the regions of a group are allocated.

    Attributes:
        name: the id used in configurations.
    """

    name: ClassVar[str]

    @abstractmethod
    def supports(self, device: str, layout: Layout) -> Support:
        """Whether this builder can serve the device and layout."""

    @abstractmethod
    def allocate(self, nbytes: int, device: str) -> Arena:
        """Allocate zeroed, populated memory."""

    def buffer_infos(self, layout: Layout, placement: Placement) -> tuple[Buffer, ...]:
        """Every buffer of the pool, for transports and backups. Derived from the layout."""
        return placement.buffers


class PoolView(ABC):
    """What a kernel sees of a pool: typed views of the arena, resolved once when the kernel is bound."""

    layout: Layout
    placement: Placement
    device: str

    @abstractmethod
    def field(self, layer: int, region: str, field: str) -> torch.Tensor:
        """Strided view ``[units, *physical shape]`` in the storage dtype (1-byte dtypes as ``uint8``).

        Index it with ids of the region's own unit ranges only: below its first one other bytes of the arena may show.
        """

    @abstractmethod
    def units(self, layer: int, region: str) -> torch.Tensor:
        """Raw bytes ``uint8 [units, unit_bytes]``, strided."""

    @abstractmethod
    def envelopes(self) -> torch.Tensor:
        """Page-major arenas whose regions all have the same unit ranges only: ``uint8 [units, envelope_bytes]``."""

    @abstractmethod
    def unit_views(self, range_name: str) -> tuple[torch.Tensor, ...]:
        """The fewest views ``uint8 [units, bytes]`` that hold every byte of the units of a range.

        Unit ids below the range's first may show other bytes of the arena: index them with ids of the range only.
        """


# --- kernels ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The batch of one step for one unit range, in buffers whose addresses never change.

    Attributes:
        step: number of the step; a plan of an earlier step is stale.
        page_size: tokens a unit.
        lengths: ``int64 [R]``, tokens in the cache of each row once this step is stored.
        query_indptr: ``int64 [R + 1]``, where each row's new tokens start in the ``T`` axis.
        positions: ``int64 [T]``, absolute position of each new token.
        slots: ``int64 [T]``, where each new token goes: ``unit * page_size + offset``; −1 is dropped.
        page_table: ``int64 [R, max units]``, unit ids; unused entries name the null unit.
        host_lengths, host_query_indptr: the same as tuples, for kernels that loop on the host.
    """

    step: int
    page_size: int
    lengths: torch.Tensor
    query_indptr: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    page_table: torch.Tensor
    host_lengths: tuple[int, ...]
    host_query_indptr: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.host_lengths)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.host_query_indptr[-1]

    @property
    def max_length(self) -> int:
        """Longest row."""
        return max(self.host_lengths, default=0)

    @property
    def max_query(self) -> int:
        """Most new tokens of a row; 1 in a decode step."""
        ptr = self.host_query_indptr
        return max((b - a for a, b in pairwise(ptr)), default=0)


@dataclass(frozen=True, slots=True)
class AttendParams:
    """Arguments of attention that are not the batch.

    Attributes:
        sm_scale: factor on ``q·k`` before the softmax.
        window: a query at position p sees keys in ``(p − window, p]``; None sees all before it.
        sinks: ``[Hq]`` logits of an extra key without value, or None.
        position_bias: ``[T, Hq, max length]`` added to scaled scores, indexed by absolute key position, or None.
    """

    sm_scale: float
    window: int | None = None
    sinks: torch.Tensor | None = None
    position_bias: torch.Tensor | None = None


class Kernel(ABC):
    """One implementation of one op.

    ``bind`` is called once; what it returns is called every step and must not allocate device memory it could keep,
    synchronise, or rebuild tables. Bound signatures, by op (``after``: the fence the work has to wait for; each returns
    the fence of its own work):

    - ``store(layer, rows, plan, valid, after)``: write ``rows[name][T, H, D]`` at ``plan.slots``. Rows with slot −1 or
      ``valid[t]`` False (``valid``: bool ``[T]`` or None) are dropped.
    - ``load(layer, slots, out, after)``: fill ``out[name][N, H, D]`` from ``slots`` int64 ``[N]``; −1 gives zeros.
    - ``attend_decode(layer, q, out, plan, params, after)``: ``q [R, Hq, Dk]`` (one new token a row, already stored),
      ``out [R, Hq, Dv]``.
    - ``attend_prefill(layer, q, out, plan, params, after)``: ``q [T, Hq, Dk]``, ``out [T, Hq, Dv]``; causal: a query sees
      keys up to its own position.
    - ``copy_units(range_name, src, dst, after)``: copy whole units of every layer and region of the range;
      ``src``, ``dst`` are int64 region unit ids, disjoint.

    Attributes:
        op: which op.
        name: shown by ``kvcore explain``.
        formats: names of formats it knows; ``("*",)`` works from the layout and the format's reference alone.
        priority: the supported kernel with the highest one is chosen; equal priorities are an error.
    """

    op: ClassVar[Op]
    name: ClassVar[str]
    formats: ClassVar[tuple[str, ...]]
    priority: ClassVar[int] = 0

    @abstractmethod
    def supports(self, device: str, layout: Layout, group: LayerGroup) -> Support:
        """Whether it can serve this pool; the reason of a refusal is shown to the user."""

    @abstractmethod
    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Any]:
        """Return the function called per step."""


# --- states, models --------------------------------------------------------------------------------------------------


class StateComponent(ABC):
    """State a model keeps outside the KV cache (convolution windows, recurrent states, pending compressions).

    Attributes:
        name: the id shown to users.
        final: ``each_chunk`` where what is written stays valid, ``prompt_done`` where only the last value counts.
    """

    name: ClassVar[str]
    final: ClassVar[Literal["each_chunk", "prompt_done"]] = "prompt_done"

    @abstractmethod
    def applies(self, group: LayerGroup) -> bool:
        """Whether this component holds the state of ``group``."""

    @abstractmethod
    def layout(self, group: LayerGroup, *, shard: Shard, arena: ArenaOrder) -> Layout:
        """Describe the bytes of the state on one rank."""

    def checkpoint(self, group: LayerGroup) -> Support:
        """Whether the state can be checkpointed and rolled back."""
        return unsupported(f"{self.name} declares no checkpoints")


class ModelAdapter(ABC):
    """Turns a model's configuration into layer groups.

    Attributes:
        name: the id shown to users.
    """

    name: ClassVar[str]

    @abstractmethod
    def matches(self, config: Any) -> bool:
        """Whether the adapter knows this configuration (a mapping or a configuration object of its library)."""

    @abstractmethod
    def spec(self, config: Any) -> ModelSpec:
        """Return the model's layer groups; raise UnsupportedError naming what is missing."""


# --- retraction ------------------------------------------------------------------------------------------------------


class UnitBlock(ABC):
    """The units of one component set of one request, as a backup sees them: bytes to copy out and in again.

    Attributes:
        group, components: what it is, for messages and accounting.
        num_units, nbytes: its size; ``nbytes`` is what :meth:`copy_out` writes.
    """

    group: str
    components: tuple[str, ...]
    num_units: int
    nbytes: int

    @abstractmethod
    def copy_out(self, dst: npt.NDArray[np.uint8]) -> Fence:
        """Gather the units into ``dst [nbytes]``."""

    @abstractmethod
    def copy_in(self, src: npt.NDArray[np.uint8]) -> Fence:
        """Scatter ``src [nbytes]`` into the units."""

    def cut(self, first: int, count: int) -> UnitBlock | None:
        """The block of the units ``[first, first + count)``, so that a backend can keep them in several pieces.

        Every unit has the same number of bytes, in an order that depends on how many are copied together: a restore cuts
        as its save did. None where blocks of this pool are copied whole; that never changes.
        """
        return None


class Backup(ABC):
    """A retraction backend: keeps the bytes of retracted requests until they are resumed or dropped.

    A failed call must leave nothing behind: ``save`` keeps no bytes and no key, ``restore`` may be repeated. A copy may
    go on after ``save`` or ``restore`` has returned; then its failure is raised by ``wait`` of the fence, and means the
    same. Its units are left alone until the fence is done, by both sides.

    Attributes:
        name: the id used in configurations.
        max_bytes: most bytes it keeps at once, padding of units included; None where nothing bounds them beforehand.
    """

    name: ClassVar[str]
    max_bytes: int | None = None

    @abstractmethod
    def carries(self, layout: Layout, component: str) -> Support:
        """Whether it can carry a component; asked at configuration."""

    def prepare(self, queue: CopyQueue) -> None:
        """Called once, before the first save, where units will come from a device: to pin host memory for its copies.

        Not needed for right bytes, so by default nothing is done.
        """

    @abstractmethod
    def save(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Copy all blocks out under ``key``.

        Raises CapacityError when full (the request is then recomputed), at once and with nothing begun.
        """

    @abstractmethod
    def restore(self, key: str, blocks: Sequence[UnitBlock]) -> Fence:
        """Copy all blocks of ``key`` back into the given units, in the given order.

        Blocks are matched by group, components and size; several alike come back in the order they were saved in. A
        save still under way is waited for or refused (BackupError): half a copy is never read.
        """

    @abstractmethod
    def drop(self, key: str) -> None:
        """Forget ``key``, also while its copy is under way. Unknown keys raise BackupError."""

    @property
    @abstractmethod
    def bytes_held(self) -> int:
        """Bytes kept now."""

    def close(self) -> None:
        """Forget everything. Copies under way end, or are given up, before it returns. Idempotent."""


# --- transfer --------------------------------------------------------------------------------------------------------


class TransportTraits(msgspec.Struct, frozen=True):
    """What the planner needs to know of a transport.

    Attributes:
        executes_programs: it applies programs of strided moves itself; else it reads flat descriptors.
        min_run_bytes: shortest run worth a descriptor of its own.
        descriptor_cost_us: fixed cost of a descriptor in microseconds.
    """

    executes_programs: bool
    min_run_bytes: int = 0
    descriptor_cost_us: float = 0.0


@dataclass(frozen=True)
class ReadJob:
    """Units of one layer group to pull: ``program`` applied to pairs ``(src_units[i], dst_units[i])``."""

    group: str
    program: Program
    src_units: Int64Array
    dst_units: Int64Array


class ReadHandle(ABC):
    """A read under way.

    Attributes:
        seconds: time spent moving bytes, once terminal; 0 where the transport cannot tell.
    """

    seconds: float = 0.0

    @abstractmethod
    def poll(self) -> bool:
        """True once every byte has landed and none will move any more. Raises TransferError where the read failed
        *and* is quiet: after an exception, as after True, no destination byte changes."""


class PeerConnection(ABC):
    """Another process whose memory can be read."""

    @abstractmethod
    def read(self, jobs: Sequence[ReadJob]) -> ReadHandle:
        """Start pulling; returns at once. Raises TransferError where nothing was started."""

    @abstractmethod
    def alive(self) -> bool:
        """False once the wire knows that the peer is gone."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when :meth:`alive` or the state of a read may have changed, or None.

        Calling :meth:`alive` resets it. A connection without one is polled."""
        return None

    @abstractmethod
    def quiesce(self, timeout_s: float) -> bool:
        """Wait until no read of this connection touches local memory any more; False past the deadline."""

    @abstractmethod
    def close(self) -> None:
        """Unmap and disconnect. Idempotent."""


class Transport(ABC):
    """Moves bytes between processes. Only the owner of memory writes it: the receiver pulls.

    Attributes:
        name: the id used in configurations.
        traits: for the planner.
    """

    name: ClassVar[str]
    traits: ClassVar[TransportTraits]

    @abstractmethod
    def supports(self, device: str, layout: Layout) -> Support:
        """Whether arenas of this device can be served."""

    @abstractmethod
    def register(self, arenas: Mapping[str, Arena]) -> bytes:
        """Make arenas (by layer group) readable to peers and known as destinations.

        Returns an opaque endpoint record for the manifest. Failure is an error here, not at the first read.
        """

    @abstractmethod
    def connect(self, endpoint: bytes) -> PeerConnection:
        """Reach the peer behind an endpoint record."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving, close connections, leave nothing behind. Idempotent."""


# --- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """A CLI subcommand: a function whose typed parameters are its options (typer)."""

    name: str
    help: str
    callback: Callable[..., Any]
