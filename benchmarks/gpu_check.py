"""Everything about a GPU in six minutes: are kernels right and fast, what do models gain.

    KVCOMPILE_TARGET=gpu python -m benchmarks.gpu_check --json gpu.json

Needs one NVIDIA GPU, no network. Cases of correctness run side by side in processes of their own,
because compiling a kernel takes longer than running it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks import gpu_correctness, gpu_model, gpu_speed
from benchmarks.arguments import write_json
from kvcompile.machine import machine

LENGTHS = ((8192, 8), (32768, 4), (131072, 1))
"""Tokens, and rows of the batch."""

PARTS = ("correctness", "speed", "model")


def main() -> None:
    """Run the parts that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument("--layers", type=int, default=8, help="layers of the model (8B has 32)")
    parser.add_argument("--context", type=int, default=8192, help="tokens before the first step")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU")
    os.environ["KVCOMPILE_TARGET"] = "gpu"
    device = torch.device("cuda", 0)
    console = Console()
    gpu = torch.cuda.get_device_name(device)
    found: dict[str, Any] = {"machine": machine(), "gpu": gpu}
    runs: dict[str, Callable[[], object]] = {
        "correctness": lambda: _correctness(console),
        "speed": lambda: _speed(console, device),
        "model": lambda: _model(console, device, args.layers, args.context),
    }
    for part in args.parts:
        begin = time.perf_counter()
        try:
            found[part] = runs[part]()
        except Exception as error:  # one part's failure must not cost the figures of the others
            console.print_exception()
            found[part] = {"failed": repr(error)}
        found[f"{part}_seconds"] = time.perf_counter() - begin
        if args.json is not None:
            write_json(args.json, found)


def _check(number: int) -> dict[str, Any]:
    case = gpu_correctness.cases()[number]
    try:
        found = gpu_correctness.check(case, torch.device("cuda", 0))
        found["is_right"] = gpu_correctness.is_right(case, found)
    except Exception as error:  # the other cases are still of interest
        found = {"is_right": False, "failed": repr(error)[:500]}
    return {"case": str(case), **found}


def _correctness(console: Console) -> list[dict[str, Any]]:
    cases = gpu_correctness.cases()
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(_check, number) for number in range(len(cases))]
        for done, _ in enumerate(as_completed(futures), 1):
            console.print(f"{done} of {len(cases)} cases", end="\r")
        found = [future.result() for future in futures]
    table = Table(title="kernels against plain torch and float64")
    for name in ("case", "bytes", "gather", "roundings", "right"):
        table.add_column(name)
    for row in found:
        roundings = f"{row['roundings']:.2f}" if "roundings" in row else row["failed"]
        cells = (str(row.get("bytes_equal", "")), str(row.get("gather_equal", "")), roundings)
        table.add_row(row["case"], *cells, str(row["is_right"]))
    console.print(table)
    return found


def _speed(console: Console, device: torch.device) -> dict[str, Any]:
    bandwidth = gpu_speed.copy_bandwidth(device)
    console.print(f"copying: {bandwidth:.0f} GB/s, reads and writes together")
    table = Table(title=f"{gpu_speed.HEADS} KV heads, {gpu_speed.GROUP} query heads each, D128")
    for name in ("tokens", "batch", "candidate", "us", "GB/s", "of copying", "over SDPA"):
        table.add_column(name, justify="left" if name == "candidate" else "right")
    rows = []
    for tokens, batch in LENGTHS:
        speeds = gpu_speed.attention_speeds(tokens, batch, device)
        speeds.append(gpu_speed.latent_speed(tokens, batch, device))
        torch.cuda.empty_cache()
        for speed in speeds:
            rate = speed.gigabytes_per_second
            over = speeds[0].microseconds / speed.microseconds
            rows.append({"tokens": tokens, "batch": batch, **asdict(speed), "gb_per_s": rate})
            table.add_row(
                f"{tokens:,}",
                str(batch),
                speed.name,
                f"{speed.microseconds:.1f}",
                f"{rate:.0f}",
                f"{rate / bandwidth:.0%}",
                f"{over:.2f}",
            )
    console.print(table)
    return {"copy_gb_per_s": bandwidth, "rows": rows}


def _model(console: Console, device: torch.device, layers: int, context: int) -> Any:
    found = gpu_model.compare(layers, context, 1, device)
    table = Table(title=f"Llama 8B's shape, {layers} layers, {context:,} tokens of context")
    for name in (
        "candidate",
        "ms per step",
        "tokens/s",
        "compilations",
        "recordings",
        "KV MiB",
        "error",
    ):
        table.add_column(name, justify="left" if name == "candidate" else "right")
    for row in found:
        table.add_row(
            row.name,
            f"{row.milliseconds:.2f}",
            f"{1e3 / row.milliseconds:.1f}",
            str(row.compilations),
            str(row.recordings),
            f"{row.kv_bytes / 2**20:.1f}",
            f"{row.error:.4f}",
        )
    console.print(table)
    return [asdict(row) for row in found]


if __name__ == "__main__":
    main()
