"""What transformers' own caches do with handles in place of their tensors, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, StaticCache

from kvcompile.runtime.arena import Arena
from kvcompile.runtime.claim import claim
from kvcompile.runtime.handle import KVTensor
from kvcompile.runtime.report import handles_in, memory_report
from tests.support.stores import empty_store, new_tokens, push

Cache = Any  # transformers' layers are unions of classes that mypy cannot tell apart here
LAYERS = 2
PROMPT = 37
CONFIG = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=2, hidden_size=16)


def paged(cache: Cache, length: int, capacity: int | None = None) -> Cache:
    """Return a copy of a cache whose tensors are handles."""
    twin = copy.deepcopy(cache)
    arena: Arena | None = None
    for layer in twin.layers:
        store = empty_store(batch=layer.keys.shape[0], capacity=capacity, arena=arena)
        arena = store.arena
        push(store, layer.keys[:, :, :length], layer.values[:, :, :length])
        layer.keys, layer.values = KVTensor.of(store, "k"), KVTensor.of(store, "v")
    return twin


def update(cache: Cache, tokens: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for number, (k, v) in enumerate(tokens):
        cache.update(k.clone(), v.clone(), number)


def assert_same(cache: Cache, twin: Cache) -> None:
    for layer, other in zip(cache.layers, twin.layers, strict=True):
        assert (layer.keys is None) == (other.keys is None)
        if layer.keys is not None:
            assert torch.equal(other.keys, layer.keys)
            assert torch.equal(other.values, layer.values)
    assert cache.get_seq_length() == twin.get_seq_length()


STEPS: dict[str, Callable[[Cache], object]] = {
    "crop": lambda cache: cache.crop(-9),
    "crop to one page": lambda cache: cache.crop(-(cache.get_seq_length() - 16)),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "repeat": lambda cache: cache.batch_repeat_interleave(3),
    "offload": lambda cache: [layer.offload() or layer.prefetch() for layer in cache.layers],
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1])),
}


@pytest.mark.parametrize("second", STEPS)
@pytest.mark.parametrize("first", STEPS)
def test_a_dynamic_cache_stays_in_pages(first: str, second: str) -> None:
    cache: Cache = DynamicCache(config=CONFIG)
    update(cache, [new_tokens(2, PROMPT) for _ in range(LAYERS)])
    twin = paged(cache, PROMPT)
    arena = next(handles_in(twin)).store.arena  # type: ignore[union-attr]
    for name in (first, second):
        if name in ("reorder", "select") and cache.layers[0].keys.shape[0] < 2:
            continue
        for each in (cache, twin):
            STEPS[name](each)
        tokens = [new_tokens(cache.layers[0].keys.shape[0], 2) for _ in range(LAYERS)]
        update(cache, tokens)
        update(twin, tokens)
        for layer in twin.layers:
            assert isinstance(layer.keys, KVTensor)
            assert layer.keys.store is layer.values.store
            assert claim(layer.keys, layer.values) is layer.keys.store
        assert memory_report(twin).materializations == {}
    assert_same(cache, twin)
    copied = copy.deepcopy(twin)
    update(copied, tokens)
    assert_same(cache, twin)
    twin.reset()
    del copied, twin, layer, each
    assert arena.used_pages == 0


def test_a_static_cache_is_written_in_eager_mode_and_reset() -> None:
    cache: Cache = StaticCache(config=CONFIG, max_cache_len=64)
    update(cache, [new_tokens(2, PROMPT) for _ in range(LAYERS)])
    twin = paged(cache, PROMPT, capacity=64)
    assert_same(cache, twin)
    for _ in range(3):
        tokens = [new_tokens(2, 1) for _ in range(LAYERS)]
        update(cache, tokens)
        update(twin, tokens)
        assert_same(cache, twin)
    for each in (cache, twin):
        each.reorder_cache(torch.tensor([1, 0]))
    assert_same(cache, twin)
    for each in (cache, twin):
        each.reset()
    assert_same(cache, twin)
    for layer in twin.layers:
        if isinstance(layer.keys, KVTensor):
            assert claim(layer.keys, layer.values).length == 0
