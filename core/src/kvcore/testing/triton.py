"""Triton kernels compiled for chips that are not here, and what came out held to gates.

A test says which instructions a kernel was written for and what it may cost::

    found = compile_for(my_kernel, "sm_90", types={"x": "*i16", "count": "i32"}, constants={"tile": 64}, even=["x"])
    found.check(uses=[r"ld\\.global\\.v4"], avoids=[r"\\.ftz"], registers=64)

No GPU is needed: Triton brings the compilers and assemblers of its chips. Triton is imported when something is compiled.
Whether the numbers are right is for Triton's interpreter, and for a device.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, UnsupportedError

_NVIDIA = re.compile(r"sm_(\d+)")
_AMD = re.compile(r"gfx[0-9a-f]+")


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one chip.

    Attributes:
        kernel: its name.
        chip: what it was compiled for.
        text: PTX (NVIDIA) or amdgcn assembly.
        registers: of a thread.
        spilled: bytes of a thread's stack and local memory (NVIDIA), or vector registers (AMD) that went to memory.
        shared: bytes of shared memory of a program.
    """

    kernel: str
    chip: str
    text: str
    registers: int
    spilled: int
    shared: int

    def count(self, pattern: str) -> int:
        """How often a regular expression is found in the assembly."""
        return len(re.findall(pattern, self.text))

    def check(
        self,
        *,
        uses: Collection[str] = (),
        avoids: Collection[str] = (),
        exactly: Mapping[str, int] | None = None,
        registers: int | None = None,
        shared: int | None = None,
        spilled: int = 0,
    ) -> None:
        """Hold the kernel to gates; what is not given is not checked, but for spills: none, unless some are allowed.

        Args:
            uses: regular expressions of instructions that must appear.
            avoids: those that must not.
            exactly: those that must appear so many times.
            registers: most registers of a thread.
            shared: most bytes of shared memory.
            spilled: most that may spill.

        Raises:
            AssertionError: a gate does not hold; every such gate is named, with what was found.
        """
        wrong = [f"{pattern} appears nowhere" for pattern in uses if not self.count(pattern)]
        wrong += [
            f"{pattern} appears {self.count(pattern)} times, never allowed" for pattern in avoids if self.count(pattern)
        ]
        for pattern, times in (exactly or {}).items():
            if self.count(pattern) != times:
                wrong.append(f"{pattern} appears {self.count(pattern)} times, {times} expected")
        for what, found, most in (
            ("registers", self.registers, registers),
            ("bytes of shared memory", self.shared, shared),
            ("spilled", self.spilled, spilled),
        ):
            if most is not None and found > most:
                wrong.append(f"{found} {what}, {most} allowed")
        if wrong:
            raise AssertionError(f"{self.kernel} on {self.chip}: {'; '.join(wrong)}")


def compile_for(
    kernel: Any,
    chip: str,
    *,
    types: Mapping[str, str],
    constants: Mapping[str, Any] | None = None,
    even: Collection[str] = (),
    **options: Any,
) -> Compiled:
    """Compile a kernel as a launch on ``chip`` would.

    Args:
        kernel: a function decorated with ``triton.jit``.
        chip: ``sm_90``, ``sm_100``, ``gfx950``, …: any that the installed Triton has a compiler for.
        types: Triton's type of every argument that is no constant (``*i16``, ``fp32``, …). Names that the kernel does not
            have are passed over, so that several kernels can share a table.
        constants: values of ``tl.constexpr`` arguments, and of others that a launch would fix.
        even: arguments that a launch finds divisible by 16, as pointers to torch's own memory are.
        options: of the compiler (``num_warps``, ``num_stages``, ``enable_fp_fusion``, …).

    Raises:
        UnsupportedError: no Triton, it interprets kernels in this process, or it lacks what this chip needs.
        ConfigError: a chip of no known kind, an argument without a type, or a constant that is no argument.
    """
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            "kernels are compiled by Triton", missing=error.name, remedy="pip install triton"
        ) from error

    name = str(getattr(kernel, "__name__", kernel))
    if not isinstance(kernel, triton.JITFunction):
        raise UnsupportedError(
            "not a kernel that Triton compiles",
            kernel=name,
            got=type(kernel).__name__,
            remedy="decorate it with triton.jit, and do not set TRITON_INTERPRET in this process",
        )
    fixed = dict(constants or {})
    untyped = [arg for arg in kernel.arg_names if arg not in fixed and arg not in types]
    unknown = sorted(set(fixed) - set(kernel.arg_names))
    if untyped or unknown:
        raise ConfigError(
            "arguments of a kernel and what is said about them differ",
            kernel=name,
            without_type=untyped,
            constants_that_are_no_arguments=unknown,
            remedy="give each argument a type or a value",
        )
    if found := _NVIDIA.fullmatch(chip):
        target = GPUTarget("cuda", int(found[1]), 32)
    elif _AMD.fullmatch(chip):
        target = GPUTarget("hip", chip, 64 if chip.startswith("gfx9") else 32)
    else:
        raise ConfigError("not the name of a chip", got=chip, expected="sm_90, sm_100, gfx950, …")
    signature = {arg: "constexpr" if arg in fixed else types[arg] for arg in kernel.arg_names}
    divisible = {
        (at,): [["tt.divisibility", 16]] for at, arg in enumerate(kernel.arg_names) if arg not in fixed and arg in even
    }
    made = triton.compile(ASTSource(kernel, signature, fixed, divisible), target=target, options=options)
    if "cubin" in made.asm:
        text: str = made.asm["ptx"]
        registers, spilled = _usage(made.asm["cubin"], Path(triton.__file__).parent)
    else:
        text = made.asm["amdgcn"]
        registers, spilled = (_field(what, text) for what in ("vgpr_count", "vgpr_spill_count"))
    return Compiled(name, chip, text, registers, spilled, int(made.metadata.shared))


def _field(name: str, text: str) -> int:
    """A number of the metadata behind a kernel of AMD's."""
    found = re.search(rf"\.{name}:\s+(\d+)", text)
    if found is None:
        raise UnsupportedError("the assembly does not say what a kernel takes", missing=name)
    return int(found[1])


def _usage(cubin: bytes, triton: Path) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of the kernel in a file of NVIDIA's."""
    tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        raise UnsupportedError("the installed Triton has no tool that reads what a kernel takes", missing=str(tool))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", text)
    if found is None:
        raise UnsupportedError("the tool does not say what a kernel takes", got=text)
    return int(found[1]), int(found[2]) + int(found[3])
