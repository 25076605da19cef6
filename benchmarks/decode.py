"""Decode speed of a whole model: unmodified against compiled, in one process, taking turns.

    python -m benchmarks.decode --contexts 1024 8192 --formats auto,int8,int4 --static
    python -m benchmarks.decode --static --freezing --quantized-cache --plot decode.png
    python -m benchmarks.decode --tiny --contexts 256 --steps 16
    python -m benchmarks.decode --contexts --overhead --first-token

Times are single steps, in an order drawn anew for each turn; the low quantile p25 beside the
median. Before anything is timed, the logits of all candidates are compared, and whether caches are
in pages and as small as they should be; a benchmark of wrong results is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from transformers import PreTrainedModel

from benchmarks.arguments import (
    DTYPES,
    add_formats,
    add_outputs,
    begin,
    check_outputs,
    formats_of,
    write_json,
)
from benchmarks.decode_candidates import check, new_candidates, start
from benchmarks.decode_results import Row, plot, table
from benchmarks.decoding import kv_bytes
from benchmarks.first_token import measure_first_token
from benchmarks.overhead import measure_overhead
from benchmarks.timing import busy_cores, describe, interleave
from kvcompile.format_requests import FormatRequest
from kvcompile.reports import collect
from tests.support.smollm2 import load_model, long_prompt
from tests.support.tiny_models import prompt, tiny_llama


def measure(
    model: PreTrainedModel,
    context: int,
    args: argparse.Namespace,
    requests: Sequence[FormatRequest],
    console: Console,
) -> list[Row]:
    """Measure every candidate at one context length."""
    ids = prompt(context) if args.tiny else long_prompt(context)
    candidates = new_candidates(model, context, args, requests)
    for candidate in candidates:
        console.print(f"{context:,} tokens, {candidate.name}: {candidate.missing or 'prompt'}")
        start(candidate, ids)
    console.print(f"{context:,} tokens: compiling, comparing logits")
    errors = check(candidates)
    console.print(f"{context:,} tokens: timing {args.steps} steps of each")
    steps = {c.name: c.decoder.step for c in candidates if c.decoder is not None}
    timings = interleave(steps, args.steps)
    return [
        Row(context, c.name, None, missing=c.missing)
        if c.decoder is None
        else Row(
            context,
            c.name,
            timings[c.name],
            kv_bytes(c.decoder.cache),
            c.decoder.prefill_seconds,
            errors.get(c.name),
        )
        for c in candidates
    ]


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of each candidate")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    add_formats(parser, "auto,int8,int4")
    parser.add_argument("--inner-backend", default="inductor", help="for every format")
    parser.add_argument("--static", action="store_true", help="also StaticCache + torch.compile")
    parser.add_argument(
        "--freezing", action="store_true", help="also the same with Inductor's constant weights"
    )
    parser.add_argument(
        "--quantized-cache",
        action="store_true",
        help="also transformers' QuantizedCache, as far as quanto and hqq are installed",
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: a smoke test")
    parser.add_argument("--overhead", action="store_true", help="the backend's own time per token")
    parser.add_argument("--first-token", action="store_true", help="cold and warm starts")
    add_outputs(parser)
    return parser


def main(arguments: list[str]) -> None:
    """Run what the command line asks for."""
    parser = new_parser()
    args = parser.parse_args(arguments)
    check_outputs(parser, args)
    requests = formats_of(parser, args, {"inner_backend": args.inner_backend})
    console, found = begin()
    dtype = DTYPES[args.dtype]
    model: PreTrainedModel = tiny_llama(dtype=dtype) if args.tiny else load_model(dtype)

    results: dict[str, Any] = {}
    rows: list[Row] = []
    with collect() as graphs:
        for context in args.contexts:
            measured = measure(model, context, args, requests, console)
            console.print(table(measured))
            rows += measured
            results["decode"] = [row.as_json() for row in rows]
            results["passes_s"] = [graph.seconds for graph in graphs]
            if args.json is not None:
                # After each context: a long run that is stopped has not run for nothing.
                write_json(args.json, {"machine": found, **results})
    if rows:
        passes = ", ".join(f"{graph.seconds:.2f}" for graph in graphs)
        console.print(f"seconds in the passes, per compiled graph: {passes}")
        if args.plot is not None:
            plot(rows, describe(found), args.plot)
    if args.overhead:
        results["overhead"] = measure_overhead(console, requests, steps=args.steps)
    if args.first_token:
        results["first_token"] = measure_first_token(console, tiny=args.tiny, dtype=args.dtype)
    if args.json is not None:
        after = {"busy cores after": f"{busy_cores():.2f}"}
        write_json(args.json, {"machine": {**found, **after}, **results})


if __name__ == "__main__":
    main(sys.argv[1:])
