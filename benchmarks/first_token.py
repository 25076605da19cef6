"""Time to the first and second token, cold and in a second process, beside plain torch.compile.

Each start is a process of its own. The cold one begins with empty compiler caches in a temporary
folder, the warm one finds what the cold one left there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.arguments import DTYPES
from benchmarks.decoding import new_decoder
from tests.support.smollm2 import load_model, long_prompt
from tests.support.tiny_models import prompt, tiny_llama

BACKENDS = ("kvcompile", "inductor")
PROMPT_TOKENS = 256


def start(backend: str, *, tiny: bool, dtype: torch.dtype) -> dict[str, float]:
    """Compile and decode two tokens in this process; return seconds from the loaded model on."""
    model = tiny_llama(dtype=dtype) if tiny else load_model(dtype)
    ids = prompt(PROMPT_TOKENS) if tiny else long_prompt(PROMPT_TOKENS)
    begin = time.perf_counter()
    decoder = new_decoder(model, torch.compile(model, backend=backend))
    decoder.prefill(ids)
    first = time.perf_counter() - begin
    decoder.step()
    return {"first_s": first, "second_s": time.perf_counter() - begin}


def start_in_a_process(backend: str, caches: Path, *, tiny: bool, dtype: str) -> dict[str, float]:
    """Run `start` in a fresh process with its compiler caches below `caches`."""
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "KVCOMPILE_CACHE_DIR": str(caches / "kernels"),
    }
    command = [sys.executable, "-m", "benchmarks.first_token", backend, dtype, str(int(tiny))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    parsed: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parsed


def measure_first_token(
    console: Console, *, tiny: bool, dtype: str
) -> dict[str, dict[str, dict[str, float]]]:
    """Measure and print cold and warm starts of both backends; return seconds."""
    results: dict[str, dict[str, dict[str, float]]] = {}
    table = Table(title=f"start, prompt of {PROMPT_TOKENS} tokens")
    for column in ("backend", "start", "first token s", "second token s"):
        table.add_column(column)
    for backend in BACKENDS:
        results[backend] = {}
        with tempfile.TemporaryDirectory() as caches:
            for name in ("cold", "warm"):
                console.print(f"{backend}: {name} start", highlight=False)
                times = start_in_a_process(backend, Path(caches), tiny=tiny, dtype=dtype)
                results[backend][name] = times
                row = (f"{times['first_s']:.1f}", f"{times['second_s']:.1f}")
                table.add_row(backend, name, *row)
    console.print(table)
    return results


if __name__ == "__main__":
    _, child_backend, child_dtype, child_tiny = sys.argv
    print(json.dumps(start(child_backend, tiny=child_tiny == "1", dtype=DTYPES[child_dtype])))
