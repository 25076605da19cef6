"""Speed of one attention call of a decode step: pages and generated kernel against dense SDPA.

    python -m benchmarks.attention --contexts 1024 8192 32768
    python -m benchmarks.attention --heads 32 8 --head-dim 128 --dtypes bf16 --json out.json

Candidates take turns, call by call, and rotate over the caches of several layers, whose pages lie
in random order. A time is the p25 of single calls. The stream is what a plain sum over memory
reads per second in the same run. Before anything is timed the results are compared; a benchmark
of wrong results is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from benchmarks.decoding import interleave, machine
from kvcompile.codegen.layout import RecordLayout
from kvcompile.runtime import launch
from kvcompile.runtime.arena import Arena
from kvcompile.runtime.store import PagedStore

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STREAM_BYTES = 512 << 20


class WrongResultError(RuntimeError):
    """Kernel and SDPA disagree: their times would mean nothing."""


@dataclass(frozen=True)
class Setting:
    """One attention of one model at one length."""

    dtype: str
    batch: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    page_size: int
    layers: int

    @property
    def cache_bytes(self) -> int:
        """Bytes of K and V that one call has to read."""
        tokens = self.batch * self.context * self.num_kv_heads
        return tokens * 2 * self.head_dim * FORMATS[self.dtype].itemsize


@dataclass(frozen=True)
class Result:
    """What was measured, in microseconds per call; ratios are against SDPA."""

    setting: Setting
    paged_us: float
    sdpa_us: float
    stream_gb_per_s: float

    @property
    def ratio(self) -> float:
        """How many times faster the paged call is."""
        return self.sdpa_us / self.paged_us

    @property
    def stream_share(self) -> float:
        """Share of the stream bandwidth at which the paged call reads K and V."""
        return self.setting.cache_bytes / self.paged_us / 1e3 / self.stream_gb_per_s


@dataclass(frozen=True)
class Layer:
    """One layer's K and V, in pages and dense, and a query."""

    store: PagedStore
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor

    def paged(self) -> torch.Tensor:
        """Attend over the pages."""
        scale = self.q.shape[-1] ** -0.5
        return launch.attend(self.store, self.q, None, False, scale, self.store.length)

    def dense(self) -> torch.Tensor:
        """Attend over the dense tensors as transformers does."""
        return F.scaled_dot_product_attention(self.q, self.k, self.v, enable_gqa=True)


def new_layers(setting: Setting) -> list[Layer]:
    """Return the layers of a model, their pages scattered over one arena."""
    dtype, size = FORMATS[setting.dtype], setting.head_dim
    layout = RecordLayout(setting.dtype, setting.dtype, size, size, setting.page_size)
    arena = Arena(layout.page_bytes(setting.num_kv_heads))
    pages = arena.allocate(
        setting.layers * setting.batch * -(-setting.context // setting.page_size)
    )
    random.Random(0).shuffle(pages)
    arena.release(pages)
    layers = []
    for _ in range(setting.layers):
        shape = (setting.batch, setting.num_kv_heads, setting.context, size)
        k, v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        q = torch.randn(setting.batch, setting.num_q_heads, 1, size).to(dtype)
        store = PagedStore(layout, setting.num_kv_heads, dtype, "cpu", arena, batch=setting.batch)
        store.append(k, v, 0)
        store.commit(setting.context)
        layers.append(Layer(store, k, v, q))
    return layers


def check(layer: Layer) -> None:
    """Compare both candidates.

    Raises:
        WrongResultError: They differ by more than two roundings of the output's dtype.
    """
    paged, dense = layer.paged().float(), layer.dense().float()
    tolerance = 2 * torch.finfo(layer.q.dtype).eps * dense.abs().max().item() + 1e-6
    difference = (paged - dense).abs().max().item()
    if not difference <= tolerance:
        raise WrongResultError(f"kernel and SDPA differ by {difference:.2e} > {tolerance:.2e}")


def rotate(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
    """Return a function that makes the next call of `calls` each time."""
    cycle = itertools.cycle(calls)
    return lambda: next(cycle)()


def measure(setting: Setting, calls: int) -> Result:
    """Time one setting."""
    layers = new_layers(setting)
    check(layers[0])
    stream = torch.ones(STREAM_BYTES // 4)
    timings = interleave(
        {
            "paged": rotate([layer.paged for layer in layers]),
            "sdpa": rotate([layer.dense for layer in layers]),
        },
        calls,
    )
    streamed = interleave({"sum": stream.sum}, 10)["sum"].p25
    return Result(
        setting,
        timings["paged"].p25 * 1e6,
        timings["sdpa"].p25 * 1e6,
        STREAM_BYTES / streamed / 1e9,
    )


def table(results: list[Result]) -> Table:
    """Return the results as a table."""
    shown = Table(title=" ".join(f"{key} {value}" for key, value in machine().items()))
    for column in ("model", "batch", "tokens", "paged us", "SDPA us", "ratio", "of stream"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for result in results:
        setting = result.setting
        shown.add_row(
            f"{setting.dtype} {setting.num_q_heads}q/{setting.num_kv_heads}kv D{setting.head_dim}",
            str(setting.batch),
            str(setting.context),
            f"{result.paged_us:.0f}",
            f"{result.sdpa_us:.0f}",
            f"{result.ratio:.2f}x",
            f"{result.stream_share:.0%}",
        )
    return shown


def main(arguments: Sequence[str] | None = None) -> list[Result]:
    """Measure, print and return the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--dtypes", nargs="+", choices=list(FORMATS), default=["bf16", "fp32"])
    parser.add_argument("--heads", type=int, nargs=2, default=[9, 3], metavar=("Q", "KV"))
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--page-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--calls", type=int, default=80)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    results = [
        measure(
            Setting(
                dtype,
                args.batch,
                args.heads[0],
                args.heads[1],
                args.head_dim,
                context,
                args.page_size,
                args.layers,
            ),
            args.calls,
        )
        for dtype in args.dtypes
        for context in args.contexts
    ]
    Console().print(table(results))
    if args.json:
        rows = [asdict(r) | {"ratio": r.ratio, "stream_share": r.stream_share} for r in results]
        args.json.write_text(json.dumps({"machine": machine(), "results": rows}, indent=2))
    return results


if __name__ == "__main__":
    main()
