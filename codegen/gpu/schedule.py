"""How a kernel is run: warps of a program, and pages on their way to it.

The reasons are figures of machine code, which `python -m benchmarks.static` prints; no kernel has
been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.codegen.gpu.shape import LEAST_ROWS, GpuShape
from kvcompile.codegen.spec import KernelSpec

MOST_NUMBERS_OF_A_WARP = 64 * 128
"""Numbers of K, or of V, of an iteration that one warp multiplies without spilling registers."""


@dataclass(frozen=True)
class Schedule:
    """Decisions that change no result.

    Attributes:
        num_warps: Warps of a program.
        num_stages: One more than the pages that are on their way while one is worked on.
    """

    num_warps: int
    num_stages: int


def choose_schedule(spec: KernelSpec) -> Schedule:
    """Return the schedule of an attend kernel.

    Args:
        spec: A spec of attend that the printer prints.
    """
    shape = GpuShape(spec)
    if not spec.is_grouped:
        # 3 stages keep the instructions of a page the same or add some, and take room from
        # programs: at 128 channels an H200 has room for 3 of them, not 5; at 256 for 1, not 3. On
        # AMD their 68 KiB are more than there is.
        return Schedule(4, 2)
    if spec.isa == "triton":
        # There pages on their way are in registers: with 2 stages 60 to 90 of them spill.
        return Schedule(4, 1)
    # Quantized pages are small. With 3 stages one program per multiprocessor has more on its way
    # than an H200 brings in the time that a load takes (26 KB in 0.8 us), with 2 it has half.
    return Schedule(_warps(shape), 3)


def _warps(shape: GpuShape) -> int:
    # One warp does nothing twice and waits for no other, so it executes the fewest instructions:
    # for int4 2.9 per number, where 2 warps execute 3.6 and 4 execute 4.9.
    if shape.block_rows > LEAST_ROWS or not shape.is_fp16:
        return 4  # scores and output of many rows, or numbers of 32 bits, fill registers
    numbers = shape.block_tokens * max(shape.k.channels, shape.v.channels)
    # Words of two codes leave fewer registers to numbers than words of four: 25 spill.
    has_bytes = any(part.is_grouped and 8 in part.widths for part in (shape.k, shape.v))
    if has_bytes:
        numbers *= 2
    return 1 if numbers <= MOST_NUMBERS_OF_A_WARP else 2
