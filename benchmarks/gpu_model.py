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


@dataclass(frozen=True)
class Decoding:
    """One way to decode.

    Attributes:
        name: Which.
        milliseconds: Median time of a step, its argmax included.
        compilations: Graphs that were compiled.
        kv_bytes: Bytes of the cache.
    """

    name: str
    milliseconds: float
    compilations: int
    kv_bytes: int


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
) -> Decoding:
    """Time the steps behind a prompt.

    Args:
        name: What is timed.
        model: The model, which prefills.
        forward: What decodes.
        prompt: int64 [B, S].
        new_cache: Makes the cache.
    """
    counters.clear()
    cache, length = new_cache(), prompt.shape[1]
    with torch.no_grad():
        positions = torch.arange(length, device=prompt.device)
        out = model(prompt, past_key_values=cache, cache_position=positions, logits_to_keep=1)
        token, cache = out.logits[:, -1:].argmax(-1), out.past_key_values
        times = []
        for step in range(WARM_UP + STEPS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            position = torch.tensor([length + step], device=prompt.device)
            out = forward(token, past_key_values=cache, cache_position=position)
            token, cache = out.logits[:, -1:].argmax(-1).clone(), out.past_key_values
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
    return Decoding(
        name,
        statistics.median(times[WARM_UP:]) * 1e3,
        int(counters["stats"]["unique_graphs"]),
        _bytes(cache),
    )


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
    found = [decode("inductor, StaticCache, CUDA graphs", model, run, prompt, static)]
    torch._dynamo.reset()
    for name in ("auto", "int8", "int4"):
        paged = torch.compile(model, backend="kvcompile", options={"kv_cache_dtype": name})
        label = f"kvcompile, {name}"
        found.append(decode(label, paged, paged, prompt, DynamicCache))
        torch._dynamo.reset()
    return found
