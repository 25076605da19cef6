"""What GPU kernels could reach on an H200, from their machine code alone: no GPU is needed.

    python -m benchmarks.static
    python -m benchmarks.static --kernels bf16 int4 --json static.json

Per kernel: the time its bytes need, the time each pipe of a multiprocessor needs for the main loop,
and an estimate of the whole, all for a million cached tokens of 8 KV heads. Bytes and instructions
are exact. So is what NVIDIA's documents say: 132 multiprocessors of 4 parts, an instruction per
cycle and part, and what each pipe takes for an instruction (the table of throughputs in the CUDA
programming guide). Guesses are:

    bandwidth 4.3 TB/s     of the data sheet's 4.8, what large copies are reported to reach
    clock 1.755 GHz        under load, below the highest, 1.98
    HMMA 6.4 cycles        of 16x8x16 with fp32 sums: mma.sync is reported at 62 % of the peak
    the part of each limit that a kernel reaches: bytes .92, issue .6, alu .7, fma .7, mma .8

An estimate is within 30 to 50 % of the truth at best. It knows no latency, bank conflict, launch or
imbalance. The pipe of shared memory is shown and not part of it: it counts every wide access in
full, which is too much for those that are broadcast. Figures of two variants that differ by more
than a fifth rank them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import add_json, write_json
from kvcompile.codegen.gpu.latent import shape_of
from kvcompile.codegen.gpu.machine_code import Loop, MachineCode, page_bytes
from kvcompile.codegen.gpu.schedule import choose_schedule
from kvcompile.codegen.spec import KernelSpec
from tests.support.gpu_kernels import KERNELS, machine_code

TARGET = "sm_90"
PARTS = 132 * 4
"""Of an H200's multiprocessors: each issues one instruction of a warp per cycle."""
HERTZ = 1.755e9
BYTES_PER_SECOND = 4.3e12
TOKENS, KV_HEADS = 1 << 20, 8

REACHED = {"bytes": 0.92, "issue": 0.6, "alu": 0.7, "fma": 0.7, "conversions": 0.7, "mma": 0.8}
"""What part of a limit a kernel reaches: guesses."""

