"""Decoding step by step, timed: what the demonstration and the benchmarks share."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

import kvcompile

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WARM_UP_STEPS = 4


@dataclass
class Decoder:
    """One sequence being decoded greedily.

    Attributes:
        run: The model or a compiled wrapper of it.
        cache: The cache that grows.
        token: The last token, int64 [1, 1]; not in the cache yet.
        prefill_seconds: Time of the whole prefill, compilation included.
    """

    run: Any
    cache: Cache
    token: torch.Tensor = field(default_factory=lambda: torch.zeros(1, 1, dtype=torch.int64))
    prefill_seconds: float = 0.0

    @torch.no_grad()
    def prefill(self, ids: torch.Tensor, *, chunk: int | None = None) -> None:
        """Feed a prompt, int64 [1, S]; `chunk` tokens at a time, which bounds the memory."""
        start = time.perf_counter()
        for part in ids.split(chunk or ids.shape[1], dim=1):
            logits = self.run(part, cache=self.cache, logits_to_keep=1).logits
        self.token = logits[:, -1:].argmax(-1)
        self.prefill_seconds = time.perf_counter() - start

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """Decode one token; return its logits [1, 1, vocabulary]."""
        logits = self.run(self.token, cache=self.cache, logits_to_keep=1).logits
        self.token = logits.argmax(-1)
        assert isinstance(logits, torch.Tensor)
        return logits


def new_decoder(model: PreTrainedModel, run: Any) -> Decoder:
    """Return a decoder with an empty `DynamicCache`."""
    return Decoder(run, DynamicCache(config=model.config))


def kv_bytes(cache: Cache) -> int:
    """Return the bytes a cache holds: of its pages, or of its dense tensors."""
    if paged := int(kvcompile.memory_report(cache).allocated):
        return paged
    states = [getattr(layer, name) for layer in cache.layers for name in ("keys", "values")]
    return sum(int(state.nbytes) for state in states)


@dataclass(frozen=True)
class Timing:
    """Times of single steps, seconds, sorted."""

    seconds: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """Return the time that a share `q` of the steps did not exceed."""
        return self.seconds[min(int(q * len(self.seconds)), len(self.seconds) - 1)]

    @property
    def p25(self) -> float:
        """A low quantile: noise of a shared machine only ever adds time."""
        return self.quantile(0.25)

    @property
    def median(self) -> float:
        """The usual step."""
        return self.quantile(0.5)

    def as_json(self) -> dict[str, float]:
        """Return milliseconds, for a file."""
        return {"p25_ms": self.p25 * 1e3, "median_ms": self.median * 1e3}


def interleave(steps: Mapping[str, Callable[[], object]], count: int) -> dict[str, Timing]:
    """Time several candidates in one process, taking turns step by step.

    Args:
        steps: What to run, by name. Each is warmed up first.
        count: Timed steps of each.
    """
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(WARM_UP_STEPS + count):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= WARM_UP_STEPS:
                times[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(sorted(values))) for name, values in times.items()}


def machine() -> dict[str, str]:
    """Return what a figure must be read with: processor, threads, versions."""
    info = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (info.read_text().splitlines() if info.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "cpu": names[0] if names else platform.processor(),
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "kvcompile": kvcompile.__version__,
    }
