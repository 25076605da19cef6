"""Which schedule a GPU kernel is launched with: chosen, told by the environment, or timed.

    KVCOMPILE_SCHEDULE=warps=2,stages=3,splits=16   for every attend kernel, whichever are given
    KVCOMPILE_AUTOTUNE=1                            times candidates once per kernel and device

What was timed is kept beside the kernel's text in the cache on disk.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcompile.codegen.artifacts import artifact_directory, write_source
from kvcompile.codegen.errors import KvcompileError
from kvcompile.codegen.gpu.schedule import (
    Schedule,
    candidate_schedules,
    choose_schedule,
    smaller_schedules,
)
from kvcompile.codegen.spec import KernelSpec

FIELDS = ("warps", "stages", "splits")


class ScheduleError(KvcompileError):
    """KVCOMPILE_SCHEDULE cannot be understood; names the field and the nearest valid one."""


@dataclass(frozen=True)
class Override:
    """What the environment says.

    Attributes:
        warps: Warps of a program, or None.
        stages: Stages, or None.
        splits: Partial outputs of a row, those of sinks and ring included, or None.
    """

    warps: int | None = None
    stages: int | None = None
    splits: int | None = None


def read_override() -> Override:
    """Return what KVCOMPILE_SCHEDULE says.

    Raises:
        ScheduleError: A field is unknown or no positive number.
    """
    text = os.environ.get("KVCOMPILE_SCHEDULE", "")
    found: dict[str, int] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1, 0.0)[0]
            raise ScheduleError(f"KVCOMPILE_SCHEDULE has no {name!r}; did you mean {near!r}?")
        if not re.fullmatch(r"[1-9]\d*", value):
            raise ScheduleError(
                f"KVCOMPILE_SCHEDULE: {name} must be a number from 1, not {value!r}"
            )
        found[name] = int(value)
    warps = found.get("warps")
    if warps is not None and warps & warps - 1:
        near_warps = 1 << warps.bit_length() - 1
        raise ScheduleError(
            f"KVCOMPILE_SCHEDULE: warps must be a power of two, not {warps}; nearest: {near_warps}"
        )
    return Override(**found)


def schedule_of(spec: KernelSpec, override: Override) -> Schedule:
    """Return the schedule of an attend kernel, as far as the environment leaves it open."""
    chosen = choose_schedule(spec)
    return Schedule(override.warps or chosen.num_warps, override.stages or chosen.num_stages)


def tuned_schedule(spec: KernelSpec, device: str, measure: Callable[[Schedule], float]) -> Schedule:
    """Return the fastest of the candidates, timed once per kernel and device.

    Args:
        spec: The kernel.
        device: Name of the device, and whatever else times depend on.
        measure: Returns the seconds of a call, or infinity where it cannot be launched.
    """
    directory = artifact_directory(spec.symbol, "schedule", device)
    known = _read(directory / "schedule.json")
    if known is not None:
        return known
    times = {schedule: measure(schedule) for schedule in candidate_schedules(spec)}
    best = min(times, key=lambda schedule: times[schedule])
    found = {"num_warps": best.num_warps, "num_stages": best.num_stages, "device": device}
    write_source(directory, "schedule.json", json.dumps(found) + "\n")
    return best


def _read(path: Path) -> Schedule | None:
    """Return a schedule from disk; None if there is none, or it is damaged."""
    try:
        found = json.loads(path.read_text())
        return Schedule(int(found["num_warps"]), int(found["num_stages"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class ScheduledKernel:
    """A kernel and its schedule; where a chip has no room for it, the next smaller one is taken."""

    def __init__(self, kernel: Any, schedule: Schedule, out_of_room: type[Exception]) -> None:
        """Take a Triton function.

        Args:
            kernel: The function.
            schedule: What to begin with.
            out_of_room: What a launch raises that takes too much of a chip.
        """
        self._kernel = kernel
        self._left = smaller_schedules(schedule)
        self._out_of_room = out_of_room

    @property
    def schedule(self) -> Schedule:
        """The schedule of the next launch."""
        return self._left[0]

    def launch(self, grid: tuple[int, ...], *arguments: object) -> None:
        """Launch it.

        Raises:
            Exception: Even the smallest schedule takes too much.
        """
        while True:
            schedule = self._left[0]
            options = {"num_warps": schedule.num_warps, "num_stages": schedule.num_stages}
            try:
                self._kernel[grid](*arguments, **options)
                return
            except self._out_of_room:
                if len(self._left) == 1:
                    raise
                del self._left[0]
