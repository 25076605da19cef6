"""Tokens per second of a whole model on a GPU: random weights in the shape of Llama 3 8B."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from kvcompile import memory_report

STEPS = 64
WARM_UP = 4

WAYS = (("auto", True), ("int8", True), ("int4", True), ("int4", False))
"""Formats, and whether the cache is static and its steps are recorded."""


@dataclass(frozen=True)
class Decoding:
    """One way to decode.

    Attributes:
        name: Which.
        milliseconds: Median time of a step, its argmax included.
        compilations: Graphs that were compiled.
        recordings: How often kvcompile recorded a step.
        kv_bytes: Bytes of the cache.
        error: Of the last step's logits, from those of the first way, over their length.
    """

    name: str
    milliseconds: float
    compilations: int
    recordings: int
    kv_bytes: int
    error: float


def new_model(layers: int, device: torch.device) -> Any:
    """Return a model with random bf16 weights."""
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32768,
        max_position_embeddings=1 << 17,
    )
    with torch.device(device):
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    nn.Module.eval(model)
    nn.Module.requires_grad_(model, False)
    return model


def decode(
    name: str,
    model: Any,
    forward: Callable[..., Any],
    prompt: torch.Tensor,
    new_cache: Callable[[], Any],
    wanted: torch.Tensor | None = None,
) -> tuple[Decoding, torch.Tensor]:
    """Time the steps behind a prompt; return the logits of the last one too.

    The tokens are the same for every way, whatever its logits say.

    Args:
        name: What is timed.
        model: The model, which prefills.
        forward: What decodes.
        prompt: int64 [B, S].
        new_cache: Makes the cache.
        wanted: Logits of the last step [B, V].
    """
    counters.clear()
    cache = new_cache()
    with torch.no_grad():
        cache = model(prompt, past_key_values=cache, logits_to_keep=1).past_key_values
        times = []
        for step in range(WARM_UP + STEPS):
            token = prompt[:, step : step + 1].clone()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            out = forward(token, past_key_values=cache)
            logits, cache = out.logits[:, -1].float(), out.past_key_values
            logits.argmax(-1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        wanted = logits if wanted is None else wanted
        error = float((logits - wanted).norm() / wanted.norm())
    decoding = Decoding(
        name,
        statistics.median(times[WARM_UP:]) * 1e3,
        int(counters["stats"]["unique_graphs"]),
        int(counters["kvcompile"]["recorded steps"]),
        _bytes(cache),
        error,
    )
    return decoding, logits


def _bytes(cache: Any) -> int:
    """Return the bytes of a cache, in pages or dense."""
    paged = memory_report(cache).allocated
    return paged or sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def compare(layers: int, context: int, batch: int, device: torch.device) -> list[Decoding]:
    """Time StaticCache under Inductor with CUDA graphs, and pages of several formats."""
    model = new_model(layers, device)
    prompt = torch.randint(0, 32768, (batch, context), device=device)

    def static() -> Any:
        return StaticCache(config=model.config, max_cache_len=context + WARM_UP + STEPS)

    run = torch.compile(model.forward, mode="reduce-overhead", dynamic=False)
    name = "Inductor, StaticCache, CUDA graphs"
    first, wanted = decode(name, model, run, prompt, static)
    found = [first]
    torch._dynamo.reset()
    for dtype, is_static in WAYS:
        mode = "reduce-overhead" if is_static else None
        options: Any = {"kv_cache_dtype": dtype, "mode": mode}
        paged = torch.compile(model, backend="kvcompile", options=options)
        name = f"kvcompile, {dtype}, {'StaticCache, recorded' if is_static else 'DynamicCache'}"
        new_cache = static if is_static else DynamicCache
        found.append(decode(name, paged, paged, prompt, new_cache, wanted)[0])
        torch._dynamo.reset()
    return found
