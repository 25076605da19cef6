"""What the backend itself costs per token: guards, handles, page bookkeeping and launches.

Measured on a model as deep as a real one and too narrow to compute anything: the compiled decode
step on a cache, less the same layers compiled by Inductor on one token without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from benchmarks.decoding import paged_decoder
from benchmarks.timing import interleave
from kvcompile.format_requests import FormatRequest
from tests.support.tiny_models import prompt, tiny_llama

LAYERS = 30


def measure_overhead(
    console: Console, requests: Sequence[FormatRequest], *, steps: int
) -> dict[str, Any]:
    """Measure and print the milliseconds per token of a 30-layer model; return them.

    Args:
        console: Where to print.
        requests: Formats of the cache.
        steps: Timed steps; at least 48 are made.
    """
    torch._dynamo.reset()
    model = tiny_llama(layers=LAYERS)
    console.print(f"overhead: compiling a narrow model of {LAYERS} layers", highlight=False)
    decoders = {r.label: paged_decoder(model, f"overhead_{r.label}", r.options) for r in requests}
    for decoder in decoders.values():
        decoder.prefill(prompt(32))
    bare: Any = torch.compile(tiny_llama(layers=LAYERS))
    token = prompt(1)

    @torch.no_grad()
    def bare_step() -> None:
        bare(token, use_cache=False)

    paged = {label: decoder.step for label, decoder in decoders.items()}
    timings = interleave({**paged, "": bare_step}, max(steps, 48))
    without = timings.pop("").p25 * 1e3
    with_cache = {label: timing.p25 * 1e3 for label, timing in timings.items()}
    for label, milliseconds in with_cache.items():
        console.print(
            f"{label}: p25 of a step with the cache {milliseconds:.2f} ms, without "
            f"{without:.2f} ms; the backend's own time {milliseconds - without:.2f} ms per token",
            highlight=False,
        )
    return {"with_cache_ms": with_cache, "without_ms": without}
