"""Decode speed of a whole model: unmodified against compiled, in one process, taking turns.

    python -m benchmarks.decode --contexts 1024 8192
    python -m benchmarks.decode --tiny --contexts 256 --steps 16
    python -m benchmarks.decode --overhead --first-token

Times are single steps, the low quantile p25 beside the median. Before anything is timed, the
logits of both sides are compared; a benchmark of wrong results is refused.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel, StaticCache

from benchmarks.decoding import DTYPES, Decoder, Timing, interleave, kv_bytes, machine, new_decoder
from benchmarks.first_token import measure_first_token
from benchmarks.overhead import measure_overhead
from kvcompile.reports import collect
from tests.support.smollm2 import load_model, long_prompt
from tests.support.tiny_models import prompt, tiny_llama

CHECKED_STEPS = 4
PREFILL_CHUNK = 1024


class WrongResultError(RuntimeError):
    """Two candidates compute different logits: their times would mean nothing."""


@dataclass(frozen=True)
class Row:
    """One candidate at one context length."""

    context: int
    name: str
    timing: Timing
    kv_bytes: int
    prefill_seconds: float


def candidates(
    model: PreTrainedModel, context: int, args: argparse.Namespace
) -> dict[str, Decoder]:
    """Return what is compared, by name; the first is the baseline of the others."""
    torch._dynamo.reset()
    options = {"inner_backend": args.inner_backend}
    found = {
        "eager, DynamicCache": new_decoder(model, model),
        "kvcompile, DynamicCache": new_decoder(
            model, torch.compile(model, backend="kvcompile", options=options)
        ),
    }
    if args.static:
        length = context + CHECKED_STEPS + args.steps + 16
        cache = StaticCache(config=model.config, max_cache_len=length)
        found["inductor, StaticCache"] = Decoder(torch.compile(model), cache)
    return found


def prefill_all(decoders: dict[str, Decoder], model: PreTrainedModel, ids: torch.Tensor) -> None:
    """Feed the prompt to every candidate.

    A static cache has to exist before its model is compiled, so its prefill is the unmodified
    model's, as it is in `generate`.
    """
    for decoder in decoders.values():
        run = decoder.run
        decoder.run = model if isinstance(decoder.cache, StaticCache) else run
        decoder.prefill(ids, chunk=PREFILL_CHUNK)
        decoder.run = run


def check(decoders: dict[str, Decoder]) -> None:
    """Compare the logits of a few steps on equal tokens.

    The bound is loose, since it only has to tell rounding from a wrong cache: a twentieth of the
    logits' spread. Exact bounds are the tests' business.

    Raises:
        WrongResultError: A candidate's logits are not the baseline's.
    """
    (_, baseline), *others = decoders.items()
    for _ in range(CHECKED_STEPS):
        for _, decoder in others:
            decoder.token = baseline.token
        expected = baseline.step().float()
        for name, decoder in others:
            error = (decoder.step().float() - expected).square().mean().sqrt() / expected.std()
            if not error < 0.05:
                raise WrongResultError(f"{name}: logits are off by {error:.3f} of their spread")


def measure(model: PreTrainedModel, context: int, args: argparse.Namespace) -> list[Row]:
    """Measure every candidate at one context length."""
    ids = prompt(context) if args.tiny else long_prompt(context)
    decoders = candidates(model, context, args)
    prefill_all(decoders, model, ids)
    check(decoders)
    timings = interleave({name: d.step for name, d in decoders.items()}, args.steps)
    return [
        Row(context, name, timings[name], kv_bytes(d.cache), d.prefill_seconds)
        for name, d in decoders.items()
    ]


def show(rows: list[Row], console: Console) -> None:
    """Print the rows as a table, ratios over the first candidate of each context."""
    table = Table(title="one decode step")
    table.add_column("context", justify="right")
    table.add_column("candidate", no_wrap=True)
    for column in ("p25 ms", "median ms", "tokens/s", "ratio of p25", "KV MiB"):
        table.add_column(column, justify="right")
    for row in rows:
        baseline = next(r for r in rows if r.context == row.context)
        table.add_row(
            str(row.context),
            row.name,
            f"{row.timing.p25 * 1e3:.2f}",
            f"{row.timing.median * 1e3:.2f}",
            f"{1 / row.timing.p25:.1f}",
            f"{baseline.timing.p25 / row.timing.p25:.2f}",
            f"{row.kv_bytes / 2**20:.1f}",
        )
    console.print(table)


def as_json(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows for a file."""
    return [
        {
            "context": row.context,
            "candidate": row.name,
            "kv_bytes": row.kv_bytes,
            "prefill_s": row.prefill_seconds,
            **row.timing.as_json(),
        }
        for row in rows
    ]


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decode", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024], metavar="TOKENS")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of each candidate")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--inner-backend", default="inductor")
    parser.add_argument("--static", action="store_true", help="also StaticCache + torch.compile")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: a smoke test")
    parser.add_argument("--overhead", action="store_true", help="the backend's own time per token")
    parser.add_argument("--first-token", action="store_true", help="cold and warm starts")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    """Run what the command line asks for."""
    args = parse(arguments)
    console = Console()
    results: dict[str, Any] = {"machine": machine()}
    console.print(", ".join(f"{k} {v}" for k, v in results["machine"].items()))
    dtype = DTYPES[args.dtype]
    model: PreTrainedModel = tiny_llama(dtype=dtype) if args.tiny else load_model(dtype)

    rows: list[Row] = []
    with collect() as graphs:
        for context in args.contexts:
            console.print(f"context {context}: compiling and prefilling", highlight=False)
            rows += measure(model, context, args)
    if rows:
        show(rows, console)
        results["decode"] = as_json(rows)
        results["passes_s"] = [graph.seconds for graph in graphs]
        passes = ", ".join(f"{graph.seconds:.2f}" for graph in graphs)
        console.print(f"seconds in the passes, per compiled graph: {passes}", highlight=False)
    if args.overhead:
        results["overhead"] = measure_overhead(console, steps=args.steps)
    if args.first_token:
        results["first_token"] = measure_first_token(console, tiny=args.tiny, dtype=args.dtype)
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
