"""What a kernel's machine code says, without a GPU: registers, spills, and what its loop does."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

from kvcompile.codegen.errors import KernelCompilationError
from kvcompile.codegen.gpu import sass
from kvcompile.codegen.gpu.compile import compile_ahead, disassembler
from kvcompile.codegen.gpu.latent import shape_of
from kvcompile.codegen.gpu.schedule import Schedule
from kvcompile.codegen.gpu.shape import GpuShape
from kvcompile.codegen.spec import KernelSpec

NVIDIA_TARGETS = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA_TARGETS, "gfx942")
LANES = 32
"""Of a warp on NVIDIA."""

SHARED_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Of a multiprocessor, as far as programs can have them."""

RESERVED_SHARED_BYTES = 1 << 10
"""What the system takes of it for each program."""

REGISTERS, MOST_WARPS, MOST_PROGRAMS = 65536, 64, 32
"""Of a multiprocessor of each NVIDIA target."""


@dataclass(frozen=True)
class Loop:
    """An iteration of the main loop of a warp, over the tokens of `GpuShape.block_tokens`.

    Attributes:
        instructions: How often each occurs, suffixes included.
        per_element: Instructions of a lane for a number of K or V: each warp of a program executes
            all of them.
        plain_loads: Loads from memory to registers.
        wide_copies: Copies of 128 bits per lane from memory to shared memory.
        narrow_copies: Copies of fewer bits.
        wide_bytes: Bytes that the wide copies of a program bring.
        conversions: Integers turned into floating-point numbers (I2F, I2FP).
        barriers: Meetings of the warps.
        bytes_in_flight: Of pages, on their way to a multiprocessor as full of programs as can be.
    """

    instructions: dict[str, int]
    per_element: float
    plain_loads: int
    wide_copies: int
    narrow_copies: int
    wide_bytes: int
    conversions: int
    barriers: int
    bytes_in_flight: int

    @property
    def length(self) -> int:
        """Instructions of an iteration."""
        return sum(self.instructions.values())


@dataclass(frozen=True)
class MachineCode:
    """A kernel for one target.

    Attributes:
        registers: Of a lane; on AMD, vector registers of both kinds.
        spills: Instructions that put registers into memory or fetch them; on AMD, registers there.
        shared_bytes: Shared memory (LDS) of a program.
        resident: Programs that a multiprocessor has room for; None on AMD.
        loop: Its main loop; None on AMD.
    """

    registers: int
    spills: int
    shared_bytes: int
    resident: int | None = None
    loop: Loop | None = None


def inspect(spec: KernelSpec, target: str, schedule: Schedule) -> MachineCode:
    """Compile an attend kernel and read its machine code.

    Args:
        spec: A spec of attend.
        target: One of `TARGETS`.
        schedule: How to compile it.

    Raises:
        KernelCompilationError: Functions are interpreted in this process, the disassembler does not
            run, or what it prints has no main loop.
        UnsupportedKernelError: No generator prints this spec.
        ImportError: Triton is not installed.
    """
    compiled = compile_ahead(spec, target, schedule)
    if target in NVIDIA_TARGETS:
        return _read_nvidia(compiled, shape_of(spec), target, schedule)
    text = compiled.asm["amdgcn"]
    return MachineCode(
        registers=_field(text, r"\.vgpr_count:\s+(\d+)"),
        spills=_field(text, r"\.vgpr_spill_count:\s+(\d+)"),
        shared_bytes=compiled.metadata.shared,
    )


def _field(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    if found is None:
        raise KernelCompilationError(f"the machine code does not say {pattern}")
    return int(found[1])


def _read_nvidia(compiled: Any, shape: GpuShape, target: str, schedule: Schedule) -> MachineCode:
    cubin = compiled.asm["cubin"]
    instructions = sass.parse(_disassemble(cubin, "-sass"))
    body = sass.main_loop(instructions)
    if not body:
        raise KernelCompilationError(f"{shape.spec.symbol} has no loop that copies as it works")
    registers = _field(_disassemble(cubin, "-res-usage"), r"REG:(\d+)")
    shared_bytes = compiled.metadata.shared
    resident = _resident(registers, shared_bytes, target, schedule.num_warps)
    copies = [instruction.name for instruction in body if instruction.base == "LDGSTS"]
    wide = sum(name.endswith(".128") for name in copies)
    lanes = LANES * schedule.num_warps
    loop = Loop(
        instructions=sass.histogram(body),
        per_element=len(body) * lanes / elements(shape),
        plain_loads=sass.count(body, "LDG", "LD"),
        wide_copies=wide,
        narrow_copies=len(copies) - wide,
        wide_bytes=wide * 16 * lanes,
        conversions=sass.count(body, "I2F", "I2FP"),
        barriers=sass.count(body, "BAR"),
        bytes_in_flight=resident * (schedule.num_stages - 1) * page_bytes(shape),
    )
    spills = sass.count(instructions, "LDL", "STL")
    return MachineCode(registers, spills, shared_bytes, resident, loop)


def elements(shape: GpuShape) -> int:
    """Return the numbers of K and V of a KV head that an iteration reads."""
    return shape.block_tokens * (shape.spec.head_dim_qk + shape.spec.head_dim_vo)


def page_bytes(shape: GpuShape) -> int:
    """Return the bytes of K and V of a KV head that an iteration reads, scales included."""
    return shape.layout.record_bytes * shape.block_tokens // shape.spec.page_size


def code_bytes(shape: GpuShape) -> int:
    """Return those of them that are codes or words: what large copies should bring, once."""
    total = 0
    for part in (shape.part("k"), shape.part("v")):
        bits = sum(part.widths) if part.is_grouped else 16
        total += shape.block_tokens * part.channels * bits // 8
    return total


def _resident(registers: int, shared_bytes: int, target: str, warps: int) -> int:
    """Return the programs that fit, by registers, which come in eights, shared memory and warps."""
    return min(
        SHARED_BYTES[target] // (shared_bytes + RESERVED_SHARED_BYTES),
        REGISTERS // (-(-registers // 8) * 8 * LANES * warps),
        MOST_WARPS // warps,
        MOST_PROGRAMS,
    )


def _disassemble(cubin: bytes, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(disassembler()), option, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise KernelCompilationError(f"{command[0]} {option}: {done.stderr}")
    return done.stdout + done.stderr
