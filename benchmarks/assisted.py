"""Speculative decoding of a whole model: prompt lookup, unmodified against compiled.

    python -m benchmarks.assisted --context 4096 --formats auto,int4
    python -m benchmarks.assisted --tiny --context 64 --new-tokens 16 --turns 1

A step verifies several guessed tokens at once; those that are wrong are cropped from the cache. The
candidates take turns; a turn is one call of `generate`, timed from the first new token to the last,
so that the prompt is not in it. Compilations are counted once prompts of two other lengths and one
turn have been through.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

import kvcompile
from benchmarks.arguments import DTYPES, add_formats, add_json, begin, formats_of, write_json
from benchmarks.decode_candidates import EAGER, PREFILL_CHUNK, WrongResultError
from benchmarks.decoding import kv_bytes
from benchmarks.timing import Timing
from tests.support.smollm2 import load_model, long_prompt
from tests.support.tiny_models import prompt, tiny_llama

WARM_UP_LENGTHS = (40, 90)
"""Tokens of the prompts that compile whatever there is to compile."""

LOOKUP = ", prompt lookup"
GRAPHS_OF_ALL = 64
"""All candidates compile one function, and Dynamo gives up after eight graphs of one."""


class _Clock(BaseStreamer):
    """Hears of the prompt, and then of the tokens of every step."""

    def __init__(self) -> None:
        self.heard: list[tuple[float, int]] = []

    def put(self, value: torch.Tensor) -> None:
        """Note when tokens came, and how many."""
        self.heard.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """Nothing more comes."""

    def seconds_per_token(self) -> float:
        """Return the time of a token behind those of the first step."""
        (start, _), *rest = self.heard[1:]
        return (rest[-1][0] - start) / sum(tokens for _, tokens in rest)

    def tokens_per_step(self) -> float:
        """Return how many tokens a step behind the first one brought."""
        steps = [tokens for _, tokens in self.heard[2:]]
        return sum(steps) / len(steps)


@dataclass
class Run:
    """One candidate.

    Attributes:
        name: Name in the table.
        run: The model or a wrapper of it.
        arguments: Of `generate`.
        seconds: Per token, of each turn.
        tokens: What was generated last.
        per_step: Tokens that a step brought in the last turn.
        cache: The last cache.
        compilations: Graphs that its turns compiled.
    """

    name: str
    run: Any
    arguments: dict[str, Any]
    seconds: list[float] = field(default_factory=list)
    tokens: tuple[int, ...] = ()
    per_step: float = 1.0
    cache: Any = None
    compilations: int = 0

    def warm_up(self, ids: torch.Tensor) -> None:
        """Generate after prompts of other lengths, and once what will be timed."""
        for length in WARM_UP_LENGTHS:
            self.turn(ids[:, :length].repeat(1, 2))
        self.turn(ids)
        self.seconds.clear()
        self.compilations = 0

    def turn(self, ids: torch.Tensor) -> None:
        """Generate from a prompt, int64 [1, S]."""
        before, clock = counters["stats"]["unique_graphs"], _Clock()
        self.cache = None
        result = self.run.generate(ids, streamer=clock, **self.arguments)
        self.compilations += counters["stats"]["unique_graphs"] - before
        self.seconds.append(clock.seconds_per_token())
        self.per_step = clock.tokens_per_step()
        self.tokens, self.cache = tuple(result.sequences[0, ids.shape[1] :].tolist()), result.cache


def measure(
    model: PreTrainedModel, args: argparse.Namespace, requests: list[Any], console: Console
) -> list[dict[str, Any]]:
    """Time every candidate; return their figures.

    Raises:
        WrongResultError: A cache was made dense, or an exact one gave other tokens.
    """
    torch._dynamo.reset()
    ids = prompt(args.context // 2).repeat(1, 2) if args.tiny else long_prompt(args.context)
    plain: dict[str, Any] = {
        "max_new_tokens": args.new_tokens,
        "min_new_tokens": args.new_tokens,
        "do_sample": False,
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "prefill_chunk_size": PREFILL_CHUNK if args.context > PREFILL_CHUNK else None,
    }
    # Assisted decoding takes its prompt at once.
    lookup = plain | {"prompt_lookup_num_tokens": args.guesses, "prefill_chunk_size": None}
    runs = [Run(f"{EAGER}{how}", model, kw) for how, kw in (("", plain), (LOOKUP, lookup))]
    for request in requests:
        wrapper = torch.compile(model, backend="kvcompile", options=dict(request.options))
        for how, arguments in (("", plain), (LOOKUP, lookup)):
            runs.append(Run(f"kvcompile, {request.label}{how}", wrapper, arguments))
    for run in runs:
        console.print(f"{run.name}: warming up")
        run.warm_up(ids)
    order = list(runs)
    for turn in range(args.turns):
        console.print(f"turn {turn + 1} of {args.turns}")
        random.Random(turn).shuffle(order)
        for run in order:
            run.turn(ids)
    baseline = runs[1]
    rows: list[dict[str, Any]] = []
    for run in runs:
        made_dense = dict(kvcompile.memory_report(run.cache).materializations)
        if made_dense:
            raise WrongResultError(f"{run.name}: the cache was made dense for {made_dense}")
        same = sum(a == b for a, b in zip(run.tokens, baseline.tokens, strict=True))
        if same < args.new_tokens and args.dtype == "fp32" and "auto" in run.name:
            raise WrongResultError(f"{run.name}: {same} of {args.new_tokens} tokens are the same")
        timing = Timing(tuple(sorted(run.seconds)))
        rows.append(
            {
                "candidate": run.name,
                "tokens_per_s": 1 / timing.median,
                "times_as_fast": statistics.median(baseline.seconds) / timing.median,
                "tokens_per_step": run.per_step,
                "compilations": run.compilations,
                "kv_bytes": kv_bytes(run.cache),
                "same_tokens": same,
                **timing.as_json(),
            }
        )
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """Return the figures as a table."""
    found = Table(title=title)
    for column in (
        "candidate",
        "tokens/s",
        "times as fast",
        "tokens/step",
        "compilations",
        "KV MiB",
        "same tokens",
    ):
        found.add_column(column, justify="left" if column == "candidate" else "right")
    for row in rows:
        found.add_row(
            row["candidate"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['times_as_fast']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            str(row["compilations"]),
            f"{row['kv_bytes'] / 2**20:.1f}",
            str(row["same_tokens"]),
        )
    return found


def main(arguments: list[str]) -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.assisted", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--context", type=int, default=4096, metavar="TOKENS")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--guesses", type=int, default=8, help="tokens guessed at most per step")
    parser.add_argument("--turns", type=int, default=5, help="timed generations of each candidate")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--inner-backend", default="inductor", help="for every format")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model: a smoke test")
    add_formats(parser, "auto,int4")
    add_json(parser)
    args = parser.parse_args(arguments)
    requests = formats_of(parser, args, {"inner_backend": args.inner_backend})
    console, found = begin()
    dtype = DTYPES[args.dtype]
    model: PreTrainedModel = tiny_llama(dtype=dtype) if args.tiny else load_model(dtype)
    with torch._dynamo.config.patch(recompile_limit=GRAPHS_OF_ALL):
        rows = measure(model, args, requests, console)
    title = f"{args.new_tokens} tokens after {args.context:,}, {args.dtype}, medians"
    console.print(table(rows, title))
    if args.json is not None:
        write_json(args.json, {"machine": found, "assisted": rows})


if __name__ == "__main__":
    main(sys.argv[1:])
