"""No dense cache is ever made: neither by a decode step, nor by a static cache."""

import itertools
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

import kvcompile
from tests.support.compiled import compiled, settings
from tests.support.tiny_models import prompt, tiny_llama

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

CONTEXT = 900
DENSE_K = 2 * CONTEXT * 16 * 4
"""Bytes of one layer's dense K: 2 KV heads of 16 channels in fp32."""


def largest_allocation(trace: profile) -> int:
    return max((e.self_cpu_memory_usage for e in trace.events()), default=0)


@torch.no_grad()
@pytest.mark.parametrize("inner_backend", ["eager", "inductor"])
def test_a_decode_step_allocates_nothing_as_large_as_a_layers_k(inner_backend: str) -> None:
    model = tiny_llama(layers=1)
    wrapper = compiled(model, inner_backend=inner_backend)
    cache = DynamicCache(config=model.config)
    wrapper(prompt(CONTEXT), cache=cache, logits_to_keep=1)
    token = torch.tensor([[5]])
    for _ in range(2):
        wrapper(token, cache=cache)
    before = kvcompile.memory_report(cache).allocated
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        for _ in range(8):
            wrapper(token, cache=cache)
    assert kvcompile.memory_report(cache).allocated == before
    assert 0 < largest_allocation(trace) < DENSE_K / 4
    dense = DynamicCache(config=model.config)
    model(prompt(CONTEXT), cache=dense, logits_to_keep=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        model(token, cache=dense)
    assert largest_allocation(trace) >= DENSE_K  # the measure sees it where it is made


@torch.no_grad()
@pytest.mark.parametrize("inner_backend", ["eager", "inductor"])
def test_a_static_cache_never_allocates_its_buffers(inner_backend: str) -> None:
    """The buffers would be 20,000 tokens long; prompt and answer are 12 tokens, or one slab."""
    model = tiny_llama(layers=1)
    arguments = settings(3, cache_implementation="static")
    arguments |= {"max_new_tokens": None, "max_length": 20_000}
    buffer = 2 * 19_999 * 16 * 4

    def stop(ids: torch.Tensor, scores: torch.Tensor, **more: object) -> torch.Tensor:
        return torch.full((len(ids),), ids.shape[1] >= 12, dtype=torch.bool)

    def generate(run: Any) -> Any:
        return run.generate(prompt(9), stopping_criteria=[stop], **arguments)

    def traced(run: Any) -> tuple[Any, int]:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            result = generate(run)
        return result, largest_allocation(trace)

    wrapper = compiled(model, inner_backend=inner_backend)
    generate(wrapper)
    result, largest = traced(wrapper)
    assert largest < buffer
    report = kvcompile.memory_report(result.past_key_values)
    assert report.stored == 11 * 2 * 2 * 16 * 4
    assert not report.materializations
    expected, largest = traced(model)
    assert largest >= buffer  # the measure sees it where it is made
    assert torch.equal(result.sequences, expected.sequences)


def peak_of(trace: profile) -> int:
    """Return the most bytes that were allocated at a time."""
    found: Any = trace.profiler
    events = [e for e in found.kineto_results.events() if e.name() == "[memory]"]
    sizes = [int(event.nbytes()) for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes))


@torch.no_grad()
def test_an_int4_cache_peaks_below_the_dense_cache_alone() -> None:
    """A prompt in chunks and decode steps, with all that is allocated on the way."""
    model = tiny_llama(dtype=torch.bfloat16, head_dim=64, layers=6)

    def run(candidate: Any) -> DynamicCache:
        cache = DynamicCache(config=model.config)
        for chunk in prompt(1024).split(128, dim=1):
            candidate(chunk, cache=cache, logits_to_keep=1)
        candidate(torch.tensor([[5]]), cache=cache)
        return cache

    wrapper = compiled(model, kv_cache_dtype="int4", residual_length=16)
    run(wrapper)
    peaks = []
    for candidate in (model, wrapper):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
            cache = run(candidate)
        peaks.append(peak_of(trace))
    dense = 2 * 6 * 1025 * 2 * 64 * 2  # K and V, layers, tokens, KV heads, channels, bytes
    assert peaks[1] < dense < peaks[0]
    assert kvcompile.memory_report(cache).materializations == {}
