"""Which kernel serves which op, and which builder makes the pool: decided once, with a reason for everything not chosen."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from kvcore.contract import FULL, OPS, Fence, Format, Kernel, Op, PoolBuilder, PoolView, Support, unsupported
from kvcore.errors import PluginError, UnsupportedError, nearest
from kvcore.layout import Layout
from kvcore.spec import LayerGroup


class KernelChoice(msgspec.Struct, frozen=True):
    """What ``kvcore explain`` shows of one op.

    Attributes:
        op: the op.
        chosen: name of the kernel that serves it.
        refused: ``(kernel, reason)`` of every other one.
    """

    op: Op
    chosen: str
    refused: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class KernelTable:
    """The bound functions of one pool; signatures in :class:`kvcore.contract.Kernel`."""

    store: Callable[..., Fence]
    load: Callable[..., Fence]
    attend_decode: Callable[..., Fence]
    attend_prefill: Callable[..., Fence]
    copy_units: Callable[..., Fence]
    others: Mapping[Op, Callable[..., Fence]]
    """Ops of the format's own, by name."""
    choices: tuple[KernelChoice, ...]


@dataclass(frozen=True)
class ChosenKernels:
    """One kernel per op, decided from the layout alone, before memory is touched."""

    kernels: Mapping[Op, Kernel]
    choices: tuple[KernelChoice, ...]

    def bind(self, pool: PoolView, group: LayerGroup, format: Format) -> KernelTable:
        """Resolve every op to the function called per step."""
        bound = {op: _bound(kernel, pool, group, format) for op, kernel in self.kernels.items()}
        standard = {op: bound[op] if op in bound else _absent(op, format) for op in OPS}
        others = {op: function for op, function in bound.items() if op not in OPS}
        return KernelTable(**standard, others=others, choices=self.choices)


def _bound(kernel: Kernel, pool: PoolView, group: LayerGroup, format: Format) -> Callable[..., Fence]:
    try:
        return kernel.bind(pool, group, format)
    except ImportError as error:
        raise PluginError(
            "a kernel needs a module that is not installed",
            kernel=kernel.name,
            op=kernel.op,
            module=error.name,
            cause=str(error),
            remedy="install it; kvcore plugins shows whether the plugin asks for it",
        ) from error


def _absent(op: Op, format: Format) -> Callable[..., Fence]:
    def refuse(*args: object, **kwargs: object) -> Fence:
        raise UnsupportedError("the format has no such op", op=op, format=format.name, ops=format.ops)

    return refuse


def choose_kernels(
    kernels: Sequence[Kernel], device: str, layout: Layout, group: LayerGroup, ops: Sequence[Op] = OPS
) -> ChosenKernels:
    """Choose one kernel for each of ``ops``: of those that support the pool, the one with the highest priority.

    Raises UnsupportedError where an op has none, with every refusal and its reason; PluginError where two supported
    kernels have the same priority, since load order must not decide, and where a kernel of the format serves an op of its
    own that the format does not declare: nobody would ever call it.
    """
    _check_declared(kernels, layout.format, ops)
    chosen: dict[Op, Kernel] = {}
    choices = []
    for op in ops:
        answers = [(kernel, _supports(kernel, device, layout, group)) for kernel in kernels if kernel.op == op]
        able = sorted((k for k, answer in answers if answer), key=lambda k: (-k.priority, k.name))
        refused = [(kernel.name, answer.reason) for kernel, answer in answers if not answer]
        if not able:
            raise UnsupportedError(
                f"no kernel for {op}",
                op=op,
                format=layout.format,
                group=group.prefix,
                device=device,
                refused=[f"{name}: {reason}" for name, reason in sorted(refused)],
                remedy="enable a plugin that has one, or choose another format or device",
            )
        best = able[0]
        tied = [kernel.name for kernel in able if kernel.priority == best.priority]
        if len(tied) > 1:
            raise PluginError(
                f"several kernels of one priority for {op}",
                op=op,
                format=layout.format,
                kernels=tied,
                priority=best.priority,
                remedy="disable the plugin of one of them",
            )
        chosen[op] = best
        refused += [(k.name, f"priority {k.priority} is below {best.priority} of {best.name}") for k in able[1:]]
        choices.append(KernelChoice(op, best.name, tuple(sorted(refused))))
    return ChosenKernels(chosen, tuple(choices))


def resolve_kernels(kernels: Sequence[Kernel], pool: PoolView, group: LayerGroup, format: Format) -> KernelTable:
    """:func:`choose_kernels` for a pool, bound."""
    return choose_kernels(kernels, pool.device, pool.layout, group, format.ops).bind(pool, group, format)


def _check_declared(kernels: Sequence[Kernel], format: str, ops: Sequence[Op]) -> None:
    known = {*ops, *OPS}
    for op in ops:
        if not op.isidentifier():
            raise PluginError("an op of a format is no identifier", format=format, op=op)
    for kernel in kernels:
        if format in kernel.formats and kernel.op not in known:
            raise PluginError(
                "a kernel serves an op that its format does not declare",
                kernel=kernel.name,
                op=kernel.op,
                format=format,
                ops=list(ops),
                remedy=f"{nearest(kernel.op, known)}; ops of a format's own stand in Format.ops",
            )


def choose_builder(builders: Sequence[PoolBuilder], device: str, layout: Layout) -> PoolBuilder:
    """Return the one pool builder that serves a device and layout.

    Raises UnsupportedError with every refusal where there is none, PluginError where there are several.
    """
    answers = [(builder, builder.supports(device, layout)) for builder in builders]
    able = [builder for builder, answer in answers if answer]
    if not able:
        raise UnsupportedError(
            "no pool builder for the device",
            device=device,
            group=layout.group,
            refused=[f"{builder.name}: {answer.reason}" for builder, answer in answers],
            remedy="enable a plugin that has one, or choose another device",
        )
    if len(able) > 1:
        raise PluginError(
            "several pool builders serve the device",
            device=device,
            builders=sorted(builder.name for builder in able),
            remedy="disable the plugin of one of them",
        )
    return able[0]


def _supports(kernel: Kernel, device: str, layout: Layout, group: LayerGroup) -> Support:
    if "*" not in kernel.formats and layout.format not in kernel.formats:
        return unsupported(f"knows the formats {', '.join(kernel.formats)}, not {layout.format}")
    answer = kernel.supports(device, layout, group)
    return FULL if answer.ok else unsupported(answer.reason or "gave no reason")
