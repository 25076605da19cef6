"""Speed of the products of one decode step: weights read as they lie against packed ones.

    python -m benchmarks.linear
    python -m benchmarks.linear --dtype fp32 --rows 1 4

Every product of a model with its own weights, one after the other, as a step does them: PyTorch's
`linear`, oneDNN's on weights packed beforehand, as Inductor's freezing has them, and the kernel of
`codegen.cpu.linear`. All take turns; a time is the p25 of whole steps. Before anything is timed,
results are compared.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence

import torch
from rich.table import Table
from torch.nn import functional as F

from benchmarks.arguments import DTYPES, begin
from benchmarks.timing import interleave
from kvcompile.runtime.linear import linear

LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]
"""Outputs and inputs of the products of a layer of SmolLM2-135M."""
HEAD = (49152, 576)
LAYERS = 30

Product = Callable[[torch.Tensor], torch.Tensor]


def products(weights: Sequence[torch.Tensor], rows: int) -> dict[str, list[Product]]:
    """Return each way to multiply `rows` rows with every weight."""
    ways: dict[str, list[Product]] = {
        "PyTorch": [functools.partial(F.linear, weight=w, bias=None) for w in weights],
        "as they lie": [functools.partial(linear, weight=w, bias=None) for w in weights],
    }
    # oneDNN packs no other dtype of these, and this one only for CPUs with AVX-512.
    if weights[0].dtype is torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        ways["oneDNN, packed"] = [_packed(w, rows) for w in weights]
    return ways


def _packed(weight: torch.Tensor, rows: int) -> Product:
    held = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.ops.mkldnn._linear_pointwise(x, held, None, "none", [], "")
        assert isinstance(out, torch.Tensor)
        return out

    return product


def check(ways: dict[str, list[Product]], inputs: Sequence[torch.Tensor]) -> None:
    """Compare the results of all ways.

    Raises:
        RuntimeError: They are not the same product.
    """
    for index, x in enumerate(inputs):
        expected, *others = (way[index](x).float() for way in ways.values())
        for found in others:
            if (found - expected).abs().max() > 0.02 * expected.abs().max():
                raise RuntimeError(f"product {index} is not the same")


@torch.no_grad()
def main(argv: Sequence[str] | None = None) -> None:
    """Print the milliseconds that the products of a step take.

    Args:
        argv: The command line.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bf16")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 9, 12])
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of each way")
    parser.add_argument("--threads", type=int, help="of PyTorch and of the kernel")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    console, _ = begin()
    dtype = DTYPES[options.dtype]
    shapes = LAYER * options.layers + [HEAD]
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    table = Table("rows", title=f"{len(shapes)} products, {options.dtype}: p25 ms")
    for number, rows in enumerate(options.rows):
        ways = products(weights, rows)
        inputs = [torch.randn(rows, w.shape[1]).to(dtype) for w in weights]
        check(ways, inputs)

        def step(way: list[Product], inputs: list[torch.Tensor] = inputs) -> None:
            for product, x in zip(way, inputs, strict=True):
                product(x)

        steps = {name: functools.partial(step, way) for name, way in ways.items()}
        timings = interleave(steps, options.steps)
        if not number:
            for name in timings:
                table.add_column(name, justify="right")
        table.add_row(str(rows), *(f"{timing.p25 * 1e3:.1f}" for timing in timings.values()))
    console.print(table)


if __name__ == "__main__":
    main()
