"""How a kernel is run: warps of a program, and pages on their way to it.

The reasons are figures of machine code, which `python -m benchmarks.static` prints; no kernel has
been timed on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcompile.codegen.gpu.shape import LEAST_ROWS, GpuShape
from kvcompile.codegen.spec import KernelSpec


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
    if shape.is_one_warp:
        # It does nothing twice and waits for no other warp, so it executes the fewest instructions:
        # for int4 2.7 per number, where 2 warps execute 3.7 and 4 execute 4.9. Of its pages, which
        # have up to 9 KB, two are on their way: an H200 brings 26 KB to a multiprocessor in the
        # 0.8 us that a load takes, and not every one has 8 programs.
        return Schedule(1, 3)
    if shape.block_rows == LEAST_ROWS and shape.is_fp16:
        # Pages that two warps share have up to 18 KB, so one is enough; more stages cost
        # 10 to 20 instructions per page.
        return Schedule(2, 2)
    # Scores and output of many rows, and numbers of 32 bits, fill more registers.
    return Schedule(4, 3)


MOST_STAGES = 4
MOST_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 4
"""Programs that keep a processor of a GPU busy while others wait for memory."""


def smaller_schedules(schedule: Schedule) -> list[Schedule]:
    """Return a schedule, and those that take less of a chip's memory, the largest first."""
    stages = range(schedule.num_stages, 0, -1)
    return [Schedule(schedule.num_warps, count) for count in stages]


def candidate_schedules(spec: KernelSpec) -> list[Schedule]:
    """Return the schedules worth timing, the one that would be chosen first.

    Args:
        spec: A spec of attend that the printer prints.
    """
    chosen = choose_schedule(spec)
    warps = sorted({chosen.num_warps, max(1, chosen.num_warps // 2), 2 * chosen.num_warps})
    others = [
        Schedule(w, stages)
        for w in warps
        for stages in range(1, MOST_STAGES + 1)
        if abs(stages - chosen.num_stages) <= 1
    ]
    return [chosen, *(schedule for schedule in others if schedule != chosen)]


def choose_splits(spec: KernelSpec, *, processors: int, programs: int, kv_len: int) -> int:
    """Return into how many partial outputs the tokens of a row are split.

    Args:
        spec: A spec of attend that the printer prints.
        processors: Multiprocessors of the device.
        programs: Programs of one split: rows of the batch, KV heads and blocks of rows.
        kv_len: Tokens.
    """
    wanted = -(-processors * PROGRAMS_PER_PROCESSOR // programs)
    pages = -(-kv_len // spec.page_size)
    splits = max(1, min(wanted, pages, MOST_SPLITS - 1))
    # Sinks and ring are one more, the last one.
    return splits + 1 if spec.is_grouped else splits