CYCLES = {
    "fma": (1.0, ("FFMA", "FMUL", "FADD", "HFMA2", "HADD2", "HMUL2")),
    "fma, halved": (2.0, ("IMAD", "IDP")),
    "conversions": (2.0, ("I2F", "I2FP", "F2F", "F2FP", "F2I", "I2I")),
    "conversions, MUFU": (8.0, ("MUFU",)),
    "mma": (6.4, ("HMMA",)),
    "shared": (4.0, ("LDS", "STS", "STSM", "LDSM", "SHFL", "ATOMS", "LDGSTS", "LDG", "STG")),
    "none": (
        0.0,
        ("BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "BRA", "SYNCS", "BSSY", "BSYNC", "R2UR", "S2R"),
    ),
}
"""Cycles that a warp's instruction occupies its pipe; the pipe's name ends at a comma."""

ALU_CYCLES = 2.0
"""Of everything else: half the lanes of a warp per cycle."""


PIPES = {
    "bytes": "bytes",
    "issue": "issue",
    "alu": "alu",
    "fma": "fma",
    "conversions": "conv",
    "shared": "shared",
    "mma": "mma",
}
"""Limits by the heads of their columns."""


@dataclass(frozen=True)
class Estimate:
    """One kernel.

    Attributes:
        name: Its name.
        bytes_per_token: Of K and V of a KV head, scales included.
        microseconds: What each limit alone takes: "bytes", "issue" and the pipes.
        estimate: Microseconds, guesses included.
        bound: The limit that the estimate comes from.
        facts: Its machine code.
    """

    name: str
    bytes_per_token: float
    microseconds: dict[str, float]
    estimate: float
    bound: str
    facts: MachineCode

    @property
    def reached(self) -> float:
        """What part of the bandwidth the estimate uses."""
        return self.microseconds["bytes"] / self.estimate


def cycles(instruction: str) -> tuple[str, float]:
    """Return the pipe of an instruction, and the cycles that it occupies it."""
    base = instruction.split(".", maxsplit=1)[0]
    for pipe, (each, bases) in CYCLES.items():
        if base in bases:
            return pipe.split(",", maxsplit=1)[0], each * _width(instruction, pipe)
    # Those of the uniform datapath have a pipe of their own, which nothing else waits for.
    return ("none", 0.0) if base.startswith("U") else ("alu", ALU_CYCLES)


def _width(instruction: str, pipe: str) -> int:
    """Return how many accesses of 32 bits per lane an access of shared memory is."""
    if pipe != "shared":
        return 1
    if instruction.endswith(".4") or ".128" in instruction:
        return 4
    return 2 if instruction.endswith(".2") or ".64" in instruction else 1


def estimate(name: str, spec: KernelSpec, facts: MachineCode) -> Estimate:
    """Return the figures of a kernel whose queries are one block of rows.

    Args:
        name: Its name.
        spec: Its spec.
        facts: Its machine code for sm_90.
    """
    shape = shape_of(spec)
    assert facts.loop is not None
    nbytes = page_bytes(shape) / shape.block_tokens
    warp_loops = TOKENS * KV_HEADS / shape.block_tokens * choose_schedule(spec).num_warps
    found = {"bytes": TOKENS * KV_HEADS * nbytes / BYTES_PER_SECOND * 1e6}
    for pipe, each in _loop_cycles(facts.loop).items():
        found[pipe] = warp_loops / PARTS * each / HERTZ * 1e6
    limits = {pipe: found[pipe] / part for pipe, part in REACHED.items() if pipe in found}
    bound = max(limits, key=limits.__getitem__)
    return Estimate(name, nbytes, found, limits[bound], bound, facts)


def _loop_cycles(loop: Loop) -> dict[str, float]:
    """Return the cycles of an iteration of a warp by pipe; "issue" is one per instruction."""
    total = {"issue": float(loop.length)}
    for instruction, count in loop.instructions.items():
        pipe, each = cycles(instruction)
        if pipe != "none":
            total[pipe] = total.get(pipe, 0.0) + each * count
    return total


def tables(estimates: Sequence[Estimate]) -> list[Table]:
    """Return what the machine code says, and the times that follow from it."""
    facts = Table(
        title="machine code",
        caption="KB on their way to a multiprocessor: the bandwidth needs 26, at 0.8 us for a load",
    )
    facts.add_column("kernel")
    columns = (
        "bytes/token",
        "instr/number",
        "registers",
        "programs",
        "KB on their way",
        "barriers",
    )
    for column in columns:
        facts.add_column(column, justify="right")
    times = Table(title=f"H200, {TOKENS >> 20} Mi tokens of {KV_HEADS} KV heads: us of each limit")
    times.add_column("kernel")
    for column in (*PIPES.values(), "estimate", "bound", "bandwidth"):
        times.add_column(column, justify="right")
    for found in estimates:
        loop = found.facts.loop
        assert loop is not None
        facts.add_row(
            found.name,
            f"{found.bytes_per_token:.0f}",
            f"{loop.per_element:.2f}",
            str(found.facts.registers),
            str(found.facts.resident),
            f"{loop.bytes_in_flight / 1e3:.0f}",
            str(loop.barriers),
        )
        times.add_row(
            found.name,
            *(f"{found.microseconds.get(pipe, 0.0):.0f}" for pipe in PIPES),
            f"{found.estimate:.0f}",
            found.bound,
            f"{found.reached:.0%}",
        )
    return [facts, times]


def main(arguments: Sequence[str]) -> None:
    """Compile, count and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.static",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [name for name, spec in KERNELS.items() if spec.queries == "one"]
    parser.add_argument("--kernels", nargs="+", choices=names, default=names, metavar="KERNEL")
    add_json(parser)
    args = parser.parse_args(arguments)
    estimates, version = [], ""
    for name in args.kernels:
        version, facts = machine_code(name, [TARGET])
        estimates.append(estimate(name, KERNELS[name], facts[TARGET]))
    console = Console(highlight=False)
    console.print(f"Triton {version}, {TARGET}; guesses: see --help")
    for table in tables(estimates):
        console.print(table)
    if args.json is not None:
        kernels = {found.name: {**asdict(found), "reached": found.reached} for found in estimates}
        write_json(args.json, {"triton": version, "target": TARGET, "kernels": kernels})


if __name__ == "__main__":
    main(sys.argv[1:])
