"""Timing candidates against each other, and what a time must be read with."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvcompile.machine import machine

WARM_UP_TURNS = 4
FEWEST_TURNS = 8
LONG_SECONDS = 10e-3
"""What takes this long does not notice that its own code had left the processor's caches."""
QUIET_CORES = 0.2
BUSY = "busy cores before"
STAT = Path("/proc/stat")


@dataclass(frozen=True)
class Timing:
    """Times of single steps, seconds, sorted."""

    seconds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """Return the time that a share `q` of the steps did not exceed."""
        return self.seconds[min(int(q * len(self.seconds)), len(self.seconds) - 1)]

    @property
    def p25(self) -> float:
        """A low quantile: noise of a shared machine only ever adds time."""
        return self.quantile(0.25)

    @property
    def median(self) -> float:
        """The usual step."""
        return self.quantile(0.5)

    def as_json(self) -> dict[str, float]:
        """Return milliseconds, for a file."""
        mean = sum(self.seconds) / len(self.seconds)
        return {
            "p25_ms": self.p25 * 1e3,
            "median_ms": self.median * 1e3,
            "mean_ms": mean * 1e3,
        }


def interleave(
    steps: Mapping[str, Callable[[], object]],
    count: int,
    *,
    warm_up: int = WARM_UP_TURNS,
    seconds: float = math.inf,
    in_a_row: int = 1,
) -> dict[str, Timing]:
    """Time several candidates in one process, taking turns.

    The order is drawn anew for each turn, so that no candidate always finds in the processor's
    caches what the same other one has left there.

    Args:
        steps: What to run, by name. Each is warmed up first.
        count: Turns.
        warm_up: Steps of each beforehand that are not timed.
        seconds: Stop earlier after this long, though not before 8 turns.
        in_a_row: Steps of a turn, as long as they take less than 10 ms; each is timed. With more
            than one, the low quantiles are of steps that found their own code in the caches.
    """
    shuffle = random.Random(0).shuffle
    order = list(steps)
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(warm_up):
        for step in steps.values():
            step()
    begin = time.perf_counter()
    for turn in range(count):
        if turn >= FEWEST_TURNS and time.perf_counter() - begin > seconds:
            break
        shuffle(order)
        for name in order:
            times[name] += _timed(steps[name], in_a_row)
    return {name: Timing(tuple(sorted(values))) for name, values in times.items()}


def _timed(step: Callable[[], object], in_a_row: int) -> list[float]:
    times: list[float] = []
    while len(times) < in_a_row and sum(times) < LONG_SECONDS:
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return times


def busy_cores(seconds: float = 1.0) -> float:
    """Return how many cores are busy with something else; this process sleeps meanwhile.

    The load average would count what ran a minute ago, such as the tests before a benchmark.

    Args:
        seconds: How long to look.
    """
    before = _busy_ticks()
    time.sleep(seconds)
    return (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def _busy_ticks() -> int:
    """Return the clock ticks that all cores have spent at work, time taken by other guests too."""
    user, nice, system, _, _, *rest = map(int, STAT.read_text().split("\n", 1)[0].split()[1:9])
    return user + nice + system + sum(rest)


def conditions() -> dict[str, str]:
    """Return what the figures must be read with: the machine, and what else runs on it."""
    return {**machine(), BUSY: f"{busy_cores():.2f}"}


def describe(found: Mapping[str, str]) -> str:
    """Return the conditions in one line, with a warning if the machine is not quiet."""
    line = ", ".join(f"{key} {value}" for key, value in found.items())
    if float(found[BUSY]) < QUIET_CORES:
        return line
    return f"{line}\nNOT QUIET: other processes are running; only the ratios may mean something"
