"""What a bias of the keys costs a quantized cache, with its turning mean kept apart and without.

    python -m benchmarks.k_bias --sizes 0.1 3 12 40 100
    python -m benchmarks.k_bias --sizes 40 --head-dim 128

A tiny random Qwen2: its text is noise, but its divergence from its own exact cache is as real as
any. 400 tokens fill the cache, 40 more are given one by one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.table import Table
from transformers import DynamicCache

from benchmarks.arguments import begin
from kvcompile.options import CacheOptions
from tests.support.tiny_models import prompt, tiny_qwen2

FORMATS = ("int8", "fp8", "int4", "int2")


@torch.no_grad()
def log_probabilities(config: Any, model: Any) -> torch.Tensor:
    """Return those of the tokens after a prompt, read from the cache, [1, 40, vocabulary]."""
    cache = DynamicCache(config=config)
    model(prompt(400), past_key_values=cache)
    steps = prompt(40, seed=1).split(1, 1)
    logits = [model(token, past_key_values=cache).logits for token in steps]
    return torch.cat(logits, 1).log_softmax(-1)


def divergence(size: float, head_dim: int, dtype: str, *, separate: bool) -> float:
    """Return the mean KL divergence of a model from itself with an exact cache.

    Args:
        size: Standard deviation of the biases of K.
        head_dim: Channels of a head.
        dtype: Format of the cache.
        separate: Whether the turning mean is kept apart.
    """
    torch._dynamo.reset()
    model = tiny_qwen2(k_bias=size, head_dim=head_dim)
    exact = log_probabilities(model.config, model)
    options = CacheOptions(kv_cache_dtype=dtype, separate_k_bias=separate, inner_backend="eager")
    compiled = torch.compile(model, backend="kvcompile", options=vars(options))
    other = log_probabilities(model.config, compiled)
    return float((exact.exp() * (exact - other)).sum(-1).mean())


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sizes", type=float, nargs="+", default=[0.1, 3.0, 12.0, 40.0, 100.0])
    parser.add_argument("--head-dim", type=int, default=16)
    args = parser.parse_args(arguments)
    console, _ = begin()
    table = Table(title="KL divergence by the size of K's bias: kept apart / quantized with K")
    for column in ("bias", *FORMATS):
        table.add_column(column, justify="right")
    for size in args.sizes:
        cells = []
        for dtype in FORMATS:
            apart, within = (
                divergence(size, args.head_dim, dtype, separate=s) for s in (True, False)
            )
            cells.append(f"{apart:.4f} / {within:.4f}")
        table.add_row(f"{size:g}", *cells)
    console.print(table)


if __name__ == "__main__":
    main(sys.argv[1:])
