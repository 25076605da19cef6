"""Speed of one attention call of a decode step: pages and generated kernels against dense SDPA.

    python -m benchmarks.attention --quick
    python -m benchmarks.attention --json attention.json --plot attention.png
    python -m benchmarks.attention --shapes 32/8/128 --contexts 8192 --formats auto,k8v4,int2

All candidates of a setting take turns, four calls at a time and in an order drawn anew for each
turn. Each rotates over the caches of several layers (30, or as many as have 512 MiB of dense K and
V), so that K and V come from memory; pages lie in random order. A time is the p25 of single calls:
as in a decode step, where every layer makes the call, a call finds the code of the one before it in
the processor's caches. The first of a turn does not; that costs any candidate 0.1 ms.

Beside dense SDPA, of the model's dtype and of fp32, there are the steps that a cache in pages
replaces: `cat` of the new token and SDPA, as `DynamicCache` does; decoding a packed cache and SDPA,
as `QuantizedCache` does; and flex_attention, compiled. The stream is what a plain sum over memory
reads per second in the same turns. Arenas ask for memory pages of 2 MiB, and so does the stream;
PyTorch's tensors do not. The stream is one long run; how fast these pages can be read in the order
of the block table is what `only read` measures: all their bytes, and nothing computed.

Before anything is timed, results are compared; a benchmark of wrong results is refused.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.arguments import (
    DTYPES,
    add_formats,
    add_outputs,
    begin,
    check_outputs,
    formats_of,
    write_json,
)
from benchmarks.attention_candidates import (
    STREAM_BYTES,
    append_name,
    dense_candidates,
    memory_needed,
    packed_candidates,
    paged_candidates,
    rotating,
    wide_candidates,
)
from benchmarks.attention_results import Figures, Result, panel_of, plot, tables
from benchmarks.stores import PagedFormat, Setting, Shape, new_dense, paged_format, with_mean
from benchmarks.timing import busy_cores, describe, interleave
from kvcompile.options import OptionError
from kvcompile.runtime.arena import Arena

CALLS_IN_A_ROW = 4
COMPILED_AT = (1, 8192)
"""Batch and tokens of the one setting where the slow compilers take part."""


def new_stream() -> torch.Tensor:
    """Return memory to be summed up, as an arena has it."""
    memory = Arena(STREAM_BYTES)
    (page,) = memory.allocate(1)
    return memory.page(page).view(torch.float32).fill_(1)


@torch.no_grad()
def measure(
    setting: Setting, formats: Sequence[PagedFormat], args: argparse.Namespace, *, compiled: bool
) -> Result:
    """Time one setting."""
    torch.manual_seed(0)
    layers = new_dense(setting)
    groups = [list(dense_candidates(layers, compiled=compiled)), list(wide_candidates(layers))]
    groups += [list(packed_candidates(layers, bits, compiled=compiled)) for bits in args.dequantize]
    groups += [list(paged_candidates(setting, paged, layers)) for paged in formats]
    steps = rotating(groups)
    steps["stream"] = new_stream().sum
    timings = interleave(
        steps, args.turns, warm_up=2, seconds=args.seconds, in_a_row=CALLS_IN_A_ROW
    )
    figures = {
        candidate.name: Figures(
            candidate.name,
            timings[candidate.name],
            candidate.nbytes,
            timings.get(append_name(candidate)),
            candidate.bound,
        )
        for group in groups
        for candidate in group
    }
    return Result(setting, figures, STREAM_BYTES / timings["stream"].p25)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """Return what is to be measured."""
    return [
        Setting(shape, args.dtype, batch, context)
        for shape in args.shapes
        for batch in args.batches
        for context in args.contexts
    ]


def is_compiled(setting: Setting, settings: Sequence[Setting], which: str) -> bool:
    """Whether flex_attention and a compiled dequantization take part.

    Args:
        setting: The setting.
        settings: All that are measured.
        which: `none`, `all`, or `one`: the first of batch 1 and 8,192 tokens.
    """
    if which == "one":
        first = (s for s in settings if (s.batch, s.context) == COMPILED_AT)
        return setting == next(first, None)
    return which == "all"


def shape(text: str) -> Shape:
    """Parse a shape for argparse."""
    try:
        return Shape.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def new_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=[Shape(9, 3, 64), Shape(32, 8, 128)],
        metavar="H/K/D",
        help="query heads, KV heads and channels of a head: 9/3/64 32/8/128",
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768, 131072])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of the dense K and V")
    add_formats(parser, "auto,int8,int4,int2")
    parser.add_argument(
        "--computes",
        nargs="+",
        choices=("int8", "fp32"),
        default=["int8", "fp32"],
        help="ways of multiplying quantized numbers, as far as a format has them",
    )
    parser.add_argument(
        "--k-bias",
        action="store_true",
        help="also quantized K that keeps the mean of a turning bias apart",
    )
    parser.add_argument(
        "--dequantize",
        type=int,
        nargs="*",
        choices=(8, 4),
        default=[8, 4],
        help="bits of the caches that are decoded before SDPA",
    )
    parser.add_argument(
        "--compiled",
        choices=("none", "one", "all"),
        default="one",
        help="settings with flex_attention and a compiled decoding, which take long to compile; "
        "one is the first of batch 1 and 8,192 tokens",
    )
    parser.add_argument("--turns", type=int, default=80, help="most turns of each candidate")
    parser.add_argument("--seconds", type=float, default=20.0, help="most time of one setting")
    parser.add_argument("--memory", type=float, default=10.0, help="most GiB of one setting")
    parser.add_argument("--threads", type=int, help="of PyTorch and of the kernels")
    parser.add_argument("--quick", action="store_true", help="one shape at 8,192 tokens: a minute")
    add_outputs(parser)
    return parser


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, dict[Setting, list[PagedFormat]]]:
    """Return the arguments, and the formats of every setting; refuse what cannot be measured."""
    parser = new_parser()
    args = parser.parse_args(arguments)
    if args.quick:
        args.shapes, args.contexts, args.batches = args.shapes[:1], [8192], [1]
        args.compiled = "none"
    check_outputs(parser, args)
    requests = formats_of(parser, args, {})
    settings = {}
    try:
        for setting in settings_of(args):
            settings[setting] = [
                paged_format(request, setting.shape, setting.torch_dtype, args.computes)
                for request in requests
            ]
            if args.k_bias:
                settings[setting] += [
                    with_mean(paged)
                    for paged in settings[setting]
                    if paged.layout.format("k").is_grouped
                ]
    except OptionError as error:
        parser.error(str(error))
    return args, settings


def main(arguments: Sequence[str]) -> None:
    """Measure and print what the command line asks for."""
    args, settings = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    console, found = begin()
    results: list[Result] = []
    for title, panel in itertools.groupby(settings, panel_of):
        for setting in panel:
            needed = memory_needed(setting, settings[setting], args.dequantize) / 2**30
            if needed > args.memory:
                console.print(f"{setting}: skipped, it needs {needed:.1f} GiB; see --memory")
                continue
            console.print(f"{setting}: calls rotate over {setting.layers} layers")
            compiled = is_compiled(setting, list(settings), args.compiled)
            results.append(measure(setting, settings[setting], args, compiled=compiled))
            if args.json is not None:
                # After each setting: a long run that is stopped has not run for nothing.
                write_json(args.json, as_json(results, found))
        measured = [result for result in results if panel_of(result.setting) == title]
        for table in tables(title, measured):
            console.print(table)
    if args.plot is not None:
        plot(results, describe(found), args.plot)


def as_json(results: Sequence[Result], found: Mapping[str, str]) -> dict[str, Any]:
    """Return everything for a file."""
    return {
        "machine": {**found, "busy cores after": f"{busy_cores():.2f}"},
        "results": [result.as_json() for result in results],
    }


if __name__ == "__main__":
    main(sys.argv[1:])
