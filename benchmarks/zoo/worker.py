"""Processes that each measure one class."""

from __future__ import annotations

import contextlib
import gc
import os
import time
import traceback
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.zoo.measure import measure
from benchmarks.zoo.models import Entry


class Pool:
    """Measures classes, a few at once.

    Args:
        jobs: Processes at once.
        seconds: How long one class may take.
        formats: What to run besides the unmodified model.
    """

    def __init__(self, jobs: int, seconds: float, formats: list[str]) -> None:
        self.jobs, self.seconds, self.formats = jobs, seconds, formats
        self.context = get_context("fork")
        # What the first compilation imports is imported once, and never looked at again by the
        # collector, so that children share its memory.
        torch.set_num_threads(1)
        measure(Entry("LlamaForCausalLM", "llama", "decoder"), ["auto"])
        gc.freeze()

    def map(self, entries: list[Entry]) -> Iterator[dict[str, Any]]:
        """Yield one record per class, in the order in which they end."""
        waiting = list(reversed(entries))
        running: dict[Any, tuple[Any, Entry, float]] = {}
        while waiting or running:
            while waiting and len(running) < self.jobs:
                entry = waiting.pop()
                ours, theirs = self.context.Pipe(duplex=False)
                child = self.context.Process(target=_work, args=(theirs, entry, self.formats))
                child.start()
                theirs.close()
                running[ours] = (child, entry, time.monotonic())
            ready = wait(list(running), timeout=1.0)
            for pipe, (child, entry, begin) in list(running.items()):
                spent = time.monotonic() - begin
                if pipe not in ready and spent < self.seconds:
                    continue
                found = _received(pipe, child) if pipe in ready else None
                if found is None:
                    child.kill()
                    child.join()
                    late = f"no result after {self.seconds:.0f} s"
                    died = f"the process ended with {child.exitcode}"
                    found = {"crashed": died if pipe in ready else late}
                child.join()
                del running[pipe]
                yield {"name": entry.name, "family": entry.family, **found}


def _received(pipe: Any, child: Any) -> dict[str, Any] | None:
    """Return what a child sent, or None if it ended without a word."""
    try:
        found: dict[str, Any] = pipe.recv()
    except EOFError:
        child.join()
        return None
    return found


def _work(pipe: Connection, entry: Entry, formats: list[str]) -> None:
    """Measure one class in a process of its own; what it prints is of no interest."""
    with open(os.devnull, "w") as nowhere:  # noqa: PTH123
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    with contextlib.suppress(BrokenPipeError):
        try:
            pipe.send(measure(entry, formats))
        except BaseException as error:  # a class that does not run is a row, too
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename.rpartition('site-packages/')[2]}:{last.lineno}"
            pipe.send({"failed": f"{type(error).__name__}: {str(error)[:300]}", "at": place})
