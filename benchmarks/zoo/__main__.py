"""Run every decoder of transformers, tiny and random, compiled; write docs/models.md.

    python -m benchmarks.zoo                    everything, anew
    python -m benchmarks.zoo --resume           what has no result yet
    python -m benchmarks.zoo --only Gemma2ForCausalLM BartForCausalLM

Each class runs in a process of its own, forked from one that has imported everything, so that a
crash or a hang costs one row. Nothing is downloaded; the inner backend is `eager`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.zoo.measure import FORMATS
from benchmarks.zoo.models import Entry, entries
from benchmarks.zoo.render import render
from benchmarks.zoo.results import DOCUMENT, RESULTS, Record, read, write
from benchmarks.zoo.worker import Pool


def main() -> None:
    """Measure what was asked for and render the document."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", default=(), help="classes")
    parser.add_argument("--family", nargs="+", metavar="FAMILY", default=(), help="kinds of class")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--resume", action="store_true", help="skip classes with a result")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds per class")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    args = parser.parse_args()
    known = read(args.results)
    chosen = [e for e in entries() if _is_chosen(e, args, known)]
    for record in _measured(chosen, args):
        known[record["name"]] = record
        write(args.results, known.values())
    args.document.write_text(render(known.values(), [e.name for e in entries()]))


def _is_chosen(entry: Entry, args: argparse.Namespace, known: dict[str, Record]) -> bool:
    if args.only and entry.name not in args.only:
        return False
    if args.family and entry.family not in args.family:
        return False
    return not (args.resume and entry.name in known)


def _measured(chosen: list[Entry], args: argparse.Namespace) -> Iterable[Record]:
    """Yield results as they come, with a bar that says where it is."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console()
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("models", total=len(chosen))
        pool = Pool(args.jobs, args.timeout, args.formats)
        for record in pool.map(chosen):
            progress.update(task, advance=1, description=record["name"])
            if not console.is_terminal:
                console.print(time.strftime("%H:%M:%S"), record["name"], record.get("failed", ""))
            yield record


if __name__ == "__main__":
    main()
