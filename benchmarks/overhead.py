"""What the backend itself costs per token: guards, handles, page bookkeeping and launches.

Measured on a model as deep as a real one and too narrow to compute anything: the compiled decode
step on a cache, less the same layers compiled by Inductor on one token without a cache.
"""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from benchmarks.decoding import interleave, new_decoder
from tests.support.tiny_models import prompt, tiny_llama

LAYERS = 30


def measure_overhead(console: Console, *, steps: int) -> dict[str, float]:
    """Measure and print the milliseconds per token of a 30-layer model; return them."""
    torch._dynamo.reset()
    model = tiny_llama(layers=LAYERS)
    console.print(f"overhead: compiling a narrow model of {LAYERS} layers", highlight=False)
    paged = new_decoder(model, torch.compile(model, backend="kvcompile"))
    paged.prefill(prompt(32))
    bare: Any = torch.compile(tiny_llama(layers=LAYERS))
    token = prompt(1)

    @torch.no_grad()
    def bare_step() -> None:
        bare(token, use_cache=False)

    timings = interleave({"paged": paged.step, "bare": bare_step}, max(steps, 48))
    with_cache, without = timings["paged"].p25 * 1e3, timings["bare"].p25 * 1e3
    console.print(
        f"p25 of a step: with the cache {with_cache:.2f} ms, without {without:.2f} ms; "
        f"the backend's own time {with_cache - without:.2f} ms per token",
        highlight=False,
    )
    return {"with_cache_ms": with_cache, "without_ms": without}
